"""Samplers as public repositories write them, trained plain and told beside each other: the trainer must not notice."""

import atexit
import collections
import concurrent.futures
import contextlib
import ctypes
import heapq
import io
import itertools
import logging
import math
import os
import pickle
import queue
import random
import resource
import signal
import tempfile
import threading
import unittest
import warnings
from multiprocessing import shared_memory
from unittest import mock

import numpy as np
import torch
from torch.utils.data import (BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler,
                              SequentialSampler,
                              SubsetRandomSampler, WeightedRandomSampler)

import support  # noqa: F401 (sets the path)

import shoal
from shoal import _hint

LOG = logging.getLogger("trainer")
LOG.setLevel(logging.INFO)
N, CLASSES = 60, 6
LABELS = [i * 7 % CLASSES for i in range(N)]
LENGTHS = [5 + i * 13 % 40 for i in range(N)]


class Indices(Dataset):
    def __init__(self):
        self.labels = list(LABELS)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return int(i)


class Sized:
    """A sampler of N items by a function that makes an epoch."""

    size = N

    def __len__(self):
        return self.size


# --- what the six trainers kept their state in

class RandomCycleIter:
    """Of the long-tail repositories: a list that is shuffled whenever it has been gone through."""

    def __init__(self, data):
        self.data_list, self.length, self.i = list(data), len(data), len(data) - 1

    def __iter__(self):
        return self

    def __next__(self):
        self.i += 1
        if self.i == self.length:
            self.i = 0
            random.shuffle(self.data_list)
        return self.data_list[self.i]


def class_aware(data_iter_list, class_iter, n, per_class):
    i = j = 0
    while i < n:
        if j >= per_class:
            j = 0
        if j == 0:
            drawn = next(zip(*[data_iter_list[next(class_iter)]] * per_class))
        yield drawn[j]
        i, j = i + 1, j + 1


class ClassAware(Sized, Sampler):
    def __init__(self, per_class=2):
        self.class_iter = RandomCycleIter(range(CLASSES))
        self.data_iter_list = [RandomCycleIter([i for i in range(N) if LABELS[i] == c]) for c in range(CLASSES)]
        self.per_class = per_class

    def __iter__(self):
        return class_aware(self.data_iter_list, self.class_iter, N, self.per_class)


class Deque(Sized):
    def __init__(self):
        self.queue = collections.deque(range(N))

    def __iter__(self):
        for _ in range(N):
            self.queue.rotate(random.randrange(9))
            yield self.queue[0]


class Matrix(Sized):
    def __init__(self):
        self.rows = np.arange(N).reshape(10, 6)

    def __iter__(self):
        np.random.shuffle(self.rows)
        return iter(self.rows.ravel().tolist())


class Kept(Sized):
    """One endless iterator, kept over the epochs."""

    def __init__(self):
        self.rng = random.Random(4)
        self.stream = self._forever()

    def _forever(self):
        order = list(range(N))
        while True:
            self.rng.shuffle(order)
            yield from order

    def __iter__(self):
        return itertools.islice(self.stream, N - 7)

    def __len__(self):
        return N - 7


class Helper:
    def __init__(self):
        self.random = random.Random(3)

    def pick(self):
        return self.random.randrange(N)


class WithHelper(Sized):
    def __init__(self):
        self.helper = Helper()

    def __iter__(self):
        return (self.helper.pick() for _ in range(N))


class Counted(Sized):
    def __init__(self):
        self.seen = collections.Counter()

    def __iter__(self):
        for _ in range(N):
            i = min(range(N), key=lambda j: (self.seen[j], random.random()))
            self.seen[i] += random.randrange(1, 3)
            yield i


class Drained(Sized):
    """A set that is drained over the epochs, and filled when it is empty."""

    size = 20

    def __init__(self):
        self.left = set(range(N))

    def __iter__(self):
        for _ in range(self.size):
            if not self.left:
                self.left.update(range(N))
            yield self.left.pop()


# --- state in other places

class OnClass(Sized):
    passes = 0

    def __iter__(self):
        type(self).passes += 1
        return iter([(i + self.passes) % N for i in range(N)])


PASSES = [0]
MANY = {"passes": 0}


class OnModule(Sized):
    def __iter__(self):
        PASSES[0] += 1
        MANY["passes"] += 2
        return iter([(i * PASSES[0] + MANY["passes"]) % N for i in range(N)])


