package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/machine"
	"github.com/shoalfs/shoal/internal/shortcut"
	"github.com/shoalfs/shoal/prefetch/engine"
)

type mountOptions struct {
	kernelCache string
	transport   string
	allowOther  bool
	made        bool // the mount point was not there
}

func (o *mountOptions) add(c *cobra.Command) {
	f := c.Flags()
	addChoice(f, &o.kernelCache, "kernel-cache", "keep file pages in the kernel's cache between opens: auto (if the "+
		"dataset fits half of the available memory), on, off", "auto", "on", "off")
	addChoice(f, &o.transport, "fuse-transport", "how requests come from the kernel: uring (io_uring, Linux 6.14, "+
		"switched on by root), dev (/dev/fuse), auto (uring if possible and files are small)", fusefs.TransportAuto,
		fusefs.TransportURing, fusefs.TransportDev)
	f.BoolVar(&o.allowOther, "allow-other", false, "let other users read the mount")
}

// check checks the flags, and whether mountpoint will do. It returns its absolute path; "" means no mount.
func (o *mountOptions) check(inv *invocation, eo *engineOptions, mountpoint string) (string, error) {
	if mountpoint == "" {
		return "", nil
	}
	if strings.Contains(mountpoint, "://") {
		return "", cli.Usagef("mount point %s is a URL, not a folder (shoal mount SOURCE FOLDER)", mountpoint)
	}
	path, err := inv.abs(mountpoint)
	if err != nil {
		return "", err
	}
	m, err := fusefs.At(path)
	if err == nil && m != nil && (daemon.Holder{}).Has(m.Point) {
		path = m.Point
	}
	if (daemon.Holder{}).Has(path) {
		return path, nil // this process will serve it, so it must not wait for it
	}
	// If the daemon of a mount there hangs, so do the checks below.
	if err == nil && m != nil {
		ctx, cancel := context.WithTimeout(context.Background(), daemon.Patience)
		defer cancel()
		if err := daemon.Ask(ctx, asMount(m), []string{"stat"}, nil, io.Discard); errors.As(err, new(daemon.Silence)) {
			return "", fmt.Errorf("mount point %s: %w", path, err)
		}
	}
	if err := eo.cacheOutside(path, "the mount point", "would be hidden by the mount"); err != nil {
		return "", err
	}
	if eo.folder != "" && within(path, eo.folder) {
		return "", cli.Usagef("the mount point %s lies in the source %s and would be listed with it (mount elsewhere)",
			path, eo.folder)
	}
	// A dead mount, which will be replaced, exists but cannot be inspected.
	err = os.Mkdir(path, 0o755)
	if o.made = err == nil; err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("mount point: %w (its parent folder must exist, and be writable for you)", err)
	}
	return path, fusefs.Check(path)
}

func mountCommand() *cobra.Command {
	var eo engineOptions
	s := service{options: &eo}
	c := &cobra.Command{
		Use:   "mount SOURCE MOUNTPOINT",
		Short: "Mount a dataset as a filesystem that reads ahead in the order of the epoch",
		Long: `Mounts SOURCE at MOUNTPOINT, an empty folder, which is created if missing. SOURCE is s3://bucket/prefix, file:///dir, or
tar shards (a prefix that holds a set, or s3://bucket/p/shard-{000000..000127}.tar), whose members appear as the original
tree. If a daemon already uses --cache-dir, that daemon serves this mount too. Endpoint and credentials come from
the settings of the AWS tools (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_PROFILE, ...).

Control files, not listed in the mount: .shoal/stats, .shoal/order, .shoal/plan, .shoal/plans/NAME, .shoal/refresh, .shoal/profile.`,
		Example: `  # an unmodified ImageFolder + DistributedSampler(seed=7) will read this
  shoal mount s3://photos/train /mnt/train --cache-dir /nvme/shoal --order torch:seed=7 --daemon
  # give the order while mounted
  shuf files.txt > /mnt/train/.shoal/plan`,
		RunE: func(c *cobra.Command, args []string) error {
			if args[1] == "" {
				return cli.Usagef("the MOUNTPOINT is empty: give a folder %s", cli.SeeHelp(c))
			}
			return s.start(c, args[0], args[1])
		},
	}
	eo.add(c)
	s.mount.add(c)
	c.Flags().StringVar(&eo.data.Publish, "publish", "",
		"pack the dataset to this destination once one pass over it is complete")
	eo.s3.add(c.Flags(), "s3", alsoS3, nil)
	return c
}

