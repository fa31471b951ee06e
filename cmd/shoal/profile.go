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
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/findings"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/internal/profile/trace"
)

type profileOptions struct {
	duration  time.Duration
	bandwidth bandwidth
	out, from string
	asJSON    bool
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
		RunE: func(c *cobra.Command, args []string) (err error) {
			switch {
			case o.from != "" && len(args) > 0:
				return cli.Usagef("give a MOUNTPOINT or --from, not both")
			case o.from != "" && o.out != "":
				return cli.Usagef("--out: %s is already a recording", o.from)
			}
			r := recording{name: o.from, out: io.Discard}
			if o.from != "" {
				err = r.load()
			} else if r.name, err = oneMount(args); err == nil {
				err = o.record(c.Context(), invocationOf(c.Context()), &r)
			}
			if err != nil {
				return err
			}
			bar := late(daemon.Own, "analysing")
			p, err := findings.Analyse(&r.Trace, findings.ProfileOptions{Bandwidth: float64(o.bandwidth), Searches: 4})
			bar.Done("")
			switch {
			case err != nil:
				return err
			case o.asJSON:
				return json.NewEncoder(c.OutOrStdout()).Encode(p)
			}
			return p.Print(c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.DurationVar(&o.duration, "duration", time.Minute,
		"how long to record; 0: until Ctrl-C, which always ends it early")
	f.StringVar(&o.out, "out", "", "save the recording to this file")
	f.StringVar(&o.from, "from", "", "analyse a saved recording instead of a mount")
	f.Var(&o.bandwidth, "bandwidth", "bandwidth to the object store, for the estimate (shoal doctor measures it)")
	f.BoolVar(&o.asJSON, "json", false, "print the versioned JSON (docs/profile.md)")
	return c
}

// pollEvery is much shorter than the time in which a recording's ring fills up.
const pollEvery = 100 * time.Millisecond

type recording struct {
	trace.Trace
	name string        // file or mount point
	in   *bufio.Reader // of its lines
	out  io.Writer     // where they are saved
	part []byte        // beginning of an incomplete line
	n    int           // lines
}

func (r *recording) load() error {
	text, err := os.ReadFile(r.name)
	if err != nil {
		return fmt.Errorf("--from: %w (shoal profile MOUNTPOINT --out %s makes one)", err, r.name)
	}
	r.in = bufio.NewReader(bytes.NewReader(append(text, '\n')))
	if _, err = r.drain(); err == nil && r.Version == 0 {
		err = fmt.Errorf("%s is empty (shoal profile MOUNTPOINT --out %s makes a recording)", r.name, r.name)
	}
	return err
}

// record records a mount until the time is over, the user stops it, or the mount is gone.
func (o *profileOptions) record(ctx context.Context, inv *invocation, r *recording) (err error) {
	if _, err := parseStats[struct{}](rawStats(ctx, askMount, r.name)); err != nil {
		return err
	}
	f, err := os.Open(filepath.Join(r.name, ".shoal", "profile"))
	switch {
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("%w (only the mount's owner may record it: run this as that user, or as root)", err)
	case err != nil:
		return fmt.Errorf("%s: cannot start a recording: %w (others may be recording, or --memory is too small: see "+
			"`shoal stat %s`)", r.name, err, r.name)
	}
	defer f.Close()
	r.in = bufio.NewReaderSize(f, 256<<10)
	if o.out != "" {
		file, failed := os.Create(o.out)
		if failed != nil {
			return fmt.Errorf("--out: %w", failed)
		}
		saved := bufio.NewWriter(file)
		defer func() {
			if failed := errors.Join(saved.Flush(), file.Close()); err == nil && failed != nil {
				err = fmt.Errorf("--out: %w", failed)
			}
		}()
		r.out = saved
	}
	until, bar, began := ctx, inv.Step("recording "+r.name), time.Now()
	if o.duration > 0 {
		timed, cancel := context.WithTimeout(ctx, o.duration)
		defer cancel()
		until = timed
	}
	gone := ""
	for range pause.Every(until, pollEvery) {
		if gone, err = r.drain(); err != nil || gone != "" {
			break
		}
		bar.Set(int(time.Since(began).Seconds()), int(o.duration.Seconds()), human.Count(len(r.Events), "event"))
	}
	took := time.Since(began).Seconds()
	bar.Done(gone)
	if err == nil {
		_, err = r.drain() // what came since
	}
	if err != nil {
		return err
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), daemon.Patience)
	defer cancel()
	if after, err := rawStats(last, askMount, r.name); err == nil {
		if err := r.add("stats", json.RawMessage(after)); err != nil {
			return err
		}
	}
	if r.Version == 0 {
		return fmt.Errorf("%s: the mount disappeared before anything was recorded", r.name)
	}
	return r.add("footer", trace.Footer{Seconds: took})
}

// drain takes the lines that there are. gone is why there will be no more.
func (r *recording) drain() (gone string, err error) {
	for {
		text, failed := r.in.ReadBytes('\n')
		r.part = append(r.part, text...)
		switch {
		case errors.Is(failed, io.EOF): // nothing for now
			return "", nil
		case failed != nil:
			return "the mount is gone", nil //nolint:nilerr // what was recorded counts
		}
		if err := r.line(r.part); err != nil {
			return "", err
		}
		r.part = r.part[:0]
	}
}

// add adds a line of the reader's own.
func (r *recording) add(name string, v any) error {
	return r.line(trace.AppendJSON(nil, map[string]any{name: v}))
}

func (r *recording) line(line []byte) error {
	if _, err := r.out.Write(line); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	r.n++
	if err := r.Add(line); err != nil {
		return fmt.Errorf("%s, line %d: %w", r.name, r.n, err)
	}
	return nil
}
