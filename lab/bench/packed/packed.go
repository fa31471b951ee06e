// Package packed is the benchmark of that name.
package packed

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

type bench struct {
	*kit.Kit
	reps   int
	memory string
	shard  string
	window string
	client *minio.Client
	far    func() float64 // CPU seconds of the S3 server and the proxy so far
}

const bucket = "shards"

// Bench measures what packing costs and brings: `shoal pack` of photographs from S3 to S3 beside a bare client that sends
// the same GETs, and cold epochs through the mount from small files and from the shards, beside a bare client that reads the
// shards by large ranged GETs. All at 30 ms of latency, in turns.
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	latency := flags.Duration("latency", 30*time.Millisecond, "median latency of the store")
	count := flags.Int("photos", 16384, "photographs")
	reps := flags.Int("reps", 5, "runs of each side")
	memory := flags.String("memory", "512MiB", "--memory of the daemon")
	// 1 GB are 16 of these, so that a window leaves most of them out.
	shard := flags.String("shard-size", "64MiB", "--shard-size of pack")
	window := flags.Int("window", 4, "shards open in the windowed order")
	return func(k *kit.Kit) error {
		b := &bench{Kit: k, reps: *reps, memory: *memory, shard: *shard, window: fmt.Sprintf("windowed:seed=1,window=%d", *window)}
		return b.run(*count, *latency)
	}
}

func (b *bench) run(count int, latency time.Duration) (err error) {
	if err := b.Stored(count, latency); err != nil {
		return err
	}
	if b.client, err = s3server.Client(b.Server.URL, 8); err != nil {
		return err
	}
	if err := b.emptyBucket(); err != nil {
		return err
	}
	b.Header("Packed shards")
	b.Say("%d photographs, %.1f KB each on average; shards of %s; the store at %s. Readers, daemon, proxy and S3 server share the cores.\n",
		b.Up.Files, b.KB(), b.shard, latency)
	b.far = func() float64 { return kit.CPU(b.Server.Pid()) + kit.CPU(b.Far.Pid()) }
	set, err := b.pack()
	if err != nil {
		return err
	}
	return b.epochs(set)
}

