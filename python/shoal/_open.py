"""Reads files of a Shoal mount round FUSE. See open.

The daemon's package internal/shortcut has the protocol and its rules. Here, besides, exceptions can come from anywhere,
since handlers of signals raise them between any two steps (a timeout, Ctrl-C). So nothing is put right afterwards:

- What is known of a mount's files belongs to one connection (_Known), and is used only while that lasts.
- A question is asked under a lock that is released only when the whole answer was received. After an exception it stays
  locked, so that nobody takes a late answer for another, and a new connection takes the place of this one.
- Nobody waits for a lock. Whoever does not get it reads from the mount: other threads, handlers that open files, forked
  children.
"""

from __future__ import annotations

import atexit
import builtins
import collections
import errno
import fcntl
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
import traceback
import weakref
from typing import IO, Callable, Deque, Dict, NamedTuple, NoReturn, Optional, Tuple, Union

from ._hint import genuine, mount_points

_Place = Tuple[int, int, int, int, int]  # file, segment, its salt, offset, length; salt 0: none

_HEAD, _ANSWER, _ENTRY = struct.Struct("<IB"), struct.Struct("<IQI"), struct.Struct("<IIQQI")
_NEAR = 8  # an answer has the places of 2**8 files
_MOST_PLACES = 1 << 20
_MOST_BYTES = 64 << 20  # of an answer
_SILENCE = struct.pack("ll", 5, 0)  # after which a daemon is not asked any more, as struct timeval
_RECONNECT = 1.0  # seconds from one connection to the next
_BUSY = 10.0  # seconds after which somebody was interrupted while he asked
_AGAIN = 2.0  # seconds until it is asked again what has no place yet
_TOLD_AT_ONCE, _TOLD_AFTER = 8, 0.02  # opens, seconds
# What can go wrong here, in code of these files. All else is the caller's: a handler of a signal has raised it.
_OURS = (OSError, EOFError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError,
         MemoryError, struct.error)
_FILES = {f.__code__.co_filename
          for f in (lambda: None, genuine, os.fsencode, os.path.join, os.path.samestat, socket.socket.__init__)}


class _Bytes(io.BytesIO):
    """What is below a File: it does what io.FileIO does with a file that was opened to be read."""

    name: str
    mode = "rb"  # pyright: ignore[reportAssignmentType]
    _file: Optional[io.FileIO] = None

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name, self._size = name, len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        size = self._size
        if whence in (os.SEEK_DATA, os.SEEK_HOLE):
            if not 0 <= offset < size:
                raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
            return super().seek(offset if whence == os.SEEK_DATA else size)
        if offset + (0, self.tell(), size)[whence] < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().seek(offset, whence)

    def writable(self) -> bool:
        return False

    def write(self, _: object) -> NoReturn:
        self._refuse()

    def truncate(self, _: object = None) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        self.tell()  # fails if it is closed
        raise io.UnsupportedOperation("File not open for writing")

    def readall(self) -> bytes:
        return self.read()

    def fileno(self) -> int:
        """A descriptor of the same bytes, which were those of the file when it was opened."""
        if self._file is None:
            with builtins.open(os.memfd_create(os.path.basename(self.name)[:60]), "wb", 0) as copy:
                copy.write(self.getbuffer())
                self._file = io.FileIO(f"/proc/self/fd/{copy.fileno()}")
                self._file.seek(self.tell())
        return self._file.fileno()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


class File(io.BufferedReader):
    """A whole file, in memory. It is read like one that builtins.open has opened in mode "rb"; its fileno is that of a
    copy."""

    size: int  # of fsspec's
    path: str


