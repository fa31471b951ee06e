package engine

import (
	"github.com/shoalfs/shoal/prefetch/order"
)

// Dataset is one version of the engine's dataset by sample number, for a feed. It stays what it is
// when the engine moves to another version.
type Dataset struct {
	e *Engine
	v *view
}

// Dataset returns the version in force.
func (e *Engine) Dataset() *Dataset { return &Dataset{e, e.cur.Load()} }

// Version returns the dataset version, hex of a SHA-256.
func (d *Dataset) Version() string { return d.v.manifest.Version() }

// Len returns the number of samples.
func (d *Dataset) Len() int { return d.v.samples.Len() }

// Label returns the index in Classes of a sample's class folder.
func (d *Dataset) Label(sample int) int { return d.v.samples.Label(sample) }

// Path returns a sample's path.
func (d *Dataset) Path(sample int) string { return d.v.manifest.Path(d.v.samples.File(sample)) }

// Size returns a sample's length in bytes.
func (d *Dataset) Size(sample int) int64 { return d.v.manifest.Size(d.v.samples.File(sample)) }

// Classes returns the class folders, sorted.
func (d *Dataset) Classes() []string { return d.v.samples.Classes() }

// Begin announces that the samples of seq will be read in about this order from position start on.
// End closes the stream.
func (d *Dataset) Begin(name string, seq order.Order, start int) (*Stream, error) {
	files := fileOrder{seq, d.v.samples}
	s, err := d.e.newStream(name, d.v.volume, func(epoch int) order.Order {
		if epoch > 0 {
			return nil
		}
		return files
	}, 0, start)
	if err != nil {
		return nil, err
	}
	d.e.mu.Lock()
	defer d.e.mu.Unlock()
	d.e.sessions[s] = struct{}{}
	return s, nil
}

// End closes a stream that Begin returned.
func (d *Dataset) End(s *Stream) {
	s.Close()
	d.e.mu.Lock()
	defer d.e.mu.Unlock()
	delete(d.e.sessions, s)
}
