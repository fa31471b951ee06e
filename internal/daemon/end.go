package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/internal/pause"
)

// hurryPatience is how long a process may take after the second signal, so that it leaves no dead mount, even under
// load.
const hurryPatience = 10 * time.Second

// told ends at the first signal, and hurried at the second: then there is no more waiting.
var (
	told, tell     = context.WithCancel(context.Background())
	hurried, hurry = context.WithCancel(context.Background())
)

// Signals returns a context that ends at the first signal, which requests an orderly end. The second requests an
// immediate one: the process exits within hurryPatience.
func Signals() (ctx context.Context, stop func()) {
	signals := make(chan os.Signal, 2)
	list := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // as under nohup
		list = append(list, syscall.SIGHUP) // a terminal that closes must leave no dead mount
	}
	signal.Notify(signals, list...)
	done := make(chan struct{})
	go func() {
		exit := func() { os.Exit(1) }
		for _, act := range []func(){tell, func() { hurry(); time.AfterFunc(hurryPatience, exit) }, exit} {
			select {
			case <-done:
				return
			case <-signals:
				act()
			}
		}
	}()
	ctx, cancel := context.WithCancel(told)
	return ctx, sync.OnceFunc(func() { signal.Stop(signals); close(done); cancel() })
}

// Outlive keeps the process alive when nobody reads its standard output or error any more, which by default ends a Go
// program.
func Outlive() { signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) }

// ErrInterrupted is the error of a process that a signal ended before it was done, or ready.
var ErrInterrupted = errors.New("interrupted")

// Told reports whether there was a signal.
func Told() bool { return told.Err() != nil }

// Hurried is closed at the second signal.
func Hurried() <-chan struct{} { return hurried.Done() }

const DrainEnv = "SHOAL_DRAIN_TIMEOUT" // sets DrainTime

// DrainTime is how long the end waits for open files and batches in progress; 0 or less if DrainEnv is not valid. A
// sample or a batch is read to its end in less than the usual, and pods and service managers wait for longer.
func DrainTime() time.Duration {
	d, _ := time.ParseDuration(cmp.Or(os.Getenv(DrainEnv), "3s"))
	return d
}

// Drain is the end of one thing that is served: all its waits share one deadline.
type Drain struct {
	ctx    context.Context // ends at the deadline, or with a second signal
	cancel func()
	start  time.Time
	log    *slog.Logger
	flush  func()
}

// Drain begins the end. flush writes what the log holds back, before the process exits.
func (l *Life) Drain(log *slog.Logger, flush func()) *Drain {
	if l.state.Swap(draining) == ready {
		serving.Add(-1)
	}
	d := &Drain{start: time.Now(), log: log, flush: flush}
	if Told() { // else only this ends; others in the process go on
		lastMoment.Do(func() { time.AfterFunc(DrainTime()+endPatience, func() { d.cutOff(); os.Exit(0) }) })
	}
	d.ctx, d.cancel = context.WithTimeout(hurried, DrainTime())
	if Told() || serving.Load() == 0 {
		managerStopping()
	}
	return d
}

// Context ends when waiting does.
func (d *Drain) Context() context.Context { return d.ctx }

// endPatience is how long the end may take after the drain: to close connections, and to write the cache's data in
// memory to disk.
const endPatience = time.Second

var lastMoment sync.Once // set by the first drain of a process that was asked to end: all begin at the signal

var leaving sync.Map // the mounts of this process whose end has begun

// cutOff is done when the drain should be over, before the process exits: otherwise a slow or hanging disk would keep
// it for a minute. The cache tolerates this: data that was not written is fetched again. Mounts would be left dead, so
// they are detached.
func (d *Drain) cutOff() {
	leaving.Range(func(m, _ any) bool { _ = m.(Mount).Abort(); return true })
	said := make(chan struct{})
	go func() { // the log may be on the disk that hangs
		defer close(said)
		d.log.Warn("the end is cut off: what the cache had not written yet will be fetched again (is its disk slow?)")
		d.flush()
	}()
	select {
	case <-said:
	case <-time.After(100 * time.Millisecond):
	}
}

