package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/machine"
)

func quickstartCommand() *cobra.Command {
	var q quickstart
	c := &cobra.Command{
		Use:   "quickstart [SOURCE]",
		Short: "Mount or serve a dataset, and print a trainer and how to run it",
		Long: `Starts a daemon for SOURCE in the background and prints a trainer that reads from it, for pictures or Parquet, and the
commands that run it, look at the daemon, end it and clean up. It asks nothing: credentials come from the AWS tools'
settings, the cache goes to the user's folder or to a data disk with far more room, and SOURCE is mounted if FUSE is
available, else served as a feed. It prints its choices, and the equivalent command line. If it fails, it leaves nothing.

SOURCE is s3://bucket/prefix or a folder. Without it, shoal-lab's store of photographs is used if that program is next to
this one or on PATH, else the current folder.`,
		Example: `  shoal quickstart s3://photos/train
  shoal quickstart ~/datasets/photos --mountpoint /mnt/photos --cache-dir /nvme/shoal`,
		RunE: func(c *cobra.Command, args []string) error {
			q.out, q.err = c.OutOrStdout(), c.ErrOrStderr()
			return q.run(c.Context(), invocationOf(c.Context()), strings.Join(args, ""))
		},
	}
	c.Flags().StringVar(&q.at, "mountpoint", "", "where to mount (default ~/shoal/NAME, without HOME ./shoal/NAME);"+
		" a feed's socket is MOUNTPOINT.sock")
	c.Flags().StringVar(&q.cache, "cache-dir", "",
		"folder for the cache (default: the user's, or one on a data disk with twice its room)")
	return c
}

type quickstart struct {
	out, err  io.Writer
	at, cache string   // the mount point and the cache's folder
	env       []string // of the store that it started
	store     int      // that store's process
	made      []string // folders that did not exist before, those above them, too
}

func (q *quickstart) run(ctx context.Context, inv *invocation, source string) (err error) {
	defer func() {
		if err != nil {
			q.undo()
		}
	}()
	if source, err = q.source(ctx, source); err != nil {
		return err
	}
	home, err := os.UserHomeDir()
	if err != nil {
		home = "" // some containers have none
	}
	name := cmp.Or(strings.Trim(path.Base(strings.TrimRight(source, "/")), ".*{}"), "data")
	if q.at, err = inv.abs(cmp.Or(q.at, filepath.Join(home, "shoal", name))); err != nil {
		return err
	}
	base, room := roomiest(cacheBase())
	if q.cache != "" {
		base = q.cache
		room, _ = machine.Room(q.cache)
	}
	if q.cache, err = inv.abs(cmp.Or(q.cache, filepath.Join(base, name))); err != nil {
		return err
	}
	args := []string{"mount", source, q.at}
	code, reached, how := mountCode, q.at, "yes: a mount"
	missing := fusefs.MayMount(fusefs.Options{})
	if missing != nil {
		reached = "unix://" + q.at + ".sock"
		args = []string{"serve", source, "--listen", reached}
		code, how = feedCode, fmt.Sprintf("none (%v): a feed", missing)
	}
	args = append(args, "--cache-dir", q.cache, "--daemon")
	for _, dir := range []string{q.cache, q.at} {
		for _, err := os.Lstat(dir); err != nil && dir != "/"; _, err = os.Lstat(dir) {
			q.made, dir = append(q.made, dir), filepath.Dir(dir)
		}
	}
	if err := os.MkdirAll(filepath.Dir(q.at), 0o755); err != nil {
		return err
	}

	fmt.Fprintf(q.out, "source       %s\n", source)
	if strings.HasPrefix(source, "s3://") {
		fmt.Fprintf(q.out, "credentials  %s\n", q.credentials())
	}
	fmt.Fprintf(q.out, "cache        %s, %s free\n", base, human.Bytes(room))
	fmt.Fprintf(q.out, "FUSE         %s\n\n$ shoal %s\n", how, human.Shell(args...))
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it ends the daemon, and waits for that
	cmd.Env = append(os.Environ(), q.env...)
	cmd.Stdout, cmd.Stderr = q.out, q.err
	var exit *exec.ExitError
	switch err := cmd.Run(); {
	case errors.As(err, &exit):
		return fmt.Errorf("%s could not be served (see the line above; shoal doctor %s tells more)", source,
			human.Shell(source))
	case err != nil:
		return err
	}
	q.say(source, reached, code, missing == nil)
	return nil
}

// say prints a trainer, and the commands that run it, look at the daemon, end it and remove its files.
func (q *quickstart) say(source, reached, code string, mounted bool) {
	words := human.Shell(reached)
	run, end, remove := "python3 train.py", "shoal stop "+words, "rm -r "+human.Shell(q.cache)
	if !slices.Contains(q.made, q.cache) { // it may hold what is others'
		remove = "shoal cache rm " + human.Shell(q.cache, source)
	}
	if mounted {
		if end, remove = "shoal umount "+words, remove+" && rmdir "+human.Shell(q.at); firstExt(q.at) == ".parquet" {
			code = parquetCode
		} else {
			run = "shoal run -- " + run // which passes the sampler's order on
		}
	}
	if q.store != 0 {
		end += fmt.Sprintf(" && kill %d", q.store)
	}
	literal := strconv.Quote(reached)
	fmt.Fprintf(q.out, "\nSave as train.py:\n\n%s\nRun it:      %s\n",
		strings.ReplaceAll(code, "ADDRESS", literal[1:len(literal)-1]), run)
	fmt.Fprintf(q.out, "Look at it:  shoal stat %[1]s, shoal top %[1]s\nEnd it:      %s\nRemove it:   %s\n",
		words, end, remove)
}

