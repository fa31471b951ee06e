// Package memstore is an object store in memory, for tests of what lies above stores, and the model that stores are
// compared with.
package memstore

import (
	"context"
	"crypto/md5" //nolint:gosec // the ETags of S3 are
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Mem accepts any key, even those impossible in a file system ("a//b", "a" beside "a/b", "..").
type Mem struct {
	mu      sync.RWMutex
	objects map[string]memObject
	uploads map[*memUpload]struct{}
	seq     uint64 // of the last Put
}

type memObject struct {
	objstore.Object
	data []byte // never written to after Put
}

// New returns an empty store.
func New() *Mem {
	return &Mem{objects: make(map[string]memObject), uploads: make(map[*memUpload]struct{})}
}

var _ objstore.Layer = (*Mem)(nil)

// PutBytes stores a copy of data under key and returns the new version. The ETag is the data's MD5, or
// another one if the object has that already.
func (m *Mem) PutBytes(key string, data []byte) objstore.Object {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.put(key, slices.Clone(data))
}

// put stores data and keeps the slice. m.mu is held.
func (m *Mem) put(key string, data []byte) objstore.Object {
	m.seq++
	etag := fmt.Sprintf("%x", md5.Sum(data)) //nolint:gosec // as S3 does
	if m.objects[key].ETag == etag {
		etag = fmt.Sprintf("%016x", m.seq)
	}
	o := objstore.Object{Key: key, Size: int64(len(data)), ETag: etag,
		ModTime: time.Unix(int64(m.seq), 0)} // deterministic: runs of a test are alike
	m.objects[key] = memObject{o, data}
	return o
}

// PutNew implements [objstore.Uploader].
func (m *Mem) PutNew(ctx context.Context, key string, data []byte) (objstore.Object, error) {
	if err := ctx.Err(); err != nil {
		return objstore.Object{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.objects[key]; ok {
		return objstore.Object{}, objstore.Exists(key)
	}
	return m.put(key, slices.Clone(data)), nil
}

// Delete implements [objstore.Uploader].
func (m *Mem) Delete(ctx context.Context, key, etag string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if o, ok := m.objects[key]; ok && (etag != "" || objstore.AuthorOf(ctx) != "") && o.ETag != etag {
		return objstore.Changed(objstore.Object{Key: key, ETag: etag}, o.ETag)
	}
	delete(m.objects, key)
	return nil
}

// Upload implements [objstore.Uploader].
func (m *Mem) Upload(ctx context.Context, key string, size, partSize int64) (objstore.Upload, error) {
	plan, err := objstore.PlanParts(key, size, partSize)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	u := &memUpload{PartPlan: plan, m: m, data: make(map[int][]byte)}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.uploads[u] = struct{}{}
	return u, nil
}

// Resume implements [objstore.Uploader]: as in a folder, none goes on.
func (m *Mem) Resume(_ context.Context, key, _ string, _, _ int64) (objstore.Upload, int, error) {
	return nil, 0, objstore.PartPlan{Key: key}.Gone()
}

// Uploads implements [objstore.Uploader].
func (m *Mem) Uploads(ctx context.Context, prefix string) (list []objstore.Unfinished, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for u := range m.uploads {
		if strings.HasPrefix(u.Key, prefix) {
			list = append(list, objstore.Unfinished{Key: u.Key, ID: u.ID()})
		}
	}
	return list, ctx.Err()
}

// AbortUpload implements [objstore.Uploader].
func (m *Mem) AbortUpload(ctx context.Context, key, id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.DeleteFunc(m.uploads, func(u *memUpload, _ struct{}) bool { return u.Key == key && u.ID() == id })
	return ctx.Err()
}

// Copy implements [objstore.Uploader].
func (m *Mem) Copy(ctx context.Context, from objstore.Object, key string) (objstore.Object, error) {
	if err := objstore.Current(ctx, m, from); err != nil {
		return objstore.Object{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.put(key, m.objects[from.Key].data), nil
}

// memUpload is an upload to a [Mem], whose mutex guards it. It exists while it is in m.uploads.
type memUpload struct {
	objstore.PartPlan
	m    *Mem
	data map[int][]byte
	made *objstore.Object // by Complete
}

func (u *memUpload) ID() string { return fmt.Sprintf("%p", u) }

func (u *memUpload) Part(ctx context.Context, n int, p []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := u.Check(n, len(p)); err != nil {
		return err
	}
	u.m.mu.Lock()
	defer u.m.mu.Unlock()
	if _, ok := u.m.uploads[u]; !ok {
		return u.Gone()
	}
	u.data[n] = slices.Clone(p)
	return nil
}

func (u *memUpload) Complete(ctx context.Context) (objstore.Object, error) {
	if err := ctx.Err(); err != nil {
		return objstore.Object{}, err
	}
	u.m.mu.Lock()
	defer u.m.mu.Unlock()
	if u.made != nil {
		return *u.made, nil
	}
	if _, ok := u.m.uploads[u]; !ok {
		return objstore.Object{}, u.Gone()
	}
	var all []byte
	for n := range u.Parts {
		p, ok := u.data[n]
		if !ok && u.Size > 0 {
			return objstore.Object{}, u.Missing(n)
		}
		all = append(all, p...)
	}
	delete(u.m.uploads, u)
	o := u.m.put(u.Key, all)
	u.made, u.data = &o, nil
	return o, nil
}

func (u *memUpload) Abort(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	u.m.mu.Lock()
	defer u.m.mu.Unlock()
	delete(u.m.uploads, u)
	return nil
}

// Stat implements [objstore.Reader].
func (m *Mem) Stat(ctx context.Context, key string) (objstore.Object, error) {
	if err := ctx.Err(); err != nil {
		return objstore.Object{}, err
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	o, ok := m.objects[key]
	if !ok {
		return objstore.Object{}, &objstore.Error{Op: "stat", Key: key, Kind: objstore.KindNotFound}
	}
	return o.Object, nil
}

// ReadAt implements [objstore.Reader].
func (m *Mem) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	return objstore.ReadAt(ctx, m, o, p, off)
}

// ReadSpans implements [objstore.SpanReader].
func (m *Mem) ReadSpans(ctx context.Context, o objstore.Object, spans []objstore.Span) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := objstore.CheckSpans(o, spans); err != nil || len(spans) == 0 {
		return err
	}
	m.mu.RLock()
	cur, ok := m.objects[o.Key]
	m.mu.RUnlock()
	if !ok {
		return &objstore.Error{Op: "read", Key: o.Key, Kind: objstore.KindNotFound}
	}
	if cur.ETag != o.ETag || cur.Size != o.Size {
		return objstore.Changed(o, cur.ETag)
	}
	for _, s := range spans {
		copy(s.P, cur.data[s.Off:])
	}
	return nil
}

// Listing lists the objects, in the order given.
func Listing(objects ...objstore.Object) iter.Seq2[objstore.Object, error] {
	return func(yield func(objstore.Object, error) bool) {
		for _, o := range objects {
			if !yield(o, nil) {
				return
			}
		}
	}
}

type tb interface { // also rapid's
	Helper()
	Fatalf(format string, args ...any)
}

// Collect returns the entries of a listing.
func Collect(t tb, seq iter.Seq2[objstore.Object, error]) (list []objstore.Object) {
	t.Helper()
	for o, err := range seq {
		if err != nil {
			t.Fatalf("listing after %d keys: %v", len(list), err)
		}
		list = append(list, o)
	}
	return list
}

// List implements [objstore.Reader]. It lists a snapshot from the start of the loop, in key order.
func (m *Mem) List(ctx context.Context, prefix, after string) iter.Seq2[objstore.Object, error] {
	return func(yield func(objstore.Object, error) bool) {
		var all []objstore.Object
		m.mu.RLock()
		for key, o := range m.objects {
			if strings.HasPrefix(key, prefix) && (after == "" || key > after) {
				all = append(all, o.Object)
			}
		}
		m.mu.RUnlock()
		slices.SortFunc(all, func(a, b objstore.Object) int { return strings.Compare(a.Key, b.Key) })
		for _, o := range all {
			if ctx.Err() != nil {
				break
			}
			if !yield(o, nil) {
				return
			}
		}
		if err := ctx.Err(); err != nil {
			yield(objstore.Object{}, err)
		}
	}
}

// ListLevel implements [objstore.Layer].
func (m *Mem) ListLevel(ctx context.Context, prefix string) iter.Seq2[objstore.Object, error] {
	return func(yield func(objstore.Object, error) bool) {
		last := ""
		for o, err := range m.List(ctx, prefix, "") {
			if err == nil {
				if i := strings.IndexByte(o.Key[len(prefix):], '/'); i >= 0 {
					o = objstore.Object{Key: o.Key[:len(prefix)+i+1]}
					if o.Key == last {
						continue
					}
					last = o.Key
				}
			}
			if !yield(o, err) {
				return
			}
		}
	}
}