def open(path: Union[str, os.PathLike[str]], mode: str = "rb") -> IO[bytes]:
    """Opens a file below a Shoal mount for reading, as builtins.open(path, "rb") does, without FUSE if that is
    possible.

    Files of up to 4 MiB that lie on the mount's disk, not encrypted and not recoded, are read from the cache's segment,
    at a fraction of what a file of the mount costs. The opens are reported to the daemon, so prefetching goes on. All
    other files, and those that are in no mount, are opened as usual; so are all files for processes of another user
    than the daemon's.

    It has the bytes that the mount would give: after `shoal refresh` those of the new version. It can be used by any
    thread, before and after a fork, and interrupted by handlers of signals. Raises OSError as builtins.open does, and
    ValueError for another mode.
    """
    if mode != "rb":
        raise ValueError(f"shoal.open: mode {mode!r}: it reads bytes, mode 'rb'")
    name = os.fspath(path)
    data = read_place(name) if isinstance(name, str) else None
    if data is None:
        try:
            return builtins.open(name, "rb")
        except OSError as e:
            if e.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        for mount in list(_mounts.values()):  # they have descriptors
            mount.leave(mount.known)
        return builtins.open(name, "rb")
    return File(_Bytes(data, name))


def read_place(path: str) -> Optional[bytes]:
    """The bytes of a file, if they can be had without the mount."""
    try:
        return _read(path)
    except _OURS as e:
        if isinstance(e, OSError) and e.errno is None or {frame.f_code.co_filename
                                                          for frame, _ in traceback.walk_tb(e.__traceback__)} - _FILES:
            raise
        return None


def _read(path: str) -> Optional[bytes]:
    folder, slash, base = path.rpartition("/")
    if base in ("", ".", ".."):
        return None
    at = os.stat(folder or slash or ".")
    found = _folders.get(folder)
    # Inode numbers in a mount are made of the path: a folder that has the same is the same, however it is called.
    if found is None or found.inode != at.st_ino or found.device != at.st_dev:
        found = _find(folder, at)
    mount = found.mount
    if mount is None:
        return None
    known = mount.known or mount.connect()
    if known is None or known.device != at.st_dev:
        mount.leave(known)  # of a mount that was here before
        return None
    place = mount.place(known, found.inside + base)
    if place is None or not place[2]:
        return None
    file, number, salt, offset, length = place
    segment = known.segments.get(salt) or known.open(number, salt)
    if known.ended():
        mount.leave(known)
        return None
    if segment is None:
        known.places.pop(found.inside + base, None)  # dropped since; asked for again at the next open
        return None
    data = os.pread(segment.fileno(), length, offset)  # fails: the daemon knows what to do about the disk
    if len(data) != length:
        return None
    mount.opened(known, file)
    return data


class _Segment(io.FileIO):
    """The file of a segment. It is closed when nobody reads from it any more."""

    def __del__(self) -> None:
        self.close()


