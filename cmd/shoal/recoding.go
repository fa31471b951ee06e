package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/shard"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// storedCoded is what pack --recode stores, in place of the files of src: some are coded, in a spool folder. It is
// objstore.ReaderAt.
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
func storeCoded(ctx context.Context, src objstore.ReaderAt, m *catalog.Manifest, spool string, connections int) (
	s *storedCoded, err error) {
	s = &storedCoded{ReaderAt: src, m: m, length: make([]int64, m.Len()), sums: make([]uint32, m.Len())}
	if s.dir, err = spoolFolder(spool, m, "recode 1"); err != nil {
		return nil, err
	}
	encode, err := s.learn(ctx)
	if err != nil {
		return nil, err
	}
	return s, recodeEach(ctx, m, min(connections, 4*runtime.GOMAXPROCS(0)),
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
