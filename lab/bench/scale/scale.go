// Package scale is the benchmark of that name.
package scale

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

type bench struct {
	*kit.Kit
	reps int
}

// Bench measures a mount of very many objects: 1,000,000 objects in an S3 server (900 folders of 1,000 and one of 100,000),
// 10,000,000 in a folder, and full caches of as many, reopened. The last part alone, which takes some minutes to lay the
// caches down and then seconds: -objects 0 -many 0 -out FILE
//
// The objects are hard links to a few inodes (see s3server.LayTiny): a million real files would
// measure the disk of the machine.
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	million := flags.Int("objects", 1_000_000, "objects in the store, of these 100,000 in one folder (0: leave it out)")
	cached := flags.Int("reopen", 10_000_000, "reopen full caches of 1,000,000 files and of so many (0: none)")
	many := flags.Int("many", 10_000_000, "files of the large folder (0: leave it out)")
	memory := flags.String("memory", "2GiB", "--memory of the daemon")
	reps := flags.Int("reps", 5, "second mounts")
	return func(k *kit.Kit) error {
		b := &bench{Kit: k, reps: *reps}
		if err := b.run(*million, *many, *memory); err != nil || *cached == 0 {
			return err
		}
		err := b.reopen(1_000_000, 0.3)
		if err == nil && *cached > 1_000_000 {
			err = b.reopen(*cached, 1.5)
		}
		return err
	}
}

const bigFolder = 100_000

func (b *bench) run(objects, many int, memory string) error {
	if objects <= bigFolder && objects != 0 {
		return fmt.Errorf("-objects must be over %d", bigFolder)
	}
	b.Header("Very many objects")
	if objects > 0 {
		if err := b.million(objects, memory); err != nil {
			return err
		}
	}
	if many > 0 {
		return b.many(many, memory)
	}
	return nil
}

// laid remembers in a file that a tree is whole.
func (b *bench) laid(name string, lay func() error) error {
	marker := filepath.Join(b.Dir, name+".laid")
	if _, err := os.Stat(marker); err == nil {
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	begin := time.Now()
	if err := lay(); err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "%s: made in %s\n", name, time.Since(begin).Round(time.Millisecond))
	return os.WriteFile(marker, nil, 0o644)
}

