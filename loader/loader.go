// Package loader is the batch feed: it cuts an epoch's order into batches, has workers read and transform the
// samples, and sends the batches over gRPC. Package feedpb is the protocol, package feedclient the Go client, and
// python/shoal the client for trainers.
//
// A session's stream is a pure function of its Open and the [State] in it. The server stores no progress: the state
// after each batch travels with the batch, and only the trainer keeps it. So nothing here is persisted, and a
// restart of the server loses nothing.
//
// Rules for this code:
//   - A batch counts once the trainer has taken it. A batch that was sent but lies in a buffer does not count; hence
//     the state is in the batch's header, and never asked from the server.
//   - Errors are delivered in order too: a batch that cannot be built fails the stream at its place, after all
//     batches before it, whatever the timing of the workers.
//   - gRPC keeps references to a batch's buffer after SendMsg has returned, and loses them silently when a connection
//     breaks. So buffers are reused only when gRPC frees them, but their reservation is given back at the latest by
//     the session's end.
//   - Clients can write to slots at any time: nothing in a slot is read back, and only a Release or the end of the
//     handover connection says that a client has finished with it.
//   - Sessions that share a pass come and go at any time: a batch belongs to no session. It keeps the source and the
//     counters of the session that began it, even after that session has left.
//   - The reads of a session are not in its order: workers run ahead within the window. Several goroutines call
//     [Stream.Read], each position once, with positions near each other.
//
// More than 40 names are exported: the server, what it asks of a dataset and a transform, its statistics, and
// who may connect.
package loader

import (
	"context"

	"github.com/shoalfs/shoal/internal/rows"
	"github.com/shoalfs/shoal/prefetch/order"
)

// Dataset is a session's view of the engine. All methods are safe for concurrent use. All results except Begin's are
// constant: another version is another Dataset.
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
	// Parts reports whether any sample has a part with this extension (the text after the first dot): another file with
	// the same folder and stem, as 7.jpg, 7.json, 7.mask.png; and whether such files are samples themselves.
	Parts(ext string) (found, numbered bool)
	// Begin announces that the samples of seq will be read in about this order from position start on, so that the
	// engine can prefetch them. The name is for logs and statistics, and unique among the open streams. Streams that
	// compete share by weight, 1 to MaxWeight. The stream of a reader that also reads parts of each sample is a
	// PartStream.
	Begin(name string, seq order.Order, start, weight int, parts ...string) (Stream, error)
}

// MaxWeight is the largest weight of a session.
const MaxWeight = 1000

// Stream reads the samples of an announced order.
type Stream interface {
	// Read returns the whole sample at position pos of the announced order. The bytes are valid
	// and immutable until release is called, once. Errors of the store wrap an objstore.Error.
	// It is called by several goroutines at once and at most once for a position.
	Read(ctx context.Context, pos int) (data []byte, release func(), err error)
	// Close ends the announcement. No Read is in progress or follows; some samples may not have been read.
	Close() error
}

// CodedStream is a Stream of a dataset that may keep samples in another form, which some transforms know.
type CodedStream interface {
	Stream
	// ReadCoded is Read that may return the sample in that form.
	ReadCoded(ctx context.Context, pos int) (data []byte, release func(), err error)
}

// Decodes is a Transform that may take samples in that form.
type Decodes interface {
	Decodes() bool
}

// The types that transforms have too.
type (
	// Draw selects the random numbers that a transform uses. Equal draws give equal results.
	Draw = rows.Draw
	// Field is one array of a batch beside label, id and valid.
	Field = rows.Field
	// Row is where a transform writes.
	Row = rows.Row
	// Sample is what a transform reads. An error of its Part ends the stream.
	Sample = rows.Sample
)

// Transform turns a stored sample into one row of a batch. Implementations are safe for concurrent use.
type Transform interface {
	// Make writes the whole row. It neither keeps nor changes src. Any error but those of Part means that the sample is
	// bad.
	Make(src Sample, at Draw, row *Row) error
	// Fields describes a row; the caller must not change it.
	Fields() []Field
	// Layout is "nchw" or "nhwc", or empty if it has no meaning.
	Layout() string
	// String is the canonical spec. Compiling it gives an equal transform.
	String() string
	// Hash identifies the transform in states: it differs whenever any output may differ.
	Hash() string
}

// Mixer is a Transform with a step over the whole batch once all its rows are done: mixup and cutmix.
type Mixer interface {
	Transform
	// Mix changes rows in place. at.Sample is the number of the batch in its epoch, at.Occurrence the rank. Rows
	// without a usable sample are nil and must stay as they are.
	Mix(at Draw, rows []*Row)
}

// Compiler parses a transform spec for a dataset. The dataset is nil if only the text is to be checked. A transform
// that reads the dataset first does so within ctx.
type Compiler func(ctx context.Context, spec string, ds Dataset) (Transform, error)

// Memory is the byte ledger in which batches are reserved before they are allocated.
type Memory interface {
	// Reserve waits until n bytes are available. Any error other than the context's means that they never will be.
	Reserve(ctx context.Context, n int64) error
	// TryReserve reserves n bytes if they are available now.
	TryReserve(n int64) bool
	// Release gives n reserved bytes back.
	Release(n int64)
}
