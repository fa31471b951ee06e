"""The user's function on samples, in threads ahead of the trainer. See Feed's map."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np

from ._batch import Batch
from ._errors import FeedError, MapError

_NOT_IN_TORCH = np.uint16, np.uint32, np.uint64
_STOP_SECONDS = 5.0  # how long close() waits for running functions


class Job:
    """A batch whose samples are being mapped."""

    def __init__(self, header: Any, batch: Batch, samples: Sequence[Any], labels: List[int], ids: List[int],
                 valid: List[int]) -> None:
        self.header = header
        self.batch: Optional[Batch] = batch
        self.samples: Sequence[Any] = samples
        self.labels, self.ids, self.valid = labels, ids, valid
        self.results: List[Any] = [None] * len(valid)
        self.left = sum(1 for v in valid if v)
        self.lock = threading.Lock()
        self.errors: List[Any] = []
        self.done = threading.Event()
        self.empty: Optional[Callable[["Job"], None]] = None  # finishes a batch without valid rows
        self.made: Optional[Batch] = None

    def take(self) -> Tuple[Any, Batch]:
        """Waits for the mapped batch, and returns its header and itself. Raises MapError for the first sample that
        failed."""
        if self.empty is not None:
            self.empty(self)
        self.done.wait()
        if self.errors:
            row, error = min(self.errors, key=lambda e: e[0])
            sample = self.ids[row] if row >= 0 else None
            assert self.batch is not None
            what = f"sample {sample}" if sample is not None else "the whole batch"
            raise MapError(f"map= failed for {what} in batch {self.batch.index} of epoch {self.batch.epoch}: "
                           f"{type(error).__name__}: {error}", sample) from error
        assert self.made is not None
        return self.header, self.made


class Mapper:
    """Threads that apply function(sample, label, id) to the samples of batches, or to whole batches."""

    def __init__(self, function: Callable[..., Any], threads: int, whole: bool, link: Any, torch: Any) -> None:
        self._function, self._whole, self._link, self._torch = function, whole, link, torch
        self._work: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
        self._like: Any = None  # the types and shapes of the last mapped batch, for one without valid rows
        self._stopped = False
        self._threads = [threading.Thread(target=self._run, name=f"shoal-map-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, header: Any, array: Any) -> Job:
        """Starts a batch, on the receiving thread."""
        batch: Batch = self._link.batch(header, array)
        layout, owner = batch._layout, batch._owner
        assert layout is not None
        labels, ids, valid = (layout.arrays[name](owner).tolist() for name in ("label", "id", "valid"))
        if self._whole:
            job = Job(header, batch, (), labels, ids, valid)
            self._work.put((job, -1))
            return job
        # Raw samples stay arrays: libraries that open files accept arrays as bytes, but not tensors.
        samples = layout.rows(layout.arrays["data"](owner), owner) if layout.ragged else batch.data
        if layout.views:
            samples = list(zip(*samples))
        job = Job(header, batch, samples, labels, ids, valid)
        if job.left == 0:  # it gets the types of the batch before, which is done when this one is taken
            job.empty = self._finish
        for row, v in enumerate(valid):
            if v:
                self._work.put((job, row))
        return job

    def close(self) -> None:
        """Ends the threads, after the functions that run."""
        self._stopped = True
        for _ in self._threads:
            self._work.put(None)
        end = time.monotonic() + _STOP_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while True:
            item = self._work.get()
            if item is None:
                return
            self._one(*item)
            del item

    def _one(self, job: Job, row: int) -> None:
        try:
            if self._stopped:  # by a handler of a signal, perhaps, while next() waits for this batch
                job.errors.append((row, FeedError("the feed was closed")))
            elif job.errors and min(job.errors, key=lambda e: e[0])[0] < row:
                pass  # it will not be delivered
            elif self._whole:
                assert job.batch is not None
                job.results = self._function(job.batch.data, job.batch.label, job.batch.id)
            else:
                job.results[row] = self._function(job.samples[row], job.labels[row], job.ids[row])
        except BaseException as e:  # also SystemExit: the trainer raises it
            job.errors.append((row, e))
        if not self._whole:
            with job.lock:
                job.left -= 1
                if job.left:
                    return
        self._finish(job)

    def _finish(self, job: Job) -> None:
        try:
            if not job.errors:
                assert job.batch is not None
                job.made = self._collect(job)
                job.batch = None
        except BaseException as e:
            job.errors.append((-1, e))
        job.results, job.samples = [], ()
        job.done.set()

    def _collect(self, job: Job) -> Batch:
        batch = job.batch
        assert batch is not None
        if self._whole:
            value = job.results
        elif any(job.valid):
            value = collate([r for r, v in zip(job.results, job.valid) if v], job.valid, self._torch)
            self._like = _empty(value)
        else:
            value = [None] * len(job.valid) if self._like is None else _blank(self._like, len(job.valid))
        assert batch._layout is not None
        fields = {name: f for name, f in batch.fields.items() if name not in batch._layout.views}  # those are data
        data, label = value, batch.label
        if isinstance(value, dict):
            fields.update(value)
            data, label = fields.pop("data", None), fields.pop("label", label)
        # Copied, so that the slot is free as soon as no result is a view of it.
        if label is batch.label:
            label = _copy(label)
        fields = {name: _copy(f) if f is batch.fields.get(name) else f for name, f in fields.items()}
        made = Batch(data, label, _copy(batch.id), _copy(batch.valid), batch.index, batch.epoch, batch.bad, fields)
        made._draws = batch._draws
        return made


def _copy(array: Any) -> Any:
    return array.clone() if hasattr(array, "clone") else array.copy()


def collate(results: List[Any], valid: Sequence[int], torch: Any) -> Any:
    """The results of the valid rows as one value: dictionaries and tuples by member; numbers, arrays and tensors of
    equal shape and type stacked, with zeros in rows that are not valid; everything else as a list of all rows, with
    None in those."""
    first = results[0]
    if isinstance(first, dict) and all(isinstance(r, dict) and r.keys() == first.keys() for r in results):
        return {k: collate([r[k] for r in results], valid, torch) for k in first}
    if isinstance(first, tuple) and all(isinstance(r, tuple) and len(r) == len(first) for r in results):
        columns = [collate(list(column), valid, torch) for column in zip(*results)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    rows = [i for i, v in enumerate(valid) if v]
    if torch is not None and all(isinstance(r, torch.Tensor) for r in results):
        like = results[0]
        if all(r.shape == like.shape and r.dtype == like.dtype and r.device == like.device for r in results):
            if len(rows) == len(valid):
                return torch.stack(results)
            out = like.new_zeros((len(valid), *like.shape))
            out[rows] = torch.stack(results)
            return out
    elif all(isinstance(r, (np.ndarray, np.generic, int, float)) for r in results):
        arrays = [np.asarray(r) for r in results]
        kinds = {type(r) for r in results if not isinstance(r, np.ndarray)}
        if all(a.shape == arrays[0].shape for a in arrays) and (kinds <= {int, float} and arrays[0].ndim == 0 or
                                                               all(a.dtype == arrays[0].dtype for a in arrays)):
            stacked = np.stack(arrays)
            if len(rows) < len(valid):
                whole = np.zeros((len(valid), *stacked.shape[1:]), stacked.dtype)
                whole[rows] = stacked
                stacked = whole
            if torch is not None and stacked.dtype.kind in "biuf" and stacked.dtype not in _NOT_IN_TORCH:
                return torch.from_numpy(stacked)
            return stacked
    out = [None] * len(valid)
    for i, r in zip(rows, results):
        out[i] = r
    return out


def _empty(value: Any) -> Any:
    """A collated value without rows: its types and shapes."""
    return _rows(value, lambda a: _copy(a[:0]), lambda: [])


def _blank(like: Any, n: int) -> Any:
    """n rows of zeros with the types and shapes of like."""
    def zeros(a: Any) -> Any:
        shape = (n, *a.shape[1:])
        return a.new_zeros(shape) if hasattr(a, "new_zeros") else np.zeros(shape, a.dtype)

    return _rows(like, zeros, lambda: [None] * n)


def _rows(value: Any, array: Callable[[Any], Any], ragged: Callable[[], Any]) -> Any:
    if isinstance(value, dict):
        return {k: _rows(v, array, ragged) for k, v in value.items()}
    if isinstance(value, tuple):
        columns = [_rows(v, array, ragged) for v in value]
        return type(value)(*columns) if hasattr(value, "_fields") else tuple(columns)
    return array(value) if hasattr(value, "shape") else ragged()
