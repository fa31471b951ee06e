"""Makes data sets as their libraries do, and trains on them with the libraries' own loaders, for TestAdapters.

    adapters.py make DIR
    adapters.py CASE ROOT STEP

ROOT holds the data, STEP is how long a batch trains, in seconds. Prints JSON: the seconds, the numbers of batches and
of samples, a digest of the batches and of all that the global generators drew meanwhile, what was read of the data by
each process, in order, with the seconds that it took, and the plans that lay in the mount.
"""

import builtins
import glob
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import random
import re
import sys
import tarfile
import tempfile
import time
import warnings

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

DOCUMENTS, LENGTH, SAMPLES = 33_000, 4096, 2400  # of 500 to 3,500 tokens: 130 MB; tokens of a sample
SCRATCH = tempfile.TemporaryDirectory()  # of the libraries
SHARDS, EACH, SAMPLE = 64, 40, 50_000  # samples of a shard, bytes of one
ROWS = 20_000  # of 17 KB, in Arrow files of record batches of 100


def make(root):
    make_rows(root)
    import litdata
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from megatron.energon.flavors import BaseWebdatasetFactory
    from streaming import MDSWriter
    rng = np.random.default_rng(1)
    for name, count in ("one", DOCUMENTS), ("two", DOCUMENTS // 4):
        os.makedirs(root + "/tokens", exist_ok=True)
        out = IndexedDatasetBuilder(f"{root}/tokens/{name}.bin", dtype=np.uint16)
        for n in rng.integers(500, 3500, count).tolist():
            out.add_document(torch.from_numpy(rng.integers(1, 50_000, n, dtype=np.int32)), [n])
        out.finalize(f"{root}/tokens/{name}.idx")
    os.makedirs(root + "/tars")
    for i in range(SHARDS):
        with tarfile.open(f"{root}/tars/{i:06d}.tar", "w") as tar:
            for k in range(EACH):
                info = tarfile.TarInfo(f"{i:03d}{k:03d}.bin")
                info.size = SAMPLE
                tar.addfile(info, io.BytesIO(rng.bytes(SAMPLE)))
    BaseWebdatasetFactory.prepare_dataset(pathlib.Path(root, "tars"), [f"{i:06d}.tar" for i in range(SHARDS)],
                                          split_parts_ratio=[("train", 1.0)], workers=2)
    with open(root + "/tars/.nv-meta/dataset.yaml", "w") as f:
        f.write("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    chunks = litdata.streaming.Cache(root + "/litdata", chunk_size=EACH)
    for i in range(SHARDS * EACH):
        chunks[i] = {"x": rng.bytes(SAMPLE), "i": i}
    chunks.done()
    chunks.merge()
    with MDSWriter(out=root + "/mds", columns={"x": "bytes", "i": "int"}, size_limit=EACH * SAMPLE) as out:
        for i in range(SHARDS * EACH):
            out.write({"x": rng.bytes(SAMPLE - 100), "i": i})


def make_rows(root):
    """Arrow files as save_to_disk writes them, and where in them the parts of a row are: by a search, since each begins
    with its number."""
    import datasets
    rng = np.random.default_rng(2)

    def row(i):
        mark = f"{i:08d}"
        return {"id": i, "text": f"t{mark}" + "x" * int(rng.integers(500, 3000)),
                "tokens": np.frombuffer(f"k{mark[1:]}".encode() + rng.bytes(792), np.int32),
                "turns": None if i % 7 == 0
                else [{"role": "user", "content": ("d" if k else "c") + mark + "y" * (i % 50)} for k in range(i % 4)],
                "image": {"bytes": f"i{mark}".encode() + rng.bytes(int(rng.integers(8_000, 20_000))), "path": None}}

    number, text = datasets.Value("int64"), datasets.Value("string")
    data = datasets.Dataset.from_generator(lambda: map(row, range(ROWS)), cache_dir=SCRATCH.name,
                                           features=datasets.Features({
        "id": number, "text": text, "tokens": datasets.List(datasets.Value("int32")),
        "turns": datasets.List({"role": text, "content": text}),
        "image": {"bytes": datasets.Value("binary"), "path": text}}))
    data.save_to_disk(root + "/arrow", num_shards=4)
    for path in glob.glob(root + "/arrow/*.arrow"):
        with open(path, "rb") as f:
            # the last: a batch may begin in the one before
            found = {m.group(): m.start() for m in re.finditer(rb"[tci][0-9]{8}|k[0-9]{7}", f.read())}
        with open(path.replace(".arrow", ".where"), "w") as f:
            json.dump({mark.decode(): [os.path.basename(path), at] for mark, at in found.items()}, f)


def arrow(root, shuffled):
    import datasets
    where = {}
    for path in glob.glob(root + "/arrow/*.where"):
        with open(path) as f:
            where.update(json.load(f))
    get = datasets.Dataset.__getitems__

    def noted(self, indices):
        began = time.monotonic()
        rows = get(self, indices)
        seconds = (time.monotonic() - began) / len(rows)  # a batch has page faults one after the other
        for mark, size in (("t{:08d}", lambda row: len(row["text"])), ("k{:07d}", lambda row: 4 * len(row["tokens"])),
                           ("c{:08d}", lambda row: sum(len(turn["content"]) for turn in row["turns"] or ())),
                           ("i{:08d}", lambda row: len(row["image"]["bytes"]))):
            for row in rows:  # column by column, as the library reads a batch
                if size(row) > 0:
                    path, at = where[mark.format(row["id"])]
                    note(path, seconds, at, size(row))
        return rows

    datasets.Dataset.__getitems__ = noted
    data = datasets.load_from_disk(root + "/arrow")
    if shuffled:
        data = data.shuffle(seed=3, keep_in_memory=True)

    def collate(rows):
        return [torch.tensor([r["id"] for r in rows]), [r["text"].encode() for r in rows],
                [r["image"]["bytes"] for r in rows], torch.tensor([r["tokens"] for r in rows])]

    return torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, collate_fn=collate,
                                       sampler=torch.utils.data.RandomSampler(data, num_samples=SAMPLES))


def megatron(root, samples, blended, mmap, sampler):
    """A loader as Megatron's build_pretraining_data_loader makes it, of rank 1 of 2 with two workers, resumed after 64
    samples."""
    from megatron.core.datasets import blended_dataset, gpt_dataset, indexed_dataset
    from megatron.core.datasets.utils import Split
    spec = importlib.util.find_spec("megatron.bridge")  # its file of samplers, without all that the package imports
    spec = importlib.util.spec_from_file_location("samplers", spec.submodule_search_locations[0] + "/data/samplers.py")
    samplers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(samplers)
    reader = indexed_dataset._MMapBinReader if mmap else indexed_dataset._FileBinReader
    read = reader.read

    def noted(self, dtype, count, offset):
        began = time.monotonic()
        tokens = read(self, dtype, count, offset)
        if mmap:
            tokens.sum()
        note(self._bin_file_reader.name if mmap else self._bin_path, time.monotonic() - began, int(offset),
             tokens.nbytes)
        return tokens

    reader.read = noted

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 0, 0, 50_000, {"class": "none"}

    config = gpt_dataset.GPTDatasetConfig(random_seed=7, sequence_length=LENGTH, split="1,0,0",
                                          path_to_cache=SCRATCH.name, tokenizer=Tokenizer(),
                                          reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
                                          create_attention_mask=False, mmap_bin_files=mmap)

    def part(name, n):
        prefix = f"{root}/tokens/{name}"
        low = gpt_dataset.GPTDataset.build_low_level_dataset(prefix, config)
        return gpt_dataset.GPTDataset(low, prefix, np.arange(len(low), dtype=np.int32), n, Split.train, config)

    if blended:
        torch.distributed.get_rank = lambda *args: 0
        data = blended_dataset.BlendedDataset([part("one", samples), part("two", samples)], [0.7, 0.3], samples, config)
    else:
        data = part("one", samples)
    total = samples
    batches = (samplers.MegatronPretrainingSampler(total, 64, 4, 1, 2) if sampler == "single" else
               samplers.MegatronPretrainingRandomSampler(data, total, 64, 4, 1, 2, data_sharding=sampler == "sharded"))
    return torch.utils.data.DataLoader(data, batch_sampler=batches, num_workers=2, persistent_workers=True)


def webdataset(root, **options):
    import webdataset
    note_opens(root)
    data = webdataset.WebDataset(f"{root}/tars/{{000000..{SHARDS - 1:06d}}}.tar", seed=4, **options).shuffle(100,
        seed=5).to_tuple("bin")
    return torch.utils.data.DataLoader(data, batch_size=8, num_workers=2)


def resampled(root):
    import webdataset
    note_opens(root)
    data = webdataset.DataPipeline(webdataset.ResampledShards(f"{root}/tars/{{000000..{SHARDS - 1:06d}}}.tar", seed=3,
                                                              deterministic=True), webdataset.tarfile_to_samples(),
                                   webdataset.shuffle(100, seed=5),
                                   webdataset.to_tuple("bin")).with_epoch(SHARDS * EACH // 2)
    return torch.utils.data.DataLoader(data, batch_size=8, num_workers=2)


def streaming(root):
    import streaming
    note_opens(root)
    data = streaming.StreamingDataset(remote=root + "/mds", local=SCRATCH.name, shuffle=True, batch_size=8,
                                      shuffle_seed=9, num_canonical_nodes=1,
                                      shuffle_block_size=320, predownload=64)
    return torch.utils.data.DataLoader(data, batch_size=8, num_workers=2)


def litdata(root):
    import litdata
    note_opens(root, True)
    data = litdata.StreamingDataset("local:" + root + "/litdata", cache_dir=tempfile.mkdtemp(), shuffle=True, seed=9,
                                    batch_decode=1)
    return litdata.StreamingDataLoader(data, batch_size=8, num_workers=2)


def energon(root):
    import megatron.energon as energon
    from megatron.energon.flavors.webdataset.itar_reader import ITarReader
    read = ITarReader._get_item_by_sample_pointer

    def noted(self, at, *args):
        began = time.monotonic()
        sample = read(self, at, *args)
        note(str(self.tar_filepaths[at.tar_file_id]), time.monotonic() - began, at.byte_offset, at.byte_size)
        return sample

    ITarReader._get_item_by_sample_pointer = noted

    @energon.edataclass
    class Sample(energon.Sample):
        x: bytes

    @energon.stateless
    def cook(sample):
        return Sample(**energon.basic_sample_keys(sample), x=sample["bin"])

    class Encoder(energon.DefaultTaskEncoder):
        cookers = [energon.Cooker(cook)]

        def batch(self, samples):
            return {"x": [s.x for s in samples]}

    workers = energon.WorkerConfig(rank=0, world_size=1, num_workers=2)
    return energon.get_savable_loader(energon.get_train_dataset(root + "/tars", worker_config=workers, batch_size=8,
                                                                shuffle_buffer_size=20, max_samples_per_sequence=20,
                                                                task_encoder=Encoder(), repeat=False))


CASES = {
    "datasets": lambda root: arrow(root, False),
    "datasets shuffled": lambda root: arrow(root, True),
    "energon": energon,
    "litdata": litdata,
    "megatron": lambda root: megatron(root, SAMPLES, False, False, "single"),
    "megatron mmap": lambda root: megatron(root, SAMPLES, False, True, "cyclic"),
    "megatron blended": lambda root: megatron(root, SAMPLES, True, False, "sharded"),
    "webdataset": lambda root: webdataset(root, shardshuffle=100),
    "webdataset detshuffle": lambda root: webdataset(root, shardshuffle=100, detshuffle=True),
    "webdataset resampled": resampled,
    "streaming": streaming,
}

notes = os.open(SCRATCH.name + "/notes", os.O_RDWR | os.O_CREAT | os.O_APPEND)


def note(path, seconds, *where):
    os.write(notes, f"{os.getpid()} {os.path.basename(path)} {' '.join(map(str, where))}\t{seconds}\n".encode())


def note_opens(root, once=False):
    """Notes each open of a file of the data, or only the first one of each, with the time until its first bytes are
    there."""
    plain, seen = builtins.open, set()

    def opened(path, mode="r", *args, **options):
        began = time.monotonic()
        file = plain(path, mode, *args, **options)
        if "b" in mode and isinstance(path, str) and path.startswith(root) and path.endswith(
                (".bin", ".mds", ".tar")) and path not in seen:
            os.pread(file.fileno(), 4096, 0)
            note(path, time.monotonic() - began)
            seen.update([path] * once)
        return file

    builtins.open = opened


def plans_of(root):
    for path in sorted(glob.glob(root + "/.shoal/plans/*")):
        try:
            with open(path) as f:
                yield os.path.basename(path), f.read()
        except OSError:  # it has just been removed
            pass


def train(case, root, step):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    loader, digest, batches, samples, plans = CASES[case](root), hashlib.sha256(), 0, 0, []
    began = time.monotonic()
    for batch in loader:
        values = list(batch.values()) if isinstance(batch, dict) else list(batch)
        for value in values:
            digest.update(value.numpy().tobytes() if torch.is_tensor(value) else b"".join(value))
        batches, samples = batches + 1, samples + len(values[0])
        digest.update(repr((random.random(), np.random.rand(), float(torch.rand(())))).encode())
        if batches % 20 == 1:  # to read them takes time, too
            plans += [plan for plan in plans_of(root) if plan not in plans]
        time.sleep(step)
    seconds, read = time.monotonic() - began, {}
    os.lseek(notes, 0, os.SEEK_SET)
    with os.fdopen(notes) as lines:
        for line in lines:
            what, took = line.split("\t")
            process, what = what.split(" ", 1)
            read.setdefault(process, []).append([what.strip(), float(took)])
    print(json.dumps({"seconds": seconds, "batches": batches, "samples": samples, "digest": digest.hexdigest(),
                      "read": list(read.values()), "plans": plans}))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2])
    else:
        train(sys.argv[1], sys.argv[2], float(sys.argv[3]))
