package audit

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Self returns this process, for what it does itself.
func Self() *Peer {
	return &Peer{PID: os.Getpid(), UID: Int(os.Getuid()), GID: Int(os.Getgid()), Comm: comm(os.Getpid())}
}

// Process returns who a process or thread is that the kernel named: its process, and its name where it can be
// seen from here. uid and gid are as the kernel told them.
func Process(tid, uid, gid uint32) *Peer {
	p := &Peer{UID: Int(uid), GID: Int(gid)}
	if tid == 0 {
		return p
	}
	p.PID = int(tid)
	status, err := os.ReadFile("/proc/" + strconv.Itoa(int(tid)) + "/status")
	if err != nil {
		return p
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "Tgid:"); ok {
			if n, err := strconv.Atoi(strings.TrimSpace(rest)); err == nil {
				p.PID = n
			}
		}
	}
	p.Comm = comm(p.PID)
	return p
}

// comm returns the name of a process.
func comm(pid int) string {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	if err != nil {
		return ""
	}
	return string(bytes.TrimSuffix(b, []byte("\n")))
}

// Unix returns who is at the other end of a unix socket: who connected it, by SO_PEERCRED.
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
		p.PID, p.UID, p.GID = int(cred.Pid), Int(cred.Uid), Int(cred.Gid)
		if p.PID != 0 {
			p.Comm = comm(p.PID)
		}
	})
	return p
}

// address is a peer's address that knows who the peer is.
type address struct {
	net.Addr
	peer func() *Peer
}

// conn tells by its RemoteAddr who the peer is.
type conn struct {
	net.Conn
	addr  address
	close func() // may be called more than once
}

// Close implements net.Conn.
func (c conn) Close() error {
	c.close()
	return c.Conn.Close()
}

// RemoteAddr implements net.Conn.
func (c conn) RemoteAddr() net.Addr { return c.addr }

// Listener is a listener whose connections tell by their addresses who the peers are: see Of.
type Listener struct {
	net.Listener
	// Refused, unless it is nil, is told of connections that end without having finished their TLS handshake.
	Refused func(*Peer)
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
		who := Unix(inner) // at once: a process may end before anybody asks for its name
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

// Of returns who is at an address, by what a Listener knows of it. The peer is the caller's.
func Of(a net.Addr) *Peer {
	if known, ok := a.(address); ok {
		p := *known.peer()
		return &p
	}
	return &Peer{Network: a.Network(), Address: a.String()}
}

// Fingerprint names a token without telling it.
func Fingerprint(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:4])
}
