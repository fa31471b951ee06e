import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
import zipfile

import support  # noqa: F401 (sets the path)

import shoal
from shoal import _run

SITE = os.path.join(os.path.dirname(os.path.abspath(shoal.__file__)), "_site")

# What the trainers below share: files in a mount, and a record of what they read and drew, and of the plan meanwhile.
PRELUDE = """
import json, os, random, sys
import numpy as np, torch
from torch.utils.data import (BatchSampler, ConcatDataset, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler, Subset,
                              SubsetRandomSampler, WeightedRandomSampler)
MOUNT = sys.argv[1]
FILES = [f"{MOUNT}/class{i % 3}/{i:02d}.jpg" for i in range(24)]
random.seed(1), np.random.seed(2), torch.manual_seed(3)

class Files(Dataset):
    def __init__(self, files, /, **attributes):
        self.__dict__.update(attributes or {"samples": [(f, 0) for f in files]})
        self.count, self.read = len(files), files
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        with open(self.read[i]):
            return self.read[i]

def flat(x):
    return [y for v in x for y in flat(v)] if isinstance(x, (list, tuple)) else [x]

def plan(name="default"):
    try:
        return [os.path.join(MOUNT, line) for line in open(f"{MOUNT}/.shoal/plans/{name}").read().splitlines()]
    except OSError:
        return None

epochs, drawn = [], []

def train(loader, name="default", times=2):
    for epoch in range(times):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        read, told = [], "none"
        for batch in loader:
            told = plan(name) if told == "none" else told
            read += flat(batch)
            drawn.append([random.random(), np.random.rand(), float(torch.rand(()))])
        epochs.append([told, read])

def end():
    print(json.dumps({"epochs": epochs, "drawn": drawn}))
"""


# A sampler whose order the copy of the trainer never finds.
AWAITED = """
import signal
trainer = os.getpid()
class Waits(Sampler):
    def __init__(self): # torch 1 wants the data there, torch 2.15 nothing
        pass
    def __iter__(self):
        if os.getpid() != trainer:
            signal.pause()
        return iter(range(24))
    def __len__(self):
        return 24
"""


