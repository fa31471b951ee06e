"""The adapters of `shoal run` for streamed Parquet and for Grain, with the libraries themselves: make conformance has
them. A folder stands in for a mount. What is told must be what the library then reads."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest

CLIENT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "shoal"))
SITE = os.path.join(CLIENT, "_site")


def footer(path):
    spec = importlib.util.spec_from_file_location("_arrayrecord", os.path.join(CLIENT, "_arrayrecord.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.footer(path)


# What trainers share: each train() is a record of rows, of reads by process, and of the plans meanwhile.
PRELUDE = """
import glob, hashlib, io, json, os, random, sys, time
import numpy as np
MOUNT, SCRATCH = sys.argv[1:]
PARQUET, RECORDS = (sorted(glob.glob(MOUNT + "/*." + kind)) for kind in ("parquet", "array_record"))
HINTS = "_shoal_run" in sys.modules
notes = os.open(SCRATCH + "/notes", os.O_RDWR | os.O_CREAT | os.O_APPEND)
random.seed(1), np.random.seed(2)
trained = []

def plans():
    found = {}
    for path in glob.glob(MOUNT + "/.shoal/plans/*"):
        with io.open(path) as f:
            found[os.path.basename(path)] = [line.split("\\t") for line in f.read().splitlines()[1:]]
    return found

def waited_for(ranges):
    if HINTS:
        sys.modules["_shoal_" + ADAPTER].FIRST = ranges

def train(rows, told=1, key=None, stop=None, ranges=0):
    os.ftruncate(notes, 0)
    found, seen, digest = {}, [], hashlib.sha256()
    for i, row in enumerate(rows):
        while i == 0 and HINTS and (len(found) < told or sum(map(len, found.values())) < ranges):
            found = plans()
            time.sleep(0.01)
        digest.update(repr(row).encode())
        seen.append(key and key(row))
        if i == stop:
            break
    digest.update(repr((random.random(), np.random.rand())).encode())
    with open(SCRATCH + "/notes") as f:
        reads = [line.split() for line in f]
    by = {}
    for process, *read in reads:
        by.setdefault(process, []).append(read)
    trained.append({"told": found, "read": list(by.values()), "rows": seen, "digest": digest.hexdigest()})
    for name in plans():
        os.unlink(MOUNT + "/.shoal/plans/" + name)
"""

STREAMS = PRELUDE.replace("ADAPTER", "'parquet'") + """
import builtins, datasets, pyarrow
from datasets.distributed import split_dataset_by_node
from pyarrow.dataset import ParquetFragmentScanOptions
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0

class Noted(io.BufferedReader):
    def __init__(self, path):
        super().__init__(io.FileIO(path))
        self.path, self.size = path, os.path.getsize(path)

    def read(self, n=-1):
        if self.tell() + n != self.size: # the footer
            os.write(notes, f"{os.getpid()} {os.path.basename(self.path)} {self.tell()} {n}\\n".encode())
        return super().read(n)

def opened(path, mode="r", *args, **options):
    return Noted(path) if mode == "rb" and str(path).endswith(".parquet") else plain(path, mode, *args, **options)

plain, builtins.open = builtins.open, opened
parts = ParquetFragmentScanOptions(cache_options=pyarrow.CacheOptions(hole_size_limit=64, range_size_limit=4000))

def load(files=PARQUET, **options):
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=SCRATCH,
                                 **{"fragment_scan_options": parts, **options})

def shuffled(data, seed=3):
    return data.shuffle(seed=seed, buffer_size=50)

def more(row):
    return {"more": row["id"] + 1}

def mores(rows):
    return {"more": [i + 1 for i in rows["id"]]}

def even(row):
    return row["id"] % 2 == 0

waited_for(1000)
"""
GRAIN = PRELUDE.replace("ADAPTER", "'grain'") + """
import grain
from pyarrow.parquet import ParquetFile

def load(files=RECORDS):
    return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(files))

def name(record):
    return record[:7].decode()

def even(record):
    return int(record[3:7]) % 2 == 0

class Name(grain.transforms.Map):
    def map(self, record):
        return name(record)

def number(row):
    return int(row["id"])

