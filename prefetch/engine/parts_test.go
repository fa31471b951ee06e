package engine

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

// partedFolder makes n samples of three files: a picture of pictureBytes or a little more, a label, and
// annotations, which every seventh lacks and every eleventh has of more than an extent.
func partedFolder(t testing.TB, n, pictureBytes int) (dir string, extents int) {
	t.Helper()
	dir = t.TempDir()
	for i := range n {
		parts := map[string][]byte{
			"jpg": bytes.Repeat([]byte{byte(i)}, pictureBytes+i), "cls": fmt.Append(nil, i),
			"json": bytes.Repeat([]byte{'j', byte(i)}, 100+i),
		}
		switch {
		case i%7 == 3:
			delete(parts, "json")
		case i%11 == 5:
			parts["json"] = make([]byte, cache.ExtentSize+1000+i)
		case i%13 == 5:
			parts["cls"] = nil // an empty file is there all the same
		}
		for ext, data := range parts {
			writeFile(t, filepath.Join(dir, fmt.Sprintf("%04d.%s", i, ext)), data)
			extents += (len(data) + cache.ExtentSize - 1) / cache.ExtentSize
		}
	}
	return dir, extents
}

// checkUnit reads the sample at a position with its parts and compares them.
func checkUnit(t testing.TB, s *run.Stream, d *Dataset, seq order.Order, pos int, dir string) {
	t.Helper()
	ctx := context.Background()
	stem := d.Path(seq.At(pos))[:4]
	data, release, err := s.Read(ctx, pos)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	for _, ext := range []string{"jpg", "cls", "json", "nothing"} {
		if ext != "jpg" {
			var free func()
			if data, free, err = s.Part(ctx, pos, ext); err != nil {
				t.Fatal(err)
			}
			defer free()
		}
		want, err := os.ReadFile(filepath.Join(dir, stem+"."+ext))
		if !bytes.Equal(data, want) || (err != nil) != (data == nil) {
			t.Fatalf("%s.%s: %d bytes, nil %v, of %d, %v", stem, ext, len(data), data == nil, len(want), err)
		}
	}
}

// Every file of every sample is staged before its reader comes, and fetched once; in shards by far fewer
// requests than there are samples.
func TestPartsComeAlong(t *testing.T) {
	const n = 60
	dir, extents := partedFolder(t, n, 2000)
	for name, source := range map[string]string{"folder": dir, "shards": packFolder(t, dir, 1<<20)} {
		t.Run(name, func(t *testing.T) {
			e := openEngine(t, source, t.TempDir(), "auto")
			defer closeEngine(t, e)
			d := e.Dataset()
			if d.Len() != n || !d.Kind("json").Found || d.Kind("json").Numbered || d.Kind("txt").Found {
				t.Fatalf("%d samples, json %+v", d.Len(), d.Kind("json"))
			}
			before := e.Stats().GetRequests
			seq := order.Uniform(n, 1, 0)
			s, err := d.Begin("session", seq, 0, 1, "cls", "json")
			if err != nil {
				t.Fatal(err)
			}
			waitFor(t, "all is staged", func() bool { return s.Progress().Lead == n })
			gets := e.Stats().GetRequests - before
			for pos := range n {
				checkUnit(t, s, d, seq, pos, dir)
			}
			if more := e.Stats().GetRequests - before; more != gets {
				t.Errorf("%d GETs ahead of the reader, %d for it", gets, more-gets)
			}
			switch {
			case name == "folder" && gets != int64(extents):
				t.Errorf("%d GETs for %d extents", gets, extents)
			case name == "shards" && gets > n/2:
				t.Errorf("%d GETs for %d samples in shards", gets, n)
			}
			d.End(s)
		})
	}
}

// Without announcement parts are read all the same, but not ahead.
func TestPartsUnannounced(t *testing.T) {
	dir, _ := partedFolder(t, 20, 2000)
	e := openEngine(t, dir, t.TempDir(), "auto")
	defer closeEngine(t, e)
	d := e.Dataset()
	s, err := d.Begin("session", order.Sequential(20), 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer d.End(s)
	waitFor(t, "the pictures are staged", func() bool { return s.Progress().Lead == 20 })
	if gets := e.Stats().GetRequests; gets != 20 {
		t.Errorf("%d GETs for 20 pictures", gets)
	}
	for pos := range 20 {
		checkUnit(t, s, d, order.Sequential(20), pos, dir)
	}
}

// In memory for a fraction of the dataset, without a disk, no file is fetched twice: parts stay until their
// sample was read, and go then. Two streams share them.
func TestPartsInLittleMemory(t *testing.T) {
	const n = 150
	dir := t.TempDir()
	noise := make([]byte, 2<<20)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(noise)
	for i := range n {
		writeFile(t, filepath.Join(dir, fmt.Sprintf("%04d.jpg", i)), noise[i<<10:][:600<<10])
		writeFile(t, filepath.Join(dir, fmt.Sprintf("%04d.mask.png", i)), noise[i<<9:][:400<<10])
	}
	h, err := OpenHost(HostConfig{Options: cachedir.Options{Path: t.TempDir(), Memory: 128 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	e, err := h.Open(context.Background(),
		Config{Source: "file://" + dir, Order: spec(t, "none"), Samples: ".jpg", Connections: 32})
	if err != nil {
		t.Fatal(err)
	}
	defer closeEngine(t, e)
	d := e.Dataset()
	seq := order.Uniform(n, 3, 0)
	var streams []*run.Stream
	for i := range 2 {
		s, err := d.Begin(fmt.Sprintf("session%d", i), seq, 0, 1, "mask.png")
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, s)
	}
	for pos := range n {
		for _, s := range streams {
			file := filesOf(seq, d.v.samples).At(pos)
			mask, ok := e.Manifest().Part(file, "mask.png")
			if !ok {
				t.Fatal("no mask")
			}
			waitFor(t, "sample and mask are staged", func() bool {
				return s.Volume.Where(file, 0) > cache.OnWay && s.Volume.Where(mask, 0) > cache.OnWay
			})
			data, release, err := s.Read(context.Background(), pos)
			if err != nil || len(data) != 600<<10 {
				t.Fatal(len(data), err)
			}
			part, free, err := s.Part(context.Background(), pos, "mask.png")
			if err != nil || len(part) != 400<<10 {
				t.Fatal(len(part), err)
			}
			free()
			release()
		}
	}
	if gets := e.Stats().GetRequests; gets > 2*n*11/10 {
		t.Errorf("%d GETs for %d files", gets, 2*n)
	}
	for _, s := range streams {
		if held := s.Progress().Held; held != 0 {
			t.Errorf("%s holds %d bytes after its last sample", s.Name, held)
		}
		d.End(s)
	}
}
