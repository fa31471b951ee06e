package s3api

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
)

// Whatever a client writes, the parsers give a signature that fits its form, or an error of S3's.
func FuzzSignature(f *testing.F) {
	const good = "AWS4-HMAC-SHA256 Credential=a/b/20261123/eu-west-1/s3/aws4_request, SignedHeaders=host;x-amz-date, " +
		"Signature="
	f.Add(good+strings.Repeat("0", 64),
		"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=a/20261123/r/s3/aws4_request&X-Amz-Date=20261123T000000Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature="+strings.Repeat("0", 64))
	f.Add(good, "X-Amz-Signature=")
	f.Add("AWS4-HMAC-SHA256 Credential=, SignedHeaders=, Signature=", "X-Amz-Algorithm=&X-Amz-Expires=-1")
	f.Fuzz(func(t *testing.T, header, query string) {
		q, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		r := &http.Request{Method: "GET", Host: "h", URL: &url.URL{Path: "/b/k", RawQuery: query},
			Header: http.Header{}}
		for _, auth := range []string{header, ""} {
			r.Header.Set("Authorization", auth)
			r.Header.Set("X-Amz-Date", "20261123T000000Z")
			r.Header.Set("X-Amz-Content-Sha256", unsigned)
			s, err := parseSignature(r, q)
			var e *apiError
			switch {
			case err != nil && (!errors.As(err, &e) || e.status < 400 || e.code == ""):
				t.Fatalf("%v", err)
			case err == nil && (len(s.sum) != 32 || s.scope[0] != "20261123" && auth != "" ||
				s.scope[3] != "aws4_request" || !slices.Contains(s.headers, "host")):
				t.Fatalf("%+v", s)
			}
			if err := (Keys{"a/b": {text: "secret"}}).verify(r, q,
				time.Date(2026, 11, 23, 0, 1, 0, 0, time.UTC)); err == nil {
				t.Fatal("a signature was made up")
			}
		}
	})
}

// A query is signed in the order of its names and values, escaped as S3 escapes them.
func TestCanonicalQuery(t *testing.T) {
	q, err := url.ParseQuery("prefix=b/%C3%A9+~*&acl&a=2&X-Amz-Signature=00&a=1%2B1&a-b=x")
	if err != nil {
		t.Fatal(err)
	}
	if got := canonicalQuery(q); got != "a=1%2B1&a=2&a-b=x&acl=&prefix=b%2F%C3%A9%20~%2A" {
		t.Error(got)
	}
	if len(q["a"]) != 2 || q["a"][0] != "2" || !q.Has("X-Amz-Signature") {
		t.Errorf("the query was changed: %v", q)
	}
}

// Of any body, at most as much is read as was announced, in any pieces.
func FuzzChunked(f *testing.F) {
	const sum = ";chunk-signature=0000000000000000000000000000000000000000000000000000000000000000\r\n"
	f.Add("5"+sum+"hello\r\n0"+sum+"\r\n", int64(5), false)
	f.Add("1"+sum+"h\r\n0"+sum+"a:b\r\nx-amz-trailer-signature:0\r\n\r\n", int64(1), true)
	f.Add("100001"+sum, int64(1<<21), false)
	f.Fuzz(func(t *testing.T, body string, left int64, trailer bool) {
		r := &chunked{in: bufio.NewReader(iotest.OneByteReader(strings.NewReader(body))), left: left, trailer: trailer}
		got, err := io.ReadAll(r)
		if !trailer && (int64(len(got)) > max(left, 0) || err == nil && int64(len(got)) != left && left >= 0) ||
			len(got) > len(body) {
			t.Fatalf("%d bytes of %d, %v", len(got), left, err)
		}
		var e *apiError
		if err != nil && !errors.As(err, &e) {
			t.Fatal(err)
		}
	})
}

