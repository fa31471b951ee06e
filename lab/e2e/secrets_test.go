package e2e

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/otlp"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/lab/rig/synced"
)

// secrets are words that must come out nowhere, by what they are.
type secrets map[string]string

// wanted has every form in which a secret may show.
func (s secrets) wanted() map[string]string {
	forms := map[string]string{}
	for what, v := range s {
		for form, text := range map[string]string{
			"": v, " in base64": strings.TrimRight(base64.StdEncoding.EncodeToString([]byte(v)), "="),
			" in URL's base64": strings.TrimRight(base64.URLEncoding.EncodeToString([]byte(v)), "="),
			" in hex":          hex.EncodeToString([]byte(v)),
			" in HEX":          strings.ToUpper(hex.EncodeToString([]byte(v))), " escaped": url.QueryEscape(v),
		} {
			forms[text] = what + form
		}
	}
	return forms
}

// book is what has come out of the processes, by where.
type book struct {
	t   *testing.T
	of  secrets
	mu  sync.Mutex
	len int
}

// add looks through an output.
func (b *book) add(where string, text []byte) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.len += len(text)
	for secret, what := range b.of.wanted() {
		if i := bytes.Index(text, []byte(secret)); i >= 0 {
			b.t.Errorf("%s holds the %s: …%.120q", where, what, text[max(0, i-60):])
		}
	}
}

// TestBookFinds: the search itself can fail.
func TestBookFinds(t *testing.T) {
	forms := secrets{"key": "a+b/c"}.wanted()
	for _, text := range []string{"x a+b/c y", "YStiL2M=", "612b622f63", "a%2Bb%2Fc"} {
		found := false
		for secret := range forms {
			found = found || strings.Contains(text, secret)
		}
		if !found {
			t.Errorf("%q is not found in %v", text, forms)
		}
	}
}

// forwarder is an HTTP proxy that wants a password, before the store. It counts who came with it.
type forwarder struct {
	*httptest.Server
	mu      sync.Mutex
	good    int
	refused int
	fail    bool // answer 500 with what was sent, as a careless proxy may
}

func forward(t *testing.T, to, password string) *forwarder {
	target, err := url.Parse(to)
	if err != nil {
		t.Fatal(err)
	}
	f := &forwarder{}
	// The Host header stays: it is signed.
	back := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", target.Host, r.In.Host
	}}
	want := "Basic " + base64.StdEncoding.EncodeToString([]byte("user:"+password))
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		ok, fail := r.Header.Get("Proxy-Authorization") == want, f.fail
		if ok {
			f.good++
		} else {
			f.refused++
		}
		f.mu.Unlock()
		switch {
		case !ok:
			w.Header().Set("Proxy-Authenticate", "Basic")
			http.Error(w, "wrong password: "+r.Header.Get("Proxy-Authorization"), http.StatusProxyAuthRequired)
		case fail:
			w.Header().Set("Content-Type", "application/xml")
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprintf(w, "<Error><Code>SignatureDoesNotMatch</Code><Message>%s %s token=%s</Message></Error>",
				r.Header.Get("Authorization"), r.URL, r.Header.Get("X-Amz-Security-Token"))
		default:
			back.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(f.Close)
	return f
}

// has reports whether a verb knows a flag.
func has(t *testing.T, verb, flag string) bool {
	return strings.Contains(mustShoal(t, nil, verb, "--help"), flag)
}

