package engine

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/prefetch/order"
)

// What is kept is chosen among the files that are read: beside an archive that is larger than the disk, and that nobody
// reads, all pictures and their labels are kept, and the second epoch comes from the disk.
func TestKeptOfWhatIsRead(t *testing.T) {
	dir := t.TempDir()
	write := func(path string, n int) {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, path), make([]byte, n), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	const n = 160
	for i := range n {
		write(fmt.Sprintf("images/c/f%03d.jpg", i), 512<<10)
		write(fmt.Sprintf("labels/f%03d.txt", i), 100)
	}
	write("all.zip", 0)
	if err := os.Truncate(filepath.Join(dir, "all.zip"), 1<<30); err != nil {
		t.Fatal(err)
	}
	spec, err := order.Parse("torch:seed=1")
	if err != nil {
		t.Fatal(err)
	}
	e := open(t, HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 160 << 20, Memory: 128 << 20}}, Config{Source: "file://" + dir, Order: spec})
	defer closeEngine(t, e)
	var gets [3]int64
	for epoch := range gets {
		before := e.Stats().GetRequests
		o, err := spec.Order(n, epoch)
		if err != nil {
			t.Fatal(err)
		}
		for pos := range n {
			i := o.At(pos)
			read(t, e, dir, fmt.Sprintf("images/c/f%03d.jpg", i))
			read(t, e, dir, fmt.Sprintf("labels/f%03d.txt", i))
		}
		if err := e.cur.Load().volume.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		gets[epoch] = e.Stats().GetRequests - before
	}
	if gets[0] > 2*n+20 || gets[1] > 10 || gets[2] > 10 {
		t.Errorf("%v GETs in three epochs of %d pictures and as many labels", gets, n)
	}
}
