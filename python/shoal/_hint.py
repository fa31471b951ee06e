"""Tells a Shoal mount the order in which a DataLoader is about to read. See hint."""

from __future__ import annotations

import bisect
import collections
import contextlib
import copy
import errno
import itertools
import os
import random
import sys
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

_State = Tuple[Any, Any, Any]  # of the global generators: Python's, numpy's, torch's
_Paths = Union[List[Any], "_First", "_Joined"]

given = False  # whether this process gives hints by hand; then _run gives none


def hint(sampler: Iterable[Any], paths: Any = None, mountpoint: Union[str, os.PathLike[str], None] = None, name: Optional[str] = None,
         epochs: int = 1, limit: Optional[int] = None) -> int:
    """Writes the indices that sampler will yield next as a plan into the Shoal mount that holds the files.

    sampler     a DataLoader (StatefulDataLoader too), a sampler or batch sampler of torch's, or any
                iterable of indices (or of lists of indices). It is not consumed, and all random
                state stays as it was.
    paths       the files that the indices mean: a dataset with .samples or .imgs (ImageFolder,
                DatasetFolder), a Subset or ConcatDataset of such datasets, nested at will, a dataset that wraps
                one of the same length as .dataset, or a list of paths or of (path, …) tuples.
                Default: the DataLoader's dataset.
    mountpoint  where the dataset is mounted; relative paths then start there. Default: the mounts that
                contain the paths, each of which gets its own plan; files outside of any are left out.
    name        one plan for each rank or stream that reads at the same time. Default: "rank3", from the
                DistributedSampler's rank, torch.distributed's, RANK or LOCAL_RANK, whichever is found
                first, so that no two ranks overwrite each other's plan; "default" if none is found.
                Jobs that read one mount at the same time need different names.
    epochs      how many epochs to predict, one after the other. A sampler with set_epoch is assumed to get
                each epoch's number. One that shuffles by the global generators can be predicted for one
                epoch only, since the trainer draws from them too (ValueError).
    limit       the most samples to predict. Without it an epoch ends after len(sampler) items (a
                DataLoader's batches), even if the sampler itself is endless. A sampler without a
                length needs it (ValueError).

    Call it once for each epoch, after set_epoch and directly before the iteration begins: random numbers drawn in
    between change the order of a shuffling sampler. While the previous epoch is still being read, the new plan waits
    for its end, and staged samples stay. Returns the number of paths written, over all mounts and epochs.

    Raises OSError if the mount refuses the plan, the previous one then staying in force, or if mountpoint is no mount;
    TypeError for samplers and paths that it cannot read without using them up, IterableDatasets and loaders in
    mid-epoch; ValueError if no path lies below a mount, and as said above; IndexError for an index beyond the paths.
    """
    global given
    given = True
    if paths is None:
        paths = getattr(sampler, "dataset", None)
        if paths is None:
            raise TypeError("hint needs paths, or a DataLoader whose dataset has them")
    listing = _paths(paths)
    if name is None:
        rank = _rank(sampler)
        name = "default" if rank is None else f"rank{rank}"
    mounts = _Mounts(mountpoint)
    plans = _lines((listing[i] for i in predict(sampler, epochs, limit)), mounts)
    if mountpoint is None and not plans:
        raise ValueError("hint: no path lies below a Shoal mount; mount the dataset (`shoal mount SOURCE MOUNTPOINT`), "
                         "or give mountpoint if the paths are relative to it")
    if mounts.root is not None:
        plans.setdefault(mounts.root, [])
    for root, lines in plans.items():
        _write(root, name, lines)
    return sum(len(lines) for lines in plans.values())


def predict(sampler: Iterable[Any], epochs: int = 1, limit: Optional[int] = None) -> List[int]:
    """The indices that sampler will yield next, without changing it or any random state.

    sampler, epochs and limit are hint's. Returns a flat list of int, the indices of batches one after the other: those of
    `epochs` epochs, but at most `limit`. Raises TypeError and ValueError for the samplers for which hint does, and
    ValueError if epochs or limit is below 1.
    """
    for what, value in (("epochs", epochs), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{what}={value}: it must be 1 or more")
    with _untouched_global_state():
        clone = _Clone(sampler, bounded=limit is not None)
        indices = (int(i) for epoch in range(epochs) for i in _flat(clone.epoch(epoch, last=epoch == epochs - 1)))
        return list(itertools.islice(indices, limit))


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, (list, tuple)) or getattr(item, "ndim", 0) > 0:
            yield from _flat(item)
        else:
            yield item


