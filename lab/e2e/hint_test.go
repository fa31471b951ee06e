package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// streamStats is what the stats say of one order in progress.
type streamStats struct {
	Name                                 string
	Epoch, Position, Consumed, Len, Pass int
	Strays                               int
	Lead                                 int `json:"lead_samples"`
	Events                               map[string]int
	Reanchored                           *struct {
		Event, Text             string
		Epoch, Position, Unread int
	}
}

func streamsOf(t testing.TB, mnt string) map[string]streamStats {
	t.Helper()
	return streamsIn(t, []byte(mustShoal(t, nil, "stat", mnt, "--json")))
}

func streamsIn(t testing.TB, stats []byte) map[string]streamStats {
	t.Helper()
	var s struct{ Streams []streamStats }
	if err := json.Unmarshal(stats, &s); err != nil {
		t.Fatal(err)
	}
	byName := map[string]streamStats{}
	for _, st := range s.Streams {
		byName[st.Name] = st
	}
	return byName
}

func putPlan(t testing.TB, mnt, name string, paths []string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(mnt, ".shoal/plans", name), []byte(strings.Join(paths, "\n")+"\n"),
		0o644); err != nil {
		t.Fatal(err)
	}
}

// readInOrder reads the files one after the other, as a trainer without workers does, each when it has been
// fetched ahead.
func readInOrder(t testing.TB, mnt string, paths []string) {
	t.Helper()
	for _, p := range paths {
		if _, err := os.ReadFile(filepath.Join(mnt, p)); err != nil {
			t.Fatal(err)
		}
	}
}

// Two ranks of a real trainer on one mount, with a cache that holds a fraction: each epoch is hinted, and
// after the first reads of each nobody waits for a read that was not under way.
func TestHintedRanks(t *testing.T) {
	dir, paths := pictures(t, 8, 32)
	for _, p := range paths { // what follows the picture makes the set larger than memory
		f, err := os.OpenFile(filepath.Join(dir, p), os.O_APPEND|os.O_WRONLY, 0)
		if err == nil {
			_, err = f.Write(make([]byte, 600<<10))
		}
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	_, env := far(t, proxy.Options{Latency: 20 * time.Millisecond, Sigma: 0.3})
	mnt := mount(t, env, bucket(t, dir), "--kernel-cache", "off", "--memory", "128MiB", "--cache-size", "32MiB")
	meet := filepath.Join(t.TempDir(), "meet")
	const epochs, world = 3, 2
	var ranks sync.WaitGroup
	images := make([]int, world)
	for rank := range world {
		ranks.Go(func() {
			cmd := python(t, `
import json, sys, torch, torch.distributed as dist
import shoal
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms as T
rank, world = int(sys.argv[3]), 2
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=world)
data = datasets.ImageFolder(sys.argv[1], T.Compose([T.CenterCrop(64), T.ToTensor()]))
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, 16, sampler=sampler, num_workers=2)
n = 0
for epoch in range(int(sys.argv[4])):
    sampler.set_epoch(epoch)
    before = torch.get_rng_state()
    assert shoal.hint(loader) == len(sampler)
    assert torch.equal(torch.get_rng_state(), before)
    for x, y in loader:
        n += len(y)
        dist.barrier()
print(json.dumps(n))`, mnt, meet, fmt.Sprint(rank), fmt.Sprint(epochs))
			cmd.Stderr = os.Stderr
			out, err := cmd.Output()
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
				return
			}
			if err := json.Unmarshal(out, &images[rank]); err != nil {
				t.Errorf("rank %d: %s", rank, out)
			}
		})
	}
	ranks.Wait()
	s := readStats(t, mnt)
	t.Logf("%d opens, %d reads, %d misses, %d joined, %d GETs, hits %+v",
		s.Opens, s.Reads, s.Misses, s.Joined, s.Gets, s.Hits)
	for rank, n := range images {
		if want := epochs * len(paths) / world; n != want {
			t.Errorf("rank %d saw %d images, want %d", rank, n, want)
		}
	}
	if s.Misses > s.Reads/10 {
		t.Errorf("%d of %d reads were for what nobody had asked for yet", s.Misses, s.Reads)
	}
	// Memory holds some forty files for two ranks: what one takes back from the other is fetched again.
	if gets := s.Gets - s.Hedges.Sent; gets > int64(len(paths))*epochs*9/8 || gets < int64(len(paths))*3/2 {
		t.Errorf("%d GETs for %d files in %d epochs", s.Gets, len(paths), epochs)
	}
	for rank := range world {
		st, ok := streamsOf(t, mnt)[fmt.Sprintf("plans/rank%d", rank)]
		if !ok || st.Len != len(paths)/world || st.Epoch != epochs-1 || st.Events["next_epochs"] != epochs-1 ||
			st.Events["jumps"] != 0 {
			t.Errorf("rank %d: %+v", rank, st)
		}
	}
}

