"""Plain PyTorch over a mounted bucket: ImageFolder, DataLoader, and one line of Shoal.

    shoal mount s3://photos/train /mnt/train --cache-dir /nvme/shoal --daemon
    python3 torch_mount.py /mnt/train

The trainer runs unchanged without that line, on the mount or on any folder; with it the mount knows each epoch's order
before the first file is opened.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import shoal


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", help="the mount point, or a folder in it")
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--plain", action="store_true", help="tell the mount nothing, as on a folder that is none")
    args = p.parse_args()

    torch.manual_seed(args.seed)
    data = datasets.ImageFolder(args.folder, transforms.Compose([
        transforms.RandomResizedCrop(64, scale=(0.5, 1)), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]))
    loader = DataLoader(data, batch_size=args.batch, shuffle=True, num_workers=args.workers)
    model = nn.Sequential(nn.Conv2d(3, 16, 7, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 15 * 15, len(data.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)

    for epoch in range(args.epochs):
        if not args.plain:
            shoal.hint(loader)  # does not change any random state: the shuffle is the same with and without it
        samples, total = 0, 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            samples += len(labels)
            total += loss.item() * len(labels)
        print(f"epoch {epoch}: {samples} samples, loss {total / samples:.4f}")


if __name__ == "__main__":
    main()
