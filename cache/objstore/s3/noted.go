package s3

import (
	"context"
	"errors"
	"net/http"

	"github.com/shoalfs/shoal/cache/objstore"
)

// headerNote is user metadata: one line that is stored with an object, its author or the note of a copy.
const headerNote = "X-Amz-Meta-Shoal"

// GetNoted fills p with the bytes from off of the current version of an object of size bytes, whatever its ETag, and
// returns its note. It fails with KindChanged if the object has another size. Like all requests it is tried once.
func (s *Store) GetNoted(ctx context.Context, key string, size int64, p []byte, off int64) (note string, err error) {
	o := objstore.Object{Key: key, Size: size}
	if err := objstore.CheckRange(o, len(p), off); err != nil || len(p) == 0 {
		return "", err
	}
	n := int64(len(p))
	rangeOf := ""
	if n != size {
		rangeOf = rangeHeader(off, n)
	}
	g := s.keys.generation()
	a, err := s.ask(ctx, key, "", rangeOf, "")
	if err != nil {
		return "", s.fail(ctx, g, "read", key, err)
	}
	s.keys.accept()
	defer a.body.Close()
	fits := a.status == http.StatusOK && a.contentRange == ""
	if n != size {
		first, last, total, ok := parseContentRange(a.contentRange)
		fits = a.status == http.StatusPartialContent && ok && first == off && last == off+n-1 && total == size
	}
	if !fits || a.length >= 0 && a.length != n {
		return "", &objstore.Error{Op: "read", Key: key, Kind: objstore.KindChanged, Err: errors.New(
			"the object has another size, or the answer another range")}
	}
	return a.note, s.fill(ctx, o, &a, []objstore.Span{{Off: off, P: p}})
}

// PutNoted stores data with a note, by one PUT. With onlyNew it fails with KindExists if the object exists.
func (s *Store) PutNoted(ctx context.Context, key string, data []byte, note string, onlyNew bool) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx = objstore.WithAuthor(ctx, note)
	if onlyNew {
		_, err := s.PutNew(ctx, key, data)
		return err
	}
	g := s.keys.generation()
	if _, err := s.put(ctx, key, data, false); err != nil {
		return s.fail(ctx, g, "put", s.url(key), err)
	}
	return nil
}
