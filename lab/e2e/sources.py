"""Writes datasets with their own libraries, and prints what these read of them, for sources_test.go.

    sources.py write DIR N [SEED]   DIR/megatron/*.bin and .idx, DIR/mds/, DIR/tokens/ (MDS of arrays); N is the size
    sources.py read DIR             a line of JSON for each sample

cache/shard/testdata/sources was made by `sources.py write DIR 8 1 && sources.py read DIR > DIR/samples.jsonl`, with
megatron-core 0.16.1 and mosaicml-streaming 0.13.0, by a Python with the packages of
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


def read(out):
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
