"""Prints an index of a tar in the format of DALI's wds2idx, v1.2, by the same means: GNU tar's block numbers."""
import subprocess
import sys


def lines(*options):
    return subprocess.run(["tar", *options, "--file", sys.argv[1]], check=True, capture_output=True).stdout.split(b"\n")


blocks, types = lines("--list", "--block-number"), lines("--list", "--verbose")
samples, last = [], None
for here, behind, verbose in zip(blocks, blocks[1:], types):
    if not here or not verbose.startswith(b"-"):
        continue
    name = here.split(b": ", 1)[1].decode()
    size = int(verbose.split()[2])
    offset = int(behind.split(b"block ", 1)[1].split(b":", 1)[0]) * 512 - size
    offset -= offset % 512
    stem, _, extension = name[name.rfind("/") + 1 :].partition(".")
    stem = name[: name.rfind("/") + 1] + stem
    if not stem or stem.endswith("/"):
        continue
    if stem != last:
        samples.append([])
        last = stem
    samples[-1].append(f"{extension} {offset} {size} {name}")
print(f"v1.2 {len(samples)}")
for sample in samples:
    print(" ".join(sample))
