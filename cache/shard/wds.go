package shard

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"path"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/cache/objstore"
)

// A wds2idx index is text: "v1.2 N" and a line for each of N samples. The line has, for each file of the sample,
//
//	EXTENSION OFFSET SIZE NAME
//
// separated by spaces. Names are as GNU tar prints them. v1.1 has no names.

// errNoNames says that an index is valid, but of a version without names.
var errNoNames = errors.New("index without names")

// parseWds reads an index into rows of an [index]. It fails for anything ambiguous, such as names with spaces, or
// with backslashes, which GNU tar uses for quoting.
func parseWds(data []byte) (*index, error) {
	line, rest, _ := bytes.Cut(data, []byte("\n"))
	version, count, _ := strings.Cut(strings.TrimSuffix(string(line[:min(len(line), 64)]), "\r"), " ")
	switch version {
	case "v1.2":
	case "v1.1", "v1.0":
		return nil, errNoNames
	default:
		return nil, corrupt("not a wds2idx index (it begins with %.40q)", line)
	}
	n, err := strconv.ParseInt(count, 10, 64)
	if err != nil || n <= 0 || n > int64(len(data)) {
		return nil, corrupt("%.40q samples", count)
	}
	ix := new(index)
	end := int64(0)
	for i := int64(0); i < n; i++ {
		if len(rest) == 0 {
			return nil, corrupt("it ends after %d of %d samples", i, n)
		}
		line, rest, _ = bytes.Cut(rest, []byte("\n"))
		line = bytes.TrimSuffix(line, []byte("\r"))
		for first := true; first || len(line) > 0; first = false {
			var f [4][]byte
			for j := range f {
				if len(line) == 0 {
					return nil, corrupt("sample %d: a line ends within a file", i)
				}
				f[j], line, _ = bytes.Cut(line, []byte(" "))
			}
			off, err1 := strconv.ParseInt(string(f[1]), 10, 64)
			size, err2 := strconv.ParseInt(string(f[2]), 10, 64)
			name := string(f[3])
			if err := errors.Join(err1, err2); err != nil || size < 0 || off < end || off > math.MaxInt64-size {
				return nil, corrupt("sample %d: %.300q at %.40q has %.40q bytes", i, name, f[1], f[2])
			}
			_, ext, dot := strings.Cut(path.Base(name), ".")
			if name == "" || strings.ContainsRune(name, '\\') || !dot || ext != string(f[0]) {
				return nil, corrupt("sample %d: name %.300q with extension %.40q", i, name, f[0])
			}
			end = off + size
			if err := ix.append(indexMember{off: off, size: size, mtime: noTime, path: name}); err != nil {
				return nil, err
			}
		}
	}
	if len(bytes.TrimSpace(rest)) > 0 {
		return nil, corrupt("more than %d samples", n)
	}
	return ix, nil
}

// agrees reports whether ix accounts for every block of the tar o: each member has one header block before it, the
// members are adjacent, and two zero blocks, or the end of the file, follow the last.
func agrees(ctx context.Context, r objstore.Reader, o objstore.Object, ix *index) (bool, error) {
	at, fits := int64(0), true
	ix.members(func(_ int, m indexMember) bool {
		fits = m.off == at+blockSize && m.off <= o.Size && m.size <= o.Size-m.off
		at = m.off + pad(m.size)
		return fits
	})
	if !fits {
		return false, nil
	}
	if at < o.Size { // the last member's padding may be missing, too
		tail := make([]byte, min(endLen, o.Size-at))
		if err := r.ReadAt(ctx, o, tail, at); err != nil {
			return false, err
		}
		if len(bytes.TrimLeft(tail, "\x00")) > 0 {
			return false, nil
		}
	}
	return probe(ctx, r, o, ix)
}

// probe compares the first, a middle and the last header of the tar o with ix, to find an index of another tar.
func probe(ctx context.Context, r objstore.Reader, o objstore.Object, ix *index) (same bool, err error) {
	same = true
	n := ix.len()
	ix.members(func(i int, m indexMember) bool {
		if i != 0 && i != n/2 && i != n-1 {
			return true
		}
		name := m.path
		if m.tarName != "" {
			name = m.tarName
		}
		var h *tar.Header
		h, err = headerBefore(ctx, r, o, m.off, headerLen(name, m.stored))
		same = err == nil && h != nil && h.Name == name && h.Size == m.stored && h.Typeflag == tar.TypeReg
		return same
	})
	return same, err
}

// headerBefore reads the header of n bytes that ends at off; nil if there is none.
func headerBefore(ctx context.Context, r objstore.Reader, o objstore.Object, off, n int64) (*tar.Header, error) {
	if off < n || off > o.Size {
		return nil, nil
	}
	b := make([]byte, n)
	if err := r.ReadAt(ctx, o, b, off-n); err != nil {
		return nil, err
	}
	in := bytes.NewReader(b)
	h, err := tar.NewReader(in).Next()
	if err != nil && !errors.Is(err, tar.ErrInsecurePath) || in.Len() > 0 {
		return nil, nil //nolint:nilerr // no header is an answer
	}
	return h, nil
}

// indexKeys returns the possible keys of a shard's index: wds2idx cuts the archive's name at its first dot.
func indexKeys(key string) []string {
	dir, base := path.Split(key)
	whole := strings.TrimSuffix(base, tarSuffix)
	short, _, _ := strings.Cut(base, ".")
	var keys []string
	for _, b := range []string{whole, base, short} {
		if b == "" {
			continue
		}
		keys = append(keys, dir+b+".idx", dir+b+".index")
	}
	return keys
}

const tarSuffix = ".tar"

func inShard(key string, err error) error { return fmt.Errorf("shard %s: %w", key, err) }
