package catalog

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// A fault in a mapping is an error of the disk, and no reason to begin a catalog anew; a panic is damage.
func TestGuard(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(8192); err != nil {
		t.Fatal(err)
	}
	data, err := unix.Mmap(int(f.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(data)
	if err := f.Truncate(0); err != nil {
		t.Fatal(err)
	}
	if err := guard(func() error { data[5000] = 1; return nil }); !errors.Is(err, syscall.EIO) || isDamage(err) {
		t.Errorf("fault: %v", err)
	}
	var none []int
	if err := guard(func() error { none[len(data)]++; return nil }); !errors.Is(err, ErrCorrupt) || !isDamage(err) || !strings.Contains(err.Error(), "index out of range") {
		t.Errorf("panic: %v", err)
	}
	own := errors.New("own")
	if err := guard(func() error { return own }); !errors.Is(err, own) {
		t.Error(err)
	}
	if err := guard(func() error { return nil }); err != nil {
		t.Error(err)
	}
}
