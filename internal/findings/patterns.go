package findings

import (
	"fmt"
	"path"
	"strings"

	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/prefetch/infer"
)

// trainerRules recognise ways of reading, in the report's order. A finding without a thing is none.
var trainerRules = []Rule[*trainer]{
	{"idle", tooLittle}, {"shards", shards}, {"random-inside-files", insideFiles},
	{"sequential", sequential}, {"torch-shuffle", torchShuffle}, {"repeated-shuffle", repeatedShuffle},
	{"with-replacement", withReplacement}, {"shuffle", otherShuffle},
	{"one-reader", oneReader}, {"page-cache", pageCache}, {"behind", behind},
	{"not-the-storage", notTheStorage},
}

func percent(n, of int) string { return human.Percent(share(float64(n), float64(of))) }

// gain adds a remedy, and how many times as many files a second it would bring.
func (f Finding) gain(t *trainer, rate float64, remedy string) Finding {
	if times := share(rate, t.estimate.Now); times > 0 {
		f = f.with("gain", max(times, f.Values["gain"]))
		remedy = fmt.Sprintf("[%.1fx, simulated] %s", times, remedy)
	}
	f.Remedy = strings.TrimPrefix(f.Remedy+"\n"+remedy, "\n")
	f.Level = Warn
	return f
}

// fill adds the remedy of a cache that holds the dataset, if that helps.
func (f Finding) fill(t *trainer) Finding {
	if t.estimate.Warm <= 0 || t.Keep*10 > t.Reads*9 {
		return f
	}
	return f.gain(t, t.estimate.Warm,
		fmt.Sprintf("fill the cache, which may hold %s of the dataset, before the first epoch: "+
			"shoal warm %s --cache-dir DIR", human.Percent(t.estimate.CacheShare), t.trace.Source))
}

const hint = `in Python shoal.hint(sampler, mount="MOUNTPOINT"), or write the paths to MOUNTPOINT/.shoal/plan`

func tooLittle(t *trainer) (f Finding) {
	if t.Opens >= fewest || t.Reads >= fewest && t.inFiles() {
		return f
	}
	return ok("Too few reads for an analysis: %s, %s, %s of names", human.Count(t.Opens, "open"), human.Count(t.Reads,
		"read"),
		human.Count(t.Lookups, "lookup")).warn("a walk over the tree is served from memory, and without the store",
		"record while the trainer is in the middle of an epoch, and for longer: shoal profile MOUNTPOINT --duration 5m")
}

// large is the size from which a file is a container of samples.
const large = 8 << 20

// containers counts the reads in files that are containers, and how many of them do not go on where the one before
// ended. most is whether they are half of all visits; ext is the extension of one of them.
func (t *trainer) containers() (reads, jumps int, most bool, ext string) {
	n, read := 0, 0
	for i := range t.visits {
		v := &t.visits[i]
		if v.reads > 0 {
			read++
		}
		if file := t.file(v); v.reads > 0 && (file.Size >= large || path.Ext(file.Path) == ".tar") {
			n, reads, jumps, ext = n+1, reads+v.reads, jumps+v.jumps, path.Ext(file.Path)
		}
	}
	return reads, jumps, n > 0 && 2*n >= read, ext
}

// inFiles reports whether the files are containers, so that orders of files mean little.
func (t *trainer) inFiles() bool { return shards(t).Thing != "" || insideFiles(t).Thing != "" }

func shards(t *trainer) (f Finding) {
	reads, jumps, most, ext := t.containers()
	if !most || t.Opens < 2 || 5*jumps > reads {
		return f
	}
	f = ok("Large files from beginning to end (shards, as WebDataset reads them)").
		because("%s of the reads go on where the one before ended", percent(reads-jumps, reads))
	if ext == ".tar" {
		f = f.gain(t, 0,
			"give Shoal the shards as a source: members appear as files, orders are known, and each is one ranged GET: "+
				fmt.Sprintf("shoal mount '%s/shard-{000000..000127}.tar' MOUNTPOINT", strings.TrimSuffix(t.trace.Source, "/")))
	}
	return f.gain(t, t.estimate.Cold, "write the shards' paths, in the trainer's order, to MOUNTPOINT/.shoal/plan")
}

// insideFiles: random reads in large files, like those of memory maps, HDF5 or Parquet.
func insideFiles(t *trainer) (f Finding) {
	reads, jumps, _, ext := t.containers()
	if reads < fewest || 2*reads < t.Reads || 2*jumps < reads {
		return f
	}
	f = ok("Random reads inside large files (a memory map, HDF5, Parquet)").because("%s of the reads do not go on where "+
		"the one before ended (%q); the median is %s, and up to 4 MiB are fetched for one", percent(jumps, reads), ext,
		human.Bytes(int64(quantile(t.lens, 0.5))))
	return f.fill(t).gain(t, 0, "store samples as single files or in tar shards: shoal pack SOURCE DEST")
}

