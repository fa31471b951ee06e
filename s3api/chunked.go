package s3api

import (
	"bufio"
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

const (
	// chunkSigned begins the payload of a body that is signed chunk by chunk; with chunkTrailer at its end, a trailer
	// follows.
	chunkSigned  = "STREAMING-" + algorithm + "-PAYLOAD"
	chunkTrailer = "-TRAILER"
	// maxChunk bounds a chunk, which is held until its signature is checked. Clients send 64 or 128 KiB.
	maxChunk = 1 << 20
	// unsignedTrailer is the payload of a body in chunks without signatures, and a trailer.
	unsignedTrailer = "STREAMING-" + unsigned + chunkTrailer
	noBytes         = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" // SHA-256
)

var (
	errChunk = bad("InvalidRequest",
		"The body is not in chunks of at most 1 MiB, each with its signature, as x-amz-content-sha256 says")
	errIncomplete = bad("IncompleteBody",
		"The body does not have the number of bytes that x-amz-decoded-content-length says")
)

// chain signs chunks: each signature covers the one before it, and the first one the request's.
type chain struct {
	key         []byte
	date, scope string
	last        string // signature, in hexadecimal digits
}

// check checks the next signature, of what, which is PAYLOAD or TRAILER.
func (c *chain) check(what, sum string, hashes ...string) error {
	if c == nil {
		return nil
	}
	mac := hmac.New(sha256.New, c.key)
	mac.Write([]byte(algorithm + "-" + what + "\n" + c.date + "\n" + c.scope + "\n" + c.last + "\n" +
		strings.Join(hashes, "\n")))
	if c.last = hex.EncodeToString(mac.Sum(nil)); !hmac.Equal([]byte(c.last), []byte(sum)) {
		return errSignature
	}
	return nil
}

// chunked reads a body that is signed chunk by chunk, and checks each chunk before it gives it on. With a trailer, what
// it gives on are chunks without signatures and the trailer, so that the origin gets the checksum. Source: "Signature
// Calculations for the Authorization Header: Transferring Payload in Multiple Chunks", Amazon S3 API Reference.
type chunked struct {
	io.Closer
	in      *bufio.Reader
	chain   *chain // nil: nobody signs here
	left    int64  // bytes of content to come
	trailer bool
	chunk   []byte // what is left of it, in buf
	buf     []byte
	err     error
}

// unchunk replaces the body of a request, if it comes in signed chunks.
func unchunk(r *http.Request, c *chain) error {
	payload := r.Header.Get("X-Amz-Content-Sha256")
	if !strings.HasPrefix(payload, chunkSigned) {
		return nil
	}
	n, ok := parseDigits(r.Header.Get("X-Amz-Decoded-Content-Length"))
	if !ok {
		return errIncomplete
	}
	body := &chunked{Closer: r.Body, in: bufio.NewReader(r.Body), chain: c, left: n,
		trailer: strings.HasSuffix(payload, chunkTrailer)}
	if r.Body = body; body.trailer {
		r.ContentLength = -1
		r.Header.Set("X-Amz-Content-Sha256", unsignedTrailer)
		return nil
	}
	r.ContentLength = n
	r.Header.Del("X-Amz-Content-Sha256")
	r.Header.Del("X-Amz-Decoded-Content-Length")
	encodings := strings.Split(r.Header.Get("Content-Encoding"), ",")
	r.Header.Del("Content-Encoding")
	for _, e := range encodings {
		if e = strings.TrimSpace(e); e != "" && e != "aws-chunked" {
			r.Header.Add("Content-Encoding", e)
		}
	}
	return nil
}

func (c *chunked) Read(p []byte) (int, error) {
	if len(c.chunk) == 0 && c.err == nil {
		if c.err = c.next(); c.err == io.ErrUnexpectedEOF { //nolint:errorlint // of bufio and io
			c.err = errIncomplete
		}
	}
	n := copy(p, c.chunk)
	c.chunk = c.chunk[n:]
	if n > 0 {
		return n, nil
	}
	return 0, c.err
}

// line reads a line without its end.
func (c *chunked) line() (string, error) {
	b, err := c.in.ReadSlice('\n')
	switch err { //nolint:errorlint // of bufio
	case nil:
		return string(bytes.TrimRight(b, "\r\n")), nil
	case io.EOF:
		return "", io.ErrUnexpectedEOF
	}
	return "", errChunk
}

// next reads a chunk. After the last one, it is io.EOF.
func (c *chunked) next() error {
	text, err := c.line()
	if err != nil {
		return err
	}
	size, sum, ok := strings.Cut(text, ";chunk-signature=")
	n, err := strconv.ParseUint(size, 16, 32)
	if !ok || err != nil || n > maxChunk {
		return errChunk
	}
	if int64(n) > c.left || n == 0 && c.left > 0 {
		return errIncomplete
	}
	c.buf = c.buf[:0]
	if c.trailer {
		c.buf = append(strconv.AppendUint(c.buf, n, 16), "\r\n"...)
	}
	head := len(c.buf)
	c.buf = slices.Grow(c.buf, int(n)+len("\r\n"))[:head+int(n)]
	chunk := c.buf[head:]
	if _, err := io.ReadFull(c.in, chunk); err != nil {
		return io.ErrUnexpectedEOF
	}
	hash := sha256.Sum256(chunk)
	if err := c.chain.check("PAYLOAD", sum, noBytes, hex.EncodeToString(hash[:])); err != nil {
		return err
	}
	c.left -= int64(n)
	if n == 0 && c.trailer {
		return c.end()
	}
	if text, err := c.line(); err != nil || text != "" {
		return errChunk
	}
	if n == 0 {
		return io.EOF
	}
	if c.trailer {
		c.buf = append(c.buf, "\r\n"...)
	}
	// With its last byte the origin stores the object: that waits for the end and its signature.
	if c.chunk = c.buf; c.left > 0 || c.trailer {
		return nil
	}
	if err = c.next(); err != io.EOF { //nolint:errorlint // of next
		c.chunk = nil
	}
	return err
}

// end reads the trailer behind the last chunk: a checksum and a signature.
func (c *chunked) end() error {
	hash := sha256.New()
	for range 8 {
		text, err := c.line()
		if err != nil {
			return err
		}
		if sum, ok := strings.CutPrefix(text, "x-amz-trailer-signature:"); ok {
			if err := c.chain.check("TRAILER", sum, hex.EncodeToString(hash.Sum(nil))); err != nil {
				return err
			}
			c.chunk = append(c.buf, "\r\n"...)
			return io.EOF
		}
		if text != "" { // minio-go ends the line of a header with \n, and then writes an empty one
			hash.Write([]byte(text + "\n"))
			c.buf = append(c.buf, text+"\r\n"...)
		}
	}
	return errChunk
}
