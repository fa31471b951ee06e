"""Tells a Shoal mount the order in which a DataLoader is about to read. See hint."""

from __future__ import annotations

import array
import atexit
import bisect
import builtins
import contextlib
import errno
import fcntl
import functools
import gc
import inspect
import io
import itertools
import json
import operator
import os
import pickle
import random
import re
import resource
import select
import signal
import sys
import threading
import time
import types
import warnings
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

_State = Tuple[Any, Any, Any]  # of the global generators: Python's, numpy's, torch's
_Paths = Union[List[Any], "_First", "_Joined"]

_AT_ONCE = 1 << 12  # batches or lines, as objects; 10^7 lines would take a GiB
_BANDS = 12  # of a long list all of whose files are asked for, see _texts
_NOWHERE = ("hint: no path lies below a Shoal mount; mount the dataset (`shoal mount SOURCE MOUNTPOINT`), "
            "or give mountpoint if the paths are relative to it")
SHORT = 200_000  # samples: orders that take a fraction of a second, which a trainer waits for
given = False  # whether this process gives hints by hand; then _run gives none
_late: Dict[Tuple[int, str], _Apart] = {}  # by process and name of the plan: the copies that were not waited for
atexit.register(_late.clear)  # while Python can still end them


def hint(sampler: Optional[Iterable[Any]] = None, paths: Any = None,
         mountpoint: Union[str, os.PathLike[str], None] = None,
         name: Optional[str] = None, epochs: int = 1, limit: Optional[int] = None,
         ranges: Optional[Iterable[Tuple[Union[str, os.PathLike[str]], int, int]]] = None) -> int:
    """Writes the indices that sampler will yield next as a plan into the Shoal mount that holds the files.

    sampler     a DataLoader (StatefulDataLoader too), a sampler or batch sampler of torch's, or any
                iterable of indices (or of lists of indices). It is iterated in a copy of the process
                (a fork): neither it nor anything else of the trainer changes.
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
    ranges      in place of sampler and paths: what will be read of large files, as (path, offset, length) in
                bytes, in order. It is iterated here, up to limit. Give a long order in pieces of some 100,000.

    Call it once for each epoch, after set_epoch and directly before the iteration begins: random numbers drawn in
    between change the order of a shuffling sampler. While the previous epoch is still being read, the new plan waits
    for its end, and staged samples stay. Returns the number of paths written, over all mounts and epochs. Above 200,000
    samples it does not wait and returns 0: the copy writes the plan while the epoch begins, one rank of a node after
    the other. What goes wrong then is a RuntimeWarning of the next hint.

    Raises OSError if the mount refuses the plan, the previous one then staying in force, or if mountpoint is no mount;
    TypeError for samplers that reach out of the process (write files, share memory, wait for threads), plain iterators,
    IterableDatasets, loaders in mid-epoch and datasets that open other files than they list; ValueError if no path lies
    below a mount, and as said above; IndexError for an index beyond the paths.
    """
    global given
    if name is not None and ("/" in name or name[:1] == "."):
        raise ValueError(f"name={name!r}: it becomes a file's name in .shoal/plans of the mount, without / and no "
                         f"dot first")
    _positive(epochs, limit)
    given = True
    if ranges is not None:
        if sampler is not None or paths is not None:
            raise TypeError("hint takes ranges, or a sampler with paths")
        mounts, name = _Mounts(mountpoint), name or _name(None)
        _end_late(name)
        return _hint_ranges(itertools.islice(ranges, limit), mounts, name)
    if sampler is None:
        raise TypeError("hint needs a sampler, or ranges")
    if paths is None:
        paths = getattr(sampler, "dataset", None)
        if paths is None:
            raise TypeError("hint needs paths, or a DataLoader whose dataset has them")
    listed = isinstance(paths, (list, tuple, np.ndarray))
    name, mounts = name or _name(sampler), _Mounts(mountpoint)
    _end_late(name)

    def work(apart: _Apart) -> bytes:
        listing = _paths(paths)  # here, since a dataset's attributes and its length may be code
        long = (limit or epochs * len(listing)) > SHORT
        if long:
            apart.is_long()
            apart.take_turn(mounts, listing)
        indices = _indices(sampler, epochs, limit)
        if not listed and not _agrees(listing, _opened(apart, paths, indices, mounts)):
            raise TypeError(f"hint: this {type(paths).__name__} opens other files than its list has at those places; "
                            f"give the files by index as paths")
        plans = _texts(listing, indices, mounts, apart if long else None)
        del indices
        if not plans:
            raise ValueError(_NOWHERE)
        for root, plan in plans.items():
            apart.unlocked(_write, root, name, plan.ordered())
        return str(sum(plan.lines() for plan in plans.values())).encode()

    apart = _Apart(work)
    written = apart.answer()
    if written is None:
        _late[os.getpid(), name] = apart
    return int(written or 0)


