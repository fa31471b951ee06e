"""Hints from trainers that know nothing of Shoal.

`shoal run` makes Python import _site/sitecustomize.py when it starts, and that calls install. From then on, each
iteration of a DataLoader first writes its order as a plan into the mount that holds its files, as shoal.hint does.
Nothing else changes: no random number is drawn, and whatever goes wrong here ends here. SHOAL_DEBUG=run
(`shoal run -v`) says on standard error what was written, and why not.

What reads parts of large files, or shards one after another, is known by adapters, a file each in _adapters. An adapter
says its LIBRARY and the VERSIONS that it was tested with; with another version it is not used. Its watch is called when
the library's module has been imported. It adds to READING a function that says how the library's datasets read a
sample, or wraps what the library takes its shards from, with Shards. It predicts only what it wholly knows.

`shoal run` does not import the module as a part of the package: the trainer may have another version of that, and lack
what it needs.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import sys
import time
import weakref
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

# The modules whose import is waited for, and the adapters that this brings.
_ADAPTERS = {"datasets.arrow_dataset": "datasets", "datasets.packaged_modules.parquet.parquet": "parquet",
             "grain._src.python.dataset.sources.parquet_dataset": "grain", "litdata.streaming.dataset": "litdata",
             "megatron.core.datasets.gpt_dataset": "megatron",
             "megatron.energon.flavors.webdataset.sample_loader": "energon", "streaming.base.dataset": "streaming",
             "webdataset.compat": "webdataset"}

# Of an adapter: for a dataset of its library the adapter's name, and what a batch of samples reads, as (path, offset,
# length) in that order; else None. Called before each iteration; what a batch reads is asked in a copy of the process.
READING: List[Callable[[Any], Optional[Tuple[str, Callable[[List[int]], List[Tuple[str, int, int]]]]]]] = []

_iterators: Dict[int, Any] = {}  # by id of a loader: a weak reference to the latest iterator over it
# by id: the loaders that have iterated, numbered by their first time; 0: nothing to write for it
_numbers: Dict[int, int] = {}
_written: Dict[int, Set[Tuple[str, str]]] = {}  # by process: the mounts and names of its plans
_of_workers: Dict[int, int] = {}  # by process: a file in which its workers, which end without notice, note their plans
_refs: Dict[int, Any] = {}  # by their ids: the weak references of _when_gone
_said: Set[str] = set()
_adapted: Set[str] = set()  # the packages that an adapter watches


def install() -> None:
    """Waits for the import of torch's DataLoader, and of the libraries that adapters know."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds some modules by asking the other finders, and adds to them when they have been loaded."""

    def __init__(self) -> None:
        self._waiting: Dict[str, Callable[[Any], None]] = {name: functools.partial(_adapt, adapter)
                                                           for name, adapter in _ADAPTERS.items()}
        self._waiting["torch.utils.data.dataloader"] = _watch

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        watch = self._waiting.pop(name, None)
        if watch is None:
            return None
        spec: Any = importlib.util.find_spec(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                if module.__name__ == name:  # an archive has one loader for all of a package's modules
                    guarded(watch, module)

            try:
                spec.loader.exec_module = exec_module
            except AttributeError:
                _say(f"this Python's loader of {name} cannot be watched")
        return spec


def _adapt(name: str, module: Any) -> None:
    """Has an adapter watch the module of its library."""
    import importlib.metadata  # only here, it takes as long as Python's start
    adapter = _beside(os.path.join("_adapters", name + ".py"))
    version = importlib.metadata.version(adapter.LIBRARY)
    if version not in adapter.VERSIONS:
        raise LookupError(f"the adapter of {adapter.LIBRARY} knows {', '.join(adapter.VERSIONS)}, and this is {version}")
    adapter.watch(module, sys.modules[__name__])
    _adapted.add(module.__name__.partition(".")[0])


def _watch(module: Any) -> None:
    """Makes DataLoader tell its order whenever an iteration begins."""
    loader, base = module.DataLoader, module._BaseDataLoaderIter
    _wrap(loader, lambda self: True)
    draw = base._next_index

    @functools.wraps(draw)
    def _next_index(self: Any) -> Any:
        index = draw(self)
        guarded(_drew, self, index)
        return index

    base._next_index = _next_index
    known = loader.__dict__.get("__init_subclass__")

    def own_iterator(self: Any) -> bool:
        # Others call DataLoader.__iter__, after what they do to samplers and generators. These two do not: loaders with
        # one iterator for all epochs, and torchdata's.
        kept = vars(self).get("iterator", False)
        return kept is None or isinstance(kept, base) or "next_iter_state" in vars(self)

    def __init_subclass__(cls: Any, /, **options: Any) -> None:
        if known is not None:
            known.__func__(cls, **options)
        else:
            super(loader, cls).__init_subclass__(**options)
        if type(cls.__dict__.get("__iter__")) is type(_wrap):  # others are not called with a loader, perhaps
            guarded(_wrap, cls, own_iterator)

    loader.__init_subclass__ = classmethod(__init_subclass__)


def _wrap(cls: Any, applies: Callable[[Any], bool]) -> None:
    begin = cls.__iter__

    @functools.wraps(begin)
    def __iter__(self: Any) -> Any:
        # Looked up, since cloudpickle carries a class of the trainer's with this into processes that have no Shoal.
        told = getattr(sys.modules.get("_shoal_run"), "iterated", None)
        return begin(self) if told is None else told(begin, self, applies)

    cls.__iter__ = __iter__


def iterated(begin: Callable[[Any], Any], loader: Any, applies: Callable[[Any], bool]) -> Any:
    guarded(_tell, loader, applies)
    iterator = begin(loader)
    guarded(_begun, loader, iterator)
    return iterator


def guarded(do: Callable[..., Any], *args: Any) -> None:
    try:
        do(*args)
    except Exception as e:  # a trainer does not fail because of a hint
        if by_handler(e):
            raise
        _say(f"no hint: {str(e) or repr(e)}")


def by_handler(e: Exception) -> bool:
    """Whether a trainer's handler of a signal has raised it, such as a timeout, which happened to come while Python was
    here. Handlers are given the frame that they interrupt. They may not be in place any more: some come once."""
    at = e.__traceback__
    while at is not None and at.tb_next is not None:
        interrupted, at = at.tb_frame, at.tb_next
        for value in list(at.tb_frame.f_locals.values()):
            if value is interrupted or type(value) is tuple and any(v is interrupted for v in value):
                return True
    return False


def _say(text: str) -> None:
    if "run" in os.environ.get("SHOAL_DEBUG", "").split(",") and text not in _said:
        _said.add(text)
        with contextlib.suppress(Exception):  # it may be closed
            print("shoal run: " + text.replace("\n", "; "), file=sys.stderr, flush=True)


@functools.lru_cache(maxsize=None)
def _hint() -> Any:
    return _beside("_hint.py")


def _beside(file: str) -> Any:
    """The module in a file that lies beside this one."""
    name = "_shoal_" + os.path.splitext(os.path.basename(file))[0].lstrip("_")
    spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(os.path.abspath(__file__)), file))
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
    if _numbers.get(id(loader)) == 0 or data.get_worker_info() is not None or isinstance(loader.dataset,
            data.IterableDataset):
        if isinstance(loader.dataset, data.IterableDataset) and data.get_worker_info() is None:
            if not any(c.__module__.partition(".")[0] in _adapted for c in type(loader.dataset).__mro__):
                _say("no hint: an IterableDataset has no order of indices that could be predicted")
            elif os.getpid() not in _of_workers:
                _of_workers.clear()
                _of_workers[os.getpid()] = os.memfd_create("shoal run")
                atexit.register(_forget)
        return
    if getattr(by_hand, "given", False):
        _say("no hint: the trainer gives hints itself")
        return
    hint, begun, late = _hint(), time.monotonic(), False
    for key in [key for key in _jobs if key[0] == os.getpid() and key[1] < 0]:
        guarded(_jobs[key].finish, 0)
        if _jobs[key].done:
            del _jobs[key]
    job = _jobs.pop((os.getpid(), id(loader)), None)
    if job is not None:
        guarded(job.finish, 0)
        late = job.late
        job.apart.end()
    ahead = _aheads.pop((os.getpid(), id(loader)), None)
    if ahead is not None:
        ahead.end()
    new = id(loader) not in _numbers
    adapter, reads = next(filter(None, (known(loader.dataset) for known in READING)), ("", None))
    name, what = _name(hint, loader, adapter), type(loader.dataset).__name__
    if reads is None:
        job = _Job(hint, name, what, lambda apart: _plans(hint, apart, loader, name), id(loader))
        job.begun, job.new = begun, new
    else:
        kept = getattr(loader, "_iterator", None)  # of persistent workers: it begins this epoch, too
        if kept is not None:
            kept.__dict__.pop("_shoal_ahead", None)
            kept._shoal_count = 0
        ahead = _aheads[os.getpid(), id(loader)] = Ahead(hint, name, what, lambda draw: reads(list(hint._flat([draw]))),
                                                         loader, "ranges")
        job = ahead.write(lambda: hint._Order(loader).epoch(0, last=True))
    _jobs[os.getpid(), id(loader)] = job
    job.finish(0 if late else WAIT)
    job.late = late or not job.done and not job.apart.long  # this sampler's epochs are not waited for again


