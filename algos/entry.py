"""What entry points share: how they print, how they are interrupted, and where a new folder goes."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text


def say(console: Console, text: str, alarm: str = "") -> None:
    """Text of users and of errors as it is, without markup and without wrapping."""
    console.print(Text.assemble((alarm, "bold red"), text), soft_wrap=True)


def listed(names: Sequence[str]) -> str:
    """Names in a line of a plan, as many as a person reads."""
    return ", ".join(names) if len(names) <= 18 else f"{', '.join(names[:17])} and {len(names) - 17} more"


def typed(program: str = "python") -> str:
    """A program of this environment as one would type it here."""
    path = Path(sys.executable)
    path = path if program == "python" else path.with_name(program)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def parsed(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """``[CONFIG] [key.path=value ...]`` and options: without a config its place is not taken by a setting."""
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings that replace the file's")
    args = parser.parse_intermixed_args(argv)
    if args.config and "=" in args.config:
        args.overrides.insert(0, args.config)
        args.config = None
    return args


def new_folder(parent: Path, name: str) -> Path:
    """``name`` with the time, and with the process where that is there already; it is not made."""
    folder = parent / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return folder if not folder.exists() else folder.with_name(f"{folder.name}-{os.getpid()}")


async def interruptible(work: Coroutine[Any, Any, None]) -> None:
    """Turn the first SIGINT or SIGTERM into a cancellation, so that every part is taken down in order."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, task.cancel)
    await task
