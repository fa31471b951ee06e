package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/prefetch/order"
)

// TestExactlyOnce kills trainers, servers and connections and judges what the trainers have committed: each
// epoch each sample once, over all ranks, byte for byte what order, files and transform say it is, whoever
// died when, however often it was resumed, and at whichever world size.
//
// A run is one training of a few epochs. Its lives end at a kill, but for the last. SHOAL_FEED_KILLS is
// how many kills there are in all (1000), SHOAL_SEED where they begin (1), SHOAL_FEED_RUN repeats one run.
func TestExactlyOnce(t *testing.T) {
	number := func(name string, or int) int {
		text := os.Getenv(name)
		if text == "" {
			return or
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 {
			t.Fatalf("%s=%q: give a number", name, text)
		}
		return n
	}
	total, seed := int64(number("SHOAL_FEED_KILLS", atMost(150, 1000))), number("SHOAL_SEED", 1)
	files := newCorpus(t)
	source := bucket(t, files.dir)
	env := s3server.Env(server.URL)
	t.Logf("SHOAL_SEED=%d, %d kills", seed, total)

	book := &killBook{by: map[string]int{}}
	run := func(n *node, number int) {
		if ok := t.Run(fmt.Sprint(number), func(t *testing.T) { newRun(t, n, files, seed, number, book).play() }); !ok {
			t.Errorf("again with: SHOAL_SEED=%d SHOAL_FEED_RUN=%d go test ./e2e -run TestExactlyOnce -v", seed, number)
		}
	}
	start := time.Now()
	if os.Getenv("SHOAL_FEED_RUN") != "" {
		which := number("SHOAL_FEED_RUN", 0)
		n := newNode(t, which%nodeKinds, env, source)
		run(n, which)
		n.empty(t)
	} else {
		var next atomic.Int64
		var workers sync.WaitGroup
		var nodes []*node
		for kind := range nodeKinds {
			n := newNode(t, kind, env, source)
			nodes = append(nodes, n)
			workers.Go(func() {
				for book.total() < total && !t.Failed() {
					// A run's number says which server it has.
					run(n, int(next.Add(1)-1)*nodeKinds+kind)
				}
			})
		}
		workers.Wait()
		for _, n := range nodes {
			n.empty(t)
		}
	}
	for _, what := range slices.Sorted(maps.Keys(book.by)) {
		t.Logf("%5d %s", book.by[what], what)
	}
	t.Logf("%d kills in %d runs, %d of %d lives by the Python client, %d batches, in %s",
		book.total(), book.runs, book.python, book.lives, book.steps, time.Since(start).Round(time.Second))
}

// killBook counts.
type killBook struct {
	mu                         sync.Mutex
	by                         map[string]int
	runs, lives, python, steps int
}

func (b *killBook) total() (n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, k := range b.by {
		n += int64(k)
	}
	return n
}

func (b *killBook) note(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f()
}

// corpus is a small dataset of pictures, two of which cannot be decoded, and an oracle of what a transform
// makes of them.
type corpus struct {
	dir   string
	files [][]byte
	bad   map[int]bool

	mu   sync.Mutex
	rows map[string]trainedRow
}

// samples is a prime, so that no batch and no world divides it.
const samples = 61

func newCorpus(t testing.TB) *corpus {
	dir, paths := pictures(t, 4, 16)
	for _, p := range paths[samples:] {
		if err := os.Remove(filepath.Join(dir, p)); err != nil {
			t.Fatal(err)
		}
	}
	c := &corpus{dir: dir, bad: map[int]bool{7: true, 40: true}, rows: map[string]trainedRow{}}
	for i, p := range paths[:samples] {
		b, err := os.ReadFile(filepath.Join(dir, p))
		if err != nil {
			t.Fatal(err)
		}
		if c.bad[i] {
			b = b[:len(b)/2]
			write(t, filepath.Join(dir, p), b)
		}
		c.files = append(c.files, b)
	}
	return c
}

// row is what a trainer has to get for a sample; false if it is one that is skipped.
func (c *corpus) row(t testing.TB, spec string, at gpuingest.Draw) (trainedRow, bool) {
	data := c.files[at.Sample]
	if spec != "" {
		if c.bad[int(at.Sample)] {
			return trainedRow{}, false
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		key := fmt.Sprint(spec, at)
		if r, ok := c.rows[key]; ok {
			return r, true
		}
		in, err := gpuingest.New(spec)
		if err != nil {
			t.Fatal(err)
		}
		out := gpuingest.Row{Label: -1}
		for _, f := range in.Fields() {
			out.Fields = append(out.Fields, make([]byte, f.Bytes))
		}
		if err := in.Make(gpuingest.Sample{Data: data}, at, &out); err != nil {
			t.Fatal(err)
		}
		c.rows[key] = rowOf(at.Sample, out.Fields[0])
		return c.rows[key], true
	}
	return rowOf(at.Sample, data), true
}

func rowOf(id uint64, data []byte) trainedRow {
	sum := sha256.Sum256(data)
	return trainedRow{ID: int64(id), Len: len(data), SHA: hex.EncodeToString(sum[:])}
}

// run is one training with its kills.
type run struct {
	t      *testing.T
	rng    *rand.Rand
	node   *node
	files  *corpus
	book   *killBook
	job    trainerJob // what all lives have in common
	global int        // batch
	orders []order.Order
	kills  int // that are planned
	dir    string

	committed map[[2]int]bool // steps
	done      int             // steps
	state     string
	finished  bool
	delivered []trainedRow // in the global order
	zombies   []*zombie
}

func newRun(t *testing.T, n *node, files *corpus, seed, number int, book *killBook) *run {
	rng := rand.New(rand.NewPCG(uint64(seed), uint64(number)))
	pick := func(list ...string) string { return list[rng.IntN(len(list))] }
	r := &run{t: t, rng: rng, node: n, files: files, book: book, dir: t.TempDir(), committed: map[[2]int]bool{}}
	r.global = []int{4, 6, 8, 12}[rng.IntN(4)]
	r.kills = 2 + rng.IntN(10)
	r.job = trainerJob{
		Session: fmt.Sprintf("run%d", number), Seed: rng.Uint64N(3), Epochs: 1 + rng.IntN(3),
		Tail: pick("drop", "pad", "uneven"), World: r.anyWorld(),
		Transform: pick("", "", "RandomResizedCrop(24)|RandomHorizontalFlip()|uint8|nchw", "CenterCrop(96)|fp32|nhwc"),
		Order:     pick("uniform", "uniform", "torch", "sequential"), Bad: "skip:2",
	}
	if r.job.Order == "torch" { // pads each epoch to a multiple of the world, maybe by a bad one
		r.job.Bad = "skip:6"
	}
	for epoch := range r.job.Epochs {
		switch r.job.Order {
		case "uniform":
			r.orders = append(r.orders, order.Uniform(samples, r.job.Seed, epoch))
		case "torch":
			r.orders = append(r.orders, order.Torch(samples, r.job.Seed, epoch, r.job.World, 0, r.job.World-1, false))
		case "sequential":
			r.orders = append(r.orders, order.Sequential(samples))
		}
	}
	return r
}

// anyWorld returns a number of ranks that share the global batch evenly.
func (r *run) anyWorld() int {
	for {
		if w := 1 + r.rng.IntN(4); r.global%w == 0 {
			return w
		}
	}
}

// steps returns how many global batches an epoch has, and how many positions they cover.
func (r *run) steps() (steps, positions int) {
	positions = r.orders[0].Len()
	if r.job.Tail == "drop" {
		positions -= positions % r.global
	}
	return (positions + r.global - 1) / r.global, positions
}

func (r *run) play() {
	steps, positions := r.steps()
	for life := 0; !r.finished && !r.t.Failed(); life++ {
		if life > r.kills+20 {
			r.t.Fatalf("%d lives, %d of %d steps", life, r.done, steps*len(r.orders))
		}
		r.live(life, life < r.kills)
	}
	for _, z := range r.zombies {
		z.rise(r.t)
	}
	if r.t.Failed() {
		return
	}
	if r.done != steps*len(r.orders) {
		r.t.Fatalf("%d steps were committed, there are %d", r.done, steps*len(r.orders))
	}
	// The digest of all that was committed, and of what the order says.
	var want []trainedRow
	for epoch, o := range r.orders {
		for pos := range positions {
			id := o.At(pos)
			if row, ok := r.files.row(r.t, r.job.Transform,
				gpuingest.Draw{Seed: r.job.Seed, Epoch: uint32(epoch), Sample: uint64(id),
					Occurrence: uint32(pos / samples)}); ok {
				want = append(want, row)
			}
		}
	}
	if streamDigest(r.delivered) != streamDigest(want) {
		r.t.Errorf("the digest of the %d samples that were delivered is not that of the order's %d",
			len(r.delivered), len(want))
	}
	r.book.note(func() { r.book.runs++; r.book.steps += r.done })
}

// streamDigest is SHA-256 over (sample, length, SHA-256 of the bytes).
func streamDigest(rows []trainedRow) string {
	h := sha256.New()
	for _, r := range rows {
		fmt.Fprintln(h, r.ID, r.Len, r.SHA)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// merge takes over what all hosts of a life have committed, as the checkpoint that a job resumes from is one
// that is complete.
func (r *run) merge(world int, hosts []*host) {
	steps := map[[2]int][]trainedStep{}
	end := [2]int{1 << 30, 0} // the last step that no host lacks
	done := true
	for _, h := range hosts {
		c := h.committed(r.t)
		last := [2]int{-1, 0}
		for _, s := range c.Steps {
			last = [2]int{s.Epoch, s.Index}
			steps[last] = append(steps[last], s)
		}
		if !c.Done {
			done = false
			if slices.Compare(last[:], end[:]) < 0 {
				end = last
			}
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(steps), func(a, b [2]int) int { return slices.Compare(a[:], b[:]) }) {
		if slices.Compare(k[:], end[:]) > 0 {
			break
		}
		if r.committed[k] {
			r.t.Errorf("epoch %d, batch %d was committed twice", k[0], k[1])
		}
		r.committed[k] = true
		r.done++
		ranks := map[int][]trainedRow{}
		r.state = steps[k][0].State
		for _, s := range steps[k] {
			maps.Copy(ranks, s.Ranks)
			if !sameState(r.t, s.State, r.state) {
				r.t.Errorf("epoch %d, batch %d: hosts have the states\n%s\n%s", k[0], k[1], s.State, r.state)
			}
		}
		r.judge(k[0], k[1], world, ranks)
	}
	r.finished = done
}

// judge compares one step with the oracle.
func (r *run) judge(epoch, index, world int, ranks map[int][]trainedRow) {
	if epoch >= len(r.orders) {
		r.t.Errorf("epoch %d was delivered, of %d", epoch, len(r.orders))
		return
	}
	o := r.orders[epoch]
	_, positions := r.steps()
	first, last := index*r.global, min((index+1)*r.global, positions)
	if first >= last {
		r.t.Errorf("epoch %d has no batch %d", epoch, index)
		return
	}
	for rank := range world {
		got, ok := ranks[rank]
		if !ok && (r.job.Tail != "uneven" || first+rank < last) {
			r.t.Errorf("epoch %d, batch %d: rank %d of %d got none", epoch, index, rank, world)
		}
		var want []trainedRow
		for pos := first + rank; pos < last; pos += world {
			id := o.At(pos)
			if row, ok := r.files.row(r.t, r.job.Transform,
				gpuingest.Draw{Seed: r.job.Seed, Epoch: uint32(epoch), Sample: uint64(id),
					Occurrence: uint32(pos / samples)}); ok {
				want = append(want, row)
			}
		}
		if !slices.Equal(got, want) {
			r.t.Errorf("epoch %d, batch %d, rank %d of %d: got\n%v\nwant\n%v", epoch, index, rank, world, got, want)
		}
	}
	// In the global order: the ranks take turns, and what was skipped was skipped.
	next := make([]int, world)
	for pos := first; pos < last; pos++ {
		if r.job.Transform != "" && r.files.bad[o.At(pos)] {
			continue
		}
		rank := (pos - first) % world
		if next[rank] < len(ranks[rank]) {
			r.delivered = append(r.delivered, ranks[rank][next[rank]])
			next[rank]++
		}
	}
}

// sameState compares all of two states but the bad samples, which each rank counts for itself.
func sameState(t testing.TB, a, b string) bool {
	x, y := stateFields(t, a), stateFields(t, b)
	delete(x, "bad")
	delete(y, "bad")
	return fmt.Sprint(x) == fmt.Sprint(y)
}

func stateFields(t testing.TB, text string) map[string]any {
	var m map[string]any
	d := json.NewDecoder(bytes.NewReader([]byte(text)))
	d.UseNumber()
	if err := d.Decode(&m); err != nil {
		t.Fatalf("state %q: %v", text, err)
	}
	return m
}
