package catalog

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"iter"
	"math"
	"slices"
	"sort"

	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
)

const (
	layoutMagic   = "SHOALLAY"
	layoutVersion = 2 // 1 is without checksums
	// ExtentSize is how much of a file a cache fetches as a whole: one checksum covers as much.
	ExtentSize = segment.ExtentSize
	nowhere    = math.MaxUint32 // a file that no place was named for yet
)

// Layout tells where the files of one manifest lie: in which shard, and at which offset. It is immutable and safe for
// concurrent use. File, shard and rank numbers out of range panic, as slice indices do.
//
// The rank of a file is its position among all files by (shard, offset): files of neighbouring ranks are neighbours.
//
// CACHE-DIR/layouts/VERSION, written once, read as a whole. All integers are little endian. Later
// versions of the format keep magic, version, and the place of the header's checksum.
//
//	offset
//	     0  +--------------------------------+
//	        | magic "SHOALLAY"               |  8 bytes
//	     8  | format version (1 or 2)        |  u32
//	    12  | header length (128)            |  u32
//	    16  | dataset version                |  32 bytes, that of the manifest
//	    48  | layout version                 |  32 bytes, SHA-256 of this file with zeros here
//	        |                                |    and in the two checksums
//	    80  | F: number of files             |  u64
//	    88  | S: number of shards            |  u64
//	    96  | length of the shards' keys     |  u64
//	   104  | length of the shards' ETags    |  u64
//	   112  | length of this file            |  u64
//	   120  | CRC32C of all after the header |  u32
//	   124  | CRC32C of bytes 0..123         |  u32
//	   128  +--------------------------------+
//	        | (S+1) x offset of the key      |  u64, into the keys
//	        | (S+1) x offset of the ETag     |  u64, into the ETags
//	        | S x size of the shard          |  u64
//	        | S x modification time          |  i64, as in a manifest
//	        | (S+1) x first rank             |  u32
//	        | F x offset in the shard        |  u64, by file
//	        | F x rank                       |  u32, by file
//	        | F x file                       |  u32, by rank
//	        | F x CRC32C of the file's bytes |  u32, by file; in version 2 only; 0: unknown. Of a file of several
//	        |                                |    extents, which of the numbers from here is the first extent's,
//	        |                                |    0 or a number that is not there: unknown
//	        | CRC32C of each of its extents  |  u32, of all such files; 0: unknown
//	        | keys, ETags                    |
//	        +--------------------------------+
//
// The shard of a file is not stored: a short binary search finds the shard whose ranks include the file's. So a file
// costs 16 bytes, or 20, and 4 an extent if it has several.
type Layout struct {
	content
	m *Manifest

	dataset, version [32]byte
	files            int
	shards           []objstore.Object
	firstRank        []uint32 // S+1
	offs, sums       []byte   // sums is empty if they are not known
	ranks            []byte
	order            []byte

	// Chunk is how many bytes of a shard are fetched in any case, whatever is wanted of them, set by who has opened the
	// layout; 0: there are no such.
	Chunk int64
}

// Place is where the bytes of a file begin.
type Place struct {
	Path  string // as the manifest has it
	Shard int    // index in the list of shards
	Off   int64
	Sums  []uint32 // CRC32C of each extent; 0, or of fewer: unknown
}

// Extents returns how many extents a file of that size has.
func Extents(size int64) int { return int((size + ExtentSize - 1) / ExtentSize) }

