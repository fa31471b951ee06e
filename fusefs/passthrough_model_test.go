package fusefs

import (
	"io"
	"log/slog"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"pgregory.net/rapid"
)

// All opens of a node are passed through to one backing file or none is, whatever the kernel says in
// between, and what was registered is given back with the last.
func TestPassthroughModel(t *testing.T) {
	files := datasets["tree"](1)
	v := backedFiles{folderFiles{&memVolume{}, localCopy(t, files, testArena().content), nil}}
	m := buildManifest(files)
	rapid.Check(t, func(t *rapid.T) {
		d := &scriptedDevice{registered: map[int32]bool{}}
		p := newPassthrough(v, slog.New(slog.NewTextHandler(io.Discard, nil)))
		p.device = d
		opens := map[int][]int32{} // by file: the backing id that each open got
		off := false
		t.Repeat(map[string]func(*rapid.T){
			"open": func(t *rapid.T) {
				file := rapid.IntRange(0, 5).Draw(t, "file")
				var out fuse.OpenOut
				passed, errno := p.open(makeID(1, kindFile, file), m, file, &out)
				if errno != 0 {
					t.Fatal(errno)
				}
				if was := opens[file]; len(was) > 0 {
					if was[0] != out.BackingID {
						t.Fatalf("file %d: backing %d beside %d", file, out.BackingID, was[0])
					}
				} else if want := d.errno == 0 && !off; passed != want {
					t.Fatalf("passed %v, want %v", passed, want)
				} else if d.errno == syscall.EPERM {
					off = true
				}
				if passed != (out.BackingID != 0) || passed != (out.OpenFlags == fuse.FOPEN_PASSTHROUGH|fuse.FOPEN_NOFLUSH) {
					t.Fatalf("passed %v: %+v", passed, out)
				}
				opens[file] = append(opens[file], out.BackingID)
			},
			"release": func(t *rapid.T) {
				file := rapid.IntRange(0, 5).Draw(t, "file")
				if n := len(opens[file]); n > 0 {
					opens[file] = opens[file][:n-1]
				}
				p.release(makeID(1, kindFile, file)) // one too many must do no harm
			},
			"kernel": func(t *rapid.T) {
				d.errno = rapid.SampledFrom([]syscall.Errno{0, 0, 0, syscall.ELOOP, syscall.EPERM}).Draw(t, "errno")
			},
			"": func(t *rapid.T) {
				want := 0
				for _, ids := range opens {
					if len(ids) > 0 && ids[0] != 0 {
						want++
						if !d.registered[ids[0]] {
							t.Fatalf("%d is open and not registered", ids[0])
						}
					}
				}
				if len(d.registered) != want {
					t.Fatalf("%d registered, want %d", len(d.registered), want)
				}
			},
		})
	})
}