func (b *bench) million(objects int, memory string) error {
	if err := b.Store(0); err != nil {
		return err
	}
	folders := append(s3server.Folders((objects-bigFolder)/1000, 1000), s3server.Folder{Name: "big", Files: bigFolder})
	if rest := (objects - bigFolder) % 1000; rest > 0 {
		folders = append(folders, s3server.Folder{Name: "rest", Files: rest})
	}
	if err := b.laid(fmt.Sprintf("tiny-%d", objects), func() error {
		return b.Server.Lay(b.Ctx, "tiny", fmt.Sprint(objects), s3server.Tiny{Folders: folders, Size: 64})
	}); err != nil {
		return err
	}
	b.Say("## %d objects in S3\n", objects)
	source := fmt.Sprintf("s3://tiny/%d", objects)
	cache := filepath.Join(b.Dir, "cache-scale")
	if err := os.RemoveAll(cache); err != nil {
		return err
	}
	flags := []string{"--cache-dir", cache, "--memory", memory}
	m, err := b.Mount(source, "mnt-scale", flags...)
	if err != nil {
		return err
	}
	firstTook, firstRSS := m.Took, kit.Status(m.PID, "VmHWM")
	if err := m.Close(); err != nil {
		return err
	}
	var took, anon, listing, long []float64
	var rss, rssFind, anonFind, slab, peak int64
	var findTook time.Duration
	look := func(m *kit.Mount, last bool) error {
		took = append(took, m.Took.Seconds())
		rss = kit.Status(m.PID, "VmRSS")
		anon = append(anon, float64(kit.Status(m.PID, "RssAnon"))/(1<<20))
		for _, l := range []struct {
			command string
			lines   int
			into    *[]float64
		}{{"ls", bigFolder, &listing}, {"ls -l", bigFolder + 1, &long}} {
			if err := kit.DropCaches(); err != nil {
				return err
			}
			d, err := b.ls(l.command, filepath.Join(m.Dir, "big"), l.lines)
			if err != nil {
				return err
			}
			*l.into = append(*l.into, d.Seconds())
		}
		if !last {
			return nil
		}
		if err := kit.DropCaches(); err != nil {
			return err
		}
		before, begin := kit.MemInfo("Slab"), time.Now()
		n, err := b.find(m.Dir)
		findTook = time.Since(begin)
		if err == nil && n != objects {
			err = fmt.Errorf("find counts %d files of %d", n, objects)
		}
		slab = kit.MemInfo("Slab") - before
		rssFind, anonFind, peak = kit.Status(m.PID, "VmRSS"), kit.Status(m.PID, "RssAnon"), kit.Status(m.PID, "VmHWM")
		return err
	}
	for rep := range b.reps {
		if m, err = b.Mount(source, "mnt-scale", flags...); err != nil {
			return err
		}
		if err := errors.Join(look(m, rep == b.reps-1), m.Close()); err != nil {
			return err
		}
	}
	each := func(n int64) float64 { return float64(n) / float64(objects) }
	b.Say("| | | | target | |")
	b.Say("| --- | ---: | --- | ---: | --- |")
	b.Say("| first mount (lists; most of it is the S3 server's time) | %.1f s | highest RSS %d MiB | | |", firstTook.Seconds(), firstRSS>>20)
	b.Say("| second mount (warm catalog) | %.2f s | %s | < 2 s | %s |", kit.Median(took), kit.Numbers(took, 2), kit.Verdict(kit.Median(took) < 2))
	b.Say("| daemon's RSS after it | %d MiB | of it anonymous, MiB: %s | | |", rss>>20, kit.Numbers(anon, 0))
	b.Say("| first `ls` of a folder of %d, kernel caches dropped | %.2f s | %s | < 1 s | %s |", bigFolder, kit.Median(listing), kit.Numbers(listing, 2), kit.Verdict(kit.Median(listing) < 1))
	b.Say("| `ls -l` of it | %.2f s | %s | | |", kit.Median(long), kit.Numbers(long, 2))
	b.Say("| `find -type f -size +0` over all | %.1f s | %.0f files/s | | |", findTook.Seconds(), float64(objects)/findTook.Seconds())
	b.Say("| daemon's RSS after it | %d MiB | anonymous %d MiB, highest %d MiB; %.0f B an object | ≤ 1024 B an object | %s |", rssFind>>20, anonFind>>20, peak>>20,
		each(peak), kit.Verdict(each(peak) <= 1024))
	b.Say("| kernel slab that it added | %d MiB | %.0f B an object | | |", slab>>20, each(slab))
	return nil
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

// find counts the files; the size makes it look at each one's attributes.
func (b *bench) find(dir string) (int, error) {
	out, err := b.Command("find", dir, "-type", "f", "-size", "+0", "-printf", "x").Output()
	return len(out), err
}

// many mounts a folder of very many files, or is refused with a figure.
func (b *bench) many(files int, memory string) error {
	dir := filepath.Join(b.Dir, fmt.Sprintf("many-%d", files))
	if err := b.laid(fmt.Sprintf("many-%d", files), func() error {
		return s3server.LayTiny(b.Ctx, dir, s3server.Tiny{Folders: s3server.Folders(max(files/1000, 1), min(files, 1000)), Size: 64})
	}); err != nil {
		return err
	}
	b.Say("\n## %d files in a folder\n", files)
	b.Say("| --memory | | |")
	b.Say("| --- | --- | --- |")
	for _, m := range []string{"512MiB", memory, "12GiB"} {
		cache := filepath.Join(b.Dir, "cache-many")
		begin := time.Now()
		mnt, err := b.Mount("file://"+dir, "mnt-scale", "--cache-dir", cache, "--memory", m)
		if b.Ctx.Err() != nil {
			return b.Ctx.Err()
		}
		if err != nil {
			text := err.Error()
			if i := strings.Index(text, "shoal: "); i >= 0 {
				text = strings.TrimSpace(text[i:])
			}
			b.Say("| %s | refused after %.1f s | %s |", m, time.Since(begin).Seconds(), text)
			if err := os.RemoveAll(cache); err != nil { // the listing is kept, and the next one shall list
				return err
			}
			continue
		}
		first := mnt.Took
		rss := kit.Status(mnt.PID, "VmHWM")
		if err := mnt.Close(); err != nil {
			return err
		}
		if mnt, err = b.Mount("file://"+dir, "mnt-scale", "--cache-dir", cache, "--memory", m); err != nil {
			return err
		}
		begin = time.Now()
		n, err := b.find(mnt.Dir)
		took := time.Since(begin)
		after := kit.Status(mnt.PID, "VmHWM")
		anon := kit.Status(mnt.PID, "RssAnon")
		if err == nil && n != files {
			err = fmt.Errorf("find counts %d files of %d", n, files)
		}
		if err := errors.Join(err, mnt.Close()); err != nil {
			return err
		}
		b.Say("| %s | first mount %.1f s, highest RSS %d MiB; second %.2f s | `find` over all %.0f s; highest RSS %d MiB (%.0f B a file), anonymous %d MiB |", m,
			first.Seconds(), rss>>20, mnt.Took.Seconds(), took.Seconds(), after>>20, float64(after)/float64(files), anon>>20)
		if err := os.RemoveAll(cache); err != nil {
			return err
		}
	}
	return nil
}
