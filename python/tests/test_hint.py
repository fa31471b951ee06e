import errno
import os
import random
import tempfile
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


class OwnState(Sampler):
    def __init__(self, n):
        self.n, self.rng, self.torch = n, np.random.default_rng(4), torch.Generator().manual_seed(8)

    def __iter__(self):
        yield from ((self.rng.permutation(self.n) + int(torch.randint(5, (), generator=self.torch))) % self.n).tolist()

    def __len__(self):
        return self.n


def random_state(*generators):
    return (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state()[1].tolist()), np.random.get_state()[2],
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
                loader = DataLoader(Indices(self.n), batch_size=8, shuffle=True, num_workers=workers, drop_last=drop_last)
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
            RandomSampler(data, num_samples=20), SubsetRandomSampler(range(5, 40)), SubsetRandomSampler(range(5, 40), generator=g),
            WeightedRandomSampler(torch.arange(53.0), 30), OwnState(self.n), GlobalState(self.n),
        ):
            with self.subTest(type(sampler).__name__):
                own = [v for v in vars(sampler).values() if isinstance(v, torch.Generator)]
                self.check(DataLoader(data, batch_size=8, sampler=sampler), *own)
                self.check(DataLoader(data, batch_sampler=BatchSampler(sampler, 7, drop_last=True)), *own)

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

    def test_plain_iterables(self):
        self.assertEqual(shoal.predict([3, 1, 2]), [3, 1, 2])
        self.assertEqual(shoal.predict([[3, 1], [2]]), [3, 1, 2])
        self.assertEqual(shoal.predict(torch.tensor([[3, 1], [2, 0]])), [3, 1, 2, 0])
        self.assertEqual(shoal.predict(np.arange(3)), [0, 1, 2])
        with self.assertRaisesRegex(TypeError, "use it up"):
            shoal.predict(iter([1, 2]))

        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                yield 1

        with self.assertRaisesRegex(TypeError, "IterableDataset"):
            shoal.predict(DataLoader(Stream()))

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

    def test_errors(self):
        for paths, error, word in ((["/etc/passwd"], ValueError, "not below"), (["a\nb"], ValueError, "line break"),
                                   ("ab", TypeError, "list of paths"), (None, TypeError, "needs paths")):
            with self.assertRaisesRegex(error, word):
                shoal.hint([0], paths, self.mount)
        with self.assertRaisesRegex(TypeError, "mount point"):
            shoal.hint([0], ["a"])
        with tempfile.TemporaryDirectory() as other, self.assertRaisesRegex(OSError, "not a Shoal mount.*shoal mount"):
            shoal.hint([0], ["a"], other)

    def test_refused_plan(self):
        # A mount checks the plan when the file is closed, and says why in .shoal/order.
        with open(os.path.join(self.mount, ".shoal", "order"), "w", encoding="utf-8") as f:
            f.write("line 1: no such file: a")
        real = open

        def refusing(path, mode="r", **kwargs):
            f = real(path, mode, **kwargs)
            if mode != "w":
                return f
            handle = mock.MagicMock(wraps=f)
            handle.__enter__.return_value = f
            handle.__exit__.side_effect = lambda *_: f.close() or (_ for _ in ()).throw(OSError(errno.EINVAL, "Invalid argument"))
            return handle

        with mock.patch("builtins.open", refusing), self.assertRaisesRegex(OSError, "line 1: no such file: a") as caught:
            shoal.hint([0], ["a"], self.mount)
        self.assertEqual(caught.exception.errno, errno.EINVAL)


if __name__ == "__main__":
    unittest.main()
