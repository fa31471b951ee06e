package s3api

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
)

type dataset struct {
	Served
	server  *Server
	opens   opens
	written written
	meta    meta
	running sync.WaitGroup  // requests
	left    context.Context // ends when they must
	cut     func()          // ends it

	mu   sync.Mutex
	tree *tree     // of the last listing
	seen time.Time // the listing that written knows
}

// everywhere has the datasets of all servers of this process: a key that is written through one is written for all.
var everywhere struct {
	sync.RWMutex
	sets []*dataset
}

// changing marks keys of the bucket before they are written, in the datasets that may have them. The returned function
// is called when they are, and marks them again: datasets may have been added, or listings saved, meanwhile.
func (d *dataset) changing(keys []string) (end func(), err error) {
	begun, err := d.mark(keys)
	if err != nil {
		begun()
		return nil, err
	}
	return func() {
		again, err := d.mark(keys)
		d.unmarked(err)
		begun()
		again()
	}, nil
}

// unmarked logs that MarkStale has failed, if it has.
func (d *dataset) unmarked(err error) {
	if err != nil {
		d.server.log.Warn("the saved listing could not be marked as stale: run shoal refresh after the next start",
			"cause", err)
	}
}

func (d *dataset) mark(keys []string) (end func(), err error) {
	var ends []func()
	everywhere.RLock()
	defer everywhere.RUnlock()
	err = d.MarkStale(keys)
	for _, x := range everywhere.sets {
		if x.Bucket == d.Bucket && x.Where == d.Where {
			ends = append(ends, x.written.begin(slices.DeleteFunc(slices.Clone(keys), func(key string) bool {
				return key == "" || len(key) > 1024 || !strings.HasPrefix(key, x.Prefix) // S3 has no longer ones
			})))
		}
	}
	return func() {
		for _, f := range ends {
			f()
		}
	}, err
}

func (d *dataset) remove(ctx context.Context) {
	d.server.mu.Lock()
	d.server.sets = slices.DeleteFunc(slices.Clone(d.server.sets), func(x *dataset) bool { return x == d })
	d.server.mu.Unlock()
	defer context.AfterFunc(ctx, d.cut)()
	d.running.Wait()
	d.opens.close()
	d.cut()
	everywhere.Lock()
	everywhere.sets = slices.DeleteFunc(everywhere.sets, func(x *dataset) bool { return x == d })
	everywhere.Unlock()
}

// held finds a key in the manifest, if the endpoint may answer for it.
func (d *dataset) held(key string) (m *catalog.Manifest, file int, ok bool) {
	d.catchUp()
	if d.written.has(key) {
		return nil, 0, false
	}
	m = d.Manifest()
	path, below := strings.CutPrefix(key, m.Prefix())
	if !below || d.Members() {
		return nil, 0, false
	}
	node, found := m.Find(path)
	return m, node.Index, found && !node.IsDir
}

// catchUp lets go of written keys that the version in force has. It is called before Manifest.
func (d *dataset) catchUp() {
	at := d.Listed()
	d.mu.Lock()
	news := at.After(d.seen)
	d.seen = at
	d.mu.Unlock()
	if !news {
		return
	}
	d.written.listed(at)
	if d.written.below("") { // after the listing began: what it saved is stale again
		d.unmarked(d.MarkStale([]string{d.Prefix}))
	}
}

func (d *dataset) treeOf(m *catalog.Manifest) *tree {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.tree == nil || d.tree.m != m {
		d.tree = &tree{m: m}
	}
	return d.tree
}

const (
	// maxMeta bounds the headers that a dataset remembers. With more, it begins again.
	maxMeta = 16 << 20
	// metaTime is how long a HEAD waits for the origin: the endpoint has the rest of the answer. One that does not
	// answer is left alone for a while, or each open of a client that begins with a HEAD would take as long.
	metaTime = 5 * time.Second
)

// described begin the headers of an object that a listing does not have.
var described = []string{
	"Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language", "Content-Type", "Expires",
	"X-Amz-Checksum-", "X-Amz-Meta-",
	"X-Amz-Missing-Meta", "X-Amz-Server-Side-Encryption", "X-Amz-Storage-Class", "X-Amz-Version-Id",
	"X-Amz-Website-Redirect-Location",
}

// meta is what the listing does not say of held objects. A HEAD asks the origin once a listing: metadata may change
// while bytes and ETag, and so the dataset's version, stay.
type meta struct {
	mu    sync.Mutex
	of    *catalog.Manifest
	at    time.Time // of the listing
	files map[int]http.Header
	size  int

	origin *objstore.Circuit
}

// describe adds what is known of a file; for a HEAD what the origin says, if it has the same version.
func (mt *meta) describe(d *dataset, r *http.Request, m *catalog.Manifest, file int, h http.Header) {
	at := d.Listed()
	mt.mu.Lock()
	if mt.of != m || !mt.at.Equal(at) || mt.size > maxMeta {
		mt.of, mt.at, mt.files, mt.size = m, at, map[int]http.Header{}, 0
	}
	known, ok := mt.files[file]
	mt.mu.Unlock()
	if !ok && r.Method == http.MethodHead && d.Origin != nil {
		if known = d.head(r.Context(), m, file); known != nil {
			mt.mu.Lock()
			if mt.of == m && mt.at.Equal(at) {
				mt.files[file] = known
				mt.size += 128
				for name, values := range known {
					mt.size += 64 + len(name) + len(strings.Join(values, ""))
				}
			}
			mt.mu.Unlock()
		}
	}
	for name, values := range known {
		if !strings.HasPrefix(name, "X-Amz-Checksum-") ||
			r.Header.Get("X-Amz-Checksum-Mode") != "" && h.Get("Content-Range") == "" {
			copyHeader(h, http.Header{name: values})
		}
	}
}

