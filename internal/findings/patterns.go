package findings

import (
	"fmt"
	"path"
	"strings"

	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/prefetch/infer"
)

// trainerRules recognise ways of reading, in the report's order.
var trainerRules = []Rule[*trainer]{
	{"idle", func(t *trainer) Finding {
		enough := t.Opens >= fewest || t.Reads >= fewest && (t.kind == "shards" || t.kind == "random-inside-files")
		return when(!enough, Warn, "Too few reads for an analysis: "+human.Count(t.Opens, "open")+", "+
			human.Count(t.Reads, "read")+", "+human.Count(t.Lookups, "lookup")+" of names",
			"a walk over the tree is served from memory, and without the store",
			"record while the trainer is in the middle of an epoch, and for longer: shoal profile MOUNTPOINT "+
				"--duration 5m")
	}},
	{"shards", func(t *trainer) Finding {
		c := &t.inside
		f := when(t.kind == "shards", OK, "Large files from beginning to end (shards, as WebDataset reads them)",
			percent(c.reads-c.jumps, c.reads)+" of the reads go on where the one before ended", "")
		if c.ext == ".tar" {
			f = f.gain(t, 0, "give Shoal the shards as a source: members appear as files, orders are known, and each "+
				"is one ranged GET: shoal mount '"+strings.TrimSuffix(t.trace.Source, "/")+
				"/shard-{000000..000127}.tar' MOUNTPOINT")
		}
		return f.gain(t, t.estimate.Cold, "write the shards' paths, in the trainer's order, to MOUNTPOINT/.shoal/plan")
	}},
	{"random-inside-files", func(t *trainer) Finding {
		c := &t.inside
		cause := fmt.Sprintf("%s of the reads do not go on where the one before ended (%q); the median is %s, and up "+
			"to 4 MiB are fetched for one", percent(c.jumps, c.reads), c.ext, human.Bytes(int64(quantile(t.lens, 0.5))))
		return when(t.kind == "random-inside-files", OK,
			"Random reads inside large files (a memory map, HDF5, Parquet)",
			cause, "").fill(t).gain(t, 0, "store samples as single files or in tar shards: shoal pack SOURCE DEST")
	}},
	{"sequential", func(t *trainer) Finding {
		f := when(t.kind == "sequential", OK, "One file after the other, by name (shuffle=False), in "+t.inPasses(),
			human.Percent(t.forward)+
				" of the steps from a process's file to its next are forward in the listing's order", "")
		if !t.ordered() {
			f = f.gain(t, t.estimate.Cold, "pass the order: shoal mount "+t.source()+
				" MOUNTPOINT --order sequential")
		}
		if len(t.passes) > 1 {
			f = f.fill(t)
		}
		return f
	}},
	{"torch-shuffle", torchShuffle},
	{"repeated-shuffle", func(t *trainer) Finding { // a sampler without calls of set_epoch
		return when(t.kind == "shuffle" && t.alike >= same, Warn,
			"The same shuffle in each epoch: the trainer never calls sampler.set_epoch",
			human.Percent(t.alike)+" of the pairs of files that are far apart come in the order of the pass before",
			"sampler.set_epoch(epoch) before each epoch: the model sees the same batches now, which costs accuracy, "+
				"not speed")
	}},
	{"with-replacement", func(t *trainer) Finding { // files repeat long before all others were read once
		return when(t.kind == "shuffle" && t.near >= many, OK,
			"Files come again within an epoch: several jobs, or a draw with replacement (WeightedRandomSampler)",
			human.Percent(t.near)+" of the opens repeat a file of the last opens, as many as a quarter of the files",
			"").gain(t, t.estimate.Cold, "pass the order, which Shoal cannot infer: "+hint+
			" (several jobs: plans/NAME)").fill(t)
	}},
	{"shuffle", func(t *trainer) Finding { // any other random order
		f := when(t.kind == "shuffle" && t.torch == nil && t.alike < same && t.near < many, OK,
			"A random order, in "+t.inPasses(),
			human.Percent(t.forward)+" of the steps are forward in the listing's order", "")
		if t.ordered() {
			f.Cause += "; the mount follows it: " + t.Order
			return f
		}
		f.Cause += "; it is not a shuffle of PyTorch with a common seed, and --order auto also tries all other seeds"
		return f.gain(t, t.estimate.Cold, "pass the order: "+hint).
			gain(t, 0, "seed the loader, so that the mount finds its order within a dozen opens: torch.manual_seed(7)").
			fill(t)
	}},
	{"one-reader", func(t *trainer) Finding { // each read waits for the previous one
		return when(t.trains() && t.AtOnce <= 1.3 && t.WaitShare >= 0.3, Warn,
			"One process reads, file after file: the latency of the store is the limit",
			fmt.Sprintf("%.1f processes at a time, which wait for reads %s of their time",
				t.AtOnce, human.Percent(t.WaitShare)),
			"use twice the workers, if there are cores for them: DataLoader(..., num_workers=8)")
	}},
	{"page-cache", func(t *trainer) Finding { // opens whose reads are served by the kernel
		return when(t.Opens >= fewest && 2*t.unread >= t.Opens, Warn,
			"The kernel's page cache serves the reads: nothing to gain from storage",
			percent(t.unread, t.Opens)+" of the opened files had no read that reached the daemon",
			"a faster epoch needs faster decoding, or the feed: shoal serve "+t.source()+" (docs/feed.md)")
	}},
	{"behind", func(t *trainer) Finding { // the order is known, but reads wait
		late := t.Misses + t.Joined
		f := when(t.trains() && t.ordered() && 5*late >= t.Reads && t.WaitShare >= 0.1, OK,
			"The order is known, and the store cannot keep up",
			fmt.Sprintf("%s of the reads came before their bytes; at the end the lead was %d samples; the model's "+
				"bound of a cold epoch is %s", percent(late, t.Reads), t.stats.Lead, t.estimate.Bound), "").fill(t)
		if t.trace.CacheBytes < t.trace.Bytes {
			f = f.gain(t, 0, fmt.Sprintf("a larger cache: --cache-size %dMiB", t.trace.Bytes*21/20>>20+64))
		}
		if !t.trace.Packed {
			f = f.gain(t, 0, "large GETs instead of one a file: shoal pack "+t.source()+" DEST")
		}
		return f.gain(t, 0, "measure the link, and the best number of connections: shoal doctor "+t.source())
	}},
	{"not-the-storage", func(t *trainer) Finding { // the trainer, or the loader's own work, is slower than the storage
		return when(t.trains() && t.Reads >= fewest && t.WaitShare < idleShare, Warn,
			"The storage is not what the trainer waits for",
			"reads wait "+human.Percent(t.WaitShare)+" of the loader's time; a worker takes "+seconds(t.estimate.Read)+
				" for each file to decode, augment, collate, or to wait for the step",
			"if the accelerator is not the limit: more workers, or the feed: shoal serve "+t.source())
	}},
}

