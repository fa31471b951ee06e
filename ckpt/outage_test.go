package ckpt

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/lab/rig/port"
	"github.com/shoalfs/shoal/lab/rig/synced"
)

// gate stands before a bucket's server: it is away when a test says so, and holds up or refuses requests.
type gate struct {
	t      *testing.T
	store  objstore.Layer // through the gate
	others minio.Core     // past it
	addr   string
	pass   *httputil.ReverseProxy
	server *http.Server

	mu       sync.Mutex
	before   func(r *http.Request) (pass bool) // of each request
	appeared []string                          // the keys of objects, in the order in which they were stored
	parts    map[string]int                    // how many were stored, by key
}

func newGate(t *testing.T) *gate {
	t.Helper()
	at, client := serverOf(t)
	to, err := url.Parse(at)
	must(t, err)
	g := &gate{t: t, others: minio.Core{Client: client}, parts: map[string]int{}}
	addr, release, err := port.Hold()
	must(t, err)
	t.Cleanup(release)
	g.addr = addr
	g.pass = &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			r.Out.Host = r.In.Host // it is signed
		},
		ModifyResponse: g.answered,
		ErrorLog:       log.New(io.Discard, "", 0),
	}
	g.back()
	t.Cleanup(func() { g.away() })
	g.store, _ = bucketAt(t, "http://"+addr, objstore.RetryPolicy{Tries: 2, Base: time.Millisecond})
	return g
}

// away has connections refused.
func (g *gate) away() { g.server.Close() }

func (g *gate) back() {
	g.t.Helper()
	l, err := net.Listen("tcp", g.addr)
	must(g.t, err)
	g.server = &http.Server{Handler: g, ErrorLog: g.pass.ErrorLog}
	go g.server.Serve(l)
}

// on has the gate ask f before each request.
func (g *gate) on(f func(r *http.Request) (pass bool)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.before = f
}

func (g *gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	before := g.before
	g.mu.Unlock()
	if before == nil || before(r) {
		g.pass.ServeHTTP(w, r)
		return
	}
	io.Copy(io.Discard, r.Body)
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(http.StatusForbidden)
	io.WriteString(w, "<Error><Code>AccessDenied</Code><Message>not now</Message></Error>")
}

// object is what a request is about, below the prefix.
func object(r *http.Request) string { return strings.TrimPrefix(r.URL.Path, "/bucket/run/") }

// part is the number of the part that a request stores, from 1; or 0.
func part(r *http.Request) (n int) {
	if r.Method == http.MethodPut {
		n, _ = strconv.Atoi(r.URL.Query().Get("partNumber"))
	}
	return n
}

// completes reports whether a request makes an object of parts.
func completes(r *http.Request) bool {
	return r.Method == http.MethodPost && r.URL.Query().Has("uploadId")
}

func (g *gate) answered(r *http.Response) error {
	p := object(r.Request)
	if r.StatusCode != http.StatusOK || folder.Own(p) {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if part(r.Request) > 0 {
		g.parts[p]++
	} else if r.Request.Method == http.MethodPut || completes(r.Request) {
		g.appeared = append(g.appeared, p)
	}
	return nil
}

// stored is how many parts of a file were stored.
func (g *gate) stored(p string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.parts[p]
}

// order has what has appeared.
func (g *gate) order() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.appeared)
}

// uploads are the IDs of the unfinished uploads, by path.
func (g *gate) uploads() map[string]string {
	g.t.Helper()
	page, err := g.others.ListMultipartUploads(g.t.Context(), "bucket", "", "", "", "", 1000)
	must(g.t, err)
	ids := map[string]string{}
	for _, u := range page.Uploads {
		ids[strings.TrimPrefix(u.Key, "run/")] = u.UploadID
	}
	return ids
}

