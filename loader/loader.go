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
//   - Slots are memory that clients can write to at any time: nothing in them is read back, and nothing but
//     a Release or the end of the handover connection says that a client has finished with one.
//   - Sessions that share a pass come and go at any moment: a batch belongs to no session, and is built
//     on with the source and the counters of the one that began it, even if that one has left.
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
	// Groups returns the samples by the shard that holds them, for orders over shards, and a name
	// of this packing; nil if each is an object of its own.
	Groups() (groups order.Groups, packing string)
	// Begin announces that the samples of seq will be read in about this order from position
	// start on, so that the engine can stay ahead. The name is for logs and statistics and is
	// unique among the streams that are open. Where several streams want more than there is, each
	// gets its part by weight, 1 to MaxWeight.
	Begin(name string, seq order.Order, start, weight int) (Stream, error)
}

// MaxWeight is the largest weight of a session.
const MaxWeight = 1000

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

// Field is one array of a batch beside label, id and valid: its row i is made of sample i.
type Field struct {
	Name  string // lower case; the first field of a transform is "data"
	DType string // uint8, int32, int64, float32, ... as numpy names them; fp16, bf16 and fp32 are understood too
	Shape []int  // of a row, without the batch's dimension
	Bytes int    // of a row
}

// Sample is what a transform reads.
type Sample struct {
	Data []byte
	// Part returns the file that belongs to the sample by this extension, such as "json" or "cls": the
	// one beside it with the same stem. It is nil without error if there is none, valid until Apply
	// returns, and not to be changed. An error of the store ends the stream. Part itself may be nil.
	Part func(ctx context.Context, ext string) ([]byte, error)
}

// Row is where a transform writes.
type Row struct {
	Fields [][]byte // one for each of Fields(), of its Bytes; they hold garbage before
	Label  int64    // the dataset's label of the sample, -1 if it has none; may be changed

	Width, Height uint32 // of a picture as it is stored; a transform of pictures sets them
}

// Transform turns a stored sample into one row of a batch. Implementations are safe for concurrent
// use.
type Transform interface {
	// Apply writes the row, all of it. It neither keeps nor changes what src holds. Any error but
	// the context's and those of Part means that the sample is bad.
	Apply(ctx context.Context, src Sample, at Draw, row *Row) error
	// Fields describes a row; the caller does not change it.
	Fields() []Field
	// Layout is "nchw" or "nhwc", or empty where that means nothing.
	Layout() string
	// String is the canonical spec. Compiling it gives an equal transform.
	String() string
	// Hash names the transform in states: it differs whenever any output may differ.
	Hash() string
}

// Mixer is a Transform with a step over the whole batch, once all its rows are made: mixup and cutmix.
type Mixer interface {
	Transform
	// Mix changes rows in place. at's Sample is the number of the batch in its epoch, and its
	// Occurrence is the rank. Rows without a usable sample are nil and have to stay as they are.
	Mix(at Draw, rows []*Row)
}

// Compiler parses a transform spec for a dataset. The dataset is nil where only the text is to be
// checked; a transform that has to read it first does so within ctx.
type Compiler func(ctx context.Context, spec string, ds Dataset) (Transform, error)

// Memory is the byte ledger that batches are reserved from before they are allocated.
type Memory interface {
	// Reserve waits until n bytes are to be had. Any error but the context's means that they
	// never can be.
	Reserve(ctx context.Context, n int64) error
	// Release gives n reserved bytes back.
	Release(n int64)
}