def _end_late(name: str) -> None:
    """Ends the writing of this plan's last order, if it goes on."""
    late = _late.pop((os.getpid(), name), None)
    if late is not None:
        try:
            late.answer(0)
        except (OSError, TypeError, ValueError, IndexError) as e:
            warnings.warn(f"hint: the last order of this plan was not written: {e}", RuntimeWarning, stacklevel=3)
        late.end()


def _hint_ranges(ranges: Iterable[Tuple[Any, int, int]], mounts: _Mounts, name: str) -> int:
    texts: Dict[str, bytearray] = {}
    lines = 0
    for path, offset, length in ranges:
        placed = mounts.place(os.fsdecode(path))
        if placed is not None:
            lines += 1
            texts.setdefault(placed[0],
                             bytearray(b"#ranges\n")).extend(
                                 os.fsencode(f"{placed[1]}\t{int(offset)}\t{int(length)}\n"))
    if not texts:
        raise ValueError(_NOWHERE)
    for root, text in texts.items():
        _write(root, name, [bytes(text)])
    return lines


def predict(sampler: Iterable[Any], epochs: int = 1, limit: Optional[int] = None) -> List[int]:
    """The indices that sampler will yield next, without changing it or any random state.

    sampler, epochs and limit are hint's. Returns a flat list of int, the indices of batches one after the other: those
    of `epochs` epochs, but at most `limit`. Raises TypeError and ValueError for the samplers for which hint does, and
    ValueError if epochs or limit is below 1.
    """
    _positive(epochs, limit)
    indices: List[int] = np.frombuffer((_Apart(lambda _: b"." + _indices(sampler, epochs, limit).tobytes()).answer()
                                        or b".")[1:], np.int64).tolist()
    return indices