def _begun(loader: Any, iterator: Any) -> None:
    """Has an iterator's draws, from its first one on, counted for the windows of its order."""
    if not issubclass(type(iterator), sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter):
        return  # one of the trainer's, which may run code when it is asked for anything
    if _numbers.get(id(loader)):
        _iterators[id(loader)] = weakref.ref(iterator)
    ahead = _aheads.get((os.getpid(), id(loader)))
    if ahead is not None and "_shoal_ahead" not in iterator.__dict__:
        iterator._shoal_ahead = ahead
        _took(ahead, iterator, iterator.__dict__.pop("_shoal_count", 0))


def _drew(iterator: Any, index: Any) -> None:
    # they are given batches ahead, which an iterator that is kept for the next epoch does not know any more
    if iterator._num_workers:
        if "_shoal_drawn" not in iterator.__dict__:
            iterator._shoal_drawn = collections.deque(maxlen=iterator._num_workers * iterator._prefetch_factor + 1)
        iterator._shoal_drawn.append(index)
    if not READING:
        return
    ahead = iterator.__dict__.get("_shoal_ahead")
    if ahead is None:
        iterator._shoal_count = iterator.__dict__.get("_shoal_count", 0) + 1
    else:
        _took(ahead, iterator, 1)


def _took(ahead: Ahead, iterator: Any, count: int) -> None:
    ahead.took(count, lambda: iterator._sampler_iter, iterator.__dict__.get("_shoal_drawn", ()))


