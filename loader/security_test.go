package loader_test

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/shoalfs/shoal/lab/rig/certtest"
	"github.com/shoalfs/shoal/lab/rig/synced"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// logged is a log that a test may look into.
type logged struct{ synced.Buffer }

func (l *logged) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// secured serves on a port of loopback until the test ends and returns its host:port.
func secured(t *testing.T, scheme string, o loader.Options, c *tls.Config) string {
	t.Helper()
	o.Compile = compileRamp
	ds := &testDataset{Samples: 20}
	server := loader.NewServer(func() loader.Dataset { return ds }, o)
	l, err := loader.Listen(scheme+"://127.0.0.1:0", loader.ListenOptions{TLS: c})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

// try reads an epoch on a connection of its own.
func try(t *testing.T, addr string, s feedclient.Security) error {
	t.Helper()
	c, err := feedclient.Dial(addr, s)
	if err != nil {
		return err
	}
	defer c.Close()
	stream, err := c.Open(t.Context(), &feedpb.Open{Batch: 5, Epochs: 1, Order: "sequential"})
	if err != nil {
		return err
	}
	defer stream.Close()
	if ids := drain(t, stream); len(ids) != 20 {
		t.Errorf("%d samples", len(ids))
	}
	return nil
}

func serverTLS(t *testing.T, f loader.TLSFiles, log *slog.Logger) *tls.Config {
	t.Helper()
	c, err := loader.ServerTLS(f, log)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A client reads over TLS what it would without, and is told why it cannot, and what to do.
func TestTLS(t *testing.T) {
	ours, other := certtest.New(t, "ours"), certtest.New(t, "other")
	const day = 24 * time.Hour
	serve := func(name string, valid time.Duration, clients *certtest.Authority) string {
		cert, key := ours.Issue(t, name, valid)
		f := loader.TLSFiles{Cert: cert, Key: key}
		if clients != nil {
			f.ClientCA = clients.File
		}
		return secured(t, "tls", loader.Options{}, serverTLS(t, f, nil))
	}
	good := serve("127.0.0.1", day, nil)
	named := serve("feed.example.org", day, nil)
	expired := serve("expired.example.org", -time.Hour, nil)
	mutual := serve("mutual.example.org", day, ours)
	plain := secured(t, "tcp", loader.Options{}, nil)
	client := func(a *certtest.Authority, valid time.Duration) feedclient.Security {
		cert, key := a.Issue(t, "trainer", valid)
		return feedclient.Security{CA: ours.File, ServerName: "mutual.example.org", Cert: cert, Key: key}
	}
	for _, c := range []struct {
		name, addr string
		s          feedclient.Security
		want       []string // of the error; nil: none
	}{
		{"trusted", "tls://" + good, feedclient.Security{CA: ours.File}, nil},
		{"named", "tls://" + named, feedclient.Security{CA: ours.File, ServerName: "feed.example.org"}, nil},
		{"mutual", "tls://" + mutual, client(ours, day), nil},
		{"unknown authority", "tls://" + good, feedclient.Security{}, []string{"unknown authority", "--ca FILE"}},
		{"other authority", "tls://" + good, feedclient.Security{CA: other.File},
			[]string{"unknown authority", "--ca FILE"}},
		{"address without a name", "tls://" + named, feedclient.Security{CA: ours.File},
			[]string{"127.0.0.1", "--server-name"}},
		{"wrong name", "tls://" + named, feedclient.Security{CA: ours.File, ServerName: "another.example.org"},
			[]string{"feed.example.org", "another.example.org", "--server-name"}},
		{"expired", "tls://" + expired, feedclient.Security{CA: ours.File, ServerName: "expired.example.org"},
			[]string{"expired", "renew the server's certificate"}},
		{"no certificate", "tls://" + mutual, feedclient.Security{CA: ours.File, ServerName: "mutual.example.org"},
			[]string{"certificate required", "--cert and --key"}},
		{"certificate of another authority", "tls://" + mutual, client(other, day), []string{"--tls-client-ca"}},
		{"expired client", "tls://" + mutual, client(ours, -time.Hour), []string{"expired", "renew"}},
		{"TLS to a plain server", "tls://" + plain, feedclient.Security{CA: ours.File}, []string{"tcp://"}},
		{"plain to a TLS server", "tcp://" + good, feedclient.Security{}, []string{"tls://"}},
		{"certificates for plain TCP", "tcp://" + plain, feedclient.Security{CA: ours.File},
			[]string{"tls://HOST:PORT"}},
		{"no such authorities", "tls://" + good, feedclient.Security{CA: "/nonexistent/ca.crt"},
			[]string{"/nonexistent/ca.crt"}},
		{"a key is no authority", "tls://" + good, feedclient.Security{CA: client(ours, day).Key},
			[]string{"no PEM certificate"}},
		{"certificate without key", "tls://" + good, feedclient.Security{CA: ours.File, Cert: ours.File},
			[]string{"--key"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := try(t, c.addr, c.s)
			if c.want == nil && err != nil || c.want != nil && err == nil {
				t.Fatalf("got %v", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error %q does not say %q", err, w)
				}
			}
		})
	}
}

// A certificate that was renewed is in force at the next connection; one that is half written is not,
// and what was there before goes on.
func TestTLSReload(t *testing.T) {
	before, after := certtest.New(t, "before"), certtest.New(t, "after")
	dir := t.TempDir()
	f := loader.TLSFiles{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"),
		ClientCA: filepath.Join(dir, "ca.crt")}
	put := func(from, to string) {
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to+".new", b, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(to+".new", to); err != nil {
			t.Fatal(err)
		}
	}
	client := func(server, own *certtest.Authority) feedclient.Security {
		cert, key := own.Issue(t, "trainer", time.Hour)
		return feedclient.Security{CA: server.File, Cert: cert, Key: key}
	}
	cert, key := before.Issue(t, "127.0.0.1", time.Hour)
	put(cert, f.Cert)
	put(key, f.Key)
	put(before.File, f.ClientCA)
	log := &logged{}
	addr := "tls://" + secured(t, "tls", loader.Options{}, serverTLS(t, f, log.logger()))
	if err := try(t, addr, client(before, before)); err != nil {
		t.Fatal(err)
	}
	cert, key = after.Issue(t, "127.0.0.1", time.Hour)
	put(cert, f.Cert)
	if err := try(t, addr, client(before, before)); err != nil {
		t.Errorf("between the renewal of certificate and key: %v", err)
	}
	if !strings.Contains(log.String(), "stays in force") {
		t.Errorf("the log does not tell:\n%s", log)
	}
	put(key, f.Key)
	if err := try(t, addr, client(after, before)); err != nil {
		t.Errorf("after the renewal: %v", err)
	}
	put(after.File, f.ClientCA)
	if err := try(t, addr, client(after, after)); err != nil {
		t.Errorf("after the change of the clients' authority: %v", err)
	}
	if err := try(t, addr, client(after, before)); err == nil {
		t.Error("a client of the authority before is still let in")
	}
}

func TestServerTLSRefuses(t *testing.T) {
	a := certtest.New(t, "a")
	cert, key := a.Issue(t, "127.0.0.1", time.Hour)
	other, _ := a.Issue(t, "other", time.Hour)
	for _, c := range []struct {
		f    loader.TLSFiles
		want string
	}{
		{loader.TLSFiles{}, "--tls-cert"},
		{loader.TLSFiles{Cert: cert}, "--tls-key"},
		{loader.TLSFiles{Key: key}, "--tls-cert"},
		{loader.TLSFiles{Cert: other, Key: key}, "does not match"},
		{loader.TLSFiles{Cert: cert, Key: "/nonexistent"}, "/nonexistent"},
		{loader.TLSFiles{Cert: cert, Key: key, ClientCA: key}, "no PEM certificate"},
	} {
		if _, err := loader.ServerTLS(c.f, nil); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.f, err, c.want)
		}
	}
}

