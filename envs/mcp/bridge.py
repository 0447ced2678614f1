"""Carries standard input and output to a Unix socket: how a harness inside reaches an MCP server outside.

    python -I -S bridge.py FOLDER NAME

A program of its own, standard library only. To the harness it is a stdio server. It ends when the far side hangs
up, and passes on the end of its own input.
"""

from __future__ import annotations

import _socket
import _thread
import os
import sys

_CHUNK = 1 << 16


def send_all(socket: _socket.socket, data: bytes) -> None:
    while data:
        data = data[socket.send(data) :]


def write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def carry_out(socket: _socket.socket) -> None:
    """Until the harness says no more. Trouble is the far side's end, which the other direction sees."""
    try:
        while chunk := os.read(0, _CHUNK):
            send_all(socket, chunk)
        socket.shutdown(_socket.SHUT_WR)
    except OSError:
        pass


def main(folder: str, name: str) -> int:
    socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        # A path as long as the folder's need not fit into an address.
        os.chdir(folder)
        socket.connect(name)
    except OSError as error:
        os.write(2, f"bridge: MCP server {name}: {error}\n".encode())
        return 1
    _thread.start_new_thread(carry_out, (socket,))
    try:
        while chunk := socket.recv(_CHUNK):
            write_all(chunk)
    except OSError:
        # The harness takes nothing any more, or the far side broke off: both are an end.
        pass
    # The other thread may still wait for input.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
