package loader

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ListenOptions are the settings of a listener.
type ListenOptions struct {
	// SocketGroup is the group of a unix socket, by name or number; default the process's.
	SocketGroup string
	// TLS is the configuration of tls:// listeners, from ServerTLS; nil: tls:// is refused.
	TLS *tls.Config
	// Tokens says that clients need a token (Options.Tokens).
	Tokens bool
}

// ErrAddress is wrapped by Listen's errors about an address that can never work.
var ErrAddress = errors.New("not a feed address")

// addressForms are the forms of addresses to listen on.
const addressForms = "unix:///PATH, tcp://HOST:PORT or tls://HOST:PORT"

// Listen opens unix:///path, tcp://host:port or tls://host:port. A unix socket without a server is replaced; one with
// a server is an error.
func Listen(addr string, o ListenOptions) (net.Listener, error) {
	scheme, rest, _ := strings.Cut(addr, "://")
	switch scheme {
	case "unix":
		return listenUnix(rest, o)
	case "tcp", "tls":
		return listenTCP(scheme, rest, o)
	}
	return nil, fmt.Errorf("listen on %q: %w: unknown scheme %q; it must be %s", addr, ErrAddress, scheme, addressForms)
}

func listenTCP(scheme, addr string, o ListenOptions) (net.Listener, error) {
	fail := func(format string, args ...any) (net.Listener, error) {
		return nil, fmt.Errorf("listen on %s://%s: %w", scheme, addr, fmt.Errorf(format, args...))
	}
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return fail("%w: %w", ErrAddress, err)
	}
	if scheme == "tls" && o.TLS == nil {
		return fail("%w without a certificate: pass --tls-cert and --tls-key", ErrAddress)
	}
	a, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return fail("%w", err)
	}
	if !a.IP.IsLoopback() {
		switch {
		case scheme == "tcp":
			return fail("the address can be reached from other machines, and plain TCP neither encrypts nor "+
				"authenticates: use tls://, tcp://127.0.0.1:%d or a unix socket", a.Port)
		case !o.Tokens && o.TLS.ClientAuth != tls.RequireAndVerifyClientCert:
			return fail("the address can be reached from other machines, and anyone who connects could read the " +
				"dataset: require " +
				"a certificate (--tls-client-ca) or a token (--token-file)")
		}
	}
	l, err := net.ListenTCP("tcp", a)
	if errors.Is(err, syscall.EADDRINUSE) {
		return fail("another process listens there: stop it or choose another port")
	}
	if err != nil {
		return fail("%w", err)
	}
	if scheme == "tls" {
		return tlsListener{l, o.TLS}, nil
	}
	return l, nil
}

// maxSocketPath is sizeof(sockaddr_un.sun_path), including the terminating zero.
const maxSocketPath = 108

func listenUnix(path string, o ListenOptions) (net.Listener, error) {
	fail := func(err error) (net.Listener, error) { return nil, fmt.Errorf("listen on unix://%s: %w", path, err) }
	if !strings.HasPrefix(path, "/") {
		return fail(fmt.Errorf("%w: the path must be absolute: unix:///PATH", ErrAddress))
	}
	if len(path) >= maxSocketPath {
		return fail(fmt.Errorf("%w: the path has %d bytes, and the kernel's limit is %d: choose a shorter one",
			ErrAddress, len(path), maxSocketPath-1))
	}
	// The default path is in its own folder under /run, which is empty after a boot.
	if err := os.MkdirAll(filepath.Dir(path), 0o755); errors.Is(err, fs.ErrPermission) {
		return fail(fmt.Errorf("%w (choose a path in a folder of yours)", err))
	} else if err != nil {
		return fail(err)
	}
	if err := removeStale(path); err != nil {
		return fail(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return fail(err)
	}
	if err := permit(path, o); err != nil {
		return fail(errors.Join(err, l.Close()))
	}
	return l, nil
}

// removeStale removes a socket whose server is gone.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return errors.New("a file that is not a socket is there: remove it or choose another path")
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		c.Close()
		return errors.New("another server answers there: stop it or choose another path")
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return err
	}
	return os.Remove(path)
}

// permit sets mode and group. Until then the umask applies, which by default lets nobody else write.
func permit(path string, o ListenOptions) error {
	if o.SocketGroup != "" {
		gid, err := strconv.Atoi(o.SocketGroup)
		if err != nil {
			g, err := user.LookupGroup(o.SocketGroup)
			if err != nil {
				return err
			}
			if gid, err = strconv.Atoi(g.Gid); err != nil {
				return err
			}
		}
		if err := os.Chown(path, -1, gid); err != nil {
			return err
		}
	}
	return os.Chmod(path, 0o660) // trainers of the same group can connect, which takes write permission
}
