package peer

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/certtest"
	"github.com/shoalfs/shoal/lab/rig/synced"
)

func nothing() any { return nil }

func newBedTLS(t testing.TB, s *shelf, server, client *tls.Config) *bed {
	t.Helper()
	b := &bed{shelf: s, log: &synced.Buffer{}}
	b.server = NewServer(ServerConfig{Self: "node-b", Version: "v0", Serving: s, Memory: 32 << 20, TLS: server,
		Info: nothing, Log: quiet(b.log)})
	l := listen(t)
	done := make(chan error, 1)
	go func() { done <- b.server.Listen(l) }()
	b.client = newPatient(ClientConfig{TLS: client, Log: quiet(b.log)})
	b.node = Node{ID: "node-b", Address: l.Addr().String()}
	t.Cleanup(func() {
		b.client.Close()
		b.server.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if st := b.server.Stats(); st.InFlight != 0 || st.Memory != 0 || st.Connections != 0 || s.lent.Load() != 0 ||
			s.open.Load() != 0 || s.early.Load() != 0 {
			t.Errorf("left: %+v, %d lent, %d open, %d early", st, s.lent.Load(), s.open.Load(), s.early.Load())
		}
	})
	return b
}

func TestTLS(t *testing.T) {
	config := func(cert, key, ca string) *tls.Config {
		t.Helper()
		c, err := TLS(cert, key, ca)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	ours, others := certtest.New(t, "ours"), certtest.New(t, "others")
	node := func(a, trusts *certtest.Authority, valid time.Duration) *tls.Config {
		cert, key := a.Issue(t, "node", valid)
		return config(cert, key, trusts.File)
	}
	good := node(ours, ours, time.Hour)
	none := good.Clone()
	none.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return new(tls.Certificate), nil
	}
	for name, tt := range map[string]struct {
		server, client *tls.Config
		ok             bool
	}{
		"right":                            {good, node(ours, ours, time.Hour), true},
		"a client of another authority":    {good, node(others, ours, time.Hour), false},
		"a server of another authority":    {node(others, ours, time.Hour), good, false},
		"a client that trusts another":     {good, node(ours, others, time.Hour), false},
		"a client without a certificate":   {good, none, false},
		"a client's certificate has ended": {good, node(ours, ours, -time.Minute), false},
		"a server's certificate has ended": {node(ours, ours, -time.Minute), good, false},
		"a plain client":                   {good, nil, false},
		"a plain server":                   {nil, good, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBedTLS(t, newShelf(1, 2), tt.server, tt.client)
			pieces := want(1<<20, 1, 2, 3)
			if n := b.read(t, pieces); n != 3 && tt.ok || n != 0 && !tt.ok {
				t.Errorf("%d filled: %+v\n%s", n, b.stats(), b.log)
			}
			if s := b.stats(); (s.State == "on") != tt.ok {
				t.Errorf("%+v", s)
			}
			r, err := b.client.File(t.Context(), b.node, "manifest-1")
			if (err == nil) != tt.ok {
				t.Errorf("a manifest: %v", err)
			}
			if plain := tt.server == nil ||
				tt.client == nil; plain != strings.Contains(b.stats().Cause, "--cluster-cert") ||
				plain != (err != nil && strings.Contains(err.Error(), "--cluster-cert")) {
				t.Errorf("what is wrong is said as %q and %v", b.stats().Cause, err)
			}
			if err == nil {
				got, err := io.ReadAll(r)
				if err != nil || !bytes.Equal(got, noise) {
					t.Errorf("%d bytes of a manifest, %v", len(got), err)
				}
				_ = r.Close()
			}
		})
	}
}