WAIT = 5.0  # seconds for orders of up to _hint.SHORT samples

# by process and id: the latest of each loader; by a negative number those of loaders that have gone
_jobs: Dict[Tuple[int, int], _Job] = {}
_aheads: Dict[Tuple[int, int], Ahead] = {}  # as well


class _Job:
    """A plan that a copy of this process finds and writes: work returns in it the mounts and numbers of lines, and what
    went wrong."""

    def __init__(self, hint: Any, name: str, what: str, work: Callable[[Any], Any], of: int,
                 things: str = "files") -> None:
        self.done, self.late, self.begun, self.new = False, False, time.monotonic(), False
        self._key, self._name, self._what, self._things = of, name, what, things
        self.rest: List[Any] = []  # what else work has returned
        if os.getpid() not in _written:
            import multiprocessing.util  # torch has it
            atexit.register(_forget)
            multiprocessing.util.Finalize(None, _forget, exitpriority=1)  # of a worker, which runs no atexit
        self._mine = _written.setdefault(os.getpid(), set())
        self.apart = hint._Apart(lambda apart: json.dumps(work(apart)).encode())

    def finish(self, timeout: float) -> None:
        """Takes what the copy says, if it has said it by then."""
        if self.done:
            return
        try:
            said = self.apart.answer(timeout)
            if said is None:
                return
            self.done = True
            plans, failed, *self.rest = json.loads(said)
            for root, lines in plans:
                if (root, self._name) not in self._mine:
                    self._mine.add((root, self._name))
                    for file in _of_workers.values():
                        os.write(file, f"{root}/{self._name}\n".encode("utf-8", "surrogateescape"))
                    _say(f"told {root} the order of {lines} {self._things}, as plan {self._name}, in "
                         f"{time.monotonic() - self.begun:.2f} s")
            if failed is not None:
                raise OSError(failed)
            if not plans and (not self.rest or self.rest[0]):  # not for the end of an order
                if self._key in _numbers:
                    _numbers[self._key] = 0
                raise ValueError(f"no file of this {self._what} is in a Shoal mount")
        except Exception:
            self.done, self.rest = True, []
            # What was told of the last epoch would keep the mount from finding the order by itself.
            _remove(self._mine, lambda plan: plan[1] == self._name)
            if self.new and _numbers.get(self._key):
                del _numbers[self._key]
            raise