// has is what the bucket has, but the daemon's.
func (g *gate) has() map[string]string {
	g.t.Helper()
	found := map[string]string{}
	for o := range g.others.Client.ListObjects(g.t.Context(), "bucket", minio.ListObjectsOptions{Recursive: true}) {
		must(g.t, o.Err)
		p := strings.TrimPrefix(o.Key, "run/")
		if folder.Own(p) {
			continue
		}
		r, _, _, err := g.others.GetObject(g.t.Context(), "bucket", o.Key, minio.GetObjectOptions{})
		must(g.t, err)
		b, err := io.ReadAll(r)
		must(g.t, errors.Join(err, r.Close()))
		found[p] = string(b)
	}
	return found
}

// same compares the bucket with what is wanted.
func (g *gate) same(want map[string]string) {
	g.t.Helper()
	has := g.has()
	for p := range has {
		if _, ok := want[p]; !ok {
			g.t.Errorf("the bucket has %s, too", p)
		}
	}
	for p, b := range want {
		if got, there := has[p]; got != b {
			g.t.Errorf("%s: there %t, %d bytes %.20q, want %d bytes %.20q", p, there, len(got), got, len(b), b)
		}
	}
}

// here is what a folder has, but the daemon's.
func here(t *testing.T, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	must(t, filepath.WalkDir(dir, func(at string, e fs.DirEntry, err error) error {
		p, _ := filepath.Rel(dir, at)
		if err != nil || !e.Type().IsRegular() || folder.Own(p) {
			return err
		}
		b, err := os.ReadFile(at)
		found[p] = string(b)
		return err
	}))
	return found
}

// differs is some content: of two with other seeds, and within one from MiB to MiB, it differs.
func differs(seed byte, size int) []byte {
	b := make([]byte, size)
	for i := range b {
		b[i] = seed + byte(i>>20)
	}
	return b
}

func saveAs(t *testing.T, at string, b []byte) {
	t.Helper()
	must(t, errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.WriteFile(at, b, 0o644)))
}

// atWork is a carrier that runs.
type atWork struct {
	*Carrier
	t    *testing.T
	log  synced.Buffer
	runs context.Context
	end  func() error
}

// carry carries a folder through the gate until end, or the end of the test.
func (g *gate) carry(cfg Config) *atWork {
	g.t.Helper()
	w := &atWork{t: g.t}
	cfg.Prefix, cfg.Dest, cfg.Store, cfg.Last, cfg.Drain = "run/", "there", g.store, isLast, 10*time.Second
	cfg.Log = slog.New(slog.NewTextHandler(&w.log, nil))
	c, err := Open(g.t.Context(), cfg)
	must(g.t, err)
	w.Carrier = c
	ctx, stop := context.WithCancel(context.Background())
	runs, over := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		defer over()
		ended <- c.Run(ctx, func() { close(ready) })
	}()
	w.runs, w.end = runs, sync.OnceValue(func() error { stop(); return errors.Join(<-ended, c.Close()) })
	g.t.Cleanup(func() { _ = w.end() })
	select {
	case <-ready:
	case <-runs.Done():
		g.t.Fatal(w.end())
	}
	return w
}

// do does something between two steps of Run.
func (w *atWork) do(f func()) {
	w.t.Helper()
	if !w.in(w.runs, f) {
		w.t.Fatalf("it has ended:\n%s", w.log.String())
	}
}

// status asks, as shoal stat and shoal ckpt ls do.
func (w *atWork) status() Status {
	w.t.Helper()
	var s Status
	w.do(func() { s = w.Carrier.status() })
	return s
}

// later lets an hour pass for whoever waits to try again. It returns how often that was tried in vain.
func (w *atWork) later() (tries int) {
	w.t.Helper()
	w.do(func() { tries, w.trouble.since = w.trouble.tries, time.Now().Add(-time.Hour) })
	return tries
}

// all reports whether so many files have arrived, and none is behind.
func (w *atWork) all(files int64) bool {
	w.t.Helper()
	s := w.status()
	return s.Stats.Files >= files && s.Behind.Files == 0
}

