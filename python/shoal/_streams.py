"""Memory that CUDA may still be reading: page-locking, and events (torch's CUDA).

A non-blocking copy to a device may still be in progress when the last reference to its source is dropped. So at that
time an event is recorded on every stream that may have work on the slot, and the slot waits for the events. Those
streams are the one that was current when next() returned, the one that is current at the drop, those of Batch.to(),
and those declared by record_stream().

Threads of this package, and the garbage collector in any thread, call CUDA here. So each call is made on its device
(on): a thread without a device would be on cuda:0, and create a context there, of some hundred MB, for every rank.
And each call is safe during the capture of a graph in another thread.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import logging
import sys
import threading
from typing import Any, Deque, Dict, Iterator, List, Optional, Tuple

from . import _cuda_driver

_MOST_SEEN = 8

log = logging.getLogger("shoal")


def _cuda() -> Any:
    """torch.cuda if this process already uses it, else None."""
    torch = sys.modules.get("torch")
    if torch is None or sys.is_finalizing():
        return None
    cuda = getattr(torch, "cuda", None)  # missing while torch is being imported
    return cuda if cuda is not None and cuda.is_initialized() else None


@functools.lru_cache(None)
def _driver() -> Optional[_cuda_driver.Driver]:
    try:
        return _cuda_driver.driver()
    except _cuda_driver.Unavailable:
        return None  # a torch for other devices than NVIDIA's


@contextlib.contextmanager
def on(cuda: Any, device: Any) -> Iterator[None]:
    """Makes the device current in the thread, and is safe during the capture of a graph."""
    driver = _driver()
    with contextlib.nullcontext() if driver is None else _cuda_driver.Relaxed(driver), cuda.device(device):
        yield


def _current(cuda: Any) -> List[Any]:
    """The thread's current stream, None if it cannot have work: on a device without a context."""
    driver, active = _driver(), ctypes.c_int(1)
    if driver is not None:
        number = ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(number), cuda.current_device())
        driver.cuDevicePrimaryCtxGetState(number, ctypes.byref(ctypes.c_uint()), ctypes.byref(active))
    return [cuda.current_stream()] if active.value else []


class Streams:
    """The streams that may have work on slots, and the slots that wait for them."""

    def __init__(self) -> None:
        self._seen: List[Any] = []  # streams that were current when a batch was taken
        self._declared: Dict[int, List[Any]] = {}  # by slot
        self._waiting: Deque[Tuple[int, List[Tuple[Any, Any]]]] = collections.deque()  # slots, and devices and events
        self._later: Deque[int] = collections.deque()  # slots whose events could not be recorded yet
        self._polling = threading.Lock()

    @staticmethod
    def in_use() -> bool:
        """Whether a device may have work."""
        return _cuda() is not None

    @property
    def waiting(self) -> int:
        """Slots that wait for a device."""
        return len(self._waiting) + len(self._later)

    def taken(self) -> None:
        """Called when a batch is handed to the trainer, in its thread."""
        cuda = _cuda()
        if cuda is not None:
            stream = cuda.current_stream()
            if stream not in self._seen:
                self._seen = [stream, *self._seen[:_MOST_SEEN - 1]]

    def hold(self, slot: int, stream: Any) -> None:
        streams = self._declared.setdefault(slot, [])
        if stream not in streams:
            streams.append(stream)

    def idle(self, slot: int) -> bool:
        """Nothing refers to the slot any more. Returns whether no device can use it either; otherwise done() returns it
        later."""
        cuda = _cuda()
        if cuda is None:
            return True
        if self._capturing(cuda):
            self._later.append(slot)
            return False
        return self._record(cuda, slot)

    def _capturing(self, cuda: Any) -> bool:
        """Whether a CUDA graph is being captured: an event recorded now would join it, a query would invalidate it."""
        for stream in (*_current(cuda), *self._seen):
            with on(cuda, stream.device), cuda.stream(stream):
                if cuda.is_current_stream_capturing():
                    return True
        return False

    def _record(self, cuda: Any, slot: int) -> bool:
        streams = self._declared.pop(slot, [])
        for stream in (*self._seen, *_current(cuda)):
            if stream not in streams:
                streams.append(stream)
        events = []
        for stream in streams:
            with on(cuda, stream.device):
                event = cuda.Event()
                event.record(stream)
                if not event.query():
                    events.append((stream.device, event))
        if events:
            self._waiting.append((slot, events))
        return not events

    def done(self) -> List[int]:
        """Slots whose events have all passed since the last call."""
        if not self.waiting or not self._polling.acquire(blocking=False):
            return []
        try:
            cuda = _cuda()
            if cuda is not None and self._capturing(cuda):
                return []
            out = []
            for _ in range(len(self._later)):
                slot = self._later.popleft()
                if cuda is None or self._record(cuda, slot):
                    out.append(slot)
            for _ in range(len(self._waiting)):
                slot, events = self._waiting.popleft()
                if cuda is None or all(_passed(cuda, *event) for event in events):
                    out.append(slot)
                else:
                    self._waiting.append((slot, events))
            return out
        finally:
            self._polling.release()

    def finish(self) -> List[int]:
        """Waits for the events of all slots, and returns the slots."""
        cuda = _cuda()
        for _, events in list(self._waiting) if cuda is not None else ():
            for device, event in events:
                with on(cuda, device):
                    event.synchronize()
        return self.done()


def _passed(cuda: Any, device: Any, event: Any) -> bool:
    with on(cuda, device):
        return bool(event.query())


_registered: Dict[int, int] = {}  # device by address


def register(address: int, size: int) -> bool:
    """Page-locks memory if torch has CUDA. Returns whether it did; a failure is logged, and training goes on
    without."""
    try:
        import torch
    except ImportError:
        log.warning("shoal: pin_memory=True without torch: memory is not page-locked")
        return False
    if not torch.cuda.is_available():
        log.warning("shoal: pin_memory=True, but torch finds no CUDA device: memory is not page-locked")
        return False
    device = torch.cuda.current_device()
    with on(torch.cuda, device):
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    if error:
        log.warning("shoal: cudaHostRegister of %d MiB failed with error %d: memory is not page-locked. Lower slots=, "
                    "or raise "
                    "the limit of locked memory (ulimit -l)", size >> 20, error)
    else:
        _registered[address] = device
    return error == 0


def unregister(address: int) -> None:
    """Undoes register."""
    cuda, device = _cuda(), _registered.pop(address)
    if cuda is not None:
        with on(cuda, device):
            cuda.cudart().cudaHostUnregister(address)
