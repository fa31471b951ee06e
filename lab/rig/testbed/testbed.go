// Package testbed is a whole small world to measure in: datasets of any shape in a real S3 server, the
// proxy that makes it far and narrow, and shoal daemons that mount them, each in a process of its own: they share the
// cores anyway, but a figure for the daemon must not contain the rig's allocations, threads and garbage collection.
//
// Traps:
//
//   - A dataset that fits the kernel's page cache is read once from the daemon and then never again.
//     Mounts of a testbed do not let the kernel keep pages.
//   - What has been warmed has to come through the same proxy: open it (zero options) before, and
//     close it down after.
package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/lab/rig/daemon"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// Bed is a running store with its proxy, in a folder of its own.
type Bed struct {
	Dir    string   // keeps the objects, from one run to the next, and caches and mount points
	Env    []string // leads through the proxy
	Server *s3server.Server
	Proxy  *proxy.Process

	shoal string
	lock  *os.File
}

// Missing says what this machine lacks to run a testbed, a line each.
func Missing() (lines []string) {
	if _, err := s3server.FindBinary(); err != nil {
		lines = append(lines, err.Error())
	}
	if err := fusefs.MayMount(fusefs.Options{}); err != nil {
		lines = append(lines, err.Error())
	}
	return lines
}

// Start starts store and proxy in dir, which it makes. shoal is the path of the binary; this program runs the proxy,
// with [proxy.Verb]. One testbed can run in a folder at a time. Nothing that it starts outlives this process.
func Start(ctx context.Context, dir, shoal string) (_ *Bed, err error) {
	b := &Bed{shoal: shoal}
	if b.Dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(b.Dir, 0o755); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			b.Close()
		}
	}()
	if b.lock, err = os.OpenFile(filepath.Join(b.Dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644); err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(b.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, fmt.Errorf("%s is in use by another run: wait for it, or give another folder", b.Dir)
	}
	if b.Server, err = s3server.Start(ctx, s3server.Options{Dir: filepath.Join(b.Dir, "objects")}); err != nil {
		return nil, err
	}
	if b.Proxy, err = proxy.Spawn(ctx, []string{self, proxy.Verb}, b.Server.URL, proxy.Options{}); err != nil {
		return nil, err
	}
	b.Env = append(append(os.Environ(), settled), s3server.Env(b.Proxy.URL)...)
	return b, nil
}

// settled keeps the settings of whoever measures out of a process.
const settled = "SHOAL_SETTLED=1"

// Close ends store and proxy. Objects and caches stay.
func (b *Bed) Close() {
	if b.Proxy != nil {
		b.Proxy.Stop()
	}
	if b.Server != nil {
		b.Server.Stop()
	}
	if b.lock != nil {
		_ = syscall.Flock(int(b.lock.Fd()), syscall.LOCK_UN) // a child that is being forked has the lock as well
		_ = b.lock.Close()
	}
}

// Failed returns an error if store or proxy have ended by themselves.
func (b *Bed) Failed() error { return errors.Join(b.Proxy.Failed(), b.Server.Failed()) }

// With returns the bed with another binary.
func (b *Bed) With(shoal string) *Bed {
	other := *b
	other.shoal = shoal
	return &other
}

// Shoal runs a verb to its end and returns what it prints.
func (b *Bed) Shoal(ctx context.Context, args ...string) (string, error) {
	var stdout bytes.Buffer
	cmd := exec.Command(b.shoal, args...)
	cmd.Env, cmd.Stdout = b.Env, &stdout
	p, err := subproc.Start("shoal "+args[0], cmd)
	if err != nil {
		return "", err
	}
	err = p.Wait(ctx)
	return stdout.String(), err
}

// Daemon runs a verb in the foreground, so that it ends with this process in every case, and returns when it is ready
// at its place, whose log begins anew.
func (b *Bed) Daemon(ctx context.Context, at daemon.Place, args ...string) (*daemon.Daemon, error) {
	if at.Mount != "" {
		// What a killed run has left is unmounted first.
		if err := errors.Join(daemon.Unmount(at.Mount), os.MkdirAll(at.Mount, 0o755)); err != nil {
			return nil, err
		}
	}
	if err := os.RemoveAll(at.Log); err != nil {
		return nil, err
	}
	cmd := exec.Command(b.shoal, args...)
	cmd.Env = b.Env
	d, err := daemon.Start("shoal "+args[0], cmd, at)
	if err != nil {
		return nil, err
	}
	if err := d.Ready(ctx); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}
