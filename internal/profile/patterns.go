package profile

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// pattern recognises one way of reading.
type pattern func(a *analysis) (Finding, bool)

// patterns are tried in this order, which is that of the report.
var patterns = []pattern{
	tooLittle, metadataScan, startupScan,
	shards, insideFiles, sequential, torchShuffle, repeatedShuffle, withReplacement, shuffle,
	severalJobs, severalRanks, passesSeen,
	headers, headerThenBody, tinyReads, oneReader, pageCache, behind, notTheStorage,
}

func finding(name, title string, evidence ...string) Finding {
	return Finding{Pattern: name, Title: title, Evidence: evidence, Helps: []Help{}}
}

func percent(v float64) string { return fmt.Sprintf("%.0f%%", 100*v) }

func tooLittle(a *analysis) (Finding, bool) {
	if len(a.visits) >= fewest || a.names() >= manyLookups || a.readsInside() {
		return Finding{}, false
	}
	f := finding("idle", "Too few reads for an analysis", fmt.Sprintf("%d files opened, %d reads, %d names looked up", len(a.visits), a.reads, a.lookups))
	f.Helps = append(f.Helps, Help{What: "record while the trainer is in the middle of an epoch, and for longer", Command: "shoal profile MOUNTPOINT --duration 5m"})
	return f, true
}

// manyLookups is the least number of lookups of a walk over the tree.
const manyLookups = 200

// metadataScan: os.walk, find, a stat of each file, and almost no reads.
func metadataScan(a *analysis) (Finding, bool) {
	if a.names() < manyLookups || 10*len(a.visits) > a.names() {
		return Finding{}, false
	}
	f := finding("metadata-scan", "A walk over the tree that reads nothing (os.walk, find, a stat of each file)",
		fmt.Sprintf("%d lookups of names or attributes, %d pieces of listings of about %d names each, and %d files opened", a.lookups-a.lists, a.lists, namesAList, len(a.visits)),
		"the daemon serves these from memory: no request goes to the store")
	f.Helps = append(f.Helps,
		Help{What: "walk once and keep the list: a file of paths, or the trainer's own index, instead of a walk at each start"},
		Help{What: "keep the mount between runs: the kernel remembers names and sizes for hours", Command: "shoal mount ... --daemon"})
	return f, true
}

// namesAList is the approximate number of names in a piece of a listing.
const namesAList = 20

// names returns the approximate number of files looked up without being opened.
func (a *analysis) names() int { return a.lookups - a.lists + namesAList*a.lists }

// startupScan: a metadataScan at the beginning, followed by a trainer.
func startupScan(a *analysis) (Finding, bool) {
	if a.names() < manyLookups || 10*len(a.visits) <= a.names() || !a.trains() {
		return Finding{}, false
	}
	// Most of the lookups before most of the opens; lookups of the opens themselves are spread like these.
	middle := a.visits[len(a.visits)/2].start
	if a.lookedTo >= middle || a.perLookup*4 < a.lookups && a.lists*20 < a.lookups {
		return Finding{}, false
	}
	f := finding("startup-scan", "A walk over the tree before the first epoch",
		fmt.Sprintf("%d lookups of names, attributes or pieces of listings, nine tenths of them within %.1f s, before most of the files were opened", a.lookups, (a.lookedTo-a.lookedAt).Seconds()))
	f.Helps = append(f.Helps, Help{What: "keep the list of files between runs, or keep the mount: the kernel remembers names for hours"})
	return f, true
}

// large is the size from which a file is a container of samples.
const large = 8 << 20

