package s3

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
)

// answerHead is the head of an HTTP/1.x answer, as far as a GET of an object needs it. Its slices point into the
// parsed bytes.
type answerHead struct {
	status  int
	length  int64 // Content-Length; -1: none
	chunked bool  // Transfer-Encoding: then length is -1
	close   bool  // the connection serves no further request

	etag, contentRange, lastModified, region, note, date []byte
}

// maxHead is the most bytes of an answer's head. S3 allows 2 KB of user metadata.
const maxHead = 64 << 10

var errBadHead = errors.New("malformed HTTP answer")

// headEnd returns the length of the head at the start of b, with its empty line, or -1 if b does not contain all of
// it. The first from bytes are known to contain no end.
func headEnd(b []byte, from int) int {
	for i := max(0, from-3); ; {
		n := bytes.IndexByte(b[i:], '\n')
		if n < 0 {
			return -1
		}
		i += n + 1
		switch rest := b[i:]; {
		case len(rest) > 0 && rest[0] == '\n':
			return i + 1
		case len(rest) > 1 && rest[0] == '\r' && rest[1] == '\n':
			return i + 2
		}
	}
}

// parseHead parses a head found by [headEnd]. It follows RFC 9112 on what a client must refuse: contradictory
// lengths, folded lines, spaces before the colon. A transfer coding overrides a length, and in both cases such a
// connection is not reused.
func parseHead(b []byte) (h answerHead, err error) {
	h.length = -1
	line, b := cutLine(b)
	minor, rest, ok := cutVersion(line)
	if !ok || len(rest) < 3 || len(rest) > 3 && rest[3] != ' ' {
		return h, fmt.Errorf("%w: it begins with %.40q", errBadHead, line)
	}
	status, err := strconv.ParseUint(string(rest[:3]), 10, 16)
	if err != nil {
		return h, fmt.Errorf("%w: status %q", errBadHead, rest[:3])
	}
	h.status = int(status)
	h.close = minor == '0'
	for {
		line, b = cutLine(b)
		if len(line) == 0 {
			break
		}
		name, value, ok := bytes.Cut(line, []byte{':'})
		if !ok || len(name) == 0 || bytes.ContainsAny(name, " \t") {
			return h, fmt.Errorf("%w: header line %.40q", errBadHead, line)
		}
		if err := h.set(name, bytes.Trim(value, " \t")); err != nil {
			return h, err
		}
	}
	if h.chunked && h.length >= 0 {
		h.length, h.close = -1, true
	}
	return h, nil
}

// set processes one header.
func (h *answerHead) set(name, value []byte) error {
	is := func(s string) bool { return len(name) == len(s) && bytes.EqualFold(name, []byte(s)) }
	switch {
	case is("ETag"):
		return once(&h.etag, name, value)
	case is("Content-Range"):
		return once(&h.contentRange, name, value)
	case is("Date"):
		h.date = value
	case is("Last-Modified"):
		h.lastModified = value
	case is(headerNote):
		h.note = value
	case is("X-Amz-Bucket-Region"):
		h.region = value
	case is("Connection"):
		for token := range bytes.SplitSeq(value, []byte{','}) {
			token = bytes.Trim(token, " \t")
			h.close = h.close && !bytes.EqualFold(token, []byte("keep-alive")) ||
				bytes.EqualFold(token, []byte("close"))
		}
	case is("Content-Length"):
		n, err := strconv.ParseUint(string(value), 10, 63)
		if err != nil || h.length >= 0 && h.length != int64(n) {
			return fmt.Errorf("%w: Content-Length %.40q", errBadHead, value)
		}
		h.length = int64(n)
	case is("Transfer-Encoding"):
		if !bytes.EqualFold(value, []byte("chunked")) || h.chunked {
			return fmt.Errorf("%w: Transfer-Encoding %.40q", errBadHead, value)
		}
		h.chunked = true
	}
	return nil
}

// once sets a field that describes the body, and that two headers must not set differently.
func once(field *[]byte, name, value []byte) error {
	if *field != nil && !bytes.Equal(*field, value) {
		return fmt.Errorf("%w: %s %.40q and %.40q", errBadHead, name, *field, value)
	}
	*field = value
	return nil
}

// cutLine returns the first line of b without its end, and the rest.
func cutLine(b []byte) (line, rest []byte) {
	i := bytes.IndexByte(b, '\n')
	if i < 0 {
		return b, nil
	}
	return bytes.TrimSuffix(b[:i], []byte{'\r'}), b[i+1:]
}

// cutVersion removes "HTTP/1.0 " or "HTTP/1.1 ".
func cutVersion(line []byte) (minor byte, rest []byte, ok bool) {
	rest, ok = bytes.CutPrefix(line, []byte("HTTP/1."))
	if !ok || len(rest) < 2 || rest[0] != '0' && rest[0] != '1' || rest[1] != ' ' {
		return 0, nil, false
	}
	return rest[0], rest[2:], true
}