// BuildLayout makes the layout of a manifest's files, in memory. Places may come in any order; by shard and offset is
// fastest. It fails with the error of places, if a place names an unknown file or shard, if the file does not fit
// into its shard there, and if a file has two places or none.
func BuildLayout(m *Manifest, shards []objstore.Object, places iter.Seq2[Place, error]) (*Layout, error) {
	if len(shards) == 0 || len(shards) >= nowhere {
		return nil, fmt.Errorf("layout of %d shards: want 1 to %d", len(shards), uint32(nowhere)-1)
	}
	for _, s := range shards {
		if s.Size < 0 || s.Key == "" {
			return nil, fmt.Errorf("layout: shard %q has size %d", s.Key, s.Size)
		}
	}
	n := m.Len()
	shardOf := make([]uint32, n)
	for i := range shardOf {
		shardOf[i] = nowhere
	}
	offs, sums, all := make([]int64, n), make([]uint32, n), n
	for f := range sums {
		if x := Extents(m.Size(f)); x > 1 {
			sums[f], all = uint32(all), all+x
		}
	}
	sums = append(sums, make([]uint32, all-n)...)
	order := make([]uint32, 0, n)
	byPlace := func(x, y uint32) int {
		return cmp.Or(cmp.Compare(shardOf[x], shardOf[y]), cmp.Compare(offs[x], offs[y]), cmp.Compare(x, y))
	}
	sorted, known := true, false
	for p, err := range places {
		if err != nil {
			return nil, err
		}
		node, ok := m.Find(p.Path)
		if !ok || node.IsDir {
			return nil, fmt.Errorf("layout: %q is in shard %d but is not a file of the dataset (the shards changed "+
				"during the listing: list again)", p.Path, p.Shard)
		}
		f := node.Index
		if p.Shard < 0 || p.Shard >= len(shards) {
			return nil, fmt.Errorf("layout: %q lies in shard %d of %d", p.Path, p.Shard, len(shards))
		}
		shard := &shards[p.Shard]
		if p.Off < 0 || p.Off > shard.Size-m.Size(f) {
			return nil, fmt.Errorf("layout: %q, %d bytes at offset %d, lies beyond the end of shard %q, which has %d "+
				"bytes (the shard is truncated, or its index belongs to another shard)", p.Path, m.Size(f), p.Off,
				shard.Key, shard.Size)
		}
		if shardOf[f] != nowhere {
			return nil, fmt.Errorf("layout: %q has two places: %d in shard %q and %d in shard %q",
				p.Path, offs[f], shards[shardOf[f]].Key, p.Off, shard.Key)
		}
		shardOf[f], offs[f] = uint32(p.Shard), p.Off
		if x := Extents(m.Size(f)); x > 0 && x == len(p.Sums) {
			at := f
			if x > 1 {
				at = int(sums[f])
			}
			copy(sums[at:], p.Sums)
			known = known || slices.Max(p.Sums) > 0
		}
		if len(order) > 0 && byPlace(order[len(order)-1], uint32(f)) > 0 {
			sorted = false
		}
		order = append(order, uint32(f))
	}
	if len(order) != n {
		f := slices.Index(shardOf, nowhere)
		return nil, fmt.Errorf("layout: %d of %d files have no place in a shard, %q is the first",
			n-len(order), n, m.Path(f))
	}
	if !sorted {
		slices.SortFunc(order, byPlace)
	}
	if !known {
		sums = nil
	}
	return encodeLayout(m, shards, shardOf, offs, order, sums)
}

// encodeLayout makes a layout; sums may be nil.
func encodeLayout(m *Manifest, shards []objstore.Object, shardOf []uint32, offs []int64, order, sums []uint32) (
	*Layout, error) {
	var keys, tags uint64
	for _, s := range shards {
		keys += uint64(len(s.Key))
		tags += uint64(len(s.ETag))
	}
	files, count := uint64(len(offs)), uint64(len(shards))
	format := uint32(1)
	if sums != nil {
		format = layoutVersion
	}
	total := layoutLen(format, files, count) + 4*max(uint64(len(sums)), files) - 4*files + keys + tags
	le := binary.LittleEndian
	out := make([]byte, headerLen, total)
	out = appendOffsets(out, shards, func(s objstore.Object) int { return len(s.Key) })
	out = appendOffsets(out, shards, func(s objstore.Object) int { return len(s.ETag) })
	for _, s := range shards {
		out = le.AppendUint64(out, uint64(s.Size))
	}
	for _, s := range shards {
		out = le.AppendUint64(out, uint64(Nanos(s.ModTime)))
	}
	rank := 0
	for s := range shards {
		for rank < len(order) && int(shardOf[order[rank]]) < s {
			rank++
		}
		out = le.AppendUint32(out, uint32(rank))
	}
	out = le.AppendUint32(out, uint32(len(order)))
	for _, o := range offs {
		out = le.AppendUint64(out, uint64(o))
	}
	ranks := out[len(out) : len(out)+4*len(order)]
	for r, f := range order {
		le.PutUint32(ranks[4*f:], uint32(r))
	}
	out = out[:len(out)+len(ranks)]
	for _, f := range order {
		out = le.AppendUint32(out, f)
	}
	for _, sum := range sums {
		out = le.AppendUint32(out, sum)
	}
	for _, s := range shards {
		out = append(out, s.Key...)
	}
	for _, s := range shards {
		out = append(out, s.ETag...)
	}

	h := out[:headerLen]
	copy(h, layoutMagic)
	le.PutUint32(h[8:], format)
	le.PutUint32(h[12:], headerLen)
	copy(h[16:], m.version[:])
	for i, n := range []uint64{files, count, keys, tags, uint64(len(out))} {
		le.PutUint64(h[80+8*i:], n)
	}
	version := layoutHash(out)
	copy(h[48:], version[:])
	seal(out)
	l, err := parseLayout(out, m)
	if err != nil {
		return nil, fmt.Errorf("layout: a bug made an invalid one: %w", err)
	}
	return l, nil
}

