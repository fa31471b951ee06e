"""Arrays on a device, and their buffers.

A buffer belongs to one batch at a time, by a Lease. All arrays of the batch refer to the lease, and so do tensors
and DLPack capsules made of them. When the last of them is freed, an event is recorded on every stream that used the
buffer, and the buffer is filled again only after these events.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import sys
import threading
import weakref
from typing import Any, Dict, Iterable, List, Optional, Tuple

import numpy as np

from . import _cuda_driver
from ._batch import numpy_type
from ._cuda_driver import Device

_leases: "weakref.WeakSet[Lease]" = weakref.WeakSet()
_leases_lock = threading.RLock()  # reentrant: the garbage collector may free a lease within


class Buffer:
    """Memory of the device, with its events: ready is recorded when a batch is complete in it, used when the work on
    the batch is done. All methods need the context to be current."""

    def __init__(self, at: int, size: int, ready: int) -> None:
        self.at, self.size, self.ready = at, size, ready
        self.used: List[int] = []
        self._spare: List[int] = []

    def retire(self, device: Device, streams: Iterable[int]) -> None:
        """Records the work that the streams have so far."""
        self._spare += self.used
        self.used = []
        for stream in streams:
            event = self._spare.pop() if self._spare else device.event()
            self.used.append(event)
            device.record(event, stream)

    def destroy(self, device: Device) -> None:
        for event in (self.ready, *self.used, *self._spare):
            device.destroy(event)


class Lease:
    """A buffer's use by one batch. owner.retire(buffer, streams) is called at its end, from any thread."""

    def __init__(self, device: Device, buffer: Buffer, owner: Any) -> None:
        self.device, self.buffer, self._owner = device, buffer, owner
        self.streams: Dict[int, Any] = {}  # streams that use the buffer; the objects keep them alive
        with _leases_lock:
            _leases.add(self)

    def use(self, stream: Any) -> None:
        self.streams.setdefault(_cuda_driver.handle(stream), stream)

    def holds(self, address: int) -> bool:
        return self.buffer.at <= address < self.buffer.at + self.buffer.size

    def __del__(self) -> None:
        # Runs where the last reference is dropped. The end of the process frees everything.
        owner = getattr(self, "_owner", None)
        if owner is not None and not sys.is_finalizing() and self.device.usable():
            owner.retire(self.buffer, self.streams)


class DeviceArray:
    """An array on a CUDA device, for libraries that support __cuda_array_interface__ or DLPack: torch.as_tensor(a,
    device="cuda"), torch.from_dlpack(a), cupy.asarray(a), jax.dlpack.from_dlpack(a), numba. None of these
    copies, and all keep the memory as long as they use it.

    shape, dtype  numpy's; bfloat16, which numpy does not have, is the string "bfloat16"
    stream        the CUDA stream (its number) on which the array becomes complete
    get()         a copy as a numpy array (bfloat16: as uint16), complete on return
    array[i], array[a:b]  rows
    """

    def __init__(self, lease: Lease, address: int, shape: Tuple[int, ...], dtype: str, stream: int) -> None:
        self._lease, self._address = lease, address
        self.shape, self.stream = tuple(shape), stream
        self._bits = numpy_type(dtype)
        self.dtype: Any = "bfloat16" if dtype == "bfloat16" else self._bits

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self._bits.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def device(self) -> str:
        return self._lease.device.name

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array of no dimensions has no length")
        return self.shape[0]

    def __getitem__(self, key: Any) -> "DeviceArray":
        row = self.nbytes // self.shape[0] if self.shape and self.shape[0] else 0
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise IndexError("only slices of neighbouring rows: convert the array to a tensor for more")
            shape: Tuple[int, ...] = (max(stop - start, 0), *self.shape[1:])
        else:
            start = key.__index__()
            start += len(self) if start < 0 else 0
            if not 0 <= start < len(self):
                raise IndexError(f"row {key} of {len(self)}")
            shape = self.shape[1:]
        return DeviceArray(self._lease, self._address + start * row, shape,
                           "bfloat16" if self.dtype == "bfloat16" else self._bits.str, self.stream)

    def get(self) -> np.ndarray:
        out = np.empty(self.shape, self._bits)
        device = self._lease.device
        if out.nbytes:
            with device:
                device.driver.cuStreamSynchronize(ctypes.c_void_p(self.stream))
                device.download(ctypes.c_void_p(out.ctypes.data), self._address, out.nbytes)
        return out

    def record_stream(self, stream: Any) -> None:
        """See shoal.Batch.record_stream."""
        self._lease.use(stream)

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        # The interface does not allow stream 0; 1 is the default stream.
        return {"shape": self.shape, "typestr": self._bits.str, "data": (self._address if self.size else 0, False),
                "version": 3,
                "strides": None, "stream": self.stream or 1}

    def __dlpack_device__(self) -> Tuple[int, int]:
        return _CUDA, self._lease.device.ordinal

    def __dlpack__(self, *, stream: Optional[int] = None, **_: Any) -> Any:
        """stream: the consumer's stream, as the standard numbers it: 1 or None is the default stream; with -1 the
        consumer synchronises itself."""
        if stream != -1:
            wanted = 0 if stream is None or stream == 1 else int(stream)
            if wanted != self.stream:
                device, lease = self._lease.device, self._lease
                with device:
                    device.wait(wanted, lease.buffer.ready)
                lease.use(wanted)
        return _capsule(self, self._lease, self._address)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device!r})"


def record_stream(array: Any, stream: Any) -> None:
    """Declares that work on the array or tensor of a batch runs on this stream, now or before the batch is freed: the
    memory is reused only after the work that the stream has at that time. No effect on arrays outside the feed's
    device memory."""
    if isinstance(array, DeviceArray):
        array.record_stream(stream)
        return
    at = array.data_ptr() if hasattr(array, "data_ptr") else array.__cuda_array_interface__["data"][0]
    with _leases_lock:
        found = [lease for lease in _leases if lease.holds(at)]
    for lease in found:
        lease.use(stream)


# DLPack, with the layout of dlpack.h, version 0.8.

_CUDA = 2
_KINDS = {"i": 0, "u": 1, "f": 2}
_BFLOAT = 4
_NAME, _USED = b"dltensor", b"used_dltensor"


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


_managed: Dict[int, Tuple[Any, ...]] = {}  # by address: objects that a consumer uses


def _forget(at: int) -> None:
    _managed.pop(at, None)


_delete = _Deleter(_forget)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# By address: the capsule is being destroyed, and no reference to it may be taken.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p,
                             ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


def _capsule_died(capsule: int) -> None:
    if _is_valid(capsule, _NAME):  # otherwise a consumer took it, and calls the deleter
        _managed.pop(_pointer(capsule, _NAME), None)


_died = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_capsule_died)


def _capsule(array: DeviceArray, lease: Lease, address: int) -> Any:
    shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
    # Some consumers require strides even for contiguous rows.
    after = list(itertools.accumulate(reversed(array.shape[1:]), lambda a, b: a * b, initial=1))[::-
        1] if array.shape else [1]
    strides = (ctypes.c_int64 * len(after))(*after)
    kind = _BFLOAT if array.dtype == "bfloat16" else _KINDS[array.dtype.kind]
    managed = _Managed(_DLTensor(address, _CUDA, lease.device.ordinal, array.ndim, kind, array.itemsize * 8, 1, shape,
                                 strides, 0), None, _delete)
    at = ctypes.addressof(managed)
    _managed[at] = managed, shape, strides, lease
    return _new_capsule(at, _NAME, ctypes.cast(_died, ctypes.c_void_p))
