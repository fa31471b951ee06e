package audit

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// Self returns this process, for its own actions.
func Self() *Peer {
	return &Peer{PID: os.Getpid(), UID: new(os.Getuid()), GID: new(os.Getgid()), Comm: comm(os.Getpid())}
}

// Process returns the peer for a process or thread that the kernel named: its process, and its name if that is visible
// here. uid and gid are the kernel's.
func Process(tid, uid, gid uint32) *Peer {
	p := &Peer{UID: new(int(uid)), GID: new(int(gid))}
	if tid == 0 {
		return p
	}
	p.PID = int(tid)
	if proc, err := procfs.NewProc(p.PID); err == nil {
		if status, err := proc.NewStatus(); err == nil {
			p.PID = status.TGID
		}
	}
	p.Comm = comm(p.PID)
	return p
}

// comm returns the name of a process, or "".
func comm(pid int) string {
	name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSpace(string(name))
}

// Unix returns the peer of a unix socket: the process that connected it, by SO_PEERCRED.
func Unix(c syscall.Conn) *Peer {
	p := &Peer{Network: "unix"}
	raw, err := c.SyscallConn()
	if err != nil {
		return p
	}
	_ = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil {
			return
		}
		p.PID, p.UID, p.GID = int(cred.Pid), new(int(cred.Uid)), new(int(cred.Gid))
		if p.PID != 0 {
			p.Comm = comm(p.PID)
		}
	})
	return p
}

// address is a peer's address that includes the peer.
type address struct {
	net.Addr
	peer func() *Peer
}

// conn is a connection whose RemoteAddr includes the peer.
type conn struct {
	net.Conn
	addr  address
	close func() // may be called more than once
}

func (c conn) Close() error {
	c.close()
	return c.Conn.Close()
}

func (c conn) RemoteAddr() net.Addr { return c.addr }

// Listener is a listener whose connections' addresses include the peers: see Of.
type Listener struct {
	net.Listener
	Refused func(*Peer) // unless nil, called for connections that end before completing their TLS handshake
}

// Accept implements net.Listener.
func (l Listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	addr, refused := address{Addr: c.RemoteAddr()}, func() {}
	switch inner := c.(type) {
	case *net.UnixConn:
		who := Unix(inner) // now: the process may end before its name is needed
		addr.peer = func() *Peer { return who }
	case interface{ ConnectionState() tls.ConnectionState }:
		addr.peer = func() *Peer { return ofTLS(c.RemoteAddr(), inner.ConnectionState()) }
		if l.Refused != nil {
			refused = sync.OnceFunc(func() {
				if !inner.ConnectionState().HandshakeComplete {
					l.Refused(addr.peer())
				}
			})
		}
	default:
		return c, nil
	}
	return conn{c, addr, refused}, nil
}

func ofTLS(a net.Addr, state tls.ConnectionState) *Peer {
	p := &Peer{Network: a.Network(), Address: a.String()}
	if state.HandshakeComplete && len(state.VerifiedChains) > 0 {
		leaf := state.VerifiedChains[0][0]
		p.Subject, p.Serial = leaf.Subject.String(), leaf.SerialNumber.Text(16)
	}
	return p
}

// Of returns the peer at an address of a Listener's connection. The caller owns the peer.
func Of(a net.Addr) *Peer {
	if known, ok := a.(address); ok {
		return new(*known.peer())
	}
	return &Peer{Network: a.Network(), Address: a.String()}
}

// Fingerprint identifies a token without revealing it.
func Fingerprint(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:4])
}
