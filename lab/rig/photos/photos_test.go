package photos

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"image"
	"image/jpeg"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
)

// digest hashes names and contents of all files of a set.
func digest(t *testing.T, dir string) [sha256.Size]byte {
	t.Helper()
	h := sha256.New()
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == marker {
			return err
		}
		b, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		fmt.Fprintln(h, rel, len(b))
		h.Write(b)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return [sha256.Size]byte(h.Sum(nil))
}

func TestMake(t *testing.T) {
	const count = 69 // 3 a class
	dir := filepath.Join(t.TempDir(), "set")
	var calls, last atomic.Int64
	set, err := Make(t.Context(), dir, Options{Count: count, Seed: 7}, func(done, total int) {
		calls.Add(1)
		if done == total {
			last.Add(1)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if set.Files != count || set.Classes < 20 || !set.Made || calls.Load() != count || last.Load() != 1 {
		t.Errorf("%+v, progress called %d times", set, calls.Load())
	}

	var files, yuv444, yuv420 int
	var total int64
	shapes := make(map[image.Point]int)
	contents := make(map[[sha256.Size]byte]string)
	classes := make(map[string]int)
	err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == marker {
			return err
		}
		b, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		if len(b) < 40<<10 || len(b) > 120_000 {
			t.Errorf("%s: %d bytes", p, len(b))
		}
		img, err := jpeg.Decode(bytes.NewReader(b)) // the standard library's, not the encoder's own
		if err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		switch ratio := img.(*image.YCbCr).SubsampleRatio; ratio {
		case image.YCbCrSubsampleRatio444:
			yuv444++
		case image.YCbCrSubsampleRatio420:
			yuv420++
		default:
			t.Errorf("%s: chroma %v", p, ratio)
		}
		shapes[img.Bounds().Size()]++
		if other, ok := contents[sha256.Sum256(b)]; ok {
			t.Errorf("%s and %s are equal", p, other)
		}
		contents[sha256.Sum256(b)] = p
		classes[filepath.Base(filepath.Dir(p))]++
		files++
		total += int64(len(b))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files != count || total != set.Bytes || len(classes) != set.Classes {
		t.Errorf("%d files, %d bytes, %d classes; reported %+v", files, total, len(classes), set)
	}
	for c, n := range classes {
		if n != count/len(classes) {
			t.Errorf("class %s has %d files", c, n)
		}
	}
	if yuv444 < count/5 || yuv420 < count/5 || len(shapes) < 5 {
		t.Errorf("%d files of 4:4:4, %d of 4:2:0, shapes %v", yuv444, yuv420, shapes)
	}

	// A second run finds it.
	again, err := Make(t.Context(), dir, Options{Count: count, Seed: 7}, nil)
	if err != nil || again.Made || again.Bytes != set.Bytes {
		t.Errorf("second run: %+v, %v", again, err)
	}
}

// TestSameBytes: neither the number of cores, nor what another run has left, nor a file that was
// lost changes a byte.
func TestSameBytes(t *testing.T) {
	o := Options{Count: 23, Seed: 1}
	a, b := t.TempDir(), t.TempDir()
	procs := runtime.GOMAXPROCS(1)
	_, err := Make(t.Context(), a, o, nil)
	runtime.GOMAXPROCS(procs)
	if err != nil {
		t.Fatal(err)
	}
	want := digest(t, a)

	files, err := filepath.Glob(filepath.Join(a, "*", "*.jpg"))
	if err != nil || len(files) != o.Count {
		t.Fatal(files, err)
	}
	if err := os.Remove(files[5]); err != nil {
		t.Fatal(err)
	}
	if set, err := Make(t.Context(), a, o, nil); err != nil || !set.Made || digest(t, a) != want {
		t.Errorf("after a file was lost: %+v, %v", set, err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	_, err = Make(ctx, b, Options{Count: 46, Seed: 2}, func(done, _ int) {
		if done == 3 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("interrupted run: %v", err)
	}
	if set, err := Make(t.Context(), b, o, nil); err != nil || !set.Made || digest(t, b) != want {
		t.Errorf("after an interrupted run with other options: %+v, %v", set, err)
	}
}

func TestSeed(t *testing.T) {
	sources, err := Sources()
	if err != nil {
		t.Fatal(err)
	}
	levels, err := loadPyramid(sources[0].Path)
	if err != nil {
		t.Fatal(err)
	}
	var c cropper
	var made [3][]byte
	for i, seed := range []uint64{1, 1, 2} {
		b, err := c.make(levels, sampleRand(seed, sources[0].Class, 0))
		if err != nil {
			t.Fatal(err)
		}
		made[i] = bytes.Clone(b)
	}
	if !bytes.Equal(made[0], made[1]) || bytes.Equal(made[0], made[2]) {
		t.Error("the bytes do not follow the seed")
	}
}

func TestForeignFolderIsRefused(t *testing.T) {
	dir := t.TempDir()
	precious := filepath.Join(dir, "wood")
	if err := os.WriteFile(precious, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Make(t.Context(), dir, Options{}, nil); err == nil {
		t.Error("filled a folder that holds something else")
	}
	if b, err := os.ReadFile(precious); err != nil || string(b) != "mine" {
		t.Errorf("the file that was there: %q, %v", b, err)
	}
}

func TestMissingSources(t *testing.T) {
	_, err := sourcesIn(t.TempDir())
	if !errors.Is(err, ErrNoSources) || !strings.Contains(err.Error(), "apt-get install") {
		t.Fatalf("got %v", err)
	}
	for _, p := range Packages() {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("%v does not name %s", err, p)
		}
	}
}

func TestBadOptions(t *testing.T) {
	for _, o := range []Options{{Count: 5}, {Count: -1}} {
		if _, err := Make(t.Context(), t.TempDir(), o, nil); err == nil {
			t.Errorf("%+v: accepted", o)
		}
	}
}

// BenchmarkMake makes one file an iteration; time/op is that of one core times GOMAXPROCS.
func BenchmarkMake(b *testing.B) {
	if _, err := Make(b.Context(), filepath.Join(b.TempDir(), "set"), Options{Count: max(b.N, 23)}, nil); err != nil {
		b.Fatal(err)
	}
}