type mounted struct {
	server  *fusefs.Server
	path    string
	audit   *audit.Log
	door    *door
	others  bool   // may read it
	forget  func() // the dataset's changes
	unheard func() // ends the answers on the mount's socket
}

// drain unmounts it, as files are closed. renewing is locked by the caller.
func (m *mounted) drain(d *daemon.Drain, gone <-chan struct{}) error {
	err := d.Mount(m.server, m.path, gone)
	if errors.Is(err, daemon.ErrHeld) {
		renewing.RUnlock() // meanwhile this process may be replaced, and others end
		err = d.Outlast(m.path, gone)
		renewing.RLock()
	}
	if errors.Is(err, daemon.ErrHeld) {
		m.audit.Write(audit.Event{Event: "unmount", Outcome: "failed", Cause: err.Error()})
	}
	return err
}

func (m *mounted) left() {
	m.unheard()
	m.forget()
	shortcuts.Delete(m.door.shortcut.Key())
	m.door.shortcut.Close()
	m.audit.Write(audit.Event{Event: "unmount"})
}

// readAhead returns the kernel's read-ahead to set. The kernel also reads that much around each page of a memory map
// that is touched. In large files most of that would be fetched for nothing; in small ones it is all of the file.
func readAhead(m *catalog.Manifest) int {
	if m.Bytes() > int64(m.Len())*cache.ExtentSize {
		return 64 << 10
	}
	return 512 << 10
}

// ringShare: a mount's rings, which no account has, may take the address space of this part of the data's memory.
const ringShare = 4

func mountEngine(inv *invocation, h *engine.Host, e *engine.Engine, mo *mountOptions, mountpoint string,
	cfg engine.Config, snapshot func() admin.Snapshot) (*mounted, error) {
	keep := mo.kernelCache == "on" ||
		mo.kernelCache == "auto" && e.Manifest().Bytes() <= machine.ReadMemory().Available/2
	door := &door{Engine: e, snapshot: snapshot}
	// Each process that uses the mount is a peer of its own, so the events have no common peer.
	events := h.Audit().With(audit.Event{Source: e.Source(), Mountpoint: mountpoint})
	witness := newMountWitness(events)
	door.shortcut = shortcut.New(e, func(p *audit.Peer) {
		if witness != nil {
			witness.Opening(fusefs.Caller{Thread: uint32(p.PID), UID: uint32(*p.UID), GID: uint32(*p.GID)})
		}
	})
	mount := audit.Event{Event: "mount", Dataset: e.Manifest().Version(), Order: cfg.Order.String(), Peer: inv.who()}
	e.MountedAt(mountpoint)
	if !(daemon.Holder{}).Has(mountpoint) { // which has no links, and would wait for this process
		e.MountedAt(objstore.RealPath(mountpoint))
	}
	holder, note, err := holderFor(inv)
	if err != nil {
		return nil, err
	}
	transport := mo.transport
	if transport == fusefs.TransportAuto && daemon.Kept() { // no process can take over a ring
		transport = fusefs.TransportDev
	}
	server, err := fusefs.Mount(mountpoint, door, door, fusefs.Options{
		KernelCache: keep, AllowOther: mo.allowOther, UID: uint32(os.Getuid()), GID: uint32(os.Getgid()),
		ReadAhead: readAhead(e.Manifest()), Transport: transport, FsName: e.Source(), Memory: door, Witness: witness,
		RingMemory: int(e.Cache().Ledger().Limit() / ringShare), Logger: e.Logger(), Holder: holder, Note: note,
	})
	events.Write(outcome(mount, err))
	if err != nil {
		return nil, err
	}
	e.MountedOver(func() string { return server.Transport().String() })
	forget := e.OnMoved(func(dropped []int) { server.Invalidate(dropped); door.shortcut.Moved() })
	shortcuts.Store(door.shortcut.Key(), door.shortcut)
	m := &mounted{server: server, path: mountpoint, audit: events, door: door, others: mo.allowOther, forget: forget}
	m.unheard = m.answerFor(h, e.Logger())
	return m, nil
}