// layoutLen is the length of a layout file without its arenas, and the checksums of extents.
func layoutLen(format uint32, files, shards uint64) uint64 {
	return headerLen + 2*8*(shards+1) + 2*8*shards + 4*(shards+1) + (8+4+4+4*uint64(format-1))*files
}

func layoutHash(data []byte) [32]byte {
	h := sha256.New()
	h.Write(data[:48])
	h.Write(make([]byte, 32))
	h.Write(data[80:120])
	h.Write(make([]byte, 8))
	h.Write(data[headerLen:])
	return [32]byte(h.Sum(nil))
}

// loadLayout reads the layout file at path and checks it against its manifest: checksums, lengths, that
// the ranks are a permutation, and that every file lies within its shard. Errors wrap [ErrCorrupt],
// [ErrNewerFormat], or the operating system's error.
func loadLayout(path string, m *Manifest, key *crypt.Key) (*Layout, error) {
	l, err := loadFile(path, "layout", key, func(data []byte) (*Layout, error) { return parseLayout(data, m) })
	if err != nil {
		return nil, err
	}
	l.loaded = true
	return l, nil
}

// parseLayout checks data and returns a layout that reads from it. It trusts nothing, and reads every column once.
func parseLayout(data []byte, m *Manifest) (*Layout, error) {
	format, err := CheckHeader(data, headerLen, layoutMagic, 1, layoutVersion, "a layout")
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	h := data[:headerLen]
	files, count := le.Uint64(h[80:]), le.Uint64(h[88:])
	keyLen, tagLen := le.Uint64(h[96:]), le.Uint64(h[104:])
	size := uint64(len(data))
	if n := le.Uint64(h[112:]); n != size {
		return nil, corrupt("%d bytes long, want %d", size, n)
	}
	if files != uint64(m.Len()) || [32]byte(h[16:48]) != m.version {
		return nil, corrupt("the layout of %d files, dataset version %x; the manifest has %d files, version %x", files,
			h[16:48], m.Len(), m.version)
	}
	least := layoutLen(format, files, count) + keyLen + tagLen
	if count == 0 || count >= nowhere || keyLen > size || tagLen > size || least > size || (size-least)%4 != 0 ||
		format == 1 && least < size {
		return nil, corrupt("sections of %d files and %d shards do not fill %d bytes", files, count, size)
	}
	if err := CheckContent(data, headerLen); err != nil {
		return nil, err
	}
	l := &Layout{m: m, content: content{data: data}, dataset: m.version, version: [32]byte(h[48:80]), files: int(files)}
	cut := cutter(data[headerLen:])
	keyOff, tagOff := cut(8*(count+1)), cut(8*(count+1))
	sizes, mtimes, first := cut(8*count), cut(8*count), cut(4*(count+1))
	l.offs, l.ranks, l.order, l.sums = cut(8*files), cut(4*files), cut(4*files),
		cut(4*uint64(format-1)*files+size-least)
	keys, tags := cut(keyLen), cut(tagLen)
	if err := cmp.Or(ascends("keys", keyOff, keys), ascends("ETags", tagOff, tags)); err != nil {
		return nil, err
	}
	l.shards = make([]objstore.Object, count)
	l.firstRank = make([]uint32, count+1)
	for i := range l.shards {
		l.shards[i] = objstore.Object{
			Key: string(textAt(keys, keyOff, i)), ETag: string(textAt(tags, tagOff, i)),
			Size: int64(le.Uint64(sizes[8*i:])), ModTime: TimeOf(int64(le.Uint64(mtimes[8*i:]))),
		}
		if l.shards[i].Size < 0 || l.shards[i].Key == "" {
			return nil, corrupt("shard %d: key %q, size %d", i, l.shards[i].Key, l.shards[i].Size)
		}
	}
	for i := range l.firstRank {
		l.firstRank[i] = le.Uint32(first[4*i:])
		if i == 0 && l.firstRank[0] != 0 || i > 0 && l.firstRank[i] < l.firstRank[i-1] {
			return nil, corrupt("shard %d begins at rank %d", i, l.firstRank[i])
		}
	}
	if last := l.firstRank[count]; uint64(last) != files {
		return nil, corrupt("shards hold %d files of %d", last, files)
	}
	return l, l.checkPlaces(m)
}