FIRST, WINDOW = 4_096, 100_000  # lines of the first window of an order, and of those after it


class Ahead:
    """An order that is written in windows. What is in one is found by a copy of the process as it is when the trainer
    has taken half of the items of the window before."""

    def __init__(self, hint: Any, name: str, what: str, reads: Callable[[Any], Any], of: Any, things: str,
                 first: int = 0) -> None:
        self._hint, self._name, self._what, self._reads, self._things, self._first = hint, name, what, reads, things, first or FIRST
        self._of = id(of)  # whose order it is, also when that is gone
        # items: those that the trainer has taken, and those of the latest window
        self._taken = self._from = self._until = 0
        self._job: Any = None

    def write(self, items: Callable[[], Any], taken: Any = ()) -> Any:
        """Has a window written. items is called in the copy, for those that the trainer will take next; taken are the
        last ones taken, which the trainer's workers have yet to read."""
        last, late = list(taken), self._job is not None and self._job.late
        skip, most = max(len(last) + self._until - self._taken, 0), WINDOW if self._until else self._first
        self._from, self._until = self._taken - len(last) + skip, -1
        self._job = _jobs[os.getpid(), self._of] = _Job(
            self._hint, self._name, self._what,
            lambda apart: _window(self._hint, apart, self._name,
                                  itertools.islice(itertools.chain(last, items()), skip, None), self._reads, most),
            self._of, self._things)
        self._job.late = late  # this order's windows are not waited for again
        return self._job

    def write_twice(self, items: Callable[[], Any]) -> None:
        """Has the first window written, and then, while the epoch begins, all of it."""
        job = self.write(items)
        job.finish(WAIT)
        if not job.done or job.rest[1:] == [True]:
            self.write(items)

    def took(self, count: int, items: Callable[[], Any], taken: Any = ()) -> None:
        """Says that the trainer has taken some items more. items and taken are write's."""
        self._taken += count
        if self._job is None:
            return
        if self._until < 0:
            self._job.finish(0)
            if not self._job.rest:
                return
            self._until = self._from + self._job.rest[0]
        if self._job.rest and self._job.rest[1] and 2 * self._taken >= self._from + self._until:
            self._job.apart.end()
            self.write(items, taken)

    def end(self) -> None:
        self._job = None


class Shards:
    """Iterates over what a library takes its shards from, and has written in windows which shards come next, for each
    worker. path is called for each item: its file.

    The library has drawn what it draws first when the first window is found, since its first item has been taken
    then."""

    def __init__(self, adapter: str, items: Any, path: Callable[[Any], str]) -> None:
        self._adapter, self._items, self._path = adapter, items, path
        self._ahead: Any = None  # False: there is none

    def __iter__(self) -> Shards:
        self._items = iter(self._items)  # not before: it may draw
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        guarded(self._took, item)
        return item

    def _took(self, item: Any) -> None:
        if self._ahead is None:
            self._ahead = False  # whatever goes wrong, goes wrong once
            path = self._path
            self._ahead = ahead_of(self._adapter, self, path(item), lambda item: [(path(item),)])
            if self._ahead:
                self._ahead.write(lambda: itertools.chain([item], self._items)).finish(WAIT)
        if self._ahead:
            self._ahead.took(1, lambda: self._items)


