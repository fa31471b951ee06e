package photos

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"image"
	"image/jpeg"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

func TestMake(t *testing.T) {
	const count = 23 // one a class
	dir := filepath.Join(t.TempDir(), "set")
	var calls, last atomic.Int64
	set, err := Make(t.Context(), dir, count, func(done, total int) {
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

	// A second run finds it, if no file was lost. Where others are asked for it goes.
	again, err := Make(t.Context(), dir, count, nil)
	if err != nil || again.Made || again.Bytes != set.Bytes || !again.matches(dir) {
		t.Errorf("second run: %+v, %v", again, err)
	}
	all, err := filepath.Glob(filepath.Join(dir, "*", "*.jpg"))
	if err != nil || len(all) != count {
		t.Fatal(all, err)
	}
	away := filepath.Join(t.TempDir(), "away.jpg")
	if err := os.Rename(all[5], away); err != nil {
		t.Fatal(err)
	}
	if again.matches(dir) {
		t.Error("a file was lost, and it is not noticed")
	}
	sources, err := Sources()
	if err = errors.Join(err, os.Rename(away, all[5])); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := existing(dir, count+1, sources); ok || err != nil {
		t.Errorf("another set's files are taken: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*", "*.jpg")); err != nil || len(left) > 0 {
		t.Errorf("left of the old set: %v, %v", left, err)
	}
}

func TestSeed(t *testing.T) {
	sources, err := Sources()
	if err != nil {
		t.Fatal(err)
	}
	from, err := load(sources[0].Path)
	if err != nil {
		t.Fatal(err)
	}
	var c cropper
	var made [3][]byte
	for i, seed := range []uint64{1, 1, 2} {
		b, err := c.make(from, sampleRand(seed, sources[0].Class, 0))
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
	if _, err := Make(t.Context(), dir, DefaultCount, nil); err == nil {
		t.Error("filled a folder that holds something else")
	}
	if b, err := os.ReadFile(precious); err != nil || string(b) != "mine" {
		t.Errorf("the file that was there: %q, %v", b, err)
	}
}

func TestMissingSources(t *testing.T) {
	_, err := sourcesIn(t.TempDir())
	if _, ok := errors.AsType[Missing](err); !ok || !strings.Contains(err.Error(), "apt-get install") {
		t.Fatalf("got %v", err)
	}
	for _, p := range packs {
		if !strings.Contains(err.Error(), p.name) {
			t.Errorf("%v does not name %s", err, p.name)
		}
	}
}

// BenchmarkMake makes one file an iteration; time/op is that of one core times GOMAXPROCS.
func BenchmarkMake(b *testing.B) {
	if _, err := Make(b.Context(), filepath.Join(b.TempDir(), "set"), max(b.N, 23), nil); err != nil {
		b.Fatal(err)
	}
}
