package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/loader"
)

// phase is the phase of a daemon's life, for /readyz.
type phase struct{ at atomic.Int32 }

const (
	starting int32 = iota
	up
	ending
)

// set moves to a later phase.
func (p *phase) set(to int32) { p.at.Store(to) }

// ready returns why the daemon does not serve, or nil.
func (p *phase) ready() error {
	switch p.at.Load() {
	case starting:
		return errors.New("the daemon is starting")
	case ending:
		return errors.New("the daemon is draining: it is shutting down")
	}
	return nil
}

// drainTime is how long the end waits for open files and batches in progress. A sample or a batch is read to its end in less than the
// usual, and pods and service managers wait for longer. engineOptions.check has checked it.
func drainTime() time.Duration {
	d, _ := time.ParseDuration(cmp.Or(os.Getenv(drainEnv), "3s"))
	return d
}

// drain is the end of one daemon: all its waits share one deadline.
type drain struct {
	ctx    context.Context // ends at the deadline, or with a second signal
	cancel func()
	start  time.Time
	log    *slog.Logger
}

func beginDrain(log *slog.Logger) *drain {
	endBy(time.Now().Add(drainTime()+endPatience), log)
	d := &drain{start: time.Now(), log: log}
	d.ctx, d.cancel = context.WithTimeout(context.Background(), drainTime())
	go func() {
		select {
		case <-hurry:
			d.cancel()
		case <-d.ctx.Done():
		}
	}()
	serviceStopping()
	return d
}

// endPatience is how long the end may take after the drain: to close connections, and to write the cache's data in
// memory to disk.
const endPatience = time.Second

// lastMoment is when a process that was asked to end exits in any case: the latest time that any of its daemons allows.
var lastMoment struct {
	mu    sync.Mutex
	at    time.Time
	timer *time.Timer
}

// endBy makes the process exit at that time, if it was asked to end and has not ended. Otherwise a slow or hanging disk
// would keep it for a minute. The cache tolerates this: data that was not written is fetched again.
func endBy(at time.Time, log *slog.Logger) {
	select {
	case <-told:
	default: // only this daemon ends; others in the process go on
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
		go func() { // the log may be on the disk that hangs
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
	if s == nil {
		return
	}
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
	// drainTick is the interval of checks for open files.
	drainTick = 10 * time.Millisecond
	// busyTick is the interval of attempts to unmount while no file is open but the kernel reports the mount in use:
	// a walk through folders, a file whose release is on its way, or a shell whose working directory is there.
	busyTick = 100 * time.Millisecond
	// busyPatience is how long to wait for those: none of them is in the middle of a read.
	busyPatience = time.Second
	// abortPatience is how long the kernel may take to release an aborted mount.
	abortPatience = time.Second
)

// errHeld says that the kernel still has requests for a mount that is no longer in the tree: its server cannot be closed
// under them.
var errHeld = errors.New("a process still has files of the detached mount open")

// mount unmounts once no file is open, or at the deadline. gone is closed when the mount is gone.
func (d *drain) mount(m *mounted, gone <-chan struct{}) error {
	select {
	case <-gone: // unmounted by another process
		return nil
	default:
	}
	s := m.server
	s.Drain()
	begin := s.OpenFiles()
	d.log.Info("unmounting", "mountpoint", m.path, "open_files", begin)
	var idle time.Time // since when no file is open
	var next time.Time // next attempt
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
				if busy = s.Unmount(false); busy == nil { // an open was counted but never released
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
		case <-gone: // unmounted by another process
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

// end waits for the results of a mount's server and of the feed. The kernel ends a mount that is still in use when the
// process exits, which the cache tolerates.
func (d *drain) end(err error) error {
	d.cancel()
	if errors.Is(err, errHeld) {
		d.log.Warn("a process still has files of the detached mount open; they fail now")
		limiter.Flush()
		os.Exit(0)
	}
	return err
}