func umountCommand() *cobra.Command {
	var lazy, atExit bool
	var wait time.Duration
	c := &cobra.Command{
		Use:   "umount [MOUNTPOINT]",
		Short: "Unmount, and wait until the daemon has closed the cache",
		Long: `Unmounts MOUNTPOINT, or the only mount on this machine, and waits until the daemon has closed the cache. With --at-exit
it waits for SIGTERM first and then detaches a mount that a killed daemon left at MOUNTPOINT, for a container that
ends after the daemon's (docs/kubernetes.md).`,
		Example: "  shoal umount /mnt/train",
		RunE: func(c *cobra.Command, args []string) error {
			if atExit {
				if len(args) == 0 {
					return cli.Usagef("--at-exit: name the MOUNTPOINT; there may be no mount yet")
				}
				fmt.Fprintf(c.ErrOrStderr(), "waiting for SIGTERM, to detach what is left at %s\n", args[0])
				<-c.Context().Done()
				for { // a dead daemon and its successor leave one mount each, and none is fine, too
					if err := fusefs.Unmount(args[0], true); errors.Is(err, fusefs.ErrNotMounted) {
						return nil
					} else if err != nil {
						return err
					}
				}
			}
			mountpoint, err := oneMount(args)
			if err != nil {
				return err
			}
			if len(args) == 0 {
				daemon.Own.Notice("unmounting %s", mountpoint)
			}
			pid, device := 0, "" // of the daemon to wait for; a dead mount has none
			if m, err := fusefs.At(mountpoint); err == nil && m != nil {
				pid, device = asMount(m).PID(), m.Device // it need not answer: perhaps it is ending
			}
			stats, silent := parseStats[engine.Stats](rawStats(c.Context(), askMount, mountpoint))
			if err := c.Context().Err(); err != nil { // the user does not wait for it
				return err
			}
			// else it is another container's number
			if pid == 0 && stats.PID != 0 && daemon.OfCache(stats.CacheDir).PID() == stats.PID {
				pid = stats.PID
			}
			of, hangs := errors.AsType[daemon.Silence](silent)
			if hangs && fusefs.HasRing(pid) {
				return fmt.Errorf("%s is not detached, which over io_uring waits for its daemon: %w", mountpoint, of)
			}
			if err := fusefs.Unmount(mountpoint, lazy || hangs); err != nil {
				return err
			}
			if of.Then = ""; hangs {
				return fmt.Errorf("%s is detached, but %w", mountpoint, of)
			}
			if at := fusefs.Place(device); at != "" && pid > 0 && asMount(&machine.Mount{Device: device}).PID() == pid {
				return fmt.Errorf("%s is unmounted, but its daemon goes on: the mount is at %s, too (shoal umount %s)",
					mountpoint, at, human.Shell(at)) // else another mount got the device's number meanwhile
			}
			if pid != 0 && stats.Users > 1 { // the daemon still has other mounts
				return waitUsers(c.Context(), stats.CacheDir, stats.Users, wait)
			}
			if pid != 0 && !daemon.Gone(c.Context(), pid, wait) && c.Context().Err() == nil {
				if who := fusefs.Copies(device); device != "" && who != "" {
					return fmt.Errorf("%s is unmounted, but its daemon (pid %d) goes on: other mount namespaces have "+
						"copies of the mount, those of %s "+
						"(end them, or: nsenter -m -t PID umount -l %s)", mountpoint, pid, who, human.Shell(mountpoint))
				}
				return fmt.Errorf("%s is unmounted, but its daemon (pid %d) has not ended within %s; see its log",
					mountpoint, pid, wait)
			}
			return c.Context().Err()
		},
	}
	c.Flags().BoolVarP(&lazy, "lazy", "l", false, "detach at once even if files are open")
	c.Flags().BoolVar(&atExit, "at-exit", false, "wait for SIGTERM, and then detach what is left of mounts there")
	c.Flags().DurationVar(&wait, "wait", 30*time.Second, "how long to wait for the daemon")
	return c
}

