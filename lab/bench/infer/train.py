"""One epoch of an ordinary training loop's reading, one process a rank, that knows nothing of Shoal: ImageFolder,
DistributedSampler, DataLoader workers.

    train.py ROOT [--world W --rank R --group FILE] [--workers 2] [--batch 32] [--decode] [--step 0.05]

Without --decode the dataset's loader only reads the file, for trainers that have more
cores than this machine. --step is an accelerator's: seconds that it takes for a batch. The
ranks wait for each other after each step, as those of DistributedDataParallel do, by gloo and a FILE that is not
there yet. Prints JSON, one line: samples, and the wall-clock times between which the epoch ran, workers' start included.
"""
import argparse
import json
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms as T

p = argparse.ArgumentParser()
p.add_argument("root")
p.add_argument("--world", type=int, default=1)
p.add_argument("--rank", type=int, default=0)
p.add_argument("--group")
p.add_argument("--workers", type=int, default=2)
p.add_argument("--batch", type=int, default=32)
p.add_argument("--decode", action="store_true")
p.add_argument("--step", type=float, default=0)
a = p.parse_args()
torch.set_num_threads(1)


def size(path):
    with open(path, "rb") as f:
        return len(f.read())


if a.decode:
    data = datasets.ImageFolder(a.root, T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor()]))
else:
    data = datasets.ImageFolder(a.root, loader=size)
sampler = DistributedSampler(data, num_replicas=a.world, rank=a.rank, shuffle=True)
loader = DataLoader(data, sampler=sampler, batch_size=a.batch, num_workers=a.workers)


def wait():
    if a.world > 1:
        dist.barrier()


if a.world > 1:
    dist.init_process_group("gloo", init_method="file://" + a.group, rank=a.rank, world_size=a.world)

samples = 0
sampler.set_epoch(0)
wait()
begin = time.time()
for x, y in loader:
    samples += len(y)
    time.sleep(a.step)
    wait()
print(json.dumps({"samples": samples, "begin": begin, "end": time.time()}))
