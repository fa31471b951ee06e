"""Batches in shared memory: the pool of slots that the server fills and this process gives back.

The memory is a memfd that comes over a second connection to the server's unix socket (docs/protocol.md, "Slots"), and
is mapped once. Each filling of a slot gets a Lease, an object that exports the slot's memory by the buffer protocol.
All arrays are made on the lease, so they and everything made of them without a copy refer to it: slices, memoryviews,
tensors, DLPack capsules. When the last of them is freed the lease is freed, and only that gives the slot back.
There is no other way.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import json
import logging
import mmap
import os
import socket
import struct
import sys
import threading
import weakref
import zlib
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple, cast

from . import _streams
from ._errors import FeedError
from ._frames import Frames

HEADER = 4096
POISON = 0xDB
_MAGIC = b"SHOALSLT"
_FILLING = 1
_HANDOVER_SECONDS = 30

log = logging.getLogger("shoal")


@functools.lru_cache(maxsize=None)
def warn_once(text: str) -> None:
    log.warning("%s", text)


class HandoverError(FeedError):
    """The server did not hand over its memory."""


def handover(path: str, key: str, descriptors: int = 1, frames: bool = False) -> Tuple[socket.socket, Dict[str, Any],
        List[int]]:
    """Requests a pool's memory. Returns the connection, whose end gives all slots back, the server's answer and the
    descriptors. frames: request the stream's messages on the connection, if the server supports it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: List[int] = []
    try:
        connection.settimeout(_HANDOVER_SECONDS)
        connection.connect(path)
        ask = json.dumps({"v": 1, "key": key, **({"frames": True} if frames else {})}).encode()
        connection.sendall(b"SHOALFD1" + struct.pack("<I", len(ask)) + ask)
        got, want = b"", 4
        while len(got) < want:  # not more: messages may follow
            more, passed, _, _ = socket.recv_fds(connection, want - len(got), descriptors)
            fds += passed
            if not more:
                raise HandoverError("the server closed the connection")
            got += more
            if len(got) == 4:
                want = 4 + struct.unpack("<I", got)[0]
                if want > 1 << 20:
                    raise HandoverError("the server's answer is incomplete")
        answer = json.loads(got[4:])
        if answer.get("error"):
            raise HandoverError(answer["error"])
        if answer.get("v") != 1:
            raise HandoverError(f"the server uses version {answer.get('v')} of the protocol, this client version 1: "
                                "update both to one version")
        if len(fds) != descriptors:
            raise HandoverError(f"the server sent {len(fds)} descriptors instead of {descriptors}")
        connection.settimeout(None)
        return connection, answer, fds
    except BaseException as e:
        connection.close()
        for fd in fds:
            os.close(fd)
        if isinstance(e, (OSError, ValueError)):
            raise HandoverError(f"{type(e).__name__}: {e}") from None
        raise


class _Lease:
    """Mixed into a ctypes array type for each slot: an instance is one filling of it. pool and slot
    are attributes of the type, so that creating a lease costs no more than creating a ctypes array."""

    __slots__ = ()
    pool: "SlotPool"
    slot: int

    def hold_for(self, stream: Any) -> None:
        self.pool.streams.hold(self.slot, stream)

    def check(self) -> None:
        self.pool.check(self.slot)