def in_mount(path: str) -> bool:
    return _hint()._Mounts(None).place(path) is not None


_of_shards: Dict[Tuple[int, str, str], int] = {}  # by process, mount and name: the id of what still reads by a plan


def ahead_of(adapter: str, of: Any, path: str, reads: Callable[[Any], Any], worker: bool = True,
             first: int = 0) -> Optional[Ahead]:
    """The order of what reads shards, of which one is given, with a plan of its own in its mount: other processes may
    have such plans there. None if it is in no mount."""
    hint = _hint()
    placed = hint._Mounts(None).place(path)
    if placed is None or getattr(sys.modules.get("shoal._hint"), "given", False):
        _say(f"no hint: {path} of {adapter} is in no Shoal mount" if placed is None
             else "no hint: the trainer gives hints itself")
        return None
    rank, data = hint._rank(None), sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if worker and data is not None else None
    parts = (os.environ.get("SHOAL_RUN_NAME", ""), adapter, f"rank{rank}" if worker and rank is not None else "",
             f"worker{info.id}" if info else "")
    base = "-".join(filter(None, parts))
    for name in itertools.chain([base], map((base + "-{}").format, itertools.count(2))):
        key, mine = (os.getpid(), placed[0], name), (placed[0], name) in _written.get(os.getpid(), ())
        if _of_shards.get(key, id(of)) == id(of) and (mine
                                                      or not os.path.exists(os.path.join(placed[0], ".shoal",
                                                              "plans", name))):
            break
    _of_shards[key] = id(of)
    _when_gone(of, _end, key, (os.getpid(), id(of)))
    return Ahead(hint, name, adapter, reads, of, "files", first)


def _when_gone(of: Any, do: Callable[..., Any], *args: Any) -> None:
    """Calls a function when an object has gone. weakref.finalize would do something at exit, so that functions of the
    trainer's were called in another order there."""
    def gone(ref: Any) -> None:
        del _refs[id(ref)]
        guarded(do, *args)

    ref = weakref.ref(of, gone)
    _refs[id(ref)] = ref


def _end(plan: Tuple[int, str, str], key: Tuple[int, int]) -> None:
    _of_shards.pop(plan, None)
    job = _jobs.pop(key, None)
    if job is not None and key[0] == os.getpid():
        guarded(job.finish, 0)
        job.apart.end()


def _window(hint: Any, apart: Any, name: str, items: Any, reads: Callable[[Any], Any],
            most: int) -> Tuple[List[Tuple[str, int]], Optional[str], int, bool]:
    """Writes up to most lines of what items read, in a copy of the process. Returns what _write does, the number of
    items, and whether there are more."""
    mounts, lines, count = hint._Mounts(None), 0, 0
    texts: Dict[str, bytearray] = {}
    for item in items:
        if max(lines, count) >= most:
            break
        for path, *where in reads(item):
            placed = mounts.place(path)
            if placed is not None:
                lines += 1
                text = texts.setdefault(placed[0], bytearray(b"#ranges\n" if where else b""))
                text += os.fsencode("\t".join([placed[1], *map(str, where)])) + b"\n"
        count += 1
    else:
        most = 0  # that was all
    plans = [(root, [bytes(text)], lines) for root, text in texts.items()]
    return (*_write(hint, apart, name, plans), count, most > 0)


def _write(hint: Any, apart: Any, name: str, plans: List[Tuple[str, Any, int]]) -> Tuple[List[Tuple[str, int]],
        Optional[str]]:
    """Writes the plans of mounts, each a text in pieces and its number of lines, in a copy of the process. Returns the
    mounts and numbers of lines, and what went wrong with them."""
    written: List[Tuple[str, int]] = []
    try:
        for root, text, lines in plans:
            apart.unlocked(hint._write, root, name, text)
            written.append((root, lines))
    except OSError as e:
        return written, str(e)
    return written, None


def _size(sized: Any) -> int:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return 0


