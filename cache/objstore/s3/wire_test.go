package s3

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	minio "github.com/minio/minio-go/v7/pkg/signer"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
)

// TestSignAnewAsMinio: signed again at the same time, a request of minio-go has the same signature. In particular
// headers that proxies change are left out.
func TestSignAnewAsMinio(t *testing.T) {
	target := "http://store.example.com:9000" + string(AppendPath(nil, "/bucket/a b+c//ü~(1)")) +
		"?partNumber=1&uploadId=x%2By%20z"
	req, err := http.NewRequest(http.MethodGet, target, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{
		"Accept-Encoding": "identity", "User-Agent": "boto3", "Range": "bytes=1-2", "X-Amz-Meta-A": "b  c",
		"X-Amz-Content-Sha256": emptySHA256, "If-Match": `"e"`,
	} {
		req.Header.Set(name, value)
	}
	want := minio.SignV4(*req, "id", "secret", "token", "eu-north-7")
	now, err := time.Parse(amzTime, want.Header.Get("X-Amz-Date"))
	if err != nil {
		t.Fatal(err)
	}
	got := want.Clone(t.Context())
	v := aws.Credentials{AccessKeyID: "id", SecretAccessKey: "secret", SessionToken: "token"}
	if err := sign(got, v, "eu-north-7", now); err != nil {
		t.Fatal(err)
	}
	if got.URL.String() != target || !reflect.DeepEqual(got.Header, want.Header) {
		t.Errorf("%s\n got %v\nwant %v", got.URL, got.Header, want.Header)
	}
}

// TestSignerAsMinio: our signatures are minio-go's, for any key, ETag, range, token and day.
func TestSignerAsMinio(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := signer{region: "eu-north-7", pays: rapid.Bool().Draw(rt, "pays")}
		if rapid.Bool().Draw(rt, "encrypted") {
			key, err := objstore.ParseCustomerKey(make([]byte, 32))
			if err != nil {
				rt.Fatal(err)
			}
			s.sse = keyHeaders(key)
		}
		g := signedGet{host: rapid.SampledFrom([]string{"127.0.0.1:9000", "store.example.com"}).Draw(rt, "host")}
		key := rapid.StringN(1, 40, 300).Draw(rt, "key")
		g.path = AppendPath([]byte("/bucket/"), key)
		g.etag = rapid.StringMatching(`[!-~]{0,40}`).Draw(rt, "etag")
		if rapid.Bool().Draw(rt, "ranged") {
			g.rangeOf = rangeHeader(rapid.Int64Range(0, 1<<40).Draw(rt, "off"),
				rapid.Int64Range(1, 1<<30).Draw(rt, "n"))
		}
		v := aws.Credentials{
			AccessKeyID:     rapid.StringMatching(`[A-Za-z0-9-]{1,20}`).Draw(rt, "id"),
			SecretAccessKey: rapid.StringMatching(`[!-~]{1,40}`).Draw(rt, "secret"),
			SessionToken:    rapid.StringMatching(`[!-~]{0,60}`).Draw(rt, "token"),
		}

		target := string(g.path)
		if version := rapid.StringMatching(`[!-~]{0,20}`).Draw(rt, "version"); version != "" {
			g.query = "versionId=" + url.QueryEscape(version)
			target += "?" + g.query
		}
		req, err := http.NewRequest(http.MethodGet, "http://"+g.host+target, nil)
		if err != nil {
			rt.Fatal(err)
		}
		if g.etag != "" {
			req.Header.Set("If-Match", `"`+g.etag+`"`)
		}
		if g.rangeOf != "" {
			req.Header.Set("Range", g.rangeOf)
		}
		if s.pays {
			req.Header.Set("x-amz-request-payer", "requester")
		}
		for _, e := range s.sse {
			req.Header.Set(e.name, e.value)
		}
		req.Header.Set("X-Amz-Content-Sha256", emptySHA256)
		want := minio.SignV4(*req, v.AccessKeyID, v.SecretAccessKey, v.SessionToken, s.region)
		now, err := time.Parse(amzTime, want.Header.Get("X-Amz-Date"))
		if err != nil {
			rt.Fatal(err)
		}

		head := append([]byte("GET "), target...)
		head, _ = s.appendHeaders(append(head, " HTTP/1.1\r\n"...), []byte("what was there before"), &g, &v, now)
		got, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(head)))
		if err != nil {
			rt.Fatalf("%v:\n%s", err, head)
		}
		if got.URL.Path != "/bucket/"+key {
			rt.Fatalf("path %q, want /bucket/%s", got.URL.Path, key)
		}
		for name := range want.Header {
			if got.Header.Get(name) != want.Header.Get(name) {
				rt.Errorf("%s: %s\nwant %s", name, got.Header.Get(name), want.Header.Get(name))
			}
		}
	})
}

