"""Hints from trainers that know nothing of Shoal.

`shoal run` makes Python import _site/sitecustomize.py when it starts, and that calls install. From then on, each
iteration of a DataLoader first writes its order as a plan into the mount that holds its files, as shoal.hint does.
Nothing else changes: no random number is drawn, and whatever goes wrong here ends here. SHOAL_DEBUG=run
(`shoal run -v`) says on standard error what was written, and why not.

The module is not imported as a part of the package: the trainer may have another version of that, and lack
what it needs.
"""

from __future__ import annotations

import atexit
import collections
import functools
import importlib.util
import itertools
import json
import os
import sys
import time
import weakref
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

_LOADER = "torch.utils.data.dataloader"

_numbers: Dict[int, int] = {}  # by id: the loaders that have iterated, numbered by their first time; 0: nothing to write for it
_written: Dict[int, Set[Tuple[str, str]]] = {}  # by process: the mounts and names of its plans
_said: Set[str] = set()


def install() -> None:
    """Waits for the import of torch's DataLoader."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds torch's DataLoader by asking the other finders, and adds to it when it has been loaded."""

    asked = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _LOADER or self.asked:
            return None
        self.asked = True
        spec: Any = importlib.util.find_spec(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                _guarded(_watch, module)

            try:
                spec.loader.exec_module = exec_module
            except AttributeError:
                _say("this Python's loader of torch cannot be watched")
        return spec


def _watch(module: Any) -> None:
    """Makes DataLoader tell its order whenever an iteration begins."""
    loader, base = module.DataLoader, module._BaseDataLoaderIter
    _wrap(loader, lambda self: True)
    draw = base._next_index

    @functools.wraps(draw)
    def _next_index(self: Any) -> Any:
        index = draw(self)
        if self._num_workers:  # they are given batches ahead, which an iterator that is kept for the next epoch does not know any more
            drawn = self.__dict__.get("_shoal_drawn")
            if drawn is None:
                drawn = self._shoal_drawn = collections.deque(maxlen=self._num_workers * self._prefetch_factor + 1)
            drawn.append(index)
        return index

    base._next_index = _next_index
    known = loader.__dict__.get("__init_subclass__")

    def own_iterator(self: Any) -> bool:
        # Others call DataLoader.__iter__, after what they do to samplers and generators. These two do not: loaders with
        # one iterator for all epochs, and torchdata's.
        kept = getattr(self, "iterator", False)
        return kept is None or isinstance(kept, base) or hasattr(self, "next_iter_state")

    def __init_subclass__(cls: Any, /, **options: Any) -> None:
        if known is not None:
            known.__func__(cls, **options)
        else:
            super(loader, cls).__init_subclass__(**options)
        if "__iter__" in cls.__dict__:
            _guarded(_wrap, cls, own_iterator)

    loader.__init_subclass__ = classmethod(__init_subclass__)


def _wrap(cls: Any, applies: Callable[[Any], bool]) -> None:
    begin = cls.__iter__

    @functools.wraps(begin)
    def __iter__(self: Any) -> Any:
        _guarded(_tell, self, applies)
        return begin(self)

    cls.__iter__ = __iter__


def _guarded(do: Callable[..., Any], *args: Any) -> None:
    try:
        do(*args)
    except Exception as e:  # a trainer does not fail because of a hint
        _say(f"no hint: {str(e) or repr(e)}")


def _say(text: str) -> None:
    if "run" in os.environ.get("SHOAL_DEBUG", "").split(",") and text not in _said:
        _said.add(text)
        print("shoal run: " + text.replace("\n", "; "), file=sys.stderr, flush=True)


@functools.lru_cache(maxsize=None)
def _hint() -> Any:
    """The module _hint that lies beside this one."""
    spec = importlib.util.spec_from_file_location("_shoal_hint", os.path.join(os.path.dirname(os.path.abspath(__file__)), "_hint.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _tell(loader: Any, applies: Callable[[Any], bool]) -> None:
    """Has the order of the iteration that is about to begin written, if this is the call that knows it.

    A copy of the process finds the order and writes the plan, while this one waits: not for long, and not at all for
    orders that take long. Those are written while the epoch begins, and the mount finds the reader in them."""
    if not applies(loader):
        return
    data = sys.modules["torch.utils.data"]
    by_hand = sys.modules.get("shoal._hint")
    if _numbers.get(id(loader)) == 0 or data.get_worker_info() is not None or isinstance(loader.dataset, data.IterableDataset):
        if isinstance(loader.dataset, data.IterableDataset):
            _say("no hint: an IterableDataset has no order of indices that could be predicted")
        return
    if getattr(by_hand, "given", False):
        _say("no hint: the trainer gives hints itself")
        return
    hint, begun, late = _hint(), time.monotonic(), False
    job = _jobs.pop((os.getpid(), id(loader)), None)
    if job is not None:
        _guarded(job.finish, 0)
        late = job.late
        job.apart.end()
    _jobs[os.getpid(), id(loader)] = job = _Job(hint, loader, begun)
    job.finish(_WAIT if job.short and not late else 0)
    job.late = late or job.short and not job.done  # this sampler's epochs are not waited for again


_WAIT = 5.0  # seconds for orders of up to _hint.SHORT samples

_jobs: Dict[Tuple[int, int], _Job] = {}  # by process and id: the latest of each loader


class _Job:
    """An order that a copy of this process finds and writes."""

    def __init__(self, hint: Any, loader: Any, begun: float) -> None:
        self._new = id(loader) not in _numbers
        self._key, self._begun, self.done, self.late = id(loader), begun, False, False
        self._name, self._type = _name(hint, loader), type(loader.dataset).__name__
        self.short = _size(loader.dataset) <= hint.SHORT
        if os.getpid() not in _written:
            atexit.register(_forget)
        self._mine = _written.setdefault(os.getpid(), set())
        self.apart = hint._Apart(lambda apart: json.dumps(_plans(hint, apart, loader, self._name)).encode())

    def finish(self, timeout: float) -> None:
        """Takes what the copy says, if it has said it by then."""
        if self.done:
            return
        try:
            said = self.apart.answer(timeout)
            if said is None:
                return
            self.done = True
            plans, failed = json.loads(said)
            for root, lines in plans:
                if (root, self._name) not in self._mine:
                    self._mine.add((root, self._name))
                    _say(f"told {root} the order of {lines} files, as plan {self._name}, in {time.monotonic() - self._begun:.2f} s")
            if failed is not None:
                raise OSError(failed)
            if not plans:
                _numbers[self._key] = 0
                raise ValueError(f"no file of this {self._type} is in a Shoal mount")
        except Exception:
            self.done = True
            # What was told of the last epoch would keep the mount from finding the order by itself.
            _remove(self._mine, lambda plan: plan[1] == self._name)
            if self._new and _numbers.get(self._key):
                del _numbers[self._key]
            raise


def _size(sized: Any) -> int:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return 0


def _plans(hint: Any, apart: Any, loader: Any, name: str) -> Tuple[List[Tuple[str, int]], Optional[str]]:
    """Writes the plan of each mount that holds files of the loader, in a copy of the process. Returns the mounts and numbers of
    files, and what went wrong with them."""
    mounts, dataset, listing = hint._Mounts(None), loader.dataset, None
    unlisted = None
    try:
        listing = hint._paths(dataset, lambda dataset: _Found(dataset, mounts))
    except TypeError as e:
        unlisted = e
    if listing is not None:
        some = range(0, len(listing), max(len(listing) // 64, 1))
        if not any(mounts.place(os.fspath(p)) for i in some for p in _each(listing[i])):
            return [], None
    try:
        len(loader)
        limit = None
    except (TypeError, NotImplementedError):  # an endless sampler: some passes
        limit = max(len(dataset), min(4 * len(dataset), 1 << 18))
    long = listing is not None and len(listing) > hint.SHORT
    if long:
        apart.take_turn(mounts, listing)
    indices = hint._indices(loader, 1, limit)
    opened = {} if isinstance(dataset, (list, tuple)) else hint._opened(apart, dataset, indices, mounts)
    if listing is None or not hint._agrees(listing, opened):
        if not opened:
            raise unlisted or TypeError("no list of files")
        listing, long = _Tried(hint, apart, dataset, mounts), False
    plans = hint._texts(listing, indices, mounts, apart if long else None)
    del indices
    written: List[Tuple[str, int]] = []
    try:
        for root, plan in plans.items():
            apart.unlocked(hint._write, root, name, plan.ordered())
            written.append((root, plan.lines()))
    except OSError as e:
        return written, str(e)
    return written, None


class _Tried:
    """The first file of each sample of a dataset without a list of its files: what it opens when it is asked for the sample."""

    def __init__(self, hint: Any, apart: Any, dataset: Any, mounts: Any) -> None:
        self._known: Dict[int, List[str]] = {}
        self._hint, self._apart, self._dataset, self._mounts = hint, apart, dataset, mounts

    def __getitem__(self, i: int) -> List[str]:
        if i not in self._known:
            self._known[i] = list(self._hint._opened(self._apart, self._dataset, self._hint.np.array([i]), self._mounts).values())
        return self._known[i]


def _name(hint: Any, loader: Any) -> str:
    rank, number = hint._rank(loader), _number(loader, True)
    parts = [os.environ.get("SHOAL_RUN_NAME", ""), "" if rank is None else f"rank{rank}", "" if number < 2 else str(number)]
    return "-".join(filter(None, parts if any(parts[:2]) else ["default"] + parts[2:]))


def _number(loader: Any, tells: bool) -> int:
    """The number of a loader among those that are alive, so that each has a plan of its own."""
    if id(loader) not in _numbers:
        _numbers[id(loader)] = next(n for n in itertools.count(1) if n not in _numbers.values()) if tells else 0
        weakref.finalize(loader, _numbers.pop, id(loader), None).atexit = False
    return _numbers[id(loader)]


def _forget() -> None:
    """Removes the plans of a process that ends: without them, the next job's order can be inferred."""
    for (process, _), job in _jobs.items():
        if process == os.getpid():
            _guarded(job.finish, 0)
            job.apart.end()
    _remove(_written.pop(os.getpid(), set()), lambda plan: True)


def _remove(plans: Set[Tuple[str, str]], which: Callable[[Tuple[str, str]], bool]) -> None:
    for plan in list(filter(which, plans)):
        plans.discard(plan)
        try:
            os.unlink(os.path.join(plan[0], ".shoal", "plans", plan[1]))
        except OSError:
            pass


def _each(files: Any) -> Any:
    return files if isinstance(files, list) else (files,)


class _Found:
    """The files of each sample of a dataset of unknown type: those in its attributes that are lists with an item for
    each sample, and of which the first names a file in a mount. An item is a path, or a tuple or dictionary with paths."""

    def __init__(self, dataset: Any, mounts: Any) -> None:
        self._length = len(dataset)
        self._columns: List[Tuple[Any, Any]] = []
        for value in vars(dataset).values():
            if isinstance(value, (list, tuple)) or type(value).__name__ == "ndarray" and value.ndim == 1:
                if len(value) == self._length > 0:
                    self._columns += [(value, key) for key in self._keys(value[0], mounts)]
        if not self._columns:
            raise TypeError(f"this {type(dataset).__name__} has no list of files in a Shoal mount")

    def _keys(self, item: Any, mounts: Any) -> List[Any]:
        if isinstance(item, dict):
            return [k for k, v in item.items() if self._names(v, mounts)]
        if isinstance(item, (list, tuple)):
            return [k for k, v in enumerate(item) if self._names(v, mounts)]
        return [None] if self._names(item, mounts) else []

    def _names(self, value: Any, mounts: Any) -> bool:
        return isinstance(value, (str, os.PathLike)) and mounts.place(os.fspath(value)) is not None and os.path.isfile(value)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> List[Any]:
        return list(dict.fromkeys(os.fspath(values[i] if key is None else values[i][key]) for values, key in self._columns))
