"""What the installed torch computes. Reads a JSON list of cases on stdin, writes the answers."""

import json
import sys

import numpy
import torch
from torch.utils.data import DataLoader
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
    """random() and random64(): random_ of a range below 2^32 takes one word, the full range two."""
    g = torch.Generator()
    g.manual_seed(c["seed"])
    out = []
    for _ in range(c["n"]):
        out.append(int(torch.empty((), dtype=torch.int64).random_(0, 2**31, generator=g)))
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
    kinds = {f.__name__: f for f in (distributed, words, loader, wide)}
    json.dump([kinds[c["kind"]](c) for c in json.load(sys.stdin)], sys.stdout)
