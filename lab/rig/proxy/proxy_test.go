package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// TestMain lets this test binary be the proxy process of TestSpawn, and looks for leaks.
func TestMain(m *testing.M) {
	if os.Getenv("SHOAL_TEST_PROXY") != "" {
		if err := Main(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// upstream is an HTTP server whose answers are chosen by the path.
func upstream(t testing.TB, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

func startProxy(t testing.TB, up string, o Options) *Proxy {
	t.Helper()
	p, err := Start(t.Context(), up, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	return p
}

// client returns an HTTP client of its own, so that no idle connection outlives the test.
func client(t testing.TB) *http.Client {
	t.Helper()
	tr := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64, ExpectContinueTimeout: time.Minute}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: time.Minute}
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

// TestTransparent compares answers through the proxy with answers of the server itself.
func TestTransparent(t *testing.T) {
	up := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/b/refused" {
			w.Header().Set("Date", "Thu, 01 Jan 1970 00:00:00 GMT")
			http.Error(w, "no", http.StatusForbidden) // without reading the body
			return
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("X-Host", r.Host)
		w.Header().Set("X-Body", fmt.Sprint(len(body)))
		w.Header().Set("Date", "Thu, 01 Jan 1970 00:00:00 GMT")
		switch r.URL.Path {
		case "/b/empty":
		case "/b/small":
			_, _ = w.Write(pattern(100))
		case "/b/big":
			w.Header().Set("Content-Length", fmt.Sprint(1<<20))
			if r.Method != http.MethodHead {
				_, _ = w.Write(pattern(1 << 20))
			}
		case "/b/chunked":
			for i := range 50 {
				_, _ = w.Write(pattern(i * 100))
				w.(http.Flusher).Flush()
			}
		case "/b/nocontent":
			w.WriteHeader(http.StatusNoContent)
		case "/b/notmodified":
			w.Header().Set("Etag", `"abc"`)
			w.WriteHeader(http.StatusNotModified)
		case "/b/close":
			w.Header().Set("Connection", "close")
			_, _ = w.Write(pattern(1000))
		case "/b/early":
			w.Header().Set("Link", "</x>")
			w.WriteHeader(http.StatusEarlyHints)
			_, _ = w.Write(pattern(10))
		case "/b/echo":
			_, _ = w.Write(body)
		default:
			http.Error(w, "no such thing", http.StatusNotFound)
		}
	})
	p := startProxy(t, up, Options{})
	c := client(t)

	type answer struct {
		Status int
		Header http.Header
		Body   []byte
	}
	ask := func(base, method, path string, body []byte, chunked, expect bool) answer {
		t.Helper()
		var r io.Reader
		if body != nil {
			r = bytes.NewReader(body)
			if chunked {
				r = struct{ io.Reader }{r} // hides the length
			}
		}
		req, err := http.NewRequestWithContext(t.Context(), method, base+path, r)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = "the.signed.host:1234"
		if expect {
			req.Header.Set("Expect", "100-continue")
		}
		resp, err := c.Do(req)
		if err != nil {
			t.Fatalf("%s %s: %v", method, path, err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatalf("%s %s: %v", method, path, err)
		}
		return answer{resp.StatusCode, resp.Header, b}
	}
	for _, method := range []string{"GET", "HEAD", "DELETE"} {
		for _, path := range []string{"/b/empty", "/b/small", "/b/big", "/b/chunked", "/b/nocontent", "/b/notmodified",
			"/b/close", "/b/early", "/b/none", "/b"} {
			direct, via := ask(up, method, path, nil, false, false), ask(p.URL, method, path, nil, false, false)
			if !reflect.DeepEqual(direct, via) {
				t.Errorf("%s %s: got %d %v (%d bytes), want %d %v (%d bytes)",
					method, path, via.Status, via.Header, len(via.Body), direct.Status, direct.Header, len(direct.Body))
			}
		}
	}
	for _, n := range []int{0, 1, 1000, 70_000, 1 << 20} {
		for _, chunked := range []bool{false, true} {
			for _, expect := range []bool{false, true} {
				path := "/b/echo"
				if expect && chunked { // else the client may fail at writing
					path = "/b/refused"
				}
				direct, via := ask(up, "PUT", path, pattern(n), chunked, expect),
					ask(p.URL, "PUT", path, pattern(n), chunked, expect)
				if !reflect.DeepEqual(direct, via) {
					t.Errorf("PUT %s, %d bytes, chunked %v, expect %v: got %d %v (%d bytes)",
						path, n, chunked, expect, via.Status, via.Header, len(via.Body))
				}
			}
		}
	}
	waitIdle(t, p)
}

// waitIdle waits until no request is in flight: the last one ends a moment after its last byte.
func waitIdle(t *testing.T, p *Proxy) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); p.Stats().InFlight != 0; {
		if time.Now().After(deadline) {
			t.Fatalf("%d requests are still in flight", p.Stats().InFlight)
		}
		time.Sleep(time.Millisecond)
	}
}

// TestStaleUpstream: a server that closes idle connections must not show. The client has one connection and asks by
// hand: net/http dials anew where the goroutine that wrote a request says so 50 ms late.
func TestStaleUpstream(t *testing.T) {
	stale := make(chan bool, 100)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "ok")
	}))
	s.Config.IdleTimeout = 5 * time.Millisecond
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateClosed {
			stale <- true
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	p := startProxy(t, s.URL, Options{})
	c, err := net.Dial("tcp", strings.TrimPrefix(p.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r := bufio.NewReader(c)
	for range 10 {
		if _, err := io.WriteString(c, "GET /b/k HTTP/1.1\r\nHost: h\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if string(b) != "ok" || resp.Close {
			t.Fatalf("got %s %q, close %v", resp.Status, b, resp.Close)
		}
		<-stale
	}
}

// TestFaults: each fault as a plain HTTP client sees it.
func TestFaults(t *testing.T) {
	content := pattern(200_000)
	up := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", `"0123456789abcdef"`)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
	})
	get := func(t *testing.T, p *Proxy, ifMatch bool) (*http.Response, []byte, error) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), "GET", p.URL+"/b/k", nil)
		if err != nil {
			t.Fatal(err)
		}
		if ifMatch {
			req.Header.Set("If-Match", `"0123456789abcdef"`)
		}
		resp, err := client(t).Do(req)
		if err != nil {
			return nil, nil, err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return resp, b, err
	}
	tests := []struct {
		fault Fault
		check func(t *testing.T, p *Proxy)
	}{
		{Fault{Kind: Unavailable, Count: 2}, func(t *testing.T, p *Proxy) {
			for range 2 {
				resp, b, err := get(t, p, false)
				if err != nil || resp.StatusCode != 503 || !bytes.Contains(b, []byte("SlowDown")) {
					t.Fatalf("got %v %q %v", resp, b, err)
				}
			}
		}},
		{Fault{Kind: Slow, Count: 1, For: 150 * time.Millisecond}, func(t *testing.T, p *Proxy) {
			start := time.Now()
			if _, b, err := get(t, p, false); err != nil || !bytes.Equal(b, content) {
				t.Fatal(len(b), err)
			}
			if d := time.Since(start); d < 150*time.Millisecond {
				t.Fatalf("answered after %v", d)
			}
		}},
		{Fault{Kind: Stall, Count: 1, For: 150 * time.Millisecond, At: 0.5}, func(t *testing.T, p *Proxy) {
			start := time.Now()
			if _, b, err := get(t, p, false); err != nil || !bytes.Equal(b, content) {
				t.Fatal(len(b), err)
			}
			if d := time.Since(start); d < 150*time.Millisecond {
				t.Fatalf("answered after %v", d)
			}
		}},
		{Fault{Kind: Reset, Count: 1}, func(t *testing.T, p *Proxy) {
			_, b, err := get(t, p, false)
			if err == nil || len(b) > 0 {
				t.Fatalf("%d bytes, error %v", len(b), err)
			}
		}},
		{Fault{Kind: Truncate, Count: 1, At: 0.25}, func(t *testing.T, p *Proxy) {
			_, b, err := get(t, p, false)
			if !errors.Is(err, io.ErrUnexpectedEOF) || len(b) != 50_000 {
				t.Fatalf("%d bytes, error %v", len(b), err)
			}
		}},
		{Fault{Kind: ETag, Count: 2}, func(t *testing.T, p *Proxy) {
			resp, b, err := get(t, p, false)
			if err != nil || resp.Header.Get("ETag") != `"f123456789abcdef"` || !bytes.Equal(b, content) {
				t.Fatalf("got %v %v", resp, err)
			}
			resp, _, err = get(t, p, true)
			if err != nil || resp.StatusCode != http.StatusPreconditionFailed {
				t.Fatalf("got %v %v", resp, err)
			}
		}},
	}
	for _, tt := range tests {
		f := tt.fault
		t.Run(string(f.Kind), func(t *testing.T) {
			p := startProxy(t, up, Options{Faults: []Fault{f}})
			tt.check(t, p)
			if got := p.Stats().Faults[string(f.Kind)]; got != int64(f.Count) {
				t.Errorf("counted %d faults, want %d", got, f.Count)
			}
			// And it is over.
			resp, b, err := get(t, p, true)
			if err != nil || resp.StatusCode != 200 || !bytes.Equal(b, content) {
				t.Fatalf("after the fault: %v, %d bytes, %v", resp, len(b), err)
			}
		})
	}
}

