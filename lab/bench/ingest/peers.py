"""What `go run ./lab/bench ingest` compares with, one role a process. Prints one line of JSON.

    peers.py codec NAME DIR SECONDS        one core: read, decode, RandomResizedCrop(224), flip; CPU seconds an image
    peers.py loader NAME WHERE BATCH N     batches of a whole loader into this process until N images have come

Every batch that arrives is read once (a sum over its bytes), whoever made it.
"""

import json
import os
import pathlib
import random
import sys
import time

import numpy as np

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def files(where):
    return sorted(str(p) for p in pathlib.Path(where).rglob("*.jpg"))


def box(h, w):
    """RandomResizedCrop's box, with its defaults."""
    for _ in range(10):
        area = h * w * random.uniform(0.08, 1.0)
        ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        bw, bh = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < bw <= w and 0 < bh <= h:
            return random.randint(0, h - bh), random.randint(0, w - bw), bh, bw
    side = min(h, w)
    return (h - side) // 2, (w - side) // 2, side, side


def simplejpeg_cv2():
    import cv2
    import simplejpeg

    cv2.setNumThreads(1)

    def one(path):
        with open(path, "rb") as f:
            image = simplejpeg.decode_jpeg(f.read())
        y, x, h, w = box(*image.shape[:2])
        image = cv2.resize(image[y:y + h, x:x + w], (224, 224), interpolation=cv2.INTER_LINEAR)
        return np.ascontiguousarray(image[:, ::-1]) if random.random() < 0.5 else image

    return one


def torchvision_uint8():
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    ops = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()])
    return lambda path: ops(decode_jpeg(read_file(path), mode=ImageReadMode.RGB))


def pil(last):
    import torch
    from PIL import Image
    from torchvision import transforms as T

    torch.set_num_threads(1)
    ops = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), *last(T)])

    def one(path):
        with Image.open(path) as image:
            return ops(image.convert("RGB"))

    return one


SAMPLES = {
    "torchvision-uint8": torchvision_uint8,
    "pil-uint8": lambda: pil(lambda T: [T.PILToTensor()]),
    "pil-fp32": lambda: pil(lambda T: [T.ToTensor(), T.Normalize(MEAN, STD)]),
    "simplejpeg-cv2": simplejpeg_cv2,
}


def codec(name, where, seconds):
    paths, one = files(where), SAMPLES[name]()
    for p in paths[:32]:
        one(p)
    n, cpu, end = 0, time.process_time(), time.perf_counter() + float(seconds)
    while time.perf_counter() < end:
        for _ in range(16):
            one(paths[n % len(paths)])
            n += 1
    return {"images": n, "per_s": n / (time.process_time() - cpu)}


def datasets(name, where):
    import torch

    torch.set_num_threads(1)
    if name.startswith("pil"):
        from torchvision import datasets as D, transforms as T

        last = [T.ToTensor(), T.Normalize(MEAN, STD)] if name == "pil-fp32" else [T.PILToTensor()]
        return D.ImageFolder(where, T.Compose([T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip(), *last]))

    paths, one = files(where), torchvision_uint8()
    classes = {c: i for i, c in enumerate(sorted({os.path.dirname(p) for p in paths}))}

    class Files(torch.utils.data.Dataset):
        def __len__(self):
            return len(paths)

        def __getitem__(self, i):
            return one(paths[i]), classes[os.path.dirname(paths[i])]

    return Files()


SIZE = 224


def batches(name, where, batch):
    """Endless batches of (images, labels), an epoch after another; the epochs' ends are None."""
    if name.startswith("feed"):
        from shoal import Feed

        words = "uint8" if name == "feed-uint8" else f"fp32|Normalize({MEAN}, {STD})"
        feed = Feed(where, batch, transform=f"RandomResizedCrop({SIZE})|RandomHorizontalFlip()|{words}|nchw", seed=1,
                    as_torch=False)
        while True:
            yield from feed
            yield None
    elif name == "grain":
        import grain.python as grain

        paths, one = files(where), simplejpeg_cv2()
        epoch = 0
        while True:
            data = (grain.MapDataset.source(paths).shuffle(seed=epoch).map(lambda p: (one(p), 0))
                    .batch(batch, drop_remainder=True).to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)))
            yield from data
            epoch += 1
            yield None
    else:
        import torch

        loader = torch.utils.data.DataLoader(datasets(name, where), batch, shuffle=True, num_workers=2, drop_last=True)
        while True:
            yield from loader
            yield None


def read(images):
    """Reads every byte."""
    array = images if isinstance(images, np.ndarray) else images.numpy()
    return int(array.reshape(-1).view(np.uint64).sum(dtype=np.uint64))


def loader(name, where, batch, n):
    batch, n = int(batch), int(n)
    done, start, checksum = 0, None, 0
    for item in batches(name, where, batch):
        if item is None:
            continue
        images, labels = item
        checksum ^= read(images)
        if start is None:  # starting workers, or opening a session, is not what is measured
            start = time.perf_counter()
            continue
        done += len(labels)
        if done >= n:
            break
    return {"images": done, "per_s": done / (time.perf_counter() - start)}


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    print(json.dumps({"codec": codec, "loader": loader}[role](*rest)), flush=True)
    os._exit(0)  # some peers' threads do not end by themselves
