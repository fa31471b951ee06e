"""Batches, and how the planes of a buffer become arrays. See Batch."""

from __future__ import annotations

import math
import sys
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Type

import numpy as np

_KNOWN = ("data", "label", "id", "valid")
_ARRAYS = _KNOWN + ("fields",)
_OFFSETS = "offsets"
_FIRST, _SECOND = "view0", "view1"  # the first view's plane is data

Batched = Tuple[Any, Dict[str, Any]]
Draws = Tuple[str, int, bytes]  # the transform, the session's seed, and the header's draws


class BadSample(NamedTuple):
    """A skipped sample.

    row    its row in the batch, from 0; the row's data are zeros, its valid is 0, its label -100
    id     its number in the dataset, from 0
    path   its path in the dataset
    cause  why it could not be read or decoded, a sentence
    """

    row: int
    id: int
    path: str
    cause: str


class Batch:
    """One batch. Unpacks to (data, label): `for images, labels in feed`.

    data   [rows, ...] of the transform's shape and type; of views, a list of such arrays, also the
           attributes view0, view1, ...; for raw samples a list of one-dimensional uint8 arrays, one for
           each sample; with map=, the function's results
    label  int64 [rows], class numbers; -100 in rows that are not valid, which torch's losses ignore
    id     int64 [rows], sample numbers; -1 in rows of padding
    valid  uint8 [rows], 1, or 0 for padding and skipped samples, whose data are zeros
    fields further results of the transform by name, such as boxes or masks: also attributes
    index, epoch   number of the batch in its epoch, and the epoch, both from 0
    bad    skipped samples (BadSample); empty under bad="error"
    params random draws of each row (see there)

    Arrays are the caller's to keep. Their memory is reused only when nothing refers to it any more, neither they nor
    anything made of them without a copy. The caller may also write to them, except in a feed with readonly=True.

    Arrays are numpy's, torch's tensors, or on a device (Feed's as_torch and device). A Batch holds its memory as an
    array does. AttributeError for a field that the transform does not make.
    """

    __slots__ = ("data", "label", "id", "valid", "fields", "index", "epoch", "bad", "_layout", "_owner", "_draws",
                 "__weakref__")

    data: Any
    label: Any
    id: Any
    valid: Any
    fields: Dict[str, Any]
    index: int
    epoch: int
    bad: Sequence[BadSample]
    _layout: Optional[Layout]
    _owner: Any
    _draws: Optional[Draws]

    def __init__(self, data: Any, label: Any, id: Any, valid: Any, index: int, epoch: int,
                 bad: Sequence[BadSample] = (),
                 fields: Optional[Dict[str, Any]] = None) -> None:
        self.data, self.label, self.id, self.valid, self.fields = data, label, id, valid, fields or {}
        self.index, self.epoch, self.bad = index, epoch, bad
        self._layout = self._owner = self._draws = None

    def __getattr__(self, name: str) -> Any:
        # Called for missing attributes only: an array that was not made yet, or a field.
        if name in _ARRAYS:
            layout = self._layout
            if layout is not None:
                value = [self.fields[v] for v in layout.views] if name == "data" and layout.views else layout.make[
                    name](self._owner)
                setattr(self, name, value)
                return value
        elif name[:1] != "_" and name in self.fields:
            return self.fields[name]
        fields = f"; its fields: {', '.join(self.fields)}" if name[:1] != "_" and self.fields else ""
        raise AttributeError(f"this batch has no {name}{fields}")

    @property
    def params(self) -> List[Any]:
        """The transform's random draws for each row, as (name of the operation, its draws) in the transform's order:
        such as [("RandomResizedCrop", {"left": 3, "top": 40, "width": 200, "height": 180}), ("RandomHorizontalFlip",
        {"flip": True})]. Boxes are in pixels of the operation's input. None for rows that are not valid.
        docs/transforms.md has the names. A row of views has such a list for each view. Mixing is not included. Raises
        ValueError if the draws are unknown: samples that are not pictures, batches that were pickled or finished on a
        device, and operations after RandomRotation(expand=True)."""
        if self._draws is None:
            raise ValueError("this batch has no params: only batches of pictures have them, if not pickled and not "
                             "finished on a device")
        from . import _draws, _spec
        transform, seed, raw = self._draws
        views = _spec.views(transform)
        parsed = [_draws.parse(spec) for spec in views or [transform]]
        out: List[Any] = []
        for i, (width, height, occurrence) in zip(self.id.tolist(), np.frombuffer(raw, "<u4").reshape(-1, 3).tolist()):
            drawn = [_draws.draw(operations, seed, self.epoch, i, occurrence, (width, height), view)
                     for view, operations in enumerate(parsed if width else [])]
            out.append((drawn if views else drawn[0]) if width else None)
        return out

    def __iter__(self) -> Iterator[Any]:
        return iter((self.data, self.label))

    def _map(self, f: Callable[[Any], Any]) -> "Batch":
        done: Dict[int, Any] = {}  # views are in data and in fields
        data, label, ids, valid, fields = (_each(v, f, done)
                                           for v in (self.data, self.label, self.id, self.valid, self.fields))
        made = Batch(data, label, ids, valid, self.index, self.epoch, self.bad, fields)
        made._draws = self._draws
        return made

    def copy(self) -> "Batch":
        """A copy of the batch in memory of its own, of the same shapes and types, so that this batch's memory can be
        reused."""
        return self._map(lambda a: a.clone() if hasattr(a, "clone") else a.copy())

    def numpy(self) -> "Batch":
        """The batch with numpy arrays that share the tensors' memory. TypeError for bfloat16, which numpy does not
        have, and for tensors on a device."""
        return self._map(lambda a: a.numpy() if hasattr(a, "numpy") else a)

    def pin_memory(self, device: Any = None) -> "Batch":
        """A copy in page-locked memory, or the batch itself if its memory is page-locked (torch only).
        DataLoader(pin_memory=True) calls it."""
        if self._layout is not None and self._layout.pinned:
            return self
        return self._map(lambda t: t.pin_memory() if hasattr(t, "pin_memory") and not t.is_pinned() else t)

    def to(self, *args: Any, **kwargs: Any) -> "Batch":
        """A copy elsewhere: Tensor.to on every tensor (torch only). With non_blocking=True to a CUDA device, this
        batch's memory is reused only when the copies are done, even if nothing refers to the batch any more."""
        moved = self._map(lambda t: t.to(*args, **kwargs) if hasattr(t, "to") else t)
        self._used(next((t.device for t in (moved.data, moved.label) if getattr(t, "is_cuda", False)), None))
        return moved

    def record_stream(self, stream: Any) -> None:
        """Declares that work on this batch's memory runs on this CUDA stream (torch.cuda.Stream), now or before the
        batch is freed: the memory is reused only after the work that the stream has at that time. Not needed for the
        stream that was current when next() returned the batch or when it was freed, nor for those that to() ran on."""
        hold = getattr(self._owner, "hold_for", None)
        if hold is not None:
            hold(stream)
        for array in (self.data, self.label, *self.fields.values()):
            if getattr(array, "is_cuda", False):
                array.record_stream(stream)  # for torch's own memory; it ignores the feed's
            if hasattr(array, "__cuda_array_interface__"):
                from ._cuda import record_stream
                record_stream(array, stream)

    def _used(self, device: Any) -> None:
        hold = getattr(self._owner, "hold_for", None)
        if device is not None and hold is not None:
            hold(sys.modules["torch"].cuda.current_stream(device))

    def __reduce__(self) -> Any:
        return Batch, (self.data, self.label, self.id, self.valid, self.index, self.epoch, self.bad, self.fields)

    def __repr__(self) -> str:
        return f"Batch(epoch={self.epoch}, index={self.index}, rows={len(self.valid)}, valid={int(self.valid.sum())})"


