package scale

import (
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/lab/bench/kit"
)

// payload is the length of each file that reopen lays down: what a record costs at open does not depend on it.
const payload = 16

// reopen measures how long a mount takes to be ready of which everything, one file, or everything in another order
// is cached. The cache is written by the packages that the daemon itself uses, in segments of as many records as
// photographs have, so that no object of the dataset need exist.
func (b *bench) reopen(files int, target float64) error {
	source := filepath.Join(b.Dir, fmt.Sprintf("reopen-%d", files))
	if err := os.MkdirAll(source, 0o755); err != nil {
		return err
	}
	b.Say("\n## Reopening: %d files\n", files)
	b.Say("From the start of the process to the mount's readiness; page cache warm but for \"caches dropped\".\n")
	b.Say("| cached | ready, s | | target | | CPU, s | RSS, MiB | of it anonymous |")
	b.Say("| --- | ---: | --- | ---: | --- | ---: | ---: | ---: |")
	full := filepath.Join(b.Dir, fmt.Sprintf("cache-full-%d", files))
	if err := b.laid(filepath.Base(full), func() error { return errors.Join(os.RemoveAll(full), layCache(full, source, files, files)) }); err != nil {
		return err
	}
	one := filepath.Join(b.Dir, fmt.Sprintf("cache-one-%d", files))
	if err := b.laid(filepath.Base(one), func() error { return errors.Join(os.RemoveAll(one), layCache(one, source, files, 1)) }); err != nil {
		return err
	}
	if err := b.time("one file", source, one, 1, b.reps, target); err != nil {
		return err
	}
	if err := b.time("all files", source, full, files, b.reps, target); err != nil {
		return err
	}
	if err := kit.DropCaches(); err != nil {
		return err
	}
	if err := b.time("all files, caches dropped", source, full, files, 1, 0); err != nil {
		return err
	}
	// A refresh has put a file before all others.
	if err := setManifest(full, source, files, "a/first.jpg"); err != nil {
		return err
	}
	if err := b.time("all files, renumbered by a refresh", source, full, files, b.reps, 0); err != nil {
		return err
	}
	return setManifest(full, source, files, "")
}

// time mounts a cache several times and says what that took. kept is how many files must be found.
func (b *bench) time(what, source, cache string, kept, reps int, target float64) error {
	var took, cpu, rss, anon []float64
	for range reps {
		m, err := b.Mount("file://"+source, "mnt-scale", "--cache-dir", cache, "--cache-size", "64GiB", "--memory", "6GiB", "--order", "none")
		if err != nil {
			return err
		}
		took = append(took, m.Took.Seconds())
		cpu = append(cpu, kit.CPU(m.PID))
		rss = append(rss, float64(kit.Status(m.PID, "VmRSS"))/(1<<20))
		anon = append(anon, float64(kit.Status(m.PID, "RssAnon"))/(1<<20))
		s, err := m.Stats()
		if err == nil && s.Disk.Kept != kept {
			err = fmt.Errorf("%s: %d files are cached, want %d", what, s.Disk.Kept, kept)
		}
		if err = errors.Join(err, m.Close()); err != nil {
			return err
		}
	}
	want, verdict := "", ""
	if target > 0 {
		want, verdict = fmt.Sprintf("< %.1f s", target), kit.Verdict(kit.Median(took) < target)
	}
	b.Say("| %s | %.2f | %s | %s | %s | %.2f | %.0f | %.0f |", what, kit.Median(took), kit.Numbers(took, 2), want, verdict, kit.Median(cpu), kit.Median(rss), kit.Median(anon))
	return nil
}

// imageNet yields a listing of that shape, after first, if there is one.
func imageNet(files int, first string) iter.Seq2[objstore.Object, error] {
	return func(yield func(objstore.Object, error) bool) {
		o := objstore.Object{Size: payload, ModTime: time.Unix(1_700_000_000, 0)}
		if o.Key, o.ETag = first, "first"; first != "" && !yield(o, nil) {
			return
		}
		for i := range files {
			class := i * 1000 / files
			o.Key, o.ETag = fmt.Sprintf("n%08d/n%08d_%d.JPEG", class, class, 10_000_000+i), fmt.Sprintf("%016x%016x", i*7919, i)
			if !yield(o, nil) {
				return
			}
		}
	}
}

// inCache does something to a cache folder as its owner.
func inCache(dir, source string, files int, first string, do func(c *catalog.Catalog, m *catalog.Manifest, title string) error) error {
	src, err := objstore.ParseSource("file://" + source)
	if err != nil {
		return err
	}
	m, err := catalog.Build(imageNet(files, first), catalog.BuildOptions{})
	if err != nil {
		return err
	}
	unlock, err := catalog.Lock(dir)
	if err != nil {
		return err
	}
	c, err := catalog.Open(dir, catalog.Options{})
	if err != nil {
		return errors.Join(err, unlock())
	}
	err = c.SetManifest(src.Canonical(), m, nil)
	if err == nil && do != nil {
		err = do(c, m, src.Canonical())
	}
	return errors.Join(err, c.Close(), unlock())
}

func setManifest(dir, source string, files int, first string) error {
	return inCache(dir, source, files, first, nil)
}

// layCache makes a cache of a dataset of so many files, in which some are cached, in the order of a shuffle.
func layCache(dir, source string, files, cached int) error {
	return inCache(dir, source, files, "", func(c *catalog.Catalog, m *catalog.Manifest, title string) (err error) {
		id := catalog.DatasetID(title)
		const records = 256 << 20 / 110_000 // photographs to a segment
		s, err := segment.Open(filepath.Join(dir, "segments", fmt.Sprintf("%x", id)), segment.Options{
			SegmentSize: records * 256, Index: c.Index(id), Logger: slog.Default(),
		}, nil)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.Close()) }()
		data := make([]byte, payload)
		for _, f := range rand.New(rand.NewPCG(1, 2)).Perm(files)[:cached] {
			r := segment.Record{Dataset: id, KeyHash: m.PathHash(f), ETag: m.ETag(f), ObjectSize: payload, Length: payload, File: uint32(f)}
			if _, err := s.Append(r, data); err != nil {
				return err
			}
		}
		return nil
	})
}