// shards: large files, each read from beginning to end, like WebDataset.
func shards(a *analysis) (Finding, bool) {
	n, tars, whole, jumps, reads := 0, 0, 0, 0, 0
	for i := range a.visits {
		v := &a.visits[i]
		size, name := a.size(v.file), a.trace.Files[int(v.file)].Path
		tar := strings.HasSuffix(name, ".tar")
		if v.reads == 0 || size < large && !tar {
			continue
		}
		n++
		if tar {
			tars++
		}
		if 2*v.bytes >= size {
			whole++
		}
		jumps += v.jumps
		reads += v.reads
	}
	read := a.visitsRead()
	if n < 2 || 2*n < read || float64(jumps) > 0.2*float64(reads) {
		return Finding{}, false
	}
	f := finding("shards", "Large files from beginning to end (shards, as WebDataset reads them)",
		fmt.Sprintf("%d of %d files that were read are larger than 8 MiB or end in .tar (%d), %s of the reads go on where the one before ended", n, read, tars, percent(1-share(float64(jumps), float64(reads)))),
		fmt.Sprintf("%d of them were read by half or more", whole))
	if tars > 0 {
		dir := path.Dir(a.trace.Files[int(a.visits[0].file)].Path)
		f.Helps = append(f.Helps, Help{
			What:    "give Shoal the shards as a source: their members appear as files, orders are known, and each member is one ranged GET",
			Command: fmt.Sprintf("shoal mount '%s/shard-{000000..000127}.tar' MOUNTPOINT", strings.TrimSuffix(a.trace.Source+strings.TrimPrefix(dir, "."), "/")),
		})
	}
	f.Helps = append(f.Helps, a.known("pass the order of the shards: write their paths, in the trainer's order, to the plan", "cp shards-of-this-epoch.txt MOUNTPOINT/.shoal/plan"))
	return f, true
}

func (a *analysis) visitsRead() (n int) {
	for i := range a.visits {
		if a.visits[i].reads > 0 {
			n++
		}
	}
	return n
}

// insideFiles: random reads in large files, like those of memory maps, HDF5 or Parquet.
func insideFiles(a *analysis) (Finding, bool) {
	n, jumps, reads := 0, 0, 0
	kinds := map[string]int{}
	for i := range a.visits {
		v := &a.visits[i]
		if a.size(v.file) < large || v.reads < 4 {
			continue
		}
		n++
		jumps += v.jumps
		reads += v.reads
		kinds[path.Ext(a.trace.Files[int(v.file)].Path)]++
	}
	if n == 0 || reads < fewest || 2*reads < a.reads || 2*jumps < reads {
		return Finding{}, false
	}
	kind := ""
	for k, c := range kinds {
		if c > kinds[kind] || c == kinds[kind] && k < kind {
			kind = k
		}
	}
	length := quantile(a.lens, 0.5)
	f := finding("random-inside-files", "Random reads inside large files (a memory map, HDF5, Parquet)",
		fmt.Sprintf("%s of %d reads do not go on where the one before ended, in %d opened files of 8 MiB or more (mostly %q)", percent(share(float64(jumps), float64(reads))), reads, n, kind),
		fmt.Sprintf("the median read is %d KiB, and up to 4 MiB are fetched for one", length>>10))
	a.fill(&f, "keep the files whole: ")
	f.Helps = append(f.Helps,
		Help{What: "store samples as single files or in tar shards: then Shoal can prefetch in the order of the samples", Command: "shoal pack SOURCE DEST"},
		Help{What: "tables: serve rows as samples", Command: "shoal serve " + a.trace.Source + " --records csv"})
	return f, true
}

// inFiles reports whether the files are containers, so that orders of files mean little.
func (a *analysis) inFiles() bool {
	_, s := shards(a)
	_, i := insideFiles(a)
	return s || i
}

// isSequential reports whether processes read in the order of the listing: file after file, or with a stride.
func (a *analysis) isSequential() (step, bool) {
	s := a.steps()
	ok := s.n >= fewest/2 && (s.share >= 0.55 && s.distance >= 1 && s.distance <= 1024 || s.forward >= 0.75)
	return s, ok
}

