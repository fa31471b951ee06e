package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/engine"
	"github.com/shoalfs/shoal/fusefs"
)

// mountOptions are the flags of the mount itself.
type mountOptions struct {
	kernelCache string
	allowOther  bool
	uid, gid    uint32
	umask       uint32
	readAhead   size
	timeout     time.Duration
	debug       bool
}

func (o *mountOptions) add(c *cobra.Command) {
	o.readAhead = 512 << 10
	f := c.Flags()
	f.StringVar(&o.kernelCache, "kernel-cache", "auto", "keep file pages in the kernel's cache between opens: auto (if the dataset fits half of the available memory), on, off")
	f.BoolVar(&o.allowOther, "allow-other", false, "let other users read the mount")
	f.Uint32Var(&o.uid, "uid", uint32(os.Getuid()), "owner of the files shown")
	f.Uint32Var(&o.gid, "gid", uint32(os.Getgid()), "group of the files shown")
	f.Var((*octal)(&o.umask), "umask", "permission bits to clear, octal")
	f.Var(&o.readAhead, "read-ahead", "the kernel's read-ahead on the mount")
	f.DurationVar(&o.timeout, "entry-timeout", 4*time.Hour, "how long the kernel may trust names and attributes")
	f.BoolVar(&o.debug, "debug-fuse", false, "log every FUSE message")
}

func (o *mountOptions) check() error {
	if !slices.Contains([]string{"auto", "on", "off"}, o.kernelCache) {
		return usagef("--kernel-cache %q: give auto, on or off", o.kernelCache)
	}
	return nil
}

func mountCommand() *cobra.Command {
	var eo engineOptions
	var mo mountOptions
	c := &cobra.Command{
		Use:   "mount SOURCE MOUNTPOINT",
		Short: "Mount a dataset as a filesystem that reads ahead in the order of the epoch",
		Long: `Mounts SOURCE (s3://bucket/prefix or file:///dir) at MOUNTPOINT, an empty folder. Endpoint and
credentials are taken as the AWS tools take them (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_PROFILE, ...).

In the mount, by name only: .shoal/stats, .shoal/order, .shoal/plan, .shoal/plans/NAME, .shoal/refresh.`,
		Example: `  # an unmodified ImageFolder + DistributedSampler(seed=7) will read this
  shoal mount s3://photos/train /mnt/train --cache-dir /nvme/shoal --order torch:seed=7 --daemon
  # tell the order while mounted
  shuf files.txt > /mnt/train/.shoal/plan`,
		Args: cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			cfg, err := eo.config(args[0])
			if err != nil {
				return err
			}
			if err := mo.check(); err != nil {
				return err
			}
			if err := fusefs.Check(args[1]); err != nil {
				return err
			}
			if parent, err := background(&eo); parent {
				return err
			}
			return runMount(c.Context(), cfg, &eo, &mo, args[1])
		},
	}
	eo.add(c)
	mo.add(c)
	return c
}

