package cache

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// world is everything the state machine acts on: a store, a cache, and two datasets, one of loose
// files and one of files packed in shards.
type world struct {
	t      *rapid.T
	mem    *memstore.Mem
	fs     *faultFS
	full   atomic.Bool
	c      *Cache
	root   string
	crash  int
	memory int64
	key    *crypt.Key // nil: in clear
	disk   int64
	sides  [2]*side
	noisy  int // where the next object's bytes begin
	codec  foldCodec
	peers  bool // other nodes have some files, those that fold coded
}

// side is one dataset.
type side struct {
	name   string
	id     [16]byte
	packed bool
	dir    string
	names  []string
	now    map[string][]byte // what the store holds

	v    *Volume // nil: closed
	m    *catalog.Manifest
	want [][]byte          // by file: what this version holds
	objs []objstore.Object // by file: where
	offs []int64
}

func (s *side) Locate(file int) (objstore.Object, int64) { return s.objs[file], s.offs[file] }

func (s *side) Sum(file, x int) uint32 {
	if file%2 == 1 {
		return 0
	}
	return crc32.Checksum(extentIn(s.want[file], x), castagnoli)
}

// extentIn is extent x of the file that data is.
func extentIn(data []byte, x int) []byte {
	return data[x*ExtentSize : min((x+1)*ExtentSize, len(data))]
}

var modelSizes = []int{0, 1, 4095, 4096, 64 << 10, 64 << 10, 131 << 10, 131 << 10, 700 << 10, 4<<20 + 1, 9<<20 + 5000}

// content draws what an object holds from now on: mostly as many bytes as before, but others.
func (w *world) content(before int) []byte {
	n := before
	if n < 0 || rapid.IntRange(0, 2).Draw(w.t, "resized") == 0 {
		n = rapid.SampledFrom(modelSizes).Draw(w.t, "size")
	}
	w.noisy += 977
	b := noise[w.noisy%(5<<20):][:n]
	if rapid.Bool().Draw(w.t, "folds") {
		b = folding(b)
	}
	return b
}

// put stores the current content of a dataset anew.
func (w *world) put(s *side, name string) {
	before := -1
	if b, ok := s.now[name]; ok {
		before = len(b)
	}
	s.now[name] = w.content(before)
	if !s.packed {
		w.mem.PutBytes(s.name+"/"+name, s.now[name])
	}
}

// list makes a manifest of what the store holds, and for a packed dataset the shards: two of them.
func (w *world) list(s *side) {
	var objects []objstore.Object
	type place struct {
		o   objstore.Object
		off int64
	}
	where := map[string]place{}
	if s.packed {
		half := (len(s.names) + 1) / 2
		for i, part := range [][]string{s.names[:half], s.names[half:]} {
			var data []byte
			offs := map[string]int64{}
			for _, name := range part {
				data = append(data, make([]byte, 512)...)
				offs[name] = int64(len(data))
				data = append(data, s.now[name]...)
			}
			shard := w.mem.PutBytes(fmt.Sprintf("%s/shard-%d.tar", s.name, i), data)
			for _, name := range part {
				where[name] = place{shard, offs[name]}
			}
		}
		for _, name := range s.names {
			p := where[name]
			// As for foreign tars: the ETag is the shard's and the offset.
			objects = append(objects,
				objstore.Object{Key: s.name + "/" + name, Size: int64(len(s.now[name])),
					ETag: fmt.Sprintf("%s+%d", p.o.ETag, p.off)})
		}
	} else {
		for _, name := range s.names {
			o, err := w.mem.Stat(context.Background(), s.name+"/"+name)
			if err != nil {
				w.t.Fatal(err)
			}
			objects = append(objects, o)
			where[name] = place{o, 0}
		}
	}
	m, err := catalog.Build(memstore.Listing(objects...), catalog.BuildOptions{Prefix: s.name + "/"})
	if err != nil {
		w.t.Fatal(err)
	}
	s.m, s.want, s.objs, s.offs = m, nil, nil, nil
	for i := range m.Len() {
		p := where[m.Path(i)]
		s.want = append(s.want, s.now[m.Path(i)])
		s.objs = append(s.objs, p.o)
		s.offs = append(s.offs, p.off)
	}
}

