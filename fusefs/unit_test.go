package fusefs

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
)

func TestErrnoOf(t *testing.T) {
	for _, c := range []struct {
		err  error
		want syscall.Errno
	}{
		{context.Canceled, syscall.EINTR},
		{fs.ErrNotExist, syscall.ENOENT},
		{&objstore.Error{Kind: objstore.KindNotFound}, syscall.ESTALE},
		{&objstore.Error{Kind: objstore.KindNotFound, Err: fs.ErrNotExist}, syscall.ESTALE},
		{&objstore.Error{Kind: objstore.KindChanged}, syscall.ESTALE},
		{&objstore.Error{Kind: objstore.KindDenied, Err: fs.ErrPermission}, syscall.EACCES},
		{&objstore.Error{Kind: objstore.KindTransient}, syscall.EIO},
	} {
		if got := errnoOf(c.err); got != c.want {
			t.Errorf("%v: %v, want %v", c.err, got, c.want)
		}
	}
}

func TestNodeID(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := rapid.Uint64Range(1, 1<<24-1).Draw(t, "generation")
		k := kind(rapid.IntRange(1, 3).Draw(t, "kind"))
		i := rapid.IntRange(0, 1<<32-1).Draw(t, "index")
		id := makeID(g, k, i)
		if id.generation() != g || id.kind() != k || id.index() != i || id == rootID {
			t.Fatalf("%d, %d, %d became %d, %d, %d", g, k, i, id.generation(), id.kind(), id.index())
		}
	})
	if rootID.kind() != kindNone || rootID.generation() != 0 {
		t.Error("the root's id looks like another node's")
	}
}

type versionsOnly struct {
	Volume
	m *catalog.Manifest
}

func (v *versionsOnly) Manifest() *catalog.Manifest { return v.m }

func (v *versionsOnly) VersionName(m *catalog.Manifest) string       { return fmt.Sprintf("%p", m) }
func (v *versionsOnly) VersionNamed(string) (none *catalog.Manifest) { return none }

// A version must be found as long as the kernel has one reference to it, and no longer, here and in the memo.
func TestGenerations(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := &versionsOnly{m: new(catalog.Manifest)}
		s := newGenerations(v, nil)
		device, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		k, err := newKept(device, Memo{})
		defer k.close()
		if err != nil {
			t.Fatal(err)
		}
		s.note = (&filesystem{volume: v, kept: k}).note
		if err := s.note(s.newest(), false); err != nil {
			t.Fatal(err)
		}
		refs := map[uint64]int64{}
		newest := uint64(1)
		known := []uint64{1}
		t.Repeat(map[string]func(*rapid.T){
			"new version": func(*rapid.T) {
				v.m = new(catalog.Manifest)
				newest++
				known = append(known, newest)
				if g := s.current(); g.number != newest || g.manifest != v.m {
					t.Fatalf("generation %d, want %d", g.number, newest)
				}
			},
			"lookup": func(*rapid.T) {
				g := s.current()
				if !g.retain(1) {
					t.Fatal("the newest was retired")
				}
				refs[g.number]++
			},
			"forget": func(t *rapid.T) {
				n := rapid.SampledFrom(known).Draw(t, "generation")
				if refs[n] == 0 {
					t.Skip()
				}
				k := rapid.Int64Range(1, refs[n]).Draw(t, "count")
				refs[n] -= k
				s.release(s.find(n), k)
			},
			"": func(t *rapid.T) {
				_, words, err := ReadMemo(k.memo)
				if all := *s.all.Load(); err != nil || !slices.EqualFunc(words, all, func(w Word, g *generation) bool {
					return w.Generation == g.number && w.Version == v.VersionName(g.manifest)
				}) {
					t.Fatalf("the memo has %v of %d versions, %v", words, len(all), err)
				}
				for _, n := range known {
					g := s.find(n)
					if want := n == newest || refs[n] > 0; (g != nil) != want {
						t.Fatalf("generation %d of %d with %d references: found %v", n, newest, refs[n], g != nil)
					}
					if g != nil && g.refs.Load() != refs[n] {
						t.Fatalf("generation %d: %d references, want %d", n, g.refs.Load(), refs[n])
					}
				}
			},
		})
	})
}

