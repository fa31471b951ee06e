"""Makes large files as their libraries do, and reads them as trainers do.

    readers.py make DIR
    readers.py CASE ROOT

ROOT is what holds the case's files: a folder, or s3://bucket/prefix, which the library's own client reads. Prints JSON:
the seconds, the bytes that the values take where they lie, and a digest of the values.
"""

import hashlib
import json
import os
import struct
import sys
import time

import h5py
import lance
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq
import s3fs
import zarr

DOCUMENTS = {"uint16": 120_000, "int32": 60_000}  # of 256 to 2,000 tokens: 270 MB each
GROUP, GROUPS, FILES = 8192, 8, 4  # rows of a row group, row groups of a file
IMAGES, IMAGE = 6000, (128, 128, 3)
ROWS, ROW = 32768, 8192  # rows of the Lance dataset, bytes of one's image
READS = 300


def make(root):
    rng = np.random.default_rng(1)
    for name in "tokens", "parquet":
        os.makedirs(f"{root}/{name}")
    for name, n in DOCUMENTS.items():
        make_tokens(f"{root}/tokens/{name}", rng, np.dtype(name), n)
    for i in range(FILES):
        with pq.ParquetWriter(f"{root}/parquet/{i}.parquet", table(rng, 0, 1).schema) as w:
            for g in range(GROUPS):
                w.write_table(table(rng, (i * GROUPS + g) * GROUP, GROUP))
    images = rng.integers(0, 256, (IMAGES, *IMAGE), np.uint8)
    os.makedirs(f"{root}/hdf5")
    with h5py.File(f"{root}/hdf5/images.h5", "w") as f:
        f.create_dataset("images", data=images, chunks=(1, *IMAGE))
    a = zarr.create_array(f"{root}/zarr", shape=images.shape, chunks=(1, *IMAGE), shards=(1000, *IMAGE), dtype="u1",
                          compressors=None)
    a[:] = images
    blobs = pa.array([rng.bytes(ROW) for _ in range(ROWS)], pa.binary())
    lance.write_dataset(pa.table({"label": np.arange(ROWS, dtype=np.int32), "image": blobs}), f"{root}/lance")


def make_tokens(path, rng, dtype, documents):
    """Writes Megatron's indexed dataset: the tokens in .bin, the place and the length of each document in .idx."""
    lengths = rng.integers(256, 2000, documents, np.int32)
    rng.integers(0, 50257, lengths.sum(), dtype).tofile(path + ".bin")
    with open(path + ".idx", "wb") as f:
        code = {"uint16": 8, "int32": 4}[dtype.name]
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, documents, documents + 1))
        lengths.tofile(f)
        ((np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize).tofile(f)
        np.arange(documents + 1, dtype=np.int64).tofile(f)


def table(rng, first, rows):
    vectors = pa.array(rng.random(rows * 256, np.float32))
    return pa.table({
        "id": np.arange(first, first + rows),
        "label": rng.integers(0, 1000, rows, np.int32),
        "text": [rng.bytes(n).hex() for n in rng.integers(50, 200, rows)],
        "vector": pa.FixedSizeListArray.from_arrays(vectors, 256),
    })


def s3(root):
    return root.startswith("s3://")


def memmap(root, name):
    bin, idx, dtype = f"{root}/{name}.bin", f"{root}/{name}.idx", np.dtype(name)
    if s3(root):
        fs = s3fs.S3FileSystem()
        index = fs.cat_file(idx)
    else:
        index, tokens = np.memmap(idx, mode="r"), np.memmap(bin, mode="r")
    (n,) = struct.unpack_from("<Q", index, 18)
    lengths, pointers = np.frombuffer(index, np.int32, n, 34), np.frombuffer(index, np.int64, n, 34 + 4 * n)
    for i in some(n):
        at, size = int(pointers[i]), int(lengths[i]) * dtype.itemsize
        yield np.frombuffer(fs.cat_file(bin, start=at, end=at + size) if s3(root) else tokens[at : at + size], dtype)


def some(n):
    return np.random.default_rng(2).integers(0, n, READS)


def parquet(root, columns, groups=range(FILES * GROUPS), take=False):
    fs, path = pyarrow.fs.LocalFileSystem(), root
    if s3(root):
        fs = pyarrow.fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"], region=os.environ["AWS_REGION"])
        path = root.removeprefix("s3://")
    data = ds.dataset(path, filesystem=fs)
    if take:
        got = data.take(np.sort(some(FILES * GROUPS * GROUP)), columns=columns)
    else:
        at = ds.field("id")
        got = data.to_table(columns=columns, filter=(at >= groups.start * GROUP) & (at < groups.stop * GROUP))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, got.schema) as w:
        w.write_table(got.combine_chunks())
    yield sink.getvalue()


def parquet_bytes(root, columns, groups=range(FILES * GROUPS), take=False):
    """Returns what the column chunks take that a reader needs."""
    size = 0
    for g in groups:
        group = pq.read_metadata(f"{root}/{g // GROUPS}.parquet").row_group(g % GROUPS)
        chunks = [group.column(c) for c in range(group.num_columns)]
        size += sum(c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)
    return size


def hdf5(root):
    with h5py.File(s3fs.S3FileSystem().open(f"{root}/images.h5") if s3(root) else f"{root}/images.h5") as f:
        for i in some(IMAGES):
            yield f["images"][i]


def sharded(root):
    images = zarr.open_array(root, mode="r")
    for i in some(IMAGES):
        yield images[i]


def lance_rows(root):
    options = {"aws_endpoint": os.environ["AWS_ENDPOINT_URL"], "allow_http": "true"}
    got = lance.dataset(root, storage_options=options).take(some(ROWS).tolist(), columns=["image"])
    for row in got["image"]:
        yield row.as_buffer()


PARQUET = {
    "parquet: two columns": {"columns": ["label", "text"]},
    "parquet: two row groups": {"columns": ["id", "text", "vector"], "groups": range(19, 21)},
    "parquet: take": {"columns": ["id", "label"], "take": True},
}
CASES = {
    "memmap: uint16": lambda root: memmap(root, "uint16"),
    "memmap: int32": lambda root: memmap(root, "int32"),
    "h5py": hdf5,
    "lance: take": lance_rows,
    "zarr: shards": sharded,
} | {name: lambda root, args=args: parquet(root, **args) for name, args in PARQUET.items()}


def read(case, root):
    if s3(root):
        s3fs.S3FileSystem().exists(root)  # loads what a client loads once
    digest, size, start = hashlib.sha256(), 0, time.monotonic()
    for value in CASES[case](root):
        digest.update(value)
        size += memoryview(value).nbytes
    seconds = time.monotonic() - start
    if case in PARQUET and not s3(root):
        size = parquet_bytes(root, **PARQUET[case])
    print(json.dumps({"seconds": seconds, "asked": size, "digest": digest.hexdigest()}))


if sys.argv[1] == "make":
    make(sys.argv[2])
else:
    read(*sys.argv[1:])