func (q *quickstart) undo() {
	if q.store != 0 {
		_ = syscall.Kill(q.store, syscall.SIGTERM)
	}
	for _, dir := range q.made {
		if dir == q.cache {
			_ = os.RemoveAll(dir)
		}
		_ = os.Remove(dir)
	}
}

func firstExt(mountpoint string) (ext string) {
	_ = filepath.WalkDir(mountpoint, func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), "."):
			return fs.SkipDir
		case d.IsDir():
			return nil
		}
		ext = path.Ext(p)
		return fs.SkipAll
	})
	return ext
}

const parquetCode = `import glob
import pyarrow.parquet as pq

for path in sorted(glob.glob("ADDRESS/**/*.parquet", recursive=True)):
    rows = 0
    for batch in pq.ParquetFile(path, pre_buffer=True).iter_batches(batch_size=1024):
        rows += len(batch)
    print(path, rows, "rows")
`

const mountCode = `import torch
from torchvision import datasets, transforms

t = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
data = datasets.ImageFolder("ADDRESS", t)
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True, num_workers=2)
for epoch in range(2):
    for images, labels in loader:
        pass
    print("epoch", epoch, len(data), "pictures")
`

const feedCode = `import subprocess, sys
sys.path.append(subprocess.check_output(["shoal", "python", "--path"], text=True).strip())
import shoal

feed = shoal.Feed("ADDRESS", 64, transform="RandomResizedCrop(224)|RandomHorizontalFlip()|fp32|nchw", epochs=2)
for epoch in range(2):
    feed.set_epoch(epoch)
    for images, labels in feed:
        pass
    print("epoch", epoch, len(feed), "batches")
`

// source returns what is to be served: what was named, the laboratory's store, or this folder.
func (q *quickstart) source(ctx context.Context, given string) (string, error) {
	if strings.Contains(given, "://") {
		return given, nil
	}
	if given == "" {
		self, err := os.Executable()
		if err != nil {
			return "", err
		}
		if lab := laboratory(filepath.Dir(self)); lab != "" {
			return q.startStore(ctx, lab)
		}
	}
	dir, err := filepath.Abs(cmp.Or(given, "."))
	if err != nil {
		return "", err
	}
	if fi, err := os.Stat(dir); err != nil || !fi.IsDir() {
		return "", fmt.Errorf("%s is not a folder (give s3://bucket/prefix, or a folder of samples)", dir)
	}
	return dir, nil
}

// laboratory returns the program shoal-lab, if it is in a folder or on PATH.
func laboratory(dir string) string {
	lab, err := exec.LookPath(filepath.Join(dir, "shoal-lab"))
	if err != nil {
		lab, _ = exec.LookPath("shoal-lab")
	}
	return lab
}

// startStore starts the laboratory's store, and takes the variables that it prints for a shell.
func (q *quickstart) startStore(ctx context.Context, lab string) (string, error) {
	cmd := exec.CommandContext(ctx, lab, "store", "--photos", "512",
		"--work-dir", filepath.Join(cacheBase(), "quickstart"))
	cmd.Stderr = q.err
	text, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s store: %w (see above; or give a SOURCE)", lab, err)
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "export "), "=")
		value = strings.Trim(value, "'")
		if name == "STORE_PID" {
			q.store, _ = strconv.Atoi(value)
			continue
		}
		q.env = append(q.env, name+"="+value)
	}
	return "s3://photos/train", nil
}

// credentials says where credentials come from, as shoal config does.
func (q *quickstart) credentials() string {
	if len(q.env) > 0 {
		return "those of the store"
	}
	all, err := s3.Describe(os.Getenv)
	if err != nil {
		return err.Error()
	}
	of := all[slices.IndexFunc(all, func(s s3.Setting) bool { return s.Name == "credentials" })]
	return of.Value + ", " + of.From
}

// roomiest returns the folder for caches: usual, or one on a disk where data go, if that has twice as much room.
func roomiest(usual string) (dir string, room int64) {
	dir = usual
	room, _ = machine.Room(usual)
	mounts, _ := machine.Mounts("/")
	for _, m := range mounts {
		top, _, _ := strings.Cut(strings.TrimPrefix(m.Point, "/"), "/")
		if !slices.Contains([]string{"mnt", "media", "data", "scratch", "local", "nvme", "ssd", "local_scratch",
			"localscratch"}, strings.TrimRight(top, "0123456789")) ||
			!slices.Contains([]string{"ext4", "xfs", "btrfs", "zfs", "f2fs"}, m.Type) {
			continue
		}
		at := filepath.Join(m.Point, "shoal")
		if n, err := machine.Room(at); err == nil && n > 2*room && unix.Access(m.Point, unix.W_OK) == nil {
			dir, room = at, n
		}
	}
	return dir, room
}
