"""Reads the ranges of a plan, in order, of a file of a mount, and compares them: FILE ORIGINAL PLAN pread|mmap. Says
how many waited."""
import mmap
import os
import sys
import time

path, original, plan, how = sys.argv[1:]
with open(path, "rb", buffering=0) as f, open(original, "rb") as want, open(plan) as lines:
    view = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) if how == "mmap" else None
    waited = 0
    for line in lines:
        if line.startswith("#"):
            continue
        _, off, n = line.rsplit("\t", 2)
        off, n = int(off), int(n)
        began = time.monotonic()
        got = view[off:off + n] if view else os.pread(f.fileno(), n, off)
        waited += time.monotonic() - began > 0.025
        want.seek(off)
        if got != want.read(n):
            sys.exit(f"other bytes at {off}")
    print(waited)