def closed():
    passes, order = 0, list(range(N))

    class Closure(Sized):
        def __iter__(self):
            nonlocal passes
            passes += 1
            random.shuffle(order)
            return iter(order[passes:] + order[:passes])

    return Closure()


class Defaults(Sized):
    def __iter__(self, passes=[]):  # noqa: B006 (that is the point)
        passes.append(0)
        return iter([(i + len(passes)) % N for i in range(N)])


class OnDataset(Sized):
    """One that changes the dataset that it holds."""

    def __init__(self):
        self.data_source = Indices()

    def __iter__(self):
        random.shuffle(self.data_source.labels)
        return iter(np.argsort(self.data_source.labels, kind="stable").tolist())


class Slots(Sized):
    __slots__ = "order", "rng"

    def __init__(self):
        self.order, self.rng = list(range(N)), np.random.RandomState(2)

    def __iter__(self):
        self.rng.shuffle(self.order)
        return iter(self.order)


class Itself(Sized):
    def __iter__(self):
        self.order, self.at = torch.randperm(N).tolist(), 0
        return self

    def __next__(self):
        if self.at == N:
            raise StopIteration
        self.at += 1
        return self.order[self.at - 1]


class Bound(Sized):
    def __init__(self):
        self.draw = random.Random(9).randrange

    def __iter__(self):
        return iter([self.draw(N) for _ in range(N)])


class Reduced(Sized):
    def __init__(self):
        self.saved, self.passes = 0, 0

    def __getstate__(self):
        self.saved += 1
        return dict(self.__dict__)

    def __iter__(self):
        self.passes += 1
        return iter([(i + self.passes) % N for i in range(N)])


class Heap(Sized):
    def __init__(self):
        self.heap = [(0.0, i) for i in range(N)]

    def __iter__(self):
        for _ in range(N):
            key, i = heapq.heappop(self.heap)
            heapq.heappush(self.heap, (key + random.random(), i))
            yield i


class Ordered(Sized):
    def __init__(self):
        self.lru, self.spare = collections.OrderedDict.fromkeys(range(N)), collections.defaultdict(list)

    def __iter__(self):
        for _ in range(N):
            i = random.randrange(N)
            self.lru.move_to_end(i)
            self.spare[i].append(i)
            yield next(iter(self.lru))


class Objects(Sized):
    """An object array of lists."""

    def __init__(self):
        self.lists = np.empty(CLASSES, object)
        for c in range(CLASSES):
            self.lists[c] = [i for i in range(N) if LABELS[i] == c]

    def __iter__(self):
        for values in self.lists:
            np.random.shuffle(values)
        return iter([i for values in self.lists for i in values])


class Cycles(Sized):
    def __init__(self):
        self.cycles = [itertools.cycle([i for i in range(N) if LABELS[i] == c]) for c in range(CLASSES)]

    def __iter__(self):
        return (next(self.cycles[random.randrange(CLASSES)]) for _ in range(N))


class ListIterator(Sized):
    """Takes up where it stopped, and begins again at the end."""

    def __init__(self):
        self.at = iter(range(N))

    def __iter__(self):
        for _ in range(25):
            try:
                yield next(self.at)
            except StopIteration:
                self.at = iter(range(N))
                yield next(self.at)

    def __len__(self):
        return 25


# --- well-known samplers

class RepeatedAugmentation(Sampler):
    """RASampler of DeiT, as rank 1 of 2."""

    def __init__(self):
        self.epoch, self.num_samples, self.selected = 0, math.ceil(N * 3 / 2), N // 2

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.epoch)
        indices = torch.repeat_interleave(torch.randperm(N, generator=g), repeats=3, dim=0).tolist()
        indices += indices[:self.num_samples * 2 - len(indices)]
        return iter(indices[1::2][:self.selected])

    def __len__(self):
        return self.selected

    def set_epoch(self, epoch):
        self.epoch = epoch


class DistributedWeighted(DistributedSampler):
    def __init__(self):
        super().__init__(Indices(), 2, 1)
        self.weights = torch.tensor([1.0 + c for c in LABELS])

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.epoch)
        indices = torch.multinomial(self.weights, self.total_size, True, generator=g).tolist()
        return iter(indices[self.rank:self.total_size:self.num_replicas])