// What a reader does otherwise than its plan says is noticed, said, and followed.
func TestReanchoring(t *testing.T) {
	dir, paths := tree(t, 4, 150, 2<<10)
	_, env := far(t, proxy.Options{Latency: 5 * time.Millisecond})
	mnt := mount(t, env, bucket(t, dir), "--kernel-cache", "off", "--cache-size", "64MiB")
	orders := make([][]string, 4)
	for epoch := range orders {
		orders[epoch] = torchOrder(t, "torch:seed=4", paths, "--epoch", fmt.Sprint(epoch))
	}
	n := len(paths)
	// The opens that show a move may not all be told from the reads before it.
	const unsure = 8
	is := func(what, event string, epoch, position, unread int, text string) {
		t.Helper()
		st := streamsOf(t, mnt)["plans/default"]
		r := st.Reanchored
		if r == nil || r.Event != event || r.Epoch != epoch || r.Position < position || r.Position > position+unsure ||
			r.Unread > unread+unsure || r.Unread < unread-unsure {
			t.Fatalf("%s: %+v, %+v", what, st, r)
		}
		if strings.Contains(text, "%") {
			text = fmt.Sprintf(text, r.Unread)
		}
		told, err := os.ReadFile(filepath.Join(mnt, ".shoal/order"))
		if err != nil || r.Text != text || !strings.Contains(string(told), text+", at ") {
			t.Errorf("%s: %q, want %q; .shoal/order: %v\n%s", what, r.Text, text, err, told)
		}
	}
	// A run that goes on in mid-epoch.
	putPlan(t, mnt, "default", orders[0])
	readInOrder(t, mnt, orders[0][300:400])
	is("resume", "jump", 0, 300, 300, "jumped to position 300: the reader skipped 300 samples")
	within(t, patience, "what follows is fetched ahead", func() bool { return readStats(t, mnt).Lead == n-400 })
	before := readStats(t, mnt)
	readInOrder(t, mnt, orders[0][400:])
	if s := readStats(t, mnt); s.Misses+s.Joined != before.Misses+before.Joined || s.Order.State != "finished" {
		t.Errorf("after a resume the reader waited: %+v", s)
	}
	// The next epoch, after a complete one: begun by its plan.
	putPlan(t, mnt, "default", orders[1])
	is("next epoch", "next epoch", 1, 0, 300,
		"went on to epoch 1; the reader left 300 samples of the pass before unread")
	// It ends early, and samples are skipped in it.
	readInOrder(t, mnt, orders[1][:60])
	readInOrder(t, mnt, orders[1][360:460])
	is("skip", "jump", 1, 360, 300, "jumped to position 360: the reader skipped 300 samples")
	putPlan(t, mnt, "default", orders[2])
	if told, _ := os.ReadFile(filepath.Join(mnt, ".shoal/order")); !strings.Contains(string(told),
		"another plan was written") {
		t.Errorf(".shoal/order does not say that a plan waits:\n%s", told)
	}
	readInOrder(t, mnt, orders[2])
	is("early end", "next epoch", 2, 0, n-160,
		"went on to epoch 2; the reader left %d samples of the pass before unread")
	// No plan for the next epoch: the reader repeats.
	readInOrder(t, mnt, orders[2][:200])
	is("repeat", "restart", 2, 0, 0, "began epoch 2 again")
	st := streamsOf(t, mnt)["plans/default"]
	for event, want := range map[string]int{"jumps": 2, "next_epochs": 2, "restarts": 1, "previous_epochs": 0,
		"found": 0} {
		if st.Events[event] != want {
			t.Errorf("%d %s, want %d", st.Events[event], event, want)
		}
	}
}

