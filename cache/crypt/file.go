package crypt

import (
	"encoding/binary"
	"fmt"
	"io"
	"iter"
	"slices"
)

// A sealed file is written once and read as a whole. All integers are little endian:
//
//	offset
//	     0  +----------------------+
//	        | magic "SHOALENC"     |  8 bytes
//	     8  | format version (1)   |  u32
//	    12  | C: length of a chunk |  u32, 1 MiB
//	    16  | salt                 |  16 bytes, random; the file's key is derived from it
//	    32  +----------------------+
//	        | chunk, tag           |  C + 16 bytes; the last chunk has 1 to C
//	        | ...                  |
//	        +----------------------+
//
// A chunk's nonce is its number (u32 BE in bytes 7..10) and 1 in the last byte of the last chunk, so that a file cannot
// be cut at a chunk's end (the construction STREAM of Hoang, Reyhanitabar, Rogaway and Vizár, "Online Authenticated-
// Encryption and its Nonce-Reuse Misuse-Resistance", CRYPTO 2015). Every chunk authenticates the file's name.
const (
	nonceLen      = 12
	fileMagic     = "SHOALENC"
	fileVersion   = 1
	fileHeaderLen = 32
	fileChunk     = 1 << 20
	tagLen        = 16
)

func chunkNonce(i int, last bool) []byte {
	var n [nonceLen]byte
	binary.BigEndian.PutUint32(n[7:], uint32(i))
	if last {
		n[11] = 1
	}
	return n[:]
}

// SealFile yields the parts of a sealed file of data, at least one byte. Each part is valid until the next. Without a
// key it is data as it is.
func (k *Key) SealFile(purpose, name string, data []byte) iter.Seq[[]byte] {
	if k == nil {
		return slices.Values([][]byte{data})
	}
	return func(yield func([]byte) bool) {
		h := make([]byte, fileHeaderLen)
		copy(h, fileMagic)
		binary.LittleEndian.PutUint32(h[8:], fileVersion)
		binary.LittleEndian.PutUint32(h[12:], fileChunk)
		Random(h[16:])
		if !yield(h) {
			return
		}
		aead := k.AEAD("file of "+purpose, h[16:])
		buf := make([]byte, 0, min(len(data), fileChunk)+tagLen)
		for i := 0; len(data) > 0; i++ {
			n := min(len(data), fileChunk)
			if !yield(aead.Seal(buf[:0], chunkNonce(i, n == len(data)), data[:n], []byte(name))) {
				return
			}
			data = data[n:]
		}
	}
}

// FileLen returns the content length of a sealed file of this size, or 0 if no sealed file has this size.
func FileLen(size int64) int64 {
	body := size - fileHeaderLen
	chunks := (body + fileChunk + tagLen - 1) / (fileChunk + tagLen)
	return max(0, body-chunks*tagLen)
}

// OpenFile decrypts a sealed file to dst, which is FileLen bytes long. Its errors are r's, or wrap ErrOpen.
func (k *Key) OpenFile(purpose, name string, r io.ReaderAt, dst []byte) error {
	var h [fileHeaderLen]byte
	if _, err := r.ReadAt(h[:], 0); err != nil {
		return err
	}
	if len(dst) == 0 || string(h[:8]) != fileMagic || binary.LittleEndian.Uint32(h[8:]) != fileVersion ||
		binary.LittleEndian.Uint32(h[12:]) != fileChunk {
		return fmt.Errorf("%w (not an encrypted file)", ErrOpen)
	}
	aead := k.AEAD("file of "+purpose, h[16:])
	buf := make([]byte, min(len(dst), fileChunk)+tagLen)
	for i, off := 0, int64(fileHeaderLen); len(dst) > 0; i++ {
		n := min(len(dst), fileChunk)
		sealed := buf[:n+tagLen]
		if _, err := r.ReadAt(sealed, off); err != nil && err != io.EOF {
			return err
		}
		if _, err := aead.Open(dst[:0:n], chunkNonce(i, n == len(dst)), sealed, []byte(name)); err != nil {
			return ErrOpen
		}
		dst, off = dst[n:], off+int64(len(sealed))
	}
	return nil
}