class GroupedBatch(BatchSampler):
    """Of torchvision's detection reference: batches of one aspect ratio."""

    def __init__(self, sampler, size):
        self.sampler, self.group_ids, self.batch_size = sampler, [i % 3 for i in range(N)], size

    def __iter__(self):
        buffer, samples = collections.defaultdict(list), collections.defaultdict(list)
        batches = 0
        for idx in self.sampler:
            group = self.group_ids[idx]
            buffer[group].append(idx)
            samples[group].append(idx)
            if len(buffer[group]) == self.batch_size:
                yield buffer[group]
                batches += 1
                del buffer[group]
        for group, _ in sorted(buffer.items(), key=lambda x: len(x[1]), reverse=True)[:len(self) - batches]:
            buffer[group].extend(samples[group][:self.batch_size - len(buffer[group])])
            yield buffer[group]

    def __len__(self):
        return len(self.sampler) // self.batch_size


class AspectRatioBatch:
    """Of mmdetection: buckets that live on between the epochs."""

    def __init__(self, sampler, size):
        self.sampler, self.batch_size, self._buckets = sampler, size, [[] for _ in range(2)]

    def __iter__(self):
        for idx in self.sampler:
            bucket = self._buckets[idx % 3 == 0]
            bucket.append(idx)
            if len(bucket) == self.batch_size:
                yield bucket[:]
                del bucket[:]
        left, self._buckets = self._buckets[0] + self._buckets[1], [[] for _ in range(2)]
        while left:
            yield left[:self.batch_size]
            left = left[self.batch_size:]

    def __len__(self):
        return (len(self.sampler) + self.batch_size - 1) // self.batch_size


