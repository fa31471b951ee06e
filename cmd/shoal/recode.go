package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/shard"
	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
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

// recode recodes all files of m into a folder under spool. Files of an earlier run of the same recoding are reused.
func recode(ctx context.Context, src objstore.ReaderAt, m *catalog.Manifest, r gpuingest.Recode, spool string,
	connections int, memory int64) (_ *recoded, err error) {
	out := &recoded{objects: make([]objstore.Object, m.Len())}
	if out.dir, err = spoolFolder(spool, m, r.String()); err != nil {
		return nil, err
	}
	cpu := make(chan struct{}, runtime.GOMAXPROCS(0))
	err = recodeEach(ctx, m, min(connections, 16*cap(cpu)), memory, func(ctx context.Context, i int) (int64, error) {
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
	if fi, err := os.Lstat(dir); spool == os.TempDir() && err == nil &&
		int(fi.Sys().(*syscall.Stat_t).Uid) != os.Geteuid() { // who has made it may have made files in it
		return "", fmt.Errorf("spool: %s is another user's (give a --spool of yours)", dir)
	}
	return dir, nil
}

// recodeEach calls one for each file of m, most at a time, and shows the length of what that has made. Those of a time,
// unless it is one file, have no more bytes than a quarter of the memory: what is made of them takes some, too.
func recodeEach(ctx context.Context, m *catalog.Manifest, most int, memory int64,
	one func(ctx context.Context, i int) (made int64, err error)) error {
	bar := daemon.Own.Step("recoding")
	var done, in, out atomic.Int64
	text := func(in, out int64) string {
		return fmt.Sprintf("%s made %s", human.Bytes(in), human.Bytes(out))
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(most)
	room := semaphore.NewWeighted(memory / 4)
	for i := range m.Len() {
		size := min(m.Size(i), memory/4)
		if room.Acquire(gctx, size) != nil {
			break
		}
		g.Go(func() error {
			defer room.Release(size)
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

// storedCoded is what pack --recode stores for the files of src, of which some are coded: it is objstore.ReaderAt.
type storedCoded struct {
	objstore.ReaderAt
	m      *catalog.Manifest
	dir    string
	tables []byte
	length []int64
	sums   []uint32
}

const (
	codedLearned = 64 // files that tables are made of
	codedLargest = 4 << 20
)

// storeCoded codes the files of m into a folder under spool. What an earlier run has coded is kept.
func storeCoded(ctx context.Context, src objstore.ReaderAt, m *catalog.Manifest, spool string, connections int,
	memory int64) (s *storedCoded, err error) {
	s = &storedCoded{ReaderAt: src, m: m, length: make([]int64, m.Len()), sums: make([]uint32, m.Len())}
	if s.dir, err = spoolFolder(spool, m, "recode 1"); err != nil {
		return nil, err
	}
	bar := late(daemon.Own, "learning from some files")
	encode, err := s.learn(ctx)
	bar.Done("")
	if err != nil {
		return nil, err
	}
	return s, recodeEach(ctx, m, min(connections, 4*runtime.GOMAXPROCS(0)), memory,
		func(ctx context.Context, i int) (int64, error) {
			err := s.code(ctx, i, encode)
			return s.length[i], err
		})
}

// learn makes tables of files from all over the dataset, or takes those of an earlier run.
func (s *storedCoded) learn(ctx context.Context) (encode func(dst, file []byte) ([]byte, bool), err error) {
	kept := filepath.Join(s.dir, "tables")
	if s.tables, err = os.ReadFile(kept); err == nil {
		if encode, err = (jpegCoder{}).Learn(s.tables); err == nil {
			return encode, nil
		} // cut off when the machine went down: the spool is not synced to the disk. The same tables are made again.
	}
	var files [][]byte
	for n := range min(codedLearned, s.m.Len()) {
		i := n * s.m.Len() / min(codedLearned, s.m.Len())
		if size := s.m.Size(i); size > 0 && size <= codedLargest {
			data := make([]byte, size)
			if err := s.ReaderAt.ReadAt(ctx, s.m.Object(i), data, 0); err != nil {
				return nil, err
			}
			files = append(files, data)
		}
	}
	if s.tables, err = (jpegCoder{}).Train(files); err != nil {
		return nil, fmt.Errorf("--recode: none of %d files can be recoded: %w (leave it out)", len(files), err)
	}
	if err := writeWhole(kept, s.tables); err != nil {
		return nil, fmt.Errorf("spool: %w", err)
	}
	return jpegCoder{}.Learn(s.tables)
}

// code codes file i, unless it was coded before. Its file in the spool has the file's checksum and its own, and then
// the coded bytes; none if it stays as it is.
func (s *storedCoded) code(ctx context.Context, i int, encode func(dst, file []byte) ([]byte, bool)) error {
	o := s.m.Object(i)
	if s.length[i] = o.Size; o.Size == 0 || o.Size > codedLargest {
		return nil
	}
	if had, err := os.ReadFile(s.path(i)); err == nil && len(had) >= codedHead &&
		crc32.Checksum(had[codedHead:], castagnoli) == binary.LittleEndian.Uint32(had[4:]) {
		s.note(i, had)
		return nil
	}
	data := make([]byte, o.Size)
	if err := s.ReaderAt.ReadAt(ctx, o, data, 0); err != nil {
		return err
	}
	coded, ok := encode(make([]byte, codedHead, codedHead+len(data)), data)
	if !ok || len(coded)-codedHead >= len(data) {
		coded = coded[:codedHead]
	}
	binary.LittleEndian.PutUint32(coded, crc32.Checksum(data, castagnoli))
	binary.LittleEndian.PutUint32(coded[4:], crc32.Checksum(coded[codedHead:], castagnoli))
	s.note(i, coded)
	return writeWhole(s.path(i), coded)
}

const codedHead = 8

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (s *storedCoded) note(i int, spooled []byte) {
	if n := int64(len(spooled) - codedHead); n > 0 {
		s.length[i], s.sums[i] = n, binary.LittleEndian.Uint32(spooled)
	}
}

func (s *storedCoded) path(i int) string { return filepath.Join(s.dir, fmt.Sprintf("%08d", i)) }

func (s *storedCoded) coded() *shard.Coded {
	if !slices.ContainsFunc(s.sums, func(sum uint32) bool { return sum != 0 }) {
		return nil
	}
	return &shard.Coded{Tables: s.tables, Length: func(i int) int64 { return s.length[i] },
		Sum: func(i int) uint32 { return s.sums[i] }}
}

func (s *storedCoded) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	node, ok := s.m.Find(o.Key[len(s.m.Prefix()):])
	if !ok || s.length[node.Index] == o.Size {
		return s.ReaderAt.ReadAt(ctx, o, p, off)
	}
	return readSpooled(s.path(node.Index), o, p, codedHead+off)
}

// jpegCoder is the codec of the cache: it is engine.Coder.
type jpegCoder struct{}

func (jpegCoder) Train(files [][]byte) ([]byte, error) {
	t, err := jpeg.TrainTables(slices.Values(files))
	if err != nil {
		return nil, err
	}
	return t.Bytes(), nil
}

func (jpegCoder) Learn(tables []byte) (func(dst, file []byte) ([]byte, bool), error) {
	usesNative()
	t, err := jpeg.ParseTables(tables)
	if err == nil {
		err = jpeg.Register(t)
	}
	if err != nil {
		return nil, err
	}
	return func(dst, file []byte) ([]byte, bool) {
		coded, err := t.Recode(dst, file)
		return coded, err == nil
	}, nil
}

func (jpegCoder) Decode(dst, coded []byte) ([]byte, error) {
	file, err := jpeg.Restore(dst, coded)
	if errors.Is(err, jpeg.ErrTooLarge) {
		err = &objstore.Error{Op: "restore", Kind: objstore.KindInvalid, Err: err, Remedy: "raise --memory"}
	}
	return file, err
}

func (jpegCoder) Form(coded []byte) [8]byte { return jpeg.RecodedTables(coded) }

func (jpegCoder) Name(tables []byte) [8]byte {
	t, err := jpeg.ParseTables(tables)
	if err != nil {
		return [8]byte{}
	}
	return t.ID()
}
