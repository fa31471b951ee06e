import errno
import fcntl
import itertools
import json
import os
import pathlib
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

import numpy as np
import torch
from torch.utils.data import (BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler,
                              SequentialSampler, Subset, SubsetRandomSampler, WeightedRandomSampler)
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder

import support  # noqa: F401 (sets the path)

import shoal
from shoal import _hint


class Indices(Dataset):
    """Yields what it is asked for."""

    def __init__(self, n):
        self.samples = [(f"class{i % 3}/{i:04d}.jpg", i % 3) for i in range(n)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return i


class GlobalState(Sampler):
    """A sampler of someone's own, which draws from everything there is."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for _ in range(self.n):
            yield (random.randrange(self.n) + np.random.randint(self.n) + int(torch.randint(self.n, ()))) % self.n

    def __len__(self):
        return self.n


class InPlace:
    """No Sampler of torch's, and iterating it changes it."""

    def __init__(self, n):
        self.order, self.rng, self.passes = list(range(n)), random.Random(3), 0

    def __iter__(self):
        self.passes += 1
        self.rng.shuffle(self.order)
        return iter(self.order[self.passes:])

    def __len__(self):
        return len(self.order)


class StatefulRandomSampler(RandomSampler):
    """What torchdata's StatefulDataLoader(shuffle=True) makes: a generator of its own, seeded 1,
    unless it is given one."""

    def __init__(self, data, generator=None):
        if generator is None:
            generator = torch.Generator()
            generator.manual_seed(1)
        super().__init__(data, generator=generator)


class StatefulLoader(DataLoader):
    """A DataLoader by the rules of torchdata's StatefulDataLoader that matter to hint."""

    def __init__(self, data, batch_size, generator=None, **options):
        super().__init__(data, batch_size, sampler=StatefulRandomSampler(data, generator), generator=generator,
                         **options)
        self.next_iter_state, self._initial_iter_for_state_dict, self._made = None, False, None

    def state_dict(self):
        self._made = super().__iter__()
        self._initial_iter_for_state_dict = True
        return {}

    def __iter__(self):
        if self._initial_iter_for_state_dict:
            self._initial_iter_for_state_dict = False
            return self._made
        return super().__iter__()


class OwnState(Sampler):
    def __init__(self, n):
        self.n, self.rng, self.torch = n, np.random.default_rng(4), torch.Generator().manual_seed(8)

    def __iter__(self):
        yield from ((self.rng.permutation(self.n) + int(torch.randint(5, (), generator=self.torch))) % self.n).tolist()

    def __len__(self):
        return self.n


class Endless:
    """Passes over a sampler, one after the other, without end: what timm and Ultralytics put around theirs."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler


class MultiEpochs(DataLoader):
    """Behaves as timm's MultiEpochsDataLoader: one iterator for all epochs, of len(self) batches each."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._DataLoader__initialized = False
        if self.batch_sampler is None:
            self.sampler = Endless(self.sampler)
        else:
            self.batch_sampler = Endless(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self):
        return len((self.sampler if self.batch_sampler is None else self.batch_sampler).sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class Infinite(DataLoader):
    """Behaves as Ultralytics' InfiniteDataLoader: the same, and reset() makes a new iterator."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Endless(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)

    def reset(self):
        self.iterator = self._get_iterator()


class InCopies(list):
    """A list that does something when a copy of a copy of this process asks it for an item."""

    def __init__(self, items, do):
        super().__init__(items)
        self.process, self.do = os.getpid(), do

    def __getitem__(self, i):
        if self.process not in (os.getpid(), os.getppid()):
            self.do()
        return super().__getitem__(i)


class Training(Sampler):
    """Behaves as detectron2's TrainingSampler: shuffles without end, and without a length."""

    def __init__(self, size, seed, rank=0, world=1):
        self._size, self._seed, self._rank, self._world = size, seed, rank, world

    def __iter__(self):
        return itertools.islice(self._forever(), self._rank, None, self._world)

    def _forever(self):
        g = torch.Generator()
        g.manual_seed(self._seed)
        while True:
            yield from torch.randperm(self._size, generator=g).tolist()


def random_state(*generators):
    return (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state()[1].tolist()),
            np.random.get_state()[2],
            [g.get_state().tolist() for g in generators])


def loaded(loader):
    return [int(i) for batch in loader for i in (batch if getattr(batch, "ndim", 0) else [batch])]


class Predict(unittest.TestCase):
    n = 53

    def check(self, loader, *generators, sampler=None, epochs=3):
        """Prediction changes nothing, and is what the loader then reads; for several epochs."""
        for _ in range(epochs):
            before = random_state(*generators)
            predicted = shoal.predict(sampler if sampler is not None else loader)
            self.assertEqual(random_state(*generators), before)
            self.assertEqual(shoal.predict(sampler if sampler is not None else loader), predicted)
            self.assertEqual(loaded(loader), predicted)
        return predicted

    def test_shuffle(self):
        for workers in (0, 2):
            for drop_last in (False, True):
                torch.manual_seed(5)
                loader = DataLoader(Indices(self.n), batch_size=8, shuffle=True, num_workers=workers,
                                    drop_last=drop_last)
                self.assertEqual(len(self.check(loader)), 48 if drop_last else 53)

    def test_shuffle_with_a_generator(self):
        g = torch.Generator().manual_seed(3)
        self.check(DataLoader(Indices(self.n), batch_size=8, shuffle=True, generator=g), g)

    def test_generator_of_the_sampler(self):
        g, h = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
        data = Indices(self.n)
        self.check(DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=g)), g)
        self.check(DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=g), generator=h), g, h)
        self.check(DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=g), generator=g), g)

    def test_persistent_workers(self):
        torch.manual_seed(6)
        self.check(DataLoader(Indices(self.n), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True))

    def test_no_batching(self):
        torch.manual_seed(7)
        self.check(DataLoader(Indices(self.n), batch_size=None, shuffle=True))

    def test_samplers(self):
        data = Indices(self.n)
        torch.manual_seed(8)
        g = torch.Generator().manual_seed(9)
        for sampler in (
            SequentialSampler(data), RandomSampler(data), RandomSampler(data, replacement=True, num_samples=90),
            RandomSampler(data, num_samples=20), SubsetRandomSampler(range(5, 40)),
            SubsetRandomSampler(range(5, 40), generator=g),
            WeightedRandomSampler(torch.arange(53.0), 30), OwnState(self.n), GlobalState(self.n),
        ):
            with self.subTest(type(sampler).__name__):
                own = [v for v in vars(sampler).values() if isinstance(v, torch.Generator)]
                self.check(DataLoader(data, batch_size=8, sampler=sampler), *own)
                self.check(DataLoader(data, batch_sampler=BatchSampler(sampler, 7, drop_last=True)), *own)

    def test_samplers_of_no_known_kind(self):
        data, sampler = Indices(self.n), InPlace(self.n)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
        for _ in range(3):
            order, passes = list(sampler.order), sampler.passes
            predicted = shoal.predict(loader)
            self.assertEqual((sampler.order, sampler.passes), (order, passes))
            self.assertEqual(shoal.predict(sampler), predicted)
            self.assertEqual(loaded(loader), predicted)
        nested = BatchSampler(sampler, 5, drop_last=True)
        self.assertEqual(shoal.predict(nested), loaded(DataLoader(data, batch_sampler=nested)))

    def test_stateful(self):
        data = Indices(self.n)
        for workers, persistent in ((0, False), (2, False), (2, True)):
            for generator in (None, torch.Generator().manual_seed(3)):
                loader = StatefulLoader(data, 8, generator, num_workers=workers, persistent_workers=persistent)
                self.check(loader, *([generator] if generator else []))
        loader = StatefulLoader(data, 8, torch.Generator().manual_seed(5))
        loader.state_dict()
        self.check(loader, epochs=2)
        loader.next_iter_state = {}
        with self.assertRaisesRegex(TypeError, "loaded state"):
            shoal.predict(loader)
        loader = StatefulLoader(data, 8, num_workers=2)
        loader.state_dict()
        with self.assertRaisesRegex(TypeError, "before"):
            shoal.predict(loader)

    def test_epochs(self):
        data = Indices(self.n)
        g = torch.Generator().manual_seed(3)
        for loader in (
            DataLoader(data, 8, shuffle=True, generator=g),
            DataLoader(data, 8, shuffle=True, generator=g, num_workers=2, persistent_workers=True),
            DataLoader(data, 8), DataLoader(data, sampler=InPlace(self.n)),
            DataLoader(data, 8, sampler=SubsetRandomSampler(range(30), generator=g), generator=torch.Generator()),
        ):
            for _ in range(2):
                told = shoal.predict(loader, epochs=3)
                self.assertEqual(told, [i for _ in range(3) for i in loaded(loader)])
        sampler = DistributedSampler(data, num_replicas=3, rank=1, seed=8)
        sampler.set_epoch(4)
        told = shoal.predict(DataLoader(data, 8, sampler=sampler), epochs=3)
        self.assertEqual(sampler.epoch, 4)
        want = []
        for epoch in range(4, 7):
            sampler.set_epoch(epoch)
            want += list(sampler)
        self.assertEqual(told, want)
        before = random_state()
        for loader in (DataLoader(data, 8, shuffle=True), DataLoader(data, sampler=GlobalState(9))):
            with self.assertRaisesRegex(ValueError, "global generator"):
                shoal.predict(loader, epochs=2)
        self.assertEqual(random_state(), before)
        with self.assertRaisesRegex(ValueError, "1 or more"):
            shoal.predict([1], epochs=0)

    def test_random_loaders(self):
        # Loaders put together at random, against what they deliver: several epochs, with draws from all
        # generators in between, as a trainer makes them.
        for seed in range(60):
            draw = random.Random(seed)
            n = draw.choice((1, 2, 7, 53, 200))
            data, torch_g = Indices(n), torch.Generator().manual_seed(seed)
            sampler = draw.choice((
                lambda: None, lambda: SequentialSampler(data), lambda: RandomSampler(data),
                lambda: RandomSampler(data, generator=torch_g),
                lambda: RandomSampler(data, True, draw.randint(1, 3 * n)),
                lambda: RandomSampler(data, True, draw.randint(1, 3 * n), torch_g), lambda: GlobalState(n),
                lambda: OwnState(n),
                lambda: SubsetRandomSampler(range(0, n, 2)), lambda: SubsetRandomSampler(range(0, n, 2), torch_g),
                lambda: WeightedRandomSampler(torch.rand(n, generator=torch.Generator().manual_seed(1)),
                                              draw.randint(1, 2 * n)),
                lambda: WeightedRandomSampler([1.0] * n, draw.randint(1, n), replacement=False, generator=torch_g),
                lambda: DistributedSampler(data, 3, draw.randrange(3), draw.random() < 0.7, seed, draw.random() < 0.5),
                lambda: InPlace(n)))()
            options = {"num_workers": 2 if seed % 5 == 0 else 0}
            if options["num_workers"] and draw.random() < 0.5:
                options["persistent_workers"] = True
            if draw.random() < 0.5:
                options["generator"] = draw.choice((torch_g, torch.Generator().manual_seed(9)))
            if sampler is None:
                options["shuffle"] = draw.random() < 0.8
            if sampler is not None and draw.random() < 0.3:
                loader = DataLoader(data, batch_sampler=BatchSampler(sampler, draw.randint(1, 9), draw.random() < 0.5),
                                    **options)
            elif draw.random() < 0.2:
                loader = DataLoader(data, batch_size=None, sampler=sampler, **options)
            else:
                loader = DataLoader(data, draw.randint(1, 9), sampler=sampler, drop_last=draw.random() < 0.3, **options)
            generators = [torch_g] + ([options["generator"]] if "generator" in options else [])
            torch.manual_seed(seed)
            for epoch in range(3):
                if isinstance(sampler, DistributedSampler):
                    sampler.set_epoch(epoch)
                before = random_state(*generators)
                predicted = shoal.predict(loader)
                self.assertEqual(random_state(*generators), before, f"seed {seed}: {sampler}")
                self.assertEqual(loaded(loader), predicted, f"seed {seed}, epoch {epoch}: {sampler}, {options}")
                torch.rand(draw.randrange(5)), np.random.rand(draw.randrange(5)), random.random()

    def test_distributed(self):
        data = Indices(self.n)
        for rank in range(4):
            sampler = DistributedSampler(data, num_replicas=4, rank=rank, seed=3)
            loader = DataLoader(data, batch_size=8, sampler=sampler)
            orders = []
            for epoch in range(2):
                sampler.set_epoch(epoch)
                orders.append(self.check(loader, sampler=sampler, epochs=1))
                self.check(loader, epochs=1)
            self.assertNotEqual(*orders)

    def test_loaders_with_one_iterator(self):
        data = Indices(self.n)
        for kind in (MultiEpochs, Infinite):
            for size in (8, 53, 1):  # with a partial batch at the end and without
                g = torch.Generator().manual_seed(3)
                torch.manual_seed(5)
                self.assertEqual(len(self.check(kind(data, size, shuffle=True))), 53)
                self.check(kind(data, size, shuffle=True, generator=g), g)
                self.check(kind(data, size, sampler=RandomSampler(data, replacement=True, num_samples=40, generator=g),
                                drop_last=True), g)
                self.check(kind(data, size))
                for name, drop in (("sequential", False), ("shuffled", True)):
                    loader = kind(data, size, shuffle=drop, drop_last=drop, generator=g)
                    for _ in range(2):
                        told = shoal.predict(loader, epochs=3)
                        self.assertEqual(told, [i for _ in range(3) for i in loaded(loader)], name)
                sampler = DistributedSampler(data, 3, 1, seed=4)
                loader = kind(data, size, sampler=sampler)
                for epoch in range(3):
                    sampler.set_epoch(epoch)
                    self.check(loader, epochs=1)
        self.check(MultiEpochs(data, batch_size=None, shuffle=True))
        loader = Infinite(data, 8, shuffle=True, generator=g)
        loaded(loader)
        loader.reset()
        self.check(loader, g)

    def test_loaders_that_are_ahead(self):
        # Where the iterator stands within a shuffle cannot be seen: that is said, and no other order told.
        data = Indices(self.n)
        for kind in (MultiEpochs, Infinite):
            loader = kind(data, 8, shuffle=True)
            next(iter(loader))
            self.check(loader)  # without workers it can
            self.check(kind(data, 8, num_workers=2))
            for options in (dict(shuffle=True), dict(sampler=DistributedSampler(data, 3, 1))):
                before = random_state()
                loader = kind(data, 8, num_workers=2, **options)
                after = random_state()
                with self.assertRaisesRegex(TypeError, "persistent_workers=True"):
                    shoal.predict(loader)
                self.assertEqual(random_state(), after)
                self.assertNotEqual(before, after)

    def test_samplers_without_end(self):
        data, sampler = Indices(self.n), Training(self.n, 7, 1, 2)
        for loader in (sampler, DataLoader(data, 8, sampler=sampler),
                       DataLoader(data, batch_sampler=BatchSampler(sampler, 8, True))):
            before = random_state()
            with self.assertRaisesRegex(ValueError, "no length.*limit="):
                shoal.predict(loader)
            told = shoal.predict(loader, limit=200)
            self.assertEqual(random_state(), before)
            self.assertEqual(told, list(itertools.islice(sampler, 200)))
            if loader is not sampler:
                self.assertEqual(told, [int(i) for batch in itertools.islice(loader, 25) for i in batch])
        self.assertEqual(shoal.predict(DataLoader(data, 8), limit=9), list(range(9)))
        self.assertEqual(shoal.predict(DataLoader(data, 8), epochs=2, limit=60), [*range(53), *range(7)])
        self.assertEqual(shoal.predict(Endless(range(5)), limit=7), [0, 1, 2, 3, 4, 0, 1])
        with self.assertRaisesRegex(ValueError, "1 or more"):
            shoal.predict(sampler, limit=0)

    def test_plain_iterables(self):
        self.assertEqual(shoal.predict([3, 1, 2]), [3, 1, 2])
        self.assertEqual(shoal.predict([[3, 1], [2]]), [3, 1, 2])
        self.assertEqual(shoal.predict(torch.tensor([[3, 1], [2, 0]])), [3, 1, 2, 0])
        self.assertEqual(shoal.predict(np.arange(3)), [0, 1, 2])
        self.assertEqual(shoal.predict([(3, 1), (2,)]), [3, 1, 2])
        # YOLOX's batches hold such tuples: with True, in place of sample 1, comes the sample.
        for unknown in ([[(True, 3), (False, 4)]], [[3, 1], [(2, 0)]],
                        DataLoader(Indices(9), batch_size=None, sampler=[(3, 320), (1, 480)])):
            with self.assertRaisesRegex(TypeError, "indices are tuples, such as .*not known"):
                shoal.predict(unknown)
        for key in "3", 3.0:
            with self.assertRaisesRegex(TypeError, "integer"):
                shoal.predict([key])
        with self.assertRaisesRegex(TypeError, "use it up"):
            shoal.predict(iter([1, 2]))

        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                yield 1

        with self.assertRaisesRegex(TypeError, "IterableDataset"):
            shoal.predict(DataLoader(Stream()))

        class Garbled:
            def __len__(self):
                return 1

            def __iter__(self):
                return iter([int(b"\xff".decode())])

        # An error that cannot be made of its text alone is named.
        with self.assertRaisesRegex(TypeError, "UnicodeDecodeError: 'utf-8' codec can't decode"):
            shoal.predict(Garbled())

    def test_training_is_unchanged(self):
        # The whole stream of random numbers of a run, with and without hints, is the same.
        def run(hinted):
            torch.manual_seed(1)
            loader = DataLoader(Indices(self.n), batch_size=8, shuffle=True)
            out = []
            for _ in range(3):
                if hinted:
                    shoal.predict(loader)
                out += loaded(loader) + torch.rand(3).tolist()
            return out

        self.assertEqual(run(True), run(False))