def loader(workers, *sharded):
    sampler = grain.samplers.IndexSampler(170, grain.sharding.ShardOptions(*sharded), True, 2, 5)
    return grain.DataLoader(data_source=grain.sources.ArrayRecordDataSource(RECORDS), sampler=sampler,
                            operations=[Name()], worker_count=workers)

def same(row):
    return row

at_once = grain.ReadOptions(num_threads=0)
waited_for(1000)
"""


class Adapters(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.mount, self.scratch = os.path.join(folder.name, "mnt"), os.path.join(folder.name, "scratch")
        os.makedirs(os.path.join(self.mount, ".shoal", "plans"))
        os.makedirs(self.scratch)
        open(os.path.join(self.mount, ".shoal", "stats"), "w").close()

    def need(self, *modules):
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        if missing:
            self.skipTest("make conformance has " + ", ".join(missing))

    def parquet(self, count):
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet as pq
        rng, first = np.random.default_rng(1), 0
        for i in range(count):
            rows = 20 + 37 * i % 60
            pq.write_table(pa.table({"id": range(first, first + rows), "small": [k % 3 for k in range(rows)],
                                     "turns": [[{"role": "u", "text": rng.bytes(9).hex()}] * (k % 3)
                                               for k in range(rows)],
                                     "data": [rng.bytes(100) for _ in range(rows)]}),
                           os.path.join(self.mount, f"{i}.parquet"), row_group_size=17)
            first += rows

    def python(self, script, hints):
        env = {**os.environ, "PYTHONPATH": SITE if hints else "", "SHOAL_DEBUG": "run", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, "-B", "-c", script, self.mount, self.scratch], env=env,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=1200)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    def trained(self, script):
        """Runs a trainer with and without hints: its rows and what it draws must be the same. Returns what it did with
        hints, and what -v said."""
        script += "\nprint(json.dumps(trained))"
        (got, said), (want, _) = (self.python(script, hints) for hints in (True, False))
        self.assertEqual([t["digest"] for t in got], [t["digest"] for t in want])
        self.assertEqual(os.listdir(os.path.join(self.mount, ".shoal", "plans")), [])
        return got, said

    def test_streamed_parquet(self):
        self.need("datasets")
        self.parquet(7)
        cases = """train(load())
train(load(columns=["small", "turns"], batch_size=7))
train(load(fragment_scan_options=None))
train(shuffled(load()))
train(shuffled(load().map(more)))
train(shuffled(load()).map(mores, batched=True).filter(even))
train(shuffled(load().reshard()).skip(30))
train(shuffled(load().skip(30)))
train(shuffled(load().select_columns(["id", "data"]).shard(3, 1)))
train(split_dataset_by_node(shuffled(load()), rank=1, world_size=7))
train(split_dataset_by_node(shuffled(load()).with_format("numpy"), rank=1, world_size=2))
train(datasets.concatenate_datasets([shuffled(load(PARQUET[:3]), 1), load(PARQUET[3:])]).repeat(2))
train(datasets.interleave_datasets([load(PARQUET[:3]), load(PARQUET[3:])], [.7, .3], seed=4,
                                   stopping_strategy="all_exhausted_without_replacement"))
train(shuffled(load()).with_format("arrow").iter(9))
epochs = shuffled(load())
for epoch in range(3):
    epochs.set_epoch(epoch)
    train(epochs)
rows = iter(epochs)
for _ in range(90):
    next(rows)
state = epochs.state_dict()
del rows, epochs
again = shuffled(load())
again.set_epoch(2)
again.load_state_dict(state)
train(again)
waited_for(5)
train(load(), ranges=len(trained[0]["read"][0]))
"""
        got, said = self.trained(STREAMS + cases)
        self.assertEqual(len(got), 19)
        for i, t in enumerate(got):
            (told,), (read,) = t["told"].values(), t["read"]
            self.assertEqual(sorted(told), sorted(read), i)
            if i < 3:  # no other order than by chance, of pyarrow's threads
                self.assertEqual([path for path, *_ in told], [path for path, *_ in read])
        self.assertNotIn("no hint", said)

    def test_streams_that_end_early(self):
        self.need("datasets")
        self.parquet(7)
        got, _ = self.trained(STREAMS + """train(load().take(60))
