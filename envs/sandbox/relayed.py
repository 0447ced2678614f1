"""Gives a command one thing to talk to: the model API behind a Unix socket, seen as a loopback address."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from envs.sandbox.base import Command, Mount, Sandbox
from envs.sandbox.bytecode import compiled
from envs.sandbox.relay import PLACEHOLDER

RELAY_BASE_URL = f"http://127.0.0.1:{PLACEHOLDER}"
"""The base URL to write into a command's arguments or environment; ``{relay_port}`` is filled in when it
starts."""

RELAY_FOLDER = "/opt/relay"
"""Where a command's mounts show the relay."""

_PROGRAM = Path(__file__).with_name("relay.py")
_SOCKETS = "/run/model-api"
_LIST = rb"\(([\w.,/-]*)\)"
_END = re.compile(
    rb"^relay: at the end: processes=(\d+) " + _LIST + rb" unrouted=(\d+) lookups=(\d+) files=\d+ " + _LIST + rb"$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Leavings:
    """What the relay saw when its command had ended. The command can forge it: a hint, never a proof."""

    processes: int = 0
    names: tuple[str, ...] = ()
    """Of the first few of those processes."""
    unrouted: int = 0
    """How often something was sent to where no network leads."""
    lookups: int = 0
    """Questions for the address of a name, repetitions counted; of programs that ask by themselves, since the C
    library asks no server where the sandbox's ``nsswitch.conf`` names none.
    """
    files: tuple[str, ...] = ()
    """Files and folders that lay directly in the temporary folders; characters that are unusual in paths as ``_``."""


def through_relay(sandbox: Sandbox, command: Command, socket: Path) -> Command:
    """``command`` under a relay to the Unix socket ``socket`` of the host, in whichever backend.

    Its folder holds the sockets of the replicas that can stand in for it, and nothing else.

    In the arguments and the environment of ``command``, ``{relay_port}`` becomes the port. A file in the
    sandbox must not name the port unless ``sandbox.relay_port`` is not 0.
    """
    if sandbox.relay_port:
        # Inside is another user than ours. Who may reach the socket is decided by the folder that it lies in.
        socket.chmod(0o666)
        socket.parent.chmod(0o755)
    program = compiled(sandbox.python, _PROGRAM)[0]
    shown = Mount(program, f"{RELAY_FOLDER}/relay{program.suffix}")
    doors = Mount(socket.parent, _SOCKETS)
    relay = (
        sandbox.python,
        "-I",
        "-S",
        sandbox.inside(shown),
        sandbox.inside(doors),
        socket.name,
        str(sandbox.relay_port),
    )
    return replace(command, argv=(*relay, *command.argv), mounts=(*command.mounts, shown, doors))


def leavings(stderr: bytes) -> Leavings:
    """What the relay told at the end of its standard error; nothing where there was nothing to tell, or no relay
    with namespaces of its own.
    """
    told = _END.findall(stderr)
    if not told:
        return Leavings()
    processes, names, unrouted, lookups, files = told[-1]
    return Leavings(int(processes), _listed(names), int(unrouted), int(lookups), _listed(files))


def _listed(names: bytes) -> tuple[str, ...]:
    return tuple(filter(None, names.decode().split(",")))
