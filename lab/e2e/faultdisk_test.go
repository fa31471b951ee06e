package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// A faultDisk is a disk that breaks on request: a FUSE file system over a folder, in a process
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

// faultOp is a kind of operation.
type faultOp string

// The kinds of operations that rules tell apart.
const (
	faultRead  faultOp = "read"  // the content of a file
	faultWrite faultOp = "write" // content, and what takes blocks: fallocate, copy_file_range
	faultSync  faultOp = "sync"  // fsync and the flush of a close
	faultMake  faultOp = "make"  // names: create, mkdir, rename, unlink, truncate
	faultLook  faultOp = "look"  // lookup, stat, open, list
	faultAny   faultOp = "any"   // only in rules
)

// faultRule says which operations fail or wait.
type faultRule struct {
	Op    faultOp // selects by kind; empty means faultAny
	Path  string  // selects what lies at or below this path of the mount; empty means everything
	Errno string  // what a selected operation fails with: EIO, ENOSPC, EROFS, EDQUOT; empty: it does not fail
	// Hang makes a selected operation wait until the settings are changed. The process that waits
	// cannot be killed meanwhile, as with a disk.
	Hang  bool
	Delay time.Duration // how much longer a selected operation takes
}

var errnos = map[string]syscall.Errno{"EIO": syscall.EIO, "ENOSPC": syscall.ENOSPC, "EROFS": syscall.EROFS,
	"EDQUOT": syscall.EDQUOT}

func (r faultRule) validate() error {
	switch r.Op {
	case "", faultAny, faultRead, faultWrite, faultSync, faultMake, faultLook:
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

func (r faultRule) selects(op faultOp, name string) bool {
	if r.Op != "" && r.Op != faultAny && r.Op != op {
		return false
	}
	rest, ok := strings.CutPrefix(name, r.Path)
	return ok && (r.Path == "" || rest == "" || rest[0] == '/')
}

// faultSettings say how the disk behaves. The zero value is a healthy one.
type faultSettings struct {
	Rules []faultRule // in order; each that selects an operation strikes it
	// Capacity is how many bytes of blocks the folder may take before writes fail with ENOSPC; 0 is
	// no limit.
	Capacity int64
}

// faultsInForce is one faultSettings in force.
type faultsInForce struct {
	faultSettings
	ended chan struct{} // closed when other settings are in force
}

// faultStats counts since the start.
type faultStats struct {
	Failed  int64 // by rule or for want of space
	Hanging int64 // now
	Hung    int64 // in all
	Used    int64 // bytes of blocks; counted only under a capacity
}

// faultDiskMain runs a faultdisk until SIGTERM, SIGINT or an unmount: faultdisk BACKING MOUNTPOINT. It prints one line
// of JSON with the URL of its control server (see [subproc.Serve]).
func faultDiskMain(args []string) error {
	if len(args) != 2 {
		return errors.New("faultdisk: give BACKING and MOUNTPOINT, two folders")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	d, server, err := mountFaultDisk(args[0], args[1])
	if err != nil {
		return fmt.Errorf("faultdisk: mount %s: %w", args[1], err)
	}
	go func() {
		server.Wait()
		stop()
	}()
	err = subproc.Serve(ctx, "", d.stats, d.set)
	_ = d.set(faultSettings{}) // whoever hangs goes on
	if e := server.Unmount(); e != nil {
		_ = unix.Unmount(args[1], unix.MNT_DETACH)
	}
	return err
}

// faultDisk is a running faultdisk.
type faultDisk struct {
	Dir string // the mount point: what is stored there lies on the disk
	// After Set of settings, what hangs goes on under the new ones.
	subproc.Controlled[faultStats, faultSettings]
}

// spawnFaultDisk runs this program as a disk over the folder backing at the mount point dir, both of which exist, and
// returns when it is mounted. It dies with this process.
func spawnFaultDisk(ctx context.Context, backing, dir string) (*faultDisk, error) {
	_, c, err := subproc.SpawnControlled[faultStats, faultSettings](ctx, "faultdisk",
		[]string{os.Args[0], "faultdisk"}, backing, dir)
	if err != nil {
		_ = unix.Unmount(dir, unix.MNT_DETACH) // if it came as far as that
		return nil, fmt.Errorf("faultdisk: %w", err)
	}
	return &faultDisk{dir, c}, nil
}

// Stop lets go whatever hangs, unmounts and ends the process.
func (d *faultDisk) Stop() {
	d.Proc.Stop(5 * time.Second)
	// Nothing is mounted any more unless the process had to be killed.
	_ = unix.Unmount(d.Dir, unix.MNT_DETACH)
}
