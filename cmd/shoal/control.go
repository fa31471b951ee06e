package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/machine"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// mostAsking is how many may ask about one mount at a time: not all of them are the daemon's user.
const mostAsking = 64

// asMount is a question to the daemon of a mount.
func asMount(m *machine.Mount) daemon.Asked {
	owner := ""
	for option := range strings.SplitSeq(m.Super, ",") {
		if id, ok := strings.CutPrefix(option, "user_id="); ok {
			owner = id
		}
	}
	return daemon.Asked{Address: daemon.MountAddress(m.Device), Owner: owner, At: m.Point,
		Then: "shoal umount " + m.Point}
}

// askMount asks the daemon of a mount.
func askMount(ctx context.Context, target string, out io.Writer, args ...string) error {
	m, err := fusefs.At(target)
	if err != nil {
		return err
	}
	if m == nil {
		return notMounted(target)
	}
	err, target = ask(ctx, asMount(m), args, out), m.Point
	if errors.Is(err, daemon.ErrNobody) {
		return fmt.Errorf("%s is not a live shoal mount: %w for it here (if it has ended: shoal umount %s; if it "+
			"runs in another container, "+
			"ask there, or its --admin or feed address; if it is of an older version: cat %s/.shoal/stats)", target,
			err, target, target)
	}
	return err
}

// askNext is askMount of a daemon, or of the one that follows on it. patience is how long there may be none at first.
func askNext(ctx context.Context, patience time.Duration, target string, out io.Writer, args ...string) error {
	for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		err := askMount(ctx, target, out, args...)
		switch {
		case ctx.Err() != nil:
			return err
		case errors.Is(err, daemon.ErrEnding):
			begun, patience = time.Now(), upgradePatience
		case !errors.Is(err, daemon.ErrNobody) || time.Since(begun) > patience:
			return err
		}
	}
}

func notMounted(target string) error {
	if target == "" { // a variable that is not set
		return cli.Usagef("the name of the mount is empty: give its folder")
	}
	return fmt.Errorf(
		"%s is not a live shoal mount: nothing of Shoal is mounted there (mount it with `shoal mount SOURCE %s`)",
		target, target)
}

// inTime limits a question that has no deadline.
func inTime(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, daemon.Patience)
}

// answerFor answers questions about the mount until stop is called.
func (m *mounted) answerFor(h *engine.Host, log *slog.Logger) (stop func()) {
	address, a := daemon.MountAddress(m.server.Device()), answers(h, m)
	if err := a.Listen(context.Background(), address); err != nil {
		log.Warn("no verb reaches the daemon by this mount", "mountpoint", m.path, "socket", address, "cause", err)
	}
	return a.Close
}

// may returns why a process may not run a verb by the mount's socket: its owner may as by that of the cache directory,
// but nothing that names files, and others what the mode of .shoal/stats allows.
func (m *mounted) may(who *audit.Peer, verb string) error {
	uid := *who.UID
	switch owner := uid == 0 || uid == os.Geteuid(); {
	case verb == "stat" && (owner || m.others), owner && (verb == "refresh" || verb == "order" || verb == "upgrade"):
		return nil
	}
	return fmt.Errorf("only the owner of the mount %s may %s it: run this as that user, or as root", m.path, verb)
}

// stats writes the content of .shoal/stats.
func (m *mounted) stats(w io.Writer) error {
	if m.server.Draining() {
		return fmt.Errorf("%s is draining: its daemon is shutting down", m.path)
	}
	b, err := m.door.Get("stats")
	if err == nil {
		_, err = w.Write(b)
	}
	return err
}

// refresh lists the source again, as a write to .shoal/refresh does.
func (m *mounted) refresh(ctx context.Context, who *audit.Peer, out io.Writer) error {
	err := refresh(ctx, m.door.Engine, m.path, "", out)
	m.audit.Write(outcome(audit.Event{Event: "refresh", Peer: who}, err))
	return err
}
