// Package port holds ports of loopback for those who are told a number: servers that cannot say which port the
// kernel gave them, and tests of what nobody listens on. A port that is found free by listening and closing is
// anybody's until the number is used.
package port

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Hold takes a free port of 127.0.0.1 and returns its address. Until release is called nobody else is given the port by
// the kernel, connections to it are refused, and a server may listen on it by its number, as [net.Listen] does.
func Hold() (addr string, release func(), err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", nil, os.NewSyscallError("socket", err)
	}
	release = func() { _ = unix.Close(fd) }
	// With it on both sides, a socket that does not listen keeps off only those who take any port.
	err = os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	}
	var sa unix.Sockaddr
	if err == nil {
		sa, err = unix.Getsockname(fd)
	}
	if err != nil {
		release()
		return "", nil, err
	}
	return fmt.Sprintf("127.0.0.1:%d", sa.(*unix.SockaddrInet4).Port), release, nil
}