// isSequential reports whether processes read in the order of the listing.
func (t *trainer) isSequential() (forward float64, is bool) {
	up, n := 0.0, 0.0
	for _, p := range t.process {
		var list []int
		for _, v := range p.visits {
			if !v.again {
				list = append(list, t.number(v))
			}
		}
		steps := float64(max(len(list)-1, 0))
		up, n = up+steps*rising(list, 1), n+steps
	}
	forward = share(up, n)
	return forward, n >= fewest/2 && forward >= 0.85
}

func sequential(t *trainer) (f Finding) {
	forward, is := t.isSequential()
	if !t.trains() || !is || t.inFiles() {
		return f
	}
	f = ok("One file after the other, by name (shuffle=False), in %s", human.Count(len(t.passes), "pass")).
		because("%s of the steps from a process's file to its next are forward in the listing's order",
			human.Percent(forward))
	if !t.ordered() {
		f = f.gain(t, t.estimate.Cold, "pass the order: shoal mount "+t.trace.Source+" MOUNTPOINT --order sequential")
	}
	if len(t.passes) > 1 {
		f = f.fill(t)
	}
	return f
}

// shuffled reports whether files are opened in an order unrelated to the listing.
func (t *trainer) shuffled() bool {
	_, sequential := t.isSequential()
	return t.trains() && !sequential && !t.inFiles()
}

func torchShuffle(t *trainer) (f Finding) {
	if !t.shuffled() || !t.recognise() {
		return f
	}
	s := t.torch
	f = ok("A shuffle of PyTorch that Shoal knows, in %s: %s", human.Count(len(t.passes), "pass"), s.Source).
		because("%.0f bits of evidence; %d of %d ranks read here", s.Bits, s.Last-s.First+1, s.World)
	command := "shoal mount " + t.trace.Source + " MOUNTPOINT --order " + s.Spec()
	if s.Spec() == "auto" {
		command = hint
	}
	switch {
	case t.ordered():
		f.Cause += "; the mount follows it already"
		return f
	case t.trace.Order == "auto":
		return f.gain(t, t.estimate.Cold,
			"the mount infers it; if it is passed, prefetching starts with the first sample: "+command)
	}
	return f.gain(t, t.estimate.Cold, "pass this order to the mount, or let it infer the order (--order auto): "+command)
}

// repeatedShuffle: a sampler without calls of set_epoch.
func repeatedShuffle(t *trainer) (f Finding) {
	if !t.shuffled() || len(t.passes) < 2 || len(t.passes[1]) < fewest {
		return f
	}
	place := map[int]int{}
	for i, number := range t.passes[0] {
		place[number] = i
	}
	var again []int
	for _, number := range t.passes[1] {
		again = append(again, place[number])
	}
	// Workers that overtake each other change the order by little.
	alike := rising(again, len(again)/4)
	if alike < 0.9 {
		return f
	}
	return ok("The same shuffle in each epoch: the trainer never calls sampler.set_epoch").warn(
		fmt.Sprintf("%s of the pairs of files that are far apart come in the order of the pass before", human.Percent(alike)),
		"sampler.set_epoch(epoch) before each epoch: the model sees the same batches now, which costs accuracy, not speed")
}

// withReplacement: files repeat long before all others were read once.
func withReplacement(t *trainer) (f Finding) {
	if !t.shuffled() || t.near < many {
		return f
	}
	return ok("Files come again within an epoch: several jobs, or a draw with replacement (WeightedRandomSampler)").
		because("%s of the opens repeat a file of the last opens, as many as a quarter of the files", human.Percent(t.near)).
		gain(t, t.estimate.Cold, "pass the order, which Shoal cannot infer: "+hint+" (several jobs: plans/NAME)").fill(t)
}

// otherShuffle is any other random order.
func otherShuffle(t *trainer) (f Finding) {
	if !t.shuffled() || t.recognise() || repeatedShuffle(t).Thing != "" || withReplacement(t).Thing != "" {
		return f
	}
	forward, _ := t.isSequential()
	f = ok("A random order, in %s", human.Count(len(t.passes), "pass")).
		because("%s of the steps are forward in the listing's order", human.Percent(forward))
	if t.ordered() {
		f.Cause += "; the mount follows it: " + t.Order
		return f
	}
	f.Cause += "; it is not a shuffle of PyTorch with a common seed, and --order auto also tries all other seeds"
	return f.gain(t, t.estimate.Cold, "pass the order: "+hint).
		gain(t, 0, "seed the loader, so that the mount finds its order within a dozen opens: torch.manual_seed(7)").fill(t)
}