def _plans(hint: Any, apart: Any, loader: Any, name: str) -> Tuple[List[Tuple[str, int]], Optional[str]]:
    """Writes the plan of each mount that holds files of the loader, and returns what _write does."""
    mounts, dataset, listing = hint._Mounts(None), loader.dataset, None
    unlisted = None
    if _size(dataset) > hint.SHORT:
        apart.is_long()
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
    return _write(hint, apart, name, [(root, plan.ordered(), plan.lines()) for root, plan in plans.items()])


class _Tried:
    """The first file of each sample of a dataset without a list of its files: what it opens when it is asked for the
    sample."""

    def __init__(self, hint: Any, apart: Any, dataset: Any, mounts: Any) -> None:
        self._known: Dict[int, List[str]] = {}
        self._hint, self._apart, self._dataset, self._mounts = hint, apart, dataset, mounts

    def __getitem__(self, i: int) -> List[str]:
        if i not in self._known:
            self._known[i] = list(self._hint._opened(self._apart, self._dataset, self._hint.np.array([i]),
                                                     self._mounts).values())
        return self._known[i]


def _name(hint: Any, loader: Any, adapter: str = "") -> str:
    rank, number = hint._rank(loader), _number(loader)
    parts = [os.environ.get("SHOAL_RUN_NAME", ""), adapter, "" if rank is None else f"rank{rank}",
             "" if number < 2 else str(number)]
    return "-".join(filter(None, parts if any(parts[:3]) else ["default"] + parts[3:]))


def _number(loader: Any) -> int:
    """The number of a loader among those that are alive, so that each has a plan of its own."""
    if id(loader) not in _numbers:
        _numbers[id(loader)] = next(n for n in itertools.count(1) if n not in _numbers.values())
        _when_gone(loader, _gone, id(loader))
    return _numbers[id(loader)]


def _gone(loader: int) -> None:
    """Forgets a loader. Its order may still be written, and read: an iterator does not hold its loader. Then it keeps
    the number."""
    number, iterator = _numbers.pop(loader, 0), _iterators.pop(loader, lambda: None)()
    if number and iterator is not None:
        _numbers[-id(iterator)] = number
        _when_gone(iterator, _numbers.pop, -id(iterator), None)
    _aheads.pop((os.getpid(), loader), None)
    job = _jobs.pop((os.getpid(), loader), None)
    if job is not None and not job.done:
        job._key = -id(job)  # another loader may have the number
        _jobs[os.getpid(), job._key] = job


def _forget() -> None:
    """Removes the plans of a process that ends: without them, the next job's order can be inferred."""
    for key in [key for key in _jobs if key[0] == os.getpid()]:
        job = _jobs.pop(key)
        guarded(job.finish, 0)
        job.apart.end()
    plans = _written.pop(os.getpid(), set())
    if os.getpid() in _of_workers:
        os.lseek(_of_workers[os.getpid()], 0, os.SEEK_SET)
        with os.fdopen(_of_workers.pop(os.getpid()), encoding="utf-8", errors="surrogateescape") as noted:
            plans.update(tuple(line.rstrip("\n").rsplit("/", 1)) for line in noted)  # type: ignore[misc]
    _remove(plans, lambda plan: True)


def _remove(plans: Set[Tuple[str, str]], which: Callable[[Tuple[str, str]], bool]) -> None:
    for plan in list(filter(which, plans)):
        plans.discard(plan)
        try:
            os.unlink(os.path.join(plan[0], ".shoal", "plans", plan[1]))
        except OSError as e:
            if by_handler(e):
                raise


def _each(files: Any) -> Any:
    return files if isinstance(files, list) else (files,)


class _Found:
    """The files of each sample of a dataset of unknown type: those in its attributes that are lists with an item for
    each sample, and of which the first names a file in a mount. An item is a path, or a tuple or dictionary with
    paths."""

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
        return isinstance(value,
                          (str, os.PathLike)) and mounts.place(os.fspath(value)) is not None and os.path.isfile(value)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> List[Any]:
        return list(dict.fromkeys(os.fspath(values[i] if key is None else values[i][key])
                                  for values, key in self._columns))