def _lines(files: Iterable[Any], mounts: _Mounts) -> Dict[str, List[str]]:
    """The plan of each mount: the files in it, in order."""
    plans: Dict[str, List[str]] = {}
    for path in files:
        placed = mounts.place(os.fspath(path))
        if placed is not None:
            plans.setdefault(placed[0], []).append(placed[1])
    return plans


def _write(root: str, name: str, lines: List[str]) -> None:
    plan = os.path.join(root, ".shoal", "plans", name)
    try:
        with open(plan, "w", encoding="utf-8", errors="surrogateescape", newline="\n") as f:
            f.write("".join(line + "\n" for line in lines))
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            text = f"{root} is not a Shoal mount: start it with `shoal mount SOURCE {root}`"
        elif e.errno == errno.EINVAL:
            text = "the mount refused the plan: " + _reason(root)
        else:
            text = e.strerror or str(e)
        raise OSError(e.errno, text, plan) from None


def _reason(root: str) -> str:
    try:
        with open(os.path.join(root, ".shoal", "order"), encoding="utf-8", errors="replace") as f:
            text = f.read()
    except OSError:
        return "see .shoal/order in the mount"
    return text[max(text.find("refused:"), 0):][:2000].strip()


def _rank(sampler: Any) -> object:
    """The rank that reads, None if there seems to be only one."""
    for s in _nested(sampler):
        if getattr(s, "num_replicas", 1) > 1 and hasattr(s, "rank"):
            return s.rank
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or None


def _nested(sampler: Any) -> List[Any]:
    """sampler and the samplers it wraps, the outermost first."""
    seen: List[Any] = []
    while sampler is not None and not any(sampler is s for s in seen):
        seen.append(sampler)
        outer = sampler
        sampler = getattr(outer, "batch_sampler", None)
        if sampler is None:
            sampler = getattr(outer, "sampler", None)
    return seen


def _paths(dataset: Any, unknown: Optional[Callable[[Any], Any]] = None) -> Any:
    """The path of each sample, by index. Datasets of types that it does not know are left to unknown, if given, which raises
    TypeError if it does not know them either."""
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):  # Subset
        below = _paths(dataset.dataset, unknown)
        return [below[i] for i in dataset.indices]
    if hasattr(dataset, "datasets") and hasattr(dataset, "cumulative_sizes"):  # ConcatDataset
        return _Joined([_paths(d, unknown) for d in dataset.datasets])
    for attribute in ("samples", "imgs"):
        samples = getattr(dataset, attribute, None)
        if samples is not None and (unknown is None or _listed(samples)):
            return _First(samples)
    inner = getattr(dataset, "dataset", None)
    if inner is not None and hasattr(inner, "__len__") and len(inner) == len(dataset):  # a wrapper, such as one that adds a transform
        return _paths(inner, unknown)
    if unknown is not None and not isinstance(dataset, (list, tuple, np.ndarray)):
        return unknown(dataset)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dataset, torch.utils.data.Dataset) or isinstance(dataset, (str, bytes)) or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"paths: a dataset with .samples, or a list of paths, not {type(dataset).__name__}; give the list")
    return _First(dataset)


def _listed(samples: Any) -> bool:
    """Whether an attribute of an unknown dataset holds paths."""
    if not isinstance(samples, (list, tuple, np.ndarray)) or len(samples) == 0:
        return False
    first = samples[0]
    return isinstance(first[0] if isinstance(first, (list, tuple)) and first else first, (str, os.PathLike))


