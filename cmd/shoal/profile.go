package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/profile"
	"github.com/shoalfs/shoal/internal/profile/trace"
)

// profileOptions are the flags of shoal profile.
type profileOptions struct {
	duration, step time.Duration
	bandwidth      bandwidth
	batch          int
	out, from      string
	asJSON         bool
}

func profileCommand() *cobra.Command {
	o := profileOptions{bandwidth: 10e9 / 8}
	c := &cobra.Command{
		Use:   "profile [MOUNTPOINT]",
		Short: "Record what a trainer does on a mount, and suggest improvements",
		Long: `Records opens and reads on the mount for --duration or until Ctrl-C: by which process, in which order, and how long
each waited. Then it names the access pattern (docs/profile.md), suggests what would help, and estimates the gain
with the model of shoal plan. Without a MOUNTPOINT it takes the only mount on this machine.

Recording costs almost nothing and stops when this command ends. Only the mount's owner may record. --out saves the
recording as JSON lines; --from reads one.`,
		Example: `  shoal profile /mnt/train
  shoal profile /mnt/train --duration 5m --out monday.trace --bandwidth 2Gbit
  shoal profile --from monday.trace --json`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if err := o.check(args); err != nil {
				return err
			}
			var t *trace.Trace
			var err error
			if o.from != "" {
				t, err = readTrace(o.from)
			} else {
				var mountpoint string
				if mountpoint, err = oneMount(args); err == nil {
					t, err = o.record(c.Context(), invocationOf(c.Context()), mountpoint)
				}
			}
			if err != nil {
				return err
			}
			r, err := profile.Analyse(t, profile.Options{Bandwidth: float64(o.bandwidth), Batch: o.batch, Step: o.step.Seconds()})
			if err != nil {
				return err
			}
			if o.asJSON {
				return json.NewEncoder(c.OutOrStdout()).Encode(r)
			}
			return r.Print(c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.DurationVar(&o.duration, "duration", time.Minute, "how long to record; 0: until Ctrl-C, which always ends it early")
	f.StringVar(&o.out, "out", "", "save the recording to this file")
	f.StringVar(&o.from, "from", "", "analyse a saved recording instead of a mount")
	f.Var(&o.bandwidth, "bandwidth", "bandwidth to the object store, for the estimate (shoal doctor measures it)")
	f.IntVar(&o.batch, "batch", 64, "samples per step of the trainer, for the estimate")
	f.DurationVar(&o.step, "step-time", 0, "compute time of a step, for the estimate (default: as observed)")
	f.BoolVar(&o.asJSON, "json", false, "print the versioned JSON (docs/profile.md)")
	return c
}

func (o *profileOptions) check(args []string) error {
	switch {
	case o.from != "" && len(args) > 0:
		return cli.Usagef("give a MOUNTPOINT or --from, not both")
	case o.from != "" && o.out != "":
		return cli.Usagef("--out: %s is already a recording", o.from)
	case o.duration < 0 || o.step < 0:
		return cli.Usagef("--duration %s, --step-time %s: neither may be negative", o.duration, o.step)
	case o.batch < 1:
		return cli.Usagef("--batch %d: give the samples per step, 1 or more", o.batch)
	}
	return nil
}

const (
	// pollEvery is much shorter than the time in which a recording's ring fills up.
	pollEvery = 100 * time.Millisecond
	// maxLine bounds a line of a recording: a path, or the stats of many streams.
	maxLine = 16 << 20
)

func readTrace(name string) (*trace.Trace, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("--from: %w (shoal profile MOUNTPOINT --out %s makes one)", err, name)
	}
	defer f.Close()
	t := &trace.Trace{}
	s := bufio.NewScanner(f)
	s.Buffer(make([]byte, 0, 64<<10), maxLine)
	for n := 1; s.Scan(); n++ {
		if err := t.Add(s.Bytes()); err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", name, n, err)
		}
	}
	if err := s.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if t.Version == 0 {
		return nil, fmt.Errorf("%s is empty (shoal profile MOUNTPOINT --out %s makes a recording)", name, name)
	}
	return t, nil
}

