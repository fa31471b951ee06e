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
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// Main runs a faultdisk until SIGTERM, SIGINT or an unmount: faultdisk BACKING MOUNTPOINT. It prints
// one line of JSON with the URL of its control server, which answers GET /stats ([Stats]) and PUT
// /settings ([Settings]).
func Main(args []string) (err error) {
	if len(args) != 2 {
		return errors.New("faultdisk: give BACKING and MOUNTPOINT, two folders")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	d, server, err := mountDisk(args[0], args[1])
	if err != nil {
		return fmt.Errorf("faultdisk: mount %s: %w", args[1], err)
	}
	gone := make(chan struct{})
	go func() { server.Wait(); close(gone) }()
	control, end, err := subproc.Serve(d.stats, "/settings", d.set)
	if err == nil {
		defer func() { err = errors.Join(err, end()) }()
		err = server.WaitMount()
	}
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(subproc.Serving{Control: control})
	}
	if err == nil {
		select {
		case <-ctx.Done():
		case <-gone:
		}
	}
	_ = d.set(Settings{}) // whoever hangs goes on
	if e := server.Unmount(); e != nil {
		_ = unix.Unmount(args[1], unix.MNT_DETACH)
	}
	return err
}

// Disk is a running faultdisk.
type Disk struct {
	// Dir is the mount point: what is stored there lies on the disk.
	Dir string
	// After Set of settings, what hangs goes on under the new ones.
	subproc.Controlled[Stats, Settings]
}

// Spawn runs command (a program that calls [Main], and its first arguments) as a disk over the folder
// backing at the mount point dir, both of which exist, and returns when it is mounted. It dies with
// this process.
func Spawn(ctx context.Context, command []string, backing, dir string) (*Disk, error) {
	_, c, err := subproc.SpawnControlled[Stats, Settings](ctx, "faultdisk", command, "/settings", backing, dir)
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