// Files are read again, so that a renewed certificate is in force, and a missing or bad one is an error at the start.
// A node that many readers want at once is not kept so busy by their handshakes that it seems to be away.
func TestFewHandshakesAtOnce(t *testing.T) {
	a := certtest.New(t, "a")
	cert, key := a.Issue(t, "node", time.Hour)
	c, err := TLS(cert, key, a.File)
	if err != nil {
		t.Fatal(err)
	}
	var now, most, all atomic.Int64
	slow := c.Clone()
	slow.VerifyConnection = func(s tls.ConnectionState) error {
		for n := now.Add(1); ; {
			if m := most.Load(); n <= m || most.CompareAndSwap(m, n) {
				break
			}
		}
		defer now.Add(-1)
		all.Add(1)
		time.Sleep(20 * time.Millisecond)
		return c.VerifyConnection(s)
	}
	b := newBedTLS(t, newShelf(1), slow, c)
	var wg sync.WaitGroup
	for range peerPlaces {
		wg.Go(func() {
			if n := b.read(t, want(10, 1)); n != 1 {
				t.Errorf("%+v", b.stats())
			}
		})
	}
	wg.Wait()
	if most.Load() > connecting || all.Load() < connecting {
		t.Errorf("%d of %d handshakes at once", most.Load(), all.Load())
	}
}

func TestTLSFiles(t *testing.T) {
	a := certtest.New(t, "a")
	cert, key := a.Issue(t, "node", time.Hour)
	_, otherKey := a.Issue(t, "node", time.Hour)
	for _, f := range [][3]string{{"", key, a.File}, {cert, "", a.File}, {cert, key, ""}, {cert, otherKey, a.File},
		{cert, key, key}, {cert, key, "/none"}} {
		if _, err := TLS(f[0], f[1], f[2]); err == nil {
			t.Errorf("%q", f)
		}
	}
	dir := t.TempDir()
	files := [3]string{filepath.Join(dir, "cert"), filepath.Join(dir, "key"), filepath.Join(dir, "ca")}
	install := func(from ...string) {
		for i, f := range from {
			b, err := os.ReadFile(f)
			if err == nil {
				err = os.WriteFile(files[i], b, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	install(cert, key, a.File)
	c, err := TLS(files[0], files[1], files[2])
	if err != nil {
		t.Fatal(err)
	}
	b := newBedTLS(t, newShelf(1), c, c)
	if n := b.read(t, want(10, 1)); n != 1 {
		t.Errorf("%+v", b.stats())
	}
	renewed := certtest.New(t, "b")
	cert, key = renewed.Issue(t, "node", time.Hour)
	install(cert, key, renewed.File)
	b.client.Retain(nil) // so that there are new connections
	if n := b.read(t, want(10, 1)); n != 1 {
		t.Errorf("renewed: %+v", b.stats())
	}
	c2, err := TLS(files[0], files[1], a.File)
	if err != nil {
		t.Fatal(err)
	}
	other := NewClient(ClientConfig{TLS: c2, Log: quiet(b.log)})
	defer other.Close()
	other.Read(t.Context(), b.node, Request{Dataset: dataset, Version: version}, want(10, 1))
	if s := other.Stats()[0]; s.Hits != 0 {
		t.Error("who trusts only the old authority takes the renewed certificate")
	}
}

func TestNode(t *testing.T) {
	b := newBed(t, newShelf())
	answer, err := http.Get("http://" + b.node.Address + basePath + "node")
	if err != nil {
		t.Fatal(err)
	}
	defer http.DefaultClient.CloseIdleConnections()
	body, err := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	if err != nil || strings.TrimSpace(string(body)) != `{"datasets":null,"id":"node-b","protocol":4,"version":"v0"}` {
		t.Errorf("%s, %v", body, err)
	}
	for _, name := range []string{"none", "..", "../manifest-1", "a/b", ""} {
		if _, err := b.client.File(t.Context(), b.node, name); err == nil {
			t.Errorf("%q", name)
		}
	}
}

// A file of which nothing more comes is given up.
func TestFileStalls(t *testing.T) {
	t.Parallel()
	l := listen(t)
	defer l.Close()
	go func() {
		if conn, err := l.Accept(); err == nil {
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
			_, _ = io.Copy(io.Discard, conn) // until it is closed
			_ = conn.Close()
		}
	}()
	c := NewClient(ClientConfig{Log: quiet(&synced.Buffer{})})
	defer c.Close()
	r, err := c.File(t.Context(), Node{ID: "a", Address: l.Addr().String()}, "manifest-1")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if got, err := io.ReadAll(r); string(got) != "abc" || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%q, %v", got, err)
	}
}
