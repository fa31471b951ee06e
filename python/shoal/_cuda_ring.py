"""The common part of both ways to a device: buffers that batches use in turn, and the batches that the trainer gets."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from . import _cuda_driver
from ._batch import numpy_type
from ._cuda_array import Buffer, DeviceArray, Lease
from ._cuda_driver import CUDAError, Device

ON_HOST = ("id", "valid", "offsets")

log = logging.getLogger("shoal")


class Plane(NamedTuple):
    """Where a plane is in a buffer of the device."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    offset: int


class Staged:
    """A batch that is on its way to the device, or there."""

    def __init__(self, lease: Lease, planes: Sequence[Plane], host: Dict[str, np.ndarray]) -> None:
        self._lease, self._planes, self._host = lease, planes, host
        self._taken: Optional[Dict[str, Any]] = None

    def take(self, stream: Any = None) -> Dict[str, Any]:
        """The planes by name, on the device except id, valid and offsets, which are numpy arrays. Returns at once:
        stream (a number, a torch.cuda.Stream or the like) waits for the copies; default: torch's current stream, or the
        default stream. Tensors if torch has CUDA, else DeviceArray; raw samples' data as a list of rows."""
        if self._taken is None:
            lease, device = self._lease, self._lease.device
            cuda = _cuda_driver.torch_cuda()
            if stream is None and cuda is not None:
                stream = cuda.current_stream(device.ordinal)
            number = _cuda_driver.handle(stream)
            with device:
                device.wait(number, lease.buffer.ready)
            lease.use(stream)
            convert = _tensor if cuda is not None else lambda array: array
            out: Dict[str, Any] = {}
            for p in self._planes:
                array = DeviceArray(lease, lease.buffer.at + p.offset, p.shape, p.dtype, number)
                if p.name == "data" and "offsets" in self._host:
                    cuts = self._host["offsets"].tolist()
                    out[p.name] = [convert(array[a:b]) for a, b in zip(cuts, cuts[1:])]
                else:
                    out[p.name] = convert(array)
            self._taken = {**out, **self._host}
        return dict(self._taken)


def _tensor(array: DeviceArray) -> Any:
    """The array as a tensor on the same memory, with the types of tensors on the host (docs/python.md)."""
    torch = sys.modules["torch"]
    if array.size == 0:
        name = str(array.dtype)
        wide = {"uint16": "int32", "uint32": "int32", "uint64": "int64"}.get(name, name)
        return torch.empty(array.shape, dtype=getattr(torch, wide), device=array.device)
    if array.dtype != "bfloat16" and array.dtype.kind != "u" or array.itemsize == 1:
        return torch.as_tensor(array, device=array.device)
    signed = torch.as_tensor(_Signed(array), device=array.device)
    if array.dtype == "bfloat16":
        return signed.view(torch.bfloat16)
    return signed.to(torch.int32) & 0xFFFF if array.itemsize == 2 else signed


class _Signed:
    """An array's bits as signed integers."""

    def __init__(self, array: DeviceArray) -> None:
        self._array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "typestr": f"<i{array.itemsize}"}


class Ring:
    """Buffers that batches use in turn."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = threading.RLock()  # reentrant: the garbage collector may free a lease within
        self._closed = False

    def retire(self, buffer: Buffer, streams: Dict[int, Any]) -> None:
        """Ends a batch whose buffer these streams used; from any thread."""
        try:
            with self.device:
                # An event recorded now would belong to the graph.
                if any(self.device.capturing(s) for s in streams):
                    self._defer(buffer, streams)
                    return
                self._mark(buffer, streams)
        except CUDAError as e:
            log.warning("shoal: a buffer on %s is lost: %s", self.device.name, e)
            return
        self._returned(buffer)

    def _mark(self, buffer: Buffer, streams: Dict[int, Any]) -> None:
        buffer.retire(self.device, streams)

    def _defer(self, buffer: Buffer, streams: Dict[int, Any]) -> None:
        """Calls retire again, later."""
        raise NotImplementedError

    def _returned(self, buffer: Buffer) -> None:
        raise NotImplementedError


def bits(plane: Any, buffer: np.ndarray, first: int = 0) -> np.ndarray:
    """A plane of a batch, whose bytes from `first` on are in buffer; bfloat16 as uint16."""
    array: np.ndarray = buffer[plane.offset - first:plane.offset - first + plane.length].view(
        numpy_type(plane.dtype)).reshape(plane.shape)
    return array
