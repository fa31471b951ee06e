package shard

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"

	"github.com/shoalfs/shoal/cache/catalog"
)

// Order is a permutation of [0, Len()).
type Order interface {
	Len() int
	At(pos int) int
}

// plan says where each file lies, before anything is read. It needs 9 bytes per file and 4 per sample.
type plan struct {
	m       *catalog.Manifest
	coded   *Coded   // nil: each file is stored as it is
	seq     []uint32 // files, those of one sample together
	modes   []mode   // by file
	samples []uint32 // where in seq each sample begins, and the end
	order   Order    // of the samples
	first   []uint32 // first position in order of each shard, and the end
	sizes   []int64  // of the shards
	id      [16]byte
	escaped Escaped
}

// newPlan groups the files of m into samples, and fills shards with these in the order of permute.
func newPlan(m *catalog.Manifest, coded *Coded, shardSize int64, seed uint64, permute func(n int) Order) (
	*plan, error) {
	p := &plan{m: m, coded: coded, seq: make([]uint32, 0, m.Len()), modes: make([]mode, m.Len())}
	for d := range m.Dirs() {
		p.group(d)
	}
	n := len(p.samples)
	p.samples = append(p.samples, uint32(len(p.seq)))
	if p.order = permute(n); p.order.Len() != n {
		return nil, fmt.Errorf("the order has %d positions for %d samples", p.order.Len(), n)
	}
	if err := p.fill(shardSize, seed); err != nil {
		return nil, err
	}
	return p, nil
}

// stored returns the length of a file in its tar.
func (p *plan) stored(f int) int64 {
	if p.coded == nil {
		return p.m.Size(f)
	}
	return p.coded.Length(f)
}

// group appends the samples of one directory. Files of one stem are adjacent by name, except the one named like the
// stem ("img", "img-1.jpg", "img.jpg").
func (p *plan) group(d int) {
	dir := p.m.Dir(d)
	var bucket []int
	for f := dir.FirstFile; f < dir.EndFile; {
		stem, _, dotted := catalog.Cut(p.m.Name(f))
		bucket = bucket[:0]
		if !dotted {
			if !p.hasFields(stem, f+1, dir.EndFile) {
				p.emit(append(bucket, f))
			}
			f++
			continue
		}
		if n, ok := p.m.Lookup(d, stem); ok && !n.IsDir {
			bucket = append(bucket, n.Index)
		}
		for ; f < dir.EndFile && strings.HasPrefix(p.m.Name(f), stem+"."); f++ {
			bucket = append(bucket, f)
		}
		p.emit(bucket)
	}
}

// hasFields reports whether one of the files from..end-1 of a directory is stem plus an extension.
func (p *plan) hasFields(stem string, from, end int) bool {
	i := from + sort.Search(end-from, func(i int) bool { return p.m.Name(from+i) >= stem+"." })
	if i == end {
		return false
	}
	s, _, dotted := catalog.Cut(p.m.Name(i))
	return dotted && s == stem
}

// emit appends the samples that the files of one stem make.
func (p *plan) emit(bucket []int) {
	how := modePlain
	if len(bucket) > 1 {
		if len(bucket) > maxSample {
			how = modeWhole
		}
		seen := make(map[string]bool, min(len(bucket), maxSample))
		for _, f := range bucket {
			ext := lastExt(p.m.Name(f))
			if seen[ext] {
				how = modeSplit
				break
			}
			seen[ext] = true
		}
		byName := func(a, b int) int {
			return escape(p.m.Name(a), how, nil).compare(escape(p.m.Name(b), how, nil))
		}
		if !slices.IsSortedFunc(bucket, byName) {
			slices.SortFunc(bucket, byName)
		}
	}
	last := ""
	for i, f := range bucket {
		p.modes[f] = how
		t := escape(p.m.Name(f), how, &p.escaped)
		if i == 0 || t.stem != last {
			p.samples = append(p.samples, uint32(len(p.seq)))
			last = t.stem
		}
		p.seq = append(p.seq, uint32(f))
	}
}

// tarPath returns the name in the tar of a file.
func (p *plan) tarPath(f int) string {
	name := p.m.Name(f)
	base := escape(name, p.modes[f], nil)
	path := p.m.Path(f)
	return path[:len(path)-len(name)] + base.stem + "." + base.ext
}

