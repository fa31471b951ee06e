"""A trainer of TestRunAccelerate: the loaders of timm and Ultralytics, with one iterator for all epochs, say what they
read of what was told."""

import json
import os
import sys

from timm.data.loader import MultiEpochsDataLoader
from ultralytics.data.build import InfiniteDataLoader

from mounted import Files, plan

mount, out = sys.argv[1:]

epochs = []
files = Files(mount)
for cls in (MultiEpochsDataLoader, InfiniteDataLoader):
    for workers in (0, 1, 3):
        loader = cls(files, batch_size=6, shuffle=True, num_workers=workers)
        for epoch in range(3):
            told, read = None, []
            for index, _ in loader:
                told = told or plan(mount, *os.listdir(os.path.join(mount, ".shoal/plans")))
                read += [files.files[i] for i in index.tolist()]
            epochs.append([f"{cls.__name__}, {workers} workers", epoch, told, read])
        del loader
with open(f"{out}/{os.environ['RANK']}.json", "w", encoding="utf-8") as f:
    json.dump(epochs, f)