// Everything that a daemon and its verbs say, on every way out, while all goes well and while nothing does, at the
// log level that says most: no secret in it.
func TestSecretsStayInside(t *testing.T) {
	of := secrets{
		"secret key": s3server.SecretKey, "session token": "sessiontokenXq1/+v8", "feed token": "feedtoken-Zr7wQ9",
		"wrong feed token": "wrongtoken-Lm3xE2",
		"proxy's password": "proxypassword-Jk5", "wrong proxy password": "otherpassword-Bn4",
		"collector's header": "collectorheader-Ty8", "wrong secret key": "wrongsecretkey-Po6",
		"presigned signature": "presignedsignature0ff1ce", "endpoint's password": "endpointpassword-Hg2",
		"web identity": "eyJwebidentitytoken", "encryption key": "encryptionkey-of-32-bytes-Wd3!!!",
		"key of the objects": "customerkey-of-32-bytes-Rf7!!!!!",
	}
	b := &book{t: t, of: of}
	dir, paths := tree(t, 2, 12, 8<<10)
	source := bucket(t, dir)
	collector := otlp.Start()
	defer collector.Close()
	proxy := forward(t, server.URL, of["proxy's password"])

	// The store's name leads nowhere but through the proxy.
	env := append(s3server.Env("http://store.test"),
		"HTTP_PROXY="+strings.Replace(proxy.URL, "http://", "http://user:"+of["proxy's password"]+"@", 1),
		"NO_PROXY=127.0.0.1", "SHOAL_FEED_TOKEN="+of["feed token"],
		"OTEL_EXPORTER_OTLP_ENDPOINT="+collector.URL, "OTEL_EXPORTER_OTLP_HEADERS=x-key="+of["collector's header"],
		"OTEL_BSP_SCHEDULE_DELAY=100")
	if has(t, "serve", "--encryption-key-file") {
		if len(of["encryption key"]) != 32 {
			t.Fatal(len(of["encryption key"]))
		}
		env = append(env, "SHOAL_ENCRYPTION_KEY="+hex.EncodeToString([]byte(of["encryption key"])))
	}
	run := func(env []string, args ...string) int {
		t.Helper()
		out, errs, code := shoal(t, env, args...)
		where := "shoal " + args[0]
		b.add(where+", standard output", []byte(out))
		b.add(where+", standard error", []byte(errs))
		if strings.Contains(errs, "was removed") {
			t.Errorf("wrong use: %s", errs)
		}
		return code
	}

	// While all goes well.
	cache, mnt := t.TempDir(), t.TempDir()
	addr := "unix://" + filepath.Join(t.TempDir(), "feed.sock")
	admin := freePort(t)
	daemon := exec.Command(shoalBin, "serve", source, "--listen", addr, "--mount", mnt, "--cache-dir", cache, "--order",
		"none", "--kernel-cache", "off",
		"--admin", admin, "--log-level", "debug,json")
	daemon.Env = append(append(os.Environ(), "SHOAL_PPROF=1"), env...)
	var said synced.Buffer
	daemon.Stdout, daemon.Stderr = &said, &said
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- daemon.Wait() }()
	stop := sync.OnceFunc(func() {
		_ = daemon.Process.Signal(syscall.SIGTERM)
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Error("the daemon does not end")
			_ = daemon.Process.Kill()
			<-ended
		}
	})
	defer stop()
	for deadline := time.Now().Add(time.Minute); !mounted(mnt) ||
		!answers("http://"+admin+"/readyz"); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) || len(ended) > 0 {
			t.Fatalf("the daemon is not ready\n%s", said.String())
		}
	}
	readAll(t, mnt, dir, paths[:6])
	if code := run(env, "feed", addr, "--batch", "4", "--json"); code != 0 {
		t.Errorf("feed: exit %d", code)
	}
	wrong := append(append([]string{}, env...), "SHOAL_FEED_TOKEN="+of["wrong feed token"])
	if code := run(wrong, "feed", addr, "--batch", "4"); code != 1 {
		t.Errorf("feed with a wrong token: exit %d", code)
	}
	scrape := func(when string) {
		for _, path := range []string{
			"/stats", "/metrics", "/api/history", "/api/cachemap", "/api/verdict", "/api/config", "/", "/healthz",
			"/readyz", "/debug/vars", "/debug/requests", "/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/symbol",
			"/debug/pprof/goroutine?debug=2", "/debug/pprof/goroutine?debug=1", "/debug/pprof/heap?debug=1",
			"/debug/pprof/heap", "/debug/pprof/allocs", "/debug/pprof/threadcreate?debug=1",
			"/debug/pprof/block?debug=1", "/debug/pprof/mutex?debug=1", "/debug/pprof/profile?seconds=1",
			"/debug/pprof/trace?seconds=0.2", "/nowhere",
		} {
			b.add(path+" "+when, fetchAll(t, "http://"+admin+path))
		}
		for _, name := range []string{"stats", "order", "plan"} {
			text, _ := exec.Command("cat", filepath.Join(mnt, ".shoal", name)).Output()
			b.add(".shoal/"+name+" "+when, text)
		}
		for _, args := range [][]string{{"stat", mnt}, {"stat", mnt, "--json"}, {"stat", addr, "--json"},
			{"cache", "ls", cache, "--json"}, {"config"}, {"doctor", source}} {
			run(env, args...)
		}
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", daemon.Process.Pid))
		if err != nil {
			t.Error(err)
		}
		b.add("the daemon's command line", text)
	}
	scrape("while all goes well")
	proxy.mu.Lock()
	good := proxy.good
	proxy.fail = true
	proxy.mu.Unlock()

	// While the store refuses, and says again what it was sent.
	for _, p := range paths[6:9] {
		out, _ := exec.Command("cat", filepath.Join(mnt, p)).CombinedOutput()
		b.add("cat", out)
	}
	run(env, "refresh", mnt)
	run(env, "feed", addr, "--batch", "4", "--transform", "RandomResizedCrop(8)", "--json")
	scrape("while the store refuses")

	// Verbs that fail, each in its own way.
	with := func(more ...string) []string { return append(append([]string{}, env...), more...) }
	direct := func(more ...string) []string { return append(s3server.Env(server.URL), more...) }
	files := t.TempDir()
	file := func(name, text string) string {
		write(t, filepath.Join(files, name), []byte(text))
		return filepath.Join(files, name)
	}
	warm := func(env []string, source string, flags ...string) {
		t.Helper()
		if run(env, append([]string{"warm", source, "--cache-dir", filepath.Join(t.TempDir(), "c"), "--log-level",
			"debug"}, flags...)...) == 0 {
			t.Errorf("it did not fail: %v", flags)
		}
	}
	warm(env, source)
	warm(with("AWS_SESSION_TOKEN="+of["session token"]), source)
	warm(direct("AWS_SESSION_TOKEN="+of["session token"]), source) // the server knows of none
	warm(direct("AWS_SECRET_ACCESS_KEY="+of["wrong secret key"]), source)
	warm(direct("AWS_ACCESS_KEY_ID="), source)
	warm(with("HTTP_PROXY="+strings.Replace(proxy.URL, "http://", "http://user:"+of["wrong proxy password"]+"@", 1)),
		source)
	warm(with("HTTP_PROXY=http://user:"+of["wrong proxy password"]+"@127.0.0.1:x%zz"), source)
	warm(with("HTTP_PROXY=http://user:"+of["wrong proxy password"]+"@127.0.0.1:1"), source)
	warm(direct("AWS_ENDPOINT_URL=http://user:"+of["endpoint's password"]+"@127.0.0.1:1"), source)
	warm(direct("AWS_ENDPOINT_URL=http://user:"+of["endpoint's password"]+"@127.0.0.1:x%zz"), source)
	warm(env, "https://bucket.s3.amazonaws.com/train?X-Amz-Signature="+of["presigned signature"])
	warm(env, source+"?X-Amz-Signature="+of["presigned signature"])
	warm(env, "s3://user:"+of["endpoint's password"]+"@bucket/train")
	noKeys := []string{"AWS_ENDPOINT_URL=" + server.URL, "AWS_REGION=us-east-1", "AWS_ACCESS_KEY_ID=",
		"AWS_SECRET_ACCESS_KEY=", "AWS_EC2_METADATA_DISABLED=true"}
	warm(append(noKeys, "AWS_SHARED_CREDENTIALS_FILE="+
		file("torn", "[default]\naws_access_key_id = x\naws_secret_access_key "+of["wrong secret key"]+"\n")), source)
	warm(append(noKeys, "AWS_SHARED_CREDENTIALS_FILE="+
		file("odd", "[default\naws_secret_access_key = "+of["wrong secret key"]+"\n")), source)
	warm(append(noKeys, "AWS_SHARED_CREDENTIALS_FILE="+
		file("process", "[default]\ncredential_process = sh -c 'echo "+of["wrong secret key"]+"; exit 1'\n")), source)
	for _, sts := range []string{"http://127.0.0.1:1", proxy.URL} {
		warm(append(noKeys, "AWS_WEB_IDENTITY_TOKEN_FILE="+file("token", of["web identity"]),
			"AWS_ROLE_ARN=arn:aws:iam::1:role/r", "AWS_ENDPOINT_URL_STS="+sts), source)
	}
	if has(t, "warm", "--encryption-key-file") {
		warm(direct("SHOAL_ENCRYPTION_KEY="+of["encryption key"]+"-too-long"), source)
		warm(direct(), source, "--encryption-key-file", file("key", of["encryption key"]+"-too-long"))
	}
	// by http, to a host that is not this one
	warm(with("SHOAL_SSE_C_KEY="+hex.EncodeToString([]byte(of["key of the objects"]))), source)
	// the server takes any
	run(direct("SHOAL_SSE_C_KEY="+hex.EncodeToString([]byte(of["key of the objects"]))), "warm", source, "--cache-dir",
		filepath.Join(files, "sse-c"))
	warm(direct("SHOAL_SSE_C_KEY="+of["key of the objects"]+"-too-long"), source)
	run(with("OTEL_EXPORTER_OTLP_ENDPOINT=http://user:"+of["endpoint's password"]+"@127.0.0.1:1"), "warm", source,
		"--cache-dir", filepath.Join(t.TempDir(), "c"))
	run(with("OTEL_EXPORTER_OTLP_HEADERS=x-key "+of["collector's header"]), "warm", source, "--cache-dir",
		filepath.Join(t.TempDir(), "c"))
	run([]string{"SHOAL_FEED_TOKEN=" + of["feed token"] + " x"}, "serve", dir, "--listen",
		"unix://"+filepath.Join(files, "s"), "--cache-dir", filepath.Join(files, "c"))
	run(env, "serve", dir, "--listen", "unix://"+filepath.Join(files, "s"), "--cache-dir", filepath.Join(files, "c"),
		"--token-file", file("tokens", of["feed token"]+" x\n"))
	run(env, "plan", source)
	run(env, "pack", source, filepath.Join(files, "packed"))

	stop()
	b.add("the daemon's log", []byte(said.String()))
	err := filepath.WalkDir(cache, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		b.add("the file "+filepath.Base(path)+" of the cache directory", text)
		return err
	})
	if err != nil {
		t.Error(err)
	}
	sent := 0
	for _, s := range collector.Spans() {
		b.add("a span", fmt.Appendf(nil, "%+v", s))
		sent++
	}

	// The secrets were in use, or nothing was shown.
	if headers := collector.Headers(); sent == 0 || len(headers) == 0 ||
		headers[0].Get("X-Key") != of["collector's header"] {
		t.Errorf("%d spans, headers %v", sent, headers)
	}
	if good == 0 || proxy.refused == 0 {
		t.Errorf("the proxy was asked %d times with its password, and refused %d", good, proxy.refused)
	}
	if !strings.Contains(said.String(), "without a valid token") ||
		!strings.Contains(said.String(), `"level":"DEBUG"`) && !strings.Contains(said.String(), `"level":"WARN"`) {
		t.Errorf("the log does not tell of the wrong token:\n%.2000s", said.String())
	}
	for line := range strings.Lines(said.String()) {
		if !strings.HasPrefix(line, "{") || !strings.HasSuffix(line, "}\n") {
			t.Errorf("a line that is no JSON: %q", line)
		}
	}
	t.Logf("%d bytes looked through", b.len)
}

func answers(url string) bool {
	resp, err := http.Get(url)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// fetchAll returns headers and body of an answer, whatever its status.
func fetchAll(t *testing.T, url string) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Errorf("%s: %v", url, err)
		return nil
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%s: %v", url, err)
	}
	return fmt.Appendf(body, "\n%v", resp.Header)
}
