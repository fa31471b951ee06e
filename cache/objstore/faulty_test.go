package objstore_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Faulty makes requests fail by a script of rules, one a line:
//
//	OP GLOB WHEN ACTION [DURATION]
//
//	read  *.jpg   1        503        the first read of each .jpg is throttled
//	read  a/b     2-3      reset      the second and third read of this key
//	read  *       total:7  flip       the seventh read of all
//	stat  *       all      slow 30ms
//	list  ""      1-       denied     the empty prefix
//	put   *       2        lost       the second step of each upload succeeds and is reported as failed
//
// OP is read, stat, list (Uploads, too), put (PutNew, Upload, Resume, Part, Complete and Copy), delete (Delete,
// AbortUpload and Abort) or * (all). GLOB matches the whole key, or a listing's prefix: "*" is any run of characters,
// "/" too, and "?" one. WHEN is N, N-M, N- or "all"; requests are counted for each rule and key, so that the outcome
// does not depend on the order in which parallel requests arrive; with "total:" they are counted for the rule. Every
// rule that matches counts the request; the first whose WHEN holds acts.
//
// The actions are:
//
//	slow      waits, then goes on: a slow first byte
//	stall     waits, then fails as temporary; without a duration until the context ends
//	503       fails as temporary: throttled
//	reset     fails as temporary: connection reset
//	truncate  reads the first half of the range, then fails as temporary
//	flip      reads, flips one bit, and reports success: only a checksum can tell
//	changed   fails as changed
//	notfound  fails as not found
//	denied    fails as denied
//	lost      does all of the request, then fails as temporary: the answer was lost
type Faulty struct {
	objstore.Layer

	mu    sync.Mutex
	rules []*faultRule
}

type faultRule struct {
	op       string
	glob     *regexp.Regexp
	total    bool
	from, to int64 // the requests that fail, from 1
	action   string
	duration time.Duration

	seen map[string]int64 // requests by key, or "" for total
	hits int64
}

var faultLine = regexp.MustCompile(`^(read|stat|list|put|delete|\*)\s+(\S+)\s+(total:)?(?:all|(\d+)(-(\d*))?)\s+` +
	`(slow|stall|503|reset|truncate|flip|changed|notfound|denied|lost)(?:\s+(\S+))?$`)

// Fault decorates r with the rules of a script.
func Fault(t testing.TB, r objstore.Layer, script string) *Faulty {
	t.Helper()
	f := &Faulty{Layer: r}
	for line := range strings.Lines(script) {
		m := faultLine.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			t.Fatalf("no rule of a fault script: %q", line)
		}
		glob := strings.NewReplacer(`\*`, ".*", `\?`, ".").Replace(regexp.QuoteMeta(strings.Trim(m[2], `"`)))
		rule := &faultRule{op: m[1], glob: regexp.MustCompile("(?s)^" + glob + "$"), total: m[3] != "", from: 1,
			to: math.MaxInt64, action: m[7], seen: map[string]int64{}}
		if m[4] != "" {
			rule.from, _ = strconv.ParseInt(m[4], 10, 64)
		}
		if to := m[6]; m[4] != "" && m[5] != "-" {
			if m[5] == "" {
				to = m[4]
			}
			rule.to, _ = strconv.ParseInt(to, 10, 64)
		}
		if m[8] != "" {
			var err error
			if rule.duration, err = time.ParseDuration(m[8]); err != nil {
				t.Fatal(err)
			}
		}
		f.rules = append(f.rules, rule)
	}
	return f
}

// Hits returns how often each rule has acted.
func (f *Faulty) Hits() (hits []int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.rules {
		hits = append(hits, r.hits)
	}
	return hits
}

// rule returns the rule that acts on this request, nil for none.
func (f *Faulty) rule(op, key string) (acts *faultRule) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.rules {
		if (r.op != "*" && r.op != op) || !r.glob.MatchString(key) {
			continue
		}
		counter := key
		if r.total {
			counter = ""
		}
		r.seen[counter]++
		if n := r.seen[counter]; acts == nil && n >= r.from && n <= r.to {
			acts = r
			r.hits++
		}
	}
	return acts
}

// before acts on a request before it starts. It returns an action for after a read.
func (f *Faulty) before(ctx context.Context, op, key string) (after string, err error) {
	r := f.rule(op, key)
	if r == nil {
		return "", nil
	}
	switch r.action {
	case "slow":
		return "", sleep(ctx, r.duration)
	case "stall":
		if r.duration == 0 {
			<-ctx.Done()
			return "", ctx.Err()
		}
		if err := sleep(ctx, r.duration); err != nil {
			return "", err
		}
		return "", scripted(op, key, objstore.KindTransient, "stalled")
	case "503":
		err := scripted(op, key, objstore.KindTransient, "503 Slow Down")
		err.SlowDown = true
		return "", err
	case "reset":
		return "", scripted(op, key, objstore.KindTransient, "connection reset by peer")
	case "changed":
		return "", scripted(op, key, objstore.KindChanged, "412 Precondition Failed")
	case "notfound":
		return "", scripted(op, key, objstore.KindNotFound, "404 Not Found")
	case "denied":
		return "", scripted(op, key, objstore.KindDenied, "403 Forbidden")
	}
	return r.action, nil
}

func scripted(op, key string, k objstore.Kind, text string) *objstore.Error {
	return &objstore.Error{Op: op, Key: key, Kind: k, Err: errors.New(text + " (scripted fault)")}
}

// do runs f, a whole request, under the script.
func (f *Faulty) do(ctx context.Context, op, key string, request func() error) error {
	after, err := f.before(ctx, op, key)
	if err != nil {
		return err
	}
	if err = request(); err == nil && after == "lost" {
		return scripted(op, key, objstore.KindTransient, "the answer was lost")
	}
	return err
}