// A run that resumes in epoch 7 on a fresh mount, which expects epoch 0.
func TestFarEpoch(t *testing.T) {
	dir, paths := tree(t, 4, 100, 2<<10)
	_, env := far(t, proxy.Options{Latency: 5 * time.Millisecond})
	mnt := mount(t, env, bucket(t, dir), "--kernel-cache", "off", "--order", "torch:seed=4")
	ordered := torchOrder(t, "torch:seed=4", paths, "--epoch", "7")
	readInOrder(t, mnt, ordered[:80])
	within(t, patience, "the epoch is found", func() bool { return readStats(t, mnt).Order.Epoch == 7 })
	st := streamsOf(t, mnt)["mount"]
	if r := st.Reanchored; r == nil || r.Event != "found" || r.Position != 0 || st.Events["found"] != 1 ||
		st.Consumed != 80 {
		t.Errorf("%+v, %+v", st, r)
	}
	readInOrder(t, mnt, ordered[80:])
	readInOrder(t, mnt, torchOrder(t, "torch:seed=4", paths, "--epoch", "8")[:100])
	if s := readStats(t, mnt); s.Order.Epoch != 8 || s.Misses+s.Joined > 400 {
		t.Errorf("epoch 8: %+v", s)
	}
}

// The plan files' rules, by a shell and by Python: an append extends the plan, and its reader stays where
// it is; tools that write through other files are told that they cannot; several names are several streams.
func TestPlanFilesByTools(t *testing.T) {
	dir, paths := tree(t, 2, 60, 2<<10)
	_, env := far(t, proxy.Options{})
	mnt := mount(t, env, bucket(t, dir), "--kernel-cache", "off")
	scratch := t.TempDir()
	list := func(name string, lines []string) string {
		p := filepath.Join(scratch, name)
		write(t, p, []byte(strings.Join(lines, "\n")+"\n"))
		return p
	}
	sh := func(script string) (string, error) {
		cmd := exec.Command("sh", "-c", script)
		cmd.Dir = mnt
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	must := func(script string) {
		t.Helper()
		if out, err := sh(script); err != nil {
			t.Fatalf("%s: %v %s", script, err, out)
		}
	}
	plan := func(name string) string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(mnt, ".shoal/plans", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	first, second := list("first", paths[:60]), list("second", paths[60:])

	must("cat " + first + " > .shoal/plan")
	readInOrder(t, mnt, paths[:30])
	must("cat " + second + " >> .shoal/plan")
	st := streamsOf(t, mnt)["plans/default"]
	if plan("default") != strings.Join(paths, "\n")+"\n" || st.Len != 120 || st.Consumed != 30 || st.Position != 30 ||
		st.Reanchored != nil {
		t.Errorf("after an append: %+v", st)
	}
	within(t, patience, "all of it is fetched", func() bool { return readStats(t, mnt).Lead == 90 })
	// One line more, without a newline, by a shell and by Python.
	must("printf %s " + paths[0] + " >> .shoal/plan")
	var size int
	runPython(t, &size, `
import sys
with open(sys.argv[1], "a") as f:
    f.write(sys.argv[2])
print(len(open(sys.argv[1]).read().splitlines()))`, filepath.Join(mnt, ".shoal/plan"), paths[1])
	if st := streamsOf(t, mnt)["plans/default"]; size != 122 || st.Len != 122 || st.Consumed != 30 {
		t.Errorf("%d lines after two appends: %+v", size, st)
	}
	readInOrder(t, mnt, paths[30:])
	readInOrder(t, mnt, paths[:2])
	if s, st := readStats(t, mnt), streamsOf(t, mnt)["plans/default"]; st.Consumed != 122 ||
		s.Order.State != "finished" {
		t.Errorf("%+v after all of an extended plan", st)
	}

	// A bad line in an append refuses it, by its number in the whole plan; in Python close raises.
	var refused struct {
		Errno int
		Order string
	}
	runPython(t, &refused, `
import json, sys
f = open(sys.argv[1] + "/.shoal/plan", "a")
f.write("class00/none.jpg\n")
try:
    f.close()
    e = 0
except OSError as error:
    e = error.errno
print(json.dumps(dict(Errno=e, Order=open(sys.argv[1] + "/.shoal/order").read())))`, mnt)
	if refused.Errno != int(syscall.EINVAL) || !strings.Contains(refused.Order, "line 123") ||
		streamsOf(t, mnt)["plans/default"].Len != 122 {
		t.Errorf("a bad append: %+v", refused)
	}

	must("dd if=" + second + " of=.shoal/plans/a bs=512 status=none")
	must("dd if=" + first + " of=.shoal/plans/a bs=7 conv=notrunc oflag=append status=none")
	if plan("a") != strings.Join(append(append([]string{}, paths[60:]...), paths[:60]...), "\n")+"\n" {
		t.Error("dd: another plan")
	}
	must("cp " + first + " .shoal/plans/d && mv .shoal/plans/d .shoal/plans/b && tee .shoal/plans/c < " + second +
		" > /dev/null")
	for _, script := range []string{"mv " + list("moved", paths) + " .shoal/plans/a",
		"mv .shoal/plans/b .shoal/plans/b~", "ln .shoal/plans/b .shoal/plans/e",
		"sed -i s/class/CLASS/ .shoal/plans/b", "mkdir .shoal/plans/f", "echo x > .shoal/plans/b~",
		"echo x > .shoal/plans/.b.swp"} {
		// mv from another filesystem copies where it may not rename: it must at least not break the plan.
		if out, err := sh(script); err == nil && !strings.HasPrefix(script, "mv "+scratch) {
			t.Errorf("%s went through: %s", script, out)
		}
	}
	for name, lines := range map[string][]string{"b": paths[:60], "c": paths[60:]} {
		if plan(name) != strings.Join(lines, "\n")+"\n" {
			t.Errorf("plan %s is another", name)
		}
	}
	streams := streamsOf(t, mnt)
	for name, n := range map[string]int{"default": 122, "a": 120, "b": 60, "c": 60} {
		if streams["plans/"+name].Len != n {
			t.Errorf("stream %s: %+v", name, streams["plans/"+name])
		}
	}

	// Writers at once, each with the whole plan, and with appends: one plan is whole, no line of an append is lost.
	var writers sync.WaitGroup
	for w := range 4 {
		writers.Go(func() {
			for range 5 {
				putPlan(t, mnt, "whole", paths[w*30:w*30+30])
				if out, err := sh("cat " + first + " >> .shoal/plans/appended"); err != nil {
					t.Errorf("append: %v %s", err, out)
				}
			}
		})
	}
	writers.Wait()
	whole := false
	for w := range 4 {
		whole = whole || plan("whole") == strings.Join(paths[w*30:w*30+30], "\n")+"\n"
	}
	if got := plan("appended"); !whole || got != strings.Repeat(strings.Join(paths[:60], "\n")+"\n", 20) {
		t.Errorf("writers at once: whole %v, %d lines appended", whole, strings.Count(got, "\n"))
	}
	if f, err := os.OpenFile(filepath.Join(mnt, ".shoal/stats"), os.O_WRONLY, 0); !errors.Is(err, syscall.EROFS) {
		t.Errorf("the stats open for writing: %v", err)
		_ = f.Close()
	}
}

// A plan that the trainer does not follow is withdrawn within 64 opens, and .shoal/order says so; one that it follows
// stays, from its beginning and after a resume, with workers and without.
func TestPlanWithdrawn(t *testing.T) {
	dir, paths := pictures(t, 8, 50)
	mnt := mount(t, s3server.Env(server.URL), bucket(t, dir), "--kernel-cache", "on")
	trainers := startTrainers(t, `
mnt, workers, planned, read, skip = command
def order(seed):
    return torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
with open(mnt + "/.shoal/plans/default", "w") as f:
    f.write("".join(files[i] + "\n" for i in order(planned)))
for _ in DataLoader(Files(mnt), 8, sampler=order(read)[skip:skip + 64], num_workers=workers):
    pass
`, paths)
	train := func(workers, planned, read, skip int) {
		t.Helper()
		trainers.run(1, mnt, workers, planned, read, skip)
	}
	for i, workers := range []int{0, 2, 4} {
		train(workers, 1+i, 101+i, 0)
		within(t, patience, "the plan withdrawn", func() bool {
			return strings.Contains(orderSays(t, mnt), "plan default withdrawn")
		})
		first := 0 // 32, and what other workers opened meanwhile
		text := orderSays(t, mnt)
		if _, after, ok := strings.Cut(text, " of their first "); ok {
			_, _ = fmt.Sscan(after, &first)
		}
		if first < 32 || first > 64 || len(streamsOf(t, mnt)) != 0 && streamsOf(t, mnt)["plans/default"].Len > 0 {
			t.Errorf("%d workers: %s", workers, text)
		}
		for _, skip := range []int{0, 200} {
			train(workers, 201+i, 201+i, skip)
			if text := orderSays(t, mnt); strings.Contains(text, "withdrawn") ||
				streamsOf(t, mnt)["plans/default"].Len != len(paths) {
				t.Errorf("%d workers, resumed at %d: %s", workers, skip, text)
			}
		}
	}
}

// Plans that are followed stay, however many workers with single samples read a short one, and however many ranks,
// loaders and programs without a plan read the same files at the same time, each in its own order.
func TestFollowedPlansStay(t *testing.T) {
	dir, paths := pictures(t, 6, 50)
	trainers := startTrainers(t, `
mnt, workers, batch, loaders, resumed = command
options = dict(num_workers=workers, batch_size=batch)
if workers:
    options.update(prefetch_factor=4, persistent_workers=True)
made = []
for k in range(loaders):
    torch.manual_seed(10 * rank + k)
    made.append(DataLoader(Files(mnt), sampler=torch.randperm(len(files)).tolist()[resumed:], **options))
for epoch in range(2):
    for k, loader in enumerate(made):
        shoal.hint(loader, name=f"rank{rank}-{k}")
    for _ in zip(*made):
        pass
`, paths)
	for _, c := range []struct{ ranks, workers, batch, loaders, resumed int }{
		{1, 16, 1, 1, 0}, {1, 16, 2, 1, 90}, {8, 1, 8, 1, 0}, {4, 2, 1, 1, 150}, {1, 0, 4, 2, 0}, {2, 3, 4, 2, 20},
	} {
		mnt := mount(t, s3server.Env(server.URL), bucket(t, dir), "--kernel-cache", "on")
		trainers.run(c.ranks, mnt, c.workers, c.batch, c.loaders, c.resumed)
		plans, text := 0, orderSays(t, mnt)
		for name, st := range streamsOf(t, mnt) {
			if strings.HasPrefix(name, "plans/") && st.Len == len(paths)-c.resumed {
				plans++
			}
		}
		if plans != c.ranks*c.loaders || strings.Contains(text, "withdrawn") {
			t.Errorf("%+v: %d plans stay\n%s", c, plans, text)
		}
	}
}

// trainers are processes with torch, which is imported once.
type trainers struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Reader
}

// startTrainers prepares to run a script, which knows its rank, its command and the files.
func startTrainers(t *testing.T, script string, files []string) *trainers {
	t.Helper()
	cmd := python(t, `
import json, os, sys, traceback, warnings
import shoal, torch
from torch.utils.data import DataLoader, Dataset
script, files = sys.argv[1], sys.argv[2].split()
class Files(Dataset):
    def __init__(self, mnt):
        self.samples = [(mnt + "/" + p, 0) for p in files]
    def __len__(self):
        return len(files)
    def __getitem__(self, i):
        with open(self.samples[i][0], "rb") as f:
            return len(f.read())
warnings.simplefilter("ignore")  # of more workers than processors
for line in sys.stdin:
    ranks, command = json.loads(line)
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                exec(script, dict(globals(), rank=rank, command=command))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    print([os.waitpid(pid, 0)[1] for pid in children], flush=True)
`, script, strings.Join(files, " "))
	cmd.Stderr = os.Stderr
	in, out := piped(t, cmd)
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	return &trainers{t, in, bufio.NewReader(out)}
}

// run runs the script in as many processes, and waits for them.
func (p *trainers) run(ranks int, command ...any) {
	p.t.Helper()
	line, err := json.Marshal([]any{ranks, command})
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err = fmt.Fprintf(p.in, "%s\n", line); err != nil {
		p.t.Fatal(err)
	}
	if codes, err := p.out.ReadString('\n'); err != nil || strings.Trim(codes, "[0, ]\n") != "" {
		p.t.Fatalf("%v: the trainers ended with %s, %v", command, codes, err)
	}
}