// runMount mounts and serves until the context ends or somebody unmounts.
func runMount(ctx context.Context, cfg engine.Config, eo *engineOptions, mo *mountOptions, mountpoint string) (err error) {
	e, err := openEngine(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	stopAdmin, err := startAdmin(eo.admin, e)
	if err != nil {
		return err
	}
	defer stopAdmin()
	m, err := mountEngine(e, mo, mountpoint, cfg)
	if err != nil {
		return err
	}
	cfg.Logger.Info("mounted", "source", e.Source(), "mountpoint", mountpoint)
	ready()
	return m.serve(ctx)
}

// mounted is a mount of an engine.
type mounted struct {
	server *fusefs.Server
	cfg    engine.Config
}

func mountEngine(e *engine.Engine, mo *mountOptions, mountpoint string, cfg engine.Config) (*mounted, error) {
	if err := mo.check(); err != nil {
		return nil, err
	}
	keep := mo.kernelCache == "on" || mo.kernelCache == "auto" && e.Manifest().Bytes() <= availableMemory()/2
	door := &door{Engine: e}
	server, err := fusefs.Mount(mountpoint, door, door, fusefs.Options{
		KernelCache: keep, AllowOther: mo.allowOther, UID: mo.uid, GID: mo.gid, Umask: mo.umask,
		EntryTimeout: mo.timeout, AttrTimeout: mo.timeout, ReadAhead: int(mo.readAhead), Debug: mo.debug,
		FsName: e.Source(), Memory: door, Logger: e.Logger(),
	})
	if err != nil {
		return nil, err
	}
	door.server.Store(server)
	return &mounted{server, cfg}, nil
}

// unmountPatience is how long a mount that is in use is waited for before it is detached lazily.
const unmountPatience = 3 * time.Second

// serve waits until ctx ends or somebody unmounts, and leaves no mount behind.
func (m *mounted) serve(ctx context.Context) error {
	gone := make(chan struct{})
	go func() { m.server.Wait(); close(gone) }()
	select {
	case <-gone:
		return nil
	case <-ctx.Done():
	}
	m.cfg.Logger.Info("unmounting")
	deadline := time.Now().Add(unmountPatience)
	for {
		err := m.server.Unmount(false)
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			m.cfg.Logger.Warn("the mount is in use; it is taken away, and open files fail", "cause", err)
			if err := m.server.Abort(); err != nil {
				return fmt.Errorf("unmount: %w", err)
			}
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	select {
	case <-gone:
	case <-time.After(unmountPatience):
		// Somebody detached it before, or we are not root, and a process has a file open that it may
		// read at any moment. Under it the engine cannot be closed. The kernel ends that when we
		// exit, and the cache is made for being left so.
		m.cfg.Logger.Warn("some process still has files of the detached mount open; they fail now")
		os.Exit(0)
	}
	return nil
}

func umountCommand() *cobra.Command {
	var lazy bool
	var wait time.Duration
	c := &cobra.Command{
		Use:     "umount MOUNTPOINT",
		Short:   "Unmount, and wait until the daemon has left the cache in order",
		Example: "  shoal umount /mnt/train",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			pid := 0 // of the daemon to wait for; a dead mount has none
			if stats, err := readStats(args[0]); err == nil {
				pid = stats.PID
			}
			if err := fusefs.Unmount(args[0], lazy); err != nil {
				return err
			}
			for deadline := time.Now().Add(wait); pid != 0 && running(pid); time.Sleep(20 * time.Millisecond) {
				if time.Now().After(deadline) {
					return fmt.Errorf("%s is unmounted, but its daemon (pid %d) has not ended within %s; see its log", args[0], pid, wait)
				}
			}
			return nil
		},
	}
	c.Flags().BoolVarP(&lazy, "lazy", "l", false, "detach at once even if files are open")
	c.Flags().DurationVar(&wait, "wait", 30*time.Second, "how long to wait for the daemon")
	return c
}

func refreshCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "refresh MOUNTPOINT",
		Short:   "List the source again and move the mount to the new version",
		Long:    "Lists the source again. When it returns, new files are seen, and what was cached of unchanged files is still there. Run it between epochs: an order in progress starts over.",
		Example: "  shoal refresh /mnt/train",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			before, err := readStats(args[0])
			if err != nil {
				return err
			}
			if err := os.WriteFile(args[0]+"/.shoal/refresh", []byte("refresh\n"), 0); err != nil {
				return fmt.Errorf("refresh %s: %w (the daemon's log and `shoal stat` name the cause)", args[0], err)
			}
			after, err := readStats(args[0])
			if err != nil {
				return err
			}
			if before.Dataset == after.Dataset {
				fmt.Fprintf(c.OutOrStdout(), "unchanged: %d files, version %.12s\n", after.Files, after.Dataset)
			} else {
				fmt.Fprintf(c.OutOrStdout(), "version %.12s -> %.12s: %d files, before %d\n", before.Dataset, after.Dataset, after.Files, before.Files)
			}
			return nil
		},
	}
}
