"""One warm epoch of decoded, augmented batches: DataLoader over ImageFolder, or the feed.

    loaders.py dataloader MOUNT BATCH KIND     loaders.py feed ADDR BATCH KIND

KIND is uint8 (no normalisation) or fp32 (ToTensor and Normalize, as most people write it). Every
batch is touched (one sum over it). Prints JSON: images, seconds, images/s. The first batch is not timed:
starting workers, or opening a session, is not what is measured.
"""
import json
import sys
import time

import torch

door, where, batch, kind = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

if door == "dataloader":
    from torchvision import datasets, transforms as T

    last = [T.PILToTensor()] if kind == "uint8" else [T.ToTensor(), T.Normalize(MEAN, STD)]
    data = datasets.ImageFolder(where, T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), *last]))
    loader = torch.utils.data.DataLoader(data, batch, shuffle=True, num_workers=2, drop_last=True)
else:
    from shoal import Feed

    tail = "uint8" if kind == "uint8" else f"fp32|Normalize({MEAN}, {STD})"
    loader = Feed(where, batch, transform=f"RandomResizedCrop(224)|RandomHorizontalFlip()|{tail}|nchw", seed=1)

images, start, checksum = 0, None, 0.0
for x, y in loader:
    if start is None:
        start = time.perf_counter()
        assert tuple(x.shape) == (batch, 3, 224, 224), x.shape
        continue
    checksum += float(x.numpy().sum())  # torch 1.13 would convert the batch first
    images += len(y)
seconds = time.perf_counter() - start
print(json.dumps({"door": door, "kind": kind, "images": images, "seconds": seconds, "images_per_s": images / seconds}))
