"""The stream's messages on the handover connection, each behind its length (docs/protocol.md).

One thread sends and receives: the trainer's. It never waits for another thread to get the interpreter lock, which is
the cost of a batch that comes over grpc.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Optional

from ._run import by_handler

_HEAD = 4
_LONGEST = 8 << 20
_PIECE = 16 << 10  # some tens of headers
_EVENTS = select.POLLIN | select.POLLHUP | select.POLLERR


class FrameError(ValueError):
    """A malformed frame."""


class Frames:
    """Messages over a connection that the caller closes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer, self._at = bytearray(), 0
        self._poll = select.poll()
        self._poll.register(connection, _EVENTS)

    def get(self, timeout: float) -> Optional[bytes]:
        """The next message, None if none comes within the timeout. EOFError after the server's end marker,
        ConnectionError if the connection ended without it."""
        while True:
            buffer, at = self._buffer, self._at
            have = len(buffer) - at
            if have >= _HEAD:
                size = int.from_bytes(buffer[at:at + _HEAD], "little")
                if size > _LONGEST:
                    raise FrameError(f"malformed frame of {size} bytes")
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
            except (OSError, ValueError) as e:
                if by_handler(e):
                    raise
                raise ConnectionError from None
            if not piece:
                raise ConnectionError
            buffer += piece

    def send(self, *messages: bytes) -> None:
        """Sends messages. If the connection has ended it does nothing: get() reports that."""
        try:
            self._connection.sendall(b"".join(struct.pack("<I", len(m)) + m for m in messages))
        except OSError as e:
            if by_handler(e):
                raise

    def shut(self) -> None:
        """Ends reception: a get() in another thread returns."""
        try:
            self._connection.shutdown(socket.SHUT_RD)
        except OSError:
            pass
