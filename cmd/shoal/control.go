package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/machine"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// mostAsking is how many may ask about one mount at a time: not all of them are the daemon's user.
const mostAsking = 64

func asMount(m *machine.Mount) daemon.Asked {
	_, owner, _ := strings.Cut(","+m.Super, ",user_id=")
	owner, _, _ = strings.Cut(owner, ",")
	return daemon.Asked{Address: daemon.MountAddress(m.Device), Owner: owner, At: m.Point,
		Then: "shoal umount " + human.Shell(m.Point)}
}

func askMount(ctx context.Context, target string, out io.Writer, args ...string) error {
	m, err := fusefs.At(target)
	if err != nil {
		return err
	}
	if m == nil {
		return notMounted(target)
	}
	err, target = daemon.Ask(ctx, asMount(m), args, nil, out), m.Point
	if errors.Is(err, daemon.ErrNobody) {
		return fmt.Errorf("%s is not a live shoal mount: %w for it here (if it has ended: shoal umount %s; if it "+
			"runs in another container, ask there, or its --admin or feed address; if it is of an older version: cat "+
			"%s/.shoal/stats)", target, err, human.Shell(target), human.Shell(target))
	}
	return err
}

// askDaemon is askMount, or asks the owner of a cache directory.
func askDaemon(ctx context.Context, target string, out io.Writer, args ...string) error {
	if m, err := fusefs.At(target); err == nil && m == nil && isCache(target) {
		return attach(ctx, target, args, nil, out)
	}
	return askMount(ctx, target, out, args...)
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
	switch {
	case target == "": // a variable that is not set
		return cli.Usagef("the name of the mount is empty: give its folder")
	case strings.Contains(target, "://"):
		return cli.Usagef("%s is a URL, not a mount point: give the folder (findmnt -t fuse.shoal lists the "+
			"mounts), or a feed's cache directory", target)
	}
	return fmt.Errorf(
		"%s is not a live shoal mount: nothing of Shoal is mounted there (mount it with `shoal mount SOURCE %s`)",
		target, human.Shell(target))
}

// answerFor answers questions about the mount until stop is called.
func (m *mounted) answerFor(h *engine.Host, log *slog.Logger) (stop func()) {
	address, a := daemon.MountAddress(m.server.Device()), answers(h, m)
	if err := a.Listen(context.Background(), address); err != nil {
		log.Warn("verbs cannot reach the daemon via this mount", "mountpoint", m.path, "socket", address, "cause", err)
	}
	return a.Close
}

// may returns why a process may not run a verb by the mount's socket: its owner may as by that of the cache directory,
// but nothing that names files, and others what the mode of .shoal/stats allows.
func (m *mounted) may(who *audit.Peer, verb string) error {
	owner := *who.UID == 0 || *who.UID == os.Geteuid()
	if verb == "stat" && m.others || owner && slices.Contains([]string{"stat", "refresh", "order", "upgrade"}, verb) {
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

// isCache reports whether a folder is a cache directory, or may be one that this user must not look into.
func isCache(dir string) bool {
	err := cachedir.Is(dir)
	return err == nil || errors.Is(err, fs.ErrPermission)
}

// oneMount returns the mount that args name, or the only one on this machine.
func oneMount(args []string) (string, error) {
	switch {
	case len(args) == 0:
	case args[0] == "" || strings.Contains(args[0], "://"): // which would be in the current folder
		return "", notMounted(args[0])
	default:
		return args[0], nil
	}
	mounts, err := fusefs.Mounts()
	if err != nil {
		return "", err
	}
	return only(pointsOf(mounts), "give a mount point")
}

func pointsOf(mounts []machine.Mount) (points []string) {
	for _, m := range mounts {
		points = append(points, m.Point)
	}
	return points
}

// oneDaemon returns the target in args, or the only daemon here that has a mount or serves the default feed.
func oneDaemon(ctx context.Context, args []string, security *clientSecurity) (string, error) {
	if len(args) > 0 && args[0] == "" {
		return "", notMounted("")
	} else if len(args) > 0 {
		return args[0], nil
	}
	found, err := foundTargets()
	if err != nil {
		return "", err
	}
	if n := len(found); n > 1 && found[n-1] == defaultFeed {
		// Either one daemon serves both, or the socket was left by a dead one.
		feed := daemonOf(ctx, defaultFeed, security)
		if feed == 0 || slices.ContainsFunc(found[:n-1], func(mount string) bool {
			return daemonOf(ctx, mount, security) == feed
		}) {
			found = found[:n-1]
		}
	}
	return only(found, "give a mount point or a feed's address")
}

// daemonOf returns the process behind a mount or feed, 0 if unknown.
func daemonOf(ctx context.Context, target string, security *clientSecurity) int {
	s, _ := parseStats[engine.Stats](anyStats(ctx, target, security))
	return s.PID
}

func only(found []string, remedy string) (string, error) {
	switch len(found) {
	case 0:
		return "", cli.Usagef("no Shoal mount was found (%s)", remedy)
	case 1:
		return found[0], nil
	}
	return "", cli.Usagef("%d mounts found; name one (%s)", len(found), strings.Join(found, ", "))
}