// FuzzParseHead: what we take for a head, net/http takes for the same one.
func FuzzParseHead(f *testing.F) {
	for _, s := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: \"e\"\r\n\r\nhello",
		"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 2-6/10\r\ncontent-length:5\r\nLast-Modified: Mon, 02 " +
			"Jan 2006 15:04:05 GMT\r\n\r\n",
		"HTTP/1.0 200 OK\nContent-Length: 0\nConnection: Keep-Alive\n\n",
		"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\nConnection: x, close\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
		"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length : 5\r\n\r\n",
		"HTTP/1.1 503 Slow Down\r\nX-Amz-Bucket-Region: eu-west-1\r\n\r\n",
		"SSH-2.0-OpenSSH_9.2\r\n\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		n := headEnd(b, 0)
		for from := range min(len(b), 64) { // what was looked at before makes no difference
			if headEnd(b[:from], 0) < 0 && headEnd(b, from) != n {
				t.Fatalf("end %d, looked for from %d: %d", n, from, headEnd(b, from))
			}
		}
		if n < 0 {
			return
		}
		h, err := parseHead(b[:n])
		if err != nil {
			return
		}
		resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(b[:n])), nil)
		if err != nil {
			// net/http refuses some names and values that are nothing to us.
			return
		}
		defer resp.Body.Close()
		if resp.StatusCode != h.status {
			t.Fatalf("status %d, net/http %d", h.status, resp.StatusCode)
		}
		bodiless := h.status < 200 || h.status == 204 || h.status == 304
		if !bodiless && !h.chunked && h.length >= 0 && resp.ContentLength != h.length {
			t.Fatalf("length %d, net/http %d", h.length, resp.ContentLength)
		}
		if chunked := len(resp.TransferEncoding) > 0; chunked && !h.chunked {
			t.Fatalf("net/http sees chunks")
		}
		if resp.Close && !h.close && h.length >= 0 {
			t.Fatalf("net/http would close the connection")
		}
		if e := resp.Header.Values("Etag"); len(e) == 1 && e[0] != string(h.etag) {
			t.Fatalf("ETag %q, net/http %q", h.etag, e[0])
		}
	})
}

// scripted is a server that answers each request on each connection by what answer says; "" closes the
// connection without an answer.
type scriptedServer struct {
	net.Listener
	conns, requests atomic.Int64
}

func serve(t *testing.T, answer func(conn, request int64) string) *scriptedServer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return serveOn(t, l, answer)
}

func serveOn(t *testing.T, l net.Listener, answer func(conn, request int64) string) *scriptedServer {
	t.Helper()
	s := &scriptedServer{Listener: l}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conn := s.conns.Add(1)
			go func() {
				defer c.Close()
				for r := bufio.NewReader(c); ; {
					if _, err := http.ReadRequest(r); err != nil {
						return
					}
					a := answer(conn, s.requests.Add(1))
					if _, err := io.WriteString(c, a); a == "" || err != nil {
						return
					}
				}
			}()
		}
	}()
	return s
}

