package objstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"
)

// Mem is a store in memory, for tests and as the model that other stores are compared with. It
// holds any key, also those that no file system can ("a//b", "a" beside "a/b", "..").
type Mem struct {
	mu      sync.RWMutex
	objects map[string]memObject
	uploads map[*memUpload]struct{}
	seq     uint64 // of the last Put; the source of ETags
}

type memObject struct {
	Object
	data []byte // never written to after Put
}

// NewMem returns an empty store.
func NewMem() *Mem {
	return &Mem{objects: make(map[string]memObject), uploads: make(map[*memUpload]struct{})}
}

var _ Store = (*Mem)(nil)

// Check implements [Checker]. It never fails.
func (m *Mem) Check(ctx context.Context) error { return ctx.Err() }

// PutBytes stores a copy of data under key and returns the new version. Every call makes another
// ETag, also with the same data.
func (m *Mem) PutBytes(key string, data []byte) Object {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.put(key, slices.Clone(data))
}

// put stores data, which is its own from now on. m.mu is held.
func (m *Mem) put(key string, data []byte) Object {
	m.seq++
	o := Object{
		Key:     key,
		Size:    int64(len(data)),
		ETag:    fmt.Sprintf("%016x", m.seq),
		ModTime: time.Unix(int64(m.seq), 0), // deterministic: runs of a test are alike
	}
	m.objects[key] = memObject{o, data}
	return o
}

// Put implements [Putter].
func (m *Mem) Put(ctx context.Context, key string, r io.Reader, size int64) (Object, error) {
	if err := ctx.Err(); err != nil {
		return Object{}, err
	}
	data := make([]byte, size)
	if _, err := io.ReadFull(r, data); err != nil {
		return Object{}, &Error{Op: "put", Key: key, Kind: KindInvalid, Err: fmt.Errorf("source of %d bytes: %w", size, err)}
	}
	return m.PutBytes(key, data), nil
}

// PutNew implements [Uploader].
func (m *Mem) PutNew(ctx context.Context, key string, data []byte) (Object, error) {
	if err := ctx.Err(); err != nil {
		return Object{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.objects[key]; ok {
		return Object{}, errExists(key)
	}
	return m.put(key, slices.Clone(data)), nil
}

// errExists is the error of PutNew for a key that is taken.
func errExists(key string) error {
	return &Error{
		Op: "put", Key: key, Kind: KindExists, Err: errors.New("there is an object of this key"),
		Remedy: "choose another destination, or delete the object first",
	}
}

// Delete implements [Uploader].
func (m *Mem) Delete(ctx context.Context, key string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.objects, key)
	return nil
}

// Upload implements [Uploader].
func (m *Mem) Upload(ctx context.Context, key string, size, partSize int64) (Upload, error) {
	plan, err := planParts(key, size, partSize)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	u := &memUpload{partPlan: plan, m: m, data: make(map[int][]byte)}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.uploads[u] = struct{}{}
	return u, nil
}

// AbortUploads implements [Uploader].
func (m *Mem) AbortUploads(ctx context.Context, prefix string) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for u := range m.uploads {
		if strings.HasPrefix(u.key, prefix) {
			delete(m.uploads, u)
			n++
		}
	}
	return n, nil
}

// memUpload is an upload to a [Mem], whose mutex guards it. It is there while it is in m.uploads.
type memUpload struct {
	partPlan
	m    *Mem
	data map[int][]byte
	made *Object // by Complete
}

// Part implements [Upload].
func (u *memUpload) Part(ctx context.Context, n int, p []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := u.check(n, len(p)); err != nil {
		return err
	}
	u.m.mu.Lock()
	defer u.m.mu.Unlock()
	if _, ok := u.m.uploads[u]; !ok {
		return u.gone()
	}
	u.data[n] = slices.Clone(p)
	return nil
}

// Complete implements [Upload].
func (u *memUpload) Complete(ctx context.Context) (Object, error) {
	if err := ctx.Err(); err != nil {
		return Object{}, err
	}
	u.m.mu.Lock()
	defer u.m.mu.Unlock()
	if u.made != nil {
		return *u.made, nil
	}
	if _, ok := u.m.uploads[u]; !ok {
		return Object{}, u.gone()
	}
	var all []byte
	for n := range u.parts {
		p, ok := u.data[n]
		if !ok && u.size > 0 {
			return Object{}, u.missing(n)
		}
		all = append(all, p...)
	}
	delete(u.m.uploads, u)
	o := u.m.put(u.key, all)
	u.made, u.data = &o, nil
	return o, nil
}

