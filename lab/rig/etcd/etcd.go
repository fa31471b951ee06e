// Package etcd runs a real etcd on loopback, each member a subprocess that never outlives its parent, and lets them
// fail: stopped, frozen, started again with its data or without.
//
// Traps:
//
//   - Debian's etcd (3.4) cannot be told to do without fsync. Its data lies in /dev/shm, so that a write takes no 30
//     ms.
//   - It cannot say which port the kernel gave it. Ports are held while it is down, too, so that it comes back where it
//     was.
//   - It listens before it can answer, and one that is killed before its first entry is on disk never has a leader
//     again.
//   - No lease is shorter than one and a half election timeouts, rounded up to seconds.
package etcd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/lab/rig/port"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// Server is an etcd, which may be down.
type Server struct {
	Addr string // HOST:PORT for clients

	bin, dir string
	peer     string // where the others find it
	health   string // where it says that it has a leader, by HTTP without certificates
	args     []string
	command  func(program string, args ...string) *exec.Cmd
	release  []func()
	proc     *subproc.Proc
}

// FindBinary returns the path of etcd: $SHOAL_ETCD, else the one on $PATH. The error says how to get it.
func FindBinary() (string, error) {
	if p := os.Getenv("SHOAL_ETCD"); p != "" {
		return p, nil
	}
	p, err := exec.LookPath("etcd")
	if err != nil {
		return "", fmt.Errorf(
			"etcd not found on PATH: get it with `apt-get install etcd-server`, or put its path in SHOAL_ETCD")
	}
	return p, nil
}

// Start runs an etcd of one member and returns when it answers. args are added to its own: TLS, for one, with tls.
// ctx bounds only the start.
func Start(ctx context.Context, tls bool, args ...string) (*Server, error) {
	members, err := StartMembers(ctx, 1, tls, args...)
	if err != nil {
		return nil, err
	}
	return members[0], nil
}

// StartMembers runs an etcd of n members.
func StartMembers(ctx context.Context, n int, tls bool, args ...string) (members []*Server, err error) {
	scheme := "http://"
	if tls {
		scheme = "https://"
	}
	defer func() {
		if err != nil {
			for _, s := range members {
				s.Close()
			}
		}
	}()
	for range n {
		s := &Server{command: exec.Command}
		members = append(members, s)
		var addrs [3]string
		for j := range addrs {
			addr, release, err := port.Hold()
			if err != nil {
				return members, err
			}
			addrs[j], s.release = addr, append(s.release, release)
		}
		s.Addr, s.peer, s.health = addrs[0], addrs[1], addrs[2]
	}
	return members, start(ctx, members, scheme, args)
}

// StartAt runs an etcd on a machine of its own, with this address: command runs a program there.
func StartAt(ctx context.Context, host string, command func(program string, args ...string) *exec.Cmd) (
	*Server, error) {
	s := &Server{Addr: net.JoinHostPort(host, "2379"), peer: net.JoinHostPort(host, "2380"),
		health: net.JoinHostPort(host, "2381"), command: command}
	err := start(ctx, []*Server{s}, "http://", nil)
	if err != nil {
		s.Close()
	}
	return s, err
}

// start runs the members.
func start(ctx context.Context, members []*Server, scheme string, args []string) error {
	bin, err := FindBinary()
	if err != nil {
		return err
	}
	all := make([]string, len(members))
	for i, s := range members {
		all[i] = fmt.Sprintf("member%d=http://%s", i, s.peer)
		if s.dir, err = os.MkdirTemp("/dev/shm", "shoal-etcd-"); err != nil {
			return err
		}
	}
	var started errgroup.Group // a member answers when most are there
	for i, s := range members {
		s.bin = bin
		s.args = append([]string{"--data-dir", filepath.Join(s.dir, "data"), "--name", fmt.Sprint("member", i),
			"--listen-client-urls", scheme + s.Addr, "--advertise-client-urls", scheme + s.Addr,
			"--listen-peer-urls", "http://" + s.peer, "--initial-advertise-peer-urls", "http://" + s.peer,
			"--initial-cluster", strings.Join(all, ","), "--listen-metrics-urls", "http://" + s.health,
			"--heartbeat-interval", "20", "--election-timeout", "200"}, args...)
		started.Go(func() error { return s.Restart(ctx, false) })
	}
	return started.Wait()
}

// Stop kills it, and keeps its data.
func (s *Server) Stop() {
	if s.proc != nil {
		_ = s.proc.Signal(syscall.SIGKILL)
		<-s.proc.Done()
	}
}

// Restart kills it and starts it where it was, with its data or without, and returns when it answers.
func (s *Server) Restart(ctx context.Context, empty bool) (err error) {
	s.Stop()
	if empty {
		if err := os.RemoveAll(filepath.Join(s.dir, "data")); err != nil {
			return err
		}
	}
	if s.proc, err = subproc.Start("etcd", s.command(s.bin, s.args...)); err != nil {
		return err
	}
	return s.proc.Healthy(ctx, "http://"+s.health+"/health")
}

// Save copies its data, for which it is stopped a moment. restore starts it again from that copy, once.
func (s *Server) Save(ctx context.Context) (restore func(ctx context.Context) error, err error) {
	s.Stop()
	data, saved := filepath.Join(s.dir, "data"), filepath.Join(s.dir, "saved")
	if err := os.CopyFS(saved, os.DirFS(data)); err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		s.Stop()
		if err := errors.Join(os.RemoveAll(data), os.Rename(saved, data)); err != nil {
			return err
		}
		return s.Restart(ctx, false)
	}, s.Restart(ctx, false)
}

// Freeze stops it with its connections open (SIGSTOP).
func (s *Server) Freeze() error { return s.proc.Signal(syscall.SIGSTOP) }

// Thaw lets a frozen one go on.
func (s *Server) Thaw() error { return s.proc.Signal(syscall.SIGCONT) }

// Close kills it and removes its data.
func (s *Server) Close() {
	s.Stop()
	for _, release := range s.release {
		release()
	}
	_ = os.RemoveAll(s.dir)
}