// quiet reports whether nothing is under way.
func (w *atWork) quiet() (quiet bool) {
	w.do(func() {
		quiet = w.q.busy == nil && len(w.closing) == 0
		for _, s := range w.sends {
			select {
			case <-s.done:
			default:
				quiet = false
			}
		}
	})
	return quiet
}

// While the store refuses all, or is away for long, status and log say what waits and why. Then all arrives, whole and
// in order. What was stored before is not sent again, and no upload is left but another program's.
func TestOutage(t *testing.T) {
	beat := lockBeat
	lockBeat = 20 * time.Millisecond
	defer func() { lockBeat = beat }()
	for _, c := range []struct {
		name, reason string
		begins, ends func(g *gate)
	}{
		{"denied", "AccessDenied", func(g *gate) { g.on(func(*http.Request) bool { return false }) },
			func(g *gate) { g.on(nil) }},
		{"away", "connection refused", (*gate).away, func(g *gate) { g.on(nil); g.back() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, dir := newGate(t), t.TempDir()
			begun := make(chan struct{})
			g.on(func(r *http.Request) bool {
				if part(r) < 2 {
					return true
				}
				<-begun
				return false
			})
			w := g.carry(Config{Dir: dir})
			saveAs(t, filepath.Join(dir, "step/large"), differs(1, 17<<20))
			until(t, "a part is stored", func() bool { return g.stored("step/large") == 1 })
			theirs, err := g.others.NewMultipartUpload(t.Context(), "bucket", "run/next", minio.PutObjectOptions{})
			must(t, err)
			c.begins(g)
			close(begun)
			saveAs(t, filepath.Join(dir, "step/a"), differs(2, 1000))
			saveAs(t, filepath.Join(dir, "step/last"), []byte("l"))
			saveAs(t, filepath.Join(dir, "next"), differs(3, 9<<20))
			until(t, "the status says so", func() bool {
				s := w.status()
				return s.Behind.Files == 4 && strings.Contains(s.Trouble, c.reason)
			})
			if b := w.status().Behind; b.Bytes != 26<<20+1001 || b.Next != "step/large" || b.Since.IsZero() {
				t.Errorf("behind: %+v", b)
			}
			if !strings.Contains(w.log.String(), "cannot publish") || !strings.Contains(w.log.String(), c.reason) {
				t.Errorf("the log:\n%s", w.log.String())
			}
			until(t, "it was tried for hours", func() bool { return w.later() >= 12 })
			w.do(func() { w.lock.renewed.Store(time.Now().Add(-time.Hour).UnixNano()) })
			if s := w.status(); s.Behind.Files != 4 || !strings.Contains(s.Trouble, c.reason) || len(g.order()) > 0 {
				t.Errorf("after hours: %+v; in the bucket: %v", s, g.order())
			}
			until(t, "nothing is under way", w.quiet)
			c.ends(g)
			until(t, "all has arrived", func() bool { w.later(); return w.status().Behind.Files == 0 })
			if order := g.order(); !slices.Equal(order, []string{"step/large", "step/a", "step/last", "next"}) {
				t.Errorf("in this order: %v", order)
			}
			s := w.status()
			if s.Trouble != "" || s.Stats.Files != 4 || s.Stats.Resumed != 1 || g.stored("step/large") != 3 {
				t.Errorf("%q, %+v, %d parts", s.Trouble, s.Stats, g.stored("step/large"))
			}
			must(t, w.end())
			g.same(here(t, dir))
			if left := g.uploads(); len(left) != 1 || left["next"] != theirs {
				t.Errorf("uploads are left: %v, and another program's was %s", left, theirs)
			}
		})
	}
}