// emptyBucket makes the bucket for the shards, and removes what an earlier run left there.
func (b *bench) emptyBucket() error {
	if err := s3server.MakeBucket(b.Ctx, b.client, bucket); err != nil {
		return err
	}
	for o := range b.client.ListObjects(b.Ctx, bucket, minio.ListObjectsOptions{Recursive: true}) {
		if o.Err != nil {
			return o.Err
		}
		if err := b.client.RemoveObject(b.Ctx, bucket, o.Key, minio.RemoveObjectOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// bare returns the MB/s of a bare client.
func (b *bench) bare(connections int, args ...string) (float64, error) {
	r, err := b.Bare(connections, args...)
	return r.BytesPerS / 1e6, err
}

// pack packs several times and returns the source of the last set.
func (b *bench) pack() (set string, err error) {
	b.Say("## pack\n")
	best, curve, err := b.Best([]int{32, 64, 128, 256, 512}, func(c int) (float64, error) { return b.bare(c, "-prefix", "train/") })
	if err != nil {
		return "", err
	}
	b.Say("Bare client, the photographs, MB/s by requests in flight: %s.\n", curve)
	// Each side's seconds, and the CPU seconds of itself and of the S3 server with its proxy.
	type side struct{ rate, seconds, own, far, rss []float64 }
	pack := func(to *side, dest string) error {
		before := b.far()
		c := b.Command(b.Shoal, "pack", kit.Source, dest, "--shard-size", b.shard, "--seed", "1")
		var stderr bytes.Buffer
		c.Stderr = &stderr
		begin := time.Now()
		if err := c.Run(); err != nil {
			return fmt.Errorf("shoal pack: %w\n%s", err, stderr.String())
		}
		took := time.Since(begin).Seconds()
		to.seconds = append(to.seconds, took)
		to.rate = append(to.rate, float64(b.Up.Bytes)/took/1e6)
		to.own = append(to.own, (c.ProcessState.UserTime() + c.ProcessState.SystemTime()).Seconds())
		to.far = append(to.far, b.far()-before)
		to.rss = append(to.rss, float64(c.ProcessState.SysUsage().(*syscall.Rusage).Maxrss)/1024)
		return nil
	}
	var ours, folder, theirs side
	for rep := range b.reps {
		set = fmt.Sprintf("s3://%s/set%d", bucket, rep)
		if err := pack(&ours, set); err != nil {
			return "", err
		}
		local := filepath.Join(b.Dir, "set")
		if err := os.RemoveAll(local); err != nil {
			return "", err
		}
		if err := pack(&folder, local); err != nil {
			return "", err
		}
		before := b.far()
		rate, err := b.bare(best, "-prefix", "train/")
		if err != nil {
			return "", err
		}
		theirs.far = append(theirs.far, b.far()-before)
		theirs.rate = append(theirs.rate, rate)
	}
	shards := 0
	for o := range b.client.ListObjects(b.Ctx, bucket, minio.ListObjectsOptions{Prefix: path.Base(set) + "/", Recursive: true}) {
		if o.Err != nil {
			return "", o.Err
		}
		if strings.HasSuffix(o.Key, ".tar") {
			shards++
		}
	}
	top := slices.Max(ours.rss)
	b.Say("| | MB/s of samples, median | runs | CPU s: packer | S3 server and proxy | of the bare client (target 60%%) |")
	b.Say("| --- | ---: | --- | ---: | ---: | --- |")
	row := func(name string, s *side) {
		ratio := kit.Median(s.rate) / kit.Median(theirs.rate)
		b.Say("| shoal pack to %s | %.0f | %s | %.2f | %.2f | **%.0f%%** %s |", name, kit.Median(s.rate), kit.Numbers(s.rate, 0),
			kit.Median(s.own), kit.Median(s.far), 100*ratio, kit.Verdict(ratio >= 0.6))
	}
	row(fmt.Sprintf("S3, %d shards, read back and verified", shards), &ours)
	row("a local folder, the same", &folder)
	b.Say("| bare client, the same GETs, %d in flight | %.0f | %s | — | %.2f | |", best, kit.Median(theirs.rate), kit.Numbers(theirs.rate, 0), kit.Median(theirs.far))
	b.Say("\nA pack takes %.1f s to S3 and %.1f s to a folder (medians, start, listing and all); highest RSS **%.0f MiB** (target < 500: %s). "+
		"The cores bound it: to S3 the server also takes the bytes, hashes them with MD5, puts the parts together, and sends them back.\n",
		kit.Median(ours.seconds), kit.Median(folder.seconds), top, kit.Verdict(top < 500))
	return set, nil
}

type side struct {
	name, source, order    string
	list                   string // of the files, in the order
	rates, megabytes, gets []float64
}

func (b *bench) epochs(set string) error {
	b.Say("## Cold epoch through the mount, 8 reader threads\n")
	const piece = 8 << 20
	bareArgs := []string{"-bucket", bucket, "-prefix", path.Base(set) + "/", "-suffix", ".tar", "-range", strconv.Itoa(piece)}
	best, curve, err := b.Best([]int{2, 4, 8, 16, 32}, func(c int) (float64, error) { return b.bare(c, bareArgs...) })
	if err != nil {
		return err
	}
	b.Say("Bare client, the shards by ranged GETs of %d MiB, MB/s by requests in flight: %s.\n", piece>>20, curve)
	sides := []*side{
		{name: "small files, order known", source: kit.Source, order: kit.Cold},
		{name: "shards, the same order", source: set, order: kit.Cold},
		{name: "shards, " + b.window, source: set, order: b.window},
	}
	var bares []float64
	for rep := range b.reps + 1 {
		for _, s := range sides {
			if err := b.epoch(s, rep == 0); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
		}
		rate, err := b.bare(best, bareArgs...)
		if err != nil {
			return err
		}
		if rep > 0 { // the first round is verified, and its rates do not count
			bares = append(bares, rate)
		}
	}
	b.Say("Every side was verified byte for byte in a round of its own.\n")
	b.Say("| | files/s, median | runs | MB/s | GETs a sample |")
	b.Say("| --- | ---: | --- | ---: | ---: |")
	for _, s := range sides {
		b.Say("| %s | %.0f | %s | %.0f | %.3f |", s.name, kit.Median(s.rates), kit.Numbers(s.rates, 0), kit.Median(s.megabytes), kit.Median(s.gets))
	}
	b.Say("| bare client, %d in flight | | %s | %.0f | |", best, kit.Numbers(bares, 0), kit.Median(bares))
	b.Say("\n| | times small files (target 2) | | of the bare client (target 60%%) | | GETs a sample |")
	b.Say("| --- | ---: | --- | ---: | --- | --- |")
	for i, s := range sides[1:] {
		times, part, gets := kit.Median(s.rates)/kit.Median(sides[0].rates), kit.Median(s.megabytes)/kit.Median(bares), kit.Median(s.gets)
		windowed := "no target"
		if i == 1 {
			windowed = "target < 0.05: " + kit.Verdict(gets < 0.05)
		}
		b.Say("| %s | %.2f | %s | %.0f%% | %s | %.3f (%s) |", s.name, times, kit.Verdict(times >= 2), 100*part, kit.Verdict(part >= 0.6), gets, windowed)
	}
	return nil
}

// epoch mounts with an empty cache and reads once in the order.
func (b *bench) epoch(s *side, verify bool) error {
	cache := filepath.Join(b.Dir, "cache-packed")
	if err := os.RemoveAll(cache); err != nil {
		return err
	}
	m, err := b.Mount(s.source, "mnt-packed", "--cache-dir", cache, "--memory", b.memory, "--kernel-cache", "off", "--order", s.order)
	if err != nil {
		return err
	}
	var flags []string
	if verify {
		flags = []string{"-verify", b.Photos}
	}
	if s.list == "" { // in the first round only: the mount is fetching ahead meanwhile
		s.list, err = b.Order(m, s.order, s.name+".txt")
	}
	var r kit.Read
	if err == nil {
		r, err = b.Read(m.Dir, s.list, flags...)
	}
	stats, e := m.Stats()
	if err := errors.Join(err, e, m.Close()); err != nil {
		return err
	}
	if r.Files != len(b.Paths) {
		return fmt.Errorf("the order names %d files of %d", r.Files, len(b.Paths))
	}
	if !verify {
		s.rates = append(s.rates, r.Rate)
		s.megabytes = append(s.megabytes, r.MB)
		s.gets = append(s.gets, float64(stats.GetRequests)/float64(r.Files))
	}
	return nil
}