def _positive(epochs: int, limit: Optional[int]) -> None:
    for what, value in (("epochs", epochs), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{what}={value}: it must be 1 or more")


def _indices(sampler: Any, epochs: int = 1, limit: Optional[int] = None) -> Any:
    """predict, in the copy."""
    order = _Order(sampler, epochs, bounded=limit is not None)
    single = getattr(sampler, "batch_sampler", sampler) is None  # a DataLoader that takes samples one by one
    items = (item for epoch in range(epochs) for item in order.epoch(epoch, last=epoch == epochs - 1))
    taken = array.array("q")
    while limit is None or len(taken) < limit:
        some = list(itertools.islice(items, _AT_ONCE if limit is None else min(limit - len(taken), _AT_ONCE)))
        if not some:
            break
        try:  # what almost all yield, numbers or batches of them
            taken.extend(array.array("q", itertools.chain.from_iterable(some) if isinstance(some[0], list) else some))
        except TypeError:
            taken.extend(map(operator.index, _flat(some, single)))
    return np.frombuffer(taken, np.int64)[:limit]


def _opened(apart: _Apart, dataset: Any, indices: Any, mounts: _Mounts) -> Dict[int, str]:
    """What a dataset opens first for some of its samples, as far as that can be seen."""
    def inside(path: str) -> bool:
        try:
            return mounts.place(path) is not None
        except ValueError:
            return False

    some = {int(i): apart.first_open(dataset, int(i), inside)
            for i in dict.fromkeys(indices[::max(len(indices) // 8, 1)].tolist())}
    return {i: path for i, path in some.items() if path is not None}


def _agrees(listing: Any, opened: Dict[int, str]) -> bool:
    """Whether a dataset opens the files of its list."""
    for i, path in opened.items():
        files = listing[i]
        if os.path.realpath(path) not in [os.path.realpath(os.fsdecode(f))
                                          for f in (files if isinstance(files, list) else [files])]:
            return False
    return True


def _flat(items: Iterable[Any], batch: bool = False) -> Iterator[Any]:
    """The indices in items, or in a batch. A tuple in that is one index, of a dataset that takes such: not all in it
    are places."""
    for item in items:
        if batch and isinstance(item, tuple):
            raise TypeError(f"hint: this sampler's indices are tuples, such as {item!r:.80}: which files they mean is "
                            f"not known")
        if isinstance(item, (list, tuple)) or getattr(item, "ndim", 0) > 0 or not batch and not hasattr(
                item, "__index__") and isinstance(item, Iterable) and not isinstance(item, (str, bytes)):
            yield from _flat(item, True)
        else:
            yield item


class _Plan:
    """A mount's plan: the lines of each place in an order, whatever order they are found in."""

    def __init__(self) -> None:
        self._text = io.BytesIO()
        self._found: List[Tuple[Any, Any, int]] = []

    def add(self, places: Any, text: bytearray, sizes: Any) -> None:
        """Takes the lines of some places; sizes says how long those of each are."""
        self._found.append((places.astype(np.uint32), sizes, self._text.tell()))
        self._text.write(text)

    def lines(self) -> int:
        return self._text.getvalue().count(b"\n")

    def ordered(self) -> Iterator[bytes]:
        """The plan's text, piece by piece; once."""
        text = self._text.getvalue()  # no copy
        length = max((int(places.max()) + 1 for places, _, _ in self._found), default=0)
        starts, sizes = np.zeros(length, np.int64), np.zeros(length, np.uint32)
        while self._found:
            places, some, at = self._found.pop()
            starts[places], sizes[places] = at + np.cumsum(some, dtype=np.int64) - some, some
        for first in range(0, length, _AT_ONCE):
            begin = starts[first:first + _AT_ONCE]
            end = begin + sizes[first:first + _AT_ONCE]
            yield b"".join([text[a:b] for a, b in zip(begin.tolist(), end.tolist())])


def _texts(listing: Any, indices: Any, mounts: _Mounts, apart: Optional[_Apart] = None) -> Dict[str, _Plan]:
    """The plan of each mount: the files in it, in order, one a line. With apart, that is in a copy, a long list is
    looked at in bands, each in a copy of its own unless the list was shuffled. Python counts references in an object,
    so to look at one is to write, and the kernel copies its page; these pages end with the band. What was found takes
    memory too: if that will be much, the bands are more, and later ones smaller."""
    plans: Dict[str, _Plan] = {}
    if mounts.root is not None:
        plans[mounts.root] = _Plan()
    low, high = int(indices.min(initial=0)), int(indices.max(initial=0)) + 1
    share = min(len(indices) / (high - low), 1)
    bands = 1 if apart is None else round(_BANDS * (1 + 2 * share) / 3)
    again = apart.again if apart is not None and _in_line(listing) else lambda found: found()

    def look(first: int, end: int) -> None:
        places = np.flatnonzero((indices >= first) & (indices < end))
        places = places[indices[places].argsort()]  # in the list's order

        def found() -> bytes:
            return pickle.dumps(_found(listing, indices[places], mounts), 5)

        for root, lines in pickle.loads(again(found)).items():
            plans.setdefault(root, _Plan()).add(places, *lines)

    ends = [low] + [high - int((high - low) * (1 - k / bands) ** (1 + share)) for k in range(1, bands + 1)]
    for first, end in zip(ends, ends[1:]):
        look(first, end)
    return plans


def _found(listing: Any, indices: Any, mounts: _Mounts) -> Dict[str, Tuple[bytearray, Any]]:
    """For each mount, the lines of the files at the indices, and how long those of each index are."""
    found: Dict[str, Tuple[bytearray, Any]] = {}
    for first in range(0, len(indices), _AT_ONCE):
        some = indices[first:first + _AT_ONCE]
        files = listing.several(some) if isinstance(listing, _First) else [listing[i] for i in some.tolist()]
        for root, (lines, long) in (mounts.together(files) or mounts.each(files)).items():
            text, sizes = found.setdefault(root, (bytearray(), np.zeros(len(indices), np.uint32)))
            text += lines
            sizes[first:first + len(long)] = long
    return found


def _in_line(listing: Any) -> bool:
    """Whether a list's neighbours are neighbours in memory; those of one that was shuffled are not."""
    some = [listing[i] for i in range(len(listing))[:1024]]
    return len({id(f[0] if isinstance(f, list) and f else f) >> 12 for f in some}) <= len(some) // 2


def _write(root: str, name: str, texts: Iterable[bytes]) -> None:
    path = os.path.join(root, ".shoal", "plans", name)
    try:
        with open(path, "wb", 0) as f:
            for text in _amid(texts):
                view = memoryview(text)
                while view:
                    view = view[f.write(view):]
    except OSError as e:
        if e.errno is None:  # the trainer's own timeout, raised by a handler of a signal
            raise
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            cause = f"{root} is not a Shoal mount: start it with `shoal mount SOURCE {root}`"
        elif e.errno == errno.EINVAL:
            cause = "the mount refused the plan: " + _reason(root)
        else:
            cause = e.strerror or str(e)
        raise OSError(e.errno, cause, path) from None


def _amid(texts: Iterable[bytes]) -> Iterator[Union[bytes, memoryview]]:
    """The same bytes, in pieces of which all but the last end amid a line. The kernel closes the file of a copy that is
    killed, and the mount refuses what was written by then: it ends with a folder, or a range without a length. Of names
    without folders, in which a part may be a name, it ends with a part."""
    rest = b""
    for text in texts:
        text = rest + text
        end = max(text.rfind(b"/"), text.rfind(b"\t")) + 1 or max(len(text) - 2, 0)
        yield memoryview(text)[:end]
        rest = text[end:]
    yield rest


def _reason(root: str) -> str:
    try:
        with open(os.path.join(root, ".shoal", "order"), encoding="utf-8", errors="replace") as f:
            text = f.read()
    except OSError:
        return "see .shoal/order in the mount"
    return text[max(text.find("refused:"), 0):][:2000].strip()


def _name(sampler: Any) -> str:
    rank = _rank(sampler)
    return "default" if rank is None else f"rank{rank}"


def _rank(sampler: Any) -> object:
    """The rank that reads, None if there seems to be only one. Nothing of the trainer's is called for it."""
    for s in _nested(sampler, _stored):
        replicas, rank = _stored(s, "num_replicas"), _stored(s, "rank")
        if isinstance(rank, (int, np.integer)) and isinstance(replicas, (int, np.integer)) and replicas > 1:
            return rank
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or None


def _nested(sampler: Any, get: Callable[[Any, str], Any]) -> List[Any]:
    """sampler and the samplers it wraps, the outermost first. Some have any attribute, a new object each time."""
    seen: List[Any] = []
    while sampler is not None and len(seen) < 100 and not any(sampler is s for s in seen):
        seen.append(sampler)
        outer = sampler
        sampler = get(outer, "batch_sampler")
        if sampler is None:
            sampler = get(outer, "sampler")
    return seen


def _stored(o: Any, name: str) -> Any:
    """An attribute of an object that is there without a call of a property or of __getattr__; else None."""
    value = inspect.getattr_static(o, name, None)
    if isinstance(value, types.MemberDescriptorType):  # a slot
        with contextlib.suppress(AttributeError):  # that is empty
            return value.__get__(o)
    return None if hasattr(type(value), "__get__") else value


def _paths(dataset: Any, unknown: Optional[Callable[[Any], Any]] = None) -> Any:
    """The path of each sample, by index. Datasets of types that it does not know are left to unknown, if given, which
    raises TypeError if it does not know them either."""
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
    # a wrapper, such as one that adds a transform
    if inner is not None and hasattr(inner, "__len__") and len(inner) == len(dataset):
        return _paths(inner, unknown)
    if unknown is not None and not isinstance(dataset, (list, tuple, np.ndarray)):
        return unknown(dataset)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dataset, torch.utils.data.Dataset) or isinstance(dataset,
            (str, bytes)) or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"paths: a dataset with .samples, or a list of paths, not {type(dataset).__name__}; "
                        f"give the list")
    return _First(dataset)


def _listed(samples: Any) -> bool:
    """Whether an attribute of an unknown dataset holds paths."""
    if not isinstance(samples, (list, tuple, np.ndarray)) or len(samples) == 0:
        return False
    first = samples[0]
    return isinstance(first[0] if isinstance(first, (list, tuple)) and first else first, (str, os.PathLike))


class _First:
    """The paths from a list of paths, or of tuples that begin with one."""

    def __init__(self, items: Any) -> None:
        self._items: Sequence[Any] = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, i: int) -> Any:
        item = self._items[i]
        return item[0] if isinstance(item, (tuple, list)) else item

    def several(self, indices: Any) -> List[Any]:
        """The paths at an array of indices."""
        if isinstance(self._items, np.ndarray) and self._items.dtype.kind == "U":
            return self._items[indices].tolist()
        items = self._items
        return [item[0] if isinstance(item, (tuple, list)) else item for item in [items[i] for i in indices.tolist()]]


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


def genuine(root: str) -> bool:
    """Whether the folder .shoal in root is a mount's, or this user's own. In a folder like /tmp anybody can make one,
    with what he likes in stats, and links to others' files in plans. A .shoal that is not listed belongs to a mount. If
    root is on no mount, overlayfs shows it, and other files may lie over the mount's."""
    device = os.stat(root).st_dev  # of the mount, if root is a link to it
    at = b"%d:%d" % (os.major(device), os.minor(device))
    with open("/proc/self/mountinfo", "rb") as mounts:
        if any(line.split()[2] == at and b" - fuse.shoal " in line for line in mounts):
            return True
    return os.lstat(os.path.join(root, ".shoal")).st_uid == os.geteuid() and ".shoal" in os.listdir(root)


def mount_points() -> List[str]:
    """Where this process has something mounted."""
    with open("/proc/self/mounts", "rb") as mounts:
        return [os.fsdecode(re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), line.split(b" ")[1]))
                for line in mounts]