class _Known:
    """A connection to the daemon of a mount, and what it has said of one version of its files."""

    def __init__(self, key: str, folder: str, device: int) -> None:
        self.device = device  # of the mount
        self.asking = threading.Lock()  # who has it asks, or tells; it is never waited for
        self.asked_at = time.monotonic()
        self.places: Dict[str, _Place] = {}
        self.looked: Dict[int, float] = {}  # when, by file >> _NEAR
        self.segments: Dict[int, _Segment] = {}  # by salt
        self.to_tell: Deque[int] = collections.deque()
        self.told = self.swept = self.asked_at
        self._question = 0
        _connections.add(self)
        self._end = select.epoll(1)
        self._socket = socket.socket(socket.AF_UNIX)
        self._end.register(self._socket, select.EPOLLRDHUP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SILENCE)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SILENCE)
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # a socket's path can be too long
        try:
            self._socket.connect(f"/proc/self/fd/{at}/shoal.sock")
        finally:
            os.close(at)
        self._socket.sendall(json.dumps({"shortcut": key}).encode() + b"\n")
        hello = self._receive(b"H")
        (self._version,) = struct.unpack_from("<Q", hello)
        self._segments = os.fsdecode(hello[8:])

    def ended(self) -> bool:
        """Whether the version is not in force any more, or the mount is gone. What was received does not hide it."""
        return bool(self._end.poll(0, 1))

    def end(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended, or is the parent's
            pass

    def close(self) -> None:
        for held in ("_end", "_socket"):  # in this order: without the socket it would never see an end
            if hasattr(self, held):
                getattr(self, held).close()

    def __del__(self) -> None:
        self.close()

    def ask(self, path: str) -> None:
        """Asks for the places of a file and those near it. The caller has the lock, as for tell."""
        self.tell()
        self._question = self._question + 1 & 0xFFFFFFFF
        self._send(b"A", struct.pack("<I", self._question) + os.fsencode(path))
        body = self._receive(b"P")
        question, version, count = _ANSWER.unpack_from(body)
        end = _ANSWER.size + count * _ENTRY.size
        names = os.fsdecode(body[end:]).split("\0")
        if (question, version) != (self._question, self._version) or len(names) != count + 1:
            raise EOFError("an answer to another question")
        if len(self.places) > _MOST_PLACES:
            self.places.clear()
        self.places.update(zip(names, _ENTRY.iter_unpack(body[_ANSWER.size:end])))

    def tell(self) -> None:
        """Tells what was opened. A daemon that does not listen now misses some."""
        opened = [self.to_tell.popleft() for _ in range(min(len(self.to_tell), 1024))]
        if opened:
            try:
                self._send(b"O", struct.pack(f"<{len(opened)}I", *opened), socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass

    def _send(self, kind: bytes, body: bytes, flags: int = 0) -> None:
        message = kind + struct.pack("<I", len(body)) + body
        if self._socket.send(message, flags) != len(message):
            raise EOFError

    def _receive(self, kind: bytes) -> bytes:
        n, got = _HEAD.unpack(self._exactly(_HEAD.size))
        if bytes((got,)) != kind or n > _MOST_BYTES:
            raise EOFError(f"an answer {got} of {n} bytes, not {kind!r}")
        return self._exactly(n)

    def _exactly(self, n: int) -> bytes:
        body = bytearray(n)
        view = memoryview(body)
        while view:
            got = self._socket.recv_into(view)
            if got == 0:
                raise EOFError
            view = view[got:]
        return bytes(body)

    def open(self, number: int, salt: int) -> Optional[_Segment]:
        """The file of a segment, or None if it was dropped."""
        try:
            segment = _Segment(os.path.join(self._segments, f"{number:08d}.seg"), opener=_high)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if os.pread(segment.fileno(), 8, 16) != struct.pack("<Q", salt):
            return None
        while len(self.segments) >= _most_segments():
            self.segments.pop(next(iter(self.segments), 0), None)
        self.segments[salt] = segment
        return segment


class _Mount:
    """A mount, and what is known of its files while a connection lasts."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.known: Optional[_Known] = None
        self._retry = 0.0  # when to connect again

    def connect(self) -> Optional[_Known]:
        now = time.monotonic()
        if now < self._retry:
            return None
        self._retry = now + _RECONNECT
        root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            device = os.fstat(root).st_dev
            with builtins.open(os.open(".shoal/stats", os.O_RDONLY, dir_fd=root), "rb") as f:
                text = f.read()
        finally:
            os.close(root)
        try:
            stats = json.loads(text)
            key, folder = stats.get("shortcut_v2"), stats["cache_dir"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
        if not key:
            return None
        self.known = known = _Known(key, folder, device)
        return known

    def leave(self, known: Optional[_Known]) -> None:
        """Ends a connection, and forgets what it has said."""
        if known is not None and self.known is known:
            self.known = None
            known.end()

    def forked(self) -> None:
        self.known, self._retry = None, 0.0

    def place(self, known: _Known, path: str) -> Optional[_Place]:
        place = known.places.get(path)
        if place is not None and place[2]:
            return place
        now = time.monotonic()
        if place is not None and now - known.looked.get(place[0] >> _NEAR, 0) <= _AGAIN:
            return place
        if not self._talk(known, lambda: known.ask(path)):
            return None
        place = known.places.get(path)
        if place is not None:
            known.looked[place[0] >> _NEAR] = now
        return place

    def _talk(self, known: _Known, say: Callable[[], None]) -> bool:
        """Says something to the daemon, if nobody else is about to."""
        now = time.monotonic()
        if not known.asking.acquire(False):
            if now - known.asked_at > _BUSY:
                self.leave(known)
            return False
        try:
            known.asked_at = now
            say()
        except BaseException:
            self.leave(known)
            raise
        known.asking.release()
        return True

    def opened(self, known: _Known, file: int) -> None:
        """Remembers that a file was opened, and tells it at times."""
        known.to_tell.append(file)
        now = time.monotonic()
        if len(known.to_tell) >= _TOLD_AT_ONCE or now - known.told > _TOLD_AFTER:
            known.told = now
            self.tell(known)
        if now - known.swept > 1:
            known.swept = now
            for salt, segment in list(known.segments.items()):
                if os.fstat(segment.fileno()).st_nlink == 0:
                    known.segments.pop(salt, None)  # its space is free once nobody holds it

    def tell(self, known: _Known) -> None:
        self._talk(known, known.tell)


def _high(path: str, flags: int) -> int:
    """Opens a file, and leaves the program the descriptors that select can wait for, if there are more."""
    low = os.open(path, flags)
    try:
        return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, min(2 * _most_segments(), 1024))
    finally:
        os.close(low)


def _most_segments() -> int:
    """How many descriptors it may hold: a quarter of what the process may have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4096 if limit == resource.RLIM_INFINITY else max(limit // 4, 16)


class _Folder(NamedTuple):
    device: int
    inode: int
    mount: Optional[_Mount]  # none: it is in no mount
    inside: str  # the folder in its mount, with a slash


_connections: "weakref.WeakSet[_Known]" = weakref.WeakSet()
_mounts: Dict[str, _Mount] = {}  # by mount point
_folders: Dict[str, _Folder] = {}  # as callers spell them


def _find(folder: str, at: os.stat_result) -> _Folder:
    """The mount above a folder. All that lies between is of the same device: else something is mounted over it. Over a
    file in it that does not show."""
    here = os.open(folder or ".", os.O_PATH | os.O_DIRECTORY)
    try:
        root = real = os.readlink(f"/proc/self/fd/{here}")  # realpath would hide an OSError that a handler raises in it
    finally:
        os.close(here)
    there = os.stat(real)
    mount, inside = None, ""
    while mount is None and there.st_dev == at.st_dev:
        try:
            os.stat(os.path.join(root, ".shoal", "stats"))
            if not genuine(root):
                raise FileNotFoundError
            mount = _mounts.setdefault(root, _Mount(root))
            inside = "" if root == real else real[len(root.rstrip(os.sep)) + 1:] + os.sep
        except (FileNotFoundError, NotADirectoryError):
            if root == os.path.dirname(root):
                break
            root = os.path.dirname(root)
            there = os.stat(root)
    if mount is not None and any(os.path.dirname(point) == real for point in mount_points()):
        mount = None
    found = _Folder(at.st_dev, at.st_ino, mount, inside)
    if not os.path.samestat(os.stat(real), at):
        return found._replace(mount=None)  # a link was changed meanwhile
    if len(_folders) >= _MOST_PLACES:
        _folders.clear()
    _folders[folder] = found
    return found


def _forked() -> None:
    """In a forked child: the connections are the parent's. A call that the fork has interrupted finds them closed."""
    for known in list(_connections):
        known.close()
    for mount in _mounts.values():
        mount.forked()


def _end() -> None:
    for mount in list(_mounts.values()):
        if mount.known is not None:
            try:
                mount.tell(mount.known)
            except (OSError, EOFError):
                pass


os.register_at_fork(after_in_child=_forked)
atexit.register(_end)
# Processes of multiprocessing, such as a DataLoader's workers, end without atexit.
multiprocessing.util.register_after_fork(_end, lambda end: multiprocessing.util.Finalize(None, end, exitpriority=1))