// TestDialsEveryAddress: addresses that are away leave time for the one that answers, wherever it is in the list.
func TestDialsEveryAddress(t *testing.T) {
	s := serve(t, func(_, _ int64) string { return "" })
	port := s.Addr().(*net.TCPAddr).Port
	addrs := []string{"127.0.0.1"}
	for last := byte(2); last <= 4; last++ {
		// The queue of those that were not accepted is full: a SYN has no answer.
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			defer unix.Close(fd)
			err = unix.Bind(fd, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, last}})
		}
		if err == nil {
			err = unix.Listen(fd, 0)
		}
		at := fmt.Sprint("127.0.0.", last)
		for n := 0; err == nil; n++ {
			var c net.Conn
			if c, err = net.DialTimeout("tcp", fmt.Sprint(at, ":", port), 100*time.Millisecond); err == nil {
				defer c.Close()
			}
			if n > 8 {
				t.Fatalf("%s accepts all", at)
			}
		}
		if ne, ok := errors.AsType[net.Error](err); !ok || !ne.Timeout() {
			t.Fatal(err)
		}
		addrs = append(addrs, at)
	}
	defer func(f func(context.Context, string) ([]string, error)) { lookup = f }(lookup)
	for at := range addrs {
		list := slices.Clone(addrs)
		list[0], list[at] = list[at], list[0]
		lookup = func(_ context.Context, host string) ([]string, error) {
			if host != "store" {
				t.Errorf("looked up %q", host)
			}
			return slices.Clone(list), nil
		}
		c, err := dial(t.Context(), "tcp", fmt.Sprint("store:", port))
		if err != nil {
			t.Errorf("the one that answers is at %d: %v", at, err)
			continue
		}
		c.Close()
	}
}

func (s *scriptedServer) wires(t *testing.T) *wires {
	ws := &wires{dial: dialer(s.Addr().String(), false, nil), maxIdle: 8}
	t.Cleanup(ws.close)
	return ws
}

// fetch sends a GET and reads the body.
func fetch(ctx context.Context, ws *wires) (status int, body string, err error) {
	w, err := ws.do(ctx, "", func(b, scratch []byte) ([]byte, []byte) {
		return append(b, "GET / HTTP/1.1\r\nHost: h\r\n\r\n"...), scratch
	})
	if err != nil {
		return 0, "", err
	}
	defer w.Close()
	b, err := io.ReadAll(w)
	return w.head.status, string(b), err
}

const hello = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"

func TestWireAnswers(t *testing.T) {
	for _, c := range []struct {
		name, answer string
		status       int
		body         string
		fails        bool
		reused       bool
	}{
		{"plain", hello, 200, "hello", false, true},
		{"empty", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, "", false, true},
		{"no content", "HTTP/1.1 204 No Content\r\n\r\n", 204, "", false, true},
		{"interim answers", "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + hello, 200,
			"hello", false, true},
		{"the server closes", strings.Replace(hello, "OK\r\n", "OK\r\nConnection: close\r\n", 1), 200, "hello",
			false, false},
		{"HTTP/1.0", strings.Replace(hello, "1.1", "1.0", 1), 200, "hello", false, false},
		{"more than was promised", hello + "and more", 200, "hello", false, false},
		{"a long head", strings.Replace(hello, "OK\r\n", "OK\r\nX: "+strings.Repeat("x", 40<<10)+"\r\n", 1), 200,
			"hello", false, true},
		{"too long a head", strings.Replace(hello, "OK\r\n", "OK\r\nX: "+strings.Repeat("x", 70<<10)+"\r\n", 1), 0, "",
			true, false},
		{"two lengths", strings.Replace(hello, "OK\r\n", "OK\r\nContent-Length: 6\r\n", 1), 0, "", true, false},
		{"another protocol", "HTTP/1.1 101 Switching Protocols\r\n\r\n", 0, "", true, false},
		{"not HTTP", "SSH-2.0-OpenSSH\r\n\r\n", 0, "", true, false},
		{"nothing", "", 0, "", true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := serve(t, func(int64, int64) string { return c.answer })
			ws := s.wires(t)
			const times = 3
			for range times {
				status, body, err := fetch(t.Context(), ws)
				if c.fails != (err != nil) || status != c.status || body != c.body {
					t.Fatalf("%d %q, %v", status, body, err)
				}
			}
			want := int64(times)
			if c.reused {
				want = 1
			}
			if got := s.conns.Load(); got != want {
				t.Errorf("%d connections for %d requests, want %d", got, times, want)
			}
		})
	}
}

