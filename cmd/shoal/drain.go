package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/loader"
)

// phase is where a daemon stands in its life: what /readyz tells.
type phase struct{ at atomic.Int32 }

const (
	starting int32 = iota
	up
	ending
)

// set moves on to a later phase.
func (p *phase) set(to int32) { p.at.Store(to) }

// ready says why the daemon does not serve, or nil.
func (p *phase) ready() error {
	switch p.at.Load() {
	case starting:
		return errors.New("the daemon is starting")
	case ending:
		return errors.New("the daemon is draining: it is shutting down")
	}
	return nil
}

// drainOptions are the flags of how a daemon ends.
type drainOptions struct{ timeout time.Duration }

func (o *drainOptions) add(c *cobra.Command) {
	c.Flags().DurationVar(&o.timeout, "drain-timeout", 3*time.Second, "how long shutdown waits for open files and batches in progress")
}

func (o *drainOptions) check() error {
	if o.timeout < 0 {
		return cli.Usagef("--drain-timeout %s: give a duration such as 3s, or 0 to wait for nothing", o.timeout)
	}
	return nil
}

// drain is the end of one daemon: everything that it waits for shares one deadline.
type drain struct {
	ctx    context.Context // ends at the deadline, or with a second signal
	cancel func()
	start  time.Time
	log    *slog.Logger
}

func (o *drainOptions) begin(log *slog.Logger) *drain {
	endBy(time.Now().Add(o.timeout+endPatience), log)
	d := &drain{start: time.Now(), log: log}
	d.ctx, d.cancel = context.WithTimeout(context.Background(), o.timeout)
	go func() {
		select {
		case <-hurry:
			d.cancel()
		case <-d.ctx.Done():
		}
	}()
	serviceStopping(o.timeout)
	return d
}

// endPatience is how long an end may take once nothing is waited for any more: for closing connections, and for writing
// down what the cache holds in memory.
const endPatience = time.Second

// lastMoment is when a process that was told to end exits, whatever it is at: the latest that any of its daemons allows.
var lastMoment struct {
	mu    sync.Mutex
	at    time.Time
	timer *time.Timer
}

// endBy has the process exit at that moment, if it was told to end and has not ended before. A disk that is slow or hangs
// would otherwise keep it for a minute. The cache is made for being left so: what was not written yet is fetched again.
func endBy(at time.Time, log *slog.Logger) {
	select {
	case <-told:
	default: // this daemon ends alone, and others of the process go on
		return
	}
	m := &lastMoment
	m.mu.Lock()
	defer m.mu.Unlock()
	if !at.After(m.at) {
		return
	}
	if m.timer != nil {
		m.timer.Stop()
	}
	m.at = at
	m.timer = time.AfterFunc(time.Until(at), func() {
		said := make(chan struct{})
		go func() { // the log may lie on the disk that hangs
			defer close(said)
			log.Warn("the end is cut off: what the cache had not written yet will be fetched again (is its disk slow?)")
			limiter.Flush()
		}()
		select {
		case <-said:
		case <-time.After(100 * time.Millisecond):
		}
		os.Exit(0)
	})
}

// feed lets the sessions of a feed end.
func (d *drain) feed(s *loader.Server) {
	sessions, left := s.Drain(d.ctx)
	if sessions == 0 {
		return
	}
	waited := slog.Duration("waited", time.Since(d.start).Round(time.Millisecond))
	if left > 0 {
		d.log.Warn("closing feed sessions with batches in progress", "sessions", sessions, "cut_off", left, waited)
		return
	}
	d.log.Info("feed drained", "sessions", sessions, waited)
}

const (
	// drainTick is between looks at how many files are open.
	drainTick = 10 * time.Millisecond
	// busyTick is between attempts to unmount while nothing is open and the kernel says that it is in use. That
	// may be a walk through folders, or a file whose release is on its way, or a shell that stands in it.
	busyTick = 100 * time.Millisecond
	// busyPatience is how long those are waited for: they are in the middle of nothing.
	busyPatience = time.Second
	// abortPatience is how long the kernel may take to let go of a mount that was taken away.
	abortPatience = time.Second
)

// errHeld says that the kernel still has requests for a mount that is gone from the tree: what serves it cannot be
// closed under them.
var errHeld = errors.New("a process still has files of the detached mount open")

// mount unmounts once nobody is in the middle of a file, or at the deadline. gone is closed when the mount is.
func (d *drain) mount(m *mounted, gone <-chan struct{}) error {
	s := m.server
	s.Drain()
	begin := s.OpenFiles()
	d.log.Info("unmounting", "mountpoint", m.path, "open_files", begin)
	var idle time.Time // since when nothing is open
	var next time.Time // attempt
	for {
		now := time.Now()
		open := s.OpenFiles()
		if open > 0 {
			idle = time.Time{}
		} else if idle.IsZero() {
			idle, next = now, now
		}
		var busy error
		if open == 0 && !now.Before(next) {
			if busy = s.Unmount(false); busy == nil {
				break
			}
			next = now.Add(busyTick)
		}
		if over := d.ctx.Err() != nil; over || !idle.IsZero() && now.Sub(idle) > busyPatience {
			if busy == nil {
				if busy = s.Unmount(false); busy == nil { // an open that was counted and never released
					break
				}
			}
			d.log.Warn("the mount is in use; detaching it, and open files fail", "mountpoint", m.path, "open_files", open,
				"waited", time.Since(d.start).Round(time.Millisecond), "cause", busy)
			if err := s.Abort(); err != nil {
				return fmt.Errorf("unmount: %w", err)
			}
			break
		}
		select {
		case <-d.ctx.Done():
		case <-gone: // somebody else has unmounted it
			return nil
		case <-time.After(drainTick):
		}
	}
	select {
	case <-gone:
	case <-time.After(abortPatience):
		m.audit.Write(audit.Event{Event: "unmount", Outcome: "failed", Cause: errHeld.Error()})
		return errHeld
	}
	if begin > 0 {
		d.log.Info("mount drained", "mountpoint", m.path, "open_files", begin, "waited", time.Since(d.start).Round(time.Millisecond))
	}
	return nil
}

// end waits for what a mount's serve and the feed came to. A mount that is held is the kernel's to end when the process
// exits, and the cache is made for being left so.
func (d *drain) end(err error) error {
	d.cancel()
	if errors.Is(err, errHeld) {
		d.log.Warn("a process still has files of the detached mount open; they fail now")
		limiter.Flush()
		os.Exit(0)
	}
	return err
}