// fill cuts the order into shards.
func (p *plan) fill(shardSize int64, seed uint64) error {
	h := sha256.New()
	version := p.m.VersionHash()
	buf := append([]byte("shoal shard plan 1\n"), version[:]...)
	buf = binary.LittleEndian.AppendUint64(buf, seed)
	buf = binary.LittleEndian.AppendUint64(buf, uint64(shardSize))
	if p.coded != nil {
		buf = append(append(buf, "coded\n"...), p.coded.Tables...)
	}
	n := len(p.samples) - 1
	seen := make([]uint64, (n+63)/64)
	size := int64(endLen)
	for pos := range n {
		g := p.order.At(pos)
		if g < 0 || g >= n || seen[g/64]&(1<<(g%64)) != 0 {
			return fmt.Errorf("the order names sample %d of %d twice, or it is out of range", g, n)
		}
		seen[g/64] |= 1 << (g % 64)
		var add int64
		for _, f := range p.seq[p.samples[g]:p.samples[g+1]] {
			b := p.stored(int(f))
			if b > math.MaxInt64/4 || add > math.MaxInt64/4 {
				return fmt.Errorf("%q is too large for a tar", p.m.Path(int(f)))
			}
			add += headerLen(p.tarPath(int(f)), b) + pad(b)
		}
		if len(p.first) == 0 || size > endLen && size+add > shardSize {
			if len(p.first) > 0 {
				p.sizes = append(p.sizes, size)
			}
			p.first = append(p.first, uint32(pos))
			buf = binary.LittleEndian.AppendUint32(buf, math.MaxUint32) // no file has this number
			size = endLen
		}
		size += add
		for _, f := range p.seq[p.samples[g]:p.samples[g+1]] {
			buf = binary.LittleEndian.AppendUint32(buf, f)
			if p.coded != nil {
				buf = binary.LittleEndian.AppendUint64(buf, uint64(p.coded.Length(int(f))))
			}
		}
		if len(buf) > 32<<10 {
			h.Write(buf)
			buf = buf[:0]
		}
	}
	if n == 0 {
		return errors.New("the dataset has no files")
	}
	h.Write(buf)
	p.id = [16]byte(h.Sum(nil))
	p.sizes = append(p.sizes, size)
	p.first = append(p.first, uint32(n))
	return nil
}

// entry is one member of a shard that is being written.
type entry struct {
	file uint32
	crc  uint32 // of its bytes, once it was read back
	head int64  // offset of its header
	data int64  // offset of its bytes
	size int64
	sums []byte // CRC32C of each extent, little endian, if there are several; as crc
}

// end returns the offset behind the member and its padding.
func (e *entry) end() int64 { return e.data + pad(e.size) }

// layout returns the members of a shard, by offset.
func (p *plan) layout(shard int) []entry {
	var out []entry
	at := int64(0)
	for pos := p.first[shard]; pos < p.first[shard+1]; pos++ {
		g := p.order.At(int(pos))
		for _, f := range p.seq[p.samples[g]:p.samples[g+1]] {
			e := entry{file: f, head: at, size: p.stored(int(f))}
			e.data = at + headerLen(p.tarPath(int(f)), e.size)
			at = e.end()
			out = append(out, e)
		}
	}
	return out
}

// header returns the bytes before a member's content.
func (p *plan) header(e *entry) []byte {
	mtime := int64(0)
	if t := p.m.ModTime(int(e.file)); !t.IsZero() {
		mtime = t.Unix()
	}
	return tarHeader(p.tarPath(int(e.file)), e.size, mtime)
}

// visit walks over the bytes [from, to) of a tar. It calls fixed for headers and padding, with their offset in the
// tar and their bytes (nil: zeros), and data for content, with the range in the member.
func (p *plan) visit(entries []entry, from, to int64, fixed func(at int64, b []byte, n int64) error,
	data func(at int64, e *entry, lo, hi int64) error) error {
	i := sort.Search(len(entries), func(i int) bool { return entries[i].end() > from })
	cut := func(lo, hi int64) (int64, int64, bool) {
		lo, hi = max(lo, from), min(hi, to)
		return lo, hi, lo < hi
	}
	end := int64(0)
	for ; i < len(entries) && entries[i].head < to; i++ {
		e := &entries[i]
		if lo, hi, ok := cut(e.head, e.data); ok {
			if err := fixed(lo, p.header(e)[lo-e.head:hi-e.head], hi-lo); err != nil {
				return err
			}
		}
		if lo, hi, ok := cut(e.data, e.data+e.size); ok {
			if err := data(lo, e, lo-e.data, hi-e.data); err != nil {
				return err
			}
		}
		if lo, hi, ok := cut(e.data+e.size, e.end()); ok {
			if err := fixed(lo, nil, hi-lo); err != nil {
				return err
			}
		}
	}
	if len(entries) > 0 {
		end = entries[len(entries)-1].end()
	}
	if lo, hi, ok := cut(end, end+endLen); ok {
		return fixed(lo, nil, hi-lo)
	}
	return nil
}
