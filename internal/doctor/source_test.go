package doctor

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/certtest"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// TestMain keeps the proxy of a machine that reaches the world through one out of what the tests ask.
func TestMain(m *testing.M) {
	if err := os.Setenv("NO_PROXY", "*"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// objects is a bucket of 40 objects of 20 KB, and its server's URL.
func objects(t testing.TB) (endpoint string) {
	t.Helper()
	dir := t.TempDir()
	for i := range 40 {
		path := filepath.Join(dir, "train", fmt.Sprintf("c%d", i%4), fmt.Sprintf("%03d.jpg", i))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, make([]byte, 20_000), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s, err := s3server.Start(t.Context(), s3server.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	if _, err := s.Upload(t.Context(), dir, "photos", "", nil); err != nil {
		t.Fatal(err)
	}
	return s.URL
}

const (
	testKey    = s3server.AccessKey
	testSecret = s3server.SecretKey
)

// environment is one with the right keys for an endpoint, and what else is given.
func environment(endpoint string, more ...string) func(string) string {
	env := map[string]string{
		"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": testKey, "AWS_SECRET_ACCESS_KEY": testSecret, "AWS_REGION": s3server.Region,
		"AWS_EC2_METADATA_DISABLED": "true",
	}
	for i := 0; i < len(more); i += 2 {
		env[more[i]] = more[i+1]
	}
	return func(name string) string { return env[name] }
}

// look runs the source's checks and returns their results by name.
func look(t testing.TB, text string, env func(string) string) (Report, map[string]Result) {
	t.Helper()
	s := &Source{Text: text, Getenv: env, quick: true, memory: 2 << 30, LedgerFor: func(memory int64, files int) int64 { return memory / 2 }}
	s.Forecast = func(_ context.Context, f Facts) Result { return ok("%d objects", len(f.Sizes)) }
	r, err := Run(t.Context(), s.checks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]Result{}
	for _, c := range r.Results {
		by[c.Check] = c
		if c.Status == Fail && (c.Measured == "" || c.Meaning == "") {
			t.Errorf("%s fails without a cause or a meaning: %+v", c.Check, c)
		}
		if c.Status == Skipped && c.Meaning == "" {
			t.Errorf("%s is skipped and does not say why: %+v", c.Check, c)
		}
	}
	text2, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{testSecret, "X-Amz-Signature", "token-of-a-session"} {
		if strings.Contains(string(text2), secret) {
			t.Errorf("the report holds %q", secret)
		}
	}
	return r, by
}

// is checks a result's status and that its texts hold a word.
func is(t testing.TB, by map[string]Result, check string, status Status, word string) {
	t.Helper()
	r, ran := by[check]
	if !ran {
		t.Errorf("no check %s", check)
	}
	if r.Status != status || !strings.Contains(r.Measured+"|"+r.Meaning+"|"+r.Remedy, word) {
		t.Errorf("%s: %+v, want %s and %q", check, r, status, word)
	}
}

// far is what the latency that was measured comes to: a machine that was busy for a second makes any store late.
func far(by map[string]Result) Status {
	v := by["latency"].Values
	if p50, p99 := v["p50_seconds"], v["p99_seconds"]; p50 > farMedian.Seconds() || p99 > longTail.Seconds() && p99 > 10*p50 {
		return Warn
	}
	return OK
}

func TestAGoodStore(t *testing.T) {
	p, err := proxy.Start(t.Context(), objects(t), proxy.Options{Latency: 20 * time.Millisecond, Sigma: 0.3, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	r, by := look(t, "s3://photos/train", environment(p.URL))
	for check, word := range map[string]string{
		"name": p.URL, "tcp": "connects", "endpoint": "HTTP", "clock": "equal to the store's", "credentials": "AWS_ACCESS_KEY_ID", "bucket": "photos",
		"listing": "40 objects", "get": "ETags", "range": "honoured", "if-match": "honoured", "memory": "40 files", "epoch": "40 objects",
	} {
		is(t, by, check, OK, word)
	}
	is(t, by, "latency", far(by), "p50")
	is(t, by, "tls", Skipped, "plain http")
	is(t, by, "dns", Skipped, "address")
	if r.Fail != 0 {
		t.Errorf("%d checks fail", r.Fail)
	}
	// The proxy makes no request faster than its latency's distribution; the machine may make it slower.
	if p50 := by["latency"].Values["p50_seconds"]; p50 < 0.008 {
		t.Errorf("p50 %g s of a store whose median is 20 ms", p50)
	}
	// How much it is the machine decides; see TestKnee for the rest.
	if v := by["bandwidth"].Values; v["connections_that_pay"] < 1 || v["bytes_per_second"] <= 0 || v["bytes_per_second"] < v["bytes_per_second_alone"] {
		t.Errorf("%+v", by["bandwidth"])
	}
	if got := p.Stats(); got.Gets == 0 || got.MaxInFlight < 2 {
		t.Errorf("what the proxy saw: %+v", got)
	}
}

func TestABadStore(t *testing.T) {
	endpoint := objects(t)
	t.Run("wrong secret", func(t *testing.T) {
		_, by := look(t, "s3://photos/train", environment(endpoint, "AWS_SECRET_ACCESS_KEY", "not-the-secret"))
		is(t, by, "endpoint", OK, "")
		is(t, by, "bucket", Fail, "AWS_SECRET_ACCESS_KEY")
		is(t, by, "listing", Skipped, "cannot be listed")
		is(t, by, "latency", Skipped, "cannot be listed")
	})
	t.Run("no such key", func(t *testing.T) {
		_, by := look(t, "s3://photos/train", environment(endpoint, "AWS_ACCESS_KEY_ID", "nobody", "AWS_SESSION_TOKEN", "token-of-a-session"))
		is(t, by, "credentials", OK, "temporary")
		is(t, by, "bucket", Fail, "")
	})
	t.Run("half a pair", func(t *testing.T) {
		_, by := look(t, "s3://photos/train", environment(endpoint, "AWS_SECRET_ACCESS_KEY", ""))
		is(t, by, "name", Fail, "AWS_SECRET_ACCESS_KEY")
		is(t, by, "bucket", Skipped, "could not be opened")
	})
	t.Run("no such bucket", func(t *testing.T) {
		_, by := look(t, "s3://fotos/train", environment(endpoint))
		is(t, by, "bucket", Fail, "bucket's name")
	})
	t.Run("empty prefix", func(t *testing.T) {
		_, by := look(t, "s3://photos/Train", environment(endpoint))
		is(t, by, "bucket", OK, "")
		is(t, by, "listing", Fail, "prefix")
		is(t, by, "get", Skipped, "no non-empty object")
	})
	t.Run("nobody listens", func(t *testing.T) {
		_, by := look(t, "s3://photos/train", environment("http://127.0.0.1:1"))
		is(t, by, "tcp", Fail, "refused")
		is(t, by, "endpoint", Fail, "AWS_ENDPOINT_URL")
		is(t, by, "bucket", Skipped, "does not answer")
	})
	t.Run("no such host", func(t *testing.T) {
		_, by := look(t, "s3://photos/train", environment("http://no-such-host.invalid.:9000")) // the dot: no search domain of this machine's has it
		is(t, by, "dns", Fail, "AWS_ENDPOINT_URL")
	})
	t.Run("no source", func(t *testing.T) {
		_, by := look(t, "gopher://photos", environment(endpoint))
		is(t, by, "name", Fail, "s3://BUCKET/PREFIX")
	})
}

// changed is a server between us and the store that changes answers.
func changed(t testing.TB, endpoint string, request func(*http.Request), answer func(*http.Response)) string {
	t.Helper()
	target, err := url.Parse(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	p := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = target.Scheme, target.Host, r.In.Host
			if request != nil {
				request(r.Out)
			}
		},
		ModifyResponse: func(r *http.Response) error {
			if answer != nil {
				answer(r)
			}
			return nil
		},
	}
	s := httptest.NewServer(p)
	t.Cleanup(s.Close)
	return s.URL
}

func TestWhatProxiesSpoil(t *testing.T) {
	endpoint := objects(t)
	for _, c := range []struct {
		name    string
		request func(*http.Request)
		answer  func(*http.Response)
		check   string
		status  Status
		word    string
	}{
		{"a clock 5 minutes ahead", nil, func(r *http.Response) {
			r.Header.Set("Date", time.Now().Add(5*time.Minute).UTC().Format(http.TimeFormat))
		}, "clock", Warn, "behind"},
		{"a clock an hour behind", nil, func(r *http.Response) { r.Header.Set("Date", time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat)) }, "clock", Fail, "ahead of"},
		{"no date", nil, func(r *http.Response) { r.Header.Set("Date", "today") }, "clock", Skipped, "no Date"},
		{"no If-Match", func(r *http.Request) {
			if r.URL.Query().Has("X-Amz-Signature") { // our own GETs have it signed
				r.Header.Del("If-Match")
			}
		}, nil, "if-match", Warn, "ignored"},
		{"no Range", func(r *http.Request) { r.Header.Del("Range") }, nil, "range", Fail, "whole object"},
		{"a web page", nil, func(r *http.Response) {
			if r.Request.URL.Path == "/" {
				r.Header.Set("Content-Type", "text/html")
				r.Header.Del("X-Amz-Request-Id")
			}
		}, "endpoint", Warn, "web page"},
		{"trouble", nil, func(r *http.Response) { r.StatusCode = http.StatusServiceUnavailable }, "endpoint", Warn, "has errors"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &Source{Text: "s3://photos/train", Getenv: environment(changed(t, endpoint, c.request, c.answer)), quick: true}
			by := map[string]Result{}
			for _, check := range s.checks() {
				if check.Name == "latency" {
					break
				}
				if check.Name == "bucket" && c.check == "endpoint" {
					break
				}
				by[check.Name] = check.run(t.Context())
			}
			is(t, by, c.check, c.status, c.word)
		})
	}
}

// TestAStoreThatStalls: a second in which nobody answers makes no store that hardly answers, and no clock that is wrong.
func TestAStoreThatStalls(t *testing.T) {
	var stalled atomic.Int64 // answers that come late
	s := &Source{Text: "s3://photos/train", quick: true, Getenv: environment(changed(t, objects(t), nil, func(*http.Response) {
		if stalled.Add(-1) >= 0 {
			time.Sleep(time.Second)
		}
	}))}
	by := map[string]Result{}
	for _, check := range s.checks() {
		if check.Name == "latency" {
			stalled.Store(4)
		}
		if by[check.Name] = check.run(t.Context()); check.Name == "latency" {
			break
		}
	}
	if r := by["latency"]; r.Status == Fail || r.Values["gets"] < 4 {
		t.Errorf("%+v", r)
	}
	now := time.Now()
	s.noteClock(http.Header{"Date": {now.UTC().Format(http.TimeFormat)}}, now, 6*time.Second)
	is(t, map[string]Result{"clock": s.clock(t.Context())}, "clock", OK, "equal to the store's, within 5 s")
}

func TestCertificates(t *testing.T) {
	ca, stranger := certtest.New(t, "rig"), certtest.New(t, "stranger")
	serve := func(a *certtest.Authority, name string, valid time.Duration) string {
		certFile, keyFile := a.Issue(t, name, valid)
		cert, err := tls.LoadX509KeyPair(certFile, keyFile)
		if err != nil {
			t.Fatal(err)
		}
		s := httptest.NewUnstartedServer(http.NotFoundHandler())
		s.Config.ErrorLog = nil
		s.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
		s.StartTLS()
		t.Cleanup(s.Close)
		return s.URL
	}
	for _, c := range []struct {
		name, endpoint string
		status         Status
		word           string
	}{
		{"good", serve(ca, "127.0.0.1", 30*24*time.Hour), OK, "TLS 1.3"},
		{"soon", serve(ca, "127.0.0.1", 48*time.Hour), Warn, "expires in"},
		{"expired", serve(ca, "127.0.0.1", -time.Hour), Fail, "has expired"},
		{"another name", serve(ca, "10.9.8.7", time.Hour), Fail, "host name"},
		{"unknown authority", serve(stranger, "127.0.0.1", time.Hour), Fail, "AWS_CA_BUNDLE"},
		{"no TLS", strings.Replace(httpServer(t), "http://", "https://", 1), Fail, "https://"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &Source{Text: "s3://photos/train", Getenv: environment(c.endpoint, "AWS_CA_BUNDLE", ca.File), quick: true}
			s.checks()
			if r := s.open(t.Context()); r.Status != OK {
				t.Fatal(r)
			}
			is(t, map[string]Result{"tls": s.tls(t.Context())}, "tls", c.status, c.word)
		})
	}
}

func httpServer(t testing.TB) string {
	s := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(s.Close)
	return s.URL
}

func TestAFolder(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.jpg"), make([]byte, 3000), 0o644); err != nil {
		t.Fatal(err)
	}
	r, by := look(t, "file://"+dir, environment(""))
	is(t, by, "name", OK, "a folder of this machine")
	is(t, by, "listing", OK, "1 objects")
	is(t, by, "latency", far(by), "p50")
	is(t, by, "tls", Skipped, "folder")
	if r.Fail != 0 {
		t.Errorf("%+v", r)
	}
	_, by = look(t, "file:///no/such/folder", environment(""))
	is(t, by, "name", Fail, "check the path")
	is(t, by, "get", Skipped, "could not be opened")
}

// TestKnee climbs a model: connections bring in proportion up to a line's bandwidth.
func TestKnee(t *testing.T) {
	for _, c := range []struct {
		name          string
		each, line    float64 // bytes a second of one connection, and of all
		most          int
		knee          int
		rising        bool
		rungs         int
		smallest, top int64 // of the GETs' sizes
	}{
		{"far", 2e6, 100e6, 512, 64, false, 9, 64 << 10, 4 << 20},
		{"near", 500e6, 1e9, 512, 2, false, 4, 4 << 20, 4 << 20},
		{"one is enough", 1e9, 1e9, 512, 1, false, 3, 4 << 20, 4 << 20},
		{"no end", 1e6, 1e12, 512, 512, true, 10, 64 << 10, 4 << 20},
		{"quick", 1e6, 1e12, 64, 64, true, 7, 64 << 10, 4 << 20},
		{"slow", 1e5, 1e5, 512, 1, false, 3, 64 << 10, 4 << 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			sizes := []int64{}
			ladder, rising := ascend(c.most, 700*time.Millisecond, func(n int, size int64) rung {
				sizes = append(sizes, size)
				b := min(float64(n)*c.each, c.line)
				return rung{n, b, b / float64(size)}
			})
			_, knee := kneeOf(ladder)
			if knee.connections != c.knee || rising != c.rising || len(ladder) != c.rungs {
				t.Errorf("knee at %d, rising %t, %d rungs; want %d, %t, %d", knee.connections, rising, len(ladder), c.knee, c.rising, c.rungs)
			}
			for i, s := range sizes {
				if s < c.smallest || s > c.top || s*int64(ladder[i].connections) > largestTotal {
					t.Errorf("GETs of %d bytes by %d connections", s, ladder[i].connections)
				}
			}
		})
	}
}
