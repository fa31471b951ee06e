package loader

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"time"
)

// TLSFiles are the PEM files of a listener at tls://.
type TLSFiles struct {
	Cert string // the server's certificate, followed by those of intermediate authorities
	Key  string
	// ClientCA are the authorities that sign clients' certificates. If set, clients without such a certificate are
	// refused (mTLS).
	ClientCA string
	Protocol string // in ALPN; "": h2, which gRPC's clients require
}

// ErrTLS says that one of the two files is missing.
var ErrTLS = errors.New("TLS needs a certificate and its key: pass both --tls-cert and --tls-key")

// ServerTLS returns a TLS configuration for a feed. The files are checked at every new connection, so that a renewed
// certificate is in force at once; existing connections go on.
func ServerTLS(f TLSFiles, log *slog.Logger) (*tls.Config, error) {
	if f.Cert == "" || f.Key == "" {
		return nil, ErrTLS
	}
	paths := []string{f.Cert, f.Key}
	if f.ClientCA != "" {
		paths = append(paths, f.ClientCA)
	}
	files, err := newReloaded("TLS files", paths, log, f.load)
	if err != nil {
		return nil, err
	}
	outer := files.value.Clone() // Listen checks its ClientAuth
	outer.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return files.get(), nil }
	return outer, nil
}

// load reads the files.
func (f TLSFiles) load() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, fmt.Errorf("certificate %s with key %s: %w", f.Cert, f.Key, err)
	}
	c := &tls.Config{
		Certificates: []tls.Certificate{pair},
		MinVersion:   tls.VersionTLS12, // the least that HTTP/2 allows
		NextProtos:   []string{cmp.Or(f.Protocol, "h2")},
	}
	if f.ClientCA == "" {
		return c, nil
	}
	pem, err := os.ReadFile(f.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("client authorities: %w", err)
	}
	c.ClientCAs = x509.NewCertPool()
	if !c.ClientCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("client authorities: %s holds no PEM certificate", f.ClientCA)
	}
	c.ClientAuth = tls.RequireAndVerifyClientCert
	return c, nil
}

// tlsListener speaks TLS on accepted connections. The first Read performs the handshake, in the connection's own
// goroutine.
type tlsListener struct {
	net.Listener
	config *tls.Config
}

func (l tlsListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return tlsConn{tls.Server(c, l.config)}, nil
}

// lingerTime is how long a refused client may take to read the reason.
const lingerTime = time.Second

// tlsConn lets a refused client see the reason. In TLS 1.3 a client has completed its handshake and sent its first
// request before the server checks its certificate. Closing the socket with that request unread resets the connection,
// and the alert on its way to the client is lost.
type tlsConn struct{ *tls.Conn }

func (c tlsConn) Close() error {
	if tcp, ok := c.NetConn().(*net.TCPConn); ok && !c.ConnectionState().HandshakeComplete {
		if tcp.CloseWrite() == nil && tcp.SetReadDeadline(time.Now().Add(lingerTime)) == nil {
			_, _ = io.Copy(io.Discard, io.LimitReader(tcp, 1<<20)) // until the client closes its end
		}
	}
	return c.Conn.Close()
}
