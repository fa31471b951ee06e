"""The pictures of a mount as a dataset, and what the mount was told of their order, for the trainers of
TestRunAccelerate and TestRunTrainers."""

import os

from torch.utils.data import Dataset


class Files(Dataset):
    def __init__(self, mount):
        self.files = sorted(os.path.join(at, name) for at, _, names in os.walk(mount)
                            for name in names if name.endswith(".jpg"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        with open(self.files[i], "rb") as f:
            return i, len(f.read())


def plan(mount, name):
    with open(os.path.join(mount, ".shoal/plans", name), encoding="utf-8") as f:
        return [os.path.join(mount, line) for line in f.read().splitlines()]
