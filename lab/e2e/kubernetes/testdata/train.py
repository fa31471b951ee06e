"""A trainer: reads every file below --data, or an epoch of --feed, and prints what it has read, a line of JSON each.

With --half it waits in mid-epoch until the file /tmp/go is there. With --readers so many threads read everything again
and again, past the page cache, until the file /tmp/stop is there; each content that a file had is a line.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time

p = argparse.ArgumentParser()
p.add_argument("--data")
p.add_argument("--feed")
p.add_argument("--world", type=int, default=1)
p.add_argument("--half", type=int)
p.add_argument("--readers", type=int)
p.add_argument("--ca")
p.add_argument("--stop", action="store_true")
args = p.parse_args()
rank = int(os.environ.get("JOB_COMPLETION_INDEX", 0)) % args.world
count = 0


def read(name, content, took=0):
    global count
    print(json.dumps({"name": name, "sha": hashlib.sha256(content).hexdigest(), "took": took}), flush=True)
    count += 1
    if count == args.half:
        print(json.dumps({"half": count}), flush=True)
        while not os.path.exists("/tmp/go"):
            time.sleep(0.05)


def again(path):
    """The file's content. While the sidecar is started again, files are missing or fail: a trainer tries again."""
    end = time.monotonic() + 120
    while True:
        try:
            with open(path, "rb") as f:
                return f.read()
        except OSError as e:
            if not args.half or time.monotonic() > end:
                raise
            print(json.dumps({"error": str(e)}), flush=True)
            time.sleep(0.5)


def endless(paths):
    global count, slowest
    while not os.path.exists("/tmp/stop"):
        for path in paths:
            begun = time.monotonic()
            try:
                with open(os.path.join(args.data, path), "rb") as f:
                    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    seen.add((path, hashlib.sha256(f.read()).hexdigest()))
            except OSError as e:
                print(json.dumps({"error": str(e)}), flush=True)
            slowest, count = max(slowest, time.monotonic() - begun), count + 1
            time.sleep(0.01)  # the other processes of the cluster are on the same two cores
        print(json.dumps({"half": count}), flush=True)


if args.data:
    paths = sorted(os.path.relpath(os.path.join(d, f), args.data) for d, _, files in os.walk(args.data) for f in files)
    if not paths:
        sys.exit(f"there are no files in {args.data}")
if args.readers:
    seen, slowest = set(), 0.0
    threads = [threading.Thread(target=endless, args=(paths,)) for _ in range(args.readers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for path, sha in sorted(seen):
        print(json.dumps({"name": path, "sha": sha, "took": slowest}), flush=True)
elif args.data:
    for path in paths[rank::args.world]:
        begun = time.monotonic()
        content = again(os.path.join(args.data, path))
        read(path, content, time.monotonic() - begun)
if args.feed:
    from shoal import Feed

    feed = Feed(args.feed, 8 * args.world, order="torch:seed=3", seed=3, epochs=1, world=args.world, rank=rank,
                tail="pad",
                reconnect=120, as_torch=False, ca=args.ca, token=os.environ.get("TOKEN"))
    for batch in feed:
        for i, data, valid in zip(batch.id, batch.data, batch.valid):
            if valid:
                read(int(i), data.tobytes())
print(json.dumps({"done": count}), flush=True)
if args.stop:
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/cmdline", "rb") as f:
                if f.read().startswith(b"/usr/bin/shoal\0serve\0"):
                    os.kill(int(process), signal.SIGTERM)
        except OSError:  # of a probe, which has ended
            pass
