package feedclient

import (
	"crypto/tls"
	"net"
	"strings"
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
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAnyClientCert, NextProtos: []string{"h2"}})
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
	conn, _, err := readerTells{credentials.NewTLS(c)}.ClientHandshake(t.Context(), "feed.example.org", raw)
	if err != nil {
		t.Fatal(err)
	}
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	for range 20 { // the first is answered by a reset, which the next ones meet
		if _, err := conn.Write([]byte("preface")); err != nil {
			t.Fatalf("write: %v", err)
		}
		time.Sleep(time.Millisecond)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "certificate required") {
		t.Errorf("read: %v", err)
	}
}
