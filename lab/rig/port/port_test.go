package port

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// ipLocalPortRange is a socket's own range of ports, low in the lower half; Linux has it from 6.3 on.
const ipLocalPortRange = 51

func TestHold(t *testing.T) {
	addr, release, err := Hold()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := net.Dial("tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial: %v", err)
	}
	number := int(netip.MustParseAddrPort(addr).Port())
	// anyPort listens on any port, of which there is just this one.
	anyPort := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var opt error
		err := c.Control(func(fd uintptr) {
			opt = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, ipLocalPortRange, number<<16|number)
		})
		return errors.Join(err, opt)
	}}
	if l, err := anyPort.Listen(t.Context(), "tcp", "127.0.0.1:0"); err == nil {
		_ = l.Close()
		t.Error("the kernel gave it to another")
	} else if !errors.Is(err, unix.EADDRINUSE) && !errors.Is(err, unix.ENOPROTOOPT) {
		t.Error(err)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	release()
	_ = c.Close()
	_ = l.Close()
}
