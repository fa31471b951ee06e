package objstore

import (
	"context"
	"errors"
	"fmt"
)

// Span is a piece of an object that is to be read.
type Span struct {
	Off int64  // offset in the object
	P   []byte // filled from there on
}

// SpanReader is implemented by stores that read several pieces of an object by one request.
//
// Decorators always have the method. [ReadSpans] reads from any [Reader].
type SpanReader interface {
	// ReadSpans fills every span by one request, from the first span's offset to the last span's
	// end; what lies between spans is read and thrown away, so spans should lie close together.
	// Spans are not empty, ascend and do not overlap, or it fails with KindInvalid. Otherwise it
	// is as ReadAt: all of them or an error, and then their content is undefined. No spans at all
	// are a no-op.
	ReadSpans(ctx context.Context, o Object, spans []Span) error
}

// Uploader is implemented by stores that take large objects in parts and small ones on condition. It is
// what packing writes to.
//
// Decorators always have the methods, and pass the [Upload] on decorated. Where the store below is no
// Uploader they fail with KindInvalid and wrap [errors.ErrUnsupported]. Every step can be tried
// again, so that [Retrier] does.
type Uploader interface {
	// PutNew stores data under key, unless there is an object already: then KindExists. It is
	// atomic, so of several writers one wins.
	PutNew(ctx context.Context, key string, data []byte) (Object, error)

	// Upload begins to store size bytes under key in parts of partSize bytes, the last one
	// shorter. The object appears when Complete returns, never in part. partSize is at least 5 MiB
	// where there is more than one part. The ETag may depend on partSize.
	Upload(ctx context.Context, key string, size, partSize int64) (Upload, error)

	// AbortUploads ends the unfinished uploads of all keys that begin with prefix, of whatever
	// process, and returns how many there were; also with an error. The parts that such an
	// upload stores later, and its Complete, fail.
	AbortUploads(ctx context.Context, prefix string) (int, error)

	// Delete removes an object; one that is not there is no error.
	Delete(ctx context.Context, key string) error
}

// Upload is an object that is being stored in parts. It ends by Complete or Abort. Its methods may be
// called by several goroutines; Complete and Abort when no Part is under way.
type Upload interface {
	// Part stores part number n, counted from 0. Parts may be stored in any order, again after an
	// error, and several at once. p is the caller's again when Part returns.
	Part(ctx context.Context, n int, p []byte) error
	// Complete makes the object of all parts and returns it. It fails with KindInvalid if one is
	// missing. After another error it may be called again: whether the object is there is then
	// found out.
	Complete(ctx context.Context) (Object, error)
	// Abort gives the parts up. It does nothing after Complete succeeded.
	Abort(ctx context.Context) error
}

// ReadSpans reads spans from any store, by one request where it can.
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

// CheckSpans returns KindInvalid unless the spans are not empty, ascend, do not overlap and lie in o.
func CheckSpans(o Object, spans []Span) error {
	end := int64(0)
	for i, s := range spans {
		if err := CheckRange(o, len(s.P), s.Off); err != nil {
			return err
		}
		if len(s.P) == 0 || s.Off < end {
			return &Error{
				Op: "read", Key: o.Key, Kind: KindInvalid,
				Err: fmt.Errorf("span %d of %d, %d bytes at %d, is empty or begins before %d", i, len(spans), len(s.P), s.Off, end),
			}
		}
		end = s.Off + int64(len(s.P))
	}
	return nil
}

// SpansLength returns the bytes from the first span's offset to the last one's end. There is a span.
func SpansLength(spans []Span) int64 {
	last := spans[len(spans)-1]
	return last.Off + int64(len(last.P)) - spans[0].Off
}

// PartPlan is the arithmetic of an upload's parts.
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
		return p, &Error{Op: "put", Key: key, Kind: KindInvalid, Err: fmt.Errorf(format, args...), Remedy: "choose another part size"}
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
		return &Error{Op: "put", Key: p.Key, Kind: KindInvalid, Err: fmt.Errorf("part %d has %d bytes, not %d", n, length, want)}
	}
	return nil
}

// Missing is the error of Complete without part n.
func (p PartPlan) Missing(n int) error {
	return &Error{Op: "put", Key: p.Key, Kind: KindInvalid, Err: fmt.Errorf("part %d of %d was not stored", n, p.Parts)}
}

// Gone is the error of an upload that has ended.
func (p PartPlan) Gone() error {
	return &Error{
		Op: "put", Key: p.Key, Kind: KindNotFound, Err: errors.New("the upload is no longer there: it was aborted, here or by another process"),
		Remedy: "begin it again",
	}
}