// Stat implements [objstore.Reader].
func (f *Faulty) Stat(ctx context.Context, key string) (o objstore.Object, err error) {
	err = f.do(ctx, "stat", key, func() (err error) { o, err = f.Layer.Stat(ctx, key); return err })
	return o, err
}

// ReadAt implements [objstore.Reader].
func (f *Faulty) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	return objstore.ReadAt(ctx, f, o, p, off)
}

func cutShort(o objstore.Object, n int64) error {
	return scripted("read", o.Key, objstore.KindTransient, fmt.Sprintf("body ended after %d of %d bytes", n/2, n))
}

// afterRead applies the rest of a fault after a successful read.
func afterRead(after string, o objstore.Object, p []byte) error {
	switch {
	case after == "lost":
		return scripted("read", o.Key, objstore.KindTransient, "the answer was lost")
	case after == "flip" && len(p) > 0:
		p[len(p)/2] ^= 0x10
	}
	return nil
}

// ReadSpans implements [objstore.SpanReader]. A flip strikes in the middle span, a truncation reads the first
// half of them.
func (f *Faulty) ReadSpans(ctx context.Context, o objstore.Object, spans []objstore.Span) error {
	after, err := f.before(ctx, "read", o.Key)
	if err != nil || len(spans) == 0 {
		return err
	}
	if after == "truncate" {
		if err := f.Layer.ReadSpans(ctx, o, spans[:len(spans)/2]); err != nil {
			return err
		}
		return cutShort(o, objstore.SpansLength(spans))
	}
	if err := f.Layer.ReadSpans(ctx, o, spans); err != nil {
		return err
	}
	return afterRead(after, o, spans[len(spans)/2].P)
}

// PutNew implements [objstore.Uploader].
func (f *Faulty) PutNew(ctx context.Context, key string, data []byte) (o objstore.Object, err error) {
	err = f.do(ctx, "put", key, func() (err error) { o, err = f.Layer.PutNew(ctx, key, data); return err })
	return o, err
}

// Upload implements [objstore.Uploader].
func (f *Faulty) Upload(ctx context.Context, key string, size, partSize int64) (objstore.Upload, error) {
	u := &faultyUpload{f: f, key: key}
	err := f.do(ctx, "put", key, func() (err error) { u.u, err = f.Layer.Upload(ctx, key, size, partSize); return err })
	if err != nil {
		return nil, err
	}
	return u, nil
}

// Resume implements [objstore.Uploader].
func (f *Faulty) Resume(ctx context.Context, key, id string, size, partSize int64) (
	_ objstore.Upload, stored int, err error) {
	u := &faultyUpload{f: f, key: key}
	err = f.do(ctx, "put", key, func() (err error) {
		u.u, stored, err = f.Layer.Resume(ctx, key, id, size, partSize)
		return err
	})
	if err != nil {
		return nil, 0, err
	}
	return u, stored, nil
}

// Uploads implements [objstore.Uploader].
func (f *Faulty) Uploads(ctx context.Context, prefix string) (list []objstore.Unfinished, err error) {
	err = f.do(ctx, "list", prefix, func() (err error) { list, err = f.Layer.Uploads(ctx, prefix); return err })
	return list, err
}

// AbortUpload implements [objstore.Uploader].
func (f *Faulty) AbortUpload(ctx context.Context, key, id string) error {
	return f.do(ctx, "delete", key, func() error { return f.Layer.AbortUpload(ctx, key, id) })
}

// Copy implements [objstore.Uploader].
func (f *Faulty) Copy(ctx context.Context, from objstore.Object, key string) (o objstore.Object, err error) {
	err = f.do(ctx, "put", key, func() (err error) { o, err = f.Layer.Copy(ctx, from, key); return err })
	return o, err
}

// Delete implements [objstore.Uploader].
func (f *Faulty) Delete(ctx context.Context, key, etag string) error {
	return f.do(ctx, "delete", key, func() error { return f.Layer.Delete(ctx, key, etag) })
}

type faultyUpload struct {
	f   *Faulty
	u   objstore.Upload
	key string
}

func (u *faultyUpload) ID() string { return u.u.ID() }

func (u *faultyUpload) Part(ctx context.Context, n int, p []byte) error {
	return u.f.do(ctx, "put", u.key, func() error { return u.u.Part(ctx, n, p) })
}

func (u *faultyUpload) Complete(ctx context.Context) (o objstore.Object, err error) {
	err = u.f.do(ctx, "put", u.key, func() (err error) { o, err = u.u.Complete(ctx); return err })
	return o, err
}

func (u *faultyUpload) Abort(ctx context.Context) error {
	return u.f.do(ctx, "delete", u.key, func() error { return u.u.Abort(ctx) })
}

// List implements [objstore.Reader].
func (f *Faulty) List(ctx context.Context, prefix, after string) iter.Seq2[objstore.Object, error] {
	return f.list(ctx, prefix, f.Layer.List(ctx, prefix, after))
}

// ListLevel implements [objstore.Layer].
func (f *Faulty) ListLevel(ctx context.Context, prefix string) iter.Seq2[objstore.Object, error] {
	return f.list(ctx, prefix, f.Layer.ListLevel(ctx, prefix))
}

func (f *Faulty) list(ctx context.Context, prefix string,
	seq iter.Seq2[objstore.Object, error]) iter.Seq2[objstore.Object, error] {
	return func(yield func(objstore.Object, error) bool) {
		if _, err := f.before(ctx, "list", prefix); err != nil {
			yield(objstore.Object{}, err)
			return
		}
		seq(yield)
	}
}

// sleep waits for d or until ctx ends; then it returns ctx's error.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