class _Mounts:
    """Finds the mount that contains a path: the given one, or any."""

    def __init__(self, mountpoint: Union[str, os.PathLike[str], None]) -> None:
        self.root = None if mountpoint is None else os.path.abspath(os.fsdecode(mountpoint))
        # by folder: the mount point above it, as spelled and resolved; None without one
        self._above: Dict[str, Optional[Tuple[str, str]]] = {}
        self._mounted: Dict[str, bool] = {}
        self._genuine = functools.lru_cache(maxsize=None)(genuine)

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

    def each(self, files: List[Any]) -> Dict[str, Tuple[bytes, Any]]:
        """The lines of a plan of each mount, and how long each file's are. A file is a path or a list of paths."""
        lines: Dict[str, List[bytes]] = {}
        for k, paths in enumerate(files):
            for path in paths if isinstance(paths, list) else (paths,):
                placed = self.place(os.fsdecode(path))
                if placed is not None:
                    line = os.fsencode(f"{placed[1]}\n")
                    lines.setdefault(placed[0], [b""] * len(files))[k] += line
        return {root: (b"".join(some), np.fromiter(map(len, some), np.uint32)) for root, some in lines.items()}

    def together(self, files: List[Any]) -> Optional[Dict[str, Tuple[bytes, Any]]]:
        """What each gives, in a tenth of its time, if all files are spelled as paths below one mount; else None."""
        try:
            text = "\n" + "\n".join(files)
            root = (self.place(files[0]) or "?")[0]
        except TypeError:  # other things than strings
            return None
        lines = text.split("\n" + root.rstrip("/") + "/")[1:]
        data = os.fsencode("\n".join(lines) + "\n")
        sizes = np.diff(np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")), prepend=-1)
        odd = any(part in text for part in ("//", "/./", "/../"))
        if not len(lines) == len(sizes) == len(files) or odd or self._nested(root):
            return None
        return {root: (data, sizes)}

    def _nested(self, root: str) -> bool:
        """Whether something is mounted below a mount."""
        if root not in self._mounted:
            self._mounted[root] = any(point.startswith(root.rstrip("/") + "/") for point in mount_points())
        return self._mounted[root]

    def _find(self, folder: str) -> Optional[Tuple[str, str]]:
        for spelled, top in ((folder, self.root),
                             (os.path.realpath(folder), self.root and os.path.realpath(self.root))):
            at = spelled
            while at != top if top is not None else not (os.path.exists(os.path.join(at, ".shoal", "stats"))
                                                         and self._genuine(at)):
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
        raise ValueError(f"hint: this {type(sampler).__name__} has no length, and may be endless; say how many samples "
                         f"to predict, such as "
                         "limit=len(dataset)") from None


class _Order:
    """The indices that a sampler or a DataLoader yields next, taken from itself: only in a process made for it, see
    _apart.

    A DataLoader's are taken as its iterators take them, by the code of their common base: with workers that asks a
    sampler for an iterator twice, and a persistent one draws its base seed once. Some loaders keep one iterator over an
    endless sampler as .iterator and take len(loader) batches of it for each epoch (timm's MultiEpochsDataLoader,
    Ultralytics' InfiniteDataLoader). What its workers have been given already is known if _run has noted it.
    """

    def __init__(self, sampler: Any, epochs: int = 1, bounded: bool = False) -> None:
        torch = sys.modules.get("torch")
        self._loader: Any = None
        self._base: Any = None
        self._made: Any = None  # the loader's iterator that goes on
        self._persistent: Any = None
        loader = sampler
        if torch is not None and isinstance(loader, torch.utils.data.DataLoader):
            self._base = torch.utils.data.dataloader._BaseDataLoaderIter
            sampler = self._enter(loader, torch)
            if epochs > 1 and loader.generator is None:  # so that only what the sampler draws changes the global one
                loader.__dict__["generator"] = torch.Generator()
        elif hasattr(sampler, "__next__"):
            raise TypeError(f"hint: iterating this {type(sampler).__name__} would use it up; pass a list or a sampler")
        self._sampler = sampler
        self._length = None if bounded else _length(loader)
        self._epochs = [s for s in _nested(sampler, lambda s, name: getattr(s, name, None))
                        if hasattr(s, "set_epoch") and hasattr(s, "epoch")]
        self._first = [s.epoch for s in self._epochs]
        self._items = None if self._made is None else self._rest()

    def _enter(self, loader: Any, torch: Any) -> Any:
        if isinstance(loader.dataset, torch.utils.data.IterableDataset):
            raise TypeError("hint: an IterableDataset has no order of indices that could be predicted")
        if getattr(loader, "next_iter_state", None) is not None:
            raise TypeError("hint: this StatefulDataLoader resumes from a loaded state in mid-epoch; hint from the "
                            "next epoch on, "
                            "in this epoch the mount infers the position from the files read")
        started = getattr(loader, "_initial_iter_for_state_dict", False)  # state_dict has already made the iterator
        if started and loader.num_workers > 0 and not hasattr(loader._iterator, "_shoal_drawn"):
            raise TypeError("hint: state_dict has started this StatefulDataLoader's workers; call hint before it")
        self._loader = loader
        loader.__dict__["pin_memory"] = False  # nothing here asks for a GPU
        kept = getattr(loader, "iterator", None)
        if isinstance(kept, self._base):
            self._made = kept
        elif started:
            self._made = getattr(loader, "_iterator", None) or getattr(loader, "_made", None)
        return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler

    def _rest(self) -> Iterator[Any]:
        """What the loader's iterator goes on with."""
        made = self._made
        if not made._num_workers:
            return iter(made._sampler_iter)
        outstanding = made._send_idx - made._rcvd_idx
        if outstanding == 0:
            return iter(made._sampler_iter)
        if hasattr(made, "_shoal_drawn"):
            return itertools.chain(list(made._shoal_drawn)[-outstanding:], made._sampler_iter)
        one, other = (list(_flat(itertools.islice(iter(self._sampler), self._length))) for _ in range(2))
        if self._epochs or one != other or made._num_yielded % max(self._length or 1, 1):
            raise TypeError("hint: this loader's workers have begun the next epoch's shuffle already, so it cannot be "
                            "predicted; "
                            "use DataLoader(persistent_workers=True), which also keeps its workers")
        return iter(self._sampler)

    def _begin(self, k: int) -> Iterator[Any]:
        """The loader's, or the sampler's, next iterator."""
        if self._loader is None:
            return iter(self._sampler)
        loader, base = self._loader, self._base
        workers = loader.num_workers > 0
        if workers and loader.persistent_workers and (k > 0 or loader._iterator is not None):
            it = self._persistent if k > 0 else loader._iterator
        else:
            it = object.__new__(base)
            base.__init__(it, loader)
        if workers:
            base._reset(it, loader)
        self._persistent = it
        return iter(it._sampler_iter)

    def epoch(self, k: int, last: bool) -> Iterator[Any]:
        """The indices of the k-th epoch from now; call it for each epoch in turn."""
        for s, first in zip(self._epochs, self._first):
            if k > 0:
                s.set_epoch(first + k)
        before = None if last else _global_state()
        items = self._items if self._items is not None else self._begin(k)
        yield from itertools.islice(items, self._length)
        if self._items is None:
            next(items, None)  # a sampler may draw at its end
        elif isinstance(self._loader, sys.modules["torch"].utils.data.DataLoader) and not hasattr(self._loader,
                "iterator"):
            self._items = None  # begun by state_dict; the next epoch has an iterator of its own
        if before is not None and not _same(before, _global_state()):
            raise ValueError("epochs: this sampler shuffles by a global generator, from which the trainer may draw "
                             "before the next "
                             "epoch; give it a generator of its own, or hint each epoch")


def _global_state() -> _State:
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), torch.get_rng_state() if torch else None