// TestWireUnasked: over TLS, too, what a server sends behind an answer is not taken for the next answer: the end of a
// record that was read with the answer.
func TestWireUnasked(t *testing.T) {
	web := httptest.NewUnstartedServer(nil)
	web.StartTLS() // for its certificate
	defer web.Close()
	config := &tls.Config{InsecureSkipVerify: true} //nolint:gosec // nothing is secured by it
	for _, n := range []int{5, 8 << 10, 40 << 10} {
		for _, over := range []string{"HTTP", "TLS"} {
			t.Run(fmt.Sprint(n, " bytes over ", over), func(t *testing.T) {
				l, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				if over == "TLS" {
					l = tls.NewListener(l, &tls.Config{Certificates: web.TLS.Certificates,
						DynamicRecordSizingDisabled: true}) // records of 16 KiB
				}
				sent := func(c string) string {
					return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", n) + strings.Repeat(c, n)
				}
				s := serveOn(t, l, func(_, request int64) string {
					if request == 2 {
						return sent("a") + hello
					}
					return sent("a")
				})
				ws := &wires{dial: dialer(s.Addr().String(), over == "TLS", config), maxIdle: 8}
				t.Cleanup(ws.close)
				for range 3 {
					if _, body, err := fetch(t.Context(), ws); err != nil || body != strings.Repeat("a", n) {
						t.Fatalf("%d bytes %.20q, %v", len(body), body, err)
					}
				}
				if got := s.conns.Load(); got != 2 {
					t.Errorf("%d connections, want 2: the first serves two requests", got)
				}
			})
		}
	}
}

// TestWireBodyWithoutEnd: a body that ends early is an error, and its connection is not used again.
func TestWireBodyWithoutEnd(t *testing.T) {
	s := serve(t, func(conn, request int64) string {
		if request == 1 {
			return "HTTP/1.1 200 OK\r\nContent-Length: 50\r\nConnection: close\r\n\r\nhello"
		}
		return hello
	})
	l, err := net.Listen("tcp", "127.0.0.1:0") // closes in the middle
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_, _ = http.ReadRequest(bufio.NewReader(c))
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello")
		_ = c.Close()
	}()
	ws := &wires{dial: dialer(l.Addr().String(), false, nil), maxIdle: 8}
	if _, body, err := fetch(t.Context(), ws); !errors.Is(err, io.ErrUnexpectedEOF) || body != "hello" {
		t.Errorf("%q, %v", body, err)
	}
	if len(ws.idle) != 0 {
		t.Error("the connection is kept")
	}

	// One that is left in the middle is not used again either.
	ws = s.wires(t)
	w, err := ws.do(t.Context(), "", func(b, scratch []byte) ([]byte, []byte) {
		return append(b, "GET / HTTP/1.1\r\nHost: h\r\n\r\n"...), scratch
	})
	if err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	_ = w.Close() // twice does no harm
	if len(ws.idle) != 0 {
		t.Error("a connection in the middle of a body is kept")
	}
}

// TestWireStale: a server that closes idle connections costs no request, one that answers nothing at all
// is an error after two tries.
func TestWireStale(t *testing.T) {
	s := serve(t, func(conn, request int64) string {
		if request%2 == 0 {
			return ""
		}
		return hello
	})
	ws := s.wires(t)
	for range 3 { // the second and third meet a connection that the server closes when it is used again
		if _, body, err := fetch(t.Context(), ws); err != nil || body != "hello" {
			t.Fatalf("%q, %v", body, err)
		}
	}
	if got := s.requests.Load(); got != 5 {
		t.Errorf("%d requests, want 5", got)
	}
}

