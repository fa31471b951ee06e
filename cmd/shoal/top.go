package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/findings"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/internal/progress"
)

func topCommand() *cobra.Command {
	var security clientSecurity
	w := watch{interval: time.Second}
	c := &cobra.Command{
		Use:   "top [MOUNTPOINT|ADDR|ADMIN-URL]",
		Short: "Watch a daemon live: is the GPU waiting, and for what",
		Long: `Shows once a second whether the trainer waits and for what, how far ahead of it Shoal is, throughput, where reads
were served from, sessions and errors, as shoal stat --watch does. The target is a mount, a feed's address (unix:///…,
tcp://…, tls://…) or an admin address (http://HOST:PORT). Without an argument it takes the only daemon on this machine that has
a mount or serves the default feed.

Ctrl-C ends it. If the output is not a terminal, it prints one frame.`,
		Example: `  shoal top
  shoal top /mnt/train
  shoal top http://127.0.0.1:7071
  shoal top unix:///run/shoal/feed.sock --once`,
		RunE: func(c *cobra.Command, args []string) (err error) {
			if w.target, err = oneDaemon(c.Context(), args, &security); err != nil {
				return err
			}
			return w.run(c, &security)
		},
	}
	security.add(c)
	w.add(c.Flags())
	c.Flags().BoolVar(&w.once, "once", false, "print one frame and exit")
	return c
}

// watch shows what a daemon does now, again and again.
type watch struct {
	target   string
	interval time.Duration
	once     bool
}

func (w *watch) add(f *pflag.FlagSet) {
	f.DurationVar(&w.interval, "interval", w.interval, "time between frames")
}

// run fails if the first request does. Later ones are tried again.
func (w *watch) run(c *cobra.Command, security *clientSecurity) error {
	if w.interval < 100*time.Millisecond {
		return cli.Usagef("--interval %v: give at least 100ms", w.interval)
	}
	ctx, out := c.Context(), c.OutOrStdout()
	before, err := parseStats[admin.Snapshot](anyStats(ctx, w.target, security))
	if err != nil {
		return err
	}
	live := progress.Terminal(out) && !w.once
	if live {
		fmt.Fprint(out, "\x1b[2J")
	}
	for {
		if pause.For(ctx, w.interval) != nil {
			return nil //nolint:nilerr // Ctrl-C is how it ends
		}
		var frame bytes.Buffer
		now, err := parseStats[admin.Snapshot](anyStats(ctx, w.target, security))
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // Ctrl-C is how it ends
		case err != nil && !live:
			return err
		case err != nil:
			fmt.Fprintf(&frame, "%v\nasking again ...\n", err)
		default:
			printFrame(&frame, before, now)
			before = now
		}
		text := cli.Printable(frame.String())
		if !live {
			_, err := io.WriteString(out, text)
			return err
		}
		if size, err := unix.IoctlGetWinsize(int(out.(*os.File).Fd()), unix.TIOCGWINSZ); err == nil {
			text = fit(text, int(size.Row), int(size.Col))
		}
		// What is there is written over, so that nothing flickers.
		if _, err := fmt.Fprintf(out, "\x1b[H%s\x1b[J", strings.ReplaceAll(text, "\n", "\x1b[K\n")); err != nil {
			return err
		}
	}
}

// printFrame says what happened between two snapshots, and the totals.
func printFrame(w io.Writer, before, now *admin.Snapshot) {
	v := findings.Of(before.Snapshot, now.Snapshot)
	fmt.Fprint(w, findings.Text(append([]findings.Finding{v.Finding}, v.Notes...)))
	r := v.Rates
	fmt.Fprintf(w, "%-10s %.0f samples/s; the trainer waits %s of the time; the store brings %s/s in %.0f "+
		"requests/s; %s ahead (%.1f s)\n", "now", r.Samples,
		human.Percent(r.Stall), human.Bytes(int64(r.Bytes)), r.Requests, human.Count(r.Lead, "sample"), r.LeadSeconds)
	for _, p := range now.Streams {
		fmt.Fprintf(w, "%-10s %s, epoch %d: %s of %s, %s ahead, %d in flight\n", "  reader", p.Name, p.Epoch,
			human.Number(p.Position), human.Number(p.Len), human.Count(p.Lead, "sample"), p.InFlight)
	}
	printStats(w, now)
}

// fit leaves out a text's last lines where a terminal, whose last row is the cursor's, would lose the first ones.
func fit(text string, rows, columns int) string {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	used, kept := 0, 0
	for i, line := range lines {
		used += 1 + max(0, utf8.RuneCountInString(line)-1)/max(1, columns)
		if used <= rows-2 {
			kept = i + 1
		}
	}
	if rows == 0 || used < rows { // 0: not known
		return text
	}
	return fmt.Sprintf("%s\n... and %s more: shoal stat shows all\n", strings.Join(lines[:kept], "\n"),
		human.Count(len(lines)-kept, "line"))
}

// oneLine is a name, or a text that has some, as a part of a line.
func oneLine(text string) string { return strings.ReplaceAll(cli.Printable(text), "\n", "·") }

func fromAdmin(ctx context.Context, base, page string) ([]byte, error) {
	const remedy = "give the daemon's --admin address"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(base, "/")+page, nil)
	if err != nil {
		return nil, cli.Usagef("%w (%s)", err, remedy)
	}
	transport := &http.Transport{} // without the environment's proxy
	defer transport.CloseIdleConnections()
	since := time.Now()
	resp, err := (&http.Client{Transport: transport}).Do(req)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return nil, daemon.Unanswered(base, since)
	case err != nil:
		return nil, fmt.Errorf("%w (%s)", err, remedy)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	switch why := bytes.TrimSpace(body); {
	case err != nil:
	case resp.StatusCode == http.StatusServiceUnavailable: // it says why
		err = fmt.Errorf("%s: %.200s", base, why)
	case resp.StatusCode != http.StatusOK:
		err = fmt.Errorf("%s answers %s: %.200s (%s)", req.URL, resp.Status, why, remedy)
	}
	return body, err
}
