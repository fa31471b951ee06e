"""A trainer as most people write it: ImageFolder, DataLoader, DistributedSampler.

It knows nothing of Shoal. It reads files from a folder, and the folder happens to be a mount.
"""

import argparse

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

from model import Trainer
from record import Recorder, fail


def main():
    p = argparse.ArgumentParser()
    p.add_argument("folder")
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--epoch", type=int, default=0)
    p.add_argument("--steps", type=int, default=None)
    args = p.parse_args()

    record = Recorder()
    dataset = datasets.ImageFolder(args.folder, transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]))
    if len(dataset) == 0:
        fail(f"{args.folder}: no images")
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)
    trainer = Trainer(len(dataset.classes), args.seed)

    sampler.set_epoch(args.epoch)
    for images, labels in record.steps(loader, args.steps, lambda b: len(b[1]),
                                       total=len(loader), classes=len(dataset.classes)):
        record.loss = trainer.step(images, labels)
    record.end()


if __name__ == "__main__":
    # Matters where the data path is the point: workers must not fight over the cores.
    torch.set_num_threads(1)
    main()
