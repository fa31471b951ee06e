package profile

import (
	"fmt"

	"github.com/shoalfs/shoal/internal/profile/trace"
)

// headers: only the first bytes of each file.
func headers(a *analysis) (Finding, bool) {
	n, read := 0, 0
	for i := range a.visits {
		v := &a.visits[i]
		if v.reads == 0 || v.again {
			continue
		}
		read++
		if size := a.size(v.file); size >= 64<<10 && 4*v.bytes < size && v.reads <= 2 {
			n++
		}
	}
	if read < fewest || 2*n < read || a.repeatedAtOnce()*4 > len(a.visits) || a.inFiles() {
		return Finding{}, false
	}
	f := finding("headers", "Only the beginning of each file is read (sizes, durations, labels)",
		fmt.Sprintf("%d of %d files were read by less than a quarter", n, read))
	f.Helps = append(f.Helps, Help{What: "a whole extent of up to 4 MiB is fetched for each: save the result of the scan in a file, and read that at the next start"})
	return f, true
}

// headerThenBody: each file is opened for its header, and then for its whole content.
func headerThenBody(a *analysis) (Finding, bool) {
	n := a.repeatedAtOnce()
	if len(a.visits) < fewest || n*10 < len(a.visits)*3 {
		return Finding{}, false
	}
	f := finding("header-then-body", "Each file is opened twice: for its header, and then for its whole content",
		fmt.Sprintf("%s of the opens are of the file that the same process had open just before", percent(share(float64(n), float64(len(a.visits))))))
	f.Helps = append(f.Helps, Help{What: "harmless: the second open is served from memory. A single open would save two round trips through the kernel for each file", Command: "data = open(path, 'rb').read(), then decode from io.BytesIO(data)"})
	return f, true
}

const (
	tiny     = 32 << 10
	tinyFile = 128 << 10
	fewReads = 4
)

// tinyReads: the kernel's read-ahead starts small, and grows if a program reads in small pieces.
func tinyReads(a *analysis) (Finding, bool) {
	n, read, reads := 0, 0, 0
	for i := range a.visits {
		v := &a.visits[i]
		if v.reads == 0 {
			continue
		}
		read++
		if v.reads >= fewReads && v.first <= tiny && v.bytes >= tinyFile && v.bytes/int64(v.reads) <= tinyFile && 2*v.jumps < v.reads {
			n++
			reads += v.reads
		}
	}
	if n < fewest/2 || n*10 < read*3 {
		return Finding{}, false
	}
	f := finding("tiny-reads", "Files are read in small pieces",
		fmt.Sprintf("%d of %d files are read with reads that begin with %d KiB or less, %.1f for each file", n, read, tiny>>10, share(float64(reads), float64(n))))
	f.Helps = append(f.Helps, Help{What: "read the whole file at once, or through a large buffer", Command: "open(path, 'rb', buffering=1 << 20).read()"})
	return f, true
}

// oneReader: each read waits for the previous one.
func oneReader(a *analysis) (Finding, bool) {
	w := a.waitShare()
	if !a.trains() || a.atOnce() > 1.3 || w < 0.3 {
		return Finding{}, false
	}
	e := a.estimate
	f := finding("one-reader", "One process reads, file after file: the latency of the store is the limit",
		fmt.Sprintf("%.1f processes at a time, which wait for reads %s of their time; %.0f files/s", a.atOnce(), percent(w), e.Now))
	f.Helps = append(f.Helps, a.gain(Help{What: "use twice the workers, if there are cores for them", Command: "DataLoader(..., num_workers=8)"}, e.Workers2, "twice the recorded rate, for twice as many readers"))
	if !a.ordered() {
		f.Helps = append(f.Helps, a.known("a known order helps even one reader: its files are prefetched", "shoal mount ... --order SPEC, or shoal.hint(sampler, mount=\"MOUNTPOINT\")"))
	}
	return f, true
}

// pageCache: opens whose reads are served by the kernel.
func pageCache(a *analysis) (Finding, bool) {
	n, all := 0, 0
	for i := range a.visits {
		v := &a.visits[i]
		if a.size(v.file) == 0 {
			continue
		}
		all++
		if v.reads == 0 && v.closed {
			n++
		}
	}
	if all < fewest || 2*n < all || a.names() >= manyLookups && 10*all <= a.names() {
		return Finding{}, false
	}
	f := finding("page-cache", "The kernel's page cache serves the reads", fmt.Sprintf("%s of %d opened files were closed without a read that reached the daemon", percent(share(float64(n), float64(all))), all))
	f.Helps = append(f.Helps, Help{What: "nothing to gain from storage: a faster epoch needs faster decoding, or the feed", Command: "shoal serve " + a.trace.Source + " (docs/feed.md)"})
	return f, true
}

