package s3api

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
)

const (
	piece    = 128 << 10   // the most bytes that a GET reads and writes at once
	silence  = time.Second // after which a client that waits gets a word
	word     = 16          // bytes: some want more than one a second
	withheld = 60 * word   // of what was read, while what follows may have to be fetched
)

var pieces = sync.Pool{New: func() any { return new([piece]byte) }}

// defaultType is the Content-Type of S3 for objects that were stored without one.
const defaultType = "binary/octet-stream"

func (d *dataset) object(w http.ResponseWriter, r *http.Request, m *catalog.Manifest, file int) error {
	size, etag, mod := m.Size(file), m.ETag(file), modified(m.ModTime(file), d.server.began).Truncate(time.Second)
	h := w.Header()
	h.Set("ETag", `"`+etag+`"`)
	h.Set("Last-Modified", mod.Format(http.TimeFormat))
	if err := preconditions(r.Header, etag, mod); err != nil {
		return err
	}
	if of := r.Header.Get("If-Range"); of != "" && of != h.Get("ETag") && of != h.Get("Last-Modified") {
		r.Header.Del("Range") // the client has a part of another version
	}
	off, n, part, err := parseRange(r.Header.Get("Range"), size)
	if err != nil {
		h.Set("Content-Range", fmt.Sprintf("bytes */%d", size))
		return err
	}
	head := func() { // not before the bytes are there: an error has none of that
		status := http.StatusOK
		h.Set("Accept-Ranges", "bytes")
		h.Set("Content-Type", defaultType)
		if part {
			status = http.StatusPartialContent
			h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", off, off+n-1, size))
		}
		d.meta.describe(d, r, m, file, h)
		h.Set("Content-Length", strconv.FormatInt(n, 10))
		w.WriteHeader(status)
	}
	if r.Method == http.MethodHead {
		head()
		return nil
	}
	reader := readerOf(r).number
	d.WillReadRange(m, file, off, n)
	if n == size {
		d.Opened(m, file, reader)
		defer d.Released(m, file)
	} else {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		defer d.opens.part(opened{m, file, host}, reader)()
	}
	return d.send(w, r, m, file, off, n, head)
}

// send writes n bytes of a file. head is called once the first of them are there: until then an error can be told.
func (d *dataset) send(w http.ResponseWriter, r *http.Request, m *catalog.Manifest, file int, off, n int64,
	head func()) error {
	buf := pieces.Get().(*[piece]byte)
	defer pieces.Put(buf)
	control := http.NewResponseController(w)
	write := func(p []byte) error {
		sent, err := w.Write(p)
		d.server.count.sent.Add(int64(sent))
		return err
	}
	var held []byte // the end of what was read
	speak := func() {
		if len(held) > 0 {
			_ = errors.Join(write(held[:word]), control.Flush())
			held = held[word:]
		} else if head != nil && strings.Contains(r.UserAgent(), "CRTS3NativeClient") { // others may not bear many
			w.WriteHeader(http.StatusContinue)
		}
	}
	for end := off + n; off < end; {
		if d.left.Err() != nil && head == nil {
			panic(http.ErrAbortHandler)
		}
		p := buf[:min(piece, end-off)]
		lent, release, ok := d.Lend(m, file, off, len(p))
		if ok && d.server.lent.Add(1) > mostLent {
			copy(p, lent)
			release()
			d.server.lent.Add(-1)
			ok = false
		} else if ok {
			p = lent
		} else if got, err := d.wait(r, m, file, p, off, speak); got < len(p) {
			if err == nil || err == io.EOF { //nolint:errorlint // as io.ReaderAt returns it
				err = io.ErrUnexpectedEOF
			}
			if head == nil { // the status is out: only a broken connection tells
				d.server.log.Warn("a read through the S3 endpoint failed", "file", m.Path(file), "cause", err)
				panic(http.ErrAbortHandler)
			}
			return err
		}
		d.WasRead(m, file, off, int64(len(p)), readerOf(r).number)
		if head != nil {
			head()
			head = nil
		}
		now := len(p)
		if off += int64(now); off < end && (!ok || (off-1)%catalog.ExtentSize+piece >= catalog.ExtentSize) {
			now -= withheld
		}
		err := errors.Join(write(held), write(p[:now]))
		held = append(held[:0], p[now:]...)
		if ok {
			release()
			d.server.lent.Add(-1)
		}
		if err != nil {
			return nil // the client left
		}
	}
	if head != nil {
		head() // there are none
	}
	return nil
}

// wait reads p, and calls speak after each silence until that is done.
func (d *dataset) wait(r *http.Request, m *catalog.Manifest, file int, p []byte, off int64, speak func()) (
	n int, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if v := recover(); v != nil { // as net/http does in the goroutine of a request
				n, err = 0, errors.New("a bug in Shoal: the stack is in its log")
				d.server.log.Error("panic in a read through the S3 endpoint", "file", m.Path(file), "panic", v,
					"stack", string(debug.Stack()))
			}
		}()
		n, err = d.ReadAt(r.Context(), m, file, p, off)
	}()
	for {
		select {
		case <-done:
			return n, err
		case <-time.After(silence):
			speak()
		}
	}
}

// preconditions evaluates conditions as RFC 9110 orders them: those on the ETag outrank those on the time.
func preconditions(h http.Header, etag string, mod time.Time) error {
	if match := h.Get("If-Match"); match != "" {
		if !anyTag(match, etag) {
			return errPrecondition
		}
	} else if since, err := http.ParseTime(h.Get("If-Unmodified-Since")); err == nil && mod.After(since) {
		return errPrecondition
	}
	if none := h.Get("If-None-Match"); none != "" {
		if anyTag(none, etag) {
			return errNotModified
		}
	} else if since, err := http.ParseTime(h.Get("If-Modified-Since")); err == nil && !mod.After(since) &&
		!since.After(time.Now()) {
		return errNotModified
	}
	return nil
}

// anyTag reports whether a list of ETags, with or without quotes, has one.
func anyTag(list, etag string) bool {
	return slices.ContainsFunc(strings.Split(list, ","), func(tag string) bool {
		tag = strings.Trim(strings.TrimSpace(tag), `"`)
		return tag == "*" || tag == etag
	})
}

// parseRange reads a Range header. As S3 does, it takes one range, and ignores a header that it cannot read.
func parseRange(text string, size int64) (off, n int64, part bool, err error) {
	from, to, ok := strings.Cut(strings.TrimPrefix(text, "bytes="), "-")
	if !ok || !strings.HasPrefix(text, "bytes=") || from == "" && to == "" {
		return 0, size, false, nil
	}
	first, ok1 := parseDigits(from)
	last, ok2 := parseDigits(to)
	switch {
	case from == "" && ok2: // the last bytes
		if last == 0 {
			return 0, 0, false, errInvalidRange
		}
		n = min(last, size)
		return size - n, n, n > 0, nil
	case to == "":
		last, ok2 = size-1, true
	}
	switch {
	case !ok1, !ok2, to != "" && last < first:
		return 0, size, false, nil
	case first >= size:
		return 0, 0, false, errInvalidRange
	}
	return first, min(last, size-1) - first + 1, true, nil
}

// parseDigits is ParseInt without signs.
func parseDigits(text string) (n int64, ok bool) {
	n, err := strconv.ParseInt(text, 10, 64)
	return n, err == nil && strings.Trim(text, "0123456789") == ""
}