// oneReader: each read waits for the previous one.
func oneReader(t *trainer) (f Finding) {
	if !t.trains() || t.AtOnce > 1.3 || t.WaitShare < 0.3 {
		return f
	}
	return ok("One process reads, file after file: the latency of the store is the limit").warn(
		fmt.Sprintf("%.1f processes at a time, which wait for reads %s of their time", t.AtOnce, human.Percent(t.WaitShare)),
		"use twice the workers, if there are cores for them: DataLoader(..., num_workers=8)")
}

// pageCache: opens whose reads are served by the kernel.
func pageCache(t *trainer) (f Finding) {
	n := 0
	for i := range t.visits {
		if v := &t.visits[i]; v.reads == 0 && t.file(v).Size > 0 {
			n++
		}
	}
	if t.Opens < fewest || 2*n < t.Opens {
		return f
	}
	return ok("The kernel's page cache serves the reads: nothing to gain from storage").
		because("%s of the opened files had no read that reached the daemon", percent(n, t.Opens)).
		gain(t, 0, "a faster epoch needs faster decoding, or the feed: shoal serve "+t.trace.Source+" (docs/feed.md)")
}

// behind: the order is known, but reads wait.
func behind(t *trainer) (f Finding) {
	late := t.Misses + t.Joined
	if !t.trains() || !t.ordered() || 5*late < t.Reads || t.WaitShare < 0.1 {
		return f
	}
	f = ok("The order is known, and the store cannot keep up").because("%s of the reads came before their bytes; at the "+
		"end the lead was %d samples; the model's bound of a cold epoch is %s", percent(late, t.Reads), t.stats.Lead,
		t.estimate.Bound).fill(t)
	if t.trace.CacheBytes < t.trace.Bytes {
		f = f.gain(t, 0, fmt.Sprintf("a larger cache: --cache-size %dMiB", t.trace.Bytes*21/20>>20+64))
	}
	if !t.trace.Packed {
		f = f.gain(t, 0, "large GETs instead of one a file: shoal pack "+t.trace.Source+" DEST")
	}
	return f.gain(t, 0, "measure the link, and the best number of connections: shoal doctor "+t.trace.Source)
}

// notTheStorage: the trainer, or the loader's own work, is slower than the storage.
func notTheStorage(t *trainer) (f Finding) {
	if !t.trains() || t.Reads < fewest || t.WaitShare >= idleShare {
		return f
	}
	return ok("The storage is not what the trainer waits for").because("reads wait %s of the loader's time; a worker "+
		"takes %s for each file to decode, augment, collate, or to wait for the step", human.Percent(t.WaitShare),
		seconds(t.estimate.Read)).
		gain(t, 0, "if the accelerator is not the limit: more workers, or the feed: shoal serve "+t.trace.Source)
}

// recognise looks for a shuffle of PyTorch behind the opens, like a mount, but only among common seeds, which takes a
// fraction of a second.
func (t *trainer) recognise() bool {
	if t.searched {
		return t.torch != nil
	}
	t.searched = true
	subsets := []infer.Subset{{Len: t.trace.Samples}}
	for _, tree := range t.trace.Trees {
		if tree.First >= 0 && tree.Len > 0 && tree.First+tree.Len <= t.trace.Samples {
			subsets = append(subsets, infer.Subset{Folder: tree.Folder, First: tree.First, Len: tree.Len})
		}
	}
	longer := func(d infer.Depth) bool { return d > infer.Usual } // as if it were in progress already
	d := infer.NewDetector(subsets)
	for i := range t.visits {
		sample := t.file(&t.visits[i]).Sample
		if sample < 0 || sample >= t.trace.Samples {
			continue
		}
		d.Open(infer.Open{Process: t.visits[i].process, Sample: uint32(sample)})
		for s := d.Next(longer); s != nil && t.options.Searches > 0; s = d.Next(longer) {
			if s.Depth == infer.Usual {
				t.options.Searches--
			}
			if f, ok := search(s); ok {
				d.Lock(s, f)
			}
		}
		if f, _, locked := d.Finding(); locked {
			t.torch = &f
		}
	}
	return t.torch != nil
}

// search searches common seeds.
func search(s *infer.Search) (best infer.Finding, ok bool) {
	for step := 0; step < s.Steps() && !ok; step++ {
		s.Run(step, func() bool { return ok }, func(f infer.Finding) {
			if !ok || f.Bits > best.Bits {
				best, ok = f, true
			}
		})
	}
	return best, ok
}