func torchShuffle(t *trainer) (f Finding) {
	s := t.torch
	if s == nil {
		return f
	}
	f = when(true, OK, "A shuffle of PyTorch that Shoal knows, in "+t.inPasses()+": "+s.Source.String(),
		fmt.Sprintf("%.0f bits of evidence; %d of %d ranks read here", s.Bits, s.Last-s.First+1, s.World), "")
	command, remedy := hint, "pass this order to the mount, or let it infer the order (--order auto): "
	if s.Spec() != "auto" {
		command = "shoal mount " + t.source() + " MOUNTPOINT --order " + s.Spec()
	}
	if t.ordered() {
		f.Cause += "; the mount follows it already"
		return f
	}
	if t.trace.Order == "auto" {
		remedy = "the mount infers it; if it is passed, prefetching starts with the first sample: "
	}
	return f.gain(t, t.estimate.Cold, remedy+command)
}

const hint = `in Python shoal.hint(sampler, mountpoint="MOUNTPOINT"), or write the paths to MOUNTPOINT/.shoal/plan`

// source is the mount's, for a shell.
func (t *trainer) source() string { return human.Shell(t.trace.Source) }

func percent(n, of int) string { return human.Percent(share(n, of)) }

func (t *trainer) inPasses() string { return human.Count(len(t.passes), "pass") }

// gain adds a remedy, and how many times as many files a second it would bring.
func (f Finding) gain(t *trainer, rate float64, remedy string) Finding {
	if times := share(rate, t.estimate.Now); times > 0 {
		f.Values = map[string]float64{"gain": max(times, f.Values["gain"])}
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
	return f.gain(t, t.estimate.Warm, "fill the cache, which may hold "+human.Percent(t.estimate.CacheShare)+
		" of the dataset, before the first epoch: shoal warm "+t.source()+" --cache-dir DIR")
}

const large = 8 << 20 // bytes, from which a file is a container of samples

// containers are large files and tar files that were read.
type containers struct {
	reads, jumps int    // jumps do not go on where the read before ended
	ext          string // extension of one of them
}

// classify finds out how files are read. In containers the order of files means little.
func (t *trainer) classify() {
	c := &t.inside
	visits, read := 0, 0
	for _, v := range t.visits {
		file := t.file(v)
		switch {
		case v.reads > 0:
			read++
		case file.Size > 0:
			t.unread++
		}
		if v.reads > 0 && (file.Size >= large || path.Ext(file.Path) == ".tar") {
			visits++
			c.reads, c.jumps, c.ext = c.reads+v.reads, c.jumps+v.jumps, path.Ext(file.Path)
		}
	}
	switch {
	case visits > 0 && 2*visits >= read && t.Opens >= 2 && 5*c.jumps <= c.reads:
		t.kind = "shards"
	case c.reads >= fewest && 2*c.reads >= t.Reads && 2*c.jumps >= c.reads:
		t.kind = "random-inside-files"
	case !t.trains():
	case t.steps >= fewest/2 && t.forward >= 0.85:
		t.kind = "sequential"
	default:
		t.kind = "shuffle"
		t.compare()
		t.recognise()
	}
}

// same is the least share of pairs in the same order from which two shuffles are one. Workers that overtake each other
// change the order by little.
const same = 0.9

func (t *trainer) compare() {
	if len(t.passes) < 2 || len(t.passes[1]) < fewest {
		return
	}
	place, again, n := map[int]int{}, t.passes[1], 0
	for i, number := range t.passes[0] {
		place[number] = i
	}
	apart := len(again) / 4
	for i := range again[apart:] {
		if place[again[i]] < place[again[i+apart]] {
			n++
		}
	}
	t.alike = share(n, len(again)-apart)
}

// recognise looks for a shuffle of PyTorch behind the opens, like a mount, but only among common seeds, which takes a
// fraction of a second.
func (t *trainer) recognise() {
	subsets := []infer.Subset{{Len: t.trace.Samples}}
	for _, tree := range t.trace.Trees {
		if tree.First >= 0 && tree.Len > 0 && tree.First+tree.Len <= t.trace.Samples {
			subsets = append(subsets, infer.Subset{Folder: tree.Folder, First: tree.First, Len: tree.Len})
		}
	}
	longer := func(d infer.Depth) bool { return d > infer.Usual } // as if it were in progress already
	d := infer.NewDetector(subsets)
	for _, v := range t.visits {
		sample := t.file(v).Sample
		if sample < 0 || sample >= t.trace.Samples {
			continue
		}
		d.Open(infer.Open{Process: v.process, Sample: uint32(sample)})
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
}

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
