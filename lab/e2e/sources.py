"""Writes datasets with their own libraries, and prints what these read of them, for sources_test.go.

    sources.py write DIR N [SEED]   DIR/megatron/*.bin and .idx, DIR/mds/, DIR/tokens/ (MDS of arrays), DIR/parquet/;
                                    N is the size
    sources.py read DIR             a line of JSON for each sample

cache/shard/testdata/sources was made by `sources.py write DIR 8 1 && sources.py read DIR > DIR/samples.jsonl`, with
megatron-core 0.16.1, mosaicml-streaming 0.13.0 and pyarrow 21.0.0, by a Python with the packages of
tools/conformance/clients-torch.txt.
"""

import base64
import io
import json
import os
import random
import sys
import types

import numpy
import pyarrow
import pyarrow.parquet
import torch
from PIL import Image
from streaming import MDSWriter
from streaming.base.format import reader_from_json


def megatron():
    """megatron.core's own indexed_dataset; the rest of the package, which it does not use, wants a newer torch than
    Debian's."""
    for name in ("megatron.core", "megatron.core.datasets"):
        module = types.ModuleType(name)
        module.__path__ = [p for p in (os.path.join(s, *name.split(".")) for s in sys.path) if os.path.isdir(p)]
        sys.modules[name] = module
    import megatron.core.parallel_state  # noqa: F401
    from megatron.core.datasets import indexed_dataset

    return indexed_dataset


def write(out, n, seed):
    rng = random.Random(seed)
    library = megatron()
    os.makedirs(os.path.join(out, "megatron"))
    for corpus, dtype, sentences in (("a_text_document", numpy.uint16, 1), ("b_text_sentence", numpy.uint16, 3)):
        prefix = os.path.join(out, "megatron", corpus)
        builder = library.IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
        for doc in range(2 * n):
            lengths = [rng.randrange(1, 30) for _ in range(rng.randrange(1, sentences + 1))] if doc % 5 else []
            tokens = torch.tensor([rng.randrange(65500) for _ in range(sum(lengths))], dtype=torch.int64)
            if lengths:
                builder.add_document(tokens, lengths)
            else:
                builder.end_document()
        builder.finalize(prefix + ".idx")

    columns = {"image": "png", "photo": "jpeg", "label": "int", "caption": "str", "weight": "float32", "meta": "json",
               "tokens": "ndarray:uint16"}
    with MDSWriter(out=os.path.join(out, "mds"), columns=columns, size_limit=4000, hashes=["xxh64"]) as writer:
        for i in range(n):
            picture = Image.frombytes("RGB", (8, 6), rng.randbytes(8 * 6 * 3))
            jpeg = io.BytesIO()
            picture.save(jpeg, "JPEG")
            writer.write({"image": picture, "photo": Image.open(jpeg), "label": rng.randrange(-5, 2**40),
                          "caption": "é" * rng.randrange(9),
                          "weight": rng.random(), "meta": {"k": [i]},
                          "tokens": numpy.arange(1 + 20 * i, dtype=numpy.uint16)})
    with MDSWriter(out=os.path.join(out, "tokens"), columns={"tokens": "ndarray:int32", "id": "uint32"},
                   size_limit=3000) as writer:
        for i in range(n):
            length = (1, 255, 256, 300, 7)[i % 5]
            writer.write({"tokens": numpy.array([rng.randrange(2**31) for _ in range(length)], dtype=numpy.int32),
                          "id": numpy.uint32(i)})


    parquet(os.path.join(out, "parquet"), n, rng)


