package loader

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/shoalfs/shoal/cache/objstore"
)

// codedError gives an error its gRPC status code.
type codedError struct {
	code codes.Code
	err  error
}

func (e *codedError) Error() string { return e.err.Error() }
func (e *codedError) Unwrap() error { return e.err }

func coded(c codes.Code, format string, args ...any) error {
	return &codedError{c, fmt.Errorf(format, args...)}
}

func invalid(f string, args ...any) error { return coded(codes.InvalidArgument, f, args...) }
func refused(f string, args ...any) error { return coded(codes.FailedPrecondition, f, args...) }

// The causes that end a session from outside.
var (
	errFenced   = coded(codes.Aborted, "a newer stream was opened for this session and rank; this one ends")
	errStopping = coded(codes.Unavailable, "the server is stopping: open again with the last state")
	// Most clients without a lease are gone. One that is still there has done nothing wrong.
	errLeaseGone = coded(codes.Unavailable,
		"the client's handover connection has closed, which ends its use of slots: open again with the last state")
)

// left is the error of a session whose client is gone.
func left(err error) error { return coded(codes.Canceled, "client disconnected: %w", err) }

// storeCodes maps store errors to status codes, for the whole feed.
var storeCodes = map[objstore.Kind]codes.Code{
	objstore.KindNotFound:  codes.FailedPrecondition, // the dataset's version no longer exists
	objstore.KindChanged:   codes.FailedPrecondition,
	objstore.KindDenied:    codes.PermissionDenied,
	objstore.KindInvalid:   codes.FailedPrecondition,
	objstore.KindTransient: codes.Unavailable,
	objstore.KindOther:     codes.Internal,
}

// badSample is a sample that the transform cannot use.
type badSample struct {
	id   int
	path string
	err  error
}

func (e *badSample) Error() string { return fmt.Sprintf("bad sample %d (%s): %v", e.id, e.path, e.err) }
func (e *badSample) Unwrap() error { return e.err }

// Code returns the gRPC code for an error of the feed.
func Code(err error) codes.Code {
	var c *codedError
	var bad *badSample
	var store *objstore.Error
	switch {
	case err == nil:
		return codes.OK
	case errors.As(err, &c):
		return c.code
	case errors.As(err, &bad):
		return codes.DataLoss
	case errors.As(err, &store):
		return storeCodes[store.Kind]
	case errors.Is(err, context.Canceled):
		return codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return codes.DeadlineExceeded
	}
	if st, ok := status.FromError(err); ok { // of the connection itself
		return st.Code()
	}
	return codes.Internal
}

// toStatus converts an error to one that gRPC sends.
func toStatus(err error) error {
	if err == nil {
		return nil
	}
	return status.Error(Code(err), err.Error())
}
