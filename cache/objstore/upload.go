package objstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
)

// Span is a piece of an object to read.
type Span struct {
	Off int64  // offset in the object
	P   []byte // filled from there on
}

// CodedReader is implemented by stores that have some files in a codec's shorter form.
type CodedReader interface {
	// ReadCoded is ReadSpans, but span i may come in its coded form if coded[i] is not nil. Then the length, which is
	// less than the span's, is stored there.
	ReadCoded(ctx context.Context, o Object, spans []Span, coded []*int) error
}

// SpanReader is implemented by stores that read several pieces of an object with one request. [ReadSpans] reads from
// any [Reader].
type SpanReader interface {
	// ReadSpans fills every span with one request, from the first span's offset to the last span's end. Bytes between
	// spans are read and discarded, so spans should be close together. Spans must not be empty, must ascend and must
	// not overlap, or it fails with KindInvalid. Otherwise it is like ReadAt: all of them or an error, and then their
	// content is undefined. No spans are a no-op.
	ReadSpans(ctx context.Context, o Object, spans []Span) error
}

// CopyMost is how many bytes S3 copies by one request.
const CopyMost = 5 << 30

// Uploader is implemented by stores that accept large objects in parts and small ones conditionally. Packing writes
// to it.
//
// Decorators return a decorated [Upload]. Every step can be repeated, and [Retrier] does so.
type Uploader interface {
	// PutNew stores data under key, or returns KindExists if the object exists. It is atomic: one of several writers
	// wins.
	PutNew(ctx context.Context, key string, data []byte) (Object, error)

	// Upload starts to store size bytes under key in parts of partSize bytes, the last one shorter. The object appears
	// when Complete returns, never in part. With more than one part, partSize is at least 5 MiB. The ETag may depend
	// on partSize.
	Upload(ctx context.Context, key string, size, partSize int64) (Upload, error)

	// Resume goes on with the upload of this ID, key, size and partSize, which another process may have begun, and
	// returns how many parts the store has. All parts are given again, and those that the store has with these bytes
	// are not sent. It fails with KindNotFound if the upload was completed or aborted, which a Stat of
	// key may tell apart, or cannot be resumed, as in a folder.
	Resume(ctx context.Context, key, id string, size, partSize int64) (_ Upload, stored int, err error)

	// Uploads returns the unfinished uploads of all keys that begin with prefix, of any process. One PUT is none.
	Uploads(ctx context.Context, prefix string) ([]Unfinished, error)

	// AbortUpload aborts one of Uploads; a missing one is no error. Its later parts, and its Complete, fail.
	AbortUpload(ctx context.Context, key, id string) error

	// Copy stores the bytes of from under key, another one, without moving them through this process. It fails with
	// KindChanged if the store has another version than from, and with KindNotFound if it has none. It can be repeated,
	// since each try stores the same version. More than CopyMost bytes may take an upload under key, which a crash
	// leaves.
	Copy(ctx context.Context, from Object, key string) (Object, error)

	// Delete removes an object; a missing one is no error. Unless etag is empty it removes that version only, and fails
	// with KindChanged if the store has another one. It can be repeated: after a try whose answer was lost the object
	// is missing, or is another one. Under [WithAuthor] it fails with KindChanged, too, if the object says another
	// author, and an empty etag means the version that says this one.
	Delete(ctx context.Context, key, etag string) error
}

type authorKey struct{}
type matchKey struct{}

// WithMatch has an Upload of one PUT fail with KindChanged, or KindNotFound, unless the version that it replaces has
// this ETag. Folders, and the same stores as in Delete, compare just before. Its Complete cannot be repeated after a
// lost answer.
func WithMatch(ctx context.Context, etag string) context.Context {
	return context.WithValue(ctx, matchKey{}, etag)
}

// MatchOf returns the ETag of WithMatch, or "".
func MatchOf(ctx context.Context) string {
	etag, _ := ctx.Value(matchKey{}).(string)
	return etag
}

// WithAuthor has buckets say of what is stored by Upload or Copy under the context that author, a word of ASCII, stored
// it. Folders do not.
func WithAuthor(ctx context.Context, author string) context.Context {
	return context.WithValue(ctx, authorKey{}, author)
}

// AuthorOf returns the author of WithAuthor, or "".
func AuthorOf(ctx context.Context) string {
	author, _ := ctx.Value(authorKey{}).(string)
	return author
}

// Unfinished is an upload without Complete or Abort.
type Unfinished struct{ Key, ID string }

// AbortUploads aborts the Uploads of prefix and returns how many there were, even with an error.
func AbortUploads(ctx context.Context, w Uploader, prefix string) (int, error) {
	list, err := w.Uploads(ctx, prefix)
	for i, u := range list {
		if err := w.AbortUpload(ctx, u.Key, u.ID); err != nil {
			return i, err
		}
	}
	return len(list), err
}

// UnlessMissing returns err, but nil if it is KindNotFound.
func UnlessMissing(err error) error {
	if KindOf(err) == KindNotFound {
		return nil
	}
	return err
}

