"""A dataset of Parquet of fineweb's shape, and readers of its text, for TestParquetBeside.

    parquetbeside.py write DIR FILES GROUPS   FILES files of GROUPS groups of 1,000 rows, some 3 KB of text each
    parquetbeside.py datasets S3-PREFIX WORKERS
    parquetbeside.py shoal ADDRESS 0

A reader prints rows, characters, the seconds until it had the first batch of 256, and all seconds.
"""

import multiprocessing
import os
import sys
import time

BATCH = 256


def write(folder, files, groups):
    import numpy
    import pyarrow
    import pyarrow.parquet

    rng = numpy.random.default_rng(1)
    words = numpy.array(["".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(2, 10))) for _ in range(30_000)])
    for f in range(int(files)):
        out = None
        for g in range(int(groups)):
            texts = [" ".join(words[(rng.zipf(1.2, n) - 1) % len(words)]) for n in rng.integers(100, 900, 1000)]
            first = (f * int(groups) + g) * 1000
            table = pyarrow.table({
                "text": texts, "id": [f"<urn:uuid:{first + i:032x}>" for i in range(1000)],
                "url": [f"https://example.org/{first + i}" for i in range(1000)],
                "date": ["2026-01-01T00:00:00Z"] * 1000, "language": ["en"] * 1000, "language_score": rng.random(1000),
                "token_count": [len(t.split()) for t in texts]})
            out = out or pyarrow.parquet.ParquetWriter(f"{folder}/{f:05d}.parquet", table.schema, compression="snappy")
            out.write_table(table, row_group_size=1000)
        out.close()


def shoal(address, _):
    from shoal import Feed

    began = time.monotonic()
    rows = size = first = 0
    for batch in Feed(address, BATCH, order="uniform", seed=1, epochs=1, tail="uneven"):
        texts = [bytes(row).decode() for row in batch.data]
        rows, size = rows + len(texts), size + sum(map(len, texts))
        first = first or time.monotonic() - began
    return rows, size, first


def part(address, rank, workers, results):
    import datasets
    from datasets.distributed import split_dataset_by_node

    began = time.monotonic()
    options = {"key": os.environ["AWS_ACCESS_KEY_ID"], "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
               "client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"],
                                 "region_name": os.environ.get("AWS_REGION", "us-east-1")}}
    stream = datasets.load_dataset("parquet", data_files=f"{address}/*.parquet", split="train", streaming=True,
                                   columns=["text"], storage_options=options)
    stream = split_dataset_by_node(stream.shuffle(seed=1, buffer_size=10_000), rank, workers)
    rows = size = first = 0
    for batch in stream.iter(BATCH):
        rows, size = rows + len(batch["text"]), size + sum(map(len, batch["text"]))
        first = first or time.monotonic() - began
    results.put((rows, size, first))


def others(address, workers):
    results = multiprocessing.Queue()
    all = [multiprocessing.Process(target=part, args=(address, i, int(workers), results)) for i in range(int(workers))]
    for p in all:
        p.start()
    got = [results.get() for _ in all]
    for p in all:
        p.join()
    return sum(g[0] for g in got), sum(g[1] for g in got), min(g[2] for g in got)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(*sys.argv[2:])
    else:
        begun = time.monotonic()
        seen = {"shoal": shoal, "datasets": others}[sys.argv[1]](*sys.argv[2:])
        print(*seen, time.monotonic() - begun)
