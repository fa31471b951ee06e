"""The reader of one arm, in Python (see main.go): reader.py BATCHES TARGET.

TARGET is ring, small (a ring in pages of 4 KiB), or ADDR,slots or ADDR,chunks. Every byte is summed by numpy. Prints JSON: bytes, seconds, cpu (seconds of
processor time of this process), inSlots.
"""
import json
import mmap
import sys
import time

import numpy as np

batches, target = int(sys.argv[1]), sys.argv[2]
ROWS, CREDITS, SLOTS = 256, 3, 5
SIZE = ROWS * 3 * 224 * 224


def total(array):
    return int(array.reshape(-1).view(np.uint64).sum())


if target in ("ring", "small"):
    memory = np.arange(SLOTS * SIZE // 8, dtype=np.uint64).view(np.uint8)
    if target == "small":
        pages = mmap.mmap(-1, SLOTS * SIZE)
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        pages[:] = memory.tobytes()
        memory = np.frombuffer(pages, np.uint8)
    ring = [memory[k * SIZE:(k + 1) * SIZE] for k in range(SLOTS)]
    arrays = (ring[k % SLOTS] for k in range(batches + 2 * SLOTS))
    feed = None
else:
    from shoal import Feed

    addr, transport = target.split(",")
    feed = Feed(addr, ROWS, transform="picture", credits=CREDITS, slots=SLOTS if transport == "slots" else 0, as_torch=False)
    arrays = (batch.data for batch in feed)

seen = checksum = 0
for array in arrays:
    checksum = (checksum + total(array)) % 2**64
    seen += 1
    if seen == 2 * SLOTS:
        start, used = time.perf_counter(), time.process_time()
    if seen == 2 * SLOTS + batches:
        break
seconds, cpu = time.perf_counter() - start, time.process_time() - used
in_slots = feed is not None and feed.stats()["slots"] > 0
print(json.dumps({"bytes": batches * SIZE, "seconds": seconds, "cpu": cpu, "inSlots": in_slots, "sum": checksum}))
