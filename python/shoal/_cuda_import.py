"""Batches that shoal-gpu has already put on the device: imports its buffers. See docs/gpu.md, "The handover of device
buffers"."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import queue
import socket
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from . import _cuda_driver
from ._cuda_array import Buffer, Lease
from ._cuda_driver import CUDAError, Device, Unavailable
from ._cuda_ring import ON_HOST, Plane, Ring, Staged, bits

_POSIX = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_CAPTURE_SECONDS = 0.02  # between checks whether a graph is still being captured

log = logging.getLogger("shoal")


class _EventHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


class _Access(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int)]


class Imported(Ring):
    """The buffers of a pool of shoal-gpu, mapped.

    opened  the Opened message
    answer  the handover's JSON: slots, slot_bytes, uuid, host_bytes, events
    fds     its descriptors: one for each buffer, then the memfd of the small planes. The caller closes them, at once
            if it likes
    connection  of the handover: ended when none of the server's memory is in use any more

    Raises Unavailable; then it holds nothing.
    """

    def __init__(self, device: Device, opened: Any, answer: Dict[str, Any], fds: Sequence[int],
                 connection: Optional[socket.socket] = None) -> None:
        super().__init__(device)
        count, self._size, self._host_bytes = int(answer["slots"]), int(answer["slot_bytes"]), int(answer["host_bytes"])
        if answer["uuid"] != device.uuid:
            raise Unavailable(f"shoal-gpu uses {answer['uuid']}, but {device.name} of this process is {device.uuid}: "
                              "pass the feed the device of that GPU, and do not hide it with CUDA_VISIBLE_DEVICES")
        if not device.maps_memory:
            raise Unavailable(f"{device.name} cannot map memory of another process")
        if len(fds) != count + 1 or len(answer["events"]) != count:
            raise Unavailable(f"{len(fds)} descriptors and {len(answer['events'])} events for {count} buffers: the "
                              f"server has another version; update both")
        self._connection = connection
        self._free_events: Dict[int, int] = {}  # by address of the buffer
        self._release: Dict[int, Callable[[], Any]] = {}
        self._buffers: List[Buffer] = []
        self._at = self._stream = self._mapped = self._total = 0
        self._later: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
        self._host = mmap.mmap(fds[-1], count * self._host_bytes, mmap.MAP_SHARED,
                               mmap.PROT_READ) if self._host_bytes else None
        try:
            with device:
                self._stream = device.stream()
                self._map(fds[:-1], count)
                for i, events in enumerate(answer["events"]):
                    at = self._at + i * self._size
                    self._buffers.append(Buffer(at, self._size, self._event(events["ready"])))
                    self._free_events[at] = self._event(events["free"])
        except CUDAError as e:
            self._undo()
            raise Unavailable(f"{device.name}: the buffers of shoal-gpu cannot be imported: {e}. Both processes must "
                              "belong to one user, or see each other (one pid namespace), and the device needs "
                              "memory for a context") from None
        except BaseException:
            self._undo()
            raise
        self._thread = threading.Thread(target=self._settle, name="shoal-cuda", daemon=True)
        self._thread.start()

    def _map(self, fds: Sequence[int], count: int) -> None:
        driver, made = self.device.driver, ctypes.c_uint64()
        driver.cuMemAddressReserve(ctypes.byref(made), ctypes.c_size_t(count * self._size), ctypes.c_size_t(0),
                                   ctypes.c_uint64(0), ctypes.c_uint64(0))
        self._at, self._total = made.value, count * self._size
        for i, fd in enumerate(fds):
            memory = ctypes.c_uint64()
            driver.cuMemImportFromShareableHandle(ctypes.byref(memory), ctypes.c_void_p(fd), _POSIX)
            try:
                driver.cuMemMap(_cuda_driver.address(self._at + i * self._size), ctypes.c_size_t(self._size),
                                ctypes.c_size_t(0), memory, ctypes.c_uint64(0))
                self._mapped += self._size
            finally:
                driver.cuMemRelease(memory)  # the mapping keeps it
        access = _Access(1, self.device.number, 3)
        driver.cuMemSetAccess(_cuda_driver.address(self._at), ctypes.c_size_t(self._total), ctypes.byref(access),
                              ctypes.c_size_t(1))

    def _event(self, text: str) -> int:
        raw, made = _EventHandle.from_buffer_copy(bytes.fromhex(text)), ctypes.c_void_p()
        self.device.driver.cuIpcOpenEventHandle(ctypes.byref(made), raw)
        assert made.value is not None
        return made.value

    def put(self, header: Any, release: Callable[[], Any]) -> Staged:
        """The batch in the buffer of a BatchHeader. release is called, from any thread, when the buffer can go back to
        the server: nothing refers to the batch any more, and an event tells the server when the device's work is
        done."""
        buffer = self._buffers[header.slot - 1]
        planes = {p.name: p for p in header.planes}
        first = min(p.offset for p in header.planes if p.name != "data")
        host = {}
        with self._lock:
            if self._closed:
                raise RuntimeError("the feed was closed")
            if buffer.at in self._release:
                raise RuntimeError(f"the server filled buffer {header.slot} again while this process holds it: please "
                                   f"report this")
            if self._host is not None:
                start = (header.slot - 1) * self._host_bytes
                room = np.frombuffer(self._host, np.uint8, self._host_bytes, start)
                host = {name: bits(planes[name], room, first).copy() for name in ON_HOST if name in planes}
                del room  # otherwise the mapping could not be closed
            self._release[buffer.at] = release
            lease = Lease(self.device, buffer, self)
        return Staged(lease, [Plane(p.name, p.dtype, tuple(p.shape), p.offset)
                              for p in header.planes if p.name not in host], host)

    def _mark(self, buffer: Buffer, streams: Dict[int, Any]) -> None:
        # One stream waits for all the others, and records the server's event.
        buffer.retire(self.device, streams)
        self.device.wait(self._stream, buffer.ready)
        for event in buffer.used:
            self.device.wait(self._stream, event)
        self.device.record(self._free_events[buffer.at], self._stream)

    def _returned(self, buffer: Buffer) -> None:
        with self._lock:
            release = self._release.pop(buffer.at)
            last = self._closed and not self._release
        release()
        if last:
            self._undo()

    def _defer(self, buffer: Buffer, streams: Dict[int, Any]) -> None:
        self._later.put((buffer, streams))

    def _settle(self) -> None:
        while True:
            item = self._later.get()
            if item is None:
                return
            time.sleep(_CAPTURE_SECONDS)
            self.retire(*item)

    def close(self) -> None:
        """Unmaps the buffers once nothing refers to their batches."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last = not self._release
        if last and self.device.usable():
            self._undo()

    def _undo(self) -> None:
        device = self.device
        self._later.put(None)
        try:
            with device:
                if self._stream:
                    device.driver.cuStreamSynchronize(ctypes.c_void_p(self._stream))
                    device.driver.cuStreamDestroy_v2(ctypes.c_void_p(self._stream))
                for buffer in self._buffers:
                    buffer.destroy(device)
                for event in self._free_events.values():
                    device.destroy(event)
                if self._mapped:
                    device.driver.cuMemUnmap(_cuda_driver.address(self._at), ctypes.c_size_t(self._mapped))
                if self._at:
                    device.driver.cuMemAddressFree(_cuda_driver.address(self._at), ctypes.c_size_t(self._total))
        except CUDAError as e:
            log.warning("shoal: giving back the buffers of shoal-gpu: %s", e)
        if self._host is not None:
            self._host.close()
        if self._connection is not None:
            with self._connection, contextlib.suppress(OSError):  # the server may have ended
                self._connection.shutdown(socket.SHUT_RDWR)  # forked workers have it, too