// head asks the origin for a file's headers. They are empty if it has another version by now, and nil if it does not
// say.
func (d *dataset) head(ctx context.Context, m *catalog.Manifest, file int) http.Header {
	first, ok := d.meta.origin.Enter()
	if !ok {
		return nil
	}
	hctx, cancel := context.WithTimeout(ctx, metaTime)
	defer cancel()
	d.server.count.forwarded.Add(1)
	resp, err := d.Origin.Forward(hctx,
		s3.Request{Method: http.MethodHead, Key: m.Prefix() + m.Path(file),
			Header: http.Header{"X-Amz-Checksum-Mode": {"ENABLED"}}})
	if ctx.Err() != nil {
		d.meta.origin.Withdraw(first)
	} else {
		d.meta.origin.Leave(first, err)
	}
	if err != nil {
		return nil
	}
	_ = resp.Body.Close()
	known := http.Header{}
	switch {
	case resp.StatusCode != http.StatusOK:
		return nil
	case strings.Trim(resp.Header.Get("ETag"), `"`) != m.ETag(file):
		return known
	}
	for name, values := range resp.Header {
		if slices.ContainsFunc(described, func(p string) bool { return strings.HasPrefix(name, p) }) &&
			!strings.Contains(name, "-Customer-") {
			known[name] = values
		}
	}
	return known
}

const (
	// linger is how long ranged GETs of an object may pause and still be one open.
	linger = 2 * time.Second
	// maxOpens is how many objects may be open between two ranged GETs.
	maxOpens = 1024
)

// opens makes opens and releases of files from GETs: see the package comment.
type opens struct {
	data Dataset

	mu   sync.Mutex
	held map[opened]*holding
}

// opened is an object that one address reads by ranges.
type opened struct {
	m      *catalog.Manifest
	file   int
	client string
}

type holding struct {
	gets  int // running
	timer *time.Timer
}

// part opens a file for a ranged GET, unless the client has it open.
func (o *opens) part(k opened, reader uint32) (done func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.held[k]
	if h == nil {
		h = &holding{}
		h.timer = time.AfterFunc(time.Hour, func() { o.release(k, h) })
		if o.held == nil {
			o.held = map[opened]*holding{}
		}
		o.held[k] = h
		o.data.Opened(k.m, k.file, reader)
	}
	h.gets++
	h.timer.Stop()
	return func() {
		o.mu.Lock()
		h.gets--
		full := len(o.held) > maxOpens
		if h.gets == 0 && !full {
			h.timer.Reset(linger)
		}
		o.mu.Unlock()
		if full {
			o.release(k, h)
		}
	}
}

// release lets go of a file that nobody reads now.
func (o *opens) release(k opened, h *holding) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if h.gets > 0 || o.held[k] != h {
		return
	}
	delete(o.held, k)
	o.data.Released(k.m, k.file)
}

// close lets go of all files. No GET may be running.
func (o *opens) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for k, h := range o.held {
		h.timer.Stop()
		o.data.Released(k.m, k.file)
	}
	clear(o.held)
}

// maxWritten is how many written keys are kept. With more, all keys count as written: so does the key "".
const maxWritten = 100_000

// written are the keys that were written or deleted through the endpoint: the manifest may have their old versions.
type written struct {
	mu   sync.Mutex
	keys map[string]change
}

type change struct {
	running int       // requests
	ended   time.Time // the last of them
}

// begin marks keys before their request is sent. The request calls the returned function when it has ended.
func (w *written) begin(keys []string) (end func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.keys == nil {
		w.keys = map[string]change{}
	}
	if _, all := w.keys[""]; len(keys) > 0 && (all || len(w.keys)+len(keys) > maxWritten) {
		keys = []string{""}
	}
	for _, k := range keys {
		w.keys[k] = change{running: w.keys[k].running + 1}
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		now := time.Now()
		for _, k := range keys {
			w.keys[k] = change{w.keys[k].running - 1, now}
		}
	}
}

// adopt marks the keys that are written of another dataset.
func (w *written) adopt(of *written) {
	of.mu.Lock()
	defer of.mu.Unlock()
	w.begin(slices.Collect(maps.Keys(of.keys)))()
}

// listed drops what a listing that began at that time has seen.
func (w *written) listed(at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.keys, func(_ string, c change) bool { return c.running == 0 && c.ended.Before(at) })
}

// has reports whether a key is written; below, whether one with a prefix is.
func (w *written) has(key string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, ok := w.keys[key]
	_, all := w.keys[""]
	return ok || all
}

func (w *written) below(prefix string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for k := range w.keys {
		if k == "" || strings.HasPrefix(k, prefix) {
			return true
		}
	}
	return false
}
