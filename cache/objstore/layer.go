package objstore

import "context"

// below is the store under a decorator, which embeds it to pass on all other methods.
type below = Layer

// each is a decorator that passes every request through one function, except reads and listings.
type each struct {
	below
	do func(ctx context.Context, r request, f func(ctx context.Context) error) error
}

// request describes one request to decorators.
type request struct {
	op    string // as in [Error]
	class int    // as a [Meter] counts it
	key   string
	bytes int64 // that it moves
}

// Stat implements [Reader].
func (e each) Stat(ctx context.Context, key string) (o Object, err error) {
	err = e.do(ctx, request{"stat", opStat, key, 0}, func(ctx context.Context) (err error) {
		o, err = e.below.Stat(ctx, key)
		return err
	})
	return o, err
}

// PutNew implements [Uploader].
func (e each) PutNew(ctx context.Context, key string, data []byte) (o Object, err error) {
	err = e.do(ctx, request{"put", opPut, key, int64(len(data))}, func(ctx context.Context) (err error) {
		o, err = e.below.PutNew(ctx, key, data)
		return err
	})
	return o, err
}

// Upload implements [Uploader]. Each step of the upload is a request.
func (e each) Upload(ctx context.Context, key string, size, partSize int64) (u Upload, err error) {
	err = e.do(ctx, request{"put", opOther, key, 0}, func(ctx context.Context) (err error) {
		u, err = e.below.Upload(ctx, key, size, partSize)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &eachStep{u, e, key, size}, nil
}

// AbortUploads implements [Uploader], as one request.
func (e each) AbortUploads(ctx context.Context, prefix string) (n int, err error) {
	err = e.do(ctx, request{"delete", opOther, prefix, 0}, func(ctx context.Context) (err error) {
		n, err = e.below.AbortUploads(ctx, prefix)
		return err
	})
	return n, err
}

// Delete implements [Uploader].
func (e each) Delete(ctx context.Context, key string) error {
	return e.do(ctx, request{"delete", opOther, key, 0}, func(ctx context.Context) error { return e.below.Delete(ctx, key) })
}

// eachStep is an upload under each.
type eachStep struct {
	u    Upload
	e    each
	key  string
	size int64
}

func (s *eachStep) Part(ctx context.Context, n int, p []byte) error {
	return s.e.do(ctx, request{"put", opPut, s.key, int64(len(p))}, func(ctx context.Context) error { return s.u.Part(ctx, n, p) })
}

func (s *eachStep) Complete(ctx context.Context) (o Object, err error) {
	err = s.e.do(ctx, request{"put", opOther, s.key, s.size}, func(ctx context.Context) (err error) {
		o, err = s.u.Complete(ctx)
		return err
	})
	return o, err
}

func (s *eachStep) Abort(ctx context.Context) error {
	return s.e.do(ctx, request{"put", opOther, s.key, 0}, s.u.Abort)
}