def parquet(out, n, rng):
    """Files of one schema in what forms pyarrow can write."""
    for folder in ("train", "val"):
        os.makedirs(os.path.join(out, folder))
    delta = {"image.bytes": "DELTA_LENGTH_BYTE_ARRAY", "caption": "DELTA_BYTE_ARRAY", "label": "DELTA_BINARY_PACKED",
             "weight": "BYTE_STREAM_SPLIT"}
    for name, form in (("train/a.snappy", {"compression": "snappy"}),
                       ("train/b.zstd", {"compression": "zstd", "data_page_version": "2.0", "row_group_size": 3}),
                       ("train/c.gzip", {"compression": "gzip", "use_dictionary": False, "data_page_size": 64,
                                         "write_batch_size": 2}),
                       ("train/d.brotli", {"compression": "brotli", "use_dictionary": False, "column_encoding": delta}),
                       ("val/e.lz4", {"compression": "lz4", "dictionary_pagesize_limit": 40, "write_batch_size": 2}),
                       ("val/f", {"compression": "none", "write_page_index": True, "row_group_size": n // 2})):
        def maybe(value, often=4):
            return value if rng.randrange(often) else None

        def picture(i):
            encoded = io.BytesIO()
            Image.frombytes("RGB", (8, 6), rng.randbytes(8 * 6 * 3)).save(encoded, ("PNG", "JPEG")[i % 2])
            return {"bytes": encoded.getvalue(), "path": maybe(f"{i}.png")}

        numbers = [[rng.randrange(65536) for _ in range(rng.randrange(5))] for _ in range(n)]
        table = pyarrow.table({
            "image": pyarrow.array([picture(i) for i in range(n)]),
            "label": pyarrow.array([rng.randrange(-5, 2**40) for _ in range(n)], pyarrow.int64()),
            "count": pyarrow.array([maybe(rng.randrange(2**32)) for _ in range(n)], pyarrow.uint32()),
            "caption": pyarrow.array([maybe("é" * rng.randrange(9)) for _ in range(n)]),
            "weight": pyarrow.array([rng.random() for _ in range(n)], pyarrow.float32()),
            "far": pyarrow.array([maybe(rng.random()) for _ in range(n)], pyarrow.float64()),
            "tokens": pyarrow.array(numbers, pyarrow.list_(pyarrow.uint16())),
            "ids": pyarrow.array([maybe(v) for v in numbers], pyarrow.list_(pyarrow.int32())),
            "small": pyarrow.array([maybe(rng.randrange(-128, 128)) for _ in range(n)], pyarrow.int8()),
            "flag": pyarrow.array([maybe(bool(rng.randrange(2))) for _ in range(n)]),
            "half": pyarrow.array([numpy.float16(rng.random()) for _ in range(n)], pyarrow.float16()),
            "raw": pyarrow.array([maybe(rng.randbytes(5)) for _ in range(n)], pyarrow.binary(5)),
            "kind": pyarrow.array([("x", "yy")[i % 2] for i in range(n)]).dictionary_encode(),
            "nested": pyarrow.array([[["a"]] for _ in range(n)]),
        }, schema=None)
        table = table.cast(pyarrow.schema([f.with_nullable(f.name != "weight") for f in table.schema]))
        pyarrow.parquet.write_table(table, os.path.join(out, name + ".parquet"), **form)


def files_of(row):
    """The files that a row is shown as."""
    types = {"label": "<i8", "count": "<u4", "weight": "<f4", "far": "<f8", "tokens": "<u2",
             "ids": "<i4", "small": "<i1", "flag": "<u1", "half": "<f2"}
    names = {"<i8": "int64", "<f4": "float32", "<f8": "float64", "<u2": "uint16", "<u4": "uint32", "<i4": "int32",
             "<i1": "int8", "<u1": "uint8", "<f2": "float16"}
    files = {f"{c}.{names[t]}": numpy.array(row[c], t).tobytes() for c, t in types.items() if row[c] is not None}
    picture = row["image"]["bytes"]
    files["image.bytes." + ("png" if picture.startswith(b"\x89PNG") else "jpg")] = picture
    for name, text in (("image.path", row["image"]["path"]), ("caption", row["caption"]), ("kind", row["kind"])):
        if text is not None:
            files[f"{name}.txt"] = text.encode()
    if row["raw"] is not None:
        files["raw"] = row["raw"]
    return {name: base64.b64encode(data).decode() for name, data in files.items()}


def read(out):
    root = os.path.join(out, "parquet")
    for name in sorted(os.path.relpath(os.path.join(folder, f), root) for folder, _, all in os.walk(root) for f in all):
        for i, row in enumerate(pyarrow.parquet.ParquetFile(os.path.join(root, name)).read().to_pylist()):
            pixels = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB").tobytes()
            print(json.dumps({"of": f"parquet/{name}", "row": i, "files": files_of(row),
                              "columns": {"image": {"pixels": base64.b64encode(pixels).decode()},
                                          "label": row["label"], "tokens": row["tokens"]}}))
    library = megatron()
    for corpus in ("a_text_document", "b_text_sentence"):
        dataset = library.IndexedDataset(os.path.join(out, "megatron", corpus))
        ends = dataset.document_indices
        for doc in range(len(ends) - 1):
            tokens = [int(t) for seq in range(ends[doc], ends[doc + 1]) for t in dataset[seq]]
            print(json.dumps({"of": f"{corpus}.bin", "doc": doc, "type": dataset.index.dtype.__name__,
                              "tokens": tokens}))
    for folder in ("mds", "tokens"):
        with open(os.path.join(out, folder, "index.json")) as f:
            shards = json.load(f)["shards"]
        for shard in shards:
            reader = reader_from_json(out, folder, shard)
            for i in range(reader.samples):
                sample = {}
                for column, value in reader[i].items():
                    if isinstance(value, Image.Image):
                        sample[column] = {"pixels": base64.b64encode(value.convert("RGB").tobytes()).decode()}
                    elif isinstance(value, numpy.ndarray):
                        sample[column] = value.tolist()
                    elif isinstance(value, numpy.generic):
                        sample[column] = value.item()
                    else:
                        sample[column] = value
                print(json.dumps({"of": f"{folder}/{shard['raw_data']['basename']}", "row": i, "columns": sample}))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], int(sys.argv[3]),
              int(sys.argv[4]) if len(sys.argv) > 4 else random.SystemRandom().randrange(2**32))
    else:
        read(sys.argv[2])