class MPerClass(Sampler):
    """Of pytorch-metric-learning."""

    def __init__(self, m=3):
        self.m, self.labels = m, sorted(set(LABELS))
        self.to_indices = {c: np.array([i for i in range(N) if LABELS[i] == c]) for c in self.labels}

    def __len__(self):
        return N // 18 * 18

    def __iter__(self):
        idx_list, i = [0] * len(self), 0
        for _ in range(len(self) // 18):
            np.random.shuffle(self.labels)
            for label in self.labels:
                t = self.to_indices[label]
                np.random.shuffle(t)
                idx_list[i:i + self.m] = t[:self.m]
                i += self.m
        return iter(idx_list)


class RandomIdentity(Sampler):
    """Of the re-identification repositories: P identities with K pictures each."""

    def __init__(self, k=4):
        self.k, self.index_dic = k, collections.defaultdict(list)
        for index, pid in enumerate(LABELS):
            self.index_dic[pid].append(index)
        self.pids = list(self.index_dic)

    def __len__(self):
        return 24

    def __iter__(self):
        batches = collections.defaultdict(list)
        for pid in self.pids:
            idxs = list(self.index_dic[pid])
            random.shuffle(idxs)
            batches[pid] = [idxs[i:i + self.k] for i in range(0, len(idxs) - self.k + 1, self.k)]
        avail, final = list(self.pids), []
        while len(avail) >= 3 and len(final) < 24:
            for pid in random.sample(avail, 3):
                final.extend(batches[pid].pop(0))
                if not batches[pid]:
                    avail.remove(pid)
        return iter(final[:24])


class Curriculum(Sized):
    """Opens more of the samples with each epoch."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        open_ = sorted(range(N), key=LENGTHS.__getitem__)[:10 * (self.epoch + 1)]
        return iter(np.random.choice(open_, 30).tolist())

    def __len__(self):
        return 30


class LengthBuckets(Sampler):
    def __init__(self):
        self.buckets = [np.array(b) for b in np.array_split(np.argsort(LENGTHS), 5)]

    def __iter__(self):
        batches = []
        for bucket in self.buckets:
            np.random.shuffle(bucket)
            batches += [bucket[i:i + 4] for i in range(0, len(bucket), 4)]
        random.shuffle(batches)
        return iter(batches)

    def __len__(self):
        return 15


class MaxTokens(Sampler):
    """Of fairseq and others: batches of at most so many tokens."""

    def __init__(self, most=120):
        self.most, self.rng = most, np.random.default_rng(3)
        self._batches = None

    def _make(self):
        batch, batches, longest = [], [], 0
        for i in sorted(self.rng.permutation(N).tolist(), key=LENGTHS.__getitem__):
            longest = max(longest, LENGTHS[i])
            if batch and longest * (len(batch) + 1) > self.most:
                batches.append(batch)
                batch, longest = [], LENGTHS[i]
            batch.append(i)
        batches.append(batch)
        self.rng.shuffle(batches)
        return batches

    def __iter__(self):
        self._batches = self._make()
        yield from self._batches
        self._batches = None

    def __len__(self):
        return len(self._batches or MaxTokens(self.most)._make())


class Stateful(Sampler):
    """Counts what it has yielded, for a checkpoint."""

    def __init__(self):
        self.generator, self.yielded, self.epoch = torch.Generator().manual_seed(4), 0, 0

    def __iter__(self):
        self.epoch += 1
        for i in torch.randperm(N, generator=self.generator).tolist():
            self.yielded += 1
            yield i
        self.yielded = 0

    def __len__(self):
        return N

    def state_dict(self):
        return {"yielded": self.yielded, "generator": self.generator.get_state()}


class Imbalanced(Sampler):
    """ImbalancedDatasetSampler."""

    def __init__(self):
        count = collections.Counter(LABELS)
        self.weights = torch.DoubleTensor([1.0 / count[c] for c in LABELS])

    def __iter__(self):
        return (int(i) for i in torch.multinomial(self.weights, N, replacement=True))

    def __len__(self):
        return N


class BalancedBatch(BatchSampler):
    """siamese-triplet's: used counts and index lists that live on."""

    def __init__(self):
        self.labels = np.array(LABELS)
        self.label_to_indices = {c: np.where(self.labels == c)[0] for c in set(LABELS)}
        for c in self.label_to_indices:
            np.random.shuffle(self.label_to_indices[c])
        self.used, self.count = {c: 0 for c in set(LABELS)}, 0

    def __iter__(self):
        self.count = 0
        while self.count + 6 < N:
            indices = []
            for c in np.random.choice(sorted(set(LABELS)), 3, replace=False):
                indices.extend(self.label_to_indices[c][self.used[c]:self.used[c] + 2])
                self.used[c] += 2
                if self.used[c] + 2 > len(self.label_to_indices[c]):
                    np.random.shuffle(self.label_to_indices[c])
                    self.used[c] = 0
            yield indices
            self.count += 6

    def __len__(self):
        return N // 6


class Episodes(Sampler):
    """Few-shot learning's."""

    def __init__(self):
        self.by_class = [torch.tensor([i for i in range(N) if LABELS[i] == c]) for c in range(CLASSES)]

    def __iter__(self):
        for _ in range(5):
            batch = [self.by_class[c][torch.randperm(len(self.by_class[c]))[:3]] for c in torch.randperm(CLASSES)[:4]]
            yield torch.stack(batch).t().reshape(-1)

    def __len__(self):
        return 5


class TwoStream(Sampler):
    """Mean teacher's: labelled and unlabelled, one of them without end."""

    def __init__(self):
        self.primary, self.secondary = list(range(40)), list(range(40, N))

    def __iter__(self):
        def forever():
            while True:
                yield from np.random.permutation(self.secondary)

        groups = zip(*[iter(np.random.permutation(self.primary))] * 4), zip(*[forever()] * 2)
        return (a + b for a, b in zip(*groups))

    def __len__(self):
        return 10


class Hard(Sized):
    """Weights by the losses that the trainer would write."""

    def __init__(self):
        self.losses = np.ones(N)

    def __iter__(self):
        order = np.random.choice(N, N, p=self.losses / self.losses.sum())
        self.losses[order] *= 0.9
        return iter(order.tolist())


class Reservoir(Sized):
    def __init__(self):
        self.kept, self.seen = [], 0

    def __iter__(self):
        for i in range(N):
            self.seen += 1
            if len(self.kept) < 10:
                self.kept.append(i)
            elif random.randrange(self.seen) < 10:
                self.kept[random.randrange(10)] = i
            yield random.choice(self.kept)


class Subepochs(Sized):
    """A long permutation in pieces."""

    def __init__(self):
        self.perm = torch.empty(0, dtype=torch.int64)

    def __iter__(self):
        if len(self.perm) < 20:
            self.perm = torch.randperm(N)
        piece, self.perm = self.perm[:20], self.perm[20:]
        return iter(piece.tolist())

    def __len__(self):
        return 20


class InPlaceTensor(Sized):
    def __init__(self):
        self.grid = torch.arange(N).reshape(6, 10)

    def __iter__(self):
        self.grid += 1
        self.grid %= N
        self.grid[:] = self.grid[torch.randperm(6)]
        return iter(self.grid.flatten().tolist())


class Shared(Sized):
    """Two names for one list."""

    def __init__(self):
        self.a = list(range(N))
        self.b = {"again": self.a}

    def __iter__(self):
        random.shuffle(self.b["again"])
        return iter(self.a)


class Eager(Sized):
    """Draws when it is asked for an iterator."""

    def __iter__(self):
        return iter(torch.randperm(N).tolist())


class EagerBatches(Sized):
    size = 6

    def __init__(self):
        self.order = list(range(N))

    def __iter__(self):
        random.shuffle(self.order)
        return iter([self.order[i:i + 10] for i in range(0, N, 10)])


class Printing(Sized):
    def __iter__(self):
        print("a new epoch")
        os.write(1, b"")
        return iter(torch.randperm(N).tolist())


class AnyBatches(Sized):
    """Batches need not be lists."""

    size = 4

    def __iter__(self):
        order = torch.randperm(N).tolist()
        return iter([range(5), set(order[:9]), dict.fromkeys(order[9:20]), (i for i in order[20:30])])


class GlobalEverything(Sized):
    def __iter__(self):
        for _ in range(N):
            yield (random.randrange(N) + np.random.randint(N) + int(torch.randint(N, ()))) % N


class Generators(Sized):
    def __init__(self):
        self.all = {"bits": np.random.Philox(3), "pcg": np.random.default_rng(4), "old": np.random.RandomState(5)}

    def __iter__(self):
        return (int(np.random.Generator(self.all["bits"]).integers(N) + self.all["pcg"].integers(N) +
                    self.all["old"].randint(N)) % N for _ in range(N))


class Threadlike(Sized):
    """Keeps a recursive structure."""

    def __init__(self):
        self.me, self.order = self, [list(range(N))]
        self.order.append(self.order)

    def __iter__(self):
        random.shuffle(self.me.order[0])
        return iter(self.order[1][0])


class Prefetched(Sized):
    """Has the next epoch ready."""

    def __init__(self):
        self.next = np.random.permutation(N)

    def __iter__(self):
        now, self.next = self.next, np.random.permutation(N)
        return iter(now.tolist())


class Temperature(Sized):
    def __init__(self):
        self.t, self.sizes = 1.0, np.bincount(LABELS)

    def __iter__(self):
        p = self.sizes ** (1 / self.t)
        self.t *= 1.5
        g = torch.Generator().manual_seed(int(self.t * 100))
        classes = torch.multinomial(torch.tensor(p / p.sum()), N, True, generator=g)
        return iter([int(c) * 7 % N for c in classes])


class Logged(Sized):
    def __iter__(self):
        LOG.info("a new epoch")
        return iter(torch.randperm(N).tolist())


class Locked(Sized):
    def __init__(self):
        self.lock = threading.Lock()

    def __iter__(self):
        with self.lock:
            return iter(np.random.permutation(N).tolist())


class InThreads(Sized):
    def __iter__(self):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return iter(list(pool.map(int, torch.randperm(N).tolist())))


class Environment(Sized):
    def __iter__(self):
        os.environ["SAMPLER_PASSES"] = passes = str(int(os.environ.get("SAMPLER_PASSES", "0")) + 1)
        return iter([(i + int(passes)) % N for i in range(N)])


class BitGenerators(Sized):
    def __init__(self):
        self.all = [np.random.Generator(g(5))
                    for g in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox,
                              np.random.SFC64)]

    def __iter__(self):
        return iter((sum(g.permutation(N) for g in self.all) % N).tolist())


