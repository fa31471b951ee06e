// Package scale is the benchmark of that name.
package scale

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

type bench struct {
	*kit.Kit
	reps   int
	memory string
}

// Bench measures a mount of very many objects: 1,000,000 objects in an S3 server (900 folders of 1,000 and one of 100,000).
// The objects are hard links to a few inodes (see s3server.LayTiny): a million real files would
// measure the disk of the machine.
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	b := &bench{}
	objects := flags.Int("objects", 1_000_000, "objects in the store, of these 100,000 in one folder")
	flags.StringVar(&b.memory, "memory", "2GiB", "--memory of the daemon")
	flags.IntVar(&b.reps, "reps", 5, "second mounts")
	return func(k *kit.Kit) error {
		b.Kit = k
		if *objects <= bigFolder {
			return fmt.Errorf("-objects must be over %d", bigFolder)
		}
		b.Header("Very many objects")
		return b.million(*objects)
	}
}

const bigFolder = 100_000

func (b *bench) million(objects int) error {
	if err := b.Store(0); err != nil {
		return err
	}
	folders := append(s3server.Folders((objects-bigFolder)/1000, 1000), s3server.Folder{Name: "big", Files: bigFolder})
	if rest := (objects - bigFolder) % 1000; rest > 0 {
		folders = append(folders, s3server.Folder{Name: "rest", Files: rest})
	}
	laid := filepath.Join(b.Dir, fmt.Sprintf("tiny-%d.laid", objects)) // says that all are there
	if _, err := os.Stat(laid); err != nil {
		if err := b.Server.Lay(b.Ctx, "tiny", fmt.Sprint(objects), s3server.Tiny{Folders: folders, Size: 64}); err != nil {
			return err
		}
		if err := os.WriteFile(laid, nil, 0o644); err != nil {
			return err
		}
	}
	b.Say("## %d objects in S3\n", objects)
	cache := filepath.Join(b.Dir, "cache-scale")
	if err := os.RemoveAll(cache); err != nil {
		return err
	}
	mount := func() (*kit.Mount, error) {
		return b.Mount(fmt.Sprintf("s3://tiny/%d", objects), "mnt-scale", "--cache-dir", cache, "--memory", b.memory)
	}
	m, err := mount()
	if err != nil {
		return err
	}
	firstTook, firstRSS := m.Took, kit.Status(m.PID, "VmHWM")
	if err := m.Close(); err != nil {
		return err
	}
	var s remounts
	for rep := range b.reps {
		if m, err = mount(); err != nil {
			return err
		}
		err := b.look(m, &s)
		if err == nil && rep == b.reps-1 {
			err = b.findAll(m, &s, objects)
		}
		if err := errors.Join(err, m.Close()); err != nil {
			return err
		}
	}
	each := func(n int64) float64 { return float64(n) / float64(objects) }
	b.Say("| | | | target | |")
	b.Say("| --- | ---: | --- | ---: | --- |")
	b.Say("| first mount (lists; most of it is the S3 server's time) | %.1f s | highest RSS %d MiB | | |", firstTook.Seconds(), firstRSS>>20)
	b.Say("| second mount (warm catalog) | %.2f s | %s | < 2 s | %s |", kit.Median(s.took), kit.Numbers(s.took, 2), kit.Verdict(kit.Median(s.took) < 2))
	b.Say("| daemon's RSS after it | %d MiB | of it anonymous, MiB: %s | | |", s.rss>>20, kit.Numbers(s.anon, 0))
	b.Say("| first `ls` of a folder of %d, kernel caches dropped | %.2f s | %s | < 1 s | %s |", bigFolder, kit.Median(s.short), kit.Numbers(s.short, 2), kit.Verdict(kit.Median(s.short) < 1))
	b.Say("| `ls -l` of it | %.2f s | %s | | |", kit.Median(s.long), kit.Numbers(s.long, 2))
	b.Say("| `find -type f -size +0` over all | %.1f s | %.0f files/s | | |", s.find.Seconds(), float64(objects)/s.find.Seconds())
	b.Say("| daemon's RSS after it | %d MiB | anonymous %d MiB, highest %d MiB; %.0f B an object | ≤ 1024 B an object | %s |", s.rssFind>>20, s.anonFind>>20, s.peak>>20,
		each(s.peak), kit.Verdict(each(s.peak) <= 1024))
	b.Say("| kernel slab that it added | %d MiB | %.0f B an object | | |", s.slab>>20, each(s.slab))
	return nil
}

// remounts are what second mounts took, in seconds, and bytes of memory.
type remounts struct {
	took, anon, short, long            []float64 // of each mount; anonymous memory in MiB
	find                               time.Duration
	rss, rssFind, anonFind, slab, peak int64
}

// look lists the large folder of a mount that has just been made.
func (b *bench) look(m *kit.Mount, s *remounts) error {
	s.took = append(s.took, m.Took.Seconds())
	s.rss = kit.Status(m.PID, "VmRSS")
	s.anon = append(s.anon, float64(kit.Status(m.PID, "RssAnon"))/(1<<20))
	for _, l := range []struct {
		command string
		lines   int
		into    *[]float64
	}{{"ls", bigFolder, &s.short}, {"ls -l", bigFolder + 1, &s.long}} {
		if err := kit.DropCaches(); err != nil {
			return err
		}
		d, err := b.ls(l.command, filepath.Join(m.Dir, "big"), l.lines)
		if err != nil {
			return err
		}
		*l.into = append(*l.into, d.Seconds())
	}
	return nil
}

// findAll looks at every file.
func (b *bench) findAll(m *kit.Mount, s *remounts, objects int) error {
	if err := kit.DropCaches(); err != nil {
		return err
	}
	slab, begin := kit.MemInfo("Slab"), time.Now()
	err := b.find(m.Dir, objects)
	s.find = time.Since(begin)
	s.slab = kit.MemInfo("Slab") - slab
	s.rssFind, s.anonFind, s.peak = kit.Status(m.PID, "VmRSS"), kit.Status(m.PID, "RssAnon"), kit.Status(m.PID, "VmHWM")
	return err
}

// ls lists a folder and checks the number of lines.
func (b *bench) ls(command, dir string, lines int) (time.Duration, error) {
	f := strings.Fields(command)
	begin := time.Now()
	out, err := b.Command(f[0], append(f[1:], dir)...).Output()
	took := time.Since(begin)
	if n := bytes.Count(out, []byte("\n")); err == nil && n != lines {
		err = fmt.Errorf("%s %s prints %d lines, want %d", command, dir, n, lines)
	}
	return took, err
}

// find checks the number of files; the size makes it look at each one's attributes.
func (b *bench) find(dir string, files int) error {
	out, err := b.Command("find", dir, "-type", "f", "-size", "+0", "-printf", "x").Output()
	if err == nil && len(out) != files {
		err = fmt.Errorf("find counts %d files of %d", len(out), files)
	}
	return err
}
