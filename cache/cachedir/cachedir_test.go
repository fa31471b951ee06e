package cachedir

import (
	"log/slog"
	"strings"
	"testing"

	humanize "github.com/dustin/go-humanize"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache"
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
			d := &Dir{o: Options{Memory: memory}, Cache: cache.New(cache.Options{Memory: ledgerOf(memory), Disk: 1, Logger: slog.New(slog.DiscardHandler)})}
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
