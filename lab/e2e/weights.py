"""Makes a model of random tensors in sharded .safetensors files, and reads it as servers of models do.

    weights.py make DIR BYTES
    weights.py WAY ROOT RANK RANKS    # ROOT: a folder, or s3://bucket/prefix

A process reads the tensors (of plain reads: the pieces) RANK, RANK + RANKS, ... Prints JSON: the seconds, the bytes,
and the sum of all as little-endian words, modulo 2**64.
"""

import json
import sys
import time

import numpy as np

SHARDS, TENSOR = 4, 4 << 20


def make(root, size):
    from safetensors.numpy import save_file

    rng, where = np.random.default_rng(1), {}
    for s in range(SHARDS):
        name = f"model-{s + 1:05d}-of-{SHARDS:05d}.safetensors"
        tensors = {f"layers.{s}.{i}.weight": np.frombuffer(rng.bytes(TENSOR), np.int16).reshape(-1, 1024)
                   for i in range(size // SHARDS // TENSOR)}
        save_file(tensors, f"{root}/{name}")
        where |= dict.fromkeys(tensors, name)
    with open(f"{root}/model.safetensors.index.json", "w") as f:
        json.dump({"metadata": {"total_size": size}, "weight_map": where}, f)


def names(root):
    return [f"{root}/model-{s + 1:05d}-of-{SHARDS:05d}.safetensors" for s in range(SHARDS)]


def mapped(root, mine):
    """safe_open, which maps the file, and copies each tensor out of it."""
    from safetensors import safe_open

    for name in names(root):
        with safe_open(name, framework="np") as f:
            for i, key in enumerate(sorted(f.keys())):
                if mine(i):
                    yield f.get_tensor(key)


def pieces(file, mine):
    head = int.from_bytes(file.read(8), "little")
    at, i = 8 + head, 0
    while True:
        if mine(i):
            file.seek(at)
            piece = np.empty(TENSOR, np.uint8)
            if not file.readinto(piece):
                return
            yield piece
        elif file.seek(0, 2) <= at:
            return
        at, i = at + TENSOR, i + 1


def plain(root, mine):
    for name in names(root):
        with open(name, "rb") as f:
            yield from pieces(f, mine)


def opened(root, mine):
    import shoal

    for name in names(root):
        with shoal.open(name) as f:
            yield from pieces(f, mine)


def streamed(root, mine):
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as s:
        s.stream_files(names(root))
        for i, (_, tensor) in enumerate(s.get_tensors()):
            if mine(i):
                yield tensor.numpy()


def fast(root, mine):
    from fastsafetensors import fastsafe_open

    with fastsafe_open(names(root), nogds=True, device="cpu", framework="pt") as f:
        for i, key in enumerate(f.keys()):
            if mine(i):
                yield f.get_tensor(key).numpy()


WAYS = {"mmap": mapped, "plain": plain, "shoal.open": opened, "streamer": streamed, "fastsafetensors": fast}


def read(way, root, rank, ranks):
    if way in ("streamer", "fastsafetensors"):
        import torch  # takes seconds, once
    start, total, size = time.monotonic(), 0, 0
    for values in WAYS[way](root, lambda i: i % ranks == rank):
        words = values.reshape(-1).view(np.uint64)
        total, size = (total + int(words.sum(dtype=np.uint64))) % 2**64, size + words.nbytes
    print(json.dumps({"seconds": time.monotonic() - start, "bytes": size, "sum": total}))


if sys.argv[1] == "make":
    make(sys.argv[2], int(sys.argv[3]))
else:
    read(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
