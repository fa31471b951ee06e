package cachedir

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/cache/segment"
)

// Report is what a check of a cache directory found.
type Report struct {
	Datasets int      `json:"datasets"` // with segments
	Segments int      `json:"segments"`
	Records  int      `json:"records"` // that are right
	Bytes    int64    `json:"bytes"`   // of segments
	Damage   int      `json:"damage"`  // findings that are damage; 0 is clean
	Findings []string `json:"findings"`
	More     int      `json:"more"` // findings that are not listed
}

const maxFindings = 100

// find notes damage.
func (r *Report) find(format string, args ...any) {
	r.Damage++
	r.note(format, args...)
}

func (r *Report) note(format string, args ...any) {
	if len(r.Findings) == maxFindings {
		r.More++
		return
	}
	r.Findings = append(r.Findings, fmt.Sprintf(format, args...))
}

// Is fails for a folder that is not a cache directory. A cache directory that lost its FORMAT still counts as one.
func Is(dir string) error {
	if _, err := os.Stat(filepath.Join(dir, "FORMAT")); err != nil && !catalog.Used(dir) {
		return fmt.Errorf(
			"%s is not a cache directory: %w (give a folder that was a --cache-dir, as its user or as root; "+
				"shoal cache ls shows the default ones)", dir, err)
	}
	return nil
}

// FsckOptions of a Fsck.
type FsckOptions struct {
	Secret   *crypt.Secret // as in Options
	Coder    Coder         // nil: whether recoded records can be restored is not checked
	Repair   bool          // what can be
	Progress func(done, total int64)
}

// Coder restores recoded files once it has learned their tables.
type Coder interface {
	Learn(tables []byte) (encode func(dst, file []byte) ([]byte, bool), err error)
	Decode(dst, coded []byte) ([]byte, error)
}

// Fsck checks every record, manifest and layout of a cache directory that is not in use. Its error means that it could
// not check; findings are in the report.
func Fsck(ctx context.Context, dir string, o FsckOptions) (*Report, error) {
	if err := Is(dir); err != nil {
		return nil, err
	}
	r := &Report{Findings: []string{}}
	if err := r.kinds(dir, ownKinds, o.Repair); err != nil {
		return nil, err
	}
	if err := r.format(dir, o.Repair); err != nil {
		return nil, err
	}
	if r.unfit(o.Repair) {
		return r, nil
	}
	key, unlock, err := catalog.Lock(dir, o.Secret, false)
	if err != nil {
		return nil, WithRemedy(err, dir)
	}
	err = fsck(ctx, dir, key, o, r)
	return r, errors.Join(err, unlock())
}

func fsck(ctx context.Context, dir string, key *crypt.Key, o FsckOptions, r *Report) (err error) {
	if err := r.kinds(dir, innerKinds, o.Repair); err != nil || r.unfit(o.Repair) {
		return err
	}
	// A damaged catalog reports that itself and starts empty: all its content can be rebuilt.
	c, err := catalog.Open(dir, catalog.Options{Logger: slog.New(slog.DiscardHandler), Key: key})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := r.facts(dir, c, o.Repair); err != nil {
		return err
	}
	if err := r.sources(dir, c, o.Repair); err != nil {
		return err
	}
	segments := filepath.Join(dir, "segments")
	entries, err := os.ReadDir(segments)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var total, before int64
	for _, e := range entries {
		n, err := folderBytes(filepath.Join(segments, e.Name()))
		if err != nil && e.IsDir() {
			return err
		}
		total += n
	}
	for _, e := range entries {
		path := filepath.Join(segments, e.Name())
		id, ok := catalog.ParseID(e.Name())
		if !ok || !e.IsDir() {
			r.note("%s: not a file of shoal (left alone)", path)
			continue
		}
		coded := r.coded(c, id, o.Coder)
		rep, err := segment.Check(path,
			segment.CheckOptions{Context: ctx, Key: key, Repair: o.Repair, Index: c.Index(id),
				MaxFindings: maxFindings, Coded: coded, Progress: func(done, _ int64) {
					o.Progress(before+done, total)
				}})
		if err != nil {
			return fmt.Errorf("%s: %w", hex.EncodeToString(id[:4]), err)
		}
		r.Datasets++
		r.Segments += rep.Segments
		r.Records += rep.Records
		r.Bytes += rep.Bytes
		for _, f := range rep.Findings {
			r.note("%s", f)
		}
		r.More += rep.Omitted
		r.Damage += rep.Damage()
		before += rep.Bytes
	}
	for _, line := range c.Mended() {
		r.find("%s", line)
	}
	return nil
}

// facts finds out whether facts were lost together with their copy, and begins new ones.
func (r *Report) facts(dir string, c *catalog.Catalog, repair bool) error {
	path := filepath.Join(dir, "facts")
	what := "the catalog was damaged, as its copy, and was moved to " + c.Rebuilt()
	if c.Rebuilt() == "" {
		what = "the catalog and its copy are missing"
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		cached, err := fs.Glob(os.DirFS(dir), "segments/"+datasetID+"/"+number+".seg")
		if err != nil || len(cached) == 0 { // nothing to know yet
			return err
		}
	}
	const remedy = "sources are listed again at the next mount, and keep what is cached; quotas and pins must be " +
		"set again"
	r.find("%s: %s (%s)", path, what, remedy)
	if !repair {
		return nil
	}
	return c.Begin()
}

// coded returns what checks a dataset's recoded records, nil if it cannot be checked.
func (r *Report) coded(c *catalog.Catalog, id [16]byte, coder Coder) func(payload []byte, size int64) error {
	if coder == nil {
		return nil
	}
	for _, t := range c.Coding(id) {
		if _, err := coder.Learn(t); err != nil {
			r.note("%x: recoded files are not checked: %v", id[:4], err)
			return nil
		}
	}
	var file []byte
	return func(payload []byte, size int64) (err error) {
		if file, err = coder.Decode(file[:0], payload); err == nil && int64(len(file)) != size {
			err = fmt.Errorf("%d bytes were restored of %d", len(file), size)
		}
		return err
	}
}

// sources checks the manifests and layouts that the catalog names.
func (r *Report) sources(dir string, c *catalog.Catalog, repair bool) error {
	sources, err := c.Sources()
	if err != nil {
		return err
	}
	for _, src := range sources {
		m, l, err := c.Manifest(src.Name)
		if err == nil {
			err = m.Verify()
			if l != nil {
				err = errors.Join(err, l.Verify(), l.Close())
			}
			err = errors.Join(err, m.Close())
		}
		if err == nil || errors.Is(err, fs.ErrNotExist) { // a missing one is listed at its next mount
			continue
		}
		r.find("%s: %v (the source is listed again at its next mount)", src.Name, err)
		if !repair {
			continue
		}
		err = os.Remove(filepath.Join(dir, "manifests", src.Manifest))
		if src.Layout != "" && (err == nil || errors.Is(err, fs.ErrNotExist)) {
			err = os.Remove(filepath.Join(dir, "layouts", src.Layout))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
