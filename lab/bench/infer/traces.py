"""Reads files in an order that is none of torch's, by several processes that take whole batches in turn, as
DataLoader's workers do.

    traces.py ROOT LIST KIND SEED WORKERS BATCH READS

LIST holds the paths below ROOT in ImageFolder's order. Of the order of KIND the first READS are read.
"""
import os
import random
import sys

root, listed, kind, seed, workers, batch, reads = sys.argv[1:4] + [int(a) for a in sys.argv[4:]]
with open(listed) as f:
    paths = f.read().splitlines()
n = len(paths)
order = list(range(n))
draw = random.SystemRandom()

if kind == "random":
    draw.shuffle(order)
elif kind == "random with replacement":
    order = draw.choices(order, k=n)
elif kind == "sequential":
    pass
elif kind == "validation":  # sequential, but for some that the trainer leaves out
    order = [i for i in order if draw.random() < 0.9]
elif kind == "python shuffle":
    random.Random(seed).shuffle(order)
elif kind == "numpy permutation":  # the same generator as torch's, seeded the same way, but other draws
    import numpy

    order = [int(i) for i in numpy.random.RandomState(seed).permutation(n)]
elif kind == "shuffled classes":
    classes = {}
    for i in order:
        classes.setdefault(paths[i].split("/")[0], []).append(i)
    names = list(classes)
    draw.shuffle(names)
    order = [i for name in names for i in classes[name]]
else:
    sys.exit(f"traces.py: unknown kind {kind}")
order = order[:reads]

children = []
for w in range(workers):
    pid = os.fork()
    if pid == 0:
        for first in range(w * batch, len(order), workers * batch):
            for i in order[first : first + batch]:
                with open(os.path.join(root, paths[i]), "rb") as f:
                    f.read()
        os._exit(0)
    children.append(pid)
failed = [pid for pid in children if os.waitpid(pid, 0)[1] != 0]
sys.exit(f"traces.py: {len(failed)} readers failed" if failed else 0)