// A file whose upload somebody aborts is sent anew, whole and in its turn.
func TestUploadAborted(t *testing.T) {
	for _, c := range []struct {
		when  string
		parts int                        // stored until then
		waits func(r *http.Request) bool // for that
	}{
		{"while parts are sent", 1, func(r *http.Request) bool { return part(r) > 1 }},
		{"before its turn", 3, func(r *http.Request) bool { return object(r) == "first" }},
		{"before it appears", 3, completes},
	} {
		t.Run(c.when, func(t *testing.T) {
			g, dir := newGate(t), t.TempDir()
			waiting, aborted := make(chan struct{}, 1), make(chan struct{})
			g.on(func(r *http.Request) bool {
				if c.waits(r) {
					select {
					case waiting <- struct{}{}:
					default:
					}
					<-aborted
				}
				return true
			})
			w := g.carry(Config{Dir: dir})
			saveAs(t, filepath.Join(dir, "first"), differs(1, 1000))
			saveAs(t, filepath.Join(dir, "large"), differs(2, 17<<20))
			saveAs(t, filepath.Join(dir, "last"), []byte("l"))
			until(t, "its parts are stored", func() bool { return g.stored("large") == c.parts })
			<-waiting
			must(t, g.others.AbortMultipartUpload(t.Context(), "bucket", "run/large", g.uploads()["large"]))
			close(aborted)
			until(t, "all has arrived", func() bool { return w.all(3) })
			if order := g.order(); !slices.Equal(order, []string{"first", "large", "last"}) {
				t.Errorf("in this order: %v", order)
			}
			if n := g.stored("large") - c.parts; n != 3 {
				t.Errorf("%d parts were stored after that", n)
			}
			must(t, w.end())
			g.same(here(t, dir))
			if left := g.uploads(); len(left) > 0 {
				t.Errorf("uploads are left: %v", left)
			}
		})
	}
}

// What others do to an object between two generations of its file: the later one replaces theirs; a removal takes
// nothing of theirs with it, which is said; another name of the file gets its own content, and no copy of theirs.
func TestChangedByOthers(t *testing.T) {
	g, dir := newGate(t), t.TempDir()
	w := g.carry(Config{Dir: dir, Delete: true})
	sizes := []int{1000, 5 << 20} // by one request, and in parts
	want, named := map[string]string{}, func(what string, size int) string { return what + "-" + strconv.Itoa(size) }
	all := []string{"written", "removed", "renamed", "gone-written", "gone-removed", "gone-renamed", "only-renamed"}
	for _, size := range sizes {
		for i, what := range all {
			saveAs(t, filepath.Join(dir, named(what, size)), differs(byte(i), size))
		}
	}
	until(t, "all are there", func() bool { return w.status().Stats.Files == int64(len(sizes)*len(all)) })
	for _, size := range sizes {
		for i, what := range all {
			p, content := named(what, size), string(differs(byte(i), size))
			var err error
			if strings.HasPrefix(what, "gone") {
				err = g.others.RemoveObject(t.Context(), "bucket", "run/"+p, minio.RemoveObjectOptions{})
			} else if what != "only-renamed" {
				want[p] = string(differs(byte(i+50), size)) // of the same size
				_, err = g.others.Client.PutObject(t.Context(), "bucket", "run/"+p, strings.NewReader(want[p]),
					int64(size), minio.PutObjectOptions{})
			}
			must(t, err)
			switch at := filepath.Join(dir, p); {
			case strings.HasSuffix(what, "written"):
				again := differs(byte(i+100), size)
				saveAs(t, at, again)
				want[p] = string(again)
			case strings.HasSuffix(what, "removed"):
				must(t, os.Remove(at))
			default:
				must(t, os.Rename(at, at+"-again"))
				want[p+"-again"] = content
			}
		}
	}
	until(t, "all is done", func() bool {
		s := w.status()
		return s.Stats.Files >= int64(len(sizes)*(len(all)+5)) && s.Stats.Removed >= int64(len(sizes)*5) &&
			s.Behind.Files+s.Behind.Removals == 0
	})
	g.same(want)
	if s := w.status().Stats; s.Foreign != 4 || s.Copies != 2 || strings.Count(w.log.String(), "it stays") != 4 {
		t.Errorf("%+v, and in the log:\n%s", s, w.log.String())
	}
	must(t, w.end())
	if left := g.uploads(); len(left) > 0 {
		t.Errorf("uploads are left: %v", left)
	}
}

