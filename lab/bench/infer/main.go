// Command infer measures a mount without --order, with real torch processes, and writes
// lab/bench/results/infer.md: the cold epoch of an unmodified ImageFolder training beside the same without an
// order and with the order told; how many reads and seconds each kind of training takes to be recognised;
// and how often a trace that is no torch shuffle is. Run it from the repository's root as root, with
// torch and torchvision for /usr/bin/python3: go run ./lab/bench/infer
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

type bench struct {
	*kit.Kit
	memory string
	python string
	part   map[string]bool
	only   string

	reps, lockReps, traces, wholeTraces int
	settle                              time.Duration
	photos, tiny                        int
}

const (
	photosSource = "s3://photos/train"
	tinySource   = "s3://photos/tiny"
	trainer      = "lab/bench/infer/train.py"
	tracer       = "lab/bench/infer/traces.py"
)

func main() {
	log.SetFlags(0)
	b := &bench{part: map[string]bool{}}
	dir := flag.String("dir", ".bench", "work folder; photographs and objects are kept there")
	out := flag.String("out", "lab/bench/results/infer.md", "report")
	shoal := flag.String("shoal", "", "binary to measure (default: built from this tree)")
	parts := flag.String("parts", "epochs,locks,traces", "what to measure")
	flag.StringVar(&b.only, "only", "", "only the trainings whose name contains this")
	latency := flag.Duration("latency", 30*time.Millisecond, "median latency of the store")
	flag.IntVar(&b.photos, "photos", 8192, "photographs")
	flag.IntVar(&b.tiny, "tiny", 16384, "small files, for what needs no photographs")
	flag.IntVar(&b.reps, "reps", 3, "runs of each side of the cold epoch")
	flag.IntVar(&b.lockReps, "lock-reps", 3, "runs of each kind of training")
	flag.IntVar(&b.traces, "traces", 210, "traces that are no torch shuffle")
	flag.IntVar(&b.wholeTraces, "whole-traces", 4, "of these, how many are watched until the search of all seeds must be through")
	flag.DurationVar(&b.settle, "settle", 3*time.Second, "how long a trace is watched after its last read")
	flag.StringVar(&b.memory, "memory", "512MiB", "--memory of the daemon")
	flag.StringVar(&b.python, "python", "/usr/bin/python3", "interpreter with torch and torchvision")
	flag.Parse()
	for p := range strings.SplitSeq(*parts, ",") {
		b.part[p] = true
	}
	var err error
	if b.Kit, err = kit.New(*dir, *shoal); err != nil {
		log.Fatal(err)
	}
	if err := b.run(*latency); err != nil {
		log.Fatal("infer: ", err)
	}
	if err := b.Save(*out); err != nil {
		log.Fatal(err)
	}
}

func (b *bench) run(latency time.Duration) error {
	version, err := b.Command(b.python, "-c", "import torch, torchvision; print('torch', torch.__version__, 'torchvision', torchvision.__version__)").Output()
	if err != nil {
		return fmt.Errorf("%s has no torch and torchvision: give -python another: %w", b.python, err)
	}
	photos, _, err := b.Photos(b.photos)
	if err != nil {
		return err
	}
	tiny, err := b.makeTiny()
	if err != nil {
		return err
	}
	server, far, err := b.Store(latency)
	if err != nil {
		return err
	}
	defer server.Stop()
	defer far.Stop()
	up, err := server.Upload(b.Ctx, photos, "photos", "train", nil)
	if err != nil {
		return err
	}
	if _, err := server.Upload(b.Ctx, tiny, "photos", "tiny", nil); err != nil {
		return err
	}
	b.Header("A mount without --order")
	b.Say("%d photographs, %.1f KB each on average, and %d small files; the store at %s. %s. Trainers, daemon, proxy and S3 server share the cores.\n",
		up.Files, float64(up.Bytes)/float64(up.Files)/1e3, b.tiny, latency, strings.TrimSpace(string(version)))
	for _, p := range []struct {
		name string
		run  func() error
	}{{"epochs", b.epochs}, {"locks", b.locks}, {"traces", func() error { return b.falseLocks(tiny) }}} {
		if b.part[p.name] {
			if err := p.run(); err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
		}
	}
	return nil
}

// makeTiny makes small files in 16 classes, which only a dataset's own loader takes for images.
func (b *bench) makeTiny() (dir string, err error) {
	dir = filepath.Join(b.Dir, fmt.Sprintf("tiny-%d", b.tiny))
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	part := dir + ".part"
	if err := os.RemoveAll(part); err != nil {
		return "", err
	}
	data := make([]byte, 2048)
	for i := range b.tiny {
		folder := filepath.Join(part, fmt.Sprintf("class%02d", i%16))
		if i < 16 {
			if err := os.MkdirAll(folder, 0o755); err != nil {
				return "", err
			}
		}
		copy(data, strconv.Itoa(i))
		if err := os.WriteFile(filepath.Join(folder, fmt.Sprintf("%06d.jpg", i)), data, 0o644); err != nil {
			return "", err
		}
	}
	return dir, os.Rename(part, dir)
}

// mount mounts with an empty cache, or one that other mounts have filled.
func (b *bench) mount(source, cache, order string, cold bool) (*kit.Mount, error) {
	cache = filepath.Join(b.Dir, cache)
	if cold {
		if err := os.RemoveAll(cache); err != nil {
			return nil, err
		}
	}
	return b.Mount(source, "mnt", "--cache-dir", cache, "--memory", b.memory, "--kernel-cache", "off", "--order", order)
}

// sayAll ends a part of the report.
func (b *bench) sayAll(verdicts []string) {
	b.Say("")
	for _, v := range verdicts {
		b.Say("- %s", v)
	}
	b.Say("")
}