// TestStallEndsWithClient: a client that gives up frees the stalled connection at once.
func TestStallEndsWithClient(t *testing.T) {
	up := upstream(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(pattern(1000)) })
	p := startProxy(t, up, Options{Faults: []Fault{{Kind: Stall, At: 0.5, For: time.Hour}}})
	c := client(t)
	c.Timeout = 50 * time.Millisecond
	resp, err := c.Get(p.URL + "/b/k")
	if err == nil {
		_, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
	}
	if err == nil {
		t.Fatal("a stalled response was complete")
	}
	waitIdle(t, p)
}

func TestRules(t *testing.T) {
	sh, err := newShape(Options{Faults: []Fault{
		{Kind: Unavailable, Key: "x/*.jpg", After: 1, Count: 2},
		{Kind: Slow, Key: "b.jpg", For: time.Second},
		{Kind: Reset, Op: OpList},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for i, tt := range []struct {
		op   Op
		key  string
		want string
	}{
		{OpGet, "x/a.jpg", ""}, // After
		{OpGet, "x/a.jpg", "503"},
		{OpGet, "x/y/a.jpg", ""}, // the pattern does not cross a slash
		{OpHead, "x/a.jpg", ""},
		{OpGet, "x/b.jpg", "503"},
		{OpGet, "x/b.jpg", "slow"}, // Count is used up, the next rule fires
		{OpGet, "deep/down/b.jpg", "slow"},
		{OpList, "", "reset"},
	} {
		got := ""
		if f := sh.pick(tt.op, tt.key); f != nil {
			got = string(f.Kind)
		}
		if got != tt.want {
			t.Errorf("request %d, %s %s: got %q, want %q", i, tt.op, tt.key, got, tt.want)
		}
	}
}

func TestProbabilityIsSeeded(t *testing.T) {
	draw := func(seed uint64) (fired []int) {
		sh, err := newShape(Options{Seed: seed, Faults: []Fault{{Kind: Unavailable, P: 0.1}}})
		if err != nil {
			t.Fatal(err)
		}
		for i := range 10_000 {
			if sh.pick(OpGet, "k") != nil {
				fired = append(fired, i)
			}
		}
		return fired
	}
	a, b, c := draw(1), draw(1), draw(2)
	if !slices.Equal(a, b) || slices.Equal(a, c) {
		t.Error("the faults do not follow the seed")
	}
	if len(a) < 850 || len(a) > 1150 {
		t.Errorf("%d of 10000 at p=0.1", len(a))
	}
}

func TestLatencyIsLognormal(t *testing.T) {
	sh, err := newShape(Options{Latency: 30 * time.Millisecond, Sigma: 0.3, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	d := make([]float64, 100_001)
	for i := range d {
		d[i] = sh.delay().Seconds() * 1e3
	}
	slices.Sort(d)
	for _, tt := range []struct{ quantile, z float64 }{{0.5, 0}, {0.8413, 1}, {0.1587, -1}, {0.99, 2.326}} {
		got, want := d[int(tt.quantile*float64(len(d)))], 30*math.Exp(0.3*tt.z)
		if math.Abs(got-want) > 0.03*want {
			t.Errorf("quantile %v: %.2f ms, want %.2f", tt.quantile, got, want)
		}
	}
}

func TestBandwidthBucket(t *testing.T) {
	sh, err := newShape(Options{Bandwidth: 1_000_000})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1000, 0)
	// The burst lets 20 ms worth pass at once; from then on each byte takes a microsecond.
	if d := sh.reserve(20_000, now); d != 0 {
		t.Errorf("the burst waits %v", d)
	}
	if d := sh.reserve(50_000, now); d != 0 {
		t.Errorf("the first after the burst waits %v", d)
	}
	if d := sh.reserve(1, now); d != 50*time.Millisecond {
		t.Errorf("the next waits %v, want 50ms", d)
	}
	now = now.Add(time.Hour) // idle time is not saved up
	sh.reserve(20_000, now)
	sh.reserve(10_000, now)
	if d := sh.reserve(1, now); d != 10*time.Millisecond {
		t.Errorf("after an idle hour: waits %v, want 10ms", d)
	}
}

// TestLatencyAndBandwidthAreAdded checks lower bounds only: a busy machine can but be slower.
func TestLatencyAndBandwidthAreAdded(t *testing.T) {
	up := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100000")
		_, _ = w.Write(pattern(100_000))
	})
	p := startProxy(t, up, Options{Latency: 40 * time.Millisecond})
	c := client(t)
	fetch := func() {
		resp, err := c.Get(p.URL + "/b/k")
		if err != nil {
			t.Error(err)
			return
		}
		defer resp.Body.Close()
		if n, err := io.Copy(io.Discard, resp.Body); n != 100_000 || err != nil {
			t.Errorf("%d bytes, %v", n, err)
		}
	}
	start := time.Now()
	fetch()
	if d := time.Since(start); d < 40*time.Millisecond {
		t.Errorf("a request took %v at 40 ms latency", d)
	}
	if err := p.Set(Options{Bandwidth: 4_000_000}); err != nil {
		t.Fatal(err)
	}
	start = time.Now()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(fetch)
	}
	wg.Wait()
	if d := time.Since(start); d < 150*time.Millisecond { // 800 kB at 4 MB/s, less the burst and the last chunk
		t.Errorf("8 requests took %v", d)
	}
	s := p.Stats()
	if s.Gets != 9 || s.GetBytes != 900_000 || s.Requests != 9 || s.MaxInFlight < 2 {
		t.Errorf("stats %+v", s)
	}
}

func TestOpOf(t *testing.T) {
	for line, want := range map[string]Op{
		"GET /b/k HTTP/1.1":                                OpGet,
		"GET /b/a%20b/c?x-id=GetObject HTTP/1.1":           OpGet,
		"GET /b/k?X-Amz-Signature=1&X-Amz-Date=2 HTTP/1.1": OpGet,
		"GET /b/k?partNumber=1 HTTP/1.1":                   OpGet,
		"GET /b/k?acl HTTP/1.1":                            OpOther,
		"HEAD /b/k HTTP/1.1":                               OpHead,
		"HEAD /b HTTP/1.1":                                 OpOther,
		"GET /b/?list-type=2&prefix=x HTTP/1.1":            OpList,
		"GET /b?prefix=x HTTP/1.1":                         OpList,
		"GET /b/?location= HTTP/1.1":                       OpOther,
		"PUT /b/k HTTP/1.1":                                OpPut,
		"PUT /b/k?partNumber=1&uploadId=x HTTP/1.1":        OpPut,
		"POST /b/k?uploads HTTP/1.1":                       OpOther,
		"DELETE /b/k HTTP/1.1":                             OpOther,
	} {
		if got, _ := parse(t, line); got != want {
			t.Errorf("%s: got %s, want %s", line, got, want)
		}
	}
	if _, key := parse(t, "GET /b/a%20b/c?x-id=GetObject HTTP/1.1"); key != "a b/c" {
		t.Errorf("key %q", key)
	}
}

func parse(t *testing.T, line string) (Op, string) {
	t.Helper()
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(line + "\r\n\r\n")))
	if err != nil {
		t.Fatal(err)
	}
	return parseRequest(r.Method, r.URL)
}

