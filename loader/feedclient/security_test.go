package feedclient

import (
	"crypto/tls"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/shoalfs/shoal/lab/rig/certtest"
)

// A client that writes when the server has refused it and closed hears from the reader what the server said.
func TestRefusedBeforeItHasWritten(t *testing.T) {
	ca := certtest.New(t, "ca")
	certFile, keyFile := ca.Issue(t, "feed.example.org", time.Hour)
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0",
		&tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAnyClientCert,
			NextProtos: []string{"h2"}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	closed := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			_ = c.(*tls.Conn).Handshake()
			err = c.Close()
		}
		closed <- err
	}()
	raw, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	c, err := Security{CA: ca.File, ServerName: "feed.example.org"}.tls()
	if err != nil {
		t.Fatal(err)
	}
	broken := &resettable{Conn: raw}
	conn, _, err := readerTells{credentials.NewTLS(c)}.ClientHandshake(t.Context(), "feed.example.org", broken)
	if err != nil {
		t.Fatal(err)
	}
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	broken.reset = true
	if _, err := conn.Write([]byte("preface")); err != nil {
		t.Fatalf("write: %v", err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "certificate required") {
		t.Errorf("read: %v", err)
	}
}

// resettable is a connection on which writing fails once the other side has answered by a reset.
type resettable struct {
	net.Conn
	reset bool
}

func (c *resettable) Write(p []byte) (int, error) {
	if c.reset {
		return 0, &net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.ECONNRESET)}
	}
	return c.Conn.Write(p)
}
