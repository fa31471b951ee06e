package s3

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

const (
	// schemeDoubt is how long the first request may remain unanswered before the port is tried with the other scheme:
	// a server that waits for a request does not answer a TLS handshake.
	schemeDoubt = time.Second
	schemeTime  = time.Second // of that try
)

var (
	errNoTLS = errors.New("the server at this port speaks plain HTTP, not TLS")
	errTLS   = errors.New("the server at this port speaks TLS, not plain HTTP")
)

// errScheme says that the endpoint's port does not speak its scheme.
func (s *Store) errScheme() error {
	if s.secure() {
		return errNoTLS
	}
	return errTLS
}

// remedyScheme is the setting for the other scheme at the same port.
func (s *Store) remedyScheme() string {
	other, _ := s.otherScheme()
	return fmt.Sprintf(remedyScheme, s.variable, other)
}

// otherScheme returns the endpoint with the other scheme, at the same port, and that port's address.
func (s *Store) otherScheme() (endpoint, addr string) {
	host := strings.TrimPrefix(strings.TrimPrefix(s.endpoint, "http://"), "https://")
	if s.secure() {
		addr = withPort(host, "443")
		return "http://" + addr, addr
	}
	addr = withPort(host, "80")
	return "https://" + addr, addr
}

func (s *Store) secure() bool { return strings.HasPrefix(s.endpoint, "https://") }

// speaksOther reports whether the endpoint's port speaks HTTP although the endpoint says https, or TLS although it
// says http. It sends no data of the user.
func (s *Store) speaksOther(ctx context.Context) bool {
	if p, err := s.proxy(); p != nil || err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, schemeTime)
	defer cancel()
	_, addr := s.otherScheme()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return false
	}
	defer conn.Close()
	if !s.secure() {
		return tls.Client(conn, &tls.Config{InsecureSkipVerify: true}).HandshakeContext(ctx) == nil //nolint:gosec
	}
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(past) })()
	if _, err := fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\nUser-Agent: shoal\r\nConnection: close\r\n\r\n",
		addr); err != nil {
		return false
	}
	var head [len("HTTP/1.1 400")]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil || !bytes.HasPrefix(head[:], []byte("HTTP/1.")) {
		return false
	}
	if string(head[len(head)-3:]) != "400" {
		return true
	}
	text, _ := io.ReadAll(io.LimitReader(conn, 4<<10)) // TLS servers answer with the advice to use it
	text = bytes.ToUpper(text)
	return !bytes.Contains(text, []byte("HTTPS")) && !bytes.Contains(text, []byte("SSL"))
}

// probeEither is probe, which ends with [Store.errScheme] if the scheme is the reason for no answer.
func (s *Store) probeEither(ctx context.Context) error {
	pctx, cancel := context.WithCancel(ctx)
	defer cancel()
	other := make(chan bool, 1)
	look := time.AfterFunc(schemeDoubt, func() {
		yes := s.speaksOther(pctx)
		if yes {
			cancel()
		}
		other <- yes
	})
	err := s.probe(pctx)
	if err == nil {
		cancel() // the probe is no longer needed
	}
	mistaken := false
	if !look.Stop() {
		mistaken = <-other
	} else if kind := objstore.KindOf(err); kind == objstore.KindTransient || kind == objstore.KindInvalid {
		// many TLS servers answer 400
		mistaken = s.speaksOther(ctx)
	}
	if err != nil && mistaken {
		return &objstore.Error{Op: "check", Key: s.url(""), Kind: objstore.KindInvalid, Err: s.errScheme(),
			Remedy: s.remedyScheme()}
	}
	return err
}

// proxy returns the proxy that requests go through; nil for none.
func (s *Store) proxy() (*url.URL, error) {
	u, err := url.Parse(s.endpoint)
	if err != nil {
		return nil, err
	}
	return s.transport.Proxy(&http.Request{URL: u})
}
