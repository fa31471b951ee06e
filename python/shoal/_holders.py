"""Finds the holders of slots, for the message when all slots are held. Slow; called only while nothing else runs."""

from __future__ import annotations

import collections
import gc
import sys
import types
from typing import Any, Counter, Dict, Iterator, Optional, Tuple

import numpy as np

from ._batch import Batch

_MOST = 4  # kinds of holders that a message names
_CODE = types.ModuleType, types.FunctionType, types.FrameType


def describe(live: Dict[int, Any], waiting: int, address: int, size: int) -> str:
    """The holders of the live slots of the memory at address, such as "2 numpy.ndarray (64, 3, 224, 224) in
    a list". live has weak references to batches; waiting slots wait for a device."""
    batches = sum(1 for ref in list(live.values()) if ref is not None and ref() is not None)
    parts = []
    if batches:
        parts.append(f"{batches} by whole Batch objects")
    if waiting:
        parts.append(f"{waiting} by copies to a device that are not done")
    rest = len(live) - batches - waiting
    if rest > 0:
        parts.append(f"{rest} by arrays, tensors or views of them that outlive their Batch")
    found: Counter[str] = collections.Counter()
    for thing, where in _found(address, size):
        found[f"{thing} {where}"] += 1
    seen = [f"{n} {text}" for text, n in found.most_common(_MOST)]
    return "; ".join(parts) + (f" (seen: {', '.join(seen)})" if seen else "")


def _found(address: int, size: int) -> Iterator[Tuple[str, str]]:
    """(what, where) of arrays, tensors and batches in the memory that containers and local variables refer to.
    Each object once."""
    torch = sys.modules.get("torch")
    seen = set()

    def place(value: Any) -> str:
        kind = type(value)  # isinstance would read the value's __class__, which makes some values warn
        if issubclass(kind, np.ndarray):
            at = value.__array_interface__["data"][0]
        elif torch is not None and issubclass(kind, torch.Tensor) and not value.is_cuda:
            at = value.data_ptr()
        elif issubclass(kind, Batch):
            owner = object.__getattribute__(value, "_owner")
            return "Batch" if getattr(getattr(owner, "pool", None), "address", None) == address else ""
        else:
            return ""
        if not address <= at < address + size:
            return ""
        return f"{'numpy.ndarray' if issubclass(kind, np.ndarray) else 'torch.Tensor'} {tuple(value.shape)}"

    mine = sys._getframe()
    for ident, frame in sys._current_frames().items():
        at: Optional[types.FrameType] = frame
        while at is not None:
            if at is not mine and at.f_globals.get("__package__") != __package__:
                for name, value in list(at.f_locals.items()):
                    what = place(value)
                    if what and id(value) not in seen:
                        seen.add(id(value))
                        yield what, f"in the variable {name} of {at.f_code.co_name}"
            at = at.f_back
    for holder in gc.get_objects():
        if issubclass(type(holder), (Batch, type, *_CODE)):
            continue
        for value in gc.get_referents(holder):
            what = place(value)
            if what and id(value) not in seen:
                seen.add(id(value))
                yield what, f"in a {type(holder).__name__}"


def told(live: Dict[int, Any], waiting: int, address: int, size: int, slots: int, asked: int, addr: str) -> str:
    """The message for an exhausted pool."""
    more = (f"open the feed with more, slots={2 * slots}" if slots >= asked else
            f"give `shoal serve` more --memory: {asked} slots were requested and do not fit")
    return (f"shoal: feed {addr} waits: all {len(live)} of its {slots} slots are held in this process: "
            f"{describe(live, waiting, address, size)}. A slot is free again when nothing refers to its batch, nor to "
            "anything made of it without a copy. Drop them, keep copies (batch.copy(), tensor.clone(), "
            "array.copy()), or "
            f"{more}")
