package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/machine"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// isCache reports whether a folder is a cache directory, or may be one that this user must not look into.
func isCache(dir string) bool {
	err := cachedir.Is(dir)
	return err == nil || errors.Is(err, fs.ErrPermission)
}

// oneMount returns the mount that args name, or the only one on this machine.
func oneMount(args []string) (string, error) {
	switch {
	case len(args) == 0:
	case args[0] == "": // which would be the current folder
		return "", notMounted("")
	case strings.Contains(args[0], "://"):
		return "", cli.Usagef("%s is a URL, not a mount point: give the folder (findmnt -t fuse.shoal lists the "+
			"mounts), or a feed's cache directory", args[0])
	default:
		return args[0], nil
	}
	mounts, err := fusefs.Mounts()
	if err != nil {
		return "", err
	}
	return only(pointsOf(mounts), "give a mount point")
}

// pointsOf returns the mount points.
func pointsOf(mounts []machine.Mount) (points []string) {
	for _, m := range mounts {
		points = append(points, m.Point)
	}
	return points
}

// oneDaemon returns the mount or feed in args, or the only daemon on this machine that has a mount or serves the
// default feed.
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

// only returns the only element of found.
func only(found []string, remedy string) (string, error) {
	switch len(found) {
	case 0:
		return "", cli.Usagef("no Shoal mount was found (%s)", remedy)
	case 1:
		return found[0], nil
	}
	return "", cli.Usagef("%d mounts found; name one (%s)", len(found), strings.Join(found, ", "))
}

// say names the target that was chosen if none was given.
func say(args []string, format string, target string) {
	if len(args) == 0 {
		fmt.Fprintf(os.Stderr, format+"\n", target)
	}
}
