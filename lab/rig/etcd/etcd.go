// Package etcd runs a real etcd of one member on loopback, as a subprocess that never outlives its parent, and lets it
// fail: stopped, frozen, started again with its data or without.
//
// Traps:
//
//   - Debian's etcd (3.4) cannot be told to do without fsync. Its data lies in /dev/shm, so that a write takes no 30 ms.
//   - It cannot say which port the kernel gave it. Ports are held while it is down, too, so that it comes back where it was.
//   - No lease is shorter than one and a half election timeouts, rounded up to seconds.
package etcd

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/lab/rig/port"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// Server is an etcd, which may be down.
type Server struct {
	Addr string // HOST:PORT for clients

	bin, dir, peers string
	args            []string
	release         []func()
	proc            *subproc.Proc
}

// FindBinary returns the path of etcd: $SHOAL_ETCD, else the one on $PATH. The error says how to get it.
func FindBinary() (string, error) {
	if p := os.Getenv("SHOAL_ETCD"); p != "" {
		return p, nil
	}
	p, err := exec.LookPath("etcd")
	if err != nil {
		return "", fmt.Errorf("etcd not found on PATH: get it with `apt-get install etcd-server`, or put its path in SHOAL_ETCD")
	}
	return p, nil
}

// Start runs an etcd and returns when it answers. args are added to its own: TLS, for one, with tls.
// ctx bounds only the start.
func Start(ctx context.Context, tls bool, args ...string) (*Server, error) {
	bin, err := FindBinary()
	if err != nil {
		return nil, err
	}
	dir := ""
	if fi, err := os.Stat("/dev/shm"); err == nil && fi.IsDir() {
		dir = "/dev/shm"
	}
	if dir, err = os.MkdirTemp(dir, "shoal-etcd-"); err != nil {
		return nil, err
	}
	s := &Server{bin: bin, dir: dir}
	for _, addr := range []*string{&s.Addr, &s.peers} {
		a, release, err := port.Hold()
		if err != nil {
			s.Close()
			return nil, err
		}
		*addr, s.release = a, append(s.release, release)
	}
	scheme := "http://"
	if tls {
		scheme = "https://"
	}
	s.args = append([]string{"--name", "rig", "--listen-client-urls", scheme + s.Addr, "--advertise-client-urls", scheme + s.Addr,
		"--listen-peer-urls", "http://" + s.peers, "--initial-advertise-peer-urls", "http://" + s.peers,
		"--initial-cluster", "rig=http://" + s.peers, "--heartbeat-interval", "20", "--election-timeout", "200"}, args...)
	if err := s.Restart(ctx, false); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Stop kills it, and keeps its data.
func (s *Server) Stop() {
	if s.proc != nil {
		_ = s.proc.Signal(syscall.SIGKILL)
		<-s.proc.Done()
	}
}

// Restart kills it and starts it where it was, with its data or without, and returns when it answers.
func (s *Server) Restart(ctx context.Context, empty bool) error {
	s.Stop()
	data := filepath.Join(s.dir, "data")
	if empty {
		if err := os.RemoveAll(data); err != nil {
			return err
		}
	}
	var err error
	if s.proc, err = subproc.Start("etcd", exec.Command(s.bin, append([]string{"--data-dir", data}, s.args...)...)); err != nil {
		return err
	}
	// It listens when it has a leader.
	for {
		if err := s.proc.Failed(); err != nil {
			return err
		}
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.Addr)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("etcd does not listen: %w:\n%s", ctx.Err(), s.proc.Tail())
		}
	}
}

// Freeze stops its clock, with connections open (SIGSTOP); Thaw lets it go on.
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
