package e2e

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/certtest"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// A feed with TLS, client certificates and tokens, by the flags alone: whoever has them reads what the order
// says, whoever lacks one is told which and what to do, and neither logs nor command lines show a token.
func TestFeedOverTLS(t *testing.T) {
	dir, paths := tree(t, 2, 20, 8<<10)
	ca, other := certtest.New(t, "e2e"), certtest.New(t, "other")
	const day = 24 * time.Hour
	cert, key := ca.Issue(t, "feed.example.org", day)
	own, ownKey := ca.Issue(t, "trainer", day)
	foreign, foreignKey := other.Issue(t, "trainer", day)
	tokens := filepath.Join(t.TempDir(), "tokens")
	write(t, tokens, []byte("# jobs\nfirst-walrus\nsecond-quokka\n"))
	good, wrong := filepath.Join(t.TempDir(), "good"), filepath.Join(t.TempDir(), "wrong")
	write(t, good, []byte("second-quokka\n"))
	write(t, wrong, []byte("third-wombat\n"))

	addr := "tls://" + ownAddress() + ":7072"
	socket := "unix://" + filepath.Join(t.TempDir(), "feed.sock")
	events := filepath.Join(t.TempDir(), "audit.log")
	var log bytes.Buffer
	cmd := exec.Command(shoalBin, "serve", bucket(t, dir), "--cache-dir", t.TempDir(), "--log-level", "debug",
		"--listen", addr, "--listen", socket,
		"--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca.File, "--token-file", tokens, "--audit-log", events)
	cmd.Env = append(os.Environ(), s3server.Env(server.URL)...)
	cmd.Stderr = &log
	p, err := subproc.Start("shoal serve", cmd)
	if err != nil {
		t.Fatal(err)
	}
	stop := func() { _ = p.Signal(syscall.SIGTERM); <-p.Done() }
	t.Cleanup(stop)
	base := []string{"--ca", ca.File, "--server-name", "feed.example.org"}
	mutual := append(base[:len(base):len(base)], "--cert", own, "--key", ownKey)
	authorized := append(mutual[:len(mutual):len(mutual)], "--token-file", good)
	within(t, 2*time.Minute, "the server answers", func() bool {
		if err := p.Failed(); err != nil {
			t.Fatal(err)
		}
		_, _, code := shoal(t, nil, append([]string{"stat", addr}, authorized...)...)
		return code == 0
	})

	want := digest(t, dir, paths, orderOf(t, "uniform:seed=3", len(paths)))
	if r := feed(t, addr, append([]string{"--seed", "3", "--batch", "7"}, authorized...)...); r.Digest != want {
		t.Errorf("over TLS: %d samples with another digest than the order's", r.Samples)
	}
	// The token from the environment, over the socket.
	out, errs, code := shoal(t, []string{"SHOAL_FEED_TOKEN=first-walrus"}, "feed", socket, "--seed", "3", "--batch",
		"7", "--json")
	if code != 0 || !strings.Contains(out, want) {
		t.Errorf("over the socket with a token of the environment: exit %d, %s", code, errs)
	}
	for _, c := range []struct {
		name  string
		addr  string
		flags []string
		code  int
		want  []string
	}{
		{"no token", addr, mutual, 1, []string{"requires a token", "--token-file", "SHOAL_FEED_TOKEN"}},
		{"wrong token", addr, append(mutual[:len(mutual):len(mutual)], "--token-file", wrong), 1,
			[]string{"does not accept this token"}},
		{"no token on the socket", socket, nil, 1, []string{"requires a token"}},
		{"no certificate", addr, append(base[:len(base):len(base)], "--token-file", good), 1,
			[]string{"certificate required", "--cert and --key"}},
		{"a foreign certificate", addr, append(base[:len(base):len(base)], "--cert", foreign, "--key", foreignKey), 1,
			[]string{"--tls-client-ca"}},
		{"unknown authority", addr, []string{"--ca", other.File, "--server-name", "feed.example.org"}, 1,
			[]string{"unknown authority", "--ca FILE"}},
		{"wrong name", addr, []string{"--ca", ca.File}, 1, []string{"--server-name"}},
		{"plain", strings.Replace(addr, "tls:", "tcp:", 1), nil, 1, []string{"tls://"}},
		{"certificates on a socket", socket, base, 2, []string{"tls://HOST:PORT"}},
		{"a file that is not there", addr, []string{"--ca", "/nonexistent/ca.crt"}, 2, []string{"/nonexistent/ca.crt"}},
	} {
		for _, verb := range []string{"feed", "stat"} {
			_, errs, code := shoal(t, nil, append([]string{verb, c.addr}, c.flags...)...)
			if code != c.code || strings.Count(errs, "\n") != 1 {
				t.Errorf("%s, %s: exit %d\n%s", verb, c.name, code, errs)
			}
			for _, w := range c.want {
				if !strings.Contains(errs, w) {
					t.Errorf("%s, %s: %q is not said:\n%s", verb, c.name, w, errs)
				}
			}
		}
	}
	stop()
	for _, secret := range []string{"walrus", "quokka", "wombat"} {
		if strings.Contains(log.String(), secret) || strings.Contains(string(content(t, events)), secret) {
			t.Errorf("a log shows a token")
		}
	}
	audited(t, events,
		map[string]string{"event": "feed_open", "peer.tls_subject": "CN=trainer", "peer.network": "tcp",
			"peer.token": fingerprint("second-quokka"), "samples": ""},
		map[string]string{"event": "feed_end", "peer.tls_subject": "CN=trainer", "samples": "40", "session": "*"},
		map[string]string{"event": "feed_open", "peer.network": "unix", "peer.uid": fmt.Sprint(os.Getuid()),
			"peer.comm": "shoal", "peer.token": fingerprint("first-walrus")},
		map[string]string{"event": "feed_call", "outcome": "refused", "peer.token": "", "cause": "*",
			"peer.tls_subject": "CN=trainer"},
		map[string]string{"event": "feed_call", "outcome": "refused", "peer.token": fingerprint("third-wombat")},
		map[string]string{"event": "feed_connect", "outcome": "refused", "peer.address": "*"},
		map[string]string{"event": "serve_end"},
	)
	if !strings.Contains(log.String(), "without a valid token") {
		t.Errorf("the log does not tell who was refused:\n%.3000s", log.String())
	}
}

// What `shoal serve` refuses to start with.
func TestServeRefusesUnsafe(t *testing.T) {
	_, env := far(t, proxy.Options{})
	ca := certtest.New(t, "e2e")
	cert, key := ca.Issue(t, "feed.example.org", time.Hour)
	otherCert, _ := ca.Issue(t, "other.example.org", time.Hour)
	empty := filepath.Join(t.TempDir(), "tokens")
	write(t, empty, []byte("# none\n"))
	for _, c := range []struct {
		flags []string
		code  int
		want  string
	}{
		{[]string{"--listen", "tcp://0.0.0.0:0"}, 1, "use tls://"},
		{[]string{"--listen", "tls://127.0.0.1:0"}, 2, "--tls-cert and --tls-key"},
		{[]string{"--listen", "tls://127.0.0.1:0", "--tls-cert", cert}, 2, "--tls-key"},
		{[]string{"--listen", "tls://127.0.0.1:0", "--tls-client-ca", ca.File}, 2, "--tls-cert"},
		{[]string{"--listen", "tls://127.0.0.1:0", "--tls-cert", otherCert, "--tls-key", key}, 1, "does not match"},
		{[]string{"--listen", "tls://0.0.0.0:0", "--tls-cert", cert, "--tls-key", key}, 1, "--tls-client-ca"},
		{[]string{"--token-file", empty}, 1, "holds no token"},
		{[]string{"--token-file", "/nonexistent/tokens"}, 1, "/nonexistent/tokens"},
	} {
		args := append([]string{"serve", "s3://no-such-bucket/train", "--cache-dir", t.TempDir()}, c.flags...)
		if _, errs, code := shoal(t, env, args...); code != c.code || !strings.Contains(errs, c.want) {
			t.Errorf("%v: exit %d\n%s", c.flags, code, errs)
		}
	}
}