class CountingRandom(random.Random):
    calls = 0

    def random(self):
        self.calls += 1
        return super().random()


class Subclassed(Sized):
    def __init__(self):
        self.rng = CountingRandom(3)

    def __iter__(self):
        return iter(sorted(range(N), key=lambda _: self.rng.random()))


class AtExit(Sized):
    def __iter__(self):
        atexit.register(LOG.info, "the copy's")
        return iter(range(N))


def loader(sampler, size=8, **options):
    return lambda: DataLoader(Indices(), size, sampler=sampler(), **options)


def batches(sampler, **options):
    return lambda: DataLoader(Indices(), batch_sampler=sampler(), **options)


def seeded():
    return torch.Generator().manual_seed(6)


OWN = (ClassAware, Deque, Matrix, Kept, WithHelper, Counted, Drained, OnClass, OnModule, closed, Defaults, OnDataset,
       Slots, Itself, Bound, Reduced, Heap, Ordered,
       Objects, Cycles, ListIterator, RepeatedAugmentation, DistributedWeighted, MPerClass, RandomIdentity, Curriculum,
       Stateful, Imbalanced, Hard, Reservoir,
       Subepochs, InPlaceTensor, Shared, Eager, Printing, GlobalEverything, Generators, Threadlike, Prefetched,
       Temperature,
       Logged, Locked, InThreads, Environment, BitGenerators, Subclassed, AtExit)
