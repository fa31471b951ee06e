package hostile

import (
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/hostile"
	"github.com/shoalfs/shoal/lab/rig/port"
)

// get answers the GETs of the row's object.
func get(answer func(x *Exchange)) Script {
	return func(x *Exchange) bool {
		if x.Op != Get || x.Key != "d/x.bin" {
			return false
		}
		answer(x)
		return true
	}
}

// changed answers them soundly but for a change.
func changed(change func(a *Answer)) Script {
	return get(func(x *Exchange) {
		a := x.Sound()
		change(a)
		x.Send(a.Bytes())
		if a.Get("Connection") == "close" || strings.HasPrefix(a.Status, "HTTP/1.0") {
			x.Close()
		}
	})
}

// set replaces a header.
func set(name, value string) Script {
	return changed(func(a *Answer) { a.Set(name, value) })
}

// added adds one.
func added(name, value string) Script {
	return changed(func(a *Answer) { a.Add(name, value) })
}

// sent answers by the same bytes each time.
func sent(b string) Script {
	return get(func(x *Exchange) { x.Send([]byte(b)); x.Close() })
}

// failing answers by an error.
func failing(a *Answer) Script {
	return get(func(x *Exchange) { x.Send(a.Bytes()) })
}

// part answers a GET without Range by a part, as if the object had total bytes.
func part(first, last, total int) Script {
	return changed(func(a *Answer) {
		a.Status = "HTTP/1.1 206 Partial Content"
		a.Add("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, total))
		a.Sized(bytes.Repeat(a.Body, 1+(last+1)/len(a.Body))[first : last+1])
	})
}

// ranged shifts what an answer to a GET with Range says of its range.
func ranged(first, last, total int) Script {
	return changed(func(a *Answer) {
		var f, l, n int
		if _, err := fmt.Sscanf(a.Get("Content-Range"), "bytes %d-%d/%d", &f, &l, &n); err == nil {
			a.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", f+first, l+last, n+total))
		}
	})
}

// half sends the head and the first half of the body.
func half(x *Exchange) {
	a := x.Sound()
	a.Body = a.Body[:len(a.Body)/2]
	x.Send(a.Bytes())
}

func squeezed(b []byte) []byte {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	_, _ = w.Write(b)
	_ = w.Close()
	return z.Bytes()
}

// lists answers listings, but not the probe.
func lists(answer func(x *Exchange)) Script {
	return func(x *Exchange) bool {
		if x.Op != List || x.Key != "d/" {
			return false
		}
		answer(x)
		return true
	}
}

// listed answers them by one page.
func listed(page func(sound []string) string) Script {
	return lists(func(x *Exchange) { x.Send(XML("200 OK", page(x.Entries())).Bytes()) })
}

// beside lists an entry more.
func beside(entries ...string) Script {
	return listed(func(sound []string) string { return hostile.Page("", append(sound, entries...)...) })
}

// asX lists the object with another size or ETag.
func asX(change func(entry string) string) Script {
	return listed(func(sound []string) string {
		return hostile.Page("", append(sound[:2:2], change(sound[2]))...)
	})
}

// any answers all requests.
func any(answer func(x *Exchange)) Script {
	return func(x *Exchange) bool { answer(x); return true }
}

// groups are the parts of the table.
var groups = []struct {
	name string
	rows func() []row
}{
	{"to a GET without Range", answers}, {"to a GET with Range", ranges}, {"connections and framing", connections},
	{"listings", listings}, {"at the first contact", starts},
}

func rows() (all []row) {
	for _, g := range groups {
		for _, r := range g.rows() {
			r.group = g.name
			all = append(all, r)
		}
	}
	return all
}

const etag = "00000000000000000000000000000000"

// answers are heads and bodies of GETs without Range.
func answers() []row {
	xmlError := func(status, code string) Script { return failing(Error(status, code)) }
	bare := func(status string) Script {
		return failing(&Answer{Status: "HTTP/1.1 " + status, Header: [][2]string{{"Content-Length", "0"}}})
	}
	return []row{
		{name: "sound", script: nil, want: "bytes", within: atOnce, core: true},
		{name: "206 unasked, another part", script: part(500, 1499, 5000),
			want: "EIO", text: "bytes 500-1499/5000", within: allTries},
		{name: "206 unasked, the length is right", script: part(500, 5499, 6000),
			want: "EIO", text: "bytes 500-5499/6000", within: allTries},
		{name: "206 unasked, the first part", script: part(0, 999, 5000),
			want: "EIO", text: "bytes 0-999/5000", within: allTries},
		{name: "206 unasked, all of it", script: part(0, 4999, 5000), want: "EIO", text: "HTTP 206", within: allTries},
		{name: "206 unasked, without Content-Range", script: changed(func(a *Answer) {
			a.Status = "HTTP/1.1 206 Partial Content"
		}), want: "EIO", text: "HTTP 206", within: allTries},
		{name: "200 with Content-Range", script: set("Content-Range", "bytes 5000-9999/10000"),
			want: "EIO", text: "bytes 5000-9999/10000", within: allTries},
		{name: "a shorter object", script: changed(func(a *Answer) { a.Sized(a.Body[:4000]) }),
			want: "EIO", text: "the answer has 4000", within: allTries},
		{name: "a longer object", script: changed(func(a *Answer) { a.Sized(append(a.Body, 'x')) }),
			want: "EIO", text: "the answer has 5001", within: allTries},
		{name: "no Content-Length, then the end", script: changed(func(a *Answer) {
			a.Del("Content-Length")
			a.Set("Connection", "close")
		}), want: "bytes", within: atOnce, core: true},
		{name: "no Content-Length, an early end", script: changed(func(a *Answer) {
			a.Del("Content-Length")
			a.Set("Connection", "close")
			a.Body = a.Body[:99]
		}), want: "EIO", text: "after 99 of 5000", within: allTries},
		{name: "no Content-Length, a late end", script: changed(func(a *Answer) {
			a.Del("Content-Length")
			a.Set("Connection", "close")
			a.Body = append(a.Body, 'x')
		}), want: "EIO", text: "longer than announced", within: allTries},
		{name: "no Content-Length, no end", script: changed(func(a *Answer) { a.Del("Content-Length") }),
			want: "EIO", text: "gave up", within: twoMinutes},
		{name: "chunked", script: changed(func(a *Answer) { a.Chunked() }), want: "bytes", within: atOnce,
			core: true},
		{name: "chunked, longer", script: changed(func(a *Answer) {
			a.Body = append(a.Body, 'x')
			a.Chunked()
		}), want: "EIO", text: "longer than announced", within: allTries},
		{name: "chunked, shorter", script: changed(func(a *Answer) { a.Body = a.Body[:99]; a.Chunked() }),
			want: "EIO", text: "after 99 of 5000", within: allTries},
		{name: "chunked, without its last chunk", script: changed(func(a *Answer) {
			a.Chunked()
			a.Body = a.Body[:len(a.Body)-5]
			a.Set("Connection", "close")
		}), want: "EIO", text: "gave up", within: allTries},
		{name: "chunked, a chunk of 2^64 bytes", script: changed(func(a *Answer) {
			a.Chunked()
			a.Body = append([]byte("10000000000000000\r\n"), a.Body...)
		}), want: "EIO", text: "gave up", within: allTries},
		{name: "chunked, with a length", script: changed(func(a *Answer) {
			a.Chunked()
			a.Add("Content-Length", "7")
		}), want: "bytes", within: atOnce, core: true},
		{name: "two lengths that differ", script: added("Content-Length", "4999"),
			want: "EIO", text: "Content-Length", within: allTries},
		{name: "two lengths that agree", script: added("Content-Length", "5000"), want: "bytes", within: atOnce,
			core: true},
		{name: "a length that is no number", script: set("Content-Length", "0x1388"),
			want: "EIO", text: "Content-Length", within: allTries},
		{name: "a negative length", script: set("Content-Length", "-1"),
			want: "EIO", text: "Content-Length", within: allTries},
		{name: "a length of 2^64", script: set("Content-Length", "18446744073709551616"),
			want: "EIO", text: "Content-Length", within: allTries},
		{name: "more bytes than the length", script: changed(func(a *Answer) {
			a.Body = append(a.Body, "and more"...)
		}), want: "bytes", within: allTries},
		{name: "another answer behind it", script: changed(func(a *Answer) {
			a.Body = append(a.Body, a.Bytes()...)
		}), want: "bytes", within: allTries},
		{name: "another ETag", script: set("ETag", `"`+etag+`"`), want: "ESTALE", text: etag, within: atOnce,
			core: true},
		{name: "no ETag", script: changed(func(a *Answer) {
			a.Del("ETag")
		}), want: "EIO", text: "no ETag", within: allTries},
		{name: "the ETag, weak", script: changed(func(a *Answer) { a.Set("ETag", "W/"+a.Get("ETag")) }),
			want: "EIO", text: "weak", within: allTries},
		{name: "two ETags", script: added("ETag", `"`+etag+`"`), want: "EIO", text: "ETag", within: allTries},
		{name: "gzip, with its length", script: changed(func(a *Answer) {
			a.Set("Content-Encoding", "gzip")
			a.Sized(squeezed(a.Body))
		}), want: "EIO", text: "asked for 5000 bytes", within: allTries},
		{name: "gzip, chunked", script: changed(func(a *Answer) {
			a.Set("Content-Encoding", "gzip")
			a.Body = squeezed(a.Body)
			a.Chunked()
		}), want: "EIO", text: "gave up", within: allTries},
		{name: "gzip as it is stored", script: set("Content-Encoding", "gzip"), want: "bytes", within: atOnce,
			core: true},
		{name: "another transfer coding", script: set("Transfer-Encoding", "gzip, chunked"),
			want: "EIO", text: "Transfer-Encoding", within: allTries},
		{name: "a date that is none", script: set("Last-Modified", "yesterday"), want: "bytes", within: atOnce,
			core: true},
		{name: "301 to elsewhere",
			script: failing(&Answer{Status: "HTTP/1.1 301 Moved Permanently",
				Header: [][2]string{{"Location", "http://127.0.0.1:1/bucket/d/x.bin"}, {"Content-Length", "0"}}}),
			want: "EIO", text: "301", within: atOnce},
		{name: "307 to itself", script: failing(
			&Answer{Status: "HTTP/1.1 307 Temporary Redirect",
				Header: [][2]string{{"Location", "/bucket/d/x.bin"}, {"Content-Length", "0"}}}), want: "EIO",
			text: "307", within: allTries},
		{name: "204", script: failing(&Answer{Status: "HTTP/1.1 204 No Content"}),
			want: "EIO", text: "204", within: atOnce},
		{name: "304", script: failing(&Answer{Status: "HTTP/1.1 304 Not Modified"}),
			want: "EIO", text: "304", within: atOnce},
		{name: "400", script: bare("400 Bad Request"), want: "EIO", text: "400", within: atOnce},
		{name: "403, XML", script: xmlError("403 Forbidden", "AccessDenied"),
			want: "EACCES", text: "AccessDenied", within: atOnce, core: true},
		{name: "403, bare", script: bare("403 Forbidden"), want: "EACCES", text: "403", within: atOnce},
		{name: "404, XML", script: xmlError("404 Not Found", "NoSuchKey"),
			want: "ESTALE", text: "NoSuchKey", within: atOnce},
		{name: "404, bare", script: bare("404 Not Found"), want: "ESTALE", text: "404", within: atOnce},
		{name: "412, XML", script: xmlError("412 Precondition Failed", "PreconditionFailed"),
			want: "ESTALE", text: "PreconditionFailed", within: atOnce},
		{name: "416, XML", script: xmlError("416 Range Not Satisfiable", "InvalidRange"),
			want: "ESTALE", text: "InvalidRange", within: atOnce},
		{name: "429 for ever", script: bare("429 Too Many Requests"), want: "EIO", text: "429", within: allTries},
		{name: "500 for ever, XML", script: xmlError("500 Internal Server Error", "InternalError"),
			want: "EIO", text: "InternalError", within: allTries},
		{name: "500 for ever, bare", script: bare("500 Internal Server Error"),
			want: "EIO", text: "500", within: allTries},
		{name: "503 SlowDown for ever", script: xmlError("503 Slow Down", "SlowDown"),
			want: "EIO", text: "SlowDown", within: allTries},
		{name: "500, 503, then sound", script: func(x *Exchange) bool {
			return get(func(x *Exchange) {
				x.Send([][]byte{Error("500 Internal Server Error", "InternalError").Bytes(),
					Error("503 Slow Down", "SlowDown").Bytes(), x.Sound().Bytes()}[min(x.N, 2)])
			})(x)
		}, want: "bytes", within: allTries, core: true},
		{name: "an error's XML without end", script: get(func(x *Exchange) {
			x.Send([]byte("HTTP/1.1 500 Internal Server Error\r\n\r\n<Error><Message>"))
			x.Pour([]byte("again and "))
		}), want: "EIO", text: "500", within: twoMinutes},
		{name: "200, a web page",
			script: failing(&Answer{Status: "HTTP/1.1 200 OK",
				Header: [][2]string{{"Content-Type", "text/html"}, {"Content-Length", "22"}},
				Body:   []byte("<html>It works!</html>")}), want: "EIO", text: "no ETag", within: allTries},
		{name: "200, an error's XML", script: failing(Error("200 OK", "InternalError")),
			want: "EIO", text: "no ETag", within: allTries},
		{name: "HTTP/1.0", script: changed(func(a *Answer) {
			a.Status = "HTTP/1.0 200 OK"
			a.Del("Content-Length")
		}), want: "bytes", within: atOnce, core: true},
		{name: "HTTP/2.0 in its status line", script: changed(func(a *Answer) { a.Status = "HTTP/2.0 200 OK" }),
			want: "EIO", text: "malformed", within: allTries},
	}
}

// ranges are answers to GETs with Range.
func ranges() []row {
	rows := []row{
		{name: "range: sound", script: nil, want: "bytes", within: atOnce},
		{name: "range: 200 with all of it", script: get(func(x *Exchange) {
			x.Header.Del("Range")
			x.Send(x.Sound().Bytes())
		}), want: "EIO", text: "whole object", within: atOnce},
		{name: "range: another start", script: ranged(1, 0, 0),
			want: "EIO", text: "the answer's range", within: allTries},
		{name: "range: another end", script: ranged(0, 1, 0),
			want: "EIO", text: "the answer's range", within: allTries},
		{name: "range: another part of that length", script: ranged(4096, 4096, 0),
			want: "EIO", text: "the answer's range", within: allTries},
		{name: "range: another total", script: ranged(0, 0, 1),
			want: "ESTALE", text: "another version", within: atOnce},
		{name: "range: unknown total", script: changed(func(a *Answer) {
			r, _, _ := strings.Cut(a.Get("Content-Range"), "/")
			a.Set("Content-Range", r+"/*")
		}), want: "bytes", within: atOnce},
		{name: "range: no Content-Range", script: changed(func(a *Answer) { a.Del("Content-Range") }),
			want: "EIO", text: "the answer's range", within: allTries},
		{name: "range: two of them", script: added("Content-Range", "bytes 0-1/2"),
			want: "EIO", text: "Content-Range", within: allTries},
		{name: "range: multipart", script: changed(func(a *Answer) {
			a.Del("Content-Range")
			a.Set("Content-Type", "multipart/byteranges; boundary=x")
		}), want: "EIO", text: "the answer's range", within: allTries},
		{name: "range: chunked", script: changed(func(a *Answer) { a.Chunked() }), want: "bytes",
			within: atOnce},
		{name: "range: a shorter body", script: changed(func(a *Answer) { a.Sized(a.Body[1:]) }),
			want: "EIO", text: "the answer has", within: allTries},
		{name: "range: always 416", script: failing(Error("416 Range Not Satisfiable", "InvalidRange")),
			want: "ESTALE", text: "InvalidRange", within: atOnce},
	}
	for i := range rows {
		rows[i].size = large
	}
	return rows
}

// connections are what goes wrong below HTTP, or in its framing, in answers to GETs.
func connections() []row {
	return []row{
		{name: "a reset instead of an answer", script: get(func(x *Exchange) { x.Reset() }),
			want: "EIO", text: "gave up", within: allTries},
		{name: "an end instead of an answer", script: get(func(x *Exchange) { x.Close() }),
			want: "EIO", text: "gave up", within: allTries},
		{name: "a reset in the body", script: get(func(x *Exchange) { half(x); x.Reset() }),
			want: "EIO", text: "gave up", within: allTries},
		{name: "an end in the body", script: get(func(x *Exchange) { half(x); x.Close() }),
			want: "EIO", text: "of 5000 bytes", within: allTries},
		{name: "a half-close in the body", script: get(func(x *Exchange) { half(x); x.HalfClose() }),
			want: "EIO", text: "of 5000 bytes", within: allTries},
		{name: "a stall before the answer", script: get(func(x *Exchange) { x.Stall() }),
			want: "EIO", text: "gave up", within: twoMinutes},
		{name: "a stall in the head", script: get(func(x *Exchange) {
			x.Send([]byte("HTTP/1.1 200 OK\r\nETag"))
			x.Stall()
		}), want: "EIO", text: "gave up", within: twoMinutes},
		{name: "a stall in the body", script: get(func(x *Exchange) { half(x); x.Stall() }),
			want: "EIO", text: "no answer within", within: twoMinutes},
		{name: "a body of a byte a second", script: get(func(x *Exchange) {
			x.Drip(x.Sound().Bytes(), time.Second)
		}), want: "EIO", text: "gave up", within: twoMinutes},
		{name: "a body of 1 KB a second", script: get(func(x *Exchange) {
			x.Drip(x.Sound().Bytes(), time.Millisecond)
		}), want: "bytes", within: allTries},
		{name: "a head of 60 KB", script: set("X-Amz-Meta-Long", strings.Repeat("x", 60_000)), want: "bytes",
			within: atOnce, core: true},
		{name: "a head of 1 MB", script: set("X-Amz-Meta-Long", strings.Repeat("x", 1_000_000)),
			want: "EIO", text: "malformed", within: allTries},
		{name: "a head without end", script: get(func(x *Exchange) {
			x.Send([]byte("HTTP/1.1 200 OK\r\n"))
			x.Pour([]byte("X: y\r\n"))
		}), want: "EIO", text: "malformed", within: allTries},
		{name: "a body without end", script: get(func(x *Exchange) {
			a := x.Sound()
			a.Del("Content-Length")
			x.Send(a.Bytes())
			x.Pour([]byte("x"))
		}), want: "EIO", text: "longer than announced", within: allTries},
		{name: "chunks without end", script: get(func(x *Exchange) {
			a := x.Sound()
			a.Body = nil
			a.Chunked()
			a.Body = nil
			x.Send(a.Bytes())
			x.Pour([]byte("4\r\nxxxx\r\n"))
		}), want: "EIO", text: "longer than announced", within: allTries},
		{name: "100 Continue thrice", script: changed(func(a *Answer) {
			a.Status = strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 3) + a.Status
		}), want: "bytes", within: atOnce, core: true},
		{name: "100 Continue for ever", script: get(func(x *Exchange) {
			x.Pour([]byte("HTTP/1.1 100 Continue\r\n\r\n"))
		}), want: "EIO", text: "gave up", within: twoMinutes},
		{name: "101", script: sent("HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n"),
			want: "EIO", text: "malformed", within: allTries},
		{name: "HTTP/2 frames", script: sent("\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64"),
			want: "EIO", text: "gave up", within: allTries},
		{name: "HTTP/2's preface", script: sent("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
			want: "EIO", text: "malformed", within: allTries},
		{name: "garbage", script: get(func(x *Exchange) {
			_, _ = io.CopyN(senderOf(x), rand.Reader, 100_000)
			x.Close()
		}), want: "EIO", text: "gave up", within: allTries},
		{name: "a folded header", script: set("ETag", "\r\n \""+etag+"\""),
			want: "EIO", text: "malformed", within: allTries},
		{name: "a header without colon", script: added("X\r\nnothing", "y"),
			want: "EIO", text: "malformed", within: allTries},
		{name: "a status of 2e2", script: changed(func(a *Answer) { a.Status = "HTTP/1.1 2e2 OK" }),
			want: "EIO", text: "malformed", within: allTries},
	}
}

// sender is an exchange as a writer.
type sender struct{ x *Exchange }

func senderOf(x *Exchange) io.Writer { return sender{x} }

func (s sender) Write(p []byte) (int, error) {
	s.x.Send(p)
	return len(p), nil
}

// listings are what comes of listings that are not sound.
func listings() []row {
	page := func(body string) Script { return listed(func([]string) string { return body }) }
	replaced := func(old, by string) Script {
		return asX(func(entry string) string { return strings.Replace(entry, old, by, 1) })
	}
	const slow = 2*time.Minute + 30*time.Second // the last page that is begun has its 30 s
	return []row{
		{name: "listing: a web page", script: lists(func(x *Exchange) {
			a := XML("200 OK", "<html>It works!</html>")
			a.Set("Content-Type", "text/html")
			x.Send(a.Bytes())
		}), want: "refused", text: "web page", within: atOnce, core: true},
		{name: "listing: a web page, 404", script: lists(func(x *Exchange) {
			a := XML("404 File not found", "<html>Nothing matches the given URI.</html>")
			a.Set("Content-Type", "text/html;charset=utf-8")
			x.Send(a.Bytes())
		}), want: "refused", text: "not an S3 API", within: atOnce, core: true},
		{name: "listing: JSON", script: lists(func(x *Exchange) {
			a := XML("200 OK", "{}")
			a.Set("Content-Type", "application/json")
			x.Send(a.Bytes())
		}), want: "refused", text: "not an S3 API", within: atOnce},
		{name: "listing: nothing", script: page(""), want: "refused", text: "the answer is empty", within: allTries},
		{name: "listing: XML of something else", script: page("<rss><item/></rss>"),
			want: "refused", text: "other XML: <rss>", within: atOnce, core: true},
		{name: "listing: an error's XML with 200", script: page("<Error><Code>InternalError</Code></Error>"),
			want: "refused", text: "<Error>", within: atOnce},
		{name: "listing: XML cut short", script: listed(func(sound []string) string {
			return strings.TrimSuffix(hostile.Page("", sound...), "</ListBucketResult>")
		}), want: "refused", text: "cut short", within: allTries},
		{name: "listing: garbage", script: page("\x00\x01<<<"), want: "refused", text: "not XML", within: atOnce},
		{name: "listing: entities in entities",
			script: page(`<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>` +
				hostile.Page("", hostile.Entry("d/&b;", "1", etag))), want: "refused", text: "not XML", within: atOnce,
			core: true},
		{name: "listing: an entity of a file", script: page(`<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>` +
			hostile.Page("", hostile.Entry("d/&a;", "1", etag))), want: "refused", text: "not XML", within: atOnce},
		{name: "listing: XML 1,000,000 deep", script: page("<ListBucketResult>" + strings.Repeat("<a>", 1_000_000)),
			want: "refused", text: "", within: allTries},
		{name: "listing: one token for ever", script: lists(func(x *Exchange) {
			x.Send(XML("200 OK",
				hostile.Page("same", hostile.Entry(fmt.Sprintf("d/%09d", x.N), "1", etag))).Bytes())
		}), want: "refused", text: `continuation token "same" came twice`, within: atOnce, core: true},
		{name: "listing: two tokens in turn", script: lists(func(x *Exchange) {
			x.Send(XML("200 OK",
				hostile.Page(fmt.Sprint("token-", x.N%2),
					hostile.Entry(fmt.Sprintf("d/%09d", x.N), "1", etag))).Bytes())
		}), want: "refused", text: "came twice", within: atOnce},
		{name: "listing: the first page for ever", script: lists(func(x *Exchange) {
			x.Send(XML("200 OK", hostile.Page(fmt.Sprint("token-", x.N), x.Entries()...)).Bytes())
		}), want: "refused", text: `first key of a page "d/a.bin" came twice`, within: atOnce, core: true},
		{name: "listing: truncated, without token",
			script: page(strings.Replace(hostile.Page("", hostile.Entry("d/a", "1", etag)), "false", "true", 1)),
			want:   "refused", text: "continuation token", within: atOnce},
		{name: "listing: without end", script: lists(func(x *Exchange) {
			entries := make([]string, 1000)
			for i := range entries {
				entries[i] = hostile.Entry(fmt.Sprintf("d/%09d-%04d", x.N, i), "1", etag)
			}
			x.Send(XML("200 OK", hostile.Page(fmt.Sprint("token-", x.N), entries...)).Bytes())
		}), want: "interrupted", text: "listing s3://bucket/d", within: allTries},
		{name: "listing: a stall", script: lists(func(x *Exchange) {
			x.Stall()
		}), want: "refused", text: "gave up", within: slow},
		{name: "listing: a stall, told meanwhile", script: lists(func(x *Exchange) { x.Stall() }),
			want: "interrupted", text: "opening s3://bucket/d", within: allTries},
		{name: "listing: a stall in a page", script: lists(func(x *Exchange) {
			b := XML("200 OK", hostile.Page("", x.Entries()...)).Bytes()
			x.Send(b[:len(b)-99])
			x.Stall()
		}), want: "refused", text: "arrived within 30s", within: slow},
		{name: "listing: a byte a second", script: lists(func(x *Exchange) {
			x.Drip(XML("200 OK", hostile.Page("", x.Entries()...)).Bytes(), time.Second)
		}), want: "refused", text: "gave up", within: slow},
		{name: "listing: a page without end", script: lists(func(x *Exchange) {
			x.Send([]byte("HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\n\r\n<ListBucketResult>"))
			x.Pour([]byte("<Contents><Key>d/a</Key></Contents>"))
		}), want: "refused", text: "more than 16 MiB", within: 30 * time.Second},
		{name: "listing: chunked", script: lists(func(x *Exchange) {
			a := XML("200 OK", hostile.Page("", x.Entries()...))
			a.Chunked()
			x.Send(a.Bytes())
		}), want: "bytes", within: atOnce, core: true},
		{name: "listing: 5,000 keys on a page", script: listed(func(sound []string) string {
			for i := range 5000 {
				sound = append(sound, hostile.Entry(fmt.Sprintf("d/y%06d", i), "1", etag))
			}
			return hostile.Page("", sound...)
		}), want: "bytes", within: atOnce, core: true},
		{name: "listing: not in order", script: listed(func(sound []string) string {
			slices.Reverse(sound)
			return hostile.Page("", sound...)
		}), want: "bytes", within: atOnce, core: true},
		{name: "listing: a key twice", script: listed(func(sound []string) string {
			return hostile.Page("", append(sound, sound...)...)
		}), want: "bytes", within: atOnce, core: true},
		{name: "listing: a key twice, two versions", script: beside(hostile.Entry("d/x.bin", "5000", etag)),
			want: "refused", text: "listed twice", within: atOnce},
		{name: "listing: a key of another prefix", script: beside(hostile.Entry("e/y.bin", "5000", etag)),
			want: "refused", text: "does not begin with the prefix", within: atOnce, core: true},
		{name: "listing: an empty key", script: beside(hostile.Entry("", "5000", etag)),
			want: "refused", text: "does not begin with the prefix", within: atOnce},
		{name: "listing: .., //, /",
			script: beside(hostile.Entry("d/../../etc/passwd", "5", etag), hostile.Entry("d//y", "5", etag),
				hostile.Entry("d/y/", "5", etag), hostile.Entry("d/.", "5", etag)), want: "bytes", within: atOnce,
			core: true},
		{name: "listing: control characters",
			script: beside(hostile.Entry("d/a&#x9;b&#xA;c", "5", etag), hostile.Entry("d/a&#x202E;b", "5", etag)),
			want:   "bytes", within: atOnce, core: true},
		{name: "listing: NUL, encoded", script: listed(func(sound []string) string {
			return strings.Replace(hostile.Page("", append(sound, hostile.Entry("d/a%00b", "5", etag))...), "<Name>",
				"<EncodingType>url</EncodingType><Name>", 1)
		}), want: "bytes", within: atOnce},
		{name: "listing: NUL, bare", script: beside(hostile.Entry("d/a\x00b", "5", etag)),
			want: "refused", text: "not XML", within: atOnce},
		{name: "listing: a key of 100 KB", script: beside(hostile.Entry("d/"+strings.Repeat("k", 100_000), "5", etag)),
			want: "bytes", within: atOnce},
		{name: "listing: said to be URL-encoded, is not", script: listed(func(sound []string) string {
			return strings.Replace(hostile.Page("", append(sound, hostile.Entry("d/50%zz", "5", etag))...), "<Name>",
				"<EncodingType>url</EncodingType><Name>", 1)
		}), want: "refused", text: "%zz", within: atOnce},
		{name: "listing: a negative size", script: replaced("<Size>5000", "<Size>-5000"),
			want: "refused", text: "size of -5000", within: atOnce},
		{name: "listing: a size of 2^63-1", script: replaced("<Size>5000", "<Size>9223372036854775807"),
			want: "refused", text: "size of 9223372036854775807", within: atOnce},
		{name: "listing: a size of 2^62", script: replaced("<Size>5000", "<Size>4611686018427387904"),
			want: "refused", text: "size of 4611686018427387904", within: atOnce},
		{name: "listing: a size of 2^64", script: replaced("<Size>5000", "<Size>18446744073709551616"),
			want: "refused", text: "not S3's XML", within: atOnce},
		{name: "listing: a size that is no number", script: replaced("<Size>5000", "<Size>5 kB"),
			want: "refused", text: "not S3's XML", within: atOnce},
		{name: "listing: a smaller size than the object's", script: replaced("<Size>5000", "<Size>4000"),
			want: "EIO", text: "asked for 4000 bytes, the answer has 5000", within: allTries},
		{name: "listing: a larger size than the object's", script: replaced("<Size>5000", "<Size>6000"),
			want: "EIO", text: "asked for 6000 bytes, the answer has 5000", within: allTries},
		{name: "listing: size 0 of an object that has some", script: replaced("<Size>5000", "<Size>0"), want: "empty",
			within: atOnce},
		{name: "listing: a date that is none", script: replaced("2026-01-02", "yesterday"),
			want: "refused", text: "not S3's XML", within: atOnce, core: true},
		{name: "listing: no date",
			script: replaced("<LastModified>"+hostile.Modified.Format("2006-01-02T15:04:05.000Z")+"</LastModified>",
				""), want: "bytes", within: atOnce},
		{name: "listing: no ETag", script: asX(func(e string) string {
			a, b, _ := strings.Cut(e, "<ETag>")
			_, c, _ := strings.Cut(b, "</ETag>")
			return a + c
		}), want: "refused", text: "--store weak-etag", within: atOnce},
		{name: "listing: another ETag than the object's", script: asX(func(e string) string {
			a, b, _ := strings.Cut(e, "<ETag>")
			_, c, _ := strings.Cut(b, "</ETag>")
			return a + "<ETag>" + etag + "</ETag>" + c
		}), want: "ESTALE", text: etag, within: atOnce},
		{name: "listing: 403", script: lists(func(x *Exchange) {
			x.Send(Error("403 Forbidden", "AccessDenied").Bytes())
		}), want: "refused", text: "s3:ListBucket", within: atOnce},
		{name: "listing: 301", script: lists(func(x *Exchange) {
			x.Send(Error("301 Moved Permanently", "PermanentRedirect").Bytes())
		}), want: "refused", text: "AWS_REGION", within: atOnce},
		{name: "listing: 500 for ever", script: lists(func(x *Exchange) {
			x.Send(Error("500 Internal Server Error", "InternalError").Bytes())
		}), want: "refused", text: "InternalError", within: allTries},
		{name: "listing: a reset", script: lists(func(x *Exchange) {
			x.Reset()
		}), want: "refused", text: "gave up", within: allTries},
	}
}

// starts are stores that the first contact already finds out.
func starts() []row {
	silent := func(t *testing.T) string {
		return hostile.Listen(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	}
	return []row{
		{name: "start: nobody listens", start: func(t *testing.T) string {
			addr, release, err := port.Hold()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(release)
			return "http://" + addr
		}, want: "refused", text: "connection refused", within: atOnce, core: true},
		{name: "start: silence", start: func(t *testing.T) string {
			return "http://" + silent(t)
		}, want: "refused", text: "no answer within", within: 12 * time.Second},
		{name: "start: silence, over TLS", start: func(t *testing.T) string {
			return "https://" + silent(t)
		}, want: "refused", text: "AWS_ENDPOINT_URL", within: 12 * time.Second},
		{name: "start: SSH", start: func(t *testing.T) string {
			return "http://" + hostile.Listen(t, func(c net.Conn) {
				_, _ = io.WriteString(c, "SSH-2.0-OpenSSH_9.2\r\n")
				_, _ = io.Copy(io.Discard, c)
			})
		}, want: "refused", text: "SSH-2.0", within: atOnce},
		{name: "start: https to plain HTTP", at: func(addr string) string {
			return "https://" + addr
		}, want: "refused", text: "set AWS_ENDPOINT_URL=http://", within: atOnce, core: true},
		{name: "start: no scheme, to plain HTTP", at: func(addr string) string {
			return addr
		}, want: "refused", text: "set AWS_ENDPOINT_URL=http://", within: atOnce, core: true},
		{name: "start: https to HTTP that waits for a request", start: func(t *testing.T) string {
			return "https://" + hostile.Listen(t, func(c net.Conn) {
				b := make([]byte, 3)
				if _, err := io.ReadFull(c, b); err == nil && string(b) == "GET" {
					_, _ = io.WriteString(c, "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
				}
				_, _ = io.Copy(io.Discard, c)
			})
		}, want: "refused", text: "set AWS_ENDPOINT_URL=http://", within: atOnce, core: true},
		{name: "start: http to TLS", tls: certificate(),
			want: "refused", text: "set AWS_ENDPOINT_URL=https://", within: atOnce, core: true},
		{name: "start: a certificate nobody signed", tls: certificate(), at: func(addr string) string {
			return "https://" + addr
		}, want: "refused", text: "AWS_CA_BUNDLE", within: atOnce},
		{name: "start: 503 for ever", script: any(func(x *Exchange) {
			x.Send(Error("503 Slow Down", "SlowDown").Bytes())
		}), want: "refused", text: "SlowDown", within: atOnce},
		{name: "start: a wrong key", script: any(func(x *Exchange) {
			x.Send(Error("403 Forbidden", "InvalidAccessKeyId").Bytes())
		}), want: "refused", text: "AWS_ACCESS_KEY_ID", within: atOnce, core: true},
		{name: "start: no such bucket", script: any(func(x *Exchange) {
			x.Send(Error("404 Not Found", "NoSuchBucket").Bytes())
		}), want: "refused", text: "check the bucket's name", within: atOnce},
		{name: "start: 307 to itself", script: any(func(x *Exchange) {
			a := Error("307 Temporary Redirect", "TemporaryRedirect")
			a.Add("Location", x.URL.String())
			x.Send(a.Bytes())
		}), want: "refused", text: "TemporaryRedirect", within: atOnce},
		{name: "start: HEAD stalls", script: func(x *Exchange) bool {
			if x.Op == Head {
				x.Stall()
			}
			return x.Op == Head
		}, want: "refused", text: "gave up", within: twoMinutes},
		{name: "start: HEAD answers without length", script: func(x *Exchange) bool {
			if x.Op != Head {
				return false
			}
			x.Send([]byte("HTTP/1.1 200 OK\r\nETag: \"" + etag + "\"\r\n\r\n"))
			return true
		}, want: "refused", text: "", within: allTries},
		{name: "start: every object a web page", script: func(x *Exchange) bool {
			if x.Op != Head && x.Op != Get {
				return false
			}
			a := &Answer{Status: "HTTP/1.1 200 OK", Header: [][2]string{{"Content-Type", "text/html"}}}
			if x.Op == Get {
				a.Sized([]byte("<html>It works!</html>"))
			} else {
				a.Set("Content-Length", strconv.Itoa(22))
			}
			x.Send(a.Bytes())
			return true
		}, want: "refused", text: "", within: allTries},
	}
}