// behind: the order is known, but reads wait.
func behind(a *analysis) (Finding, bool) {
	late := share(float64(a.areas[trace.Miss]+a.areas[trace.Joined]), float64(a.reads))
	if !a.trains() || !a.ordered() || late < 0.2 || a.waitShare() < 0.1 {
		return Finding{}, false
	}
	e := a.estimate
	f := finding("behind", "The order is known, and the store cannot keep up",
		fmt.Sprintf("%s of the reads came before their bytes; at the end the lead was %d samples", percent(late), a.last.Lead),
		fmt.Sprintf("the model's bound of a cold epoch is %s", e.Bound))
	a.fill(&f, "")
	if a.trace.CacheBytes < a.trace.Bytes {
		f.Helps = append(f.Helps, Help{What: fmt.Sprintf("a larger cache: it may hold %s of the dataset", percent(e.CacheShare)), Command: fmt.Sprintf("--cache-size %dMiB", a.trace.Bytes*21/20>>20+64)})
	}
	if !a.trace.Packed {
		f.Helps = append(f.Helps, Help{What: "shards: large GETs instead of one a file", Command: "shoal pack " + a.trace.Source + " DEST"})
	}
	f.Helps = append(f.Helps, Help{What: "measure the link, and the best number of connections", Command: "shoal doctor " + a.trace.Source})
	return f, true
}

// idleShare is the share of waiting that is negligible.
const idleShare = 0.05

// notTheStorage: the trainer, or the loader's own work, is slower than the storage.
func notTheStorage(a *analysis) (Finding, bool) {
	w := a.waitShare()
	if !a.trains() || a.reads < fewest || w >= idleShare {
		return Finding{}, false
	}
	e := a.estimate
	f := finding("not-the-storage", "The storage is not what the trainer waits for",
		fmt.Sprintf("reads wait %.1f%% of the loader's time; if none waited, %.0f files/s would become %.0f", 100*w, e.Now, e.NoWait))
	if e.Blocked >= trainerSet {
		f.Evidence = append(f.Evidence, fmt.Sprintf("workers pause %s of their time with a full queue: the step sets the pace", percent(e.Blocked)))
		f.Helps = append(f.Helps, Help{What: "nothing to gain from storage: the accelerator is the limit, as it should be"})
		return f, true
	}
	f.Evidence = append(f.Evidence, fmt.Sprintf("a worker is busy for %s on each file with other work than reading (decoding, augmenting, collating)", millis(e.Read)))
	f.Helps = append(f.Helps,
		a.gain(Help{What: "use more workers, if cores are idle", Command: "DataLoader(..., num_workers=...)"}, e.Workers2, "with twice the workers, if there are cores for them"),
		Help{What: "let Shoal decode: the feed decodes crops without the rest of the picture", Command: "shoal serve " + a.trace.Source + " (docs/feed.md)"})
	return f, true
}

// verdict is the report in one sentence.
func (a *analysis) verdict() string {
	if !a.trains() {
		if a.names() >= manyLookups {
			return "Names were looked up, and almost nothing was read."
		}
		if a.readsInside() {
			return fmt.Sprintf("%.0f MB/s from large files; reads wait %.0f%% of the readers' time.", share(float64(a.readBytes)/1e6, (a.to-a.from).Seconds()), 100*a.waitShare())
		}
		return fmt.Sprintf("%d files were opened and %d reads arrived: too little to say what the trainer does.", len(a.visits), a.reads)
	}
	e, w := a.estimate, a.waitShare()
	head := fmt.Sprintf("%.0f files/s; reads wait %.0f%% of the loader's time.", e.Now, 100*w)
	best := max(e.Cold, e.Warm)
	switch {
	case w < idleShare:
		return head + " Faster storage would gain almost nothing."
	case a.ordered():
		return head + fmt.Sprintf(" The order is known; the model expects %.0f files/s while everything is fetched and %.0f/s from the cache.", e.Cold, e.Warm)
	case e.Cold > 1.1*e.Now:
		return head + fmt.Sprintf(" With its order known the model expects %.0f files/s while everything is fetched (%.1f times as many; bound by %s), and %.0f/s from the cache.", e.Cold, e.Cold/e.Now, boundText(e.Bound), e.Warm)
	case best > 1.1*e.Now:
		return head + fmt.Sprintf(" A filled cache would allow %.0f files/s (%.1f times as many); the order alone helps little: %s is the limit.", e.Warm, e.Warm/e.Now, boundText(e.Bound))
	}
	return head + fmt.Sprintf(" The model expects no gain from a known order or a filled cache: %s is the limit.", boundText(e.Bound))
}

// boundText describes a limit of sim in words.
func boundText(name string) string {
	switch name {
	case "reading":
		return "the workers' own time"
	case "compute":
		return "the trainer's step"
	}
	return "the store's " + name
}