train(shuffled(load()).take(60))
train(datasets.interleave_datasets([load(PARQUET[:3]), load(PARQUET[3:])], [.7, .3], seed=4))""")
        for i, t in enumerate(got):
            (told,), (read,) = t["told"].values(), t["read"]
            self.assertTrue(all(told.count(what) <= read.count(what) for what in told), i)  # pyarrow reads ahead

    def test_streams_that_are_not_known(self):
        self.need("datasets")
        self.parquet(3)
        got, said = self.trained(STREAMS + """train(shuffled(load().map(mores, batched=True)), 0)
train(shuffled(load().filter(even)), 0)
train(load(filters=[("id", ">", 20)]), 0)
train(load(fragment_scan_options=ParquetFragmentScanOptions(pre_buffer=False)), 0)
train(datasets.Dataset.from_dict({"id": [1]}).to_iterable_dataset(), 0)""")
        self.assertEqual(said.count("no hint"), 4, said)

    def test_streams_of_workers(self):
        self.need("datasets", "torch")
        self.parquet(7)
        got, said = self.trained(STREAMS + """
from torch.utils.data import DataLoader
import torch

def key(batch):
    return torch.rand(()).item()

for workers in 2, 9:
    data = shuffled(load(columns=["id"]))
    train(DataLoader(data, batch_size=8, num_workers=workers), min(workers, data.num_shards), key)
loader = DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True)
for epoch in range(2):
    data.set_epoch(epoch)
    train(loader, min(2, data.num_shards), key)""")
        for i, t in enumerate(got):
            self.assertEqual(sorted(map(sorted, t["told"].values())), sorted(map(sorted, t["read"])), i)
        self.assertNotIn("no hint", said)

    def records(self, *options):
        """Makes files of 60, 80 and 30 records, whose first 7 bytes are their file and number."""
        import random
        from array_record.python.array_record_module import ArrayRecordWriter
        rng = random.Random(1)
        for i, count in enumerate((60, 80, 30)):
            out = ArrayRecordWriter(os.path.join(self.mount, f"{i}.array_record"), options[i % len(options)])
            for k in range(count):
                out.write(f"{i:03d}{k:04d}".encode() + rng.randbytes(rng.randrange(100, 40_000)))
            out.close()

    def of_records(self, plan):
        """The first records of the ranges of a plan."""
        known = {}
        for path, begin, _ in plan:
            known.setdefault(path, footer(os.path.join(self.mount, path)))
        return [f"{int(path[0]):03d}{known[path][0].tolist().index(int(begin)) * known[path][1]:04d}"
                for path, begin, _ in plan]

    def only(self, plans):
        """Leaves of the files only what was told, and the footers."""
        told = {}
        for path, begin, size in sum(plans, []):
            told.setdefault(path, set()).add((int(begin), int(size)))
        for path in filter(os.path.isfile, (os.path.join(self.mount, name) for name in os.listdir(self.mount))):
            with open(path, "rb") as f:
                text = f.read()
            end = (footer(path)[0][-1] if path.endswith("record")
                   else len(text) - 8 - int.from_bytes(text[-8:-4], "little"))
            with open(path, "wb") as f:
                for begin, size in [*told.get(os.path.basename(path), ()), (int(end), len(text))]:
                    f.seek(begin)
                    f.write(text[begin:begin + size])

    def test_grain(self):
        self.need("grain", "pyarrow")
        self.records("group_size:1", "group_size:1,uncompressed")
        script = GRAIN + """train(load().map(name).to_iter_dataset(at_once), 1, same)
train(load().seed(4).shuffle()[10:100:3].map(name).repeat(2).to_iter_dataset(at_once), 1, same)
train(load().shuffle(seed=1).batch(4, batch_fn=lambda r: [*map(name, r)]).map(same).to_iter_dataset(at_once), 1, same)
train(grain.MapDataset.mix([load(RECORDS[:1]).shuffle(seed=1), load(RECORDS[1:]).shuffle(seed=2)], [.3, .7]).map(
    name).to_iter_dataset(at_once), 1, same)