class _First:
    """The paths from a list of paths, or of tuples that begin with one."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, i: int) -> Any:
        item = self._items[i]
        return item[0] if isinstance(item, (tuple, list)) else item


class _Joined:
    """Concatenated lists, indexed as in ConcatDataset."""

    def __init__(self, lists: List[_Paths]) -> None:
        self._lists, self._ends = lists, list(itertools.accumulate(len(x) for x in lists))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: int) -> Any:
        if i < 0:
            i += len(self)
        k = bisect.bisect_right(self._ends, i)
        if i < 0 or k == len(self._lists):
            raise IndexError(f"sample {i} of {len(self)}")
        return self._lists[k][i - (self._ends[k] - len(self._lists[k]))]


class _Mounts:
    """Finds the mount that contains a path: the given one, or any."""

    def __init__(self, mountpoint: Union[str, os.PathLike[str], None]) -> None:
        self.root = None if mountpoint is None else os.path.abspath(os.fspath(mountpoint))
        self._above: Dict[str, Optional[Tuple[str, str]]] = {}  # by folder: the mount point above it, as spelled and resolved; None without one

    def place(self, path: str) -> Optional[Tuple[str, str]]:
        """The mount point and the path in it, as a plan needs them; None outside of any mount."""
        if self.root is not None:
            path = os.path.join(self.root, path)
        folder, slash, base = path.rpartition("/")  # a third of what os.path.split takes
        folder = folder or slash
        if folder not in self._above:
            self._above[folder] = self._find(os.path.abspath(folder))
        above = self._above[folder]
        if above is None:
            if self.root is not None:
                raise ValueError(f"{path} is not below the mount point {self.root}")
            return None
        if "\n" in path:
            raise ValueError(f"{path!r}: a plan cannot hold a path with a line break")
        return above[0], above[1] + base

    def _find(self, folder: str) -> Optional[Tuple[str, str]]:
        for spelled, top in ((folder, self.root), (os.path.realpath(folder), self.root and os.path.realpath(self.root))):
            at = spelled
            while at != top if top is not None else not os.path.exists(os.path.join(at, ".shoal", "stats")):
                if at == os.path.dirname(at):
                    break
                at = os.path.dirname(at)
            else:
                inside = os.path.relpath(spelled, at)
                return self.root or at, "" if inside == os.curdir else inside + os.sep
        return None


def _length(sampler: Any) -> int:
    """The number of items in an epoch."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        raise ValueError(f"hint: this {type(sampler).__name__} has no length, and may be endless; say how many samples to predict, such as "
                         "limit=len(dataset)") from None


@contextlib.contextmanager
def _untouched_global_state() -> Iterator[None]:
    """Restores the global generators, whatever a sampler of unknown type draws from them."""
    saved = _global_state()
    try:
        yield
    finally:
        _set_global_state(saved)


def _set_global_state(saved: _State) -> None:
    random.setstate(saved[0])
    np.random.set_state(saved[1])
    if saved[2] is not None:
        sys.modules["torch"].set_rng_state(saved[2])


def _global_state() -> _State:
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), torch.get_rng_state() if torch else None


def _same(a: _State, b: _State) -> bool:
    return a[0] == b[0] and a[1][2:] == b[1][2:] and np.array_equal(a[1][1], b[1][1]) and (a[2] is None or bool((a[2] == b[2]).all()))


