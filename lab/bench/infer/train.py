"""An ordinary training loop's reading, one process a rank, that knows nothing of Shoal: ImageFolder, a
DistributedSampler or DataLoader(shuffle=True), DataLoader workers.

    train.py ROOT --sampler distributed|loader|generator [--seed S] [--world W --rank R] [--workers 2]
             [--batch 32] [--epochs 1] [--no-set-epoch] [--persistent] [--decode] [--step 0.05]
             [--group FILE --member I --members N]

--seed is DistributedSampler's, torch.manual_seed's (loader) or the passed generator's; without it they have
their defaults. Without --decode the dataset's loader only reads the file, for trainers that have more
cores than this machine. --step is an accelerator's: seconds that it takes for a batch. The
N members of a group (the ranks on this machine) wait for each other after each step, as those of
DistributedDataParallel do, by gloo and a FILE that is not there yet. Prints JSON, one line: samples, and the wall-clock times between which
each epoch ran, workers' start included.
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
p.add_argument("--sampler", required=True)
p.add_argument("--seed", type=int)
p.add_argument("--world", type=int, default=1)
p.add_argument("--rank", type=int, default=0)
p.add_argument("--workers", type=int, default=2)
p.add_argument("--batch", type=int, default=32)
p.add_argument("--epochs", type=int, default=1)
p.add_argument("--no-set-epoch", action="store_true")
p.add_argument("--persistent", action="store_true")
p.add_argument("--decode", action="store_true")
p.add_argument("--step", type=float, default=0)
p.add_argument("--group")
p.add_argument("--member", type=int, default=0)
p.add_argument("--members", type=int, default=1)
a = p.parse_args()
torch.set_num_threads(1)


def size(path):
    with open(path, "rb") as f:
        return len(f.read())


if a.decode:
    data = datasets.ImageFolder(a.root, T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor()]))
else:
    data = datasets.ImageFolder(a.root, loader=size)

loading = {"batch_size": a.batch, "num_workers": a.workers, "persistent_workers": a.persistent}
sampler = None
if a.sampler == "distributed":
    seed = {} if a.seed is None else {"seed": a.seed}
    sampler = DistributedSampler(data, num_replicas=a.world, rank=a.rank, shuffle=True, **seed)
    loader = DataLoader(data, sampler=sampler, **loading)
elif a.sampler == "loader":
    if a.seed is not None:
        torch.manual_seed(a.seed)
    loader = DataLoader(data, shuffle=True, **loading)
elif a.sampler == "generator":
    loader = DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(a.seed), **loading)
else:
    p.error(f"--sampler {a.sampler}")

def wait():
    if a.members > 1:
        dist.barrier()


if a.members > 1:
    dist.init_process_group("gloo", init_method="file://" + a.group, rank=a.member, world_size=a.members)

samples, begins, ends = 0, [], []
for epoch in range(a.epochs):
    if sampler is not None and not a.no_set_epoch:
        sampler.set_epoch(epoch)
    wait()
    begins.append(time.time())
    for x, y in loader:
        samples += len(y)
        time.sleep(a.step)
        wait()
    ends.append(time.time())
print(json.dumps({"samples": samples, "begins": begins, "ends": ends}))
