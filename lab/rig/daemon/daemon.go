// Package daemon runs shoal daemons in the foreground, each until it is ready, and takes away what they leave.
//
// It never touches a mount: a daemon that hangs would hang this process too, and nothing would be cleaned up.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/internal/machine"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// Patience is how long a daemon may take to get ready or to end.
const Patience = 2 * time.Minute

// Place is where a daemon is found.
type Place struct {
	Mount  string // empty: none
	Socket string // of its feed, a path; empty: none
	Log    string // the file to which its output is appended
}

// Daemon is a running daemon.
type Daemon struct {
	*subproc.Proc
	at Place
}

// Start runs cmd.
func Start(name string, cmd *exec.Cmd, at Place) (*Daemon, error) {
	log, err := os.OpenFile(at.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = log, log
	p, err := subproc.Start(name, cmd)
	if err != nil {
		return nil, errors.Join(err, log.Close())
	}
	go func() {
		<-p.Done()
		_ = log.Close()
	}()
	return &Daemon{p, at}, nil
}

// Ready waits until the daemon mounts and serves.
func (d *Daemon) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	return d.Until(ctx, d.at.ready)
}

// ready asks whether the feed answers, and the mount is there. The socket of a daemon that was killed refuses.
func (at Place) ready(ctx context.Context) error {
	if at.Socket != "" {
		c, err := new(net.Dialer).DialContext(ctx, "unix", at.Socket)
		if err != nil {
			return err
		}
		_ = c.Close()
	}
	if at.Mount == "" {
		return nil
	}
	mounts, err := Mounts(at.Mount)
	if err == nil && len(mounts) == 0 {
		err = fmt.Errorf("nothing is mounted at %s", at.Mount)
	}
	return err
}

// Close ends the daemon, which unmounts, and takes away what it leaves. It is safe to call again.
func (d *Daemon) Close() error {
	d.Stop(Patience)
	if d.at.Mount == "" {
		return nil
	}
	return Unmount(d.at.Mount)
}

// CacheSize returns the --cache-size that holds this share of a dataset and nothing more: beside the bytes there are
// headers and checksums of records, and what the daemon keeps for its catalog, 1 MiB and a 32nd part, at most 8 MiB.
func CacheSize(share float64, bytes int64, files int) string {
	need := int64(share * float64(bytes+384*int64(files)))
	return strconv.FormatInt(min(need+8<<20, (need+1<<20)*32/31), 10) + "B"
}

// Mounts returns the mount points at and below dir, the innermost first.
func Mounts(dir string) (found []string, err error) {
	if above, err := filepath.EvalSymlinks(filepath.Dir(dir)); err == nil { // as the kernel names it
		dir = filepath.Join(above, filepath.Base(dir))
	}
	mounts, err := machine.Mounts("/")
	for _, m := range slices.Backward(mounts) {
		if m.Point == dir || strings.HasPrefix(m.Point, strings.TrimSuffix(dir, "/")+"/") {
			found = append(found, m.Point)
		}
	}
	return found, err
}

// Unmount detaches every mount at and below dir, also one whose daemon is dead or hangs.
func Unmount(dir string) error {
	mounts, err := Mounts(dir)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if syscall.Unmount(m, syscall.MNT_DETACH) == nil {
			continue
		}
		if out, err := exec.Command("fusermount3", "-u", "-z", m).CombinedOutput(); err != nil {
			return fmt.Errorf("cannot unmount %s: %w: %s", m, err, strings.TrimSpace(string(out)))
		}
	}
	return nil
}
