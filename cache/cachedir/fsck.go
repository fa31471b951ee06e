package cachedir

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
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
		return fmt.Errorf("%s is not a cache directory: %w", dir, err)
	}
	return nil
}

// Fsck checks every record, manifest and layout of a cache directory that is not in use, and repairs what it can. Its
// error means that it could not check; findings are in the report. secret is as in Options.
func Fsck(ctx context.Context, dir string, secret *crypt.Secret, repair bool, progress func(done, total int64)) (*Report, error) {
	if err := Is(dir); err != nil {
		return nil, err
	}
	r := &Report{Findings: []string{}}
	if err := r.kinds(dir, ownKinds, repair); err != nil {
		return nil, err
	}
	if err := r.format(dir, repair); err != nil {
		return nil, err
	}
	if r.unfit(repair) {
		return r, nil
	}
	key, unlock, err := catalog.Lock(dir, secret, false)
	if err != nil {
		return nil, err
	}
	err = fsck(ctx, dir, key, repair, r, progress)
	return r, errors.Join(err, unlock())
}

func fsck(ctx context.Context, dir string, key *crypt.Key, repair bool, r *Report, progress func(done, total int64)) (err error) {
	if err := r.kinds(dir, innerKinds, repair); err != nil || r.unfit(repair) {
		return err
	}
	// A damaged catalog reports that itself and starts empty: all its content can be rebuilt.
	quiet := slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelError + 1}))
	c, err := catalog.Open(dir, catalog.Options{Logger: quiet, Key: key})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if aside := c.Rebuilt(); aside != "" {
		r.find("%s: the catalog was damaged and was moved to %s (sources are listed again, and segments scanned, at the next mount)", filepath.Join(dir, "facts"), aside)
	}
	if err := r.sources(dir, c, repair); err != nil {
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
		id, ok := datasetOf(e)
		if !ok {
			r.note("%s: not a file of shoal (left alone)", path)
			continue
		}
		rep, err := segment.Check(path, segment.CheckOptions{Context: ctx, Key: key, Repair: repair, Index: c.Index(id), MaxFindings: maxFindings,
			Progress: func(done, _ int64) { progress(before+done, total) }})
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
	return nil
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
		names := []string{filepath.Join(dir, "manifests", src.Manifest)}
		if src.Layout != "" {
			names = append(names, filepath.Join(dir, "layouts", src.Layout))
		}
		for _, name := range names {
			if !repair {
				continue
			}
			if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}
