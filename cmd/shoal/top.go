package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/charmbracelet/x/term"
	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/admin/top"
	"github.com/shoalfs/shoal/internal/admin/verdict"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/machine"
)

func topCommand() *cobra.Command {
	var security clientSecurity
	var once bool
	interval := time.Second
	c := &cobra.Command{
		Use:   "top [MOUNTPOINT|ADDR|ADMIN-URL]",
		Short: "Watch a daemon live: is the GPU waiting, and for what",
		Long: `Shows once a second whether the trainer waits and for what, how far ahead of it Shoal is, throughput, where reads
were served from, sessions, the slowest keys, and errors. The target is a mount, a feed's address (unix:///…,
tcp://…, tls://…) or an admin address (http://HOST:PORT). Without an argument it takes the only mount on this machine,
asks if there are several, and takes the default feed if there is none.

Keys: q quits, p pauses, 1 to 4 and tab choose a pane, the arrows scroll it, ? helps.
If the output is not a terminal, it prints one frame as plain text. NO_COLOR is honoured.`,
		Example: `  shoal top
  shoal top /mnt/train
  shoal top http://127.0.0.1:7071
  shoal top unix:///run/shoal/feed.sock --once`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if interval < 100*time.Millisecond {
				return cli.Usagef("--interval %v: give at least 100ms", interval)
			}
			out, onTerminal := c.OutOrStdout().(*os.File)
			onTerminal = onTerminal && term.IsTerminal(out.Fd()) && term.IsTerminal(os.Stdin.Fd())
			target := ""
			if len(args) > 0 {
				target = args[0]
			} else {
				mounts, err := fusefs.Mounts()
				switch {
				case err != nil:
				case len(mounts) == 0:
					target, err = oneDaemon(c.Context(), args, &security)
				default:
					target, err = chooseMount(mounts, onTerminal, os.Stdin, c.ErrOrStderr())
				}
				if err != nil {
					return err
				}
			}
			o := top.Options{Target: target, Interval: interval, Fetch: func(ctx context.Context) (verdict.Snapshot, error) {
				return fetchSnapshot(ctx, target, &security)
			}}
			if once || !onTerminal {
				return top.Once(c.Context(), o, c.OutOrStdout(), terminalWidth(out))
			}
			return top.Run(c.Context(), o, os.Stdin, out)
		},
	}
	security.add(c)
	c.Flags().BoolVar(&once, "once", false, "print one frame as plain text and exit")
	c.Flags().DurationVar(&interval, "interval", interval, "time between frames")
	return c
}

// terminalWidth is the width of the terminal, or $COLUMNS, or a default that shows everything important.
func terminalWidth(out *os.File) int {
	if out != nil {
		if w, _, err := term.GetSize(out.Fd()); err == nil && w > 0 {
			return w
		}
	}
	if w, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && w >= 20 {
		return w
	}
	return 120
}

func fetchSnapshot(ctx context.Context, target string, security *clientSecurity) (s verdict.Snapshot, err error) {
	raw, err := anyStats(ctx, target, security)
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return s, fmt.Errorf("stats of %s: %w", target, err)
	}
	return s, nil
}

// adminStats queries an admin address.
func adminStats(ctx context.Context, target string) ([]byte, error) {
	const remedy = "give the daemon's --admin address"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(target, "/")+"/stats", nil)
	if err != nil {
		return nil, fmt.Errorf("%w (%s)", err, remedy)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("%w (%s)", err, remedy)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answers %s: %.200s (%s)", req.URL, resp.Status, bytes.TrimSpace(body), remedy)
	}
	return body, err
}

// chooseMount returns the only mount, or the user's choice.
func chooseMount(mounts []machine.Mount, ask bool, in io.Reader, out io.Writer) (string, error) {
	switch {
	case len(mounts) == 1:
		return mounts[0].Point, nil
	case !ask:
		return "", cli.Usagef("%d mounts found; name one (%s)", len(mounts), strings.Join(pointsOf(mounts), ", "))
	}
	for i, m := range mounts {
		fmt.Fprintf(out, "%d  %s  (%s)\n", i+1, m.Point, m.Source)
	}
	fmt.Fprintf(out, "which one, 1 to %d? ", len(mounts))
	line, err := bufio.NewReader(in).ReadString('\n')
	if err != nil {
		return "", cli.Usagef("no answer (give a mount point)")
	}
	n, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil || n < 1 || n > len(mounts) {
		return "", cli.Usagef("%q is none of 1 to %d", strings.TrimSpace(line), len(mounts))
	}
	return mounts[n-1].Point, nil
}
