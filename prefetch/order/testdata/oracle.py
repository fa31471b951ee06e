"""What the installed torch computes. Reads a JSON list of cases on stdin, writes the answers."""

import hashlib
import json
import sys

import numpy
import torch
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler


def distributed(c):
    ranks = []
    for rank in range(c["first"], c["last"] + 1):
        s = DistributedSampler(range(c["n"]), num_replicas=c["world"], rank=rank, shuffle=True,
                               seed=c["seed"], drop_last=c["drop_last"])
        s.set_epoch(c["epoch"])
        ranks.append(list(s))
    return [sample for step in zip(*ranks) for sample in step]


def words(c):
    """random() and random64(): random_ of a small range takes one word (up to 2^28 in torch 2, 2^32 before), the full
    range two."""
    g = torch.Generator()
    g.manual_seed(c["seed"])
    out = []
    for _ in range(c["n"]):
        out.append(int(torch.empty((), dtype=torch.int64).random_(0, 2**20, generator=g)))
        out.append(int(torch.empty((), dtype=torch.int64).random_(generator=g)))
    return out


def loader(c):
    torch.manual_seed(c["seed"])
    dl = DataLoader(range(c["n"]), batch_size=7, shuffle=True, num_workers=c["workers"],
                    persistent_workers=c["workers"] > 0)
    epochs = []
    for _ in range(c["epochs"]):
        it = iter(dl)
        epochs.append({"base": it._base_seed, "samples": [int(x) for b in it for x in b]})
    return epochs


def dataloader(c):
    """Successive epochs of a DataLoader(shuffle=True), or of one with a RandomSampler."""
    generator = None
    if c["from"] == "generator":
        generator = torch.Generator()
        generator.manual_seed(int(c["seed"]))
    else:
        torch.manual_seed(int(c["seed"]))
    data, how = range(c["n"]), {"shuffle": True}
    if c["samples"] or c["replacement"]:
        how = {"sampler": RandomSampler(data, c["replacement"], c["samples"] or None, generator)}
    dl = DataLoader(data, batch_size=c["batch"], generator=generator, num_workers=c["workers"],
                    persistent_workers=c["persistent"], drop_last=False, **how)
    return [[int(x) for b in dl for x in b] for _ in range(c["epochs"])]


def privately(c):
    """A sampler with a generator that nothing else draws from, as torchdata's StatefulDataLoader has it
    up to version 0.10."""
    generator = torch.Generator()
    generator.manual_seed(int(c["seed"]))
    sampler = RandomSampler(range(c["n"]), generator=generator)
    return [list(sampler) for _ in range(c["epochs"])]


def permutation(c):
    """The SHA-256 of torch.randperm as 32-bit numbers, and what the generator draws next."""
    generator = torch.Generator()
    generator.manual_seed(int(c["seed"]))
    perm = torch.randperm(c["n"], generator=generator).numpy().astype("<u4")
    after = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    return {"sha256": hashlib.sha256(perm.tobytes()).hexdigest(), "after": after}


def wide(c):
    """The inside-out shuffle of current torch, from its definition, on numpy's Mersenne Twister."""
    raw = numpy.random.RandomState(c["seed"]).bytes(8 * c["n"])
    word = [int(w) for w in numpy.frombuffer(raw, dtype="<u4")]
    r = []
    for i in range(c["n"]):
        z = (word[2 * i] * 2**32 + word[2 * i + 1]) % (i + 1)
        r.append(i)
        r[i] = r[z]
        r[z] = i
    return r


if __name__ == "__main__":
    kinds = {f.__name__: f for f in (distributed, words, loader, dataloader, privately, permutation, wide)}
    json.dump([kinds[c["kind"]](c) for c in json.load(sys.stdin)], sys.stdout)