// Without one of the tokens nothing is told but that the server is there; tokens can be exchanged while
// it runs; none is ever logged.
func TestTokens(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tokens")
	write := func(text string) {
		if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	write("# of the nightly jobs\nnight-2b1f\n\n  day-77c0  \n")
	log := &logged{}
	tokens, err := loader.NewTokens("", file, log.logger())
	if err != nil {
		t.Fatal(err)
	}
	addr := "tcp://" + secured(t, "tcp", loader.Options{Tokens: tokens, Log: log.logger()}, nil)
	allowed := func(token string) bool {
		t.Helper()
		err := try(t, addr, feedclient.Security{Token: token})
		if err != nil {
			wantError(t, err, codes.Unauthenticated, "--token-file", "SHOAL_FEED_TOKEN")
		}
		return err == nil
	}
	for token, want := range map[string]bool{"night-2b1f": true, "day-77c0": true, "": false, "night-2b1": false,
		"night-2b1f0": false, "#": false} {
		if allowed(token) != want {
			t.Errorf("token %q: allowed %v", token, !want)
		}
	}
	write("night-2b1f\nnew-90aa\n")
	if allowed("day-77c0") || !allowed("new-90aa") || !allowed("night-2b1f") {
		t.Error("the file's change is not in force")
	}
	write("\n") // empty by mistake: neither open to all nor closed to all
	if allowed("") || !allowed("new-90aa") {
		t.Error("a file without tokens changed who is let in")
	}

	conn, err := grpc.NewClient("dns:///"+strings.TrimPrefix(addr, "tcp://"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
		t.Errorf("a probe of the health: %v", err)
	}
	feed := feedpb.NewFeedClient(conn)
	for name, call := range map[string]func() error{
		"info":  func() error { _, err := feed.Info(t.Context(), &feedpb.InfoRequest{}); return err },
		"stats": func() error { _, err := feed.Stats(t.Context(), &feedpb.StatsRequest{}); return err },
	} {
		if err := call(); loader.Code(err) != codes.Unauthenticated {
			t.Errorf("%s without a token: %v", name, err)
		}
	}
	for _, secret := range []string{"2b1f", "77c0", "90aa"} {
		if strings.Contains(log.String(), secret) {
			t.Errorf("the log holds a token:\n%s", log)
		}
	}
	if !strings.Contains(log.String(), "without a valid token") {
		t.Errorf("the log does not tell of those refused:\n%s", log)
	}
}

func TestNewTokens(t *testing.T) {
	if tokens, err := loader.NewTokens("", "", nil); tokens != nil || err != nil {
		t.Errorf("no token: %v, %v", tokens, err)
	}
	dir := t.TempDir()
	for i, c := range []struct{ text, file, want string }{
		{"two words", "", "spaces"}, {"naïve", "", "ASCII"}, {"", "", "holds no token"},
		{"", "# none\n\n", "holds no token"}, {"", "good\ntwo words\n", "line 2"},
	} {
		file := ""
		if c.text == "" {
			file = filepath.Join(dir, fmt.Sprint(i))
			if err := os.WriteFile(file, []byte(c.file), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := loader.NewTokens(c.text, file, nil); err == nil || !strings.Contains(err.Error(), c.want) ||
			strings.Contains(err.Error(), "two words") {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if _, err := loader.NewTokens("", filepath.Join(dir, "none"), nil); err == nil {
		t.Error("a file that is not there")
	}
}

// Beyond loopback somebody has to be authenticated, or it was asked for otherwise.
func TestListenRemote(t *testing.T) {
	a := certtest.New(t, "a")
	cert, key := a.Issue(t, "feed.example.org", time.Hour)
	open := serverTLS(t, loader.TLSFiles{Cert: cert, Key: key}, nil)
	mutual := serverTLS(t, loader.TLSFiles{Cert: cert, Key: key, ClientCA: a.File}, nil)
	for _, c := range []struct {
		addr string
		o    loader.ListenOptions
		want string // of the error; "": none
	}{
		{"tls://127.0.0.1:0", loader.ListenOptions{}, "--tls-cert"},
		{"tls://127.0.0.1:0", loader.ListenOptions{TLS: open}, ""},
		{"tls://0.0.0.0:0", loader.ListenOptions{TLS: open}, "--token-file"},
		{"tls://0.0.0.0:0", loader.ListenOptions{TLS: open, Tokens: true}, ""},
		{"tls://0.0.0.0:0", loader.ListenOptions{TLS: mutual}, ""},
		{"tcp://0.0.0.0:0", loader.ListenOptions{TLS: mutual, Tokens: true}, "use tls://"},
		{"tls://127.0.0.1", loader.ListenOptions{TLS: open}, "missing port"},
	} {
		l, err := loader.Listen(c.addr, c.o)
		if err == nil {
			l.Close()
		}
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %+v: %v, want %q", c.addr, c.o, err, c.want)
		}
	}
}
