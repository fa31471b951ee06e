package e2e

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// weathers are what a store is like for a few seconds. The last two are outages, which retries outlast.
var weathers = []proxy.Options{
	fine,
	{Latency: 80 * time.Millisecond, Sigma: 0.6},
	{Latency: 10 * time.Millisecond, Bandwidth: 4 << 20},
	{Latency: 10 * time.Millisecond, Faults: []proxy.Fault{{Kind: proxy.Unavailable, P: 0.1}}},
	{Latency: 10 * time.Millisecond,
		Faults: []proxy.Fault{{Kind: proxy.Reset, P: 0.05, At: 0.5}, {Kind: proxy.Truncate, P: 0.05, At: 0.5}}},
	{Latency: 10 * time.Millisecond,
		Faults: []proxy.Fault{{Kind: proxy.Stall, P: 0.01, For: 5 * time.Second, At: 0.5},
			{Kind: proxy.Slow, P: 0.02, For: 2 * time.Second}}},
	{Latency: 10 * time.Millisecond, Faults: []proxy.Fault{{Kind: proxy.Unavailable, P: 1}}},
	{Latency: 10 * time.Millisecond, Faults: []proxy.Fault{{Kind: proxy.Reset, P: 1, At: 0.5}}},
}

var fine = proxy.Options{Latency: 10 * time.Millisecond, Sigma: 0.3}

// pythonEpoch prints a digest of all that came, and fails unless each sample came once.
const pythonEpoch = `
import hashlib, os, sys
from shoal import Feed
feed = Feed(sys.argv[1], 32, transform=sys.argv[2], order="uniform", seed=int(sys.argv[3]), tail="uneven", epochs=1, as_torch=False,
            session=f"python{os.getpid()}")
digest, seen = hashlib.sha256(), []
for batch in feed:
    digest.update(batch.data.tobytes())
    digest.update(batch.label.tobytes())
    seen += batch.id.tolist()
feed.close()
assert sorted(seen) == list(range(int(sys.argv[4]))), f"{len(seen)} samples came"
print(digest.hexdigest())`

// soak is a daemon that has many users, of which each is a process of its own.
type soak struct {
	*testing.T
	store            *proxy.Proxy
	env              []string
	dir, second      string // originals of the two datasets
	paths, others    []string
	mnt, addr, cache string
	admin            string // host:port
	pid              int
	calm             map[string][]float64 // what the daemon holds at rest, a value for each round
}