BATCHES = (LengthBuckets, MaxTokens, BalancedBatch, Episodes, TwoStream, EagerBatches, AnyBatches)
CASES = {
    **{s.__name__: loader(s) for s in OWN}, **{s.__name__: batches(s) for s in BATCHES},
    "grouped": batches(lambda: GroupedBatch(RandomSampler(Indices()), 4)),
    "aspect": batches(lambda: AspectRatioBatch(RandomSampler(Indices()), 4)),
    "grouped weighted": batches(lambda: GroupedBatch(WeightedRandomSampler([1.0] * N, N), 5)),
    "cycles in batches": batches(lambda: BatchSampler(ClassAware(3), 7, True)), "kept, unbatched": loader(Kept, None),
    "eager, unbatched": loader(Eager, None),
    "eager, workers": loader(Eager, None, num_workers=1),
    "eager batches, workers": batches(EagerBatches, num_workers=1),
    "eager batches, persistent": batches(EagerBatches, num_workers=1, persistent_workers=True),
    "matrix, workers": loader(Matrix, None, num_workers=1),
    "cycles, workers": loader(ClassAware, num_workers=2),
    "kept, persistent": loader(Kept, num_workers=1, persistent_workers=True),
    "random": lambda: DataLoader(Indices(), 8, shuffle=True), "sequential": lambda: DataLoader(Indices(), 8),
    "generator": lambda: DataLoader(Indices(), 8, True, generator=seeded()),
    "subset": loader(lambda: SubsetRandomSampler(range(9, 40), generator=seeded())),
    "replacement": loader(lambda: RandomSampler(Indices(), True, 33)),
    "distributed": loader(lambda: DistributedSampler(Indices(), 3, 1)),
    "batched": batches(lambda: BatchSampler(SequentialSampler(Indices()), 9, True)),
}


class Pickler(pickle.Pickler):
    """Without the addresses that are in pickled tensors, and without asking objects that count it."""

    def reducer_override(self, o):
        if isinstance(o, torch.Tensor):
            return list, (o.tolist(),)
        if isinstance(o, torch.Generator):
            return list, (o.get_state().tolist(),)
        if isinstance(o, Reduced):
            return str, (repr(vars(o)),)
        return NotImplemented


def pickled(o):
    out = io.BytesIO()
    Pickler(out).dump(o)
    return out.getvalue()


def states(made):
    """All random states and the trainer's own objects."""
    objects = {}
    for role in ("sampler", "batch_sampler"):
        value = getattr(made, role, None)
        while value is not None and role not in objects:
            try:
                objects[role] = pickled(getattr(value, "__dict__", value))
            except (TypeError, AttributeError, pickle.PicklingError):  # a generator in it; the batches show that
                objects[role] = None
            role, value = role + ".sampler", getattr(value, "sampler", None)
    return (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist(), objects, OnClass.passes,
            list(PASSES), dict(MANY),
            len(Defaults.__iter__.__defaults__[0]), list(made.dataset.labels), os.environ.get("SAMPLER_PASSES"),
            signal.getsignal(signal.SIGCHLD))