// A file that is written again whenever it is about to be sent holds up its last name, and no other file; one that is
// never closed holds up nothing. When its writer rests the file arrives, and then the last name.
func TestWrittenAgainAndAgain(t *testing.T) {
	g, dir := newGate(t), t.TempDir()
	busy, rewrites := filepath.Join(dir, "step/busy"), 0
	var writing sync.Mutex
	g.on(func(r *http.Request) bool {
		if part(r) != 1 {
			return true
		}
		writing.Lock()
		defer writing.Unlock()
		if rewrites < 10 || !slices.Contains(g.order(), "step/a") {
			rewrites++
			saveAs(t, busy, differs(byte(rewrites), 9<<20))
		}
		return true
	})
	w := g.carry(Config{Dir: dir})
	must(t, os.Mkdir(filepath.Join(dir, "step"), 0o755))
	never, err := os.Create(filepath.Join(dir, "step/never"))
	must(t, err)
	defer never.Close()
	_, err = never.WriteString("more and more")
	must(t, err)
	saveAs(t, busy, differs(100, 9<<20))
	saveAs(t, filepath.Join(dir, "step/a"), []byte("a"))
	saveAs(t, filepath.Join(dir, "step/last"), []byte("l"))
	until(t, "all has arrived", func() bool { return w.all(3) })
	if order := g.order(); !slices.Equal(order, []string{"step/a", "step/busy", "step/last"}) {
		t.Errorf("in this order: %v", order)
	}
	if s := w.status(); s.Here.Writing != 1 || s.Trouble != "" {
		t.Errorf("%+v", s)
	}
	must(t, w.end())
	want := here(t, dir)
	delete(want, "step/never")
	g.same(want)
	writing.Lock()
	defer writing.Unlock()
	if left := g.uploads(); len(left) > 0 || rewrites < 10 {
		t.Errorf("after %d rewrites uploads are left: %v", rewrites, left)
	}
}

// A journal that cannot be written, as its disk is full, holds up what needs it. The log says so, with the remedy, and
// nothing is lost: all arrives when there is space.
func TestJournalOnAFullDisk(t *testing.T) {
	g, dir := newGate(t), t.TempDir()
	w := g.carry(Config{Dir: dir, State: t.TempDir()})
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	must(t, err)
	defer full.Close()
	swap := func(to *os.File) (was *os.File) {
		w.journal.mu.Lock()
		defer w.journal.mu.Unlock()
		was, w.journal.f = w.journal.f, to
		return was
	}
	disk := swap(full)
	saveAs(t, filepath.Join(dir, "step/small"), []byte("s"))
	until(t, "a small file needs no journal", func() bool { return w.status().Stats.Files == 1 })
	saveAs(t, filepath.Join(dir, "step/large"), differs(1, 9<<20))
	saveAs(t, filepath.Join(dir, "step/last"), []byte("l"))
	until(t, "the status says so", func() bool {
		s := w.status()
		return s.Behind.Files == 2 && strings.Contains(s.Trouble, "no space left on device") &&
			strings.Contains(s.Trouble, "free some space")
	})
	swap(disk)
	until(t, "all has arrived", func() bool { w.later(); return w.status().Behind.Files == 0 })
	must(t, w.end())
	if order := g.order(); !slices.Equal(order, []string{"step/small", "step/large", "step/last"}) {
		t.Errorf("in this order: %v", order)
	}
	w = g.carry(Config{Dir: dir, State: w.State})
	until(t, "the next one knows that all is there", func() bool { return w.status().Behind.Files == 0 })
	if n := w.status().Stats.Files; n > 1 { // the small one
		t.Errorf("%d files were published again", n)
	}
	must(t, w.end())
	g.same(here(t, dir))
	if left := g.uploads(); len(left) > 0 {
		t.Errorf("uploads are left: %v", left)
	}
}