// TestSoak runs one daemon for SHOAL_SOAK, as make soak has it, while trainers read its mount and its feed, from Go and
// Python, one in three is killed in the middle, a second dataset is mounted and unmounted, and the store is slow, fails
// or is away. What trainers see is compared with the files; what a transform makes of them, with what it made in fine
// weather. After a round all leave, and the daemon has to hold what it held after the rounds before.
func TestSoak(t *testing.T) {
	lasts, err := time.ParseDuration(cmp.Or(os.Getenv("SHOAL_SOAK"), "0"))
	if err != nil || lasts == 0 {
		t.Skip("make soak runs it: SHOAL_SOAK=10m", err)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	t.Setenv("SHOAL_PPROF", "1") // tells goroutines apart
	s := &soak{T: t, cache: t.TempDir(), admin: freePort(t), calm: map[string][]float64{}}
	s.dir, s.paths = photographs(t, 2048)
	slices.Sort(s.paths)
	s.second, s.others = pictures(t, 4, 32)
	source, second := bucket(t, s.dir), bucketName(t)+"-second"
	upload(t, s.second, second)
	s.store, s.env = far(t, fine)
	s.addr, s.mnt = serve(t, s.env, source, "--cache-dir", s.cache, "--memory", "192MiB", "--cache-size", "64MiB",
		"--kernel-cache", "off", "--admin", s.admin)
	s.pid = readStats(t, s.mnt).PID
	users := map[string]func(ctx context.Context, chance *rand.Rand) error{
		"mount":  s.readMount,
		"second": func(ctx context.Context, _ *rand.Rand) error { return s.visit(ctx, "s3://"+second+"/train") },
	}
	for kind, see := range map[string]func(context.Context, int) (string, error){
		"raw feed": func(ctx context.Context, seed int) (string, error) { return s.feed(ctx, seed) },
		"feed": func(ctx context.Context, seed int) (string, error) {
			return s.feed(ctx, seed, "--transform", eyes)
		},
		"python": func(ctx context.Context, seed int) (string, error) {
			out, err := s.run(ctx, "/usr/bin/python3", "-c", pythonEpoch, s.addr, eyes, strconv.Itoa(seed),
				strconv.Itoa(len(s.paths)))
			return strings.TrimSpace(string(out)), err
		},
	} {
		var known [4]string // by seed
		for seed := range known {
			if known[seed], err = see(t.Context(), seed); err != nil {
				t.Fatal(err)
			}
			if want := digest(t, s.dir, s.paths,
				orderOf(t, fmt.Sprintf("uniform:seed=%d", seed), len(s.paths))); kind == "raw feed" &&
				known[seed] != want {
				t.Fatalf("seed %d: the feed differs from the files", seed)
			}
		}
		users[kind] = func(ctx context.Context, chance *rand.Rand) error {
			seed := chance.IntN(len(known))
			got, err := see(ctx, seed)
			if err == nil && got != known[seed] {
				err = fmt.Errorf("seed %d: digest %s, and it was %s before", seed, got, known[seed])
			}
			return err
		}
	}
	end := time.Now().Add(lasts)
	for round := uint64(0); time.Now().Before(end); round++ {
		s.round(rand.New(rand.NewPCG(seed, round)), users)
	}
	s.judge()
	umount(t, s.mnt)
	for line := range strings.Lines(logOf(t, s.cache)) {
		if strings.Contains(line, "level=ERROR") || strings.Contains(line, "panic:") ||
			strings.Contains(line, "goroutine ") {
			t.Errorf("the daemon's log: %s", line)
		}
	}
	mustBeClean(t, s.cache)
}

// round has users come and go for 20 s, and looks at the daemon when they have gone.
func (s *soak) round(chance *rand.Rand, users map[string]func(context.Context, *rand.Rand) error) {
	ctx, stop := context.WithTimeout(s.Context(), 20*time.Second)
	defer stop()
	var all sync.WaitGroup
	var mu sync.Mutex
	done := map[string][2]int{}
	for kind, use := range users {
		own := rand.New(rand.NewPCG(chance.Uint64(), 0))
		all.Go(func() {
			for ctx.Err() == nil && !s.Failed() {
				life, kill := s.Context(), func() {}
				if own.IntN(3) == 0 {
					life, kill = context.WithTimeout(life, time.Duration(1+own.IntN(3000))*time.Millisecond)
				}
				err := use(life, own)
				killed := life.Err() != nil
				kill()
				if err != nil && !killed {
					s.Errorf("%s: %v", kind, err)
				}
				mu.Lock()
				n := done[kind]
				if n[0]++; killed {
					n[1]++
				}
				done[kind] = n
				mu.Unlock()
			}
		})
	}
	for ctx.Err() == nil {
		at := chance.IntN(len(weathers))
		w, length := weathers[at], time.Duration(2+chance.IntN(5))*time.Second
		if at >= len(weathers)-2 {
			length = 2 * time.Second
		}
		w.Seed = chance.Uint64()
		if err := s.store.Set(w); err != nil {
			s.Fatal(err)
		}
		sleep(ctx, length)
	}
	if err := s.store.Set(fine); err != nil {
		s.Fatal(err)
	}
	all.Wait()
	if s.Failed() {
		s.FailNow()
	}
	s.rest()
	s.Logf("users, of these killed: %v", done)
}

// rest waits until nobody wants anything of the daemon, and notes what it holds.
func (s *soak) rest() {
	var st struct {
		PID      int
		InFlight int64 `json:"requests_in_flight"`
		Users    int
		Memory   struct {
			Ledger int64 `json:"ledger_used"`
			Ring   int64
			RSS    int64 `json:"rss_anon"`
		}
		Feed struct {
			Open  int   `json:"open_sessions"`
			Held  int64 `json:"held_bytes"`
			Total struct {
				Bad int64 `json:"bad_samples"`
			}
		}
	}
	within(s, patience, "the daemon rests", func() bool {
		if err := json.Unmarshal([]byte(mustShoal(s, nil, "stat", s.addr, "--json")), &st); err != nil {
			s.Fatal(err)
		}
		return st.Feed.Open == 0 && st.Feed.Held == 0 && st.InFlight == 0 && st.Users == 1
	})
	if st.PID != s.pid || st.Feed.Total.Bad > 0 {
		s.Fatalf("the daemon is process %d, was %d; bad samples: %d", st.PID, s.pid, st.Feed.Total.Bad)
	}
	files, goroutines := 0, 0
	list, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", s.pid))
	// idle connections to the store are kept for a while, as many as were wanted, with two goroutines each
	for _, f := range list {
		if what, err := os.Readlink(f); err == nil && !strings.HasPrefix(what, "socket:") {
			files++
		}
	}
	for group := range strings.SplitSeq(
		string(fetch(s.T, "http://"+s.admin+"/debug/pprof/goroutine?debug=1")), "\n\n") {
		count, _, _ := strings.Cut(
			group[strings.LastIndex(group[:max(strings.Index(group, " @ "), 0)], "\n")+1:], " @ ")
		if n, err := strconv.Atoi(count); err == nil && !strings.Contains(group, "net/http.") {
			goroutines += n
		}
	}
	for what, n := range map[string]float64{
		"RSS without file pages, MiB": float64(st.Memory.RSS) / (1 << 20), "open files but for sockets": float64(files),
		"goroutines but for idle connections": float64(goroutines),
		"ledger without the ring, MiB":        float64(st.Memory.Ledger-st.Memory.Ring) / (1 << 20),
	} {
		s.calm[what] = append(s.calm[what], n)
	}
}

// judge compares the last third of the rounds with the second. The first warms up: pools fill, the heap finds its size.
func (s *soak) judge() {
	for what, slack := range map[string]func(before float64) float64{
		"RSS without file pages, MiB":         func(b float64) float64 { return b*1.08 + 8 },
		"open files but for sockets":          func(b float64) float64 { return b + 6 },
		"goroutines but for idle connections": func(b float64) float64 { return b*1.02 + 6 },
		"ledger without the ring, MiB":        func(b float64) float64 { return b + 1 },
	} {
		calm := s.calm[what]
		third := len(calm) / 3
		if third < 3 {
			s.Logf("%s: %.1f; too few rounds to judge growth: give it 5 minutes at least", what, calm)
			continue
		}
		before, after := median(slices.Clone(calm[third:2*third])), median(slices.Clone(calm[len(calm)-third:]))
		s.Logf("%s: median %.1f, then %.1f", what, before, after)
		if after > slack(before) {
			s.Errorf("%s grew from %.1f to %.1f: %.1f", what, before, after, calm)
		}
	}
}

// run runs a program that is killed when ctx ends.
func (s *soak) run(ctx context.Context, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(append(os.Environ(), s.env...), "PYTHONPATH=../../python", "PYTHONDONTWRITEBYTECODE=1")
	cmd.WaitDelay = 10 * time.Second // its children hold the pipe
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s %.300s: %w\n%s", name, strings.Join(args, " "), err, errs.String())
	}
	return out, err
}

