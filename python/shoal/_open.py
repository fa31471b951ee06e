"""Reads files of a Shoal mount round FUSE. See open."""

from __future__ import annotations

import array
import atexit
import builtins
import io
import json
import multiprocessing.util
import os
import resource
import select
import socket
import struct
import threading
import time
from typing import IO, Any, Dict, List, Optional, Tuple, Union

_Place = Tuple[int, int, int, int, int]  # file, segment, its salt, offset, length; salt 0: none

_HEAD, _ENTRY, _SEGMENT = struct.Struct("<IB"), struct.Struct("<IIQQI"), struct.Struct("<IQ")
_NEAR = 8  # an answer has the places of 2**8 files
_MOST_PLACES = 1 << 20
_SILENCE = struct.pack("ll", 5, 0)  # after which a daemon is not asked any more, as struct timeval
_AGAIN = 2.0  # seconds until it is asked again what has no place yet
_TOLD_AT_ONCE, _TOLD_AFTER = 8, 0.02  # opens, seconds


class File(io.BytesIO):
    """A whole file, in memory. It is read like one that builtins.open has opened in mode "rb", but has no fileno."""

    name: str
    mode = "rb"

    def writable(self) -> bool:
        return False

    def write(self, data: Any) -> int:
        raise io.UnsupportedOperation("write")

    def writelines(self, lines: Any) -> None:
        raise io.UnsupportedOperation("write")

    def truncate(self, size: Optional[int] = None) -> int:
        raise io.UnsupportedOperation("truncate")


def open(path: Union[str, os.PathLike[str]], mode: str = "rb") -> IO[bytes]:
    """Opens a file below a Shoal mount for reading, as builtins.open(path, "rb") does, without FUSE if that is possible.

    Files of up to 4 MiB that lie on the mount's disk, not encrypted and not recoded, are read from the cache's segment, at a
    fraction of what a file of the mount costs. The opens are reported to the daemon, so prefetching goes on. All other
    files, and those that are in no mount, are opened as usual; so are all files for processes of another user than the daemon's.

    It has the bytes that the mount would give: after `shoal refresh` those of the new version. It can be used by any thread,
    and before and after a fork. Raises OSError as builtins.open does, and ValueError for another mode.
    """
    if mode != "rb":
        raise ValueError(f"shoal.open: mode {mode!r}: it reads bytes, mode 'rb'")
    name = os.fspath(path)
    data = read_place(name) if isinstance(name, str) else None
    if data is None:
        return builtins.open(name, "rb")
    file = File(data)
    file.name = name
    return file


def read_place(path: str) -> Optional[bytes]:
    """The bytes of a file, if they can be had without the mount."""
    folder, slash, base = path.rpartition("/")
    place = _folders.get(folder)
    if place is None or not slash or folder[:1] != "/" or base in ("", ".", ".."):
        place = _find(folder or slash)
        if place is None:
            return None
    mount, inside = place
    found = mount.find(inside + base)
    if found is None:
        return None
    segment, offset, length = found
    try:
        data = os.pread(segment.fd, length, offset)
    except OSError:  # the daemon knows what to do about a disk that fails
        return None
    return data if len(data) == length else None