// TestWireCancel: a cancelled context ends a request that waits for its head or for its body at once,
// and its connection is not used again.
func TestWireCancel(t *testing.T) {
	for _, answer := range []string{"HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello"} {
		synctest.Test(t, func(t *testing.T) {
			ws := &wires{maxIdle: 8, dial: func(context.Context) (net.Conn, error) {
				client, server := net.Pipe()
				go func() {
					_, _ = http.ReadRequest(bufio.NewReader(server))
					_, _ = io.WriteString(server, answer)
				}()
				return client, nil
			}}
			defer ws.close()
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() {
				_, _, err := fetch(ctx, ws)
				done <- err
			}()
			synctest.Wait() // it waits for the rest
			start := time.Now()
			cancel()
			if err := <-done; err == nil || time.Since(start) > 0 {
				t.Errorf("%v after %v", err, time.Since(start))
			}
			if len(ws.idle) != 0 {
				t.Error("the connection is kept")
			}
		})
	}
}

// TestWireMany: hundreds of requests on few connections, some of them cancelled at any moment, each get
// their own answer.
func TestWireMany(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, _ := strconv.Atoi(r.URL.Path[1:])
		w.Header().Set("Content-Length", strconv.Itoa(n))
		_, _ = w.Write(bytes.Repeat([]byte{byte(n)}, n))
	}))
	defer srv.Close()
	ws := &wires{dial: dialer(strings.TrimPrefix(srv.URL, "http://"), false, nil), maxIdle: 4}
	defer ws.close()
	var wg sync.WaitGroup
	for worker := range 16 {
		wg.Go(func() {
			for i := range 200 {
				n := worker*1000 + i*37
				ctx, cancel := context.WithCancel(t.Context())
				if i%5 == 0 {
					go cancel()
				}
				w, err := ws.do(ctx, "", func(b, scratch []byte) ([]byte, []byte) {
					return fmt.Appendf(b, "GET /%d HTTP/1.1\r\nHost: h\r\n\r\n", n), scratch
				})
				if err == nil {
					var body []byte
					body, err = io.ReadAll(w)
					if err == nil && !bytes.Equal(body, bytes.Repeat([]byte{byte(n)}, n)) {
						t.Errorf("%d bytes of another answer, want %d", len(body), n)
					}
					_ = w.Close()
				}
				if err != nil && i%5 != 0 {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	wg.Wait()
	if n := len(ws.idle); n > 4 {
		t.Errorf("%d connections are kept, 4 are the most", n)
	}
}

// TestWireReap: connections that wait too long are closed, the others stay.
func TestWireReap(t *testing.T) {
	s := serve(t, func(conn, request int64) string { return hello })
	ws := s.wires(t)
	var open []*wire
	for range 3 {
		w, err := ws.get(t.Context(), true)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, w)
	}
	for _, w := range open {
		ws.put(w)
	}
	ws.mu.Lock()
	for _, w := range open[:2] {
		w.free = w.free.Add(-idleTimeout)
	}
	ws.mu.Unlock()
	ws.reap()
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if len(ws.idle) != 1 || ws.idle[0] != open[2] || ws.reaper == nil {
		t.Errorf("%d connections wait", len(ws.idle))
	}
	if _, err := open[0].conn.Write([]byte("x")); err == nil {
		t.Error("a reaped connection is open")
	}
}

// TestWireStray: an answer of another version that comes after a request was sent on a used connection is not that
// request's: it is asked for on another one. There the answer counts.
func TestWireStray(t *testing.T) {
	tagged := func(etag string) string {
		return strings.Replace(hello, "OK\r\n", "OK\r\nETag: \""+etag+"\"\r\n", 1)
	}
	s := serve(t, func(conn, request int64) string {
		if request == 2 {
			return tagged("b")
		}
		return tagged("a")
	})
	ws := s.wires(t)
	for i, etag := range []string{"a", "a", "gone"} {
		w, err := ws.do(t.Context(), etag, func(b, scratch []byte) ([]byte, []byte) {
			return append(b, "GET / HTTP/1.1\r\nHost: h\r\n\r\n"...), scratch
		})
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(w)
		if string(w.head.etag) != `"a"` || string(body) != "hello" || err != nil {
			t.Errorf("request %d: ETag %s, %q, %v", i, w.head.etag, body, err)
		}
		_ = w.Close()
	}
	if conns, requests := s.conns.Load(), s.requests.Load(); conns != 3 || requests != 5 {
		t.Errorf("%d connections, %d requests; want 3 and 5", conns, requests)
	}
}