// feed returns the digest of an epoch.
func (s *soak) feed(ctx context.Context, seed int, flags ...string) (string, error) {
	out, err := s.run(ctx, shoalBin,
		append([]string{"feed", s.addr, "--json", "--batch", "32", "--seed", strconv.Itoa(seed),
			"--order", fmt.Sprintf("uniform:seed=%d", seed)}, flags...)...)
	var r feedResult
	if err == nil {
		err = json.Unmarshal(out, &r)
	}
	return r.Digest, err
}

// readMount tells the mount its order and reads so.
func (s *soak) readMount(ctx context.Context, chance *rand.Rand) error {
	var order []string
	want := sha256.New()
	for _, i := range chance.Perm(len(s.paths)) {
		order = append(order, s.paths[i])
		want.Write(content(s.T, filepath.Join(s.dir, s.paths[i])))
	}
	list := filepath.Join(s.TempDir(), "order")
	write(s, list, []byte(strings.Join(order, "\n")+"\n"))
	if err := os.WriteFile(filepath.Join(s.mnt, ".shoal/plans/soak"), content(s.T, list), 0); err != nil {
		return fmt.Errorf("write the plan: %w", err)
	}
	out, err := s.run(ctx, "env", "-C", s.mnt, "xargs", "-a", list, "-d", "\n", "-n", "64", "cat")
	if err == nil && sha256.Sum256(out) != [32]byte(want.Sum(nil)) {
		err = errors.New("the mount's files differ from the originals")
	}
	return err
}

// visit mounts a second dataset in the daemon, reads it, and unmounts; and it has the first listed again.
func (s *soak) visit(ctx context.Context, source string) error {
	mnt := filepath.Join(s.TempDir(), "second")
	if err := os.Mkdir(mnt, 0o755); err != nil {
		return err
	}
	if _, err := s.run(s.Context(), shoalBin, "mount", source, mnt, "--cache-dir", s.cache, "--daemon"); err != nil {
		return err
	}
	_, err := s.run(ctx, "diff", "-r", "--exclude=.shoal", s.second, mnt)
	_, e := s.run(s.Context(), shoalBin, "umount", mnt)
	if err = errors.Join(err, e); err == nil {
		_, err = s.run(s.Context(), shoalBin, "refresh", s.mnt)
	}
	return err
}
