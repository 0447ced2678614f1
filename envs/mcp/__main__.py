"""Runs one of the MCP servers over standard input and output, or tries those that tasks name."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from envs.mcp import fetch, files, search
from envs.mcp.check import check
from envs.mcp.errors import RefusedError
from envs.tasks.clawgym import TaskError, folders

_SERVERS = {"search": search, "fetch": fetch, "files": files}
_EXAMPLES = """examples:
  python -m envs.mcp search --corpus docs             search and read the text files of a folder
  python -m envs.mcp fetch --allow docs.example.org   fetch pages of one host
  python -m envs.mcp files --folder notes             list and read the files of a folder
  python -m envs.mcp search --help                    all options of one of them
  python -m envs.mcp check DIR                        start the servers that tasks name and list their tools

A task names servers in the field "mcp" of its data_entry.json; see envs/mcp/spec.py.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m envs.mcp",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in _SERVERS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    checking = commands.add_parser("check", help="try the servers of task folders; exit code 1 if one fails")
    checking.add_argument("places", nargs="+", type=Path, metavar="DIR", help="a task folder, or a folder of them")
    arguments = parser.parse_args()
    if arguments.command == "check":
        try:
            found = [folder for place in arguments.places for folder in folders(place)]
        except TaskError as error:
            print(error, file=sys.stderr)
            return 2
        return asyncio.run(check(found))
    try:
        server = _SERVERS[arguments.command].make(arguments)
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 2
    server.run("stdio")
    return 0


if __name__ == "__main__":
    sys.exit(main())