train(loader(0, 1, 3, True), 1, same)
train(load().shuffle(seed=1).map(name).to_iter_dataset(), 1, same)
train(loader(2, 0, 1), 2, same)
train(load().filter(even).map(name).to_iter_dataset(), 1, same)
rows = iter(load().shuffle(seed=1).map(name).to_iter_dataset(at_once))
train(rows, 1, same, 20)
state = rows.get_state()
train(rows, 0, same, 9)
rows.set_state(state)
train(rows, 1, same)
"""
        got, said = self.trained(script)
        for i, t in enumerate(got):
            rows = sum([row if isinstance(row, list) else [row] for row in t["rows"]], [])
            told = sum([self.of_records(plan) for plan in t["told"].values()], [])
            if i < 6:
                self.assertEqual(told, rows, i)
            elif i == 6:
                self.assertEqual((sorted(told), len(t["told"])), (sorted(rows), 2))
            elif i == 7:
                self.assertEqual([name for name in told if int(name) % 2 == 0], rows)
            elif i == 10:
                self.assertEqual(told, rows)
        self.assertEqual(len(got), 11)
        self.assertNotIn("no hint", said)
        self.only([plan for t in got for plan in t["told"].values()])
        self.assertEqual([t["digest"] for t in self.python(script + "print(json.dumps(trained))", False)[0]],
                         [t["digest"] for t in got])

    def test_records_in_groups(self):
        self.need("grain", "pyarrow")
        self.records("group_size:4", "group_size:1,brotli")
        got, said = self.trained(GRAIN + """train(load(RECORDS[:1]).map(name).to_iter_dataset(at_once), 1, same)
train(load(RECORDS[1:]).map(name).to_iter_dataset(at_once), 0)
train(grain.experimental.ZipMapDataset([load(), load()]).to_iter_dataset(at_once), 0, lambda row: 0)
train(grain.MapDataset.source([1, 2]).to_iter_dataset(), 0)""")
        self.assertEqual(self.of_records(*got[0]["told"].values()), [f"{i // 4 * 4:07d}" for i in range(60)])
        self.assertEqual([len(t["told"]) for t in got], [1, 0, 0, 0])
        self.assertEqual(said.count("no hint"), 2, said)

    def test_grain_parquet(self):
        self.need("grain", "pyarrow")
        self.parquet(20)
        script = GRAIN + """train(grain.experimental.ParquetIterDataset(PARQUET).map(number), 1, same)
rows = iter(grain.experimental.ParquetIterDataset(PARQUET).map(number))
train(rows, 1, same, 500)
state = rows.get_state()
rows = iter(grain.experimental.ParquetIterDataset(PARQUET).map(number))
rows.set_state(state)
train(rows, 1, same)
train(grain.experimental.ParquetIterDataset(PARQUET).map(number).mp_prefetch(
    grain.MultiprocessingOptions(num_workers=2)), 2, ranges=sum(ParquetFile(f).num_row_groups for f in PARQUET))
train(grain.experimental.ParquetIterDataset(PARQUET[0]).map(number), 0)
"""
        got, said = self.trained(script)
        import pyarrow.parquet as pq
        where = {}
        for i in range(20):
            file = pq.ParquetFile(os.path.join(self.mount, f"{i}.parquet"))
            for g in range(file.num_row_groups):
                chunks = [file.metadata.row_group(g).column(c) for c in range(file.metadata.num_columns)]
                begin = chunks[0].dictionary_page_offset
                what = [f"{i}.parquet", str(begin), str(sum(c.total_compressed_size for c in chunks))]
                where[file.read_row_group(g)["id"][0].as_py()] = what
        for t in got[0], got[2]:
            (told,), read = t["told"].values(), [where[row] for row in t["rows"] if row in where]
            # the library begins a file ahead of its first row
            self.assertEqual(*([what for what in whole if what[1] != "4"] for whole in (told, read)))
            self.assertEqual(sorted(told), sorted(read))
        self.assertEqual(sorted(sum(got[3]["told"].values(), [])), sorted(where.values()))
        self.assertNotIn("no hint", said)
        self.only([*got[0]["told"].values()])
        self.assertEqual([t["digest"] for t in self.python(script + "print(json.dumps(trained))", False)[0]],
                         [t["digest"] for t in got])


if __name__ == "__main__":
    unittest.main()