// waitUsers waits until a daemon has fewer mounts and feeds than before.
func waitUsers(ctx context.Context, cacheDir string, before int, wait time.Duration) error {
	defer time.AfterFunc(time.Second, func() {
		daemon.Own.Notice("unmounted; waiting for the daemon of %s to close the dataset", cacheDir)
	}).Stop()
	for deadline := time.Now().Add(wait); ; time.Sleep(20 * time.Millisecond) {
		var out bytes.Buffer
		err := attach(ctx, cacheDir, []string{"cache", "ls", cacheDir, "--json"}, nil, &out)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, daemon.ErrNobody) || errors.Is(err, daemon.ErrEnding):
			return nil // it has ended altogether
		case err != nil:
			return err
		}
		var entries []cacheEntry
		if err := json.Unmarshal(out.Bytes(), &entries); err != nil {
			return fmt.Errorf("the daemon of %s: %w", cacheDir, err)
		}
		users := 0
		for _, e := range entries {
			users += e.Users
		}
		if users < before {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("unmounted, but the daemon of %s has not closed the dataset within %s; see its log",
				cacheDir, wait)
		}
	}
}

func refreshCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "refresh [MOUNTPOINT|CACHE-DIR]",
		Short: "List the source again and switch the mount to the new version",
		Long: "Lists the source again. When it returns, new files are visible, and unchanged files are still " +
			"cached. Run it between epochs: an order in progress starts over. Without an argument it " +
			"takes the only mount on this machine. For a cache directory it lists all sources that its daemon serves.",
		Example: "  shoal refresh /mnt/train",
		RunE: func(c *cobra.Command, args []string) error {
			inv := invocationOf(c.Context())
			if inv.mount != nil {
				return inv.mount.refresh(c.Context(), inv.who(), c.OutOrStdout())
			} else if inv.attached() {
				return inv.host.Refresh(func(e *engine.Engine) error { // what the daemon serves
					return refresh(c.Context(), e, e.Source(), e.Source()+": ", c.OutOrStdout())
				})
			}
			target, err := oneMount(args)
			if err != nil {
				return err
			}
			if m, err := fusefs.At(target); err == nil && m == nil { // no mount that waits for its next daemon
				return askDaemon(c.Context(), target, c.OutOrStdout(), "refresh")
			}
			return askNext(c.Context(), silentPatience, target, c.OutOrStdout(), "refresh") // an upgrade takes a moment
		},
	}
}

// refresh lists a source again, and says what has changed.
func refresh(ctx context.Context, e *engine.Engine, name, label string, out io.Writer) error {
	before := e.Stats()
	if _, err := e.Refresh(ctx); err != nil {
		return fmt.Errorf("refresh %s: %w", name, err)
	}
	if after := e.Stats(); before.Dataset == after.Dataset {
		fmt.Fprintf(out, "%sunchanged: %s, version %.12s\n", label, human.Count(after.Files, "file"), after.Dataset)
	} else {
		fmt.Fprintf(out, "%sversion %.12s -> %.12s: %s, before %d\n",
			label, before.Dataset, after.Dataset, human.Count(after.Files, "file"), before.Files)
	}
	return nil
}

// door adapts the engine to the mount: it is fusefs.Volume and fusefs.Control.
type door struct {
	*engine.Engine
	snapshot func() admin.Snapshot // for the stats; includes the feed if one is served beside the mount
	shortcut *shortcut.Server
}

func (d *door) Get(name string) ([]byte, error) {
	if name != "stats" {
		return d.Engine.Get(name)
	}
	s := d.snapshot()
	s.Shortcut = d.shortcut.Key()
	b, err := json.MarshalIndent(s, "", "  ")
	return append(b, '\n'), err
}

// Reserve and Release implement fusefs.Memory: staged plans count in the ledger too.
func (d *door) Reserve(n int64) bool { return d.Cache().TryReserve(n) }

func (d *door) Release(n int64) { d.Cache().Ledger().Release(n, cache.ForDemand) }

func (d *door) Record() (fusefs.Recording, error) { return d.Engine.Record() }

func (d *door) Refresh(ctx context.Context) error {
	_, err := d.Engine.Refresh(ctx)
	return err
}