class _Clone:
    """Iterates a copy of a sampler, or of a DataLoader's, with copies of its generators.

    A generator that sampler and DataLoader share stays shared between the copies: the base seed that a DataLoader
    draws from its generator is missing from the sampler's stream only then.

    Some loaders make one iterator over an endless sampler, keep it as .iterator, and take len(loader) batches from it
    for each epoch (timm's MultiEpochsDataLoader, Ultralytics' InfiniteDataLoader). The copy starts at that iterator's
    position, which is known between epochs, unless workers draw ahead.
    """

    def __init__(self, sampler: Any, bounded: bool = False) -> None:
        self._torch: Any = sys.modules.get("torch")
        self._copies: Dict[int, Tuple[Any, Any]] = {}  # by id: the original, which keeps the id in use, and its copy
        self._draws: Optional[List[Any]] = None  # generator of the DataLoader's base seeds: None, or a list of one generator (None: the global one)
        self._persistent = False
        self._kept: Any = None  # the loader's persistent iterator
        self._items: Optional[Iterator[Any]] = None  # the copy's
        loader = sampler
        if self._torch is not None and isinstance(loader, self._torch.utils.data.DataLoader):
            sampler = self._enter(loader)
        if hasattr(sampler, "__next__"):
            raise TypeError(f"hint: iterating this {type(sampler).__name__} would use it up; pass a list or a sampler")
        self._length = None if bounded else _length(loader)
        self._sampler = self._copy(sampler, "sampler")
        self._epochs = [s for s in _nested(self._sampler) if hasattr(s, "set_epoch") and hasattr(s, "epoch")]
        self._first = [s.epoch for s in self._epochs]
        if self._kept is not None:
            self._follow(len(loader))

    def _enter(self, loader: Any) -> Any:
        """Notes what the loader will draw, and returns the sampler of its indices."""
        if isinstance(loader.dataset, self._torch.utils.data.IterableDataset):
            raise TypeError("hint: an IterableDataset has no order of indices that could be predicted")
        # torchdata's StatefulDataLoader. Its random samplers have generators of their own.
        if getattr(loader, "next_iter_state", None) is not None:
            raise TypeError("hint: this StatefulDataLoader resumes from a loaded state in mid-epoch; hint from the next epoch on, "
                            "in this epoch the mount infers the position from the files read")
        started = getattr(loader, "_initial_iter_for_state_dict", False)  # state_dict has already made the iterator
        if started and loader.num_workers > 0:
            raise TypeError("hint: state_dict has started this StatefulDataLoader's workers; call hint before it")
        self._persistent = loader.persistent_workers and loader.num_workers > 0
        kept = getattr(loader, "iterator", None)
        if isinstance(kept, self._torch.utils.data.dataloader._BaseDataLoaderIter):
            self._kept = kept
        # A persistent iterator draws its base seed once, when it is made. Every other iteration
        # begins by drawing one, before the sampler draws anything.
        elif not started and not (self._persistent and loader._iterator is not None):
            self._draws = [None if loader.generator is None else self._copy(loader.generator, "generator")]
        return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler

    def _follow(self, length: int) -> None:
        """Advances the copy to the position of the loader's iterator, at the end of an epoch of this length."""
        kept, torch = self._kept, self._torch
        if kept._num_workers:
            one, other = (list(_flat(itertools.islice(iter(self._sampler), length))) for _ in range(2))
            if self._epochs or one != other:
                raise TypeError("hint: this loader's workers have begun the next epoch's shuffle already, so it cannot be predicted; "
                                "use DataLoader(persistent_workers=True), which also keeps its workers")
        if kept._num_yielded % max(length, 1):
            raise TypeError("hint: this loader continues an unfinished epoch; hint between whole epochs")
        self._items = iter(self._sampler)
        generators = [(value, made) for value, made in self._copies.values() if isinstance(value, torch.Generator)]
        if kept._num_yielded and generators:
            # The end of the last epoch is still to come; there RandomSampler draws from its generator once more.
            state = _global_state()
            collections.deque(itertools.islice(self._items, length), 0)
            _set_global_state(state)
            for value, made in generators:
                made.set_state(value.get_state())

    def epoch(self, k: int, last: bool) -> Iterator[Any]:
        """The indices of the k-th epoch from now; call it for each epoch in turn."""
        for s, first in zip(self._epochs, self._first):
            if k > 0:
                s.set_epoch(first + k)
        if self._draws is not None and not (self._persistent and k > 0):
            self._torch.empty((), dtype=self._torch.int64).random_(generator=self._draws[0])
        before = None if last else _global_state()
        items = self._items if self._items is not None else iter(self._sampler)
        yield from itertools.islice(items, self._length)
        if self._kept is None:
            next(items, None)  # a sampler may draw at its end
        if before is not None and not _same(before, _global_state()):
            raise ValueError("epochs: this sampler shuffles by a global generator, from which the trainer may draw before the next "
                             "epoch; give it a generator of its own, or hint each epoch")

    def _copy(self, value: Any, role: str) -> Any:
        """A copy of a sampler, of its generators and nested samplers, and of everything that it may shuffle in place.
        Datasets and other values are not copied. role is the attribute under which a sampler holds the
        value."""
        torch = self._torch
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if torch is not None and isinstance(value, torch.Generator):
            made = torch.Generator(device=value.device)
            made.set_state(value.get_state())
        elif isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
            made = copy.deepcopy(value)
        elif torch is not None and isinstance(value, torch.Tensor) and value.ndim == 1:
            made = value.clone()
        elif isinstance(value, np.ndarray) and value.ndim == 1:
            made = value.copy()
        elif type(value) in (list, dict):
            made = value.copy()
            if len(made) <= 4096:  # longer ones hold indices, not samplers
                for key in range(len(made)) if type(made) is list else made:
                    made[key] = self._copy(made[key], role)
        elif self._samples(value, role):
            made = copy.copy(value)
            self._copies[id(value)] = value, made
            for key, inner in list(vars(made).items()):
                vars(made)[key] = self._copy(inner, key)
        else:
            return value
        self._copies[id(value)] = value, made
        return made

    def _samples(self, value: Any, role: str) -> bool:
        """Whether value is a sampler: one of torch's, or an object used as one."""
        if self._torch is not None and isinstance(value, self._torch.utils.data.Sampler):
            return True
        return role in ("sampler", "batch_sampler") and hasattr(value, "__dict__") and hasattr(value, "__iter__")