class SlotPool:
    """The slots of one stream.

    lease(slot) is called for each batch that came in a slot. freed collects the numbers of slots that nothing refers to
    any more; wake() is called when there are some and a thread waits for them.
    """

    def __init__(self, path: str, key: str, wake: Callable[[], None], readonly: bool = False, pin: bool = False,
                 debug: Optional[bool] = None, limit: Optional[int] = None, frames: bool = False) -> None:
        self._connection, answer, fds = handover(path, key, frames=frames)
        try:
            self.slots, self.slot_bytes = int(answer["slots"]), int(answer["slot_bytes"])
            size = os.fstat(fds[0]).st_size
            if self.slots < 1 or self.slot_bytes < HEADER or size != self.slots * self.slot_bytes:
                raise HandoverError(f"{self.slots} slots of {self.slot_bytes} bytes in a memory of {size}")
            self.memory: Optional[mmap.mmap] = mmap.mmap(fds[0], size, mmap.MAP_SHARED,
                                                         mmap.PROT_READ | mmap.PROT_WRITE)
            try:
                self.memory.madvise(mmap.MADV_HUGEPAGE)  # as the server does
            except OSError:
                pass  # a kernel without them
        except BaseException:
            self._connection.close()
            raise
        finally:
            os.close(fds[0])
        self.frames = Frames(self._connection) if frames and answer.get("frames") else None
        self.readonly = readonly
        self.limit = min(self.slots, limit or self.slots)  # a shared pool has more slots than one trainer may hold
        self.debug = debug if debug is not None else "slots" in os.environ.get("SHOAL_DEBUG", "").split(",")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.streams = _streams.Streams()
        self.pinned = pin and _streams.register(self.address, size)
        self.freed: Deque[int] = collections.deque()
        self.live: Dict[int, Any] = {}  # held slots: a weak reference to the Batch, or None
        self.fault: Optional[str] = None  # the error that debug mode found
        self.waited = False  # a thread waits for a slot
        self._wake, self._closed, self._foreign = wake, False, False
        self._plain = not self.debug  # freeing a lease needs nothing but its release
        self._lock = threading.RLock()  # reentrant: the garbage collector may free a lease within
        # In debug mode, for held slots: sequence and, if readonly, checksum; bytes of the batch.
        self._proof: Dict[int, Tuple[int, int]] = {}
        self._bytes: Dict[int, int] = {}
        self._room = self.slot_bytes - HEADER
        self._addresses = [self.address + (slot - 1) * self.slot_bytes + HEADER for slot in range(self.slots + 1)]
        # 0 is not used
        self._leases = [self._type(ctypes.c_ubyte * self._room, slot) for slot in range(self.slots + 1)]
        _pools.add(self)

    def _type(self, base: Any, slot: int) -> Callable[[int], Any]:
        died, ending = self._died, sys.is_finalizing

        def __del__(self: Any) -> None:
            if not ending():  # then this module may be empty already, and the memory goes with the process
                died(slot)

        made = type("Lease", (_Lease, base), {"__del__": __del__, "__slots__": (), "pool": self, "slot": slot})
        return cast(Any, made).from_address  # type: ignore[no-any-return]

    # Arrivals.

    def lease(self, slot: int, index: int, epoch: int, total: int) -> Any:
        """The memory of a batch that has just come."""
        live = self.live
        if not 0 < slot <= self.slots or slot in live or self._closed or total > self._room:
            raise FeedError(f"the server put {total} bytes in slot {slot} of {self.slots} with {self.slot_bytes} bytes"
                            + (", which this process still holds" if slot in live else ""))
        if self.debug:
            self._bytes[slot] = total
            self._prove(slot, index, epoch)
        live[slot] = None
        return self._leases[slot](self._addresses[slot])

    def _header(self, slot: int) -> Tuple[bytes, int, int, int, int, int, int, int]:
        """magic, version, header bytes, slot, flags, sequence, epoch, index."""
        magic, version, size, number, flags, sequence, epoch, _, index = struct.unpack_from(
            "<8sIIIIQIIQ", self._memory(), (slot - 1) * self.slot_bytes)
        return magic, version, size, number, flags, sequence, epoch, index

    def _memory(self) -> mmap.mmap:
        assert self.memory is not None
        return self.memory

    # Releases.

    def _died(self, slot: int) -> None:
        # Runs where the last reference is dropped: in any thread, in the garbage collector, at exit.
        if self._plain and not self.streams.in_use():
            del self.live[slot]
            self.freed.append(slot)
            if self.waited:
                self._wake()
            if self._closed:  # the pool was closed in the meantime
                self._unmap()
            return
        if self._foreign:
            return
        if self.debug:
            self._settle(slot)
        if self.streams.idle(slot):
            self._release(slot)  # otherwise poll() does
        elif self._closed:
            self._finish()

    def _finish(self) -> None:
        for slot in self.streams.finish():
            self._release(slot)

    def _release(self, slot: int) -> None:
        if self.debug and not self.readonly:
            ctypes.memset(self._addresses[slot], POISON, self._bytes[slot])
        self.live.pop(slot, None)
        self.freed.append(slot)
        if self.waited:
            self._wake()
        if self._closed:
            self._unmap()

    def poll(self) -> None:
        """Gives back the slots whose copies to a device are done."""
        for slot in self.streams.done():
            self._release(slot)

    def take_freed(self) -> List[int]:
        """Slots to be given back to the server now."""
        out: List[int] = []
        while True:
            try:
                out.append(self.freed.popleft())
            except IndexError:  # another thread may have taken the last
                return out

    def close(self) -> None:
        """Nothing more will come. The memory stays mapped, and belongs to the server, until the last lease is freed."""
        self._closed, self._plain = True, False
        self._finish()
        self._unmap()

    def _unmap(self) -> None:
        with self._lock:
            if self.live or self.memory is None:
                return
            self.memory, leases = None, self._leases
            self._leases = []
        del leases[:]  # types refer to this pool: break the cycle, so that the mapping is freed at once
        if self.pinned:
            _streams.unregister(self.address)
        self._connection.close()

    def forked(self) -> None:
        """In a forked child: its copies of arrays give nothing back, and its end does not affect the parent's slots."""
        self._foreign, self._plain = True, False
        self._connection.close()

    # Debug mode.

    def _prove(self, slot: int, index: int, epoch: int) -> None:
        magic, version, size, number, flags, sequence, e, i = self._header(slot)
        if (magic, version, size, number) != (_MAGIC, 1, HEADER, slot) or flags & _FILLING or (i, e) != (index, epoch):
            raise FeedError(f"slot {slot} does not hold batch {index} of epoch {epoch}: its header says slot {number}, "
                            f"batch {i} "
                            f"of epoch {e}{', being filled' if flags & _FILLING else ''}")
        self._proof[slot] = sequence, self._checksum(slot) if self.readonly else 0

    def _checksum(self, slot: int) -> int:
        at = (slot - 1) * self.slot_bytes + HEADER
        return zlib.crc32(memoryview(self._memory())[at:at + self._bytes[slot]])

    def check(self, slot: int) -> None:
        """Raises FeedError if the server has begun to fill this slot again although it is held."""
        if self.debug and self.memory is not None and slot in self._proof:
            _, _, _, _, flags, sequence, _, _ = self._header(slot)
            if flags & _FILLING or sequence != self._proof[slot][0]:
                raise FeedError(f"slot {slot} was filled again while this process holds it: its sequence is "
                                f"{sequence}, and was "
                                f"{self._proof[slot][0]} when the batch came. This is a bug in the server: please "
                                f"report it")

    def _settle(self, slot: int) -> None:
        try:
            self.check(slot)
            if self.readonly and self._checksum(slot) != self._proof[slot][1]:
                raise FeedError(f"somebody wrote to slot {slot} of a feed with readonly=True, which other trainers "
                                f"may read. "
                                "Tensors are not protected from in-place operations: copy() them first, or leave "
                                "readonly out")
        except FeedError as e:
            self.fault = self.fault or str(e)
        self._proof.pop(slot, None)


_pools: "weakref.WeakSet[SlotPool]" = weakref.WeakSet()


def _forked() -> None:
    for pool in list(_pools):
        pool.forked()


os.register_at_fork(after_in_child=_forked)