func (w *world) volume(s *side) *Volume {
	o := VolumeOptions{Manifest: s.m, Dataset: s.id, Store: w.mem, Codec: &w.codec}
	if s.packed {
		o.Locate = &side{objs: s.objs, offs: s.offs, want: s.want}
		o.Admit = func(file, x int) bool { return (file+x)%3 != 1 }
	}
	if w.peers {
		o.Peers = &modelPeers{foldedPeer{want: s.want}}
	}
	return w.c.NewVolume(o)
}

// modelPeers have every file but each third.
type modelPeers struct{ foldedPeer }

func (p *modelPeers) Asks(file, _ int) bool { return file%3 != 2 }

func (p *modelPeers) Read(ctx context.Context, wants []Want, held bool, check checker) (rest []Want) {
	for _, w := range wants {
		if p.Asks(w.File, 0) {
			rest = append(rest, p.foldedPeer.Read(ctx, []Want{w}, held, check)...)
		} else {
			rest = append(rest, w)
		}
	}
	return rest
}

func (w *world) open(s *side) {
	s.v = w.volume(s)
	if w.disk == 0 {
		return
	}
	if err := s.v.OpenDisk(s.dir,
		segment.Options{SegmentSize: 600 << 10, FS: w.fs, Key: w.key, Logger: quiet}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) start() {
	w.c = New(Options{Memory: w.memory, Disk: w.disk, Logger: quiet})
	w.c.hangAfter, w.c.retry = 30*time.Millisecond, time.Millisecond
	w.c.statfs = func(string) (free, size int64, err error) {
		if w.full.Load() {
			return 0, 1 << 30, nil
		}
		return 1 << 29, 1 << 30, nil
	}
	for _, s := range w.sides {
		if s.v != nil {
			w.open(s)
		}
	}
}

func (w *world) heal() {
	w.fs.heal()
	w.full.Store(false)
	for _, s := range w.sides {
		if s.v == nil {
			continue
		}
		if d := s.v.ds.disk.Load(); d != nil {
			eventually(w.t, "the tier is used again", func() bool {
				return !d.stats().DiskDown && w.fs.inside.Load() == 0
			})
		}
	}
}

// verdict checks what a read of [off, off+n) of a file said. Bytes must be the version's; an error is
// right only if the store holds another version now.
func (w *world) verdict(s *side, file, off, n int, got []byte, err error) {
	w.must(w.judge(s, file, off, n, got, err))
}

func (w *world) must(err error) {
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) judge(s *side, file, off, n int, got []byte, err error) error {
	want := s.want[file][min(off, len(s.want[file])):]
	want = want[:min(len(want), n)]
	if err == nil && bytes.Equal(got, want) || err != nil && objstore.KindOf(err) == objstore.KindChanged &&
		w.changed(s, file) {
		return nil
	}
	return fmt.Errorf("%s file %d at %d: %d bytes, want %d, changed %v, %w",
		s.name, file, off, len(got), len(want), w.changed(s, file), err)
}

func (w *world) changed(s *side, file int) bool {
	o, err := w.mem.Stat(context.Background(), s.objs[file].Key)
	return err != nil || o.ETag != s.objs[file].ETag
}

// side draws a dataset that is open.
func (w *world) side() *side {
	var open []*side
	for _, s := range w.sides {
		if s.v != nil {
			open = append(open, s)
		}
	}
	if len(open) == 0 {
		w.t.Skip("all are closed")
	}
	return open[rapid.IntRange(0, len(open)-1).Draw(w.t, "dataset")]
}

func (w *world) file() (*side, int) {
	s := w.side()
	return s, rapid.IntRange(0, len(s.want)-1).Draw(w.t, "file")
}

func copyDir(t *rapid.T, from, to string) {
	names, err := filepath.Glob(filepath.Join(from, "*.seg"))
	if err == nil {
		err = os.MkdirAll(to, 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		in, err := os.Open(name)
		if errors.Is(err, os.ErrNotExist) {
			continue // dropped meanwhile
		}
		if err != nil {
			t.Fatal(err)
		}
		out, err := os.Create(filepath.Join(to, filepath.Base(name)))
		if err == nil {
			_, err = io.Copy(out, in)
			err = errors.Join(err, out.Close())
		}
		if err = errors.Join(err, in.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

func (w *world) readAll(s *side) {
	for i := range s.want {
		p := make([]byte, len(s.want[i]))
		n, err := s.v.ReadAt(context.Background(), i, p, 0)
		w.verdict(s, i, 0, len(p), p[:n], err)
		s.v.Spend(i)
	}
}

// sampleCoded reads a file as a reader does that knows the codec.
func (w *world) sampleCoded(s *side, i int) error {
	data, release, err := s.v.SampleCoded(context.Background(), i)
	if err != nil {
		return w.judge(s, i, 0, len(s.want[i]), nil, err)
	}
	defer release()
	if isFolded(data) {
		data, err = new(foldCodec).Decode(nil, data)
	}
	return w.judge(s, i, 0, len(s.want[i]), data, err)
}

// serve asks for a file as another node does.
func (w *world) serve(ctx context.Context, s *side, i int, held bool) error {
	s.v.Gather([]int{i}, time.Now())
	var form [8]byte
	copy(form[:], "fold-one")
	for x := range s.v.Extents(i) {
		n, off := int(s.v.ExtentBytes(i, x)), x*ExtentSize
		if data, release, ok := s.v.ServeCoded(ctx, i, int64(off), n, form); ok {
			plain, err := new(foldCodec).Decode(nil, data)
			release()
			if err = w.judge(s, i, 0, n, plain, err); err != nil {
				return err
			}
		}
		if x > 0 {
			n = min(n, granuleSize)
		}
		data, release, err := s.v.Serve(ctx, i, int64(off), n, time.Time{}, held)
		if errors.Is(err, ErrBusy) || errors.Is(err, ErrMemory) || errors.Is(err, ErrNotHeld) ||
			ctx.Err() != nil && err != nil {
			continue
		}
		if err := w.judge(s, i, off, n, data, err); err != nil {
			return err
		}
		if err == nil {
			release()
		}
	}
	return nil
}

// crowd lets many ask for one file at once, in every way, some of whom go away.
func (w *world) crowd() {
	s, i := w.file()
	size := len(s.want[i])
	ways := rapid.SliceOfN(rapid.IntRange(0, 9), 2, 12).Draw(w.t, "ways")
	gone := rapid.SliceOfN(rapid.IntRange(-200, 300), len(ways), len(ways)).Draw(w.t, "gone after microseconds")
	errs := make([]error, len(ways))
	var all sync.WaitGroup
	for j, way := range ways {
		all.Go(func() {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			if gone[j] >= 0 {
				time.AfterFunc(time.Duration(gone[j])*time.Microsecond, cancel)
			}
			judge := func(off, n int, got []byte, err error) error {
				if err == nil || ctx.Err() == nil {
					err = w.judge(s, i, off, n, got, err)
				} else {
					err = nil // it went away
				}
				return err
			}
			switch way {
			case 0, 1, 2:
				p := make([]byte, 70<<10)
				n, err := s.v.ReadAt(ctx, i, p, int64(way*size/3))
				errs[j] = judge(way*size/3, len(p), p[:n], err)
			case 3, 4:
				data, release, err := s.v.Sample(ctx, i)
				if errs[j] = judge(0, size, data, err); err == nil {
					release()
				}
			case 5:
				errs[j] = w.sampleCoded(s, i)
			case 6, 7:
				errs[j] = w.serve(ctx, s, i, way == 6)
			case 8:
				s.v.PrefetchGroup(nil, []int{i}, time.Time{}, nil)
			case 9:
				s.v.Spend(i)
			}
		})
	}
	all.Wait()
	w.must(errors.Join(errs...))
}

// change may change a file in the store.
func (w *world) change(s *side) {
	if rapid.Bool().Draw(w.t, "change") {
		w.put(s, rapid.SampledFrom(s.names).Draw(w.t, "name"))
	}
}

// steps is the state machine's operations.
func (w *world) steps() map[string]func(*rapid.T) {
	steps := map[string]func(){
		"read": func() {
			s, i := w.file()
			off := rapid.IntRange(0, len(s.want[i])+10).Draw(w.t, "off")
			p := make([]byte, rapid.SampledFrom([]int{0, 1, 4096, 128 << 10, 1 << 20, 5 << 20}).Draw(w.t, "len"))
			n, err := s.v.ReadAt(context.Background(), i, p, int64(off))
			w.verdict(s, i, off, len(p), p[:n], err)
		},
		"readAll": func() { w.readAll(w.side()) },
		"keepAll": func() {
			s := w.side()
			w.readAll(s)
			settled(w.t, w.c)
		},
		"sample": func() {
			s, i := w.file()
			data, release, err := s.v.Sample(context.Background(), i)
			w.verdict(s, i, 0, len(s.want[i]), data, err)
			if err == nil {
				release()
			}
		},
		"sampleCoded": func() {
			s, i := w.file()
			w.must(w.sampleCoded(s, i))
		},
		"recode": func() {
			s := w.side()
			if rapid.Bool().Draw(w.t, "all kept") {
				w.readAll(s)
				settled(w.t, w.c)
			}
			r := NewRecoder(s.v, rapid.IntRange(1, 3).Draw(w.t, "threads"), func(time.Duration) {})
			for range 3 {
				ctx, cancel := context.WithTimeout(context.Background(), time.Second) // the disk may hang
				r.Next(ctx)
				cancel()
			}
			for i := range s.want {
				w.must(w.sampleCoded(s, i))
			}
		},
		"mostlyFiles": func() { w.codec.plain.Store(!w.codec.plain.Load()) },
		"unlearn":     func() { w.codec.broken.Store(!w.codec.broken.Load()) },
		"prefetch": func() {
			s, i := w.file()
			for x := range s.v.Extents(i) {
				landed := make(chan error, 1)
				if s.v.Prefetch(nil, i, x, time.Time{}, func(_ int, err error) { landed <- err }) == Started &&
					rapid.Bool().Draw(w.t, "wait") {
					if err := <-landed; err != nil && !w.changed(s, i) {
						w.t.Fatal(err)
					}
				}
			}
		},
		"prefetchGroup": func() {
			s := w.side()
			files := rapid.SliceOfN(rapid.IntRange(0, len(s.want)-1), 1, 6).Draw(w.t, "files")
			slices.Sort(files)
			landed := make(chan int, len(files))
			n, out := s.v.PrefetchGroup(nil, files, time.Time{}, func(file int, err error) {
				if err != nil && objstore.KindOf(err) != objstore.KindChanged && !errors.Is(err, context.Canceled) {
					panic(err)
				}
				landed <- file
			})
			if (n > 0) != (out == Started) {
				w.t.Fatalf("%d started, %v", n, out)
			}
			if rapid.Bool().Draw(w.t, "wait") {
				for range n {
					<-landed
				}
			}
		},
		"ranges": func() {
			s, i := w.file()
			if s.v.Extents(i) < 2 {
				w.t.Skip()
			}
			x := rapid.IntRange(0, s.v.Extents(i)-1).Draw(w.t, "extent")
			size := int(s.v.ExtentBytes(i, x))
			from, end := rapid.IntRange(0, size-1).Draw(w.t, "from"), rapid.IntRange(1, size).Draw(w.t, "end")
			if rapid.Bool().Draw(w.t, "all of it") {
				from, end = 0, size
			}
			step := rapid.IntRange(1, 9).Draw(w.t, "step") * granuleSize
			for start := 0; start < step; start += granuleSize { // not in the order of the file
				for off := from + start; off < end; off += step {
					r := Range{File: i, Extent: x, Off: off, N: min(end-off, granuleSize)}
					landed := make(chan error, 9)
					n, out := s.v.PrefetchRange(nil, r, time.Time{}, func(_ int, err error) { landed <- err })
					for range n * int(1-min(out, 1)) {
						if err := <-landed; err != nil && !w.changed(s, i) {
							w.t.Fatal(err)
						}
					}
					if off%3 == 0 {
						p := make([]byte, r.N)
						got, err := s.v.ReadAt(context.Background(), i, p, int64(x)*ExtentSize+int64(off))
						w.verdict(s, i, x*ExtentSize+off, r.N, p[:got], err)
					}
					s.v.SpendRange(r, func(int64, int64) bool { return false })
				}
			}
		},
		"spend": func() {
			s, i := w.file()
			s.v.Spend(i)
		},
		"serve": func() {
			s, i := w.file()
			w.must(w.serve(context.Background(), s, i, rapid.Bool().Draw(w.t, "held")))
		},
		"crowd": func() { w.crowd() },
		"sweep": func() {
			v := w.side().v
			for _, file := range v.Unspent() {
				if file%2 == 1 {
					v.Spend(file)
				}
			}
		},
		"evict": func() { w.c.ring.reclaim(rapid.Int64Range(1, 8<<20).Draw(w.t, "bytes"), 0, true, true) },
		"shrink": func() {
			w.side().v.SetQuota(rapid.SampledFrom([]int64{0, 1, 700 << 10, 2 << 20}).Draw(w.t, "quota"))
		},
		"change": func() { w.change(w.sides[rapid.IntRange(0, 1).Draw(w.t, "dataset")]) },
		"refresh": func() {
			s := w.side()
			w.change(s)
			old := s.v
			w.list(s)
			s.v = w.volume(s)
			s.v.Inherit(old)
			old.Retire()
		},
		"dataset": func() {
			s := w.sides[rapid.IntRange(0, 1).Draw(w.t, "dataset")]
			if s.v == nil {
				w.heal()
				w.list(s)
				w.open(s)
				return
			}
			w.heal()
			if err := s.v.Close(); err != nil {
				w.t.Fatal(err)
			}
			s.v = nil
		},
		"reopen": func() {
			w.heal()
			w.close()
			for _, s := range w.sides {
				w.change(s)
				w.list(s)
			}
			w.start()
		},
		"crash": func() {
			if w.disk == 0 {
				w.t.Skip()
			}
			w.heal()
			w.crash++
			after := func(i int) string { return filepath.Join(w.root, fmt.Sprintf("after-%d-%d", w.crash, i)) }
			for i, s := range w.sides {
				copyDir(w.t, s.dir, after(i)) // what a process that dies now leaves
			}
			w.close()
			for i, s := range w.sides {
				os.RemoveAll(s.dir)
				s.dir = after(i)
			}
			w.start()
		},
		"trouble": func() {
			if w.disk == 0 {
				w.t.Skip()
			}
			if rapid.IntRange(0, 3).Draw(w.t, "others fill the disk") == 0 {
				w.full.Store(true)
				return
			}
			err := rapid.SampledFrom([]error{syscall.ENOSPC, syscall.EIO, errHang}).Draw(w.t, "trouble")
			op := rapid.SampledFrom([]string{"read", "write", "open", "sync"}).Draw(w.t, "op")
			w.fs.set(err, op)
		},
		"recover": func() { w.heal() },
		"stats": func() {
			for _, s := range w.sides {
				if s.v != nil {
					if st := s.v.Stats(); st.Kept > st.Extents {
						w.t.Fatalf("%+v", st)
					}
				}
			}
		},
		"": func() {
			if s := w.c.Stats(); s.MemoryPeak > s.MemoryLimit || w.disk > 0 && s.DiskUsed > w.disk {
				w.t.Fatalf("limits: %+v", s)
			}
		},
	}
	all := map[string]func(*rapid.T){}
	for name, f := range steps {
		all[name] = func(t *rapid.T) {
			w.t = t
			f()
		}
	}
	return all
}

func (w *world) close() {
	if err := w.c.Close(); err != nil {
		w.t.Fatal(err)
	}
}

// Whatever is read, fetched, changed, lost, filled, broken, closed and crashed in whatever order: every
// byte is right or the error is, the budgets hold at every moment, and nothing is left at the end.
// -rapid.checks makes it run longer.
func TestModel(t *testing.T) {
	// The default of 100 takes 15 s.
	if n := flag.Lookup("rapid.checks"); n.Value.String() == n.DefValue {
		_ = n.Value.Set("30")
		defer n.Value.Set(n.DefValue)
	}
	rapid.Check(t, func(rt *rapid.T) {
		root, err := os.MkdirTemp("", "cache-model-")
		if err != nil {
			rt.Fatal(err)
		}
		defer os.RemoveAll(root)
		w := &world{t: rt, mem: memstore.New(), fs: newFaultFS(), root: root}
		defer w.fs.heal() // also where it fails
		w.memory = rapid.SampledFrom([]int64{20 << 20, 48 << 20}).Draw(rt, "memory")
		if rapid.IntRange(0, 3).Draw(rt, "encrypted") == 3 {
			w.key = crypt.KeyOf([32]byte{1, 2, 3})
		}
		w.peers = rapid.Bool().Draw(rt, "peers")
		w.disk = rapid.SampledFrom([]int64{0, 2 << 20, 16 << 20}).Draw(rt, "disk")
		for i := range w.sides {
			s := &side{name: string(rune('a' + i)), id: [16]byte{byte(i + 1)}, packed: i == 1, now: map[string][]byte{},
				dir: filepath.Join(root, fmt.Sprint(i))}
			for j := range rapid.IntRange(1, 8).Draw(rt, "files") {
				s.names = append(s.names, fmt.Sprintf("c/f%d", j))
				w.put(s, s.names[j])
			}
			w.list(s)
			s.v = new(Volume) // to be opened
			w.sides[i] = s
		}
		w.start()
		rt.Repeat(w.steps())
		w.t = rt
		w.heal()
		for _, s := range w.sides {
			if s.v != nil {
				w.readAll(s)
			}
		}
		w.close()
	})
}