class Plan(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.mount = folder.name
        os.makedirs(os.path.join(self.mount, ".shoal", "plans"))

    def plan(self, name="default"):
        with open(os.path.join(self.mount, ".shoal", "plans", name), encoding="utf-8") as f:
            return f.read().splitlines()

    def test_image_folder(self):
        os.rename(os.path.join(self.mount, ".shoal"), self.mount + "-control")  # a mount does not list it
        for cls in "ab":
            os.makedirs(os.path.join(self.mount, cls, "nested"))
            for i in range(5):
                Image.new("RGB", (8, 8)).save(os.path.join(self.mount, cls, "nested" if i % 2 else "", f"{i}.jpg"))
        opened = []

        def load(path):
            opened.append(os.path.relpath(path, self.mount))
            return Image.open(path).convert("RGB")

        data = ImageFolder(self.mount, transforms.ToTensor(), loader=load)
        os.rename(self.mount + "-control", os.path.join(self.mount, ".shoal"))
        torch.manual_seed(2)
        loader = DataLoader(data, batch_size=3, shuffle=True)
        for _ in range(2):
            self.assertEqual(shoal.hint(loader, mountpoint=self.mount), 10)
            opened.clear()
            for _ in loader:
                pass
            self.assertEqual(self.plan(), opened)
        half = Subset(data, range(0, 10, 2))
        shoal.hint(SequentialSampler(half), half, self.mount, name="rank1")
        self.assertEqual(self.plan("rank1"), [os.path.relpath(p, self.mount) for p, _ in data.samples[::2]])

    def test_paths(self):
        link = self.mount + "-link"
        os.symlink(self.mount, link)
        self.addCleanup(os.unlink, link)
        paths = ["a/x.jpg", os.path.join(self.mount, "b/y.jpg"), os.path.join(link, "c/größe.jpg")]
        self.assertEqual(shoal.hint([2, 0, 1], paths, self.mount), 3)
        self.assertEqual(self.plan(), ["c/größe.jpg", "a/x.jpg", "b/y.jpg"])
        shoal.hint([1], paths, self.mount)
        self.assertEqual(self.plan(), ["b/y.jpg"])
        for kind in os.fsencode, pathlib.Path:
            self.assertEqual(shoal.hint([2, 0, 1], list(map(kind, paths)), kind(self.mount)), 3)
            self.assertEqual(self.plan(), ["c/größe.jpg", "a/x.jpg", "b/y.jpg"])

    def test_finds_the_mount(self):
        for name in ("stats", "order"):
            open(os.path.join(self.mount, ".shoal", name), "w").close()
        other = tempfile.TemporaryDirectory()
        self.addCleanup(other.cleanup)
        second = os.path.join(other.name, "deep", "mnt")
        os.makedirs(os.path.join(second, ".shoal", "plans"))
        open(os.path.join(second, ".shoal", "stats"), "w").close()
        outside = os.path.join(other.name, "c/3.jpg")
        a, b = Indices(0), Indices(0)
        a.samples = [(os.path.join(self.mount, "a", f"{i}.jpg"), 0) for i in range(4)]
        b.samples = [(os.path.join(second, "b", "x", "y", "2.jpg"), 1), (outside, 1),
                     (os.path.join(second, "root.jpg"), 1)]
        both = Subset(torch.utils.data.ConcatDataset([a, Subset(b, [2, 0, 1])]), [6, 4, 5, 0, 3])
        # Each mount gets what it holds, and what is in none is left out.
        self.assertEqual(shoal.hint(range(5), both), 4)
        self.assertEqual(self.plan(), ["a/0.jpg", "a/3.jpg"])
        with open(os.path.join(second, ".shoal", "plans", "default"), encoding="utf-8") as f:
            self.assertEqual(f.read(), "root.jpg\nb/x/y/2.jpg\n")
        link = os.path.join(other.name, "link")
        os.symlink(os.path.join(self.mount, "a"), link)
        self.assertEqual(shoal.hint([0], [os.path.join(link, "7.jpg")]), 1)
        self.assertEqual(self.plan(), ["a/7.jpg"])
        with self.assertRaisesRegex(ValueError, "not below"):
            shoal.hint([0], [outside], self.mount)

    def test_a_copy_that_is_killed_leaves_no_plan(self):
        """What it has written by then ends amid a line, which the mount refuses."""
        for texts, ends in (([b"a/1.jpg\nb/2.jpg\n", b"c/3.jpg\n"], (b"b/", b"c/")),
                            ([b"a/1\na/12\n"], (b"\na/",)),  # a/1 is a file, too
                            ([b"#ranges\na.bin\t0\t20\n"], (b"\t0\t",)), ([b"1.jpg\n", b"2.jpg\n"], (b".jp", b".jp"))):
            pieces = list(_hint._amid(texts))
            self.assertEqual(b"".join(pieces), b"".join(texts))
            for k, end in enumerate(ends, 1):
                self.assertEqual(b"".join(pieces[:k])[-len(end):], end)

    def test_names_in_another_encoding(self):
        """A plan has the bytes of names, of which the locale makes text."""
        latin = mock.patch("os.fsencode", lambda path: path.encode("latin-1"))
        for give in (lambda: shoal.hint([0, 0], [os.path.join(self.mount, "größe.jpg")], self.mount),
                     lambda: shoal.hint([0], [["größe.jpg"]], self.mount),
                     lambda: shoal.hint(ranges=[("größe.jpg", 0, 1)], mountpoint=self.mount)):
            with latin:
                give()
            text = pathlib.Path(self.mount, ".shoal", "plans", "default").read_bytes()
            self.assertIn(b"gr\xf6\xdfe.jpg", text)

    def test_a_dataset_that_reads_by_shoal_open(self):
        """What that opens and asks by itself is not taken for what a sample reads, wherever the trainer is."""
        class Opening(Dataset):
            def __init__(self, root):
                self.samples = [(os.path.join(root, f"c{i}", "x.jpg"), 0) for i in range(4)]

            def __len__(self):
                return len(self.samples)

            def __getitem__(self, i):
                with shoal.open(self.samples[i][0]) as f:
                    return f.read()

        data = Opening(self.mount)
        for path, _ in data.samples:
            os.makedirs(os.path.dirname(path))
            pathlib.Path(path).touch()
        pathlib.Path(self.mount, ".shoal", "stats").touch()
        for folder in os.getcwd(), self.mount:
            self.addCleanup(os.chdir, os.getcwd())
            os.chdir(folder)
            self.assertEqual(shoal.hint([2, 0, 3], data), 3)
            self.assertEqual(self.plan(), [os.path.relpath(data.samples[i][0], self.mount) for i in (2, 0, 3)])

    def test_ranges(self):
        for name in ("stats", "order"):
            open(os.path.join(self.mount, ".shoal", name), "w").close()
        tokens = pathlib.Path(self.mount, "c", "tokens.bin")
        lines = ((tokens, np.int64(i * 8192), 8192) for i in itertools.count())
        self.assertEqual(shoal.hint(ranges=lines, limit=3, name="rank1"), 3)
        with open(os.path.join(self.mount, ".shoal", "plans", "rank1"), encoding="utf-8") as f:
            self.assertEqual(f.read(), "#ranges\n" + "".join(f"c/tokens.bin\t{i * 8192}\t8192\n" for i in range(3)))
        self.assertEqual(shoal.hint(ranges=[("c/größe.bin", 5, 7)], mountpoint=self.mount), 1)
        self.assertEqual(self.plan(), ["#ranges", "c/größe.bin\t5\t7"])
        with self.assertRaisesRegex(ValueError, "name='sweep/3': .*without /"):
            shoal.hint([0], ["a/7.jpg"], self.mount, name="sweep/3")
        with self.assertRaisesRegex(ValueError, "no path lies below a Shoal mount"):
            shoal.hint(ranges=[])
        with self.assertRaisesRegex(ValueError, "limit=0: it must be 1 or more"):
            shoal.hint(ranges=[(tokens, 0, 1)], limit=0)
        with self.assertRaisesRegex(TypeError, "ranges, or a sampler"):
            shoal.hint([1], ranges=[(tokens, 0, 1)])
        with self.assertRaisesRegex(TypeError, "a sampler, or ranges"):
            shoal.hint()

    def test_datasets(self):
        class Augmented(Dataset):
            def __init__(self, dataset):
                self.dataset = dataset

            def __len__(self):
                return len(self.dataset)

            def __getitem__(self, i):
                return self.dataset[i]

        data = Indices(6)
        joined = torch.utils.data.ConcatDataset([Subset(Subset(data, [5, 4, 3]), [2, 0]), Augmented(data)])
        shoal.hint([0, 1, 2, -1], joined, self.mount)
        self.assertEqual(self.plan(), [data.samples[i][0] for i in (3, 5, 0, 5)])
        shoal.hint(DataLoader(Augmented(joined), 3), mountpoint=self.mount)
        self.assertEqual(self.plan(), [data.samples[i][0] for i in (3, 5, 0, 1, 2, 3, 4, 5)])
        for listed in ([("a/1.jpg", 3), ("b/2.jpg", 4)], ["a/1.jpg", "./b/2.jpg"],
                       np.array(["a/1.jpg", "b/../b/2.jpg"])):
            shoal.hint([1, 0], listed, self.mount)
            self.assertEqual(self.plan(), ["b/2.jpg", "a/1.jpg"])
        with self.assertRaises(IndexError):
            shoal.hint([8], joined, self.mount)

    def test_long_lists(self):
        # Paths that are looked at together give the same plans as each by itself.
        two = tempfile.TemporaryDirectory()
        self.addCleanup(two.cleanup)
        for root in (self.mount, two.name):
            os.makedirs(os.path.join(root, ".shoal", "plans"), exist_ok=True)
            open(os.path.join(root, ".shoal", "stats"), "w").close()
        rng = random.Random(1)
        for case in range(40):
            n = rng.randrange(1, 400)
            roots = rng.choice([[self.mount], [self.mount, two.name], [self.mount, "/elsewhere"], ["/elsewhere"]])
            odd = rng.choice([["/"], ["/"], ["/", "//", "/./", "/c0/../"]])
            paths = [f"{rng.choice(roots)}{rng.choice(odd)}c{i % 7}/é{'x' * rng.randrange(9)}{i}.jpg" for i in range(n)]
            listing = [[] if rng.random() < 0.1 else rng.sample(paths, rng.randrange(1, 3))
                       for _ in range(n)] if case % 4 == 0 else paths
            indices = np.array([rng.randrange(-n, n) for _ in range(rng.choice([n, n // 3, n // 9, 2 * n]))], np.int64)
            mounts = _hint._Mounts(None)

            def texts(apart):
                plans = _hint._texts(listing if listing is not paths else _hint._paths(paths), indices, mounts, apart)
                return json.dumps({root: b"".join(plan.ordered()).decode() for root, plan in plans.items()}).encode()

            with mock.patch.object(_hint, "_AT_ONCE", 16), mock.patch.object(_hint, "_BANDS", rng.randrange(2, 5)):
                told = json.loads(_hint._Apart(texts).answer() if case % 3 == 0 else texts(None))
            want = {}
            for i in indices.tolist():
                for root, line in filter(None,
                                         map(mounts.place, listing[i] if isinstance(listing[i], list)
                                             else [listing[i]])):
                    want[root] = want.get(root, "") + line + "\n"
            self.assertEqual(told, want)
        with mock.patch.object(_hint, "_AT_ONCE", 16), self.assertRaises(IndexError):
            shoal.hint(list(range(30)) + [60], [os.path.join(self.mount, f"{i}.jpg") for i in range(60)])

    def test_a_long_list_is_not_copied(self):
        # To look at an object is to write its count of references, and the kernel then copies its page for the copy.
        root = os.path.join(self.mount, "d" * 200)
        os.makedirs(os.path.join(root, ".shoal", "plans"))
        open(os.path.join(root, ".shoal", "stats"), "w").close()
        paths = [f"{root}/{i:06d}.jpg" for i in range(200_000)]
        shuffled = random.Random(1).sample(paths, len(paths))

        def private():
            with open("/proc/self/smaps_rollup", encoding="ascii") as f:
                return sum(int(line.split()[1]) for line in f if line.startswith("Private_")) << 10

        def grown(listing):
            def look(apart):
                before = private()
                plans = _hint._texts(_hint._paths(listing), np.arange(len(listing)), _hint._Mounts(None), apart)
                self.assertEqual(plans[root].lines(), len(listing))
                return str(private() - before).encode()
            return int(_hint._Apart(look).answer())

        self.assertLess(grown(paths), 20 << 20)
        self.assertGreater(grown(shuffled), 50 << 20)  # each band would touch most pages

    def test_a_dataset_is_asked_in_the_copy(self):
        class Drawing(Dataset):
            @property
            def samples(self):
                return [(f"{random.randrange(9)}.jpg", 0) for _ in range(4)]

            def __len__(self):
                return 4 + 0 * random.randrange(9)

        before = random.getstate()
        self.assertEqual(shoal.hint([3, 0], Drawing(), self.mount), 2)
        self.assertEqual(random.getstate(), before)

    def test_names(self):
        data = Indices(4)
        loader = DataLoader(data, 2, sampler=DistributedSampler(data, 2, 1, shuffle=False))
        with mock.patch.dict(os.environ, {"RANK": "5", "LOCAL_RANK": "1"}):
            shoal.hint(loader, mountpoint=self.mount)
            self.assertEqual(self.plan("rank1"), [data.samples[i][0] for i in (1, 3)])
            shoal.hint([0], data, self.mount)
            shoal.hint([1], data, self.mount, name="mine")
            del os.environ["RANK"]
            shoal.hint([2], data, self.mount)
            with mock.patch("torch.distributed.is_initialized",
                            return_value=True), mock.patch("torch.distributed.get_rank", return_value=7):
                shoal.hint([3], data, self.mount)
        for name, indices in (("rank1", [2]), ("rank5", [0]), ("mine", [1]), ("rank7", [3])):
            self.assertEqual(self.plan(name), [data.samples[i][0] for i in indices], name)

    def test_errors(self):
        for paths, error, word in ((["/etc/passwd"], ValueError, "not below"), (["a\nb"], ValueError, "line break"),
                                   ("ab", TypeError, "list of paths"), (Dataset(), TypeError, "list of paths"),
                                   (None, TypeError, "needs paths")):
            with self.assertRaisesRegex(error, word):
                shoal.hint([0], paths, self.mount)
        with self.assertRaisesRegex(ValueError, "no path lies below a Shoal mount"):
            shoal.hint([0], ["/etc/passwd"])
        with tempfile.TemporaryDirectory() as other, self.assertRaisesRegex(OSError, "not a Shoal mount.*shoal mount"):
            shoal.hint([0], ["a"], other)

    def test_long_orders_are_not_waited_for(self):
        data, order = Indices(40), list(range(39, -1, -1))

        def late(indices, **options):
            self.assertEqual(shoal.hint(indices, data, self.mount, **options), 0)
            return _hint._late[os.getpid(), "default"].pid

        def ended(pid):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        others = os.open(os.path.join(self.mount, ".shoal"), os.O_RDONLY)
        # wherever these few samples came to lie in memory
        in_line = mock.patch.object(_hint, "_in_line", lambda _: True)
        with mock.patch.object(_hint, "SHORT", 39), in_line:
            fcntl.flock(others, fcntl.LOCK_EX)  # as the copy of another rank of this node
            pid = late(order)
            waits = re.compile(rf"-> FLOCK .* {pid} ")
            while not waits.search(pathlib.Path("/proc/locks").read_text()):
                os.kill(pid, 0)
            os.close(others)
            ended(pid)
            self.assertEqual(self.plan(), [data.samples[i][0] for i in order])
            thread = threading.Thread(target=late, args=(order[::-1],))  # which has ended before the copy
            fcntl.flock(others := os.open(os.path.join(self.mount, ".shoal"), os.O_RDONLY), fcntl.LOCK_EX)
            thread.start()
            thread.join()
            os.close(others)
            ended(_hint._late[os.getpid(), "default"].pid)
            self.assertEqual(self.plan(), [data.samples[i][0] for i in order[::-1]])
            writes = InCopies(data.samples, lambda: open(self.mount + "/x", "w"))
            for wrong, samples, why in (([40] * 40, data.samples, "range"), (order, writes, "reaches out")):
                data.samples = samples
                ended(late(wrong))
                data = Indices(40)  # what goes wrong is said by the next
                with self.assertWarnsRegex(RuntimeWarning, "last order of this plan was not written: .*" + why):
                    self.assertEqual(shoal.hint([3], data, self.mount, limit=1), 1)
                self.assertEqual(self.plan(), [data.samples[3][0]])
            data.samples = writes
            ended(late(order))
            with self.assertWarnsRegex(RuntimeWarning, "last order of this plan was not written"):
                self.assertEqual(shoal.hint(ranges=[("a", 0, 1)], mountpoint=self.mount), 1)
            self.assertEqual(self.plan(), ["#ranges", "a\t0\t1"])
            data.samples = InCopies(data.samples, signal.pause)
            pid, inner = late(order), ""
            while not inner:
                os.kill(pid, 0)
                inner = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()
            ends = os.pidfd_open(int(inner))
            _hint._late.pop((os.getpid(), "default")).end()  # as when the trainer ends
            select.select([ends], [], [])

    def test_an_end_before_a_long_order_is_written(self):
        script = ("import sys, shoal._hint as h\nh.SHORT, h._in_line = 0, lambda _: True\n"  # it lives longer by that
                  "h.hint([0] * 9, ['a'], sys.argv[1])\nprint(len(h._late))")
        done = subprocess.run([sys.executable, "-B", "-c", script, self.mount], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(shoal.__file__))})
        self.assertEqual((done.stdout, done.stderr), ("1\n", ""))

    def test_a_timeout_while_a_plan_is_written(self):
        """What the trainer's own handler of a signal raises reaches the trainer as it is."""
        with mock.patch("builtins.open", side_effect=TimeoutError("mine")), self.assertRaisesRegex(TimeoutError,
                "^mine$"):
            shoal.hint(ranges=[("a", 0, 1)], mountpoint=self.mount)

    def test_refused_plan(self):
        # A mount checks the plan when the file is closed, and says why in .shoal/order.
        with open(os.path.join(self.mount, ".shoal", "order"), "w", encoding="utf-8") as f:
            f.write("line 1: no such file: a")
        real = open

        def refusing(path, mode="r", *args, **kwargs):
            f = real(path, mode, *args, **kwargs)
            if "w" not in mode:
                return f
            handle = mock.MagicMock(wraps=f)
            handle.__enter__.return_value = f
            handle.__exit__.side_effect = lambda *_: f.close() or (_
                for _ in ()).throw(OSError(errno.EINVAL, "Invalid argument"))
            return handle

        with mock.patch("builtins.open", refusing), self.assertRaisesRegex(OSError,
                "line 1: no such file: a") as caught:
            shoal.hint([0], ["a"], self.mount)
        self.assertEqual(caught.exception.errno, errno.EINVAL)


if __name__ == "__main__":
    unittest.main()