class Run(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.mount = os.path.join(folder.name, "mnt")
        os.makedirs(os.path.join(self.mount, ".shoal", "plans"))
        open(os.path.join(self.mount, ".shoal", "stats"), "w").close()
        for i in range(24):
            path = os.path.join(self.mount, f"class{i % 3}", f"{i:02d}.jpg")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            open(path, "w").close()

    def python(self, script, hints=True, check=True, **env):
        path = os.pathsep.join(([SITE] if hints else []) + [env.pop("PYTHONPATH", "")]).rstrip(os.pathsep)
        done = subprocess.run([sys.executable, "-B", "-c", PRELUDE + script if "train(" in script else script,
                               self.mount],
                              env={**os.environ, "PYTHONPATH": path, **env}, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
        if check:
            self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def trained(self, script, **env):
        """Runs a trainer with and without hints: what it reads and draws must be the same. Returns its epochs with
        hints."""
        script += "\nend()"
        got, want = (json.loads(self.python(script, hints, **env).stdout) for hints in (True, False))
        self.assertEqual(got["drawn"], want["drawn"])
        self.assertEqual([read for _, read in got["epochs"]], [read for _, read in want["epochs"]])
        self.assertEqual({str(told) for told, _ in want["epochs"]}, {"None"})
        self.assertEqual(os.listdir(os.path.join(self.mount, ".shoal", "plans")), [])  # they are removed at the end
        return got["epochs"]

    def test_samplers(self):
        epochs = self.trained("""
files = Files(FILES)
train(DataLoader(files, 4))
train(DataLoader(files, 5, shuffle=True, drop_last=True))
train(DataLoader(files, 4, shuffle=True, generator=torch.Generator().manual_seed(5)))
train(DataLoader(files, 4, sampler=RandomSampler(files, replacement=True, num_samples=40)))
train(DataLoader(files, 4, sampler=WeightedRandomSampler([1.0 + i for i in range(24)], 30)))
train(DataLoader(files, 4, sampler=SubsetRandomSampler([3, 9, 2, 17, 11])))
train(DataLoader(files, batch_sampler=BatchSampler(RandomSampler(files), 7, False)))
train(DataLoader(files, None, shuffle=True))
train(DataLoader(files, 4, sampler=DistributedSampler(files, 2, 1, seed=9)), "rank1")
train(DataLoader(files, 4, shuffle=True, num_workers=2))
train(DataLoader(files, 4, shuffle=True, num_workers=2, persistent_workers=True), times=3)
train(DataLoader(Subset(files, [5, 3, 9, 20]), 2, shuffle=True))
train(DataLoader(ConcatDataset([Subset(files, range(7)), files]), 4, shuffle=True))
class Own(Sampler):
    def __init__(self): # torch 1 wants the data there, torch 2.15 nothing
        pass
    def __iter__(self):
        return iter([(random.randrange(24) + np.random.randint(24) + int(torch.randint(24, ()))) % 24 for _ in range(9)])
    def __len__(self):
        return 9
train(DataLoader(files, 4, sampler=Own()))""")
        self.assertEqual(len(epochs), 29)
        for i, (told, read) in enumerate(epochs):
            self.assertEqual(told, read, i)

    def test_waits_once_for_what_does_not_answer(self):
        epochs = self.trained(AWAITED + """run, waits = sys.modules.get("_shoal_run"), []
if run is not None:
    run.WAIT, finish = 0.1, run._Job.finish
    run._Job.finish = lambda job, timeout: (waits.append(timeout), finish(job, timeout))[1]
train(DataLoader(Files(FILES), 4, sampler=Waits()), times=4)
assert run is None or sum(map(bool, waits)) == 1, waits""")
        self.assertEqual([told for told, _ in epochs], [None] * 4)

    def test_datasets(self):
        self.datasets("")

    def test_datasets_in_bands(self):
        self.datasets("""
run = sys.modules.get("_shoal_run")
if run is not None:
    run.WAIT, plans = 600, run._plans

    def in_bands(hint, *rest):
        hint.SHORT, hint._BANDS = 0, 3
        hint._Apart.is_long = lambda apart: None  # so that the trainer waits
        return plans(hint, *rest)

    run._plans = in_bands""")

    def datasets(self, before):
        epochs = self.trained(before + """
from pathlib import Path
class Odd(Files):
    pass
masks = FILES[1:] + FILES[:1]
for files in (Files(FILES, paths=FILES), Files(FILES, label=["a"] * 24, files=[Path(f) for f in FILES]), Files(FILES, data=[{"image": f, "label": "x"} for f in FILES]),
              Files(FILES, rows=[(0, f, "y") for f in FILES]), Files(FILES, names=np.array(FILES)), Subset(Files(FILES, samples=torch.ones(24), images=FILES), [3, 1])):
    train(DataLoader(files, 4, shuffle=True), times=1)
train(DataLoader(FILES, 4, shuffle=True), times=1)
both = Files(FILES, images=FILES, masks=masks)
both.__class__ = type("Both", (Files,), {"__getitem__": lambda self, i: [FILES[i], masks[i]]})
train(DataLoader(both, 1, shuffle=True), times=1)
class Logs(Files):
    def __getitem__(self, i):
        with open(MOUNT + "/../log", "a"):
            return super().__getitem__(i)
train(DataLoader(Logs(FILES), 4, shuffle=True), times=1)""")
        self.assertEqual(len(epochs), 9)
        for i, (told, read) in enumerate(epochs):
            self.assertEqual(told, read, i)

    def test_loaders_at_once(self):
        epochs = self.trained("""
files = Files(FILES)
a, b = DataLoader(files, 4, shuffle=True), DataLoader(Subset(files, range(8)), 4)
for epoch in range(2):
    read = []
    for i, batch in enumerate(a):
        if i == 2:
            train(b, "default-2", 1)
        told = plan()
        read += batch
    epochs.append([told, read])
del b  # and its number can be used again
for epoch in range(2):
    train(DataLoader(Subset(files, range(9)), 4, shuffle=True), "default-2", 1)""")
        self.assertEqual(len(epochs), 6)
        for told, read in epochs:
            self.assertEqual(told, read)

    def test_a_loader_that_only_its_iterator_outlives(self):
        """Its plan is read on: another loader does not get its name, until the iterator has gone, too."""
        told = self.trained("""
files = Files(FILES)
it = iter(DataLoader(files, 4, shuffle=True))
read = next(it)
first = plan()
train(DataLoader(Subset(files, range(8)), 4), "default-2", 1)
for batch in it:
    read += batch
epochs.append([plan(), read])
epochs.append([first, read])
del it
train(DataLoader(Subset(files, range(9)), 4, shuffle=True), "default", 1)""")
        self.assertEqual(len(told), 4)
        for plan, read in told:
            self.assertEqual(plan, read)

    def test_names(self):
        for env, name in (({"SHOAL_RUN_NAME": "mine"}, "mine"), ({"RANK": "3"}, "rank3"),
                          ({"SHOAL_RUN_NAME": "mine", "RANK": "3"}, "mine-rank3")):
            for told, read in self.trained(f"train(DataLoader(Files(FILES), 4, shuffle=True), {name!r})", **env):
                self.assertEqual(told, read)

    def test_loaders_with_one_iterator(self):
        """timm's and Ultralytics' kind, with workers that are ahead of the epoch, too."""
        class_ = """
class Multi(DataLoader):
    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeat(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()
    def __len__(self):
        return len(self.batch_sampler.sampler)
    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)
class Repeat:
    def __init__(self, sampler):
        self.sampler = sampler
    def __iter__(self):
        while True:
            yield from iter(self.sampler)
"""
        for told, read in self.trained(class_ + "train(Multi(Files(FILES), 4, shuffle=True), times=3)"):
            self.assertEqual(told, read)
        for told, read in self.trained(class_ + "train(Multi(Files(FILES), 4, shuffle=True, num_workers=2), times=4)"):
            self.assertEqual(told, read)

    def test_no_hint(self):
        script = """
class Stream(IterableDataset):
    def __iter__(self):
        return iter(FILES)
for loader in (DataLoader(Files(FILES, samples=[("/nowhere", 0)] * 24), 4), DataLoader(Files(range(24)), 4), DataLoader(Stream(), 4),
               DataLoader(Files([FILES[0], MOUNT + "/a\\nb"] * 12), 4)):
    iter(loader), iter(loader)  # begins to read
    print(os.listdir(MOUNT + "/.shoal/plans"))
def unused(): train(None)"""
        for debug in ("", "slots,run"):
            done = self.python(script, SHOAL_DEBUG=debug)
            self.assertEqual(done.stdout, "[]\n" * 4)
            said = [line for line in done.stderr.splitlines() if line.startswith("shoal run:")]
            self.assertEqual(len(said), 4 if debug else 0, said)
            for line, word in zip(said,
                                  ("no file of this Files is in a Shoal mount", "this Files has no list of files",
                                   "IterableDataset", "line break")):
                self.assertIn(word, line)

    def test_what_goes_wrong_does_not_reach_the_trainer(self):
        shutil.rmtree(os.path.join(self.mount, ".shoal", "plans"))
        done = self.python("train(DataLoader(Files(FILES), 4)); end()", SHOAL_DEBUG="run")
        self.assertEqual([len(read) for _, read in json.loads(done.stdout)["epochs"]], [24, 24])
        self.assertEqual(done.stderr.count("\n"), 1)
        self.assertIn("is not a Shoal mount", done.stderr)
        self.assertEqual(self.python("train(DataLoader(Files(FILES), 4)); end()").stderr, "")

    def test_nothing_lives_longer(self):
        """What went wrong holds no loader: it may have workers."""
        done = self.python("""
import gc, weakref
gc.disable()
loader = DataLoader(Files(range(24)), 4, sampler=[3])
begun, gone = iter(loader), weakref.ref(loader)
del begun, loader
print(gone())
def unused(): train(None)""", SHOAL_DEBUG="run")
        self.assertEqual(done.stdout, "None\n")
        self.assertIn("no list of files", done.stderr)

    def test_hints_by_hand(self):
        client = os.path.dirname(os.path.dirname(SITE))
        done = self.python("""
import shoal
loader = DataLoader(Files(FILES), 4, shuffle=True)
shoal.hint(loader, epochs=1, name="mine")
train(loader, "default", 1); train(loader, "mine", 1); end()""", PYTHONPATH=client)
        (default, _), (mine, _) = json.loads(done.stdout)["epochs"]
        self.assertIsNone(default)
        self.assertEqual(len(mine), 24)

    def test_a_program_is_as_without(self):
        with tempfile.TemporaryDirectory() as own:
            with open(os.path.join(own, "sitecustomize.py"), "w", encoding="utf-8") as f:
                f.write("import os, sys\nsys.mine = __file__\n")
            script = """
import sys, sitecustomize
print(sys.mine == sitecustomize.__file__, [p for p in sys.path if "_site" in p], "torch" in sys.modules, "numpy" in sys.modules)
import torch.utils.data.dataloader as d
print(d.__spec__.loader.get_source(d.__name__)[:4], d.DataLoader.__iter__.__qualname__)"""
            got, want = (self.python(script, hints, PYTHONPATH=own).stdout.splitlines() for hints in (True, False))
            self.assertEqual(got[0], "True [] False False")
            self.assertEqual(got, want)
            with open(os.path.join(own, "sitecustomize.py"), "a", encoding="utf-8") as f:
                f.write("raise ValueError('mine')\n")
            done = self.python("print('runs')", PYTHONPATH=own)
            self.assertEqual(done.stdout, "runs\n")
            self.assertIn("ValueError: mine", done.stderr)

    def test_ranks_by_fork_and_by_spawn(self):
        """Processes that the trainer starts are hinted too; a worker's own loaders are not."""
        for how in ("fork", "spawn"):
            with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as f:
                f.write(PRELUDE + f"""
def rank(r):
    os.environ["RANK"] = str(r)
    train(DataLoader(Files(FILES), 4, shuffle=True, num_workers=1), f"rank{{r}}", 1)
    end()
if __name__ == "__main__":
    import multiprocessing
    ranks = [multiprocessing.get_context({how!r}).Process(target=rank, args=(r,)) for r in range(2)]
    for p in ranks: p.start()
    for p in ranks: p.join()
    sys.exit(max(p.exitcode for p in ranks))
""")
                f.flush()
                done = subprocess.run([sys.executable, "-B", f.name, self.mount],
                                      env={**os.environ, "PYTHONPATH": SITE}, stdout=subprocess.PIPE, text=True,
                                      check=True)
            lines = done.stdout.splitlines()
            self.assertEqual(len(lines), 2)
            for line in lines:
                (told, read), = json.loads(line)["epochs"]
                self.assertEqual(told, read)

    def test_adapters(self):
        """A library that an adapter knows, in place of which a small one stands here."""
        with tempfile.TemporaryDirectory() as libraries:
            def write(path, text):
                os.makedirs(os.path.dirname(os.path.join(libraries, path)), exist_ok=True)
                with open(os.path.join(libraries, path), "w", encoding="utf-8") as f:
                    f.write(text)

            write("webdataset/__init__.py", "from . import compat, tariterators\n")
            write("webdataset/tariterators.py", "def url_opener(data):\n    for item in data:\n        yield item\n")
            write("webdataset/cache.py",
                  "class FileCache:\n    def __call__(self, urls):\n        for url in urls:\n            yield "
                  "url['url']\nclass StreamingOpen(FileCache):\n    pass\n")
            write("webdataset/compat.py", "from . import cache, tariterators\n")
            script = """
import webdataset
def urls(r):
    yield from ({"url": r.choice(FILES)} for _ in range(50))
class Shards(IterableDataset):
    def __iter__(self):
        return webdataset.cache.FileCache()(urls(random.Random(5)))
class Drawing:
    def __iter__(self):
        return urls(random.Random(random.random()))
opened = webdataset.cache.FileCache()(Drawing())
drawn.append(random.random())  # before the iteration begins
list(opened)
for epoch in range(2):
    told, read = None, []
    for file in DataLoader(Shards(), None, num_workers=workers):
        told = plan(name) or told
        read.append(file)
        drawn.append(random.random())
    epochs.append([told, read])
def unused(): train(None)"""
            for version, workers in (("1.0.2", 0), ("1.0.2", 1), ("9.9.9", 0)):
                write("webdataset-1.dist-info/METADATA",
                      f"Metadata-Version: 2.1\nName: webdataset\nVersion: {version}\n")
                name = "webdataset-worker0" if workers else "webdataset"
                for told, read in self.trained(f"workers, name = {workers}, {name!r}" + script, PYTHONPATH=libraries):
                    self.assertEqual(told, read if version == "1.0.2" else None)
            done = self.python("import webdataset", PYTHONPATH=libraries, SHOAL_DEBUG="run")
            self.assertEqual(done.stderr,
                             "shoal run: no hint: the adapter of webdataset knows 1.0.2, and this is 9.9.9\n")

    def test_a_library_in_an_archive(self):
        """Of its modules, which have one loader there, one is watched, once."""
        with tempfile.TemporaryDirectory() as libraries:
            archive = os.path.join(libraries, "all.zip")
            with zipfile.ZipFile(archive, "w") as z:
                for name, text in {
                    "__init__": "from . import compat, other", "compat": "from . import cache, tariterators",
                    "other": "from . import cache", "tariterators": "def url_opener(data):\n    yield from data\n",
                    "cache": "class FileCache:\n    def __call__(self, urls):\n        yield from urls\n"
                             "class StreamingOpen(FileCache):\n    pass\n",
                }.items():
                    z.writestr(f"webdataset/{name}.py", text)
            os.mkdir(os.path.join(libraries, "webdataset-1.dist-info"))
            with open(os.path.join(libraries, "webdataset-1.dist-info", "METADATA"), "w", encoding="utf-8") as f:
                f.write("Metadata-Version: 2.1\nName: webdataset\nVersion: 1.0.2\n")
            done = self.python("""
import webdataset
print(list(webdataset.cache.FileCache()(FILES)) == FILES, os.listdir(MOUNT + "/.shoal/plans"))
def unused(): train(None)""", PYTHONPATH=os.pathsep.join([archive, libraries]))
            # Before Python 3.10 such a loader cannot be watched.
            self.assertEqual(done.stdout, f"True {['webdataset'] if sys.version_info >= (3, 10) else []}\n")

    def test_names_of_shards(self):
        path = _run._beside(os.path.join("_adapters", "webdataset.py"))._path
        for url, want in ({"url": "/mnt/a#1.tar"}, "/mnt/a#1.tar"), ("b?.tar", "b?.tar"), ("file:/c.tar", "/c.tar"):
            self.assertEqual(path(url), want)
        with self.assertRaisesRegex(ValueError, "is no file"):
            path("pipe:cat /mnt/a.tar")

    def test_windows(self):
        """An order of ranges is written in windows, each before the one before has been read."""
        epochs = self.trained("""
run, by_window = sys.modules.get("_shoal_run"), []
class Parts(Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, i):
        return i
if run is not None:
    run.FIRST, run.WINDOW = 8, 20
    run.READING.append(lambda dataset: ("parts", lambda draw: [(FILES[i % 24], i, 2) for i in draw for _ in range(1 + i % 2)]) if isinstance(dataset, Parts) else None)
for workers in 0, 2:
    loader = DataLoader(Parts(), 3, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(2):
        read, windows = [], []
        for batch in loader:
            read += batch.tolist()
            for job in run._jobs.values() if run is not None else ():
                job.finish(60)
            try:
                told = open(f"{MOUNT}/.shoal/plans/parts").read().splitlines()
            except OSError:
                told = []
            if windows[-1:] != [told]:
                windows.append(told)
        if run is None:
            assert windows == [[]], windows
        else:
            want = [f"class{i % 3}/{i % 24:02d}.jpg\\t{i}\\t2" for i in read for _ in range(1 + i % 2)]
            assert all(w[0] == "#ranges" for w in windows) and all(len(w) <= 26 for w in windows), windows
            told = [line for w in windows for line in w[1:]]
            assert told == want[-len(told):] and len(windows) > 2, (windows, want)  # the first may have been followed at once
        epochs.append([None, read])
    del loader
def unused(): train(None)""")
        self.assertEqual(len(epochs), 4)
        done = self.python("""
run = sys.modules["_shoal_run"]
run.READING.append(lambda dataset: ("parts", lambda draw: [("/nowhere", i, 2) for i in draw]))
run.FIRST = 8
loader = DataLoader(Files(FILES), 1)
print([len(list(loader)) for _ in range(2)], os.listdir(MOUNT + "/.shoal/plans"))
def unused(): train(None)""", SHOAL_DEBUG="run")
        self.assertEqual((done.stdout, done.stderr),
                         ("[24, 24] []\n", "shoal run: no hint: no file of this Files is in a Shoal mount\n"))

    def test_windows_of_workers_that_are_ahead(self):
        """Their first batches may be more than a window has."""
        self.trained("""
run, windows = sys.modules.get("_shoal_run"), []
if run is not None:
    run.FIRST, run.WINDOW = 8, 30
    run.READING.append(lambda dataset: ("parts", lambda draw: [(FILES[i % 24], i, 2) for i in draw]) if isinstance(dataset, Parts) else None)
    def write(*args, write=run.Ahead.write):
        job = write(*args)
        job.finish(60)
        windows.append([int(line.split("\\t")[1]) for line in open(f"{MOUNT}/.shoal/plans/parts").read().splitlines()[1:]])
        return job
    run.Ahead.write = write
class Parts(Dataset):
    def __len__(self):
        return 90
    def __getitem__(self, i):
        return i
loader = DataLoader(Parts(), 3, shuffle=True, num_workers=2, prefetch_factor=4, persistent_workers=True)
for epoch in range(2):
    windows.clear()
    read = [i for batch in loader for i in batch.tolist()]
    assert run is None or sum(windows, []) == read, (windows, read)
    epochs.append([None, read])
def unused(): train(None)""")

    def test_windows_of_other_batches(self):
        """Batches may be arrays."""
        self.trained("""
run = sys.modules.get("_shoal_run")
if run is not None:
    run.FIRST, run.WINDOW = 8, 8
    run.READING.append(lambda dataset: ("parts", lambda draw: [(FILES[i], i, 2) for i in draw]))
class Arrays:
    def __iter__(self):
        return iter(np.random.permutation(24).reshape(6, 4))
    def __len__(self):
        return 6
windows, read = [], []
for batch in DataLoader(Files(FILES), batch_sampler=Arrays()):
    read += batch
    for job in run._jobs.values() if run is not None else ():
        job.finish(60)
        windows += [line for line in open(f"{MOUNT}/.shoal/plans/parts").read().splitlines()[1:] if line not in windows]
told = [MOUNT + "/" + w.split("\\t")[0] for w in windows]
assert run is None or len(told) >= 16 and told == read[-len(told):], (told, read)  # the first may have been followed at once
epochs.append([None, read])
def unused(): train(None)""")

    def test_another_users_folder(self):
        """A folder .shoal that another user has made, in /tmp perhaps, is no mount, and what its links lead to is not
        written."""
        if os.geteuid() != 0:
            self.skipTest("only root can make another user's folder")
        mine = os.path.join(self.mount, "mine")
        with open(mine, "w", encoding="utf-8") as f:
            f.write("precious")
        os.symlink(mine, os.path.join(self.mount, ".shoal", "plans", "default"))
        os.chown(os.path.join(self.mount, ".shoal"), 1234, 1234)
        done = self.python("train(DataLoader(Files(FILES), 4, shuffle=True)); end()", SHOAL_DEBUG="run")
        self.assertIn("no file of this Files is in a Shoal mount", done.stderr)
        with open(mine, encoding="utf-8") as f:
            self.assertEqual(f.read(), "precious")

    def test_signals(self):
        """A handler of the trainer's runs in the trainer only, and what it raises reaches that."""
        for raises in "", "; raise TimeoutError('mine')":
            epochs = self.trained(f"""
import signal
trainer = os.getpid()
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGUSR1))
def handler(*_):
    open(MOUNT + "/handled", "w").close(){raises}
signal.signal(signal.SIGUSR1, handler)
train(DataLoader(Files(FILES), 4, shuffle=True))""")
            self.assertEqual([told for told, _ in epochs], [None, None])
            self.assertFalse(os.path.exists(self.mount + "/handled"))
        done = self.python(AWAITED + """class Handler:
    def __call__(self, *_):
        raise TimeoutError("mine")
class Bound:
    def late(self, *_):
        raise RuntimeError("mine")
def once(signum, _):
    signal.signal(signum, signal.SIG_IGN)
    raise RuntimeError("mine")
for handler in Handler(), Bound().late, once:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        train(DataLoader(Files(FILES), 4, sampler=Waits()))
        print("nothing was raised")
    except (TimeoutError, RuntimeError) as e:
        print(e)""")
        self.assertEqual(done.stdout, "mine\nmine\nmine\n")

    def test_end_while_an_order_is_awaited(self):
        done = self.python(AWAITED + """sys.modules["_shoal_run"].WAIT = 0
train(DataLoader(Files(FILES), 4, sampler=Waits()), times=1)""", SHOAL_DEBUG="run")
        self.assertEqual((done.stdout, done.stderr), ("", ""))

    def test_nothing_is_left_open(self):
        self.trained("""
run, kept = sys.modules.get("_shoal_run"), []
if run is not None:
    run._hint().SHORT = 0
def opened():
    return len(os.listdir("/proc/self/fd"))
before = opened()
for epoch in range(8):
    loader = DataLoader(Files(FILES), 4)
    for batch in loader:
        pass
    if run is not None:
        import select
        for job in run._jobs.values():
            if job.apart._pipe >= 0:
                select.select([job.apart._pipe], [], [], 60)
    del loader
    kept += [DataLoader(Files(FILES), 4) for _ in range(10)]
assert opened() <= before + 2, (before, opened())
epochs.append([None, []])
def unused(): train(None)""")
        done = self.python("""
import resource
hint = sys.modules["_shoal_run"]._hint()
def fail():
    raise BlockingIOError("no memory")
before, os.fork = len(os.listdir("/proc/self/fd")), fail
for epoch in range(5):
    list(DataLoader(Files(FILES), 4))
print(len(os.listdir("/proc/self/fd")) - before)
def unused(): train(None)""")
        self.assertEqual(done.stdout, "0\n")

    def test_odd_loaders(self):
        """What a loader is asked for changes nothing, and what cannot be said does not reach the trainer."""
        self.trained("""
class Drawing(DataLoader):
    @property
    def iterator(self):
        random.random()
        return None
    def __iter__(self):
        return super().__iter__()
train(Drawing(Files(FILES), 4, shuffle=True))
from torch.utils.data import dataloader
class Threads(dataloader._SingleProcessDataLoaderIter):
    def __init__(self, loader):
        super().__init__(loader)
        self._num_workers = 2
class Own(DataLoader):
    def __iter__(self):
        return Threads(self)
train(Own(Files(FILES), 4))
class Asked:
    def __init__(self, batches):
        self.batches = batches
    def __iter__(self):
        return self
    def __next__(self):
        return next(self.batches)
    def __getattr__(self, name):
        random.random()
        raise AttributeError(name)
class Asking(DataLoader):
    def __iter__(self):
        return Asked(super().__iter__())
train(Asking(Files(FILES), 4))
class Static(DataLoader):
    __iter__ = staticmethod(lambda: iter([FILES[3:5]]))
train(Static(Files(FILES), 4))
class Code(Files):
    def __len__(self):
        return 24 + 0 * random.randrange(9)
    def __getattr__(self, name):
        random.random()
        raise AttributeError(name)
class Asked(Sampler):
    def __init__(self): # torch 1 wants the data there, torch 2.15 nothing
        pass
    rank = sampler = property(lambda self: random.randrange(9))
    num_replicas = property(lambda self: 2 + random.randrange(9))
    def __iter__(self):
        return iter(range(24))
    def __len__(self):
        return 24
train(DataLoader(Code(FILES), 4, sampler=Asked()))""")
        done = self.python("sys.stderr.close(); train(DataLoader(Files(FILES), 4)); end()", SHOAL_DEBUG="run")
        self.assertEqual(len(json.loads(done.stdout)["epochs"]), 2)

    def test_a_warning_of_forks(self):
        """Libraries with threads warn of forks, JAX for one. This fork is not the trainer's."""
        done = self.python("""
import warnings
os.register_at_fork(before=lambda: warnings.warn("os.fork() was called", RuntimeWarning, stacklevel=2))
train(DataLoader(Files(FILES), 4)); end()""")
        self.assertEqual(done.stderr, "")
        (told, read), *_ = json.loads(done.stdout)["epochs"]
        self.assertEqual(told, read)

    def test_a_loader_pickled_by_value(self):
        """As cloudpickle takes a class of the main module to processes that have no Shoal: its functions are made again
        there, of their code, of what they name of their module, and of their cells."""
        done = self.python("""
import types
class Own(DataLoader):
    def __iter__(self):
        return super().__iter__()
begin = Own.__iter__
named = {name: begin.__globals__[name] for name in begin.__code__.co_names if name in begin.__globals__}
print({type(value) is types.ModuleType and name for name, value in named.items()})
again = types.FunctionType(begin.__code__, named, "again", None, begin.__closure__)
for _ in range(2):
    print(sum(map(len, again(Own(Files(FILES), 4)))), os.listdir(MOUNT + "/.shoal/plans"))
    sys.modules.pop("_shoal_run", None)
    for plan in os.listdir(MOUNT + "/.shoal/plans"):
        os.unlink(MOUNT + "/.shoal/plans/" + plan)
def unused(): train(None)""")
        self.assertEqual(done.stdout, "{'sys'}\n24 ['default']\n24 []\n")

    def test_order_at_exit(self):
        script = """
import atexit, weakref
train(DataLoader(Files(FILES), 4))
atexit.register(print, "first registered")
last = Files(FILES)
weakref.finalize(last, print, "last registered")"""
        self.assertEqual(*(self.python(script, hints).stdout for hints in (True, False)))

    def test_interrupt(self):
        done = self.python("""
import os, signal
class Slow(Files):
    def __getitem__(self, i):
        os.kill(os.getpid(), signal.SIGINT)
train(DataLoader(Slow(FILES), 4))""", check=False)
        self.assertIn(done.returncode, (1, -signal.SIGINT))
        self.assertIn("KeyboardInterrupt", done.stderr)


if __name__ == "__main__":
    unittest.main()