// checkPlaces checks the columns of the files. The file at each rank must have that rank. Then no file occurs twice,
// so both columns are permutations and inverse to each other.
func (l *Layout) checkPlaces(m *Manifest) error {
	for s := range l.shards {
		size := l.shards[s].Size
		prev, prevFile := int64(-1), -1
		for r := l.firstRank[s]; r < l.firstRank[s+1]; r++ {
			f := l.At(int(r))
			if f >= l.files || l.Rank(f) != int(r) {
				return corrupt("rank %d is assigned to file %d, which has another rank", r, f)
			}
			off := l.off(f)
			if off < prev || off == prev && f < prevFile {
				return corrupt("file %d at rank %d: out of order", f, r)
			}
			prev, prevFile = off, f
			if off < 0 || off > size-m.Size(f) {
				return corrupt("file %d: %d bytes at %d in a shard of %d", f, m.Size(f), off, size)
			}
		}
	}
	return nil
}

func (l *Layout) off(file int) int64 { return int64(binary.LittleEndian.Uint64(l.offs[8*file:])) }

// Version returns the layout version, 64 hexadecimal digits; of nil, where each file is an object, "".
func (l *Layout) Version() string {
	if l == nil {
		return ""
	}
	return hex.EncodeToString(l.version[:])
}

// Dataset returns the version of the dataset whose files are laid out, 64 hexadecimal digits.
func (l *Layout) Dataset() string { return hex.EncodeToString(l.dataset[:]) }

// Len returns the number of files.
func (l *Layout) Len() int { return l.files }

// Shards returns the number of shards.
func (l *Layout) Shards() int { return len(l.shards) }

// Shard returns a shard.
func (l *Layout) Shard(i int) objstore.Object { return l.shards[i] }

// Where returns the shard of a file and the offset of its bytes there.
func (l *Layout) Where(file int) (shard int, off int64) {
	r := uint32(l.Rank(file))
	// The last shard that begins at or before r; shards without files have an empty range.
	shard = sort.Search(len(l.shards), func(i int) bool { return l.firstRank[i+1] > r })
	return shard, l.off(file)
}

// Extent returns the shard of the file at a rank, and its bytes [off, end) there.
func (l *Layout) Extent(rank int) (shard int, off, end int64) {
	file := l.At(rank)
	shard, off = l.Where(file)
	return shard, off, off + l.m.Size(file)
}

// Locate returns the object that holds a file's bytes, and their offset.
func (l *Layout) Locate(file int) (objstore.Object, int64) {
	shard, off := l.Where(file)
	return l.shards[shard], off
}

// Sum returns the CRC32C of an extent of a file, 0 if the index of its shard does not have it.
func (l *Layout) Sum(file, x int) uint32 {
	if l.m.Size(file) > ExtentSize {
		first := int(l.sum(file))
		if file = first + x; first < l.files { // in an index without those of extents, the file's own is there
			return 0
		}
	}
	return l.sum(file)
}

func (l *Layout) sum(i int) uint32 {
	if i >= len(l.sums)/4 {
		return 0
	}
	return binary.LittleEndian.Uint32(l.sums[4*i:])
}

// Rank returns the position of a file by (shard, offset).
func (l *Layout) Rank(file int) int { return int(binary.LittleEndian.Uint32(l.ranks[4*file:])) }

// At returns the file at a rank.
func (l *Layout) At(rank int) int { return int(binary.LittleEndian.Uint32(l.order[4*rank:])) }

// ShardRanks returns the ranks of a shard's files: from..to-1.
func (l *Layout) ShardRanks(shard int) (from, to int) {
	return int(l.firstRank[shard]), int(l.firstRank[shard+1])
}

// Verify computes the layout version anew and compares it. loadLayout leaves that out, as Load does.
func (l *Layout) Verify() error {
	if v := layoutHash(l.data); v != l.version {
		return corrupt("the layout has version %x, its file says %x", v, l.version)
	}
	return nil
}

// Close is that of the content; of nil it does nothing.
func (l *Layout) Close() error {
	if l == nil {
		return nil
	}
	return l.content.Close()
}
