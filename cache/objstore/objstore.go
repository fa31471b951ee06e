// Package objstore is the contract between Shoal and whatever holds the objects, and its
// implementations: [S3] (minio-go), [Dir] (a local folder) and [Mem] (tests). Concerns that are the
// same for every store (retrying, limiting, counting, scripted faults) are decorators, one a file,
// that take a [Reader] and are a [Reader].
//
// Every implementation passes the one conformance suite in package objstoretest.
package objstore

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"
)

// Object names one immutable version of one object. An object that is overwritten gets another
// ETag and is then another Object with the same Key.
type Object struct {
	Key     string // full key in the store, "/" between folders
	Size    int64  // bytes
	ETag    string // opaque version tag without quotes; never empty in a listing
	ModTime time.Time
}

// Reader reads objects. Implementations are safe for concurrent use by hundreds of goroutines.
//
// All errors but the caller's own context error are (or wrap) an [*Error].
type Reader interface {
	// Stat returns the current version of key, or KindNotFound.
	Stat(ctx context.Context, key string) (Object, error)

	// ReadAt fills p with the object's bytes from off: the whole of p or an error, never less.
	// It fails with KindChanged when the store holds another version than o.ETag, with
	// KindNotFound when the object is gone, and with KindInvalid when [off, off+len(p)) is not
	// inside [0, o.Size). The caller owns p again when ReadAt returns, also on error; its
	// content is then undefined. len(p) == 0 is a no-op.
	ReadAt(ctx context.Context, o Object, p []byte, off int64) error

	// List yields every object whose key begins with prefix, in key order. The sequence ends
	// after the first non-nil error. Breaking out of it early leaks nothing.
	List(ctx context.Context, prefix string) iter.Seq2[Object, error]
}

// Prefixer is implemented by stores that can list one level of the key space, so that a large
// listing can be split and run in parallel.
type Prefixer interface {
	// ListLevel returns the objects directly under prefix and the prefixes one level below it
	// (each ending in "/"), both in key order. prefix is empty or ends in "/".
	ListLevel(ctx context.Context, prefix string) (objects []Object, prefixes []string, err error)
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
)

var kindNames = [...]string{"error", "not found", "changed", "access denied", "invalid request", "temporary failure"}

// String returns the kind in words.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// Error is a failed operation on a store. Its text names the thing, the cause and, where one is
// known, the remedy. It never holds a credential.
type Error struct {
	Op     string // "read", "stat", "list"
	Key    string // key or prefix, with the store's URL where that helps
	Kind   Kind
	Remedy string // what the user can do about it; may be empty
	Err    error  // the cause
}

// Error implements error.
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
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return KindOther
}

// Priority orders the requests that wait for a connection.
type Priority uint8

// Priorities, lowest first.
const (
	Prefetch Priority = iota // nobody waits for it yet
	Demand                   // a reader waits for it now
)

type priorityKey struct{}

// WithPriority returns a context whose requests have priority p.
func WithPriority(ctx context.Context, p Priority) context.Context {
	return context.WithValue(ctx, priorityKey{}, p)
}

// PriorityOf returns the context's priority; Demand where none was set, so that a caller who says
// nothing is never starved.
func PriorityOf(ctx context.Context) Priority {
	if p, ok := ctx.Value(priorityKey{}).(Priority); ok {
		return p
	}
	return Demand
}
