package objstore

import (
	"cmp"
	"context"
)

// below is the store under a decorator, which embeds it to pass on all other methods.
type below = Layer

// each is a decorator that passes every request through one function, except listings.
type each struct {
	below
	do func(ctx context.Context, r request, f func(ctx context.Context) error) error
}

type request struct {
	op    string // as in [Error]
	class int    // as a [Meter] counts it
	key   string
	bytes int64 // that it moves; they give it time
}

// through passes a request with a result through e.
func through[T any](ctx context.Context, e *each, r request, f func(ctx context.Context) (T, error)) (v T, err error) {
	err = e.do(ctx, r, func(ctx context.Context) (err error) {
		v, err = f(ctx)
		return err
	})
	return v, err
}

func (e *each) ReadAt(ctx context.Context, o Object, p []byte, off int64) error {
	return ReadAt(ctx, e, o, p, off)
}

func (e *each) ReadSpans(ctx context.Context, o Object, spans []Span) error {
	if err := CheckSpans(o, spans); err != nil || len(spans) == 0 {
		return cmp.Or(err, ctx.Err())
	}
	return e.do(ctx, request{"read", opRead, o.Key, SpansLength(spans)}, func(ctx context.Context) error {
		return e.below.ReadSpans(ctx, o, spans)
	})
}

func (e *each) Stat(ctx context.Context, key string) (Object, error) {
	return through(ctx, e, request{"stat", opStat, key, 0}, func(ctx context.Context) (Object, error) {
		return e.below.Stat(ctx, key)
	})
}

func (e *each) PutNew(ctx context.Context, key string, data []byte) (Object, error) {
	return through(ctx, e, request{"put", opPut, key, int64(len(data))}, func(ctx context.Context) (Object, error) {
		return e.below.PutNew(ctx, key, data)
	})
}

// Upload implements [Uploader]. Each step of the upload is a request.
func (e *each) Upload(ctx context.Context, key string, size, partSize int64) (Upload, error) {
	u, err := through(ctx, e, request{"put", opOther, key, 0}, func(ctx context.Context) (Upload, error) {
		return e.below.Upload(ctx, key, size, partSize)
	})
	if err != nil {
		return nil, err
	}
	return &eachStep{u, e, key, size}, nil
}

// Resume implements [Uploader]. The time that it may take grows with the size, as does the number of parts.
func (e *each) Resume(ctx context.Context, key, id string, size, partSize int64) (_ Upload, stored int, err error) {
	u, err := through(ctx, e, request{"list", opOther, key, size}, func(ctx context.Context) (u Upload, err error) {
		u, stored, err = e.below.Resume(ctx, key, id, size, partSize)
		return u, err
	})
	if err != nil {
		return nil, 0, err
	}
	return &eachStep{u, e, key, size}, stored, nil
}

// Uploads implements [Uploader], as one request, which can be many pages: it gets the time of a GiB.
func (e *each) Uploads(ctx context.Context, prefix string) ([]Unfinished, error) {
	return through(ctx, e, request{"list", opOther, prefix, 1 << 30}, func(ctx context.Context) ([]Unfinished, error) {
		return e.below.Uploads(ctx, prefix)
	})
}

func (e *each) AbortUpload(ctx context.Context, key, id string) error {
	return e.do(ctx, request{"delete", opOther, key, 0}, func(ctx context.Context) error {
		return e.below.AbortUpload(ctx, key, id)
	})
}

// Copy implements [Uploader], as one request.
func (e *each) Copy(ctx context.Context, from Object, key string) (Object, error) {
	return through(ctx, e, request{"put", opOther, key, from.Size}, func(ctx context.Context) (Object, error) {
		return e.below.Copy(ctx, from, key)
	})
}

func (e *each) Delete(ctx context.Context, key, etag string) error {
	return e.do(ctx, request{"delete", opOther, key, 0}, func(ctx context.Context) error {
		return e.below.Delete(ctx, key, etag)
	})
}

type eachStep struct {
	Upload
	e    *each
	key  string
	size int64
}

func (s *eachStep) Part(ctx context.Context, n int, p []byte) error {
	return s.e.do(ctx, request{"put", opPut, s.key, int64(len(p))}, func(ctx context.Context) error {
		return s.Upload.Part(ctx, n, p)
	})
}

func (s *eachStep) Complete(ctx context.Context) (Object, error) {
	return through(ctx, s.e, request{"put", opOther, s.key, s.size}, s.Upload.Complete)
}

func (s *eachStep) Abort(ctx context.Context) error {
	return s.e.do(ctx, request{"put", opOther, s.key, 0}, s.Upload.Abort)
}
