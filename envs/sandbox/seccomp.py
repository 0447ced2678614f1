"""What the kernel refuses inside although no namespace holds it: a filter of system calls for bubblewrap.

Refused are
- sockets of every family but Unix, IP and netlink: AF_VSOCK, of which there is one for the whole machine, leads from
  one sandbox to the other, and from a virtual machine to what runs it;
- keyrings: a session's is handed down from the process that started us, to all sandboxes alike;
- io_uring, whose operations no filter sees, and calls by another architecture's numbers, which would pass by this one.

On a processor whose numbers are not known here there is no filter.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct
from dataclasses import dataclass

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_OTHER_NUMBERS = 0x40000000
"""From here on the numbers are those of x32, on a processor that has it."""
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    architecture: int
    socket: int
    refused: tuple[int, ...]
    """add_key, request_key, keyctl, io_uring_setup."""


_BY_MACHINE = {
    "x86_64": _Numbers(0xC000003E, 41, (248, 249, 250, 425)),
    "aarch64": _Numbers(0xC00000B7, 198, (217, 218, 219, 425)),
}


@functools.cache
def program(machine: str = platform.machine()) -> bytes:
    """The filter in the kernel's form, as ``bwrap --seccomp`` reads it; empty where there is none."""
    numbers = _BY_MACHINE.get(machine)
    if numbers is None:
        return b""
    # Two ends stand behind it. A jump counts what it passes over.
    body: list[tuple[int, int, str, str]] = [
        (_LOAD, _ARCHITECTURE, "", ""),
        (_EQUAL, numbers.architecture, "", "no call"),
        (_LOAD, _NUMBER, "", ""),
        (_AT_LEAST, _OTHER_NUMBERS, "no call", ""),
        *((_EQUAL, number, "no call", "") for number in numbers.refused),
        (_EQUAL, numbers.socket, "", "allow"),
        (_LOAD, _FIRST_ARGUMENT, "", ""),
        *((_EQUAL, family, "allow", "") for family in _FAMILIES),
        (_RETURN, _ERROR | errno.EAFNOSUPPORT, "", ""),
    ]
    ends = {"allow": len(body), "no call": len(body) + 1}
    packed = [
        struct.pack("=HBBI", code, *(ends[there] - place - 1 if there else 0 for there in (true, false)), value)
        for place, (code, value, true, false) in enumerate(body)
    ]
    for value in (_ALLOW, _ERROR | errno.ENOSYS):
        packed.append(struct.pack("=HBBI", _RETURN, 0, 0, value))
    return b"".join(packed)
