"""Lists the harnesses that ``harness.name`` can be, and installs those that are programs of others."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from configs.harness import HarnessConfig
from configs.loader import ConfigError, load
from envs.harnesses.check import check_harness
from envs.harnesses.external.adapters import ADAPTERS
from envs.harnesses.external.install import InstallError, install, version
from envs.harnesses.external.releases import FOLDER_VARIABLE, missing, releases, root
from envs.harnesses.registry import HARNESSES, harness
from envs.sandbox.base import Limits, SandboxError
from envs.sandbox.create import BACKENDS, Backend

_EXAMPLES = f"""examples:
  python -m envs.harnesses                        what there is, and what of it is installed
  python -m envs.harnesses install                install all, in the versions of versions.json
  python -m envs.harnesses install codex --into D  install one of them under the folder D
  python -m envs.harnesses check codex            start it once and compare its version
  python -m envs.harnesses check codex --episode  run it against a scripted model API: does its adapter keep its word?
  python -m envs.harnesses check command --episode --config my.yaml    the same for a harness given in settings

The folder is that of --into, else of the environment variable {FOLDER_VARIABLE}, else ~/.cache/reins/harnesses.
"""


def _list() -> int:
    known = releases()
    for name, make in HARNESSES.items():
        if name not in ADAPTERS:
            print(f"{name:16} {'built in':24} {(make(HarnessConfig()).__doc__ or '').splitlines()[0]}")
            continue
        lacking = any(missing(known[part]) for part in (*known[name].needs, name))
        state = "missing" if lacking else "installed"
        print(f"{name:16} {known[name].version:12}{state:12} {(ADAPTERS[name].__doc__ or '')}")
    print(f"programs are looked for in {root()}; `python -m envs.harnesses install NAME` puts one there")
    return 0


def _install(names: Sequence[str], again: bool) -> int:
    console = Console()
    console.print(f"installing into {root()}: {', '.join(names)}", highlight=False)
    try:
        with console.status("") as status:
            install(names, say=lambda text: console.print(text, highlight=False), show=status.update, again=again)
    except (InstallError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return _check(names)


def _check(names: Sequence[str]) -> int:
    """Start each program once; 1 where one is missing or says another version than the pinned one."""
    failed = 0
    for name in names:
        release = releases()[name]
        try:
            fault = missing(release)
            if fault:
                fault += f"; install it with `python -m envs.harnesses install {name}`"
            else:
                fault = _differs(version(release), release.version)
        except InstallError as error:
            fault = str(error)
        failed += bool(fault)
        print(f"{name:16} {release.version:12} {fault or 'works'}", flush=True)
    return 1 if failed else 0


def _check_episode(names: Sequence[str], backend: Backend, path: Path | None, wall_s: float) -> int:
    """Run the contract of each adapter for real; 1 where one breaks it."""
    failed = 0
    for name in names:
        try:
            config = _settings(name, path)
            with tempfile.TemporaryDirectory(prefix="reins-check-") as root:
                limits = Limits(wall_s=wall_s, cpu_s=wall_s, memory_mb=4096)
                findings = asyncio.run(check_harness(harness(config), Path(root), backend, limits))
        except (ConfigError, ValueError, SandboxError) as error:
            print(f"FAILS  {name} cannot be started: {error}")
            failed += 1
            continue
        print(name)
        print("\n".join(map(str, findings)), flush=True)
        failed += any(finding.broken for finding in findings)
    return 1 if failed else 0


def _settings(name: str, path: Path | None) -> HarnessConfig:
    """The first of this name in the file, else the defaults. Raises ConfigError where those cannot do."""
    given = load(path).harnesses.values() if path is not None else ()
    if found := [one for one in given if one.name == name]:
        return found[0]
    if name == "command":
        told = "no --config" if path is None else f"{path} without a harness of that name"
        raise ConfigError(f"got {told}, expected --config FILE with harness.name=command and its harness.argv")
    return HarnessConfig(name=name)


def _differs(got: str, expected: str) -> str:
    return "" if expected in got else f"says that it is {got!r}, expected {expected}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m envs.harnesses",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(into=None)
    commands = parser.add_subparsers(dest="command")
    for name, words in (("install", "install programs"), ("check", "start what is installed, or run whole episodes")):
        command = commands.add_parser(name, help=words)
        command.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(ADAPTERS)}; none: all")
        command.add_argument("--into", type=Path, metavar="FOLDER", help="where programs are installed")
        if name == "install":
            command.add_argument("--again", action="store_true", help="replace what is there")
        else:
            command.add_argument("--episode", action="store_true", help="run it against a scripted model API")
            command.add_argument("--config", type=Path, metavar="FILE", help="settings with its `harness`, or a `mix`")
            command.add_argument("--backend", choices=BACKENDS, default="auto", help="the sandbox")
            command.add_argument("--wall-s", type=float, default=120.0, metavar="S", help="longest run, in seconds")
    arguments = parser.parse_args()
    if arguments.into is not None:
        os.environ[FOLDER_VARIABLE] = os.fspath(arguments.into)
    if arguments.command is None:
        return _list()
    episode = arguments.command == "check" and arguments.episode
    known = HARNESSES if episode else ADAPTERS
    names = arguments.names or list(ADAPTERS)
    if not episode and (built_in := [name for name in names if name in HARNESSES and name not in ADAPTERS]):
        parser.error(f"{built_in[0]} is built in: nothing to install; to try it: check {built_in[0]} --episode")
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"unknown harness {unknown[0]!r}: expected some of {', '.join(known)}")
    if episode:
        return _check_episode(names, arguments.backend, arguments.config, arguments.wall_s)
    return _install(names, arguments.again) if arguments.command == "install" else _check(names)


if __name__ == "__main__":
    sys.exit(main())
