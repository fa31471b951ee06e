"""A trainer of TestRunAccelerate: two processes with Accelerate's samplers, which says what it read of what was
told."""

import json
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Subset, WeightedRandomSampler

from mounted import Files, plan

mount, out = sys.argv[1:]
torch.cpu.device_count, torch.cpu.set_device = lambda: 1, lambda device: None  # Debian's torch has neither

epochs = []
files = Files(mount)
for options in ({"use_seedable_sampler": True}, {}, {"split_batches": True}, {"even_batches": False}):
    config = DataLoaderConfiguration(**options)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(7)
    for made in (lambda: DataLoader(files, 6, shuffle=True),
                 lambda: DataLoader(Subset(files, range(20)), 6, shuffle=True, num_workers=1),
                 lambda: DataLoader(files, 6, sampler=WeightedRandomSampler([1.0 + i for i in range(len(files))], 30))):
        loader = accelerator.prepare(made())
        for epoch in range(2):
            read = []
            told = None
            for index, _ in loader:
                if told is None:
                    told = plan(mount, f"rank{accelerator.process_index}")
                read += [files.files[i] for i in index.tolist()]
            epochs.append([options, epoch, told, read])
        del loader
        accelerator.free_memory()
    accelerator.state._reset_state(True)
with open(f"{out}/{os.environ['RANK']}.json", "w", encoding="utf-8") as f:
    json.dump(epochs, f)
