package cachedir

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	humanize "github.com/dustin/go-humanize"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// demanded returns the size that an error or warning tells the user to give, as the flag takes it.
func demanded(t interface {
	Helper()
	Fatalf(string, ...any)
}, text string) int64 {
	t.Helper()
	_, figure, ok := strings.Cut(text, "at least ")
	figure, _, _ = strings.Cut(figure, ";")
	n, err := humanize.ParseBytes(figure)
	if !ok || err != nil {
		t.Fatalf("no size to give in %q: %v", text, err)
	}
	return int64(n)
}

// The memory that an error demands is enough, and less by 1 MiB is not; or by 1 GiB, where the figure is in GiB.
func TestTheMemoryDemandedIsEnough(t *testing.T) {
	_, err := Open(Options{Path: t.TempDir(), Size: 64 << 20, Memory: 32 << 20})
	if err == nil || !strings.Contains(err.Error(), "32 MiB") {
		t.Fatalf("%v", err)
	}
	if n := demanded(t, err.Error()); n < LeastMemory || n-1<<20 >= LeastMemory {
		t.Errorf("%v, and %d are enough", err, int64(LeastMemory))
	}
	rapid.Check(t, func(t *rapid.T) {
		sizes := rapid.SliceOfN(rapid.Int64Range(1, 1<<36), 1, 4).Draw(t, "metadata")
		reserve := func(memory int64) error {
			d := &Dir{o: Options{Memory: memory},
				Cache: cache.New(cache.Options{Memory: ledgerOf(memory), Disk: 1,
					Logger: slog.New(slog.DiscardHandler)})}
			defer d.Cache.Close()
			for _, n := range sizes {
				if err := d.reserve(Need{memory: n}, 1); err != nil {
					return err
				}
			}
			return nil
		}
		memory := int64(LeastMemory)
		err := reserve(memory)
		for range sizes { // each may demand more than the one before
			if err == nil {
				return
			}
			memory = demanded(t, err.Error())
			unit := int64(1 << 20)
			if memory > 100<<30 {
				unit = 1 << 30
			}
			if reserve(memory-unit) == nil {
				t.Fatalf("%v, and %d less is enough", err, unit)
			}
			err = reserve(memory)
		}
		if err != nil {
			t.Fatalf("with what was demanded: %v", err)
		}
	})
}

// The --cache-size that a warning demands leaves room for data.
func TestTheCacheSizeDemandedIsEnough(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var manifest, extents []int64
		for range rapid.IntRange(1, 8).Draw(t, "versions") {
			manifest = append(manifest, rapid.Int64Range(0, 1<<32).Draw(t, "manifest"))
			extents = append(extents, rapid.Int64Range(1, 1<<32).Draw(t, "extents"))
		}
		dir := func(size int64) *Dir {
			d := &Dir{o: Options{Size: size}}
			for i := range manifest {
				d.metadata += diskFor(manifest[i], extents[i], size)
			}
			return d
		}
		d := dir(rapid.Int64Range(0, 1<<34).Draw(t, "size"))
		if d.diskLimit() >= minDisk {
			return
		}
		if figure := demanded(t, "give at least "+RoundUp(d.enough(len(manifest)))); dir(figure).diskLimit() < minDisk {
			t.Fatalf("%d are demanded and leave %d", figure, dir(figure).diskLimit())
		}
	})
}

// messages is a handler that gets the messages of a log.
type messages func(message string)

func (messages) Enabled(context.Context, slog.Level) bool { return true }

func (f messages) Handle(_ context.Context, r slog.Record) error { f(r.Message); return nil }

func (f messages) WithAttrs([]slog.Attr) slog.Handler { return f }

func (f messages) WithGroup(string) slog.Handler { return f }

// What a dataset has on disk counts all the time while it is opened: another one does not get its room.
func TestWhatIsOpenedCounts(t *testing.T) {
	const files, size = 8, 1 << 20
	ctx, mem, quiet := t.Context(), memstore.New(), slog.New(slog.DiscardHandler)
	var objects []objstore.Object
	for i := range files {
		objects = append(objects, mem.PutBytes(fmt.Sprint(i), make([]byte, size)))
	}
	m, err := catalog.Build(memstore.Listing(objects...), catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	d, err := Open(Options{Path: t.TempDir(), Size: 64 << 20, Memory: 256 << 20, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	id := [16]byte{1}
	open := func(log *slog.Logger) *cache.Volume {
		d.Enter(id)
		v := d.Cache.NewVolume(cache.VolumeOptions{Manifest: m, Dataset: id, Store: mem})
		if err := d.OpenDisk(v, id, "file:///a", 0, 1, log); err != nil {
			t.Fatal(err)
		}
		return v
	}
	leave := func(v *cache.Volume) {
		if err := v.Close(); err != nil {
			t.Fatal(err)
		}
		if err := d.Leave(id); err != nil {
			t.Fatal(err)
		}
	}
	v := open(quiet)
	for i := range files {
		if _, err := v.ReadAt(ctx, i, make([]byte, size), 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := v.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	leave(v)
	before, limit := d.Usage()
	segments, err := filepath.Glob(filepath.Join(d.segments(id), "*.seg"))
	if err != nil || before < files*size {
		t.Fatal(before, segments, err)
	}
	data, err := os.ReadFile(segments[0])
	if err == nil {
		data[20] ^= 1
		err = os.WriteFile(segments[0], data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	mended := false
	v = open(slog.New(messages(func(message string) {
		if !strings.HasPrefix(message, "header of a cache segment rewritten") {
			return
		}
		mended = true // while it is opened
		if used, _ := d.Usage(); used != before {
			t.Errorf("%d bytes count, of %d", used, before)
		}
		if d.Cache.Budget().TryTake(limit - before + 1) {
			t.Error("another dataset got the room")
			d.Cache.Budget().Give(limit - before + 1)
		}
	})))
	if used, _ := d.Usage(); !mended || used != before {
		t.Errorf("mended %v, %d bytes count, of %d", mended, used, before)
	}
	leave(v)
	if used, _ := d.Usage(); used != before {
		t.Errorf("%d bytes count after it was closed, of %d", used, before)
	}
	if err := d.Remove(id); err != nil {
		t.Fatal(err)
	}
	if used, _ := d.Usage(); used != 0 {
		t.Errorf("%d bytes count of what was removed", used)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}
