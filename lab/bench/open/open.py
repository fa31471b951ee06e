"""Reads a list of files of a mount into Python, by open and by shoal.open in turns: prints files/s of each as JSON.

MOUNT LIST WORKERS ROUNDS: 0 workers is a loop in this process; others are those of a torch DataLoader.
"""

import builtins
import json
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../python"))
import shoal  # noqa: E402

mount, listing, workers, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with builtins.open(listing, encoding="utf-8") as f:
    paths = [f"{mount}/{line}" for line in f.read().splitlines()]
ways = {"open": lambda p: builtins.open(p, "rb"), "shoal.open": shoal.open}


def read(way, paths):
    n = 0
    for p in paths:
        with way(p) as f:
            n += len(f.read())
    return n


if workers:
    from torch.utils.data import DataLoader

    class Files:
        def __init__(self, way):
            self.way = way

        def __len__(self):
            return len(paths)

        def __getitem__(self, i):
            with self.way(paths[i]) as f:
                return len(f.read())

    loaders = {name: DataLoader(Files(way), 64, num_workers=workers, persistent_workers=True) for name, way in ways.items()}
    run = {name: lambda name=name: sum(int(batch.sum()) for batch in loaders[name]) for name in ways}
else:
    run = {name: lambda way=way: read(way, paths) for name, way in ways.items()}

rates = {name: [] for name in ways}
sizes = set()
for k in range(rounds + 2):  # the first two verify what is on disk, and learn its places
    for name in list(ways)[:: 1 if k % 2 else -1]:
        begun = time.perf_counter()
        sizes.add(run[name]())
        if k > 1:
            rates[name].append(round(len(paths) / (time.perf_counter() - begun)))
assert len(sizes) == 1
print(json.dumps(rates))
