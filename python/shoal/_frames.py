"""The stream's messages on the handover connection, each behind its length (docs/protocol.md).

One thread receives and sends: the trainer's. It needs no other thread's turn at the interpreter, which is what a batch costs
that comes by grpc.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Optional

_HEAD = 4
_LONGEST = 8 << 20
_PIECE = 16 << 10  # some tens of headers
_EVENTS = select.POLLIN | select.POLLHUP | select.POLLERR


class FrameError(ValueError):
    """What came is no frame."""


class Frames:
    """Messages over a connection that somebody else closes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer, self._at = bytearray(), 0
        self._poll = select.poll()
        self._poll.register(connection, _EVENTS)

    def get(self, timeout: float) -> Optional[bytes]:
        """The next message, None if none comes within so many seconds. EOFError once the server has said that it was all,
        ConnectionError where the connection has ended."""
        while True:
            buffer, at = self._buffer, self._at
            have = len(buffer) - at
            if have >= _HEAD:
                size = int.from_bytes(buffer[at:at + _HEAD], "little")
                if size > _LONGEST:
                    raise FrameError(f"a frame of {size} bytes")
                if size == 0:
                    raise EOFError
                if have >= _HEAD + size:
                    self._at = at + _HEAD + size
                    return bytes(buffer[at + _HEAD:self._at])
            if at:
                del buffer[:at]
                self._at = 0
            try:
                piece = self._connection.recv(_PIECE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if timeout <= 0 or not self._poll.poll(timeout * 1000):
                    return None
                continue
            except (OSError, ValueError):
                raise ConnectionError from None
            if not piece:
                raise ConnectionError
            buffer += piece

    def send(self, *messages: bytes) -> None:
        """Sends messages. Where the connection has ended they are of no use: get() tells."""
        try:
            self._connection.sendall(b"".join(struct.pack("<I", len(m)) + m for m in messages))
        except OSError:
            pass

    def shut(self) -> None:
        """Nothing more is received: a get() in another thread ends."""
        try:
            self._connection.shutdown(socket.SHUT_RD)
        except OSError:
            pass
