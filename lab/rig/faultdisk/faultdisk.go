// Package faultdisk is a disk that breaks on request: a FUSE file system over a folder, in a process
// of its own, that can be told to fail, to fill up, to be slow and to hang.
//
// Traps:
//
//   - A task that waits for it cannot be killed, as with a real disk, and a process that is its
//     user and its server at once waits for itself: hence the process of its own, and nothing in
//     it touches the mount.
//   - The kernel's page cache hides a fault: what was written or read through the mount a moment
//     ago is read again without asking. Drop the caches first.
//   - mmap works. A page fault on a file that hangs stops the thread, and with it a Go process at
//     its next garbage collection; select the folder that only read and write use.
//   - preadv2(RWF_NOWAIT) is EOPNOTSUPP, as on every FUSE file system.
package faultdisk

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"path"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// Op is a kind of operation.
type Op string

// The kinds of operations that rules tell apart.
const (
	Read  Op = "read"  // the content of a file
	Write Op = "write" // content, and what takes blocks: fallocate, copy_file_range
	Sync  Op = "sync"  // fsync and the flush of a close
	Make  Op = "make"  // names: create, mkdir, rename, unlink, truncate
	Look  Op = "look"  // lookup, stat, open, list
	Any   Op = "any"   // only in rules
)

// Rule says which operations fail or wait.
type Rule struct {
	Op    Op     // selects by kind; empty means Any
	Path  string // selects what lies at or below this path of the mount; empty means everything
	Errno string // what a selected operation fails with: EIO, ENOSPC, EROFS, EDQUOT; empty: it does not fail
	// Hang makes a selected operation wait until the settings are changed. The process that waits
	// cannot be killed meanwhile, as with a disk.
	Hang  bool
	Delay time.Duration // how much longer a selected operation takes
}

var errnos = map[string]syscall.Errno{"EIO": syscall.EIO, "ENOSPC": syscall.ENOSPC, "EROFS": syscall.EROFS,
	"EDQUOT": syscall.EDQUOT}

func (r Rule) validate() error {
	switch r.Op {
	case "", Any, Read, Write, Sync, Make, Look:
	default:
		return fmt.Errorf("rule: unknown operation %q", r.Op)
	}
	if _, ok := errnos[r.Errno]; !ok && r.Errno != "" {
		return fmt.Errorf("rule: unknown error %q; known: EIO, ENOSPC, EROFS, EDQUOT", r.Errno)
	}
	if r.Errno == "" && !r.Hang && r.Delay == 0 {
		return errors.New("rule: does nothing; set Errno, Hang or Delay")
	}
	if r.Delay < 0 {
		return errors.New("rule: Delay must not be negative")
	}
	if r.Path != "" && (path.IsAbs(r.Path) || path.Clean(r.Path) != r.Path || strings.HasPrefix(r.Path, "..")) {
		return fmt.Errorf("rule: path %q: give a clean path relative to the mount", r.Path)
	}
	return nil
}

func (r Rule) selects(op Op, name string) bool {
	if r.Op != "" && r.Op != Any && r.Op != op {
		return false
	}
	rest, ok := strings.CutPrefix(name, r.Path)
	return ok && (r.Path == "" || rest == "" || rest[0] == '/')
}

// Settings say how the disk behaves. The zero value is a healthy one.
type Settings struct {
	Rules []Rule // in order; each that selects an operation strikes it
	// Capacity is how many bytes of blocks the folder may take before writes fail with ENOSPC; 0 is
	// no limit.
	Capacity int64
}

// settings is one Settings in force.
type settings struct {
	Settings
	ended chan struct{} // closed when other settings are in force
}

// Stats counts since the start.
type Stats struct {
	Failed  int64 // by rule or for want of space
	Hanging int64 // now
	Hung    int64 // in all
	Used    int64 // bytes of blocks; counted only under a capacity
}

// Main runs a faultdisk until SIGTERM, SIGINT or an unmount: faultdisk BACKING MOUNTPOINT. It prints one line of JSON
// with the URL of its control server (see [subproc.Serve]).
func Main(args []string) error {
	if len(args) != 2 {
		return errors.New("faultdisk: give BACKING and MOUNTPOINT, two folders")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	d, server, err := mountDisk(args[0], args[1])
	if err != nil {
		return fmt.Errorf("faultdisk: mount %s: %w", args[1], err)
	}
	go func() {
		server.Wait()
		stop()
	}()
	err = subproc.Serve(ctx, "", d.stats, d.set)
	_ = d.set(Settings{}) // whoever hangs goes on
	if e := server.Unmount(); e != nil {
		_ = unix.Unmount(args[1], unix.MNT_DETACH)
	}
	return err
}

// Disk is a running faultdisk.
type Disk struct {
	Dir string // the mount point: what is stored there lies on the disk
	// After Set of settings, what hangs goes on under the new ones.
	subproc.Controlled[Stats, Settings]
}

// Spawn runs command (a program that calls [Main], and its first arguments) as a disk over the folder
// backing at the mount point dir, both of which exist, and returns when it is mounted. It dies with
// this process.
func Spawn(ctx context.Context, command []string, backing, dir string) (*Disk, error) {
	_, c, err := subproc.SpawnControlled[Stats, Settings](ctx, "faultdisk", command, backing, dir)
	if err != nil {
		_ = unix.Unmount(dir, unix.MNT_DETACH) // if it came as far as that
		return nil, fmt.Errorf("faultdisk: %w", err)
	}
	return &Disk{dir, c}, nil
}

// Stop lets go whatever hangs, unmounts and ends the process.
func (d *Disk) Stop() {
	d.Proc.Stop(5 * time.Second)
	// Nothing is mounted any more unless the process had to be killed.
	_ = unix.Unmount(d.Dir, unix.MNT_DETACH)
}
