"""A trainer of TestRunAccelerate: the loaders of timm and Ultralytics, with one iterator for all epochs, say what they read of what was told."""

import json
import os
import sys

from timm.data.loader import MultiEpochsDataLoader
from torch.utils.data import Dataset
from ultralytics.data.build import InfiniteDataLoader

mount, out = sys.argv[1:]


class Files(Dataset):
    def __init__(self):
        self.files = sorted(os.path.join(at, name) for at, _, names in os.walk(mount) for name in names if name.endswith(".jpg"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        with open(self.files[i], "rb") as f:
            return i, len(f.read())


def plan():
    (name,) = os.listdir(os.path.join(mount, ".shoal/plans"))
    with open(os.path.join(mount, ".shoal/plans", name), encoding="utf-8") as f:
        return [os.path.join(mount, line) for line in f.read().splitlines()]


epochs = []
files = Files()
for cls in (MultiEpochsDataLoader, InfiniteDataLoader):
    for workers in (0, 1, 3):
        loader = cls(files, batch_size=6, shuffle=True, num_workers=workers)
        for epoch in range(3):
            told, read = None, []
            for index, _ in loader:
                told = told or plan()
                read += [files.files[i] for i in index.tolist()]
            epochs.append([f"{cls.__name__}, {workers} workers", epoch, told, read])
        del loader
with open(f"{out}/{os.environ['RANK']}.json", "w", encoding="utf-8") as f:
    json.dump(epochs, f)
