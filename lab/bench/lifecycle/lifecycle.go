// Package lifecycle is the benchmark of that name.
package lifecycle

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

type bench struct {
	*kit.Kit
	cache, mnt, feed string
}

// Bench measures how a daemon begins and ends:
//
//	from the start of the process to the first byte of a file, the cache being warm, by mount and by feed
//	from SIGTERM to its exit, in good order, under trainers of several kinds
//	the container image's size
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	count := flags.Int("photos", 4096, "photographs")
	reps := flags.Int("reps", 7, "runs of each")
	image := flags.Bool("image", true, "build the image for its size")
	return func(k *kit.Kit) error { return (&bench{Kit: k}).run(*count, *reps, *image) }
}

func (b *bench) run(count, reps int, image bool) error {
	if err := b.Stored(count, 30*time.Millisecond); err != nil {
		return err
	}
	b.cache, b.mnt, b.feed = filepath.Join(b.Dir, "lifecycle-cache"), filepath.Join(b.Dir, "lifecycle-mnt"), "unix://"+filepath.Join(b.Dir, "lifecycle.sock")
	if err := errors.Join(os.RemoveAll(b.cache), os.MkdirAll(b.mnt, 0o755)); err != nil {
		return err
	}
	if err := b.Run(nil, b.Shoal, "warm", kit.Source, "--cache-dir", b.cache); err != nil {
		return err
	}
	b.Header("How a daemon begins and ends")
	b.Say("%d photographs, all in the cache; the store is 30 ms away. `shoal serve --mount`, so each daemon serves mount and feed. Medians of %d runs, all in turns.\n", len(b.Paths), reps)

	begins := []*arm{
		{name: "first byte of a file of the mount, its folder dropped from the kernel's caches", run: b.firstByte},
		{name: "first batch of the feed (64 raw samples), with the start of the client `shoal feed`", run: b.firstBatch},
	}
	ends := []*arm{
		{name: "nobody there", run: b.end(nil)},
		{name: "8 threads read files, one after the other", run: b.end(func() *exec.Cmd {
			return b.Command(b.Self, "readers", "-threads", "8", "-passes", "100000", b.mnt)
		})},
		{name: "a process keeps a file open and reads no more", run: b.end(func() *exec.Cmd {
			return b.Command("sh", "-c", `exec 3<"$1" && sleep 600`, "sh", filepath.Join(b.mnt, b.Paths[0]))
		})},
		{name: "a feed session, batches of 64", run: b.end(func() *exec.Cmd {
			return b.Command(b.Shoal, "feed", b.feed, "--batch", "64", "--epochs", "0")
		})},
	}
	for rep := range reps {
		fmt.Fprintf(os.Stderr, "round %d of %d\n", rep+1, reps)
		for _, a := range append(slices.Clone(begins), ends...) {
			took, err := a.run()
			if err != nil {
				return fmt.Errorf("%s: %w", a.name, err)
			}
			a.seconds = append(a.seconds, took.Seconds())
		}
	}
	b.table("From the start of the process to …", "aim: under 1 s", begins)
	b.table("From SIGTERM to exit 0, with the default --drain-timeout of 3s, while …", "aim: under 5 s", ends)
	if !image {
		return nil
	}
	out, err := b.Command("make", "--no-print-directory", "image").CombinedOutput()
	if err != nil {
		return fmt.Errorf("make image: %w\n%s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	b.Say("Image (aim: under 60 MB): %s", lines[len(lines)-1])
	return nil
}

// arm is one thing that is measured.
type arm struct {
	name    string
	run     func() (time.Duration, error)
	seconds []float64
}

func (b *bench) table(title, aim string, arms []*arm) {
	b.Say("| %s (%s) | median s | all |\n| --- | ---: | --- |", title, aim)
	for _, a := range arms {
		b.Say("| %s | %.2f | %s |", a.name, kit.Median(a.seconds), kit.Numbers(a.seconds, 2))
	}
	b.Say("")
}

// daemon is a `shoal serve` that the bench may signal.
type daemon struct {
	cmd  *exec.Cmd
	logs bytes.Buffer
}

func (b *bench) start() (*daemon, error) {
	d := &daemon{cmd: b.Command(b.Shoal, "serve", kit.Source, "--listen", b.feed, "--mount", b.mnt, "--cache-dir", b.cache)}
	d.cmd.Stderr = &d.logs
	return d, d.cmd.Start()
}

func (d *daemon) end() (time.Duration, error) {
	begin := time.Now()
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return 0, err
	}
	if err := d.cmd.Wait(); err != nil {
		return 0, fmt.Errorf("the daemon: %w\n%s", err, d.logs.String())
	}
	return time.Since(begin), nil
}

// patience is how long anything here may take.
const patience = time.Minute

// firstByte starts a daemon and reads a byte as soon as there is one.
func (b *bench) firstByte() (time.Duration, error) {
	begin := time.Now()
	d, err := b.start()
	if err != nil {
		return 0, err
	}
	path := filepath.Join(b.mnt, b.Paths[len(b.Paths)/2])
	for {
		f, err := os.Open(path)
		if err == nil {
			_, err = io.ReadFull(f, make([]byte, 1))
			f.Close()
		}
		if err == nil {
			break
		}
		if time.Since(begin) > patience {
			_, _ = d.end()
			return 0, err
		}
		time.Sleep(time.Millisecond)
	}
	took := time.Since(begin)
	_, err = d.end()
	return took, err
}

// firstBatch starts a daemon and takes a batch from it as soon as it answers.
func (b *bench) firstBatch() (time.Duration, error) {
	begin := time.Now()
	d, err := b.start()
	if err != nil {
		return 0, err
	}
	err = b.Run(nil, b.Shoal, "health", b.feed, "--wait", patience.String())
	if err == nil {
		err = b.Run(nil, b.Shoal, "feed", b.feed, "--batch", "64", "--batches", "1")
	}
	took := time.Since(begin)
	_, e := d.end()
	return took, errors.Join(err, e)
}

// end returns a run that ends a daemon under the trainer that busy starts.
func (b *bench) end(busy func() *exec.Cmd) func() (time.Duration, error) {
	return func() (time.Duration, error) {
		d, err := b.start()
		if err != nil {
			return 0, err
		}
		if err := b.Run(nil, b.Shoal, "health", b.mnt, b.feed, "--wait", patience.String()); err != nil {
			_, _ = d.end()
			return 0, err
		}
		if busy != nil {
			c := busy()
			if err := c.Start(); err != nil {
				_, _ = d.end()
				return 0, err
			}
			defer func() { _ = c.Process.Kill(); _ = c.Wait() }()
			time.Sleep(2 * time.Second) // it is in the middle of its work
		}
		return d.end()
	}
}
