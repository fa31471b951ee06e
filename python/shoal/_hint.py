"""Tells a Shoal mount the order in which a DataLoader is about to read. See hint."""

import contextlib
import copy
import errno
import os
import random
import sys

import numpy as np


def hint(sampler, paths=None, mountpoint=None, name="default"):
    """Writes what sampler will yield next as the plan `name` of the Shoal mount at mountpoint.

    sampler     a DataLoader, a sampler or batch sampler of torch's, or any iterable of indices (or of
                lists of indices). It is not consumed, and all random state stays as it was.
    paths       what the indices stand for: a dataset with .samples (ImageFolder), one with .imgs, a
                Subset of one, or a list of paths, absolute or relative to the mount point. Default:
                the DataLoader's dataset.
    mountpoint  where the dataset is mounted
    name        one plan for each rank or stream that reads at the same time

    Call it once an epoch, after set_epoch and directly before the iteration begins: random numbers
    drawn in between change what a shuffling sampler yields. Returns the number of paths written.
    Raises OSError if the mount refuses the plan; the plan before it then stays in force.
    """
    if mountpoint is None:
        raise TypeError("hint needs the mount point: hint(sampler, paths, mountpoint)")
    if paths is None:
        paths = getattr(sampler, "dataset", None)
        if paths is None:
            raise TypeError("hint needs paths, or a DataLoader whose dataset has them")
    listing = _paths(paths)
    root = os.path.abspath(os.fspath(mountpoint))
    lines = [_relative(listing[i], root) for i in predict(sampler)]
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
            text = os.strerror(e.errno)
        raise OSError(e.errno, text, plan) from None
    return len(lines)


def _reason(root):
    try:
        with open(os.path.join(root, ".shoal", "order"), encoding="utf-8", errors="replace") as f:
            return f.read(2000).strip()
    except OSError:
        return "see .shoal/order in the mount"


def _paths(paths):
    """The path of each sample, by index."""
    if hasattr(paths, "dataset") and hasattr(paths, "indices"):  # Subset
        below = _paths(paths.dataset)
        return [below[i] for i in paths.indices]
    for attribute in ("samples", "imgs"):
        samples = getattr(paths, attribute, None)
        if samples is not None:
            return [sample[0] for sample in samples]
    if isinstance(paths, (str, bytes)) or not hasattr(paths, "__getitem__"):
        raise TypeError(f"paths: a dataset with .samples, or a list of paths, not {type(paths).__name__}")
    return paths


def _relative(path, root):
    path = os.fspath(path)
    if os.path.isabs(path):
        inside = os.path.relpath(path, root)
        if inside.startswith(os.pardir):  # perhaps by way of a symbolic link
            inside = os.path.relpath(os.path.realpath(path), os.path.realpath(root))
        if inside.startswith(os.pardir):
            raise ValueError(f"{path} is not below the mount point {root}")
        path = inside
    if "\n" in path:
        raise ValueError(f"{path!r}: a plan cannot hold a path with a line break")
    return path


def predict(sampler):
    """The indices that sampler will yield next, as a list, leaving it and all random state as they
    are. Takes what hint takes."""
    with _untouched_global_state():
        return [int(i) for i in _flat(_Clones().iterate(sampler))]


def _flat(items):
    for item in items:
        if isinstance(item, (list, tuple)) or getattr(item, "ndim", 0):
            yield from _flat(item)
        else:
            yield item


@contextlib.contextmanager
def _untouched_global_state():
    """Puts the global generators back, whatever a sampler of unknown type draws from them."""
    torch = sys.modules.get("torch")
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state() if torch else None
    try:
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        if torch:
            torch.set_rng_state(saved[2])


class _Clones:
    """Iterates copies of samplers whose generators are copies.

    Generators that are one object stay one object: what a DataLoader draws from its generator for
    its base seed is missing from the sampler's stream only if they share it.
    """

    def __init__(self):
        self._generators = {}

    def _generator(self, generator):
        torch = sys.modules["torch"]
        if id(generator) not in self._generators:
            clone = torch.Generator(device=generator.device)
            clone.set_state(generator.get_state())
            self._generators[id(generator)] = generator, clone  # the original too, so that its id stays taken
        return self._generators[id(generator)][1]

    def iterate(self, sampler):
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(sampler, torch.utils.data.DataLoader):
            return self._loader(torch, sampler)
        return iter(self._copy(torch, sampler))

    def _loader(self, torch, loader):
        if isinstance(loader.dataset, torch.utils.data.IterableDataset):
            raise TypeError("hint: an IterableDataset has no order of indices that could be told in advance")
        # A persistent iterator drew its base seed once, when it was made. Every other iteration
        # begins with drawing one, before the sampler draws anything.
        if not (loader.persistent_workers and loader.num_workers > 0 and loader._iterator is not None):
            generator = self._generator(loader.generator) if loader.generator is not None else None
            torch.empty((), dtype=torch.int64).random_(generator=generator)
        return self.iterate(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)

    def _copy(self, torch, sampler):
        """A copy to iterate. Samplers hold their state in attributes: generators, nested samplers."""
        if torch is None or not isinstance(sampler, torch.utils.data.Sampler):
            if iter(sampler) is sampler:
                raise TypeError(f"hint: iterating this {type(sampler).__name__} would use it up; pass a list or a sampler")
            return sampler
        clone = copy.copy(sampler)
        for key, value in list(vars(clone).items()):
            if isinstance(value, torch.Generator):
                setattr(clone, key, self._generator(value))
            elif isinstance(value, torch.utils.data.Sampler):
                setattr(clone, key, self._copy(torch, value))
            elif isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
                setattr(clone, key, copy.deepcopy(value))
        return clone