class CheckedBatch(Batch):
    """A Batch in a slot under SHOAL_DEBUG=slots: each use of an array first checks that the slot is unchanged."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name in _ARRAYS:
            check = getattr(object.__getattribute__(self, "_owner"), "check", None)
            if check is not None:
                check()
        return object.__getattribute__(self, name)


def _each(value: Any, f: Callable[[Any], Any], done: Dict[int, Any]) -> Any:
    """f of all arrays in value, of each once. It is no closure: one that calls itself would keep the arrays, and so
    their slot, until a garbage collection."""
    if isinstance(value, (list, tuple)):
        made = [_each(v, f, done) for v in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        return {k: _each(v, f, done) for k, v in value.items()}
    if hasattr(value, "shape") and id(value) not in done:
        done[id(value)] = f(value)
    return done.get(id(value), value)


def with_views(data: Any, fields: Dict[str, Any]) -> Batched:
    """A batch's data and fields, of its planes: with several views, data is the list of them."""
    if _SECOND not in fields:
        return data, fields
    fields = {_FIRST: data, **fields}
    return [value for name, value in fields.items() if name.startswith("view")], fields


_new = object.__new__


def in_buffer(layout: "Layout", owner: Any, index: int, epoch: int, bad: Sequence[BadSample],
              draws: Optional[Draws] = None) -> Batch:
    """The batch whose planes are in owner's buffer."""
    batch = _new(layout.batch)
    batch._layout, batch._owner, batch._draws = layout, owner, draws
    batch.index, batch.epoch, batch.bad = index, epoch, bad
    if layout.data is not None:
        batch.data, batch.label = layout.data(owner), layout.label(owner)
    return batch


