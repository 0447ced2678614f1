"""The filter of system calls, run by an interpreter of the kernel's language: what it says to a call."""

from __future__ import annotations

import errno
import struct

import pytest

from envs.sandbox import seccomp

X86, I386, ARM = 0xC000003E, 0x40000003, 0xC00000B7
ALLOWED = 0x7FFF0000


def answer(machine: str, architecture: int, number: int, first: int = 0) -> int:
    data = struct.pack("=IIQQ", number, architecture, 0, first)
    steps = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    at = held = 0
    while True:
        code, true, false, value = steps[at]
        at += 1
        if code == 0x20:
            held = struct.unpack_from("=I", data, value)[0]
        elif code == 0x06:
            return value
        else:
            at += true if (held == value if code == 0x15 else held >= value) else false


@pytest.mark.parametrize(("machine", "architecture", "socket"), [("x86_64", X86, 41), ("aarch64", ARM, 198)])
def test_families_of_sockets(machine, architecture, socket):
    for family in range(46):
        said = answer(machine, architecture, socket, family)
        assert said == (ALLOWED if family in (1, 2, 10, 16) else 0x50000 | errno.EAFNOSUPPORT)


@pytest.mark.parametrize(
    ("architecture", "number", "allowed"),
    [(X86, 0, True), (X86, 59, True), (X86, 250, False), (X86, 425, False), (X86, 0x40000029, False), (I386, 4, False)],
)
def test_calls(architecture, number, allowed):
    assert answer("x86_64", architecture, number) == (ALLOWED if allowed else 0x50000 | errno.ENOSYS)


def test_a_processor_that_is_not_known_has_no_filter():
    assert seccomp.program("riscv64") == b""
