"""A training job over a mount, as torch's DataLoader would read it: python3 job.py MOUNT PLAN STEP LIST...

Each LIST has the paths of an epoch, below MOUNT, in order. Four worker processes, new for each epoch, read whole batches of
16 files, at most two batches each ahead. A batch takes STEP seconds to compute. With a PLAN, the plan of each epoch is written beforehand
in .shoal/plans/PLAN. At the end it prints a line of JSON: the seconds, and the mount's GETs by the end of each epoch.
"""
import json
import os
import sys
import time

WORKERS, AHEAD, BATCH = 4, 2, 16


def work(mount, paths, tasks, done):
    """Reads the batches that tasks names, a line each, and says so."""
    for line in os.fdopen(tasks):
        at = int(line) * BATCH
        for p in paths[at : at + BATCH]:
            fd = os.open(mount + "/" + p, os.O_RDONLY)
            size = os.fstat(fd).st_size
            while size > 0:
                size -= len(os.read(fd, size)) or sys.exit(p + " is cut short")
            os.close(fd)
        os.write(done, b".")


def start(mount, paths):
    """Returns the ends of a new worker's pipes: where tasks are written, and where it says that one is done."""
    (task, tell), (hear, done) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(tell)
        os.close(hear)
        try:
            work(mount, paths, task, done)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(task)
    os.close(done)
    return tell, hear


def epoch(mount, paths, step):
    workers = [start(mount, paths) for _ in range(WORKERS)]
    batches = (len(paths) + BATCH - 1) // BATCH
    asked, end = 0, 0.0
    for k in range(batches):
        while asked < min(batches, k + WORKERS * AHEAD):
            os.write(workers[asked % WORKERS][0], b"%d\n" % asked)
            asked += 1
        if os.read(workers[k % WORKERS][1], 1) != b".":
            sys.exit("a worker has failed")
        if step:
            end = max(time.monotonic(), end) + step
            time.sleep(max(0.0, end - time.monotonic()))
    for tell, hear in workers:
        os.close(tell)
        os.close(hear)
    for _ in workers:
        if os.wait()[1] != 0:
            sys.exit("a worker has failed")


def gets(mount):
    with open(mount + "/.shoal/stats") as f:
        s = json.load(f)
    return s["get_requests"] - s["hedges"]["sent"]


def main():
    mount, plan, step = sys.argv[1], sys.argv[2], float(sys.argv[3])
    begin, counts = time.monotonic(), []
    for name in sys.argv[4:]:
        with open(name) as f:
            text = f.read()
        if plan:
            with open(mount + "/.shoal/plans/" + plan, "w") as f:
                f.write(text)
        epoch(mount, text.splitlines(), step)
        counts.append(gets(mount))
    print(json.dumps({"seconds": time.monotonic() - begin, "gets": counts}))


main()