func TestSpawn(t *testing.T) {
	t.Setenv("SHOAL_TEST_PROXY", "1")
	t.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	content := pattern(63_000)
	up := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(len(content)))
		_, _ = w.Write(content)
	})
	p, err := Spawn(t.Context(), []string{os.Args[0]}, up,
		Options{Faults: []Fault{{Kind: Truncate, Count: 1, At: 0.5}}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Stop()
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	c := client(t)
	get := func() ([]byte, error) {
		resp, err := c.Get(p.URL + "/b/k")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		return io.ReadAll(resp.Body)
	}
	if _, err := get(); err == nil {
		t.Error("the fault given at the start did not strike")
	}
	before, err := p.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if b, err := get(); err != nil || !bytes.Equal(b, content) {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	after, err := p.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d := after.Sub(before); d.Gets != 1 || d.GetBytes != int64(len(content)) || len(d.Faults) != 0 {
		t.Errorf("difference of the counters: %+v", d)
	}
	if err := p.Set(t.Context(), Options{Faults: []Fault{{Kind: Truncate, At: 0.1}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := get(); err == nil {
		t.Error("the fault that was set later did not strike")
	}
	if err := p.Set(t.Context(), Options{Latency: -1}); err == nil || !strings.Contains(err.Error(), "negative") {
		t.Errorf("bad options: got %v", err)
	}
	if _, err := Spawn(t.Context(), []string{os.Args[0]}, "nonsense", Options{}); err == nil ||
		!strings.Contains(err.Error(), "nonsense") {
		t.Errorf("got %v, want an error with the process's own words", err)
	}
}
