package engine

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/shard"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

// Dataset is one version of the engine's dataset by sample number, for a feed. It does not change when the engine
// moves to another version.
type Dataset struct {
	*catalog.Samples
	e *Engine
	v *view
}

// Dataset returns the version in force.
func (e *Engine) Dataset() *Dataset {
	v := e.cur.Load()
	return &Dataset{v.samples, e, v}
}

// Version returns the dataset version, hex of a SHA-256.
func (d *Dataset) Version() string { return d.v.manifest.Version() }

// Columns returns the first row of the dataset's table objects (Rows), nil if it has none, and the path of
// one such row.
func (d *Dataset) Columns(ctx context.Context) (row []byte, path string, err error) {
	m := d.v.manifest
	path = m.Path(d.v.samples.File(0))
	if !d.e.cfg.rows() || !strings.HasSuffix(path, shard.RowSuffix) {
		return nil, "", nil
	}
	path = path[:strings.LastIndexByte(path, '/')]
	node, ok := m.Find(path + "/" + shard.ColumnsName)
	if !ok || node.IsDir {
		return nil, "", fmt.Errorf("%s: its first row is not in the catalog (refresh the dataset)", path)
	}
	row = make([]byte, m.Size(node.Index))
	_, err = d.v.volume.ReadAt(ctx, node.Index, row, 0)
	return row, path, err
}

// Selection names the samples: the version, and the pattern for its files.
func (d *Dataset) Selection() string { return d.Version() + " " + d.e.cfg.Samples }

// FitsDir is the folder for values computed once per version of a dataset.
func (d *Dataset) FitsDir() string { return d.e.host.FitsDir() }

// SealFit encodes a value computed from a dataset's content for the file name in FitsDir.
func (d *Dataset) SealFit(name string, b []byte) []byte {
	if k := d.e.host.Key; k != nil {
		return k.Sealer("fits", nil).Seal(nil, nil, b, []byte(name))
	}
	return b
}

// OpenFit is the reverse of SealFit.
func (d *Dataset) OpenFit(name string, b []byte) ([]byte, error) {
	if k := d.e.host.Key; k != nil {
		return k.Sealer("fits", nil).Open(nil, nil, b, []byte(name))
	}
	return b, nil
}

// Path returns a sample's path.
func (d *Dataset) Path(sample int) string { return d.v.manifest.Path(d.File(sample)) }

// Size returns a sample's length in bytes.
func (d *Dataset) Size(sample int) int64 { return d.v.manifest.Size(d.File(sample)) }

// Begin announces that the samples of seq will be read roughly in this order from position start on, with this weight
// against other readers (0 is 1), each with the parts of the given extensions. End closes the stream.
func (d *Dataset) Begin(name string, seq order.Order, start, weight int, parts ...string) (*run.Stream, error) {
	files := filesOf(seq, d.v.samples)
	o := d.e.orders.options(name, d.v, once(files))
	o.Start, o.Weight, o.Parts, o.Has = start, weight, parts, nil
	return d.e.orders.beginSession(o)
}

// once is an order without epochs after the first.
func once(o order.Order) func(epoch int) order.Order {
	return func(epoch int) order.Order {
		if epoch > 0 {
			return nil
		}
		return o
	}
}

// End closes a stream that Begin returned.
func (d *Dataset) End(s *run.Stream) { d.e.orders.endSession(s) }

// Groups returns the samples by shard, and the name of this packing; nil if each sample is an object.
func (d *Dataset) Groups() (order.Groups, string) {
	if d.v.groups == nil {
		return nil, ""
	}
	return d.v.groups(), d.v.layout.Version()[:16]
}

func (r *orders) beginSession(o run.Options) (*run.Stream, error) {
	s, err := r.engine.host.runner.Begin(o)
	if err == nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.sessions[s] = struct{}{}
	}
	return s, err
}

func (r *orders) endSession(s *run.Stream) {
	s.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.sessions, s)
}

// Facts returns the facts of this version that orders may depend on.
func (d *Dataset) Facts() order.Facts { return d.v.facts() }

// WriteOrder writes the samples of spec for its epoch, one a line, by number or by path.
func (e *Engine) WriteOrder(w io.Writer, spec order.Spec, paths bool) error {
	v := e.cur.Load()
	o, err := spec.Over(v.facts(), spec.Epoch())
	if err != nil {
		return err
	}
	if !paths {
		return WriteNumbers(w, o)
	}
	return writeLines(w, o, func(line []byte, sample int) []byte {
		return v.manifest.AppendPath(line, v.samples.File(sample))
	})
}

// WriteNumbers writes an order's samples, one a line.
func WriteNumbers(w io.Writer, o order.Order) error {
	return writeLines(w, o, func(line []byte, sample int) []byte { return strconv.AppendInt(line, int64(sample), 10) })
}

// writeLines writes whole lines at once: what a daemon answers is text, and half a character of a path is none.
func writeLines(w io.Writer, o order.Order, appendLine func(line []byte, sample int) []byte) error {
	var lines []byte
	for pos := range o.Len() {
		lines = append(appendLine(lines, o.At(pos)), '\n')
		if len(lines) < 1<<16 && pos < o.Len()-1 {
			continue
		}
		if _, err := w.Write(lines); err != nil {
			return err
		}
		lines = lines[:0]
	}
	return nil
}

// filesOf maps an order over samples to one over files. It takes what order.Index does.
func filesOf(o order.Order, samples *catalog.Samples) order.Locator {
	return fileOrder{order.Index(o), samples}
}

type fileOrder struct {
	samples order.Locator
	view    *catalog.Samples
}

func (o fileOrder) Len() int { return o.samples.Len() }

func (o fileOrder) At(pos int) int { return o.view.File(o.samples.At(pos)) }

func (o fileOrder) Find(file, from int) int {
	sample, ok := o.view.Sample(file)
	if !ok {
		return -1
	}
	return o.samples.Find(sample, from)
}
