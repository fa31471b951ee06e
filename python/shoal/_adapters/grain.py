"""Grain: the records of ArrayRecord files, and the row groups of interleaved Parquet files, that are about to be read
from a mount, as ranges.

In a copy of the process a MapDataset is asked for its next elements. The source notes which records these are, and
returns None, for which the library calls no function of the trainer's. Parquet files are interleaved once more, with
empty rows. Where what lies is in the files' footers, which are not told: the library has read those of ArrayRecord.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import sys
from typing import Any, Callable, Dict, Iterator, List, Tuple

LIBRARY, VERSIONS = "grain", ("0.2.18",)

_BUFFER = 1 << 15  # a read goes on to a multiple of it
FIRST, _ROWS = 16, 5_000_000  # ranges of Parquet that a trainer waits for; rows after which the plan ends
_KNOWN = {"BatchMapDataset", "ConcatenateMapDataset", "FilterMapDataset", "MapMapDataset", "MapWithIndexMapDataset",
          "MixedMapDataset", "RandomMapMapDataset", "RepeatMapDataset", "ShuffleMapDataset", "SliceMapDataset",
          "SourceMapDataset", "WindowShuffleMapDataset", "_SamplerMapDataset", "_WithSeedMapDataset"}


def watch(module: Any, run: Any) -> None:
    for name, kind, took in (("prefetch", "PrefetchDatasetIterator", _records),
                             ("interleave", "InterleaveDatasetIterator", _rows)):
        _wrap(getattr(_part("dataset.transformations." + name), kind), functools.partial(run.guarded, took, run))


def _part(name: str) -> Any:
    return sys.modules["grain._src.python." + name]


def _wrap(kind: Any, took: Callable[[Any], None]) -> None:
    """Has a function called before an iterator takes an element."""
    take, move = kind.__next__, kind.set_state

    @functools.wraps(take)
    def __next__(self: Any) -> Any:
        took(self)
        return take(self)

    @functools.wraps(move)
    def set_state(self: Any, state: Any) -> Any:
        self.__dict__.pop("_shoal", None)  # it begins anew
        return move(self, state)

    kind.__next__, kind.set_state = __next__, set_state


def _ahead(run: Any, of: Any, path: str, *rest: Any) -> Any:
    process = getattr(multiprocessing.current_process(), "_identity", ())
    return run.ahead_of("-".join(["grain", *(f"worker{n - 1}" for n in process)]), of, str(path), *rest)


def _records(run: Any, iterator: Any) -> None:
    at, known = iterator._next_returned_index, iterator.__dict__.get("_shoal", iterator)
    before, iterator._shoal_at = getattr(iterator, "_shoal_at", at), at
    if known is iterator:
        iterator._shoal = None  # whatever goes wrong, goes wrong once
        records = _Records(iterator._map_parent, run._beside("_arrayrecord.py").footer)
        iterator._shoal = records.sources and _ahead(run, iterator, records.sources[0]._paths[0], records.reads)
        if iterator._shoal:
            iterator._shoal.write(lambda: range(at, iterator._dataset_length)).finish(run.WAIT)
    elif known:
        known.took(at - before, lambda: range(at, iterator._dataset_length))


class _Records:
    """Says what an element reads of ArrayRecord files. A copy of the process asks."""

    def __init__(self, top: Any, footer: Callable[[str], Tuple[Any, int]]) -> None:
        self._top, self._stages, self._footer = top, [top], footer
        self.sources: List[Any] = []
        self._told: List[Tuple[str, int, int]] = []
        self._footers: Dict[str, Any] = {}
        kinds = _part("data_sources").ArrayRecordDataSource, _part("data_sources").ARDataSource
        for stage in self._stages:
            if not isinstance(stage, (list, tuple)) and type(stage).__name__ not in _KNOWN:
                raise ValueError(f"what {type(stage).__name__} of Grain reads is not known")
            source: Any = getattr(stage, "_source", None)
            if type(source) in kinds and not source._reader_options_string:
                self.sources.append(source)
            elif source is not None:
                self._stages.append(source)
            self._stages += getattr(stage, "parents", ())

    def reads(self, index: int) -> List[Tuple[str, int, int]]:
        if self._stages:  # in the copy, for the first time
            for stage in filter(lambda stage: hasattr(stage, "_batch_fn"), self._stages):
                stage._batch_fn = lambda values: None
            for source in self.sources:
                type(source).__getitem__ = lambda source, key: self._note(source, key)
            self._stages = []
        self._told = []
        self._top[index]
        return self._told

    def _note(self, source: Any, key: Any) -> None:
        reader, position = source._reader_idx_and_position(key)
        path = str(source._read_instructions[reader].filename)
        if path not in self._footers:
            self._footers[path] = self._footer(path)
        offsets, group = self._footers[path]
        begin, end = offsets[position // group:][:2].tolist()
        self._told.append((path, begin, max(end, (begin // _BUFFER + 1) * _BUFFER) - begin))


def _rows(run: Any, iterator: Any) -> None:
    if "_shoal" in iterator.__dict__:
        return
    iterator._shoal = None
    kind, datasets = _part("dataset.sources.parquet_dataset").ParquetIterDataset, iterator._datasets
    if not isinstance(datasets, (list, tuple)) or not all(
            type(d) is kind and len(d._paths) == 1 and not d._read_kwargs for d in datasets):
        return  # others'
    ahead = _ahead(run, iterator, datasets[0]._paths[0], lambda item: [item], True, FIRST)
    if ahead is not None:
        ahead.write_twice(lambda: _groups(run, iterator))


def _groups(run: Any, iterator: Any) -> Iterator[Tuple[str, int, int]]:
    """In the copy: what the files are asked for, row by row."""
    files, interleave = run._beside("_pyarrow.py"), _part("dataset.transformations.interleave")
    told: List[Tuple[str, int, int]] = []

    def read(self: Any) -> None:
        self.__dict__.setdefault("_looked", None)
        self._looked = self._looked or files.look(self._pq_file)
        self._row_group_len, chunks = self._looked[self._row_group]
        told.extend((self._pq_path, *where) for where in files.joined([chunks])[0])

    _part("dataset.sources.parquet_dataset")._ParquetDatasetIterator._read_row_group_to_np_table = read
    state = iterator.get_state() if any(iterator._iterators_in_use) else None
    interleave._add_prefetch_and_make_iterator = lambda dataset, **_: iter(dataset)
    interleave.prefetch.futures.ThreadPoolExecutor = files.AtOnce
    again = type(iterator)(iterator._datasets, cycle_length=iterator._cycle_length)
    again._prefetch_ds_iter._shoal = again._shoal = None
    if state is not None:
        again.set_state(state)
        told.clear()
        again._shoal = None
    for _ in itertools.islice(again, _ROWS):
        yield from told
        told.clear()