func (d *Drain) waited() slog.Attr {
	return slog.Duration("waited", time.Since(d.start).Round(time.Millisecond))
}

// Feed lets the sessions of a feed end.
func (d *Drain) Feed(s interface {
	Drain(ctx context.Context) (sessions, left int)
}) {
	switch sessions, left := s.Drain(d.ctx); {
	case left > 0:
		d.log.Warn("closing feed sessions with batches in progress", "sessions", sessions, "cut_off", left, d.waited())
	case sessions > 0:
		d.log.Info("feed drained", "sessions", sessions, d.waited())
	}
}

const (
	drainTick = 10 * time.Millisecond // between checks for open files
	// busyTick is the interval of attempts to unmount while no file is open but the kernel reports the mount in use:
	// a walk through folders, a file whose release is on its way, or a shell whose working directory is there.
	busyTick      = 100 * time.Millisecond
	busyPatience  = time.Second // for those: none of them is in the middle of a read
	abortPatience = time.Second // for the kernel to release an aborted mount
)

// ErrHeld says that the kernel still has requests for a mount that is no longer in the tree: its server cannot be
// closed under them.
var ErrHeld = errors.New("a process still has files of the detached mount open")

// Mount is a mount's server.
type Mount interface {
	Drain()                  // refuses new opens
	OpenFiles() int          // that are open now
	Unmount(lazy bool) error // fails if the mount is in use
	Abort() error            // detaches it, and fails what is in progress
}

// Mount unmounts once no file is open, or at the deadline. gone is closed when the mount is gone.
func (d *Drain) Mount(s Mount, path string, gone <-chan struct{}) error {
	select {
	case <-gone: // unmounted by another process
		return nil
	default:
	}
	leaving.Store(s, nil)
	defer leaving.Delete(s)
	s.Drain()
	begin := s.OpenFiles()
	d.log.Info("unmounting", "mountpoint", path, "open_files", begin)
	// names the users, for which all processes are looked at: never at the deadline, unless no file is open
	var busy error
	for idle, first := 0, true; ; { // ticks without an open file
		open := s.OpenFiles()
		if idle++; open > 0 {
			idle = 0
		}
		last := d.ctx.Err() != nil || idle > int(busyPatience/drainTick) // an open may be counted and never be released
		if first || open == 0 && (last || idle%int(busyTick/drainTick) == 1) {
			if busy = s.Unmount(false); busy == nil {
				break
			}
			first = false
		}
		if last {
			d.log.Warn("the mount is in use; detaching it, and open files fail", "mountpoint", path,
				"open_files", open, d.waited(), "cause", busy)
			if err := s.Abort(); err != nil {
				return fmt.Errorf("unmount: %w", err)
			}
			break
		}
		select {
		case <-d.ctx.Done():
		case <-gone:
			return nil
		case <-time.After(drainTick):
		}
	}
	select {
	case <-gone:
	case <-time.After(abortPatience):
		return ErrHeld
	}
	if begin > 0 {
		d.log.Info("mount drained", "mountpoint", path, "open_files", begin, d.waited())
	}
	return nil
}

// Outlast waits until a held mount is gone, if this process serves anything else, which would end with it. Otherwise,
// and when the others have drained, it is ErrHeld.
func (d *Drain) Outlast(path string, gone <-chan struct{}) error {
	if Told() || serving.Load() == 0 {
		return ErrHeld
	}
	d.log.Warn("a process still has files of the detached mount open; they are served until it closes them",
		"mountpoint", path)
	select {
	case <-told.Done():
		_ = pause.For(hurried, DrainTime()+endPatience)
		return ErrHeld
	case <-gone:
		return nil
	}
}

// End ends the drain. The kernel ends a mount that is still in use when the process exits, which the cache tolerates.
func (d *Drain) End(err error) error {
	d.cancel()
	if errors.Is(err, ErrHeld) {
		d.log.Warn("a process still has files of the detached mount open; they fail now")
		d.flush()
		os.Exit(0)
	}
	return err
}