func sequential(a *analysis) (Finding, bool) {
	s, ok := a.isSequential()
	if !a.trains() || !ok || a.inFiles() {
		return Finding{}, false
	}
	f := finding("sequential", "One file after the other, by name (shuffle=False)",
		fmt.Sprintf("%s of the steps from a process's file to its next are by %d in the listing's order, %s by 1 to 16", percent(s.share), s.distance, percent(s.forward)))
	if len(a.passes) > 1 {
		f.Pattern, f.Title = "sequential-repeated", "One file after the other, by name, again and again"
		f.Evidence = append(f.Evidence, fmt.Sprintf("%d passes over %d files", len(a.passes), len(a.files)))
	}
	if !a.ordered() {
		f.Helps = append(f.Helps, a.known("pass the order: Shoal does not infer this one", "shoal mount "+a.trace.Source+" MOUNTPOINT --order sequential"))
	}
	if len(a.passes) > 1 {
		a.fill(&f, "")
	}
	return f, true
}

// shuffled reports whether files are opened in an order unrelated to the listing.
func (a *analysis) shuffled() bool {
	_, sequential := a.isSequential()
	return a.trains() && !sequential && !a.inFiles()
}

func torchShuffle(a *analysis) (Finding, bool) {
	if !a.shuffled() {
		return Finding{}, false
	}
	t := a.recognise()
	if t == nil {
		return Finding{}, false
	}
	f := finding("torch-shuffle", "A shuffle of PyTorch that Shoal knows: "+t.sampler(),
		fmt.Sprintf("recognised after %d opens: %s; %.0f bits of evidence", t.after, t.finding.Source, t.finding.Bits))
	if t.epochs > 1 {
		f.Evidence = append(f.Evidence, fmt.Sprintf("%d epochs of it were followed", t.epochs))
	}
	spec := t.finding.Spec()
	command := "shoal mount " + a.trace.Source + " MOUNTPOINT --order " + spec
	if spec == "auto" {
		command = "python: import shoal; shoal.hint(sampler, mount=\"MOUNTPOINT\")"
	}
	switch {
	case a.ordered():
		f.Evidence = append(f.Evidence, fmt.Sprintf("the mount follows it already (%s)", a.last.Order.State))
	case a.trace.Order == "auto":
		f.Helps = append(f.Helps, a.known("the mount infers it (--order auto); if it is passed, prefetching starts with the first sample", command))
	default:
		f.Helps = append(f.Helps, a.known("pass this order to the mount, or let it infer the order (--order auto)", command))
	}
	return f, true
}

// alike is the rank correlation from which two passes have the same order: workers that overtake each other lower it, and
// unrelated orders of 24 files reach it with odds of 1 in 10,000.
const alike = 0.8

// repeatedShuffle: a sampler without calls of set_epoch.
func repeatedShuffle(a *analysis) (Finding, bool) {
	if !a.shuffled() || len(a.passes) < 2 {
		return Finding{}, false
	}
	like := 0.0
	for i := 1; i < len(a.passes); i++ {
		like = max(like, a.sameOrder(a.passes[i-1], a.passes[i]))
	}
	if like < alike {
		return Finding{}, false
	}
	f := finding("repeated-shuffle", "The same shuffle in each epoch: the trainer never calls sampler.set_epoch",
		fmt.Sprintf("the order of a pass is that of the one before (rank correlation %.2f)", like))
	f.Helps = append(f.Helps, Help{What: "call it: the model now sees the same batches in each epoch, which costs accuracy, not speed", Command: "sampler.set_epoch(epoch)  # before each epoch"})
	return f, true
}

// withReplacement: files repeat long before all others were read once.
func withReplacement(a *analysis) (Finding, bool) {
	r := a.repeatShare()
	if !a.shuffled() || a.jobs > 1 || r < 0.05 {
		return Finding{}, false
	}
	f := finding("with-replacement", "Files come again within an epoch (WeightedRandomSampler, oversampling, replacement=True)",
		fmt.Sprintf("%s of the opens are of files that this pass has opened before", percent(r)))
	f.Helps = append(f.Helps, a.known("pass the order: Shoal cannot infer this one", "python: shoal.hint(sampler, mount=\"MOUNTPOINT\"), or write the paths to MOUNTPOINT/.shoal/plan"))
	a.fill(&f, "files that are drawn most often gain most: ")
	return f, true
}

