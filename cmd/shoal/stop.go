package main

import (
	"encoding/json"
	"fmt"
	"net"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/engine"
)

func stopCommand() *cobra.Command {
	var all bool
	var wait time.Duration
	var security clientSecurity
	c := &cobra.Command{
		Use:   "stop ADDR|MOUNTPOINT",
		Short: "End a daemon of this machine, and wait until it has left the cache in order",
		Long: `Ends the daemon that serves ADDR or MOUNTPOINT, as SIGTERM does: sessions end, what it mounts is unmounted, and the
cache is left in order. A daemon that serves several datasets is left alone, unless --all is given.`,
		Example: "  shoal stop unix:///run/shoal/feed.sock",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			raw, err := anyStats(c.Context(), c, args[0], &security)
			if err != nil {
				return err
			}
			var s engine.Stats
			if err := json.Unmarshal(raw, &s); err != nil {
				return fmt.Errorf("stats of %s: %w", args[0], err)
			}
			if s.Users > 1 && !all {
				return fmt.Errorf("the daemon of %s serves %d mounts and feeds: unmount the others first (shoal cache ls %s), or end them all with --all", args[0], s.Users, s.CacheDir)
			}
			// The number may be another machine's or container's: the owner of the cache directory here must have it.
			if pid, err := ownerOf(s.CacheDir); err != nil || pid != s.PID {
				return fmt.Errorf("the daemon of %s (pid %d, cache directory %s) is not one of this machine and user: end it where it runs", args[0], s.PID, s.CacheDir)
			}
			if err := syscall.Kill(s.PID, syscall.SIGTERM); err != nil {
				return fmt.Errorf("end the daemon of %s (pid %d): %w", args[0], s.PID, err)
			}
			for deadline := time.Now().Add(wait); running(s.PID); time.Sleep(20 * time.Millisecond) {
				if time.Now().After(deadline) {
					return fmt.Errorf("the daemon of %s (pid %d) has not ended within %s; see its log", args[0], s.PID, wait)
				}
				if err := c.Context().Err(); err != nil {
					return err
				}
			}
			return nil
		},
	}
	security.add(c)
	c.Flags().BoolVar(&all, "all", false, "end it with all that it serves")
	c.Flags().DurationVar(&wait, "wait", 30*time.Second, "how long to wait for the daemon")
	return c
}

// ownerOf returns the process that listens on a cache directory's socket, as this process numbers it.
func ownerOf(cacheDir string) (pid int, err error) {
	conn, err := dialUnix(filepath.Join(cacheDir, socketName))
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var failure error
	if err := raw.Control(func(fd uintptr) { cred, failure = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if failure != nil {
		return 0, failure
	}
	return int(cred.Pid), nil
}
