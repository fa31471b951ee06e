// Package objstore is the interface between Shoal and object stores. Package s3 is a bucket, [Dir] a local folder,
// and package stores opens either. Features common to all stores (retries, limits, counters) are decorators, one per
// file, that take a [Layer] and are one. The usual stack is Retry(Limit(Meter(store))): the meter sees every
// try, and a waiting retry holds no place in the limiter.
//
// Every implementation passes the conformance suite in the tests of package s3.
//
// Traps:
//   - Key order is the byte order of whole keys, which is not the order of a directory walk:
//     "a-b" < "a/b" < "a0".
//   - A key is any string. "a//b", "..", and "a" beside "a/b" are legal in S3; [Dir] cannot hold
//     them and says not found.
//   - An object without an ETag cannot be pinned; stores refuse it in listings.
//   - A store's own timeout is KindTransient; only the caller's context ends with a bare
//     context error, so errors.Is(err, context.Canceled) means that the caller gave up.
//
// More than 40 names are exported: the contract of stores, its errors, and each decorator with its settings and
// counters.
package objstore

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"
)

// Object names one immutable version of one object. An overwritten object has another ETag, and is then another
// Object with the same Key.
type Object struct {
	Key     string // full key in the store, "/" between folders
	Size    int64  // bytes
	ETag    string // opaque version tag without quotes; never empty in a listing
	ModTime time.Time
}

// Reader reads objects. Implementations are safe for concurrent use by hundreds of goroutines.
//
// All errors except the caller's own context error are (or wrap) an [*Error].
type Reader interface {
	// Stat returns the current version of key, or KindNotFound.
	Stat(ctx context.Context, key string) (Object, error)

	ReaderAt

	// List yields every object whose key begins with prefix and is above after, in key order: a failed listing of
	// millions of keys need not start again. The sequence ends after the first non-nil error. Breaking out of it early
	// leaks nothing.
	List(ctx context.Context, prefix, after string) iter.Seq2[Object, error]
}

// ReaderAt is what a [Reader] does with objects that are known.
type ReaderAt interface {
	// ReadAt fills p with the object's bytes from off: all of p, or an error. It fails with KindChanged if the store
	// has another version than o.ETag, with KindNotFound if the object does not exist, and with KindInvalid if [off,
	// off+len(p)) is not inside [0, o.Size). The caller owns p again when ReadAt returns, even on error; its content
	// is then undefined. len(p) == 0 is a no-op.
	ReadAt(ctx context.Context, o Object, p []byte, off int64) error
}

// IsPrefix reports whether o is a prefix in a level listing rather than an object.
func (o Object) IsPrefix() bool { return o.ETag == "" && strings.HasSuffix(o.Key, "/") }

// Layer is what stores and decorators have in common.
type Layer interface {
	Reader
	SpanReader
	Uploader

	// ListLevel yields the objects directly under prefix and, as Objects whose [Object.IsPrefix] is true and whose Key
	// ends in "/", the prefixes one level below it, so that a large listing can be split and run in parallel. Objects
	// and prefixes each come in key order, interleaved in any way. prefix is empty or ends in "/". It is a sequence,
	// not a slice, because one folder can contain ten million objects. It ends after the first non-nil error.
	ListLevel(ctx context.Context, prefix string) iter.Seq2[Object, error]
}

// Store is the full interface of a bucket or a folder.
type Store interface {
	Layer

	// Check finds out within seconds whether the store is reachable, exists and can be listed. Its error names the
	// store, the cause and the remedy.
	Check(ctx context.Context) error
}

// Kind says what an error means for the caller. It is mapped once to an errno (fusefs) and once to
// a gRPC code (loader).
type Kind uint8

// The kinds of errors.
const (
	KindOther     Kind = iota // not classified; EIO
	KindNotFound              // no such key or bucket
	KindChanged               // the object has another ETag than the one asked for
	KindDenied                // credentials missing, wrong, expired, or without the right
	KindInvalid               // the request can never succeed as it is (bad range, skewed clock, bad endpoint)
	KindTransient             // worth trying again: 5xx, throttling, timeout, reset, short body
	KindExists                // an object with this key exists already
)

var kindNames = [...]string{"error", "not found", "changed", "access denied", "invalid request", "temporary failure",
	"exists already"}

// NumKinds is how many kinds there are.
const NumKinds = len(kindNames)

// Label returns the kind as one word, for a metric.
func (k Kind) Label() string { return strings.ReplaceAll(k.String(), " ", "_") }

// String returns the kind in words.
func (k Kind) String() string { return kindNames[k] }

// Error is a failed operation on a store. Its text names the thing, the cause and, if known, the remedy. It never
// contains a credential.
type Error struct {
	Op     string // "read", "stat", "list", "put", "delete", "check", "open"
	Key    string // key or prefix, with the store's URL if that helps
	Kind   Kind
	Remedy string // what the user can do about it; may be empty
	Err    error  // the cause
	// SlowDown: the store asks for fewer requests (503 SlowDown, 429). Kind is KindTransient then.
	SlowDown bool
	// AtOnce: the obstacle is gone, and the next try need not wait. Kind is KindTransient then.
	AtOnce bool
}

func (e *Error) Error() string {
	s := e.Op + " " + e.Key + ": " + e.Kind.String()
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	if e.Remedy != "" {
		s += " (" + e.Remedy + ")"
	}
	return s
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// KindOf returns the kind of the first [*Error] in err's chain, else KindOther.
func KindOf(err error) Kind {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Kind
	}
	return KindOther
}

// Exists is the error of PutNew for a key that exists.
func Exists(key string) error {
	return &Error{Op: "put", Key: key, Kind: KindExists, Err: errors.New("an object with this key exists"),
		Remedy: "choose another destination, or delete the object first"}
}

// CheckRange returns KindInvalid unless [off, off+n) lies inside the object.
func CheckRange(o Object, n int, off int64) error {
	// Subtraction, because off+n can overflow.
	if off >= 0 && off <= o.Size && int64(n) <= o.Size-off {
		return nil
	}
	return &Error{Op: "read", Key: o.Key, Kind: KindInvalid,
		Err: fmt.Errorf("range of %d bytes at %d is not inside the object's %d bytes", n, off, o.Size)}
}

// RemedyChanged is the remedy for a changed object.
const RemedyChanged = "restore the object, or move to the new version of the dataset with shoal refresh"

// Changed is the error for an object whose version is now etag ("" if not known).
func Changed(o Object, etag string) error {
	cause := errors.New("the store has another version than the dataset (ETag " + o.ETag + ")")
	if etag != "" {
		cause = fmt.Errorf("the store now holds ETag %s, the dataset has %s", etag, o.ETag)
	}
	return &Error{Op: "read", Key: o.Key, Kind: KindChanged, Err: cause,
		Remedy: RemedyChanged}
}

// Priority orders the requests that wait for a connection.
type Priority uint8

// Priorities, lowest first.
const (
	Prefetch Priority = iota // nobody waits for it yet
	Demand                   // a reader waits for it now
)

// PriorityOf returns the context's priority now; Demand if it has no [Urgency], so that such a caller is never
// starved.
func PriorityOf(ctx context.Context) Priority {
	if u := urgencyOf(ctx); u != nil && !u.Raised() {
		return Prefetch
	}
	return Demand
}