class Samplers(unittest.TestCase):
    def trained(self, make, told):
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        OnClass.passes, PASSES[:], MANY["passes"] = 0, [0], 0
        os.environ.pop("SAMPLER_PASSES", None)
        Defaults.__iter__.__defaults__[0].clear()
        made, out, after = make(), [], []
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), mock.patch.object(LOG, "handlers", [logging.StreamHandler(printed)]):
            for epoch in range(4):
                if hasattr(made.sampler, "set_epoch"):
                    made.sampler.set_epoch(epoch)
                predicted = None
                if told:
                    before = states(made)
                    predicted = shoal.predict(made)
                    self.assertEqual(states(made), before)
                read = [torch.as_tensor(b).tolist() for b in made]
                if told:
                    self.assertEqual(predicted, [i for b in read for i in (b if isinstance(b, list) else [b])],
                                     f"epoch {epoch}")
                out.append(read)
                after.append((states(made), random.random(), np.random.rand(), float(torch.rand(()))))
        return out, after, printed.getvalue()

    def test_the_trainer_does_not_notice(self):
        self.assertGreaterEqual(len(CASES), 60)
        for name, make in CASES.items():
            with self.subTest(name):
                plain, told = self.trained(make, False), self.trained(make, True)
                for a, b, what in zip(plain, told, ("batches", "states and objects", "output")):
                    self.assertEqual(a, b, what)

    def test_what_reaches_out_is_not_tried(self):
        with tempfile.TemporaryDirectory() as folder:
            def path(name):
                return os.path.join(folder, name)

            class Writing(Sized):
                def __iter__(self):
                    with open(path("log"), "a", encoding="utf-8") as f:
                        f.write("epoch\n")
                    return iter(range(N))

            class Removing(Sized):
                def __iter__(self):
                    with contextlib.suppress(OSError):  # hides that it was refused
                        os.remove(path("mark"))
                    return iter(range(N))

            class Commanding(Sized):
                def __iter__(self):
                    os.system("touch " + path("made"))
                    return iter(range(N))

            class Memory(Sized):
                def __init__(self):
                    self.passes = torch.zeros(1, dtype=torch.int64).share_memory_()

                def __iter__(self):
                    self.passes += 1
                    return iter(range(int(self.passes), N))

            class Pipe(Sized):
                def __iter__(self):
                    os.mkfifo(path("pipe"))
                    return iter(range(N))

            class Mapped(Sized):
                def __iter__(self):
                    torch.from_file(path("mark"), shared=True, size=8, dtype=torch.uint8)[0] += 1
                    return iter(range(N))

            class Named(Sized):
                """Finds by its name what others have made."""

                def __init__(self):
                    self.memory = shared_memory.SharedMemory(create=True, size=1)

                @property
                def passes(self):
                    return self.memory.buf[0]

                def __iter__(self):
                    again = shared_memory.SharedMemory(self.memory.name)
                    again.buf[0] += 1
                    return iter(range(again.buf[0], N))

            class Renewed(Named):
                def __iter__(self):
                    self.memory.unlink()
                    return iter(range(N))

            with open(path("mark"), "wb") as f:
                f.write(bytes(8))
            for make in (Writing, Removing, Commanding, Memory, Pipe, Mapped, Named, Renewed):
                with self.subTest(make.__name__):
                    sampler = make()
                    with self.assertRaisesRegex(TypeError, "not predicted"):
                        shoal.predict(DataLoader(Indices(), 8, sampler=sampler))
                    self.assertEqual(os.listdir(folder), ["mark"])
                    with open(path("mark"), "rb") as f:
                        self.assertEqual(f.read(), bytes(8))
                    self.assertEqual(int(getattr(sampler, "passes", torch.zeros(1))), 0)
                    if isinstance(sampler, Named):
                        sampler.memory.close()
                        sampler.memory.unlink()

    def test_warnings_are_shown_as_often(self):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("default")
            filters = list(warnings.filters)
            for _ in range(3):
                shoal.predict(DataLoader(Indices(), 8))
                warnings.warn("once", UserWarning)
            self.assertEqual(warnings.filters, filters)
        self.assertEqual([str(w.message) for w in shown], ["once"])

    def test_samplers_with_any_attribute(self):
        class Any:
            def __getattr__(self, name):
                return Any()

            def __iter__(self):
                return iter(range(N))

            def __len__(self):
                return N

        loader = DataLoader(Indices(), 8, sampler=Any())
        self.assertEqual(shoal.predict(loader), list(range(N)))
        self.assertIsNone(_hint._rank(loader))

    def test_c_code_writes_no_files(self):
        with tempfile.NamedTemporaryFile() as f:
            class Extension(Sized):
                def __iter__(self):
                    libc = ctypes.CDLL(None)
                    fd = libc.open(f.name.encode(), os.O_WRONLY | os.O_APPEND)
                    libc.write(fd, b"epoch", 5)
                    libc.close(fd)
                    return iter(range(N))

            with contextlib.suppress(TypeError):
                shoal.predict(DataLoader(Indices(), 8, sampler=Extension()))
            self.assertEqual(os.path.getsize(f.name), 0)

    @contextlib.contextmanager
    def leavingNoChild(self):
        def children():
            found = set()
            for pid in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8") as f:
                    if int(f.read().rsplit(") ", 1)[1].split()[1]) == os.getpid():
                        found.add(pid)
            return found

        before = children()  # those of other tests
        yield
        self.assertLessEqual(children(), before)

    def test_what_waits_is_ended(self):
        orders = queue.Queue()  # of a thread, which the copy does not have

        class Waiting(Sized):
            def __iter__(self):
                return iter(orders.get())

        with self.leavingNoChild(), mock.patch.object(_hint, "_STILL", 1), self.assertRaisesRegex(TypeError,
                "waits for other threads"):
            shoal.predict(DataLoader(Indices(), 8, sampler=Waiting()))

    def test_memory_that_runs_out(self):
        """The kernel ends the copy then, and not the trainer."""
        def score(_=None):
            with open("/proc/self/oom_score_adj", "rb") as f:
                return f.read()

        before = score()
        self.assertEqual(_hint._Apart(score).answer(), b"1000\n")
        self.assertEqual(score(), before)

    def test_copies_leave_no_core(self):
        """A program that takes cores takes none by a limit of 1. A process that cannot be dumped may be hidden from its
        user in /proc, and so the trainer would not end its copies."""
        if resource.getrlimit(resource.RLIMIT_CORE)[1]:
            self.assertEqual(_hint._Apart(lambda _: b"%d" % resource.getrlimit(resource.RLIMIT_CORE)[0]).answer(), b"1")
        get_dumpable = 3
        self.assertEqual(_hint._Apart(lambda _: b"%d" % ctypes.CDLL(None).prctl(get_dumpable)).answer(), b"1")

    def test_a_number_that_another_process_got(self):
        apart = _hint._Apart(lambda _: b"found")
        os.waitpid(apart.pid, 0)  # as a trainer that waits for any child
        apart.pid = os.getpid()
        with mock.patch("os.kill") as kill:
            apart.end()
        kill.assert_not_called()

    def test_interrupted(self):
        with self.leavingNoChild(), mock.patch("select.poll") as poll, self.assertRaises(KeyboardInterrupt):
            poll.return_value.poll.side_effect = KeyboardInterrupt
            shoal.predict(DataLoader(Indices(), 8, sampler=Eager()))
        wait, interrupts = os.waitpid, [KeyboardInterrupt]

        def interrupted(*args):
            if interrupts:
                raise interrupts.pop()
            return wait(*args)

        with self.leavingNoChild(), mock.patch("os.waitpid", interrupted), self.assertRaises(KeyboardInterrupt):
            shoal.predict(DataLoader(Indices(), 8))

    def test_interrupted_while_signals_are_blocked(self):
        """A handler of a signal that came just before runs in the very call that blocks all. What it raises must not
        leave them blocked, or neither Ctrl-C nor SIGTERM would end the trainer."""
        change = signal.pthread_sigmask
        mask = change(signal.SIG_BLOCK, ())
        self.addCleanup(change, signal.SIG_SETMASK, mask)

        def interrupted(how, signals):
            before = change(how, signals)
            if how == signal.SIG_BLOCK and signals:
                raise KeyboardInterrupt
            return before

        for what in (mock.patch("signal.pthread_sigmask", interrupted),
                     mock.patch("os.fork", side_effect=KeyboardInterrupt)):
            with what, self.assertRaises(KeyboardInterrupt):
                shoal.predict(DataLoader(Indices(), 8))
            self.assertEqual(change(signal.SIG_BLOCK, ()), mask)
        # The same beside what is done after the fork, for a signal that another thread got.
        with mock.patch("os.fork", side_effect=BlockingIOError), mock.patch.object(_hint._Apart, "_stat",
                side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            shoal.predict(DataLoader(Indices(), 8))
        self.assertEqual(change(signal.SIG_BLOCK, ()), mask)

    def test_cuda(self):
        class OnDevice(Sized):
            def __iter__(self):
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
                                   "multiprocessing, ...")

        with self.assertRaisesRegex(TypeError, "uses a CUDA device"):
            shoal.predict(DataLoader(Indices(), 8, sampler=OnDevice()))

    def test_open_files_stay_where_they_are(self):
        with tempfile.TemporaryFile("w+b", buffering=0) as f:
            f.write(bytes(range(N)) * 4)
            f.seek(0)

            class Reading(Sized):
                def __iter__(self):
                    return iter(list(f.read(N)))

            with self.assertRaisesRegex(TypeError, "none of its open files and sockets .*Bad file descriptor"):
                shoal.predict(DataLoader(Indices(), 8, sampler=Reading()))
            self.assertEqual(f.tell(), 0)


if __name__ == "__main__":
    unittest.main()
