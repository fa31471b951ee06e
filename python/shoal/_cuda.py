"""Batches on a CUDA device, by ctypes on libcuda.so.1 in the trainer's own (primary) context.

Two ways (docs/gpu.md). Stage: the trainer alone uses the GPU. The slots that `shoal serve` fills are page-locked
once, each is copied on a side stream into a ring of device buffers, and the fused kernel (finish.ptx) converts it
there to the wanted type and layout. Imported (_cuda_import.py): shoal-gpu fills device buffers, and this process
imports them. Both turn the header of a batch into a Staged, from which the trainer's thread takes arrays.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import os
import queue
import threading
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

import numpy as np

from . import _cuda_driver
from ._cuda_array import Buffer, DeviceArray, Lease, record_stream
from ._cuda_driver import CUDAError, Device, Unavailable
from ._cuda_finish import Finish
from ._cuda_import import Imported
from ._cuda_ring import ON_HOST, Plane, Ring, Staged, bits

__all__ = ["CUDAError", "Device", "DeviceArray", "Finish", "Imported", "Stage", "Staged", "Unavailable",
           "record_stream"]

HEADER = 4096  # of a slot
_THREADS = 256
_HELD_SECONDS = 5.0
_CLOSED = object()

log = logging.getLogger("shoal")


class Stage(Ring):
    """Copies batches from slots to the device.

    opened      the Opened message: transform, planes of a full batch
    slot_map    writable mapping of the memfd, slots * slot_bytes long
    buffers     number of device buffers, each for one batch that is on its way or referred to

    Raises Unavailable; then it holds nothing, and batches can stay in host memory.
    """

    def __init__(self, device: Device, opened: Any, slot_map: Any, slot_bytes: int, *, buffers: int = 4) -> None:
        super().__init__(device)
        self._slot_bytes = slot_bytes
        self._free: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
        # retired while a graph was being captured
        self._later: Deque[Tuple[Buffer, Dict[int, Any]]] = collections.deque()
        planes = {p.name: p for p in opened.planes}
        self._finish = Finish.left(opened)
        self._export = (ctypes.c_ubyte * len(slot_map)).from_buffer(slot_map)  # keeps the mapping
        self._base = ctypes.addressof(self._export)
        self._slots = np.frombuffer(slot_map, np.uint8)
        self._done: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
        self._failed: List[Tuple[CUDAError, Any, Lease]] = []  # batches whose slots the device may still be reading
        self._registered = False
        self._buffers: List[Buffer] = []
        self._copied: Dict[int, int] = {}  # events by address of the buffer: the slot was read
        self._allocated: List[int] = []
        self._stream = self._staging = self._table = self._finished = 0
        room = slot_bytes - HEADER
        try:
            with device:
                self._open(len(slot_map), buffers, room, max(planes["data"].length, 1))
        except CUDAError as e:
            self._undo()
            remedy = {_cuda_driver.OUT_OF_MEMORY: f": {buffers} batches do not fit into what is free of the device's "
                      f"memory, or too little memory can "
                      "be page-locked (ulimit -l). Use a smaller batch"}.get(e.code, "")
            raise Unavailable(f"{device.name}: {e}{remedy}") from None
        except BaseException:
            self._undo()
            raise
        self._thread = threading.Thread(target=_complete, args=(device, self._done, self._failed, self._free),
                                        name="shoal-cuda", daemon=True)
        self._thread.start()

    def _open(self, mapped: int, buffers: int, room: int, rows_bytes: int) -> None:
        device, finish = self.device, self._finish
        try:
            device.driver.cuMemHostRegister_v2(ctypes.c_void_p(self._base), ctypes.c_size_t(mapped), 1)
            self._registered = True
        except CUDAError as e:
            if e.code != _cuda_driver.ALREADY_REGISTERED:  # by torch, with pin_memory=True
                raise
        self._stream = device.stream()
        if finish is not None:
            self._module = ctypes.c_void_p()
            with open(os.path.join(os.path.dirname(__file__), "finish.ptx"), "rb") as f:
                device.driver.cuModuleLoadData(ctypes.byref(self._module), f.read() + b"\0")
            self._kernel = ctypes.c_void_p()
            device.driver.cuModuleGetFunction(ctypes.byref(self._kernel), self._module, finish.kernel.encode())
            self._blocks = 8 * max(device.multiprocessors, 1)
            rows = rows_bytes // (finish.source_height * finish.source_width * 3)
            self._finished = _up(finish.nbytes(rows))
            self._staging = self._allocate(_up(rows_bytes))
            if finish.table is not None:
                table = np.ascontiguousarray(finish.table)
                self._table = self._allocate(table.nbytes)
                device.driver.cuMemcpyHtoD_v2(_cuda_driver.address(self._table), ctypes.c_void_p(table.ctypes.data),
                                              ctypes.c_size_t(table.nbytes))
            room -= rows_bytes
        for _ in range(buffers):
            size = self._finished + _up(room)
            self._buffers.append(Buffer(self._allocate(size), size, device.event()))
            self._copied[self._buffers[-1].at] = device.event()
            self._free.put(self._buffers[-1])

    def _allocate(self, size: int) -> int:
        self._allocated.append(self.device.allocate(size))
        return self._allocated[-1]

    def put(self, header: Any, release: Callable[[], Any]) -> Staged:
        """Queues a copy of the batch in the slot of a BatchHeader. Returns at once, or, if every buffer is referred to,
        when one is free. release is called, from a thread of this object, as soon as nothing reads the slot any more;
        until then the slot must not be given back.

        Raises RuntimeError if a call fails, and for every later batch. If waiting for a copy fails, its slot is not
        released before close()."""
        with self._lock:
            self._check()
            slots = self._slots
        start = (header.slot - 1) * self._slot_bytes + HEADER
        batch = slots[start:start + header.total_bytes]
        planes = {p.name: p for p in header.planes}
        host = {name: bits(planes[name], batch).copy() for name in ON_HOST if name in planes}
        if self._finish is not None:
            self._finish.check(bits(planes["finish"], batch))
        buffer = self._buffer()
        with self._lock:  # close() must not free anything meanwhile
            try:
                self._check()
            except RuntimeError:
                self._returned(buffer)
                raise
            lease = Lease(self.device, buffer, self)
            try:
                with self.device:
                    for event in buffer.used:
                        self.device.wait(self._stream, event)
                    made = self._copy(planes, self._base + start, header, buffer)
                    self.device.record(buffer.ready, self._stream)
            except CUDAError as e:
                self._failed.append((e, release, lease))  # part of the copy may be in progress
                raise RuntimeError(f"batch {header.index} of epoch {header.epoch} to {self.device.name}: {e}") from None
            self._done.put((self._copied[buffer.at], release, lease))
        return Staged(lease, made, host)

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("the feed was closed")
        if self._failed:
            raise RuntimeError(f"a batch could not be copied to {self.device.name}: {self._failed[0][0]}. Resume from "
                               "the last state in a new process, or without device=")

    def _copy(self, planes: Dict[str, Any], source: int, header: Any, buffer: Buffer) -> List[Plane]:
        """Queues the copies and the kernel, and returns where the planes will be."""
        device, finish, stream = self.device, self._finish, self._stream
        if finish is None:
            if header.total_bytes:
                device.upload(buffer.at, source, header.total_bytes, stream)
            device.record(self._copied[buffer.at], stream)
            return [Plane(p.name, p.dtype, tuple(p.shape), p.offset) for p in planes.values() if p.name not in ON_HOST]
        data, others = planes["data"], [p for p in planes.values() if p.name != "data"]
        rows, base, end = int(data.shape[0]), min(p.offset for p in others), max(p.offset + p.length for p in others)
        if base < data.offset + data.length or self._finished + end - base > buffer.size or finish.nbytes(
                rows) > self._finished:
            raise RuntimeError("the batch's planes differ from those that the server announced: update server and "
                               "client to one version")
        if data.length:
            device.upload(self._staging, source + data.offset, data.length, stream)
        device.upload(buffer.at + self._finished, source + base, end - base, stream)
        device.record(self._copied[buffer.at], stream)
        params = buffer.at + self._finished + planes["finish"].offset - base
        self._launch(buffer.at, params, rows)
        return [Plane("data", finish.dtype, finish.shape(rows), 0),
                *(Plane(p.name, p.dtype, tuple(p.shape), self._finished + p.offset - base) for p in others
                  if p.name not in ("finish", *ON_HOST))]

    def _launch(self, to: int, params: int, rows: int) -> None:
        f = self._finish
        assert f is not None
        groups = rows * f.height * ((f.width + 3) // 4)  # a thread makes four pixels
        if groups == 0:
            return
        values = [ctypes.c_uint64(v) for v in (to, self._staging, params, self._table)]
        numbers = [ctypes.c_uint32(v) for v in (rows, f.height, f.width, f.source_height, f.source_width)]
        arguments = (ctypes.c_void_p * 9)(*(ctypes.addressof(v) for v in (*values, *numbers)))
        blocks = min((groups + _THREADS - 1) // _THREADS, self._blocks)
        self.device.driver.cuLaunchKernel(self._kernel, blocks, 1, 1, _THREADS, 1, 1, 0, ctypes.c_void_p(self._stream),
                                          arguments, None)

    def _buffer(self) -> Buffer:
        told, waited = False, 0.0
        while True:
            self._settle()
            self._check()
            try:
                got = self._free.get(timeout=0.25 if self._later else 1.0)
            except queue.Empty:
                waited += 1.0
                if waited >= _HELD_SECONDS and not told:
                    told = True
                    log.warning("shoal: all %d batches on %s are still referred to, so no other can be copied there: "
                                "drop them, or keep copies "
                                "(tensor.clone())", len(self._buffers), self.device.name)
                continue
            if got is not _CLOSED:
                return got  # type: ignore[no-any-return]

    def _defer(self, buffer: Buffer, streams: Dict[int, Any]) -> None:
        self._later.append((buffer, streams))

    def _settle(self) -> None:
        for _ in range(len(self._later)):
            self.retire(*self._later.popleft())

    def _returned(self, buffer: Buffer) -> None:
        with self._lock:
            if not self._closed:
                self._free.put(buffer)
                return
        self._destroy(buffer)

    def close(self) -> None:
        """Waits for the copies in progress, and frees what is not referred to. Arrays that are stay valid."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if not self.device.usable():
            return
        self._free.put(_CLOSED)  # wakes a thread that waits for a buffer
        self._done.put(None)
        if self._thread is not threading.current_thread():  # the garbage collector may run close() in it
            self._thread.join()
        self._settle()
        self._undo()

    def _undo(self) -> None:
        self._closed = True
        device = self.device
        idle = []
        while True:
            try:
                got = self._free.get_nowait()
            except queue.Empty:
                break
            if got is not _CLOSED:
                idle.append(got)
        try:
            with device:
                if self._stream:
                    device.driver.cuStreamSynchronize(ctypes.c_void_p(self._stream))
                    device.driver.cuStreamDestroy_v2(ctypes.c_void_p(self._stream))
                    self._stream = 0
                busy = {b.at for b in self._buffers}
                for at in [at for at in self._allocated if at not in busy]:  # staging and table
                    device.free(at)
                if self._registered:
                    device.driver.cuMemHostUnregister(ctypes.c_void_p(self._base))
        except CUDAError as e:
            log.warning("shoal: closing the stage on %s: %s", device.name, e)
        if self._stream:
            _kept.append((self._export, self._failed))
        for buffer in idle:
            self._destroy(buffer)
        self._slots = np.empty(0, np.uint8)
        del self._export  # the mapping may go
        if not self._stream:  # nothing reads slots any more
            for _, release, _ in self._failed:
                release()
            self._failed.clear()

    def _destroy(self, buffer: Buffer) -> None:
        try:
            with self.device:
                for event in (buffer.ready, *buffer.used):
                    self.device.synchronize(event)
                self.device.free(buffer.at)
                buffer.destroy(self.device)
                self.device.destroy(self._copied[buffer.at])
        except CUDAError as e:
            log.warning("shoal: closing the stage on %s: %s", self.device.name, e)


_kept: List[Any] = []  # mappings and slots that a device may still be reading


def _complete(device: Device, done: "queue.SimpleQueue[Any]", failed: List[Tuple[CUDAError, Any, Lease]],
              free: "queue.SimpleQueue[Any]") -> None:
    """Gives slots back in the order in which they were copied. It keeps a batch's lease until then, since the events
    belong to the buffer. If waiting for a copy fails, its slot goes to failed."""
    while True:
        item = done.get()
        if item is None:
            return
        event, release, lease = item
        try:
            with device:
                device.synchronize(event)
        except CUDAError as e:
            log.error("shoal: waiting for a copy to %s failed: %s", device.name, e)
            failed.append((e, release, lease))
            free.put(_CLOSED)  # wakes a thread that waits for a buffer
        else:
            release()
        del item, release, lease


def _up(size: int) -> int:
    return -(-size // 512) * 512
