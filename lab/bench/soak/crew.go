package soak

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

//go:embed trainer.py
var trainer string

const (
	seeds     = 4 // that trainers choose among
	transform = "RandomResizedCrop(64)|RandomHorizontalFlip()|uint8|nchw"
)

// crew are the daemon's users: all are processes of their own.
type crew struct {
	*soak
	cache  string
	second string               // where the second dataset is mounted
	known  map[string]string    // what a kind of trainer with a seed has to see
	names  atomic.Int64         // of sessions
	counts map[string]*[2]int64 // by kind: whole passes, and those that were killed
	mu     sync.Mutex           // of counts
	kinds  map[string]func(ctx context.Context, chance *rand.Rand) error
	// digests are what trainers with a seed see of an epoch, by kind.
	digests map[string]func(ctx context.Context, seed int) (string, error)
}

// errKilled is how a trainer ends that was not to come to its end.
var errKilled = errors.New("killed")

func newCrew(s *soak, cache string) *crew {
	c := &crew{soak: s, cache: cache, second: filepath.Join(s.Dir, "second"), known: map[string]string{}, counts: map[string]*[2]int64{}}
	c.digests = map[string]func(context.Context, int) (string, error){
		"raw feed": func(ctx context.Context, seed int) (string, error) { return c.feedDigest(ctx, seed) },
		"feed": func(ctx context.Context, seed int) (string, error) {
			return c.feedDigest(ctx, seed, "--transform", transform)
		},
		"python": c.pythonDigest, // takes batches as views of the daemon's slots
	}
	c.kinds = map[string]func(context.Context, *rand.Rand) error{"mount": c.mountTrainer, "second mount": c.visitor}
	for kind, digest := range c.digests {
		c.kinds[kind] = func(ctx context.Context, chance *rand.Rand) error {
			seed := chance.IntN(seeds)
			got, err := digest(ctx, seed)
			if want := c.known[fmt.Sprint(kind, seed)]; err == nil && got != want {
				err = fmt.Errorf("seed %d: digest %s, and it was %s before", seed, got, want)
			}
			return err
		}
	}
	for kind := range c.kinds {
		c.counts[kind] = &[2]int64{}
	}
	return c
}

// tally says what was done until now.
func (c *crew) tally() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var parts []string
	for _, kind := range []string{"mount", "raw feed", "feed", "python", "second mount"} {
		n := c.counts[kind]
		parts = append(parts, fmt.Sprintf("%s %d+%d", kind, n[0], n[1]))
	}
	return "passes whole+killed: " + strings.Join(parts, ", ")
}

// learn finds out what trainers have to see: of raw bytes from the files, of pixels from a pass in fine weather.
func (c *crew) learn() error {
	for seed := range seeds {
		order, err := c.Positions(fmt.Sprintf("uniform:seed=%d", seed))
		if err != nil {
			return err
		}
		sum := sha256.New()
		for _, i := range order {
			data, err := os.ReadFile(filepath.Join(c.Photos, c.Paths[i]))
			if err != nil {
				return err
			}
			sum.Write(binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, uint64(i)), uint64(len(data))))
			sum.Write(data)
		}
		c.known[fmt.Sprint("raw feed", seed)] = hex.EncodeToString(sum.Sum(nil))
		for _, kind := range []string{"feed", "python"} {
			seen, err := c.digests[kind](c.Ctx, seed)
			if err != nil {
				return err
			}
			c.known[fmt.Sprint(kind, seed)] = seen
		}
	}
	return nil
}

// work has trainers of all kinds come and go until a time, and those who are there then come to their end.
func (c *crew) work(chance *rand.Rand, until time.Time) error {
	ctx, cancel := context.WithCancelCause(c.Ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for kind, pass := range c.kinds {
		own := rand.New(rand.NewPCG(chance.Uint64(), chance.Uint64()))
		wg.Go(func() {
			for time.Now().Before(until) && ctx.Err() == nil {
				err := c.pass(ctx, own, pass)
				c.mu.Lock()
				switch {
				case err == nil:
					c.counts[kind][0]++
				case errors.Is(err, errKilled):
					c.counts[kind][1]++
				default:
					cancel(fmt.Errorf("%s: %w", kind, err))
				}
				c.mu.Unlock()
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// pass runs one trainer, and kills one in three in the middle.
func (c *crew) pass(ctx context.Context, chance *rand.Rand, run func(context.Context, *rand.Rand) error) error {
	if chance.IntN(3) > 0 {
		return run(ctx, chance)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, time.Duration(1+chance.IntN(3000))*time.Millisecond, errKilled)
	defer cancel()
	err := run(ctx, chance)
	if err != nil && errors.Is(context.Cause(ctx), errKilled) {
		return errKilled
	}
	return err
}

// output runs a program that is killed, as by kill -9, when ctx ends.
func (c *crew) output(ctx context.Context, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(c.Env, "PYTHONPATH=python", "PYTHONDONTWRITEBYTECODE=1")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, errs.String())
	}
	return out, nil
}

// mountTrainer writes its order into .shoal/plans and reads so; each byte is compared.
func (c *crew) mountTrainer(ctx context.Context, chance *rand.Rand) error {
	order := make([]string, len(c.Paths))
	for i, at := range chance.Perm(len(order)) {
		order[i] = c.Paths[at]
	}
	list, err := c.List("soak.txt", order)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(c.mnt, ".shoal", "plans", "soak"), []byte(strings.Join(order, "\n")+"\n"), 0); err != nil {
		return fmt.Errorf("write the plan: %w", err)
	}
	_, err = c.output(ctx, c.Self, "readers", "-list", list, "-threads", "4", "-verify", c.Photos, c.mnt)
	return err
}

func (c *crew) feedDigest(ctx context.Context, seed int, flags ...string) (digest string, err error) {
	out, err := c.output(ctx, c.Shoal, append([]string{"feed", c.feed, "--json", "--batch", "32", "--seed", strconv.Itoa(seed),
		"--order", fmt.Sprintf("uniform:seed=%d", seed), "--session", fmt.Sprint("soak", c.names.Add(1))}, flags...)...)
	if err != nil {
		return "", err
	}
	var r struct{ Digest string }
	err = json.Unmarshal(out, &r)
	return r.Digest, err
}

func (c *crew) pythonDigest(ctx context.Context, seed int) (string, error) {
	out, err := c.output(ctx, "/usr/bin/python3", "-c", trainer, c.feed, transform, strconv.Itoa(seed), strconv.Itoa(len(c.Paths)))
	return strings.TrimSpace(string(out)), err
}

// visitor mounts a second dataset in the daemon, reads it, and unmounts; and it has the first listed again.
func (c *crew) visitor(ctx context.Context, _ *rand.Rand) (err error) {
	if err := os.MkdirAll(c.second, 0o755); err != nil {
		return err
	}
	if _, err := c.output(c.Ctx, c.Shoal, "mount", "s3://photos/second", c.second, "--cache-dir", c.cache, "--daemon"); err != nil {
		return err
	}
	defer func() {
		_, e := c.output(c.Ctx, c.Shoal, "umount", c.second)
		err = errors.Join(err, e)
	}()
	if _, err := c.output(ctx, c.Self, "readers", "-threads", "2", "-verify", c.others, c.second); err != nil {
		return err
	}
	_, err = c.output(c.Ctx, c.Shoal, "refresh", c.mnt)
	return err
}