// shuffle is any other random order.
func shuffle(a *analysis) (Finding, bool) {
	if !a.shuffled() || a.recognise() != nil {
		return Finding{}, false
	}
	if _, ok := repeatedShuffle(a); ok {
		return Finding{}, false
	}
	if _, ok := withReplacement(a); ok {
		return Finding{}, false
	}
	s := a.steps()
	f := finding("shuffle", "A random order", fmt.Sprintf("the most common step in the listing's order is %s of all, and %s of the opens repeat a file within a pass", percent(s.share), percent(a.repeatShare())))
	if a.ordered() {
		f.Evidence = append(f.Evidence, fmt.Sprintf("the mount follows it: %s (%s)", a.last.Order.Spec, a.last.Order.State))
		return f, true
	}
	f.Evidence = append(f.Evidence, "it is not a shuffle of PyTorch with a common seed; a mount with --order auto also tries all other seeds")
	f.Helps = append(f.Helps, a.known("pass the order", "python: import shoal; shoal.hint(sampler, mount=\"MOUNTPOINT\"), or write the paths to MOUNTPOINT/.shoal/plan"),
		Help{What: "seed the loader, so that the mount finds its order within a dozen opens", Command: "torch.manual_seed(7)  # or DataLoader(..., generator=torch.Generator().manual_seed(7))"})
	a.fill(&f, "")
	return f, true
}

func severalJobs(a *analysis) (Finding, bool) {
	if a.jobs < 2 {
		return Finding{}, false
	}
	f := finding("several-jobs", fmt.Sprintf("%d jobs read the same files at the same time", a.jobs),
		fmt.Sprintf("%s of the opens are of a file that another job opened shortly before", percent(a.shared)))
	f.Helps = append(f.Helps, Help{What: "one mount for all of them, as here, fetches each file once while they stay close; give each its own plan", Command: "MOUNTPOINT/.shoal/plans/NAME, one a job"})
	return f, true
}

func severalRanks(a *analysis) (Finding, bool) {
	if !a.shuffled() {
		return Finding{}, false
	}
	t := a.recognise()
	if t == nil || t.finding.World < 2 {
		return Finding{}, false
	}
	n := t.finding.Last - t.finding.First + 1
	f := finding("ranks", fmt.Sprintf("%d of %d ranks read through this mount", n, t.finding.World), "according to the recognised sampler")
	if n < t.finding.World {
		f.Helps = append(f.Helps, Help{What: "the other ranks' samples are not read here: a cache for this node needs to hold only what its ranks will read, which changes with each epoch"})
	}
	return f, true
}

// passesSeen reports several epochs.
func passesSeen(a *analysis) (Finding, bool) {
	if !a.trains() || len(a.passes) < 2 || a.inFiles() {
		return Finding{}, false
	}
	if _, ok := withReplacement(a); ok {
		return Finding{}, false
	}
	var lengths []int
	for _, p := range a.passes {
		lengths = append(lengths, len(p.visits))
	}
	f := finding("epochs", fmt.Sprintf("%d passes over the files", len(a.passes)),
		fmt.Sprintf("of up to %d opens each, over %d different files of the dataset's %d", slices.Max(lengths), len(a.files), a.trace.Header.Files))
	if e := a.estimate; e != nil && e.CacheShare < 0.9 {
		f.Helps = append(f.Helps, Help{What: fmt.Sprintf("each pass reads everything, and the cache may hold %s of it: use a larger one", percent(e.CacheShare)), Command: fmt.Sprintf("--cache-size %dMiB", a.trace.Bytes*21/20>>20+64)})
	}
	return f, true
}
