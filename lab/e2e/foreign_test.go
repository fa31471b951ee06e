package e2e

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// foreignReader reads ranges of large files in formats and orders that are none of Shoal's: which trace, and of which
// seed.
const foreignReader = `
import io, mmap, os, random, sqlite3, sys, tarfile, threading, zipfile
import numpy as np
ROWS, ROW = 1280, 4096
KINDS = []

def kind(f):
    KINDS.append(f)
    return f

def pread(path, row, n=1):
    with open(path, "rb", 0) as f:
        return os.pread(f.fileno(), n * ROW, row * ROW)

@kind
def rows_anywhere(files, rng):
    for _ in range(400):
        pread(rng.choice(files), rng.randrange(ROWS))

@kind
def shuffled_rows_of_all(files, rng):  # numpy's generator; one open a row
    for i in np.random.RandomState(rng.randrange(2**32)).permutation(len(files) * ROWS)[:600]:
        pread(files[i // ROWS], i % ROWS)

@kind
def torch_rows_of_all(files, rng):  # torch's generator, whose shuffles of files are known; one open a row
    import torch
    for i in torch.randperm(len(files) * ROWS, generator=torch.Generator().manual_seed(rng.randrange(2**32)))[:600].tolist():
        pread(files[i // ROWS], i % ROWS)

@kind
def memmap_of_each(files, rng):
    maps = [np.memmap(f, np.uint8, "r") for f in files]
    for _ in range(400):
        i = rng.randrange(ROWS)
        maps[rng.randrange(len(maps))][i * ROW:(i + 1) * ROW].sum()

@kind
def shards_shuffled_rows_shuffled(files, rng):  # MDS's kind: blocks of shards
    order = files[:]
    rng.shuffle(order)
    for block in range(0, len(order), 4):
        rows = [(f, r) for f in order[block:block + 4] for r in range(0, ROWS, 16)]
        rng.shuffle(rows)
        for f, r in rows:
            pread(f, r)

@kind
def footers(files, rng):  # a Parquet dataset's: each footer in the order of names, then row groups at random
    for f in files:
        with open(f, "rb") as h:
            h.seek(-8, 2), h.read(8), h.seek(-ROW, 2), h.read(ROW)
    for _ in range(200):
        pread(rng.choice(files), rng.randrange(0, ROWS - 8, 8), 8)

@kind
def headers_backwards(files, rng):
    for f in reversed(files):
        pread(f, 0)
    for _ in range(100):
        pread(rng.choice(files), rng.randrange(ROWS))

@kind
def strides(files, rng):
    step = rng.randrange(3, 40)
    for first in range(2):
        for i in range(first, len(files) * ROWS, step * 16):
            pread(files[i // ROWS], i % ROWS)

@kind
def one_file(files, rng):
    f = rng.choice(files)
    for _ in range(300):
        pread(f, rng.randrange(ROWS))

@kind
def few_open(files, rng):  # a pool of four descriptors
    pool = {}
    for _ in range(400):
        f = rng.choice(files)
        if f not in pool:
            if len(pool) == 4:
                pool.pop(next(iter(pool))).close()
            pool[f] = open(f, "rb", 0)
        pool[f].seek(rng.randrange(ROWS) * ROW), pool[f].read(ROW)

@kind
def members(files, rng):  # of real archives
    for path in rng.sample(ZIPS * 8, 60):
        with zipfile.ZipFile(path) as z:
            z.read(rng.choice(z.namelist()))

@kind
def queries(files, rng):  # of real databases
    for path in rng.sample(DBS * 8, 60):
        with sqlite3.connect("file:" + path + "?mode=ro&immutable=1", uri=True) as db:
            db.execute("select v from t where k = ?", (rng.randrange(2000),)).fetchone()

@kind
def tar_headers(files, rng):
    for path in rng.sample(TARS * 8, 40):
        with tarfile.open(path) as tar:
            m = rng.choice(tar.getmembers())
            tar.extractfile(m).read()

@kind
def two_threads(files, rng):
    def read(seed):
        r = random.Random(seed)
        for _ in range(150):
            pread(r.choice(files), r.randrange(ROWS))
    both = [threading.Thread(target=read, args=(rng.random(),)) for _ in range(2)]
    [t.start() for t in both], [t.join() for t in both]

@kind
def two_processes(files, rng):
    children = []
    for _ in range(2):
        seed, pid = rng.random(), os.fork()
        if pid == 0:
            r = random.Random(seed)
            for _ in range(150):
                pread(r.choice(files), r.randrange(ROWS))
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)

@kind
def bisection(files, rng):
    for _ in range(40):
        f, low, high = rng.choice(files), 0, ROWS
        while high - low > 1:
            at = (low + high) // 2
            pread(f, at)
            low, high = (at, high) if rng.random() < .5 else (low, at)

@kind
def columns(files, rng):  # a column chunk of each file after another
    column = rng.randrange(8)
    order = rng.sample(files, len(files))
    for f in order:
        pread(f, column * 32, 4)

@kind
def weighted(files, rng):
    for f in rng.choices(files, [1 / (i + 1) for i in range(len(files))], k=400):
        pread(f, rng.randrange(ROWS))

@kind
def walk(files, rng):
    at = rng.randrange(len(files) * ROWS)
    for _ in range(400):
        at = (at + rng.randrange(-300, 300)) % (len(files) * ROWS)
        pread(files[at // ROWS], at % ROWS)

@kind
def mapped(files, rng):
    for _ in range(150):
        with open(rng.choice(files), "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as m:
            i = rng.randrange(ROWS) * ROW
            bytes(m[i:i + 100])

def archives(root):
    rng = random.Random(1)
    for i in range(8):
        with zipfile.ZipFile(f"{root}/pictures-{i}.zip", "w") as z:
            for k in range(60):
                z.writestr(f"{k:03}.jpg", rng.randbytes(12000))
        with tarfile.open(f"{root}/sounds-{i}.tar", "w") as tar:
            for k in range(60):
                info = tarfile.TarInfo(f"{k:03}.wav")
                info.size = 12000
                tar.addfile(info, io.BytesIO(rng.randbytes(12000)))
        db = sqlite3.connect(f"{root}/table-{i}.db")
        db.execute("create table t (k integer primary key, v blob)")
        db.executemany("insert into t values (?, ?)", ((k, rng.randbytes(300)) for k in range(2000)))
        db.commit(), db.close()
    for i in range(32):
        with open(f"{root}/tokens-{i:02}.bin", "wb") as f:
            f.write(rng.randbytes(ROWS * ROW))
    for i in range(64):
        with open(f"{root}/records-{i:02}.rec", "wb") as f:
            f.write(rng.randbytes(ROWS // 10 * ROW))

root, which = sys.argv[1:3]
if which == "make":
    archives(root)
    sys.exit()
names = sorted(n for n in os.listdir(root) if n[0] != ".")
ZIPS, DBS, TARS = ([os.path.join(root, n) for n in names if n.endswith(e)] for e in (".zip", ".db", ".tar"))
files = [os.path.join(root, n) for n in names if n.endswith(".bin")]
trace, again = KINDS[int(which) % len(KINDS)], int(which) // len(KINDS)
if again % 2 and trace not in (memmap_of_each, footers, headers_backwards, strides, columns):  # which read file after file
    files, ROWS = [os.path.join(root, n) for n in names if n.endswith(".rec")], ROWS // 10
trace(files, random.Random(int(which)))
print(trace.__name__)
`