func TestParseKeys(t *testing.T) {
	keys, err := ParseKeys(strings.NewReader("# who\n\n one  1\ntwo\t2\n"))
	if err != nil || len(keys) != 2 || keys["one"].text != "1" || keys["two"].text != "2" {
		t.Errorf("%v, %v", keys, err)
	}
	for text, want := range map[string]string{"": "no key", "#\n": "no key", "a\n": "line 1", "a b\na c\n": "line 2",
		"a b c": "line 1", "\ufeffa b": "line 1"} {
		if _, err := ParseKeys(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// Pages of any size are the sorted keys, cut as a simple model cuts them.
func TestPagesOfAnyTree(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		parts, set := []string{"a", "a-", "a0", "b", "-", "é"}, map[string]bool{}
		for range 30 {
			key := "p"
			for range 1 + rng.IntN(3) {
				key += "/" + parts[rng.IntN(len(parts))] + parts[rng.IntN(len(parts))]
			}
			set[key] = true
		}
		m, err := catalog.Build(func(yield func(objstore.Object, error) bool) {
			for k := range set {
				if !yield(objstore.Object{Key: k, ETag: "e", Size: 1}, nil) {
					return
				}
			}
		}, catalog.BuildOptions{Prefix: "p/"})
		if err != nil {
			t.Fatal(err)
		}
		var keys []string
		for f := range m.Len() { // a file with the name of a folder is not shown
			keys = append(keys, "p/"+m.Path(f))
		}
		slices.Sort(keys)
		for range 20 {
			l := listing{v2: true, max: 1 + rng.IntN(5), prefix: "p/" + []string{"", "a", "aa/", "b-"}[rng.IntN(4)],
				delimiter: []string{"", "/", "-", "0"}[rng.IntN(4)]}
			var got []string
			tr := &tree{m: m}
			for n := 0; ; n++ {
				r := tr.page(&l, "bucket", "p/", time.Time{})
				for _, k := range r.Contents {
					got = append(got, k.Key)
				}
				for _, p := range r.CommonPrefixes {
					got = append(got, p.Prefix)
				}
				if len(r.Contents)+len(r.CommonPrefixes) != *r.KeyCount || *r.KeyCount > l.max || n > 100 {
					t.Fatalf("%+v", r)
				}
				if !r.IsTruncated {
					break
				}
				next, err := parseListing(url.Values{"list-type": {"2"}, "prefix": {l.prefix},
					"delimiter": {l.delimiter}, "max-keys": {fmt.Sprint(l.max)},
					"continuation-token": {r.NextContinuationToken}})
				if err != nil || next.foreign {
					t.Fatal(next, err)
				}
				l = next
			}
			slices.Sort(got) // of a page, keys and prefixes come apart
			if want := model(keys, l.prefix, l.delimiter); !slices.Equal(got, want) {
				t.Fatalf("prefix %q, delimiter %q, %d a page, of %q:\n%q, want\n%q",
					l.prefix, l.delimiter, l.max, keys, got, want)
			}
		}
	}
}

// model lists sorted keys.
func model(keys []string, prefix, delimiter string) (all []string) {
	for _, k := range keys {
		rest, ok := strings.CutPrefix(k, prefix)
		if !ok {
			continue
		}
		if i := strings.Index(rest, delimiter); delimiter != "" && i >= 0 {
			k = prefix + rest[:i+len(delimiter)]
		}
		if len(all) == 0 || all[len(all)-1] != k {
			all = append(all, k)
		}
	}
	return all
}

// A written key is let go of by a listing that began after the write had ended, and by no other.
func TestWritten(t *testing.T) {
	var w written
	before := time.Now().Add(-time.Second)
	end := w.begin([]string{"a/1", "a/2"})
	w.listed(time.Now().Add(time.Second)) // it runs
	if !w.has("a/1") || !w.below("a/") || w.has("a/3") || w.below("b") {
		t.Error("while it runs")
	}
	end()
	if w.listed(before); !w.has("a/2") {
		t.Error("a listing from before the write")
	}
	if w.listed(time.Now().Add(time.Second)); w.below("") {
		t.Error("a listing from after it")
	}
	defer w.begin(make([]string, maxWritten+1))()
	if !w.has("anything") || !w.below("anything") {
		t.Error("too many keys to know")
	}
}

// An answer has its own time, however long its request took.
func TestPlacedWrites(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	c := &placed{Conn: b, conns: &conns{}}
	defer c.Close()
	if err := c.SetWriteDeadline(time.Now().Add(-time.Second)); err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(io.Discard, a) }()
	if _, err := c.Write([]byte("HTTP/1.1 200 OK")); err != nil {
		t.Error(err)
	}
}

// A client may pause, as for an evaluation: neither its answer is cut off, nor is the origin taken for stalled.
func TestPausedReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := net.Pipe()
		defer a.Close()
		go func() {
			for _, pause := range []time.Duration{9 * time.Minute, 11 * time.Minute} {
				time.Sleep(pause)
				_, _ = io.ReadFull(a, make([]byte, 5))
			}
		}()
		fired := false
		stalled := time.AfterFunc(2*pieceTime, func() { fired = true })
		d := &dataset{}
		d.left, d.cut = context.WithCancel(t.Context())
		defer d.cut()
		p := patient{&placed{Conn: b, conns: &conns{}}, nil, d, stalled}
		if _, err := p.Write([]byte("bytes")); err != nil || fired {
			t.Errorf("after 9 minutes: %v, stalled %v", err, fired)
		}
		if _, err := p.Write([]byte("bytes")); err == nil {
			t.Error("11 minutes are no pause")
		}
		if time.Sleep(time.Hour); !fired {
			t.Error("an origin that sends nothing goes unseen")
		}
	})
}

// trickle is a client that sends a few bytes each second, and the connection on which it does.
type trickle struct {
	http.ResponseWriter
	bytes int
	until time.Time
}

func (c *trickle) SetReadDeadline(t time.Time) error { c.until = t; return nil }
func (c *trickle) Close() error                      { return nil }

func (c *trickle) Read(p []byte) (int, error) {
	if time.Sleep(time.Second); time.Now().After(c.until) {
		return 0, os.ErrDeadlineExceeded
	}
	return min(len(p), c.bytes), nil
}

// A client that sends a byte now and then keeps neither place nor goroutine. One that sends slowly keeps both, also if
// the origin takes long to take what it sent.
func TestSlowBodies(t *testing.T) {
	for _, row := range []struct {
		bytes int
		pause time.Duration // of the origin
		ends  bool
	}{{1, 0, true}, {1, time.Minute, true}, {piece / 40, 0, true}, {piece / 20, 0, false},
		{piece / 20, time.Minute, false}, {2 * piece, time.Minute, false}} {
		synctest.Test(t, func(t *testing.T) {
			c := &trickle{bytes: row.bytes}
			u := &upload{ReadCloser: c, control: http.NewResponseController(c)}
			for i := range 200 {
				if _, err := u.Read(make([]byte, 32<<10)); (err != nil) && !row.ends ||
					err == nil && i > int(pieceTime/time.Second) && row.ends {
					t.Fatalf("%+v: read %d: %v", row, i, err)
				} else if err != nil {
					return
				}
				time.Sleep(row.pause)
			}
		})
	}
}
