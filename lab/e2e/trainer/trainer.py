"""The trainer of trainer_test.go with the Python client: the same job, points, commit file and exit codes."""

import hashlib
import itertools
import json
import os
import sys

from shoal import Feed, FeedError

job = json.loads(sys.argv[1])
passed, done = {}, dict(steps=[], state="", done=False)


def at(point):
    passed[point] = passed.get(point, 0) + 1
    if point == job["point"] and passed[point] == job["nth"]:
        print("at", point, flush=True)
        if not sys.stdin.readline():
            sys.exit(1)


def commit():
    text = json.dumps(done)
    with open(job["commit"] + ".new", "w") as f:
        f.write(text[:len(text) // 2])
        at("written half")
        f.write(text[len(text) // 2:])
        at("written")
        f.flush()
        os.fsync(f.fileno())
    at("synced")
    os.rename(job["commit"] + ".new", job["commit"])
    at("committed")
    folder = os.open(os.path.dirname(job["commit"]), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def batches(feed):
    """The rest of an epoch."""
    iterator = iter(feed)
    while True:
        at("next")
        batch = next(iterator, None)
        if batch is None:
            return
        at("batch")
        yield batch, feed.state_dict()


def rows(batch):
    return [dict(id=int(i), len=d.nbytes, sha=hashlib.sha256(d.tobytes()).hexdigest())
            for i, d, valid in zip(batch.id, batch.data, batch.valid) if valid]


def train():
    state = json.loads(job["state"]) if job["state"] else None
    first = state["epoch"] if state else 0
    if first < job["epochs"]:
        at("open")
        feeds = []
        for rank in job["ranks"]:
            feed = Feed(job["addr"], job["batch"], transform=job["transform"] or None, order=job["order"],
                        seed=job["seed"],
                        epochs=job["epochs"] - first, world=job["world"], rank=rank, tail=job["tail"], bad=job["bad"],
                        session=job["session"], credits=job["credits"], as_torch=False)
            if state:
                feed.load_state_dict(state)
            feeds.append(feed)
            at("opened")
        for epoch in range(first, job["epochs"]):
            for step in itertools.zip_longest(*map(batches, feeds)):
                have = [(rank, got) for rank, got in zip(job["ranks"], step) if got]
                batch, after = have[0][1]
                if done["steps"] and done["steps"][-1]["epoch"] != epoch:
                    at("epoch")
                done["state"] = json.dumps(after)
                done["steps"].append(dict(epoch=batch.epoch, index=batch.index, state=done["state"],
                                          ranks={rank: rows(got[0]) for rank, got in have}))
                at("step")
                if len(done["steps"]) % job["every"] == 0:
                    commit()
            done["state"] = json.dumps(feeds[0].state_dict())  # the next epoch's beginning
    done["done"] = True
    commit()


try:
    train()
except FeedError as e:
    print(e, e.code, file=sys.stderr)
    sys.exit({"UNAVAILABLE": 3, "ABORTED": 4}.get(e.code, 1))
