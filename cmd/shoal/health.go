package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/pause"
)

// defaultFeed is shoal serve's default address: where only root can write, or in the folder of the user's session.
var defaultFeed = func() string {
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" && os.Geteuid() != 0 {
		return "unix://" + dir + "/shoal/feed.sock"
	}
	return rootsFeed
}()

const rootsFeed = "unix:///run/shoal/feed.sock"

func healthCommand() *cobra.Command {
	var wait, timeout time.Duration
	var security clientSecurity
	c := &cobra.Command{
		Use:   "health [MOUNTPOINT|ADDR ...]",
		Short: "Check whether mounts and feeds answer, for probes and scripts",
		Long: `Exits 0 if all targets answer: for a mount point its daemon, through a socket; for a feed's address (unix://, tcp://,
tls://) the gRPC health protocol; for an admin address (http://HOST:PORT) /readyz. A starting or draining daemon is not
healthy. Without targets it checks all Shoal mounts that it finds, and serve's default feed if its socket exists.

With --wait it retries until all answer: for a trainer that may start before its data is ready.`,
		Example: `  shoal health /mnt/train unix:///run/shoal/feed.sock
  shoal health /mnt/train --wait 60s && python3 train.py`,
		RunE: func(c *cobra.Command, targets []string) error {
			if timeout <= 0 {
				return cli.Usagef("--timeout %s: give a duration such as 5s", timeout)
			}
			for began := time.Now(); ; {
				asked, err := health(c.Context(), targets, timeout, &security)
				if err == nil {
					_, err = fmt.Fprintln(c.OutOrStdout(), "healthy: "+strings.Join(asked, ", "))
					return err
				}
				if wait <= 0 || cli.IsUsage(err) {
					return err
				}
				if err := pause.For(c.Context(), 100*time.Millisecond); err != nil {
					return err
				}
				if time.Since(began) > wait {
					return fmt.Errorf("not healthy after %s: %w", wait, err)
				}
			}
		},
	}
	security.add(c)
	c.Flags().DurationVar(&wait, "wait", 0, "retry until all answer, for at most this long (0: ask once)")
	c.Flags().DurationVar(&timeout, "timeout", 5*time.Second, "how long an answer may take")
	return c
}

// health queries all targets at once. It returns the errors of those that do not answer, in the order given.
func health(ctx context.Context, targets []string, timeout time.Duration, security *clientSecurity) ([]string, error) {
	if len(targets) > 0 {
		return targets, healthOfAll(ctx, targets, timeout, security)
	}
	found, err := foundTargets()
	for err == nil {
		if err = healthOfAll(ctx, found, timeout, security); err != nil {
			break
		}
		// A feed answers once its daemon is up, which may have mounted in the meantime.
		asked := found
		if found, err = foundTargets(); slices.Equal(found, asked) {
			break
		}
	}
	return found, err
}

func healthOfAll(ctx context.Context, targets []string, timeout time.Duration, security *clientSecurity) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	errs := make([]error, len(targets))
	var wg sync.WaitGroup
	for i, target := range targets {
		wg.Go(func() { errs[i] = healthOf(ctx, target, security) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func foundTargets() ([]string, error) {
	mounts, err := fusefs.Mounts()
	if err != nil {
		return nil, err
	}
	targets := pointsOf(mounts)
	if fi, err := os.Lstat(strings.TrimPrefix(defaultFeed, "unix://")); err == nil && fi.Mode()&os.ModeSocket != 0 {
		targets = append(targets, defaultFeed)
	}
	if len(targets) == 0 {
		return nil, fmt.Errorf(
			"no Shoal mount was found, and there is no feed at %s (give a mount point or an address)", defaultFeed)
	}
	return targets, nil
}

func healthOf(ctx context.Context, target string, security *clientSecurity) error {
	since := time.Now()
	switch {
	case strings.HasPrefix(target, "http://"):
		_, err := fromAdmin(ctx, target, "/readyz")
		return err
	case strings.Contains(target, "://"):
		client, err := security.dial(target)
		if err != nil {
			return err
		}
		defer client.Close()
		if err = client.Healthy(ctx); errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = daemon.Unanswered(target, since)
		}
		return err
	}
	_, err := parseStats[struct{}](rawStats(ctx, askMount, target))
	return err
}
