"""Hugging Face datasets: what a stream (IterableDataset) is about to read of Parquet files in a mount, as ranges.

In a copy of the process the library goes through its stages once more, over tables without values, so it shuffles,
shards, interleaves, skips and resumes by itself. Stages that only take all there is, in its order, are left out. How
pyarrow joins column chunks is worked out from the footers. The copy reads these, of many files at once, and the kernel
keeps them, so they are not told. Nor is what pyarrow has read ahead when a stream ends early.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import itertools
import sys
from typing import Any, Callable, Dict, Iterator, List, Tuple

LIBRARY, VERSIONS = "datasets", ("5.0.1", "5.2.0")

FIRST, _TOGETHER = 16, 16  # ranges that a trainer waits for; footers that are read at once
_STEPS = 5_000_000  # tables, or rows, which take time, after which the plan ends
# The stages that keep the order of what they take, and take it to its end, whatever they do with rows; and all that may
# be between the files and one whose order depends on numbers of rows.
_THROUGH = {"BufferShuffled", "Filtered", "Formatted", "Mapped", "RebatchedArrow", "SelectColumns", "Skip", "Step"}
_COUNTED = _THROUGH - {"Filtered", "Mapped"} | {"CyclingMultiSources", "InterleavedShards", "Repeat",
                                                "RandomlyCyclingMultiSources", "Take",
                                                "VerticallyConcatenatedMultiSources"}


def watch(module: Any, run: Any) -> None:
    kind = sys.modules["datasets.iterable_dataset"].IterableDataset
    for name in ("__iter__", "iter"):
        setattr(kind, name, _telling(getattr(kind, name), run))


def _telling(begin: Callable[..., Iterator[Any]], run: Any) -> Callable[..., Iterator[Any]]:
    @functools.wraps(begin)
    def rows(self: Any, *args: Any, **options: Any) -> Iterator[Any]:
        again = functools.partial(begin, self, *args, **options)
        run.guarded(_tell, run, self, lambda: _Copy(run._beside("_pyarrow.py")).reads(again))
        yield from again()

    return rows


def _tell(run: Any, dataset: Any, reads: Callable[[], Iterator[Tuple[str, int, int]]]) -> None:
    first = dataset._ex_iterable
    while not hasattr(first, "kwargs"):
        first = (getattr(first, "ex_iterables", None) or [first.ex_iterable])[0]
    path = _builder(first) and first.kwargs["files"][0]
    ahead = None if "://" in path else run.ahead_of("parquet", dataset, path, lambda item: [item], True, FIRST)
    if ahead is not None:
        ahead.write_twice(reads)


def _builder(stage: Any) -> Any:
    builder: Any = getattr(getattr(stage, "generate_tables_fn", None), "__self__", None)
    if type(builder) is not sys.modules["datasets.packaged_modules.parquet.parquet"].Parquet or builder.config.filters:
        raise ValueError("of the streams of datasets only those of Parquet, without filters, are known")
    return builder


def _kind(kind: Any) -> str:
    return str(kind.__name__).replace("ExamplesIterable", "").replace("Iterable", "")


class _Asked(BaseException):
    """Says which stage is asked first, and by which method."""


class _Copy:
    """What the copy of the process does."""

    def __init__(self, files: Any) -> None:
        self._files, self._base = files, sys.modules["datasets.iterable_dataset"]._BaseExamplesIterable
        self._pool = concurrent.futures.ThreadPoolExecutor(_TOGETHER)
        self._told: List[Tuple[str, int, int]] = []
        self._next: Dict[str, List[str]] = {}  # of a file: it, and those that come after it in its stage
        self._looks: Dict[Any, Any] = {}

    def reads(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Tuple[str, int, int]]:
        def ask(stage: Any, name: str) -> None:
            raise _Asked(stage, name)

        kinds, kept = [self._base], {}
        for kind in kinds:
            kinds += kind.__subclasses__()
            for name in {"__iter__", "_iter_arrow"} & set(vars(kind) if _kind(kind) not in _THROUGH else ()):
                kept[kind, name] = vars(kind)[name]
                setattr(kind, name, functools.partialmethod(ask, name))
        try:
            next(begin(), None)  # this prepares the stages above, also by a state
            return
        except _Asked as asked:
            stage, how = asked.args
        for (kind, name), method in kept.items():
            setattr(kind, name, method)
        self._empty(stage)
        concurrent.futures.ThreadPoolExecutor = self._files.AtOnce  # type: ignore[misc]
        steps = stage._iter_arrow() if hasattr(stage, "kwargs") else getattr(stage, how)()
        for _ in itertools.islice(steps, _STEPS):
            yield from self._told
            self._told.clear()

    def _empty(self, stage: Any) -> None:
        """Has a stage, and those below it, take rows without values."""
        kind = _kind(type(stage))
        if kind == "Arrow":
            files = stage.kwargs["files"]
            self._next.update((path, files[i:i + _TOGETHER]) for i, path in enumerate(files))
            stage.generate_tables_fn = functools.partial(self._tables, _builder(stage))
            stage._sleep_on_threads_shutdown = False
        elif kind == "Formatted":
            stage._features = stage.formatting = None
        elif kind == "Mapped" and not (stage.batched or stage.formatting
                                     or inspect.iscoroutinefunction(stage.function)):
            stage.function = lambda *args, **options: {}
        elif kind not in _COUNTED:
            raise ValueError(f"how many rows {type(stage).__name__} leaves is not known")
        for value in vars(stage).values():
            for below in value if isinstance(value, list) else [value]:
                if isinstance(below, self._base):
                    self._empty(below)

    def _tables(self, builder: Any, files: List[str], row_groups_list: List[Any]) -> Iterator[Any]:
        """Stands in for what reads files."""
        config, pyarrow = builder.config, sys.modules["pyarrow"]
        names = config.columns or list(builder.info.features)
        for at, (path, groups) in enumerate(zip(files, row_groups_list)):
            for key in [(file, id(config)) for file in self._next[path]]:
                self._looks[key] = self._looks.get(key) or self._pool.submit(self._files.look, key[0], config.columns)
            found = self._looks[path, id(config)].result()
            found = found if groups is None else [found[i] for i in groups]
            size: Any = config.batch_size or (found and found[0][0])
            ranges = self._files.joined([chunks for _, chunks in found], config.fragment_scan_options)
            for (rows, _), begun in zip(found, ranges):
                self._told += [(path, *where) for where in begun]
                for begin in range(0, rows, size):
                    yield at, pyarrow.table({name: pyarrow.nulls(min(size, rows - begin)) for name in names})
