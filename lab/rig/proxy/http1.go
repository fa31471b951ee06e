package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
)

var errHead = errors.New("malformed HTTP head")

// readHead returns the next head in br, up to and with its empty line, without consuming it: it is
// valid until the next read from br, and br.Discard(len(head)) consumes it.
func readHead(br *bufio.Reader) ([]byte, error) {
	searched := 0
	for {
		if _, err := br.Peek(searched + 1); err != nil {
			return nil, err
		}
		b, err := br.Peek(br.Buffered()) // all that has come
		if err != nil {
			return nil, err
		}
		if i := bytes.Index(b[max(searched-3, 0):], []byte("\r\n\r\n")); i >= 0 {
			return b[:max(searched-3, 0)+i+4], nil
		}
		searched = len(b)
		if searched == br.Size() {
			return nil, fmt.Errorf("%w: longer than %d bytes", errHead, searched)
		}
	}
}

// framing is what the headers say about the message's body and the connection.
type framing struct {
	length   int64 // Content-Length; -1 if there is none
	chunked  bool
	close    bool
	expect   bool // Expect: 100-continue
	ifMatch  bool
	etagFrom int // place of the ETag's value in the head; 0 if there is none
	etagTo   int
}

// parseHeaders reads the header lines of head (the first line, request or status, is skipped).
func parseHeaders(head []byte) (framing, error) {
	f := framing{length: -1}
	pos := bytes.IndexByte(head, '\n') + 1
	for pos < len(head) {
		end := bytes.IndexByte(head[pos:], '\n')
		if end < 0 {
			return f, errHead
		}
		line := bytes.TrimSuffix(head[pos:pos+end], []byte("\r"))
		if len(line) == 0 {
			return f, nil
		}
		colon := bytes.IndexByte(line, ':')
		if colon <= 0 {
			return f, errHead
		}
		name, value := line[:colon], bytes.TrimSpace(line[colon+1:])
		is := func(want string) bool { return bytes.EqualFold(value, []byte(want)) }
		switch strings.ToLower(string(name)) {
		case "content-length":
			n, err := strconv.ParseUint(string(value), 10, 63)
			if err != nil {
				return f, errHead
			}
			f.length = int64(n)
		case "transfer-encoding":
			f.chunked = is("chunked")
		case "connection":
			f.close = is("close")
		case "expect":
			f.expect = is("100-continue")
		case "if-match":
			f.ifMatch = true
		case "etag":
			if len(value) > 0 {
				f.etagFrom = pos + bytes.Index(head[pos:pos+end], value)
				f.etagTo = f.etagFrom + len(value)
			}
		}
		pos += end + 1
	}
	return f, errHead // no empty line
}

// request is what the proxy needs to know of a request line.
type request struct {
	op     Op
	method string
	key    string // decoded, without the bucket; empty for a bucket
	http10 bool
}

func parseRequest(head []byte) (request, error) {
	line, _, ok := bytes.Cut(head, []byte("\r\n"))
	if !ok {
		return request{}, errHead
	}
	method, rest, ok1 := bytes.Cut(line, []byte(" "))
	target, proto, ok2 := bytes.Cut(rest, []byte(" "))
	if !ok1 || !ok2 || len(method) == 0 || !bytes.HasPrefix(proto, []byte("HTTP/1.")) {
		return request{}, errHead
	}
	r := request{method: string(method), http10: string(proto) == "HTTP/1.0"}
	rawPath, query, _ := strings.Cut(string(target), "?")
	bucketAndKey := strings.TrimPrefix(rawPath, "/")
	if _, k, ok := strings.Cut(bucketAndKey, "/"); ok {
		key, err := url.PathUnescape(k)
		if err != nil {
			return request{}, errHead
		}
		r.key = key
	}
	r.op = opOf(r.method, r.key, query)
	return r, nil
}

// opOf sorts requests. An object's sub-resources (?acl, ?tagging, ?uploadId, ...) are no reads of
// its content; AWS clients mark the plain operation with x-id=GetObject, and pre-signed URLs carry
// X-Amz-*, and partNumber and versionId read content.
func opOf(method, key, query string) Op {
	if key == "" {
		if method == "GET" && (query == "" || strings.Contains(query, "list-type") || strings.Contains(query, "prefix=")) {
			return OpList
		}
		return OpOther
	}
	for q := range strings.SplitSeq(query, "&") {
		name, _, _ := strings.Cut(q, "=")
		switch {
		case name == "", name == "x-id", name == "partNumber", name == "versionId":
		case len(name) > 6 && strings.EqualFold(name[:6], "x-amz-"):
		case name == "uploadId" && method == "PUT":
		default:
			return OpOther
		}
	}
	switch method {
	case "GET":
		return OpGet
	case "HEAD":
		return OpHead
	case "PUT":
		return OpPut
	}
	return OpOther
}

// parseStatus returns the status code of a response head.
func parseStatus(head []byte) (int, error) {
	if len(head) < 12 || !bytes.HasPrefix(head, []byte("HTTP/1.")) || head[8] != ' ' {
		return 0, errHead
	}
	n, err := strconv.ParseUint(string(head[9:12]), 10, 16)
	if err != nil || n < 100 {
		return 0, errHead
	}
	return int(n), nil
}
