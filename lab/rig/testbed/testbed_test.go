package testbed

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shoalfs/shoal/lab/accelerator"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSecondIsRefused(t *testing.T) {
	dir := t.TempDir()
	first, err := os.Create(filepath.Join(dir, ".lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if err := syscall.Flock(int(first.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if _, err := Start(t.Context(), dir, ""); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("got %v", err)
	}
}

func TestDataset(t *testing.T) {
	d := Dataset{Name: "x", Samples: 3000, Size: 100_000, Sigma: 0.466}
	var paths []string
	var sum, squares float64
	for s := range d.Samples {
		paths = append(paths, d.Path(s))
		size := float64(d.SizeOf(s))
		sum, squares = sum+size, squares+size*size
		if size < smallest*float64(d.Size)-1 {
			t.Errorf("sample %d has %v bytes", s, size)
		}
	}
	if !slices.IsSorted(paths) || len(slices.Compact(paths)) != d.Samples {
		t.Error("sample numbers are not those of the sorted paths")
	}
	mean := sum / float64(d.Samples)
	deviation := math.Sqrt(squares/float64(d.Samples)-mean*mean) / mean
	// Three standard errors; what is cut off narrows the distribution a little.
	if math.Abs(mean/100_000-1) > 0.026 || deviation < 0.40 || deviation > 0.50 || d.Bytes() != int64(sum) {
		t.Errorf("mean %v, deviation %v, sum %d", mean, deviation, d.Bytes())
	}
	if d.Sigma = 0; d.SizeOf(5) != d.Size || d.Bytes() != 300_000_000 {
		t.Error("equal sizes")
	}
	a, b, again := make([]byte, 100), make([]byte, 100), make([]byte, 50)
	fill(a, 1)
	fill(b, 257)
	fill(again, 1)
	if bytes.Equal(a, b) || !bytes.Equal(a[:50], again) {
		t.Error("contents are not each sample's own")
	}
}

func TestParseWarm(t *testing.T) {
	for out, want := range map[string]float64{
		"1,198 of 2,396 extents of s3://bench/x are kept\n": 0.5,
		"0 of 7 extents of s3://bench/x are kept\n":         0,
		"": -1, "nothing": -1, "1 of 0 extents": -1,
	} {
		if got, err := parseWarm(out); (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("%q: %v, %v", out, got, err)
		}
	}
}

func TestBound(t *testing.T) {
	for _, c := range []struct {
		r    Result
		want float64
	}{
		{Result{Kept: 0.5, Demand: 100}, 1},
		{Result{Kept: 0.5, Demand: 100, Bandwidth: 50}, 1},
		{Result{Kept: 0.5, Demand: 100, Bandwidth: 40}, 0.8},
		{Result{Kept: 1, Demand: 100, Bandwidth: 1}, 1},
	} {
		if got := c.r.Bound(); got != c.want {
			t.Errorf("%+v: %v", c.r, got)
		}
	}
}

func TestCacheSize(t *testing.T) {
	c := Config{Dataset: Dataset{Samples: 1000, Size: 1 << 20}, Cached: 0.5, Job: accelerator.Job{Step: time.Second}}
	if got, _ := strconv.Atoi(strings.TrimSuffix(c.cacheSize(), "B")); got < 508<<20 || got > 509<<20 {
		t.Errorf("%d bytes for half of 1,000 MiB", got)
	}
}
