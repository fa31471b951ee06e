// Package loader is the batch feed: it cuts an epoch's order into batches, has the samples read and
// transformed by workers, and sends the batches over gRPC (package feedpb is the protocol, package
// feedclient a client in Go, python/shoal the one that trainers use).
//
// A session's stream is a pure function of what was opened and the [State] it was opened with. The
// server keeps no progress: the state after each batch travels with the batch, and the trainer's
// copy of it is the only truth. So nothing here is persisted, and restarting the server loses
// nothing.
//
// Traps:
//   - A batch counts once the trainer has taken it. Batches that were sent, but lie in a buffer, do
//     not; hence the state is in the batch's header and not asked from the server.
//   - Errors are delivered in order too: a batch that cannot be built fails the stream when its turn
//     comes, after all batches before it, whatever the timing of the workers.
//   - gRPC keeps references to a batch's buffer after SendMsg has returned and drops them without
//     notice when a connection breaks. Buffers are therefore reused only when gRPC frees them, but
//     their reservation is given back by the session's end at the latest.
//   - The order of a session is not the order of the reads: workers run ahead within the window.
//     [Stream.Read] is called with positions near each other, by several goroutines, each position
//     once.
package loader

import (
	"context"

	"github.com/shoalfs/shoal/prefetch/order"
)

// Dataset is what a session needs of the engine. All methods are safe for concurrent use, and all
// answers but Begin's are constant: another version is another Dataset.
type Dataset interface {
	// Version names the content, as hex of a SHA-256.
	Version() string
	// Len returns the number of samples.
	Len() int
	// Label returns a sample's class number, -1 if it has none.
	Label(sample int) int
	// Path names a sample in errors.
	Path(sample int) string
	// Size returns a sample's length in bytes, as pinned by the version.
	Size(sample int) int64
	// Classes returns the names of the classes by label; the caller does not change them.
	Classes() []string
	// Begin announces that the samples of seq will be read in about this order from position
	// start on, so that the engine can stay ahead. The name is for logs and statistics and is
	// unique among the streams that are open.
	Begin(name string, seq order.Order, start int) (Stream, error)
}

// Stream reads the samples of an announced order.
type Stream interface {
	// Read returns the whole sample at position pos of the announced order. The bytes are valid
	// and immutable until release is called, once. Errors of the store wrap an objstore.Error.
	// It is called by several goroutines at once and at most once for a position.
	Read(ctx context.Context, pos int) (data []byte, release func(), err error)
	// Close ends the announcement. No Read is in progress or follows, but samples may not have
	// been read.
	Close() error
}

// Draw says which random numbers a transform has to use. Equal draws give equal results.
type Draw struct {
	Seed       uint64
	Epoch      uint32
	Sample     uint64
	Occurrence uint32 // how often the sample came before in this epoch, over all ranks
}

// Transform turns a stored sample into one row of a batch. Implementations are safe for concurrent
// use.
type Transform interface {
	// Apply writes the row to dst, all of it (it holds garbage before). len(dst) is OutBytes().
	// It neither keeps nor changes src. Any error but the context's means that the sample is bad.
	Apply(ctx context.Context, src []byte, at Draw, dst []byte) error
	// OutBytes is the length of a row.
	OutBytes() int
	// Shape is the shape of a row, without the batch's dimension.
	Shape() []int
	// DType is the element type: uint8, int64, float16 (or fp16), bfloat16 (bf16), float32 (fp32).
	DType() string
	// Layout is "nchw" or "nhwc", or empty where that means nothing.
	Layout() string
	// String is the canonical spec. Compiling it gives an equal transform.
	String() string
	// Hash names the transform in states: it differs whenever any output may differ.
	Hash() string
}

// Compiler parses a transform spec.
type Compiler func(spec string) (Transform, error)

// Memory is the byte ledger that batches are reserved from before they are allocated.
type Memory interface {
	// Reserve waits until n bytes are to be had. Any error but the context's means that they
	// never can be.
	Reserve(ctx context.Context, n int64) error
	// Release gives n reserved bytes back.
	Release(n int64)
}
