package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/internal/daemon"
)

func stopCommand() *cobra.Command {
	var all bool
	var wait time.Duration
	var security clientSecurity
	c := &cobra.Command{
		Use:   "stop [ADDR|MOUNTPOINT|CACHE-DIR]",
		Short: "Stop a feed or a daemon on this machine, and wait until the cache is closed",
		Long: `Stops the daemon that serves ADDR or MOUNTPOINT, or uses CACHE-DIR, as SIGTERM does: sessions end, its mounts are
unmounted, and the cache is closed. If the daemon serves several mounts and feeds, only that feed stops, unless --all is
given, which CACHE-DIR then needs. Without an argument it takes the only daemon on this machine that has a mount or
serves the default feed.`,
		Example: "  shoal stop unix:///run/shoal/feed.sock",
		RunE: func(c *cobra.Command, args []string) error {
			if invocationOf(c.Context()).attached() { // the verb itself has printed it
				return stopServing(c.Context(), args[0], wait)
			}
			target, err := oneDaemon(c.Context(), args, &security)
			if err != nil {
				return err
			}
			if len(args) == 0 {
				daemon.Own.Notice("stopping the daemon of %s", target)
			}
			s, err := parseStats[admin.Snapshot](anyStats(c.Context(), target, &security))
			if err != nil && strings.HasPrefix(err.Error(), servesNothing) {
				s.PID, s.CacheDir = daemon.OfCache(target).PID(), target
			} else if err != nil {
				return err
			}
			one := s.Users > 1 && !all
			m, err := fusefs.At(target)
			dir := err == nil && m == nil && !strings.Contains(target, "://") // of the cache: it names none of them
			if one && (dir || s.Feed == nil || len(s.Feed.Listen) == 0) {
				at := target
				if dir {
					at = "MOUNTPOINT"
				}
				return fmt.Errorf("the daemon of %s serves %d mounts, feeds and S3 endpoints: unmount one with `shoal "+
					"umount %s`, end a feed with `shoal stop ADDR`, or stop all with --all", target, s.Users, at)
			}
			// The number may be another machine's or container's: it must own the cache directory here.
			if pid := daemon.OfCache(s.CacheDir).PID(); pid == 0 || pid != s.PID {
				return fmt.Errorf("the daemon of %s (pid %d, cache directory %s) is not one of this machine and "+
					"user: stop it where it runs", target, s.PID, s.CacheDir)
			}
			if one {
				return attach(c.Context(), s.CacheDir, []string{"stop", s.Feed.Listen[0], "--wait", wait.String()}, nil,
					c.OutOrStdout())
			}
			if err := syscall.Kill(s.PID, syscall.SIGTERM); err != nil {
				return fmt.Errorf("end the daemon of %s (pid %d): %w", target, s.PID, err)
			}
			if !daemon.Gone(c.Context(), s.PID, wait) && c.Context().Err() == nil {
				return fmt.Errorf("the daemon of %s (pid %d) has not ended within %s; see its log", target, s.PID, wait)
			}
			return c.Context().Err()
		},
	}
	security.add(c)
	c.Flags().BoolVar(&all, "all", false, "stop the whole daemon with everything that it serves")
	c.Flags().DurationVar(&wait, "wait", 30*time.Second, "how long to wait for the daemon")
	return c
}

// stopServing ends one feed of this daemon, with the mount beside it, and waits for it.
func stopServing(ctx context.Context, addr string, wait time.Duration) error {
	services.Lock()
	i := slices.IndexFunc(services.all, func(s *service) bool { return s.feed != nil && s.addrs[0] == addr })
	if i < 0 {
		services.Unlock()
		return fmt.Errorf("nothing is served at %s any longer", addr)
	}
	s := services.all[i]
	services.Unlock()
	s.cancel()
	select {
	case <-s.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(wait):
		return fmt.Errorf("the feed at %s has not ended within %s; see the daemon's log", addr, wait)
	}
}