class Layout:
    """Where the planes of a buffer are: shared by all batches with the same planes.

    make[name](owner) returns a Batch's attribute of this name, an array on the owner's buffer, which keeps
    the owner alive. arrays[name](owner) returns the plane as a numpy array.
    """

    batch: Type[Batch] = Batch

    def __init__(self, planes: Sequence[Any], torch: Any = None, readonly: bool = False, pinned: bool = False,
                 checked: bool = False) -> None:
        self.planes, self.pinned = tuple(planes), pinned
        if checked:
            self.batch = CheckedBatch
        extras = {p.name: p.name for p in planes if p.name not in _KNOWN and p.name != _OFFSETS}
        if _SECOND in extras:
            extras = {_FIRST: "data", **extras}
        self.views = [name for name in extras if _SECOND in extras and name.startswith("view")]
        self.arrays: Dict[str, Callable[[Any], np.ndarray]] = {p.name: _maker(p, readonly) for p in planes}
        self.make: Dict[str, Callable[[Any], Any]] = {**self.arrays}
        if torch is not None:
            self.make = {p.name: _tensor_maker(p, torch) for p in planes}
        self.make["fields"] = lambda owner: {name: self.make[plane](owner) for name, plane in extras.items()}
        self.label = self.make["label"]
        self.data: Optional[Callable[[Any], Any]] = None if self.views else self.make["data"]  # None: made on first use
        self.ragged = any(p.name == _OFFSETS for p in planes)
        if self.ragged:
            whole = self.make["data"]
            self.make["data"] = lambda owner: self.rows(whole(owner), owner)
            self.data = None

    def rows(self, data: Any, owner: Any) -> List[Any]:
        """Raw samples: data holds them back to back."""
        cuts = self.arrays[_OFFSETS](owner).tolist()
        return [data[a:b] for a, b in zip(cuts, cuts[1:])]


def _maker(plane: Any, readonly: bool) -> Callable[[Any], np.ndarray]:
    """A function from the owner to the plane; bfloat16 as uint16."""
    shape, dtype, offset = tuple(plane.shape), numpy_type(plane.dtype), plane.offset
    count, array = math.prod(shape), np.ndarray
    if count * dtype.itemsize != plane.length:
        raise ValueError(f"plane {plane.name}: {plane.length} bytes do not match its shape and type")
    if readonly:  # ndarray() sees the memoryview's owner, which would let writeable be set again
        return lambda owner: np.frombuffer(memoryview(owner).toreadonly(), dtype, count, offset).reshape(shape)
    return lambda owner: array(shape, dtype, owner, offset)


def numpy_type(name: str) -> np.dtype:
    """numpy's type for a plane's; uint16 for bfloat16."""
    return np.dtype("<u2") if name == "bfloat16" else np.dtype(name).newbyteorder("<")


def _tensor_maker(plane: Any, torch: Any) -> Callable[[Any], Any]:
    """A function from the owner to the plane as a tensor. Types that torch lacks: see docs/python.md."""
    array, from_numpy, bfloat16 = _maker(plane, False), torch.from_numpy, torch.bfloat16
    if plane.dtype == "bfloat16":
        return lambda owner: from_numpy(array(owner).view(np.int16)).view(bfloat16)
    if plane.dtype in ("uint64", "uint32"):
        signed = np.dtype("<i8" if plane.dtype == "uint64" else "<i4")
        return lambda owner: from_numpy(array(owner).view(signed))
    if plane.dtype == "uint16":
        return lambda owner: from_numpy(array(owner).astype(np.int32))
    shape, dtype, offset, ndarray = tuple(plane.shape), numpy_type(plane.dtype), plane.offset, np.ndarray
    return lambda owner: from_numpy(ndarray(shape, dtype, owner, offset))
