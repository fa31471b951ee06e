package doctor

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/internal/findings"
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
		"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": testKey, "AWS_SECRET_ACCESS_KEY": testSecret,
		"AWS_REGION":                s3server.Region,
		"AWS_EC2_METADATA_DISABLED": "true",
	}
	for i := 0; i < len(more); i += 2 {
		env[more[i]] = more[i+1]
	}
	return func(name string) string { return env[name] }
}

// ofSource are the checks of a source.
func ofSource(t testing.TB, text string, env func(string) string) []Check {
	all := Checks(Options{
		CacheDir: t.TempDir(), CacheSize: 1 << 30, Quick: true, Source: text, Store: stores.Options{Getenv: env},
		Data: func(int) int64 { return 1 << 30 },
	})
	return slices.DeleteFunc(all, func(c Check) bool { return area(c.Code) != "source" })
}

// look runs the source's checks and returns their findings by code.
func look(t testing.TB, text string, env func(string) string) map[string]findings.Finding {
	t.Helper()
	checks := ofSource(t, text, env)
	r, err := Run(t.Context(), checks, nil)
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]findings.Finding{}
	for _, f := range r.Findings {
		by[strings.TrimPrefix(f.Code, "source/")] = f
		if f.Thing == "" || f.Level == findings.Fail && f.Cause == "" {
			t.Errorf("%s lacks a thing or a cause: %+v", f.Code, f)
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
	return by
}

// slow is what a machine that was busy for a second makes of any store's latency.
func slow(t testing.TB, f findings.Finding) {
	t.Helper()
	if f.Level == findings.Fail || f.Values["gets"] < 4 || f.Values["p50_seconds"] <= 0 {
		t.Errorf("%+v", f)
	}
}

func TestAGoodStore(t *testing.T) {
	p, err := proxy.Start(t.Context(), objects(t), proxy.Options{Latency: 20 * time.Millisecond, Sigma: 0.3, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	by := look(t, "s3://photos/train", environment(p.URL))
	for code, word := range map[string]string{
		"bucket": p.URL, "listing": "40 objects", "epoch": "a first epoch takes",
	} {
		is(t, by[code], findings.OK, word)
	}
	slow(t, by["latency"])
	// The proxy makes no request faster than its latency's distribution; the machine may make it slower.
	if p50 := by["latency"].Values["p50_seconds"]; p50 < 0.008 {
		t.Errorf("p50 %g s of a store whose median is 20 ms", p50)
	}
	// How much it is the machine decides; see TestKnee for the rest.
	if v := by["bandwidth"].Values; v["connections_that_pay"] < 1 || v["bytes_per_second"] <= 0 ||
		v["bytes_per_second"] < v["bytes_per_second_alone"] {
		t.Errorf("%+v", by["bandwidth"])
	}
	if got := p.Stats(); got.Gets == 0 || got.MaxInFlight < 2 {
		t.Errorf("what the proxy saw: %+v", got)
	}
}

func TestABadStore(t *testing.T) {
	endpoint := objects(t)
	ca, stranger := certtest.New(t, "rig"), certtest.New(t, "stranger")
	for _, c := range []struct {
		name, text string
		env        func(string) string
		code, word string // what fails
	}{
		{"wrong secret", "s3://photos/train", environment(endpoint, "AWS_SECRET_ACCESS_KEY", "not-the-secret"),
			"bucket", "AWS_SECRET_ACCESS_KEY"},
		{"no such key", "s3://photos/train", environment(endpoint, "AWS_ACCESS_KEY_ID", "nobody", "AWS_SESSION_TOKEN",
			"token-of-a-session"), "bucket", ""},
		{"half a pair", "s3://photos/train", environment(endpoint, "AWS_SECRET_ACCESS_KEY", ""), "bucket",
			"AWS_SECRET_ACCESS_KEY"},
		{"no such bucket", "s3://fotos/train", environment(endpoint), "bucket", "bucket's name"},
		{"empty prefix", "s3://photos/Train", environment(endpoint), "listing", "prefix"},
		{"nobody listens", "s3://photos/train", environment("http://127.0.0.1:1"), "bucket", "AWS_ENDPOINT_URL"},
		// The dot: no search domain of this machine's has it.
		{"no such host", "s3://photos/train", environment("http://no-such-host.invalid.:9000"), "bucket",
			"AWS_ENDPOINT_URL"},
		{"no source", "gopher://photos", environment(endpoint), "bucket", "s3://BUCKET/PREFIX"},
		{"no folder", "file:///no/such/folder", environment(""), "bucket", "check the path"},
		{"no Range", "s3://photos/train", environment(changed(t, endpoint, func(r *http.Request) {
			r.Header.Del("Range")
		})), "latency", ""},
		{"expired", "s3://photos/train", trusting(ca, serve(t, ca, "127.0.0.1", -time.Hour)), "bucket",
			"clock is out of date"},
		{"another name", "s3://photos/train", trusting(ca, serve(t, ca, "10.9.8.7", time.Hour)), "bucket", "host name"},
		{"unknown authority", "s3://photos/train", trusting(ca, serve(t, stranger, "127.0.0.1", time.Hour)), "bucket",
			"AWS_CA_BUNDLE"},
	} {
		t.Run(c.name, func(t *testing.T) {
			by := look(t, c.text, c.env)
			is(t, by[c.code], findings.Fail, c.word)
			is(t, by["epoch"], findings.Skipped, "it needs source/"+c.code)
		})
	}
}

// changed is a server between us and the store that changes requests.
func changed(t testing.TB, endpoint string, request func(*http.Request)) string {
	t.Helper()
	target, err := url.Parse(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = target.Scheme, target.Host, r.In.Host
		request(r.Out)
	}})
	t.Cleanup(s.Close)
	return s.URL
}

func trusting(ca *certtest.Authority, endpoint string) func(string) string {
	return environment(endpoint, "AWS_CA_BUNDLE", ca.File)
}

// serve is a server with a certificate.
func serve(t testing.TB, a *certtest.Authority, name string, valid time.Duration) string {
	certFile, keyFile := a.Issue(t, name, valid)
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(http.NotFoundHandler())
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.URL
}

// TestAStoreThatStalls: a second in which nobody answers makes no store that hardly answers.
func TestAStoreThatStalls(t *testing.T) {
	var stalled atomic.Int64 // answers that come late
	endpoint := changed(t, objects(t), func(*http.Request) {
		if stalled.Add(-1) >= 0 {
			time.Sleep(time.Second)
		}
	})
	for _, c := range ofSource(t, "s3://photos/train", environment(endpoint)) {
		if c.Code == "source/latency" {
			stalled.Store(4)
			slow(t, c.run(t.Context()))
			return
		}
		c.run(t.Context())
	}
}

func TestAFolder(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.jpg"), make([]byte, 3000), 0o644); err != nil {
		t.Fatal(err)
	}
	by := look(t, "file://"+dir, environment(""))
	is(t, by["bucket"], findings.OK, "a folder of this machine")
	is(t, by["listing"], findings.OK, "1 object,")
	is(t, by["epoch"], findings.OK, "epoch")
	slow(t, by["latency"])
	if err := os.Truncate(filepath.Join(dir, "a.jpg"), 0); err != nil {
		t.Fatal(err)
	}
	is(t, look(t, "file://"+dir, environment(""))["latency"], findings.Skipped, "empty")
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
			ladder, rising := ascend(c.most, 700*time.Millisecond, func(n int, size int64) findings.Rung {
				sizes = append(sizes, size)
				b := min(float64(n)*c.each, c.line)
				return findings.Rung{Connections: n, Bytes: b, Gets: b / float64(size)}
			})
			_, knee := findings.Knee(ladder)
			if knee.Connections != c.knee || rising != c.rising || len(ladder) != c.rungs {
				t.Errorf("knee at %d, rising %t, %d rungs; want %d, %t, %d",
					knee.Connections, rising, len(ladder), c.knee, c.rising, c.rungs)
			}
			for i, s := range sizes {
				if s < c.smallest || s > c.top || s*int64(ladder[i].Connections) > largestTotal {
					t.Errorf("GETs of %d bytes by %d connections", s, ladder[i].Connections)
				}
			}
		})
	}
}