def _same(a: _State, b: _State) -> bool:
    return a[0] == b[0] and a[1][2:] == b[1][2:] and np.array_equal(a[1][1], b[1][1]) and (a[2] is None
        or bool((a[2] == b[2]).all()))


# --- a process apart

_PATIENCE = 600  # seconds that a prediction may take
_STILL = 20  # seconds that it may use no processor: what it waits for never comes, since it has no other threads
_PDEATHSIG, _PROT_READ = 1, 1
_HARMLESS = {"os.listdir", "os.scandir", "os.walk", "os.putenv", "os.unsetenv", "os.chdir", "os.fwalk", "os.getxattr",
             "os.listxattr"}
_OUTSIDE = ("os.", "shutil.", "socket.", "subprocess.", "tempfile.", "sqlite3.", "urllib.", "fcntl.", "signal.", "pty.",
            "webbrowser.")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# What reaches out without an event for the hook.
_UNSEEN = {"os": ("mkfifo", "mknod"), "_posixshmem": ("shm_open", "shm_unlink"), "torch": ("from_file",)}
# A filter for warnings of a fork in a process with threads: Python's, and those of libraries such as JAX.
_NO_WARNING = ("ignore", None, Warning, re.compile(re.escape(__name__) + r"\Z"), 0)


def _error(kind: str, *why: Any) -> Exception:
    try:
        error: Exception = getattr(builtins, kind)(*why)
    except TypeError:  # it is made of more than a text, as UnicodeDecodeError is
        error = TypeError(f"{kind}: {why[0]}")
    return error


