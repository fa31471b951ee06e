package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/human"
)

// recoded is a dataset of recoded files in a spool folder: it is objstore.ReaderAt. ETags are hashes of the content, so
// that the same files, recoded in the same way, are the same version of a dataset.
type recoded struct {
	dir     string
	objects []objstore.Object // by key
	kept    atomic.Int64      // unchanged files: not pictures, or broken ones
}

// recode recodes all files of m into a folder under spool. Files of an earlier run of the same recoding are
// reused.
func recode(ctx context.Context, src objstore.ReaderAt, m *catalog.Manifest, r gpuingest.Recode, spool string,
	connections int) (_ *recoded, err error) {
	out := &recoded{objects: make([]objstore.Object, m.Len())}
	if out.dir, err = spoolFolder(spool, m, r.String()); err != nil {
		return nil, err
	}
	cpu := make(chan struct{}, runtime.GOMAXPROCS(0))
	err = recodeEach(ctx, m, min(connections, 16*cap(cpu)), func(ctx context.Context, i int) (int64, error) {
		o, same, err := out.file(ctx, src, m, i, r, cpu)
		if same {
			out.kept.Add(1)
		}
		out.objects[i] = o
		return o.Size, err
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(out.objects, func(a, b objstore.Object) int { return strings.Compare(a.Key, b.Key) })
	return out, nil
}

func spoolFolder(spool string, m *catalog.Manifest, how string) (dir string, err error) {
	name := sha256.Sum256([]byte(m.Version() + "\n" + how))
	dir = filepath.Join(spool, "shoal-recode-"+hex.EncodeToString(name[:8]))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("spool: %w", err)
	}
	return dir, nil
}

// recodeEach calls one for each file of m, so many at a time. one returns the length of what it has made, which is
// shown.
func recodeEach(ctx context.Context, m *catalog.Manifest, most int,
	one func(ctx context.Context, i int) (made int64, err error)) error {
	bar := daemon.Own.Step("recoding")
	var done, in, out atomic.Int64
	text := func(in, out int64) string {
		return fmt.Sprintf("%s made %s", human.Bytes(in), human.Bytes(out))
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(most)
	for i := range m.Len() {
		if gctx.Err() != nil {
			break
		}
		g.Go(func() error {
			made, err := one(gctx, i)
			if err != nil {
				return fmt.Errorf("recode %s: %w", m.Path(i), err)
			}
			all, so := in.Add(m.Size(i)), out.Add(made)
			bar.Set(int(done.Add(1)), m.Len(), text(all, so))
			return nil
		})
	}
	err := errors.Join(g.Wait(), ctx.Err())
	bar.Done(text(in.Load(), out.Load()))
	return err
}

// spoolBytes bounds the size of a file to recode.
const spoolBytes = 1 << 30

// recodedFile is stored beside a file in the spool.
type recodedFile struct {
	Key  string `json:"key"`
	Size int64  `json:"size"`
	Sum  string `json:"sum"`
	Kept bool   `json:"kept"`
}

// recodeBuffers hold files that are being recoded.
var recodeBuffers = sync.Pool{New: func() any { return new([]byte) }}

// file recodes file i; kept reports that it is unchanged.
func (s *recoded) file(ctx context.Context, src objstore.ReaderAt, m *catalog.Manifest, i int, r gpuingest.Recode,
	cpu chan struct{}) (objstore.Object, bool, error) {
	fail := func(err error) (objstore.Object, bool, error) { return objstore.Object{}, false, err }
	note := filepath.Join(s.dir, fmt.Sprintf("%08d.json", i))
	if f, ok := s.earlier(note); ok {
		return f.object(), f.Kept, nil
	}
	o := m.Object(i)
	if o.Size > spoolBytes {
		return fail(fmt.Errorf("%s are more than %s", human.Bytes(o.Size), human.Bytes(spoolBytes)))
	}
	buf := recodeBuffers.Get().(*[]byte)
	defer recodeBuffers.Put(buf)
	*buf = slices.Grow((*buf)[:0], int(o.Size))[:o.Size]
	if err := src.ReadAt(ctx, o, *buf, 0); err != nil {
		return fail(err)
	}
	select {
	case cpu <- struct{}{}:
	case <-ctx.Done():
		return fail(ctx.Err())
	}
	made, suffix, err := r.Apply(*buf)
	<-cpu
	kept := errors.Is(err, gpuingest.ErrBadSample)
	if kept {
		made, suffix = *buf, ""
	} else if err != nil {
		return fail(err)
	}
	sum := sha256.Sum256(made)
	f := recodedFile{Key: m.Path(i) + suffix, Size: int64(len(made)), Sum: hex.EncodeToString(sum[:]), Kept: kept}
	if err := writeWhole(s.path(f.Sum), made); err != nil {
		return fail(err)
	}
	text, err := json.Marshal(f)
	if err != nil {
		return fail(err)
	}
	return f.object(), kept, writeWhole(note, text)
}

// earlier reads an earlier run's result for a file, if it is complete: the spool is not synced to the disk.
func (s *recoded) earlier(note string) (f recodedFile, ok bool) {
	text, err := os.ReadFile(note)
	if err != nil || json.Unmarshal(text, &f) != nil {
		return f, false
	}
	data, err := os.ReadFile(s.path(f.Sum))
	sum := sha256.Sum256(data)
	return f, err == nil && hex.EncodeToString(sum[:]) == f.Sum && int64(len(data)) == f.Size
}

// path is the path of a content. Equal files share it.
func (s *recoded) path(sum string) string { return filepath.Join(s.dir, sum) }

func (f recodedFile) object() objstore.Object {
	return objstore.Object{Key: f.Key, Size: f.Size, ETag: f.Sum}
}

// writeWhole writes a file completely or not at all.
func writeWhole(path string, data []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".part-")
	if err != nil {
		return err
	}
	_, err = tmp.Write(data)
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp.Name()))
	}
	return nil
}

func (s *recoded) ReadAt(_ context.Context, o objstore.Object, p []byte, off int64) error {
	return readSpooled(s.path(o.ETag), o, p, off)
}

// readSpooled fills p from off of what is spooled of an object.
func readSpooled(path string, o objstore.Object, p []byte, off int64) error {
	f, err := os.Open(path)
	if err == nil {
		defer f.Close()
		_, err = f.ReadAt(p, off)
	}
	if err != nil {
		return &objstore.Error{Kind: objstore.KindInvalid, Op: "read", Key: o.Key, Err: err}
	}
	return nil
}

func (s *recoded) list(yield func(objstore.Object, error) bool) {
	for _, o := range s.objects {
		if !yield(o, nil) {
			return
		}
	}
}

// removeSpool deletes the spool of a pack that ended with *err, unless the same command is to continue with it.
func removeSpool(dir string, err *error) {
	if *err == nil {
		*err = os.RemoveAll(dir)
	}
}