// record records a mount until the time is over, the user stops it, or the mount is gone.
func (o *profileOptions) record(ctx context.Context, inv *invocation, mountpoint string) (_ *trace.Trace, err error) {
	before, err := readStats(ctx, mountpoint)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(mountpoint, ".shoal", "profile")
	f, err := os.Open(path)
	switch {
	case errors.Is(err, os.ErrPermission):
		return nil, fmt.Errorf("%s: %w (only the mount's owner may record it: run this as that user, or as root)", path, err)
	case err != nil:
		return nil, fmt.Errorf("%s: cannot start a recording: %w (others may be recording, or --memory is too small: see `shoal stat %s`)", mountpoint, err, mountpoint)
	}
	defer f.Close()
	r := recording{t: &trace.Trace{}}
	if o.out != "" {
		out, err := os.Create(o.out)
		if err != nil {
			return nil, fmt.Errorf("--out: %w", err)
		}
		r.out = bufio.NewWriter(out)
		defer func() { err = errors.Join(err, r.out.Flush(), out.Close()) }()
	}
	bar := inv.step("recording " + mountpoint)
	began := time.Now()
	ended := ""
	for first := true; ended == ""; first = false {
		gone, err := r.drain(f)
		if err != nil {
			return nil, err
		}
		if gone {
			ended = "the mount is gone"
			break
		}
		if first { // after the header
			if err := r.stats(before.raw); err != nil {
				return nil, err
			}
		}
		took := time.Since(began)
		bar.Set(int(took.Seconds()), int(o.duration.Seconds()), fmt.Sprintf("%d events", len(r.t.Events)))
		wait := pollEvery
		if o.duration > 0 {
			if took >= o.duration {
				break
			}
			wait = min(wait, o.duration-took)
		}
		select {
		case <-ctx.Done():
			ended = "interrupted"
		case <-time.After(wait):
		}
	}
	took := time.Since(began)
	bar.Done(ended)
	if _, err := r.drain(f); err != nil {
		return nil, err
	}
	if after, err := readStats(context.WithoutCancel(ctx), mountpoint); err == nil {
		if err := r.stats(after.raw); err != nil {
			return nil, err
		}
	}
	if r.t.Version == 0 {
		return nil, fmt.Errorf("%s: the mount disappeared before anything was recorded", mountpoint)
	}
	return r.t, r.line(trace.AppendJSON(nil, struct {
		Footer trace.Footer `json:"footer"`
	}{trace.Footer{Seconds: took.Seconds()}}))
}

// recording is the reading end of a recording.
type recording struct {
	t    *trace.Trace
	out  *bufio.Writer // nil: not saved
	part []byte        // beginning of an incomplete line
}

// drain reads the available lines. gone reports that there will be no more.
func (r *recording) drain(f *os.File) (gone bool, err error) {
	buf := make([]byte, 256<<10)
	for {
		n, failed := f.Read(buf)
		r.part = append(r.part, buf[:n]...)
		for {
			i := bytes.IndexByte(r.part, '\n')
			if i < 0 {
				break
			}
			if err := r.line(r.part[:i+1]); err != nil {
				return false, err
			}
			r.part = r.part[i+1:]
		}
		if failed != nil { // io.EOF: nothing for now
			return !errors.Is(failed, io.EOF), nil
		}
	}
}

// stats adds a snapshot of the stats.
func (r *recording) stats(raw []byte) error {
	return r.line(trace.AppendJSON(nil, struct {
		Stats json.RawMessage `json:"stats"`
	}{raw}))
}

func (r *recording) line(line []byte) error {
	if r.out != nil {
		if _, err := r.out.Write(line); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
	}
	return r.t.Add(line)
}