class _Segment:
    """The descriptor of a segment. It is closed when nobody reads from it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Any = os.close) -> None:
        close(self.fd)


class _Mount:
    """The connection to the daemon of a mount, and what is known of its files."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._socket: Optional[socket.socket] = None
        self._retry = 0.0  # when to connect again
        self._key = ""  # of the mount that the places belong to, and their generation
        self._generation = -1
        self._forget()

    def _forget(self) -> None:
        self._places: Dict[str, _Place] = {}
        self._asked: Dict[int, float] = {}  # by file >> _NEAR
        self._segments: Dict[int, _Segment] = {}  # by salt, those used last at the end
        self._opened: List[int] = []
        self._told = self._looked = time.monotonic()

    def forked(self) -> None:
        """In a forked child: the connection is the parent's. The places stay, if they are right when it connects."""
        self._lock = threading.Lock()
        self._opened = []
        self._leave(0.0)

    def find(self, path: str) -> Optional[Tuple[_Segment, int, int]]:
        """The segment of a file, and its offset and length there; None if it is to be read from the mount. If it is found, the
        daemon will know of the open."""
        with self._lock:
            try:
                return self._find(path)
            except (OSError, EOFError, ValueError, struct.error):
                self._leave(1.0)
                return None

    def _find(self, path: str) -> Optional[Tuple[_Segment, int, int]]:
        if self._socket is None and not self._connect():
            return None
        if self._poll.poll(0):
            self._receive(None)
        now = time.monotonic()
        place = self._places.get(path)
        if place is None or not place[2] and now - self._asked.get(place[0] >> _NEAR, 0) > _AGAIN:
            place = self._ask(path, now)
        if place is None or not place[2]:
            return None
        file, number, salt, offset, length = place
        segment = self._segments.get(salt)
        if segment is None:
            segment = self._open(number, salt)
            if segment is None:
                del self._places[path]  # dropped since; asked for again at the next open
                return None
        self._opened.append(file)
        if len(self._opened) >= _TOLD_AT_ONCE or now - self._told > _TOLD_AFTER:
            self._tell(now)
        if now - self._looked > 1:
            self._looked = now
            for gone in [s for s, held in self._segments.items() if os.fstat(held.fd).st_nlink == 0]:
                del self._segments[gone]  # its space is free once nobody holds it
        return segment, offset, length

    def _connect(self) -> bool:
        if time.monotonic() < self._retry:
            return False
        self._retry = time.monotonic() + 1
        with builtins.open(os.path.join(self.root, ".shoal", "stats"), "rb") as f:
            stats = json.load(f)
        key = stats.get("shortcut")
        if not key:
            return False
        s = socket.socket(socket.AF_UNIX)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SILENCE)
        folder = os.open(stats["cache_dir"], os.O_RDONLY | os.O_DIRECTORY)  # a socket's path can be too long
        try:
            s.connect(f"/proc/self/fd/{folder}/shoal.sock")
            s.sendall(json.dumps({"shortcut": key}).encode() + b"\n")
        except OSError:
            s.close()
            raise
        finally:
            os.close(folder)
        self._socket, self._poll = s, select.poll()
        self._poll.register(s, select.POLLIN)
        hello, _ = self._receive(ord("H"))
        (generation,) = struct.unpack("<Q", hello)
        if (key, generation) != (self._key, self._generation):
            self._forget()
        self._key, self._generation = key, generation
        return True

    def _leave(self, wait: float) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._retry = None, time.monotonic() + wait
        if wait:
            self._forget()

    def _send(self, kind: bytes, body: bytes, flags: int = 0) -> None:
        assert self._socket is not None
        message = kind + struct.pack("<I", len(body)) + body
        if flags:
            if self._socket.send(message, flags) != len(message):
                raise EOFError
        else:
            self._socket.sendall(message)

    def _receive(self, kind: Optional[int]) -> Tuple[bytes, List[int]]:
        """Receives messages up to one of this kind; one, if there is none."""
        assert self._socket is not None
        while True:
            fds = array.array("i")
            head, control, _, _ = self._socket.recvmsg(_HEAD.size, socket.CMSG_SPACE(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
            for level, type_, data in control:
                if (level, type_) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(data[:len(data) - len(data) % fds.itemsize])
            n, got = _HEAD.unpack(head + self._exactly(_HEAD.size - len(head)) if head else self._exactly(1))
            body = self._exactly(n)
            if got == ord("I"):
                self._forget()
                (self._generation,) = struct.unpack("<Q", body)
            if kind is None or got == kind:
                return body, fds.tolist()
            if got != ord("I"):
                raise ValueError(f"an answer {got}, not {kind}")

    def _exactly(self, n: int) -> bytes:
        assert self._socket is not None
        body = bytearray(n)
        view = memoryview(body)
        while view:
            got = self._socket.recv_into(view)
            if got == 0:
                raise EOFError
            view = view[got:]
        return bytes(body)

    def _ask(self, path: str, now: float) -> Optional[_Place]:
        self._tell(now)
        self._send(b"A", path.encode("utf-8", "surrogateescape"))
        body, _ = self._receive(ord("P"))
        (count,) = struct.unpack_from("<I", body)
        if len(self._places) > _MOST_PLACES:
            self._places.clear()
        end = 4 + count * _ENTRY.size
        names = body[end:].decode("utf-8", "surrogateescape").split("\0")
        self._places.update(zip(names, _ENTRY.iter_unpack(body[4:end])))
        place = self._places.get(path)
        if place is not None:
            self._asked[place[0] >> _NEAR] = now
        return place

    def _open(self, number: int, salt: int) -> Optional[_Segment]:
        self._send(b"S", _SEGMENT.pack(number, salt))
        body, fds = self._receive(ord("F"))
        if body != b"\1" or len(fds) != 1:
            return None
        while len(self._segments) >= _most_segments():
            del self._segments[next(iter(self._segments))]
        self._segments[salt] = segment = _Segment(fds[0])
        return segment

    def _tell(self, now: float) -> None:
        """Tells what was opened. A daemon that does not listen now misses some."""
        self._told = now
        opened, self._opened = self._opened, []
        if opened and self._socket is not None:
            try:
                self._send(b"O", struct.pack(f"<{len(opened)}I", *opened), socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass

    def end(self) -> None:
        with self._lock:
            try:
                self._tell(0)
            except (OSError, EOFError):
                pass


def _most_segments() -> int:
    """How many descriptors it may hold: a quarter of what the process may have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4096 if limit == resource.RLIM_INFINITY else max(limit // 4, 16)


_mounts: Dict[str, _Mount] = {}  # by mount point
_folders: Dict[str, Tuple[_Mount, str]] = {}  # by folder, as callers spell it: its mount, and the folder in it with a slash


def _find(folder: str) -> Optional[Tuple[_Mount, str]]:
    """The mount above a folder. It is remembered under the one name that always means the same, without links."""
    at = real = os.path.realpath(folder)
    if real in _folders:
        return _folders[real]
    while not os.path.exists(os.path.join(at, ".shoal", "stats")):
        if at == os.path.dirname(at):
            return None
        at = os.path.dirname(at)
    inside = os.path.relpath(real, at)
    place = _mounts.setdefault(at, _Mount(at)), "" if inside == os.curdir else inside + os.sep
    if len(_folders) >= _MOST_PLACES:
        _folders.clear()
    _folders[real] = place
    return place


def _forked() -> None:
    for mount in _mounts.values():
        mount.forked()


def _end() -> None:
    for mount in _mounts.values():
        mount.end()


os.register_at_fork(after_in_child=_forked)
atexit.register(_end)
# Processes of multiprocessing, such as a DataLoader's workers, end without atexit.
multiprocessing.util.register_after_fork(_end, lambda end: multiprocessing.util.Finalize(None, end, exitpriority=1))