class _Opened(BaseException):
    """Ends a sample's read at its first open of a file in a mount."""


class _Apart:
    """A copy of this process, by fork, in which a sampler is iterated without the trainer's seeing it.

    Rules. The copy begins with all of the trainer's state, so it predicts any sampler, and nothing that it changes is
    the trainer's: no object, generator, class or module. What processes share is taken from it: open files and sockets
    (each is /dev/null there, so that it prints nothing and moves no file's position), writable shared memory (made
    read-only: a write ends the copy), and by an audit hook all that reaches out: files opened for writing, connections,
    commands, signals. What tries any of that is not predicted. Of the trainer's threads the copy has none, as a
    DataLoader's worker; one that waits for them is ended after _STILL seconds, or after _PATIENCE, and with the
    trainer.
    """

    # Of the class, for one that is dropped at once: the copy's answer, and when it began, in ticks.
    _pipe = -1
    _began: List[bytes] = []

    def __init__(self, work: Callable[[_Apart], bytes]) -> None:
        self.refused: List[str] = []
        self.inside: Optional[Callable[[str], bool]] = None  # while a sample is read: whether a path lies in a mount
        self.opened: Optional[str] = None
        self._locked = True
        self._end, self._parent, self.pid = -1, os.getpid(), 0
        self._by_main = threading.get_native_id() == self._parent
        self.long, self._said = False, bytearray()
        self._own: Optional[OSError] = None  # of Shoal's doing, not of the sampler's
        state = random.getstate()  # Python seeds the copy's anew
        filters: Any = warnings.filters
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            # No handler of the trainer's runs in the copy. Here one may, in this call, and raise when all are blocked.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            self._pipe, self._end = os.pipe()
            # not by catch_warnings, after which Python shows each of the trainer's warnings once more
            filters.insert(0, _NO_WARNING)
            self.pid = os.fork()
            if os.getpid() != self._parent:
                self._try(work, state)
        finally:
            try:
                if self._end >= 0:
                    os.close(self._end)
                with contextlib.suppress(ValueError):  # another thread has changed them
                    filters.remove(_NO_WARNING)
                self._began = self._stat()[19:20]
            finally:  # of a signal that another thread got the handler may raise here
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def __del__(self) -> None:
        if (self._pipe >= 0 or self._began) and os.getpid() == self._parent:
            self.end()

    def _try(self, work: Callable[[_Apart], bytes], state: Any) -> None:
        """Works in the copy, and ends it."""
        try:
            random.setstate(state)
            self._isolate()
            try:
                answer = work(self)
            except BaseException as e:
                kind = type(e).__name__ if isinstance(e, Exception) and hasattr(builtins,
                    type(e).__name__) else "TypeError"
                text = str(e) if kind == type(e).__name__ and str(e) else repr(e)
                if "forked subprocess" in text:  # of torch.cuda
                    kind, text = "TypeError", "hint: this sampler uses a CUDA device, which a copy of the process cannot; its order is not predicted"
                if isinstance(e, OSError) and e is not self._own:
                    kind, text = "TypeError", (f"hint: this sampler failed in a copy of the process, which has none of "
                                               f"its open files and sockets ({text}); its order is not predicted")
                why = [kind, e.errno, e.strerror, e.filename] if isinstance(e,
                    OSError) and kind != "TypeError" and e.errno else [kind, text]
                answer = b"!" + json.dumps(why, default=str).encode()
            if self.refused:
                answer = b"!" + json.dumps(
                    ["TypeError", "hint: this sampler reaches out of the process (" + self.refused[0] +
                     "), so it cannot be tried; "
                                            "its order is not predicted"]).encode()
            view = memoryview(len(answer).to_bytes(8, "little") + answer)
            while view:
                view = view[os.write(self._end, view[:1 << 20]):]
        finally:
            os._exit(0)

    def _isolate(self) -> None:
        import ctypes
        gc.disable()  # no finalizer of the trainer's runs here
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(s, signal.SIG_IGN if s == signal.SIGINT else signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.alarm(_PATIENCE)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("1000")  # where memory runs out, the copy ends, which looks as large as the trainer
        # of files' sizes: what C code writes fails with EFBIG; of cores, as large as the trainer: at 1 none is taken
        for limit, soft in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 1)):
            resource.setrlimit(limit, (int(soft and resource.getrlimit(limit)[1] != 0), resource.getrlimit(limit)[1]))
        libc = ctypes.CDLL(None)
        if self._by_main:  # it is a thread's end that sends the signal
            libc.prctl(_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != self._parent:  # it ended before the line above
            os._exit(0)
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            shared = [line.split()[0].split("-") for line in maps if line.split()[1] == "rw-s"]
        for low, high in shared:
            libc.mprotect(ctypes.c_void_p(int(low, 16)), ctypes.c_size_t(int(high, 16) - int(low, 16)), _PROT_READ)
        null = os.open(os.devnull, os.O_WRONLY)
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in (self._end, null):
                os.dup2(null, fd)
        sys.stdout = sys.stderr = open(os.dup(null), "w", encoding="utf-8", errors="replace")  # wherever they went
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)  # as in a DataLoader's worker: the pool's threads are not here
        for module, names in _UNSEEN.items():
            for name in names:
                if hasattr(sys.modules.get(module), name):
                    setattr(sys.modules[module], name, functools.partial(self._refuse, f"{module}.{name}"))
        if hasattr(sys.modules.get("shoal._open"), "_read"):  # what it opens by itself is nothing that a sample reads
            setattr(sys.modules["shoal._open"], "_read", lambda _: None)
        sys.addaudithook(self._audit)

    def _refuse(self, what: str, *args: Any, **_: Any) -> None:
        self.refused.append(f"{what}{args!r:.80}")
        raise PermissionError(f"{what}: not while an order is predicted")

    def is_long(self) -> None:
        """Says, in the copy, that it takes long."""
        os.write(self._end, bytes(8))

    def _audit(self, event: str, args: Any) -> None:
        if not self._locked:
            return
        if event == "open":
            if self.inside is not None and isinstance(args[0], (str, bytes)) and self.inside(os.fsdecode(args[0])):
                if self.opened is None:
                    self.opened = os.fsdecode(args[0])
                raise _Opened
            if not (args[2] or 0) & _WRITES:
                return
        elif not event.startswith(_OUTSIDE) or event in _HARMLESS:
            return
        self._refuse(event, *args)

    def unlocked(self, do: Callable[..., Any], *args: Any) -> Any:
        """Does something of Shoal's in the copy."""
        if self.refused:
            raise PermissionError(self.refused[0])
        if os.getppid() != self._parent:  # the trainer has ended
            os._exit(0)
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        self._locked = False
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        try:
            return do(*args)
        except OSError as e:
            self._own = e
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
            self._locked = True

    def again(self, work: Callable[[], bytes]) -> Any:
        """What work returns in a copy of this copy, by the same rules. This one uses no processor meanwhile."""
        def inside(copy: _Apart) -> bytes:
            self._locked, copy.refused = True, self.refused
            return work()

        return self.unlocked(lambda: _Apart(inside).answer())

    def take_turn(self, mounts: _Mounts, listing: Any) -> None:
        """Waits until no other copy on this node finds a long order for the mount of the listed files: each takes
        memory, for a list that is not _in_line as much as a DataLoader's worker that has seen the whole dataset."""
        first = listing[0]
        try:
            placed = mounts.place(os.fsdecode(first[0] if isinstance(first, list) else first))
            if placed is not None:
                line = os.open(os.path.join(placed[0], ".shoal"), os.O_RDONLY)
                signal.alarm(0)  # those before this one have alarms of their own
                self.unlocked(fcntl.flock, line, fcntl.LOCK_EX)
                signal.alarm(_PATIENCE)
        except (OSError, ValueError, IndexError):  # no mount, or no file in it: found again when the plan is made
            pass

    def first_open(self, dataset: Any, index: int, inside: Callable[[str], bool]) -> Optional[str]:
        """The first file in a mount that a sample's read opens, without opening it; None if none is seen."""
        self.inside, self.opened, before = inside, None, len(self.refused)
        try:
            dataset[index]
        except BaseException:  # its own errors are the trainer's to see
            pass
        finally:
            self.inside = None
            del self.refused[before:]  # a log or a cache of the dataset's: no order comes from it
        return self.opened

    def answer(self, timeout: Optional[float] = None) -> Optional[bytearray]:
        """What work returned; None if it is not there within timeout seconds, or the copy says that it is long. Raises
        what work raised. Whatever ends the wait early, Ctrl-C for one, ends the copy."""
        try:
            return self._answer(timeout)
        except BaseException:
            self.end()
            raise

    def _answer(self, timeout: Optional[float]) -> Optional[bytearray]:
        until = None if timeout is None else time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        used, since = -1, time.monotonic()
        while True:
            now = time.monotonic()
            if not poll.poll(min(1000, max((now + 1 if until is None else until) - now, 0) * 1000)):
                if until is not None and time.monotonic() >= until:
                    return None
                if used != self._used():
                    used, since = self._used(), now
                elif now - since >= _STILL:
                    raise TypeError(f"hint: the process that tried this sampler has done nothing for {_STILL} s: it "
                                    f"waits for other threads or "
                                    "processes, or sleeps; its order is not predicted")
                continue
            part = os.read(self._pipe, 1 << 20)
            self._said += part
            if self._said[:8] == bytes(8):
                del self._said[:8]
                self.long = True
                return None
            whole = len(self._said) >= 8 and len(self._said) == 8 + int.from_bytes(self._said[:8], "little")
            if whole or not part:
                break
        self.end()
        data = self._said
        del data[:8]
        if not whole:
            raise TypeError("hint: the process that tried this sampler ended early: it shares memory with other "
                            "processes, waits for "
                            "threads, or took too long; its order is not predicted")
        if data[:1] == b"!":
            # not by a local: the cycle, by way of frames, would keep the trainer's loader, with its workers
            raise _error(*json.loads(data[1:]))
        return data

    def _used(self) -> int:
        """The copy's processor time, in ticks; 0 if it is gone."""
        return sum(map(int, self._stat()[11:13]))

    def _stat(self) -> List[bytes]:
        """What the kernel says of the process with the copy's number, from its state on."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as f:
                return f.read().rpartition(b")")[2].split()
        except OSError:
            return []

    def end(self) -> None:
        """Ends the copy. What a handler of a signal leaves undone here, by what it raises, the next call does."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)
        # When the trainer has waited for any child, another process may have got the number.
        if self._began and self._stat()[19:20] == self._began:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self._began = []
