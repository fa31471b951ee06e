"""device="cuda": connects the feed's stream with the device (_cuda.py). Without a usable device the same batches
come in host memory."""

from __future__ import annotations

import os
import types
from typing import Any, Callable, Dict, Tuple

from . import _cuda, _cuda_driver, _cuda_finish
from ._batch import BadSample, Batch, Layout, with_views
from ._errors import FeedError
from ._slots import HandoverError, warn_once

_BUFFERS = 4


def prepare(device: str, open: Dict[str, Any]) -> Tuple[Dict[str, Any], Any]:
    """The Open to send, and a function that makes a stream's stage: None if there is no such device, with a warning.
    Raises FeedError if the server cannot serve a device."""
    if not open["slots"]:
        raise FeedError(f"device={device!r} needs a server on this host, a unix:/// address and slots: otherwise "
                        f"leave device "
                        f"out and use batch.to({device!r})")
    try:
        opened_device = _cuda.Device.open(device)
    except _cuda.Unavailable as e:
        _on_host(device, e)
        return open, None
    transform = open["transform"]
    if transform and transform.strip() != "raw":
        transform += _cuda_finish.WORD

    def stage(opened: Any, link: Any) -> "DeviceStage":
        return DeviceStage(opened_device, opened, link)

    # shoal-gpu uses the device's name, and fills the device's memory itself; shoal serve ignores it.
    return {**open, "transform": transform, "device": opened_device.name}, stage


def _on_host(device: str, why: Exception) -> None:
    warn_once(f"shoal: device={device!r}: {why}. Batches stay in host memory")


class DeviceStage:
    """Copies batches to the device as they come, or uses those that are already there."""

    def __init__(self, device: _cuda.Device, opened: Any, link: Any) -> None:
        self._link, self._finish = link, _cuda.Finish.left(opened)
        self._stage: Any = None
        try:
            if link.on_device:
                self._stage = self._imported(device, opened, link)
            elif link.pool is not None:
                self._stage = _cuda.Stage(device, opened, link.pool.memory, link.pool.slot_bytes, buffers=_BUFFERS)
            else:
                raise _cuda.Unavailable("the server has no shared memory to copy from: its log has the reason")
        except _cuda.Unavailable as e:
            if link.on_device:
                raise FeedError(f"device={device.name!r}: {e}. Or leave device out for batches in host memory") from None
            _on_host(device.name, e)

    def _imported(self, device: _cuda.Device, opened: Any, link: Any) -> _cuda.Imported:
        try:
            connection, answer, fds = link.handover(opened.pool.key, opened.pool.slots + 1)
        except HandoverError as e:
            raise FeedError(f"the handover of the memory of {opened.pool.device} failed: {e}") from None
        try:
            made = _cuda.Imported(device, opened, answer, fds, connection)
        except BaseException:
            connection.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        return made

    def put(self, header: Any, array: Any) -> "_Taken":
        """Called on the receiving thread."""
        link, slot = self._link, header.slot
        if self._stage is None or array is not None:
            batch = link.batch(header, array)
            return _Taken(header, lambda: self._host(header, batch))
        if link.on_device:
            return self._on_device(header, lambda: link.give_back(slot))
        # The lease, and with it the slot, is released when the copies are done.
        lease = [link.pool.lease(slot, header.index, header.epoch, header.total_bytes)]
        return self._on_device(header, lease.clear)

    def _on_device(self, header: Any, release: Callable[[], Any]) -> "_Taken":
        staged = self._stage.put(header, release)
        return _Taken(header, lambda: _batch(header, staged.take()))

    def _host(self, header: Any, batch: Batch) -> Batch:
        """A batch in host memory, because there is no device, or because it came as messages, as one can in a shared
        pass: then torch copies it."""
        arrays, owner = Layout(header.planes).arrays, batch._owner
        if self._finish is not None:
            data = self._finish.on_host(arrays["data"](owner), arrays["finish"](owner))
            plane = types.SimpleNamespace(name="data", dtype=self._finish.dtype, shape=data.shape, offset=0,
                                          length=data.nbytes)
            fields = {name: array for name, array in batch.fields.items() if name != "finish"}
            batch = Batch(self._link.array(plane, data), batch.label, batch.id, batch.valid, header.index, header.epoch,
                          batch.bad, fields)
        if self._stage is not None and _cuda_driver.torch_cuda() is not None:
            batch = batch.to(self._stage.device.name)
            batch.id, batch.valid = arrays["id"](owner), arrays["valid"](owner)  # as of the others
        return batch

    def close(self) -> None:
        if self._stage is not None:
            self._stage.close()


class _Taken:
    def __init__(self, header: Any, make: Callable[[], Batch]) -> None:
        self._header, self._make = header, make

    def take(self) -> Tuple[Any, Batch]:
        return self._header, self._make()


def _batch(header: Any, planes: Dict[str, Any]) -> Batch:
    bad = [BadSample(b.row, b.id, b.path, b.cause) for b in header.bad]
    data, label, id, valid = (planes.pop(name) for name in ("data", "label", "id", "valid"))
    planes.pop("offsets", None)
    data, fields = with_views(data, planes)
    return Batch(data, label, id, valid, header.index, header.epoch, bad, fields)