// Abort implements [Upload].
func (u *memUpload) Abort(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	u.m.mu.Lock()
	defer u.m.mu.Unlock()
	delete(u.m.uploads, u)
	return nil
}

// Stat implements [Reader].
func (m *Mem) Stat(ctx context.Context, key string) (Object, error) {
	if err := ctx.Err(); err != nil {
		return Object{}, err
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	o, ok := m.objects[key]
	if !ok {
		return Object{}, &Error{Op: "stat", Key: key, Kind: KindNotFound}
	}
	return o.Object, nil
}

// ReadAt implements [Reader].
func (m *Mem) ReadAt(ctx context.Context, o Object, p []byte, off int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := checkRange(o, len(p), off); err != nil {
		return err
	}
	if len(p) == 0 {
		return nil
	}
	m.mu.RLock()
	cur, ok := m.objects[o.Key]
	m.mu.RUnlock()
	if !ok {
		return &Error{Op: "read", Key: o.Key, Kind: KindNotFound}
	}
	if cur.ETag != o.ETag || cur.Size != o.Size {
		return errChanged(o, cur.ETag)
	}
	copy(p, cur.data[off:])
	return nil
}

// ReadSpans implements [SpanReader].
func (m *Mem) ReadSpans(ctx context.Context, o Object, spans []Span) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := checkSpans(o, spans); err != nil {
		return err
	}
	for _, s := range spans {
		if err := m.ReadAt(ctx, o, s.P, s.Off); err != nil {
			return err
		}
	}
	return nil
}

// List implements [Reader]. It lists what was there when the loop began.
func (m *Mem) List(ctx context.Context, prefix string) iter.Seq2[Object, error] {
	return m.ListAfter(ctx, prefix, "")
}

// ListAfter implements [ListerAfter].
func (m *Mem) ListAfter(ctx context.Context, prefix, after string) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		for _, o := range m.sorted(prefix) {
			if err := ctx.Err(); err != nil {
				yield(Object{}, err)
				return
			}
			if after != "" && o.Key <= after {
				continue
			}
			if !yield(o, nil) {
				return
			}
		}
		if err := ctx.Err(); err != nil {
			yield(Object{}, err)
		}
	}
}

// ListLevel implements [Prefixer].
func (m *Mem) ListLevel(ctx context.Context, prefix string) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		last := ""
		for o, err := range m.List(ctx, prefix) {
			if err == nil {
				if i := strings.IndexByte(o.Key[len(prefix):], '/'); i >= 0 {
					o = Object{Key: o.Key[:len(prefix)+i+1]}
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

// sorted returns the objects under prefix in key order.
func (m *Mem) sorted(prefix string) []Object {
	m.mu.RLock()
	defer m.mu.RUnlock()
	var out []Object
	for k, o := range m.objects {
		if strings.HasPrefix(k, prefix) {
			out = append(out, o.Object)
		}
	}
	slices.SortFunc(out, func(a, b Object) int { return strings.Compare(a.Key, b.Key) })
	return out
}

// checkRange returns KindInvalid unless [off, off+n) lies inside the object.
func checkRange(o Object, n int, off int64) error {
	// Subtraction, because off+n can overflow.
	if off >= 0 && off <= o.Size && int64(n) <= o.Size-off {
		return nil
	}
	return &Error{
		Op: "read", Key: o.Key, Kind: KindInvalid,
		Err: fmt.Errorf("range of %d bytes at %d is not inside the object's %d bytes", n, off, o.Size),
	}
}

const remedyChanged = "restore the object, or move to the new version of the dataset with --refresh or shoal refresh"

// errChanged is the error for an object whose version is now etag ("" if not known).
func errChanged(o Object, etag string) error {
	cause := errors.New("the store holds another version than the dataset (ETag " + o.ETag + ")")
	if etag != "" {
		cause = fmt.Errorf("the store now holds ETag %s, the dataset has %s", etag, o.ETag)
	}
	return &Error{
		Op: "read", Key: o.Key, Kind: KindChanged, Err: cause,
		Remedy: remedyChanged,
	}
}