// Programs that read ranges of large files in orders of their own, 200 in all: no order is said to be known, and hardly
// more is read from the store than with --order none.
func TestForeignRanges(t *testing.T) {
	long(t)
	dir := t.TempDir()
	if out, err := python(t, foreignReader, dir, "make").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	source := bucket(t, dir)
	far, env := far(t, proxy.Options{})
	for which := range 200 { // ten of each kind
		var got [2]int64
		for i, order := range []string{"none", "auto"} {
			mnt := mount(t, env, source, "--order", order, "--kernel-cache", "off",
				"--cache-dir", filepath.Join(t.TempDir(), "cache"))
			before := far.Stats()
			out, err := python(t, foreignReader, mnt, fmt.Sprint(which)).Output()
			if err != nil {
				t.Fatal(err)
			}
			s := readStats(t, mnt)
			umount(t, mnt)
			got[i] = far.Stats().Sub(before).GetBytes
			if order == "auto" {
				name := string(out[:len(out)-1])
				said, _ := json.Marshal(s.Order)
				t.Logf("%3d %-30s %6d opens, %9d bytes, %9d with auto: %s", which, name, s.Opens, got[0], got[1], said)
				if s.Order.State == "inferred" {
					t.Errorf("%d, %s: %s", which, name, said)
				}
			}
		}
		if got[1] > got[0]*102/100+1<<20 {
			t.Errorf("%d: %d bytes, and %d without an order", which, got[1], got[0])
		}
	}
}