// Current returns KindChanged if the store has another version than o, and KindNotFound if it has none.
func Current(ctx context.Context, r Reader, o Object) error {
	have, err := r.Stat(ctx, o.Key)
	if err == nil && have.ETag != o.ETag {
		err = Changed(o, have.ETag)
	}
	return err
}

// Upload is an object being stored in parts. It ends with Complete or Abort. Its methods may be called by several
// goroutines; Complete and Abort only while no Part is running.
type Upload interface {
	// ID is the upload's name for Resume and AbortUpload in any process; empty if it is stored by one PUT.
	ID() string
	// Part stores part number n, counted from 0. Parts may be stored in any order, again after an error, and several
	// at once. The caller owns p again when Part returns.
	Part(ctx context.Context, n int, p []byte) error
	// Complete makes the object of all parts and returns it. It fails with KindInvalid if one is missing. After
	// another error it may be called again: it then checks whether the object exists.
	Complete(ctx context.Context) (Object, error)
	// Abort discards the parts. It does nothing after Complete succeeded.
	Abort(ctx context.Context) error
}

// ReadAt is [ReaderAt] for what reads spans.
func ReadAt(ctx context.Context, r SpanReader, o Object, p []byte, off int64) error {
	if len(p) == 0 {
		return cmp.Or(ctx.Err(), CheckRange(o, 0, off))
	}
	return r.ReadSpans(ctx, o, []Span{{Off: off, P: p}})
}

// ReadSpans reads spans from any store, with one request if possible.
func ReadSpans(ctx context.Context, r Reader, o Object, spans []Span) error {
	if s, ok := r.(SpanReader); ok {
		return s.ReadSpans(ctx, o, spans)
	}
	if err := CheckSpans(o, spans); err != nil {
		return err
	}
	for _, s := range spans {
		if err := r.ReadAt(ctx, o, s.P, s.Off); err != nil {
			return err
		}
	}
	return nil
}

// CheckSpans returns KindInvalid unless the spans are non-empty, ascend, do not overlap and lie in o.
func CheckSpans(o Object, spans []Span) error {
	end := int64(0)
	for i, s := range spans {
		if err := CheckRange(o, len(s.P), s.Off); err != nil {
			return err
		}
		if len(s.P) == 0 || s.Off < end {
			return &Error{Op: "read", Key: o.Key, Kind: KindInvalid,
				Err: fmt.Errorf("span %d of %d, %d bytes at %d, is empty or begins before %d",
					i, len(spans), len(s.P), s.Off, end)}
		}
		end = s.Off + int64(len(s.P))
	}
	return nil
}

// SpansLength returns the bytes from the first span's offset to the last one's end. spans must not be empty.
func SpansLength(spans []Span) int64 {
	last := spans[len(spans)-1]
	return last.Off + int64(len(last.P)) - spans[0].Off
}

// PartPlan computes the parts of an upload.
type PartPlan struct {
	Key            string
	Size, PartSize int64
	Parts          int
}

const (
	minPartSize = 5 << 20 // S3's, of all parts but the last
	maxParts    = 10_000  // S3's
)

// PlanParts returns the plan, or KindInvalid.
func PlanParts(key string, size, partSize int64) (PartPlan, error) {
	p := PartPlan{Key: key, Size: size, PartSize: partSize}
	invalid := func(format string, args ...any) (PartPlan, error) {
		return p, &Error{Op: "put", Key: key, Kind: KindInvalid, Err: fmt.Errorf(format, args...),
			Remedy: "choose another part size"}
	}
	if size < 0 || partSize <= 0 {
		return invalid("%d bytes in parts of %d", size, partSize)
	}
	n := size / partSize // rounded up without overflow
	if size%partSize > 0 || n == 0 {
		n++ // an empty object has one empty part, which need not be stored
	}
	if n > 1 && partSize < minPartSize {
		return invalid("parts of %d bytes: the minimum is %d", partSize, minPartSize)
	}
	if n > maxParts {
		return invalid("%d parts: the maximum is %d", n, maxParts)
	}
	p.Parts = int(n)
	return p, nil
}

// Check returns KindInvalid unless part n has length bytes.
func (p PartPlan) Check(n, length int) error {
	if n < 0 || n >= p.Parts {
		return &Error{Op: "put", Key: p.Key, Kind: KindInvalid, Err: fmt.Errorf("part %d of %d", n, p.Parts)}
	}
	if want := min(p.PartSize, p.Size-int64(n)*p.PartSize); int64(length) != want {
		return &Error{Op: "put", Key: p.Key, Kind: KindInvalid,
			Err: fmt.Errorf("part %d has %d bytes, not %d", n, length, want)}
	}
	return nil
}

// Missing is the error of Complete if part n is missing.
func (p PartPlan) Missing(n int) error {
	return &Error{Op: "put", Key: p.Key, Kind: KindInvalid, Err: fmt.Errorf("part %d of %d was not stored", n, p.Parts)}
}

// Gone is the error of an upload that has ended.
func (p PartPlan) Gone() error {
	return &Error{Op: "put", Key: p.Key, Kind: KindNotFound,
		Err:    errors.New("the upload is no longer there: it was aborted, here or by another process"),
		Remedy: "begin it again"}
}
