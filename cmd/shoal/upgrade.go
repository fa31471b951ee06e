package main

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/settings"
	"github.com/shoalfs/shoal/prefetch/engine"
)

func upgradeCommand() *cobra.Command {
	const result = "result" // asks the new daemon how it went
	c := &cobra.Command{
		Use:   "upgrade MOUNTPOINT",
		Short: "Replace a mount's daemon with the program that is now installed; files stay open",
		Long: `Starts the program now installed at the daemon's path, with the daemon's settings, and hands it all of the daemon's
mounts. Files stay open, and reads wait while the new process opens the cache. If it does not start, the old process
goes on, and this fails. From then on the daemon is restarted if it dies, as with --daemon=supervised.

Feeds and S3 endpoints end as when the daemon is stopped, and return with the new process; clients reconnect. A plan that
is being written is lost: its writer gets an error. Mounts over io_uring, or on Linux before 6.9, cannot be taken over
(see --fuse-transport of shoal mount).`,
		Example: "  shoal upgrade /mnt/train",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 2 && args[1] == result && invocationOf(c.Context()).attached() {
				return nil
			}
			return cobra.ExactArgs(1)(c, args)
		},
		RunE: func(c *cobra.Command, args []string) error {
			inv := invocationOf(c.Context())
			if inv.attached() && len(args) == 2 {
				return upgraded(inv)
			} else if inv.attached() {
				return upgradeSelf(c.Context(), inv)
			}
			err := askMount(c.Context(), args[0], c.OutOrStdout(), "upgrade", "this")
			if errors.Is(err, daemon.ErrEnding) {
				return askNext(c.Context(), upgradePatience, args[0], c.OutOrStdout(), "upgrade", "this", result)
			}
			return err
		},
	}
	settings.Without(c)
	return c
}

// upgradePatience is how long a mount is waited for once its daemon has ended. After half of it nothing holds it.
const upgradePatience = time.Minute

// upgraded says which process this is, or why it is not of the new program.
func upgraded(inv *invocation) error {
	if failed := daemon.RenewalFailed(); failed != "" {
		return fmt.Errorf("the new program did not serve, and the old one (%s) goes on, as pid %d: %s",
			version, os.Getpid(), failed)
	}
	inv.Notice("shoal %s serves, as pid %d", version, os.Getpid())
	return nil
}

// renewing is locked while this process is being replaced, and by services that end, which do neither at once.
var renewing sync.RWMutex

// upgradeSelf replaces this process. It does not return, but with an error.
func upgradeSelf(ctx context.Context, inv *invocation) error {
	renewing.Lock()
	defer renewing.Unlock()
	services.Lock()
	defer services.Unlock()
	if err := cmp.Or(renewable(services.all), daemon.Renewable()); err != nil {
		return err
	}
	program := daemon.Program()
	trying, cancel := context.WithTimeoutCause(ctx, daemon.Long, // a busy machine takes long to load a program
		fmt.Errorf("no answer to `version` in %s", daemon.Long))
	defer cancel()
	trial := exec.CommandContext(trying, program, "version")
	trial.WaitDelay = time.Second // what it has started may hold its output
	says, err := trial.Output()
	if err = cmp.Or(context.Cause(trying), err); err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		return fmt.Errorf("%s does not run: %w (install a program that does; the daemon goes on)", program, err)
	}
	inv.Notice("replacing shoal %s, pid %d, by %s (%s)", version, os.Getpid(), program, strings.TrimSpace(string(says)))
	beforeEnd(inv.host)
	return daemon.Renew(again())
}

// beforeEnd ends feeds and endpoints, and writes what is not on disk yet. services is locked.
func beforeEnd(h *engine.Host) {
	ending, cancel := context.WithTimeout(context.Background(), daemon.DrainTime())
	defer cancel()
	var doors sync.WaitGroup
	for _, s := range services.all {
		if s.endDoors != nil {
			doors.Go(func() { s.endDoors(ending) })
		}
	}
	doors.Wait()
	saved := make(chan struct{})
	go func() { _ = h.Cache.Sync(); close(saved) }()
	select {
	case <-saved: // what is not will be fetched again
	case <-ending.Done():
	}
	limiter.Flush()
}

// handOn ends this process if a keeper has its mounts, for a successor. Otherwise it returns: they must be unmounted.
func handOn(h *engine.Host) {
	if !daemon.Kept() {
		return
	}
	renewing.Lock()
	defer renewing.Unlock()
	services.Lock()
	defer services.Unlock()
	if len(services.all) == 0 {
		return
	}
	for _, s := range services.all {
		if s.mounted != nil && s.mounted.server.Kept() != nil {
			return
		}
	}
	slog.Info("this process ends, and its mounts wait for the next one")
	beforeEnd(h)
	os.Exit(0)
}

// renewable returns why a process with these services cannot be replaced.
func renewable(all []*service) error {
	first := false
	for _, s := range all {
		own := !s.inv.attached()
		first = first || own
		switch {
		case s.endDoors == nil:
			return fmt.Errorf("the daemon is still starting to serve %s (run this again)", s.config.Source)
		case s.mounted != nil:
			if err := s.mounted.server.Kept(); err != nil {
				return fmt.Errorf("the mount %s cannot be taken over: %w", s.mountpoint, err)
			}
		case !own:
			return fmt.Errorf(
				"what was added to the daemon for %s would end with it, as it has no mount (stop it first)",
				s.config.Source)
		}
	}
	if !first {
		return errors.New("the verb that started the daemon has ended, and cannot be resumed (unmount what is left, " +
			"and mount it again)")
	}
	return nil
}

// verbNote is what the note of an attached verb's mount has: what runs it again. It has the client's secrets.
type verbNote struct {
	Args []string
	Dir  string
	Env  map[string]string
}

// holderFor returns who holds a verb's mount, and the note. A verb whose client waits for it ends with this process.
func holderFor(inv *invocation) (h fusefs.Holder, note []byte, err error) {
	if !inv.attached() {
		return daemon.Holder{}, nil, nil
	}
	if inv.verb == nil || !inv.verb.Detached {
		return nil, nil, nil
	}
	note, err = json.Marshal(verbNote{inv.verb.Args, inv.verb.Dir, inv.verb.Env})
	return daemon.Holder{}, note, err
}

// replay runs the attached verbs of the predecessor whose mounts are held.
func (o *owner) replay(ctx context.Context) {
	for _, memo := range (daemon.Holder{}).Inherited() {
		var n verbNote
		if m, _, err := fusefs.ReadMemo(memo); err == nil && json.Unmarshal(m.Note, &n) == nil {
			o.replayed[m.Mountpoint] = o.answers.Start(ctx, n.Args, n.Dir, n.Env)
		}
	}
}

// pastVersions returns the versions of a source, or of all if that is "", that the kernel may know of held mounts.
func pastVersions(source string) (names []string) {
	for _, memo := range (daemon.Holder{}).Inherited() {
		m, words, err := fusefs.ReadMemo(memo)
		for _, w := range words {
			if err == nil && (source == "" || m.Source == source) && w.Version != "" {
				names = append(names, w.Version)
			}
		}
	}
	return names
}

// again is what makes another process do the same as this one.
func again() daemon.Again {
	args := base64.StdEncoding.EncodeToString(
		[]byte(strings.Join(os.Args[1:], "\x00") + "\x01" + strings.Join(selfArgs, "\x00")))
	return daemon.Again{Args: os.Args[1:], Env: []string{argsEnv + "=" + args}}
}