// A process that is killed as it writes a word has said nothing, and what its successor writes is read.
func TestMemoThatIsCutOff(t *testing.T) {
	k, err := newKept(nil, Memo{Source: "s"})
	if err != nil {
		t.Fatal(err)
	}
	defer k.memo.Close()
	for i, half := range []string{"", `{"Generation":9,"Ver`, `{"Generation":9,"Version":"v"}`} {
		if _, err := k.memo.WriteString(half); err != nil {
			t.Fatal(err)
		}
		m, words, err := ReadMemo(k.memo)
		if err != nil || m.Source != "s" || len(words) != i {
			t.Fatalf("%q: %v, %v, %v", half, m, words, err)
		}
		if err := k.write(Word{Generation: uint64(i + 1), Version: "v"}); err != nil {
			t.Fatal(err)
		}
	}
	if _, words, err := ReadMemo(k.memo); err != nil || len(words) != 3 || words[2].Generation != 3 {
		t.Errorf("%v, %v", words, err)
	}
}

func TestDying(t *testing.T) {
	if dying(uint32(os.Getpid())) {
		t.Error("this process is not about to die")
	}
	if !dying(0) || !dying(1<<22+1) {
		t.Error("a thread that cannot be seen counts as dying")
	}
}

func TestPlusFits(t *testing.T) {
	for _, tc := range []struct {
		files  int
		memory int64
		want   bool
	}{{0, 0, true}, {1, 0, false}, {1_000_000, 24 << 30, true}, {10_000_000, 24 << 30, false},
		{100_000, 1 << 30, false}, {10_000_000, 1 << 40, true}} {
		if got := plusFits(tc.files, tc.memory); got != tc.want {
			t.Errorf("%d files in %d bytes: %v", tc.files, tc.memory, got)
		}
	}
}

// Jobs that come and go, each with a plan of its own name, leave nothing behind, and names are never used up.
func TestPlansOfManyJobs(t *testing.T) {
	f := newControlFolder(&memVolume{}, Options{}, nil)
	for job := range 100_000 {
		var out fuse.CreateOut
		if status := f.create(controlPlans, fmt.Sprintf("job%d", job), syscall.O_WRONLY, &out); status != fuse.OK {
			t.Fatalf("job %d: %v", job, status)
		}
		f.release(Caller{}, out.Fh)
	}
	if n := len(f.handles); n > 0 {
		t.Errorf("%d handles", n)
	}
	var out fuse.OpenOut
	// the kernel looks its name up again
	if status := f.open(planNode("job1"), syscall.O_RDONLY, &out); status != fuse.Status(syscall.ESTALE) {
		t.Errorf("a plan that has gone since it was looked up: %v", status)
	}
}

// A plan of which a write failed is not installed, whatever came before, and the one in force stays.
func TestPlanWithoutMemory(t *testing.T) {
	v, mem := &memVolume{plans: map[string][]byte{"default": []byte("empty\n")}}, &testMemory{}
	v.manifest.Store(buildManifest(datasets["tree"](1)))
	mem.limit.Store(100)
	f := newControlFolder(v, Options{Memory: mem, Logger: slog.New(slog.DiscardHandler)}, nil)
	for _, before := range []string{"", "README.md\n"} {
		var out fuse.OpenOut
		f.open(controlPlan, syscall.O_WRONLY|syscall.O_TRUNC, &out)
		in := &fuse.WriteIn{Fh: out.Fh}
		if before != "" {
			f.write(in, []byte(before))
		}
		in.Offset = uint64(len(before))
		_, wrote := f.write(in, make([]byte, 1000))
		flushed := f.flush(nil, Caller{}, out.Fh)
		f.release(Caller{}, out.Fh)
		if noMemory := fuse.Status(syscall.ENOMEM); wrote != noMemory || flushed != noMemory {
			t.Errorf("after %q: write %v, close %v", before, wrote, flushed)
		}
		if got := string(v.plans["default"]); got != "empty\n" {
			t.Errorf("after %q: the plan is %q", before, got)
		}
	}
	if n := mem.used.Load(); n != 0 {
		t.Errorf("%d bytes stay reserved", n)
	}
}
