package catalog

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"iter"
	"math"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/internal/durable"
)

var (
	// ErrCorrupt is wrapped by errors about files whose content was changed or damaged.
	ErrCorrupt = errors.New("corrupt")
	// ErrNewerFormat is wrapped by errors about files of a format version that this program does not support.
	ErrNewerFormat = errors.New("written by a newer version of shoal")
)

const (
	manifestMagic   = "SHOALMAN"
	manifestVersion = 2
	headerLen       = 128
	dirLen          = 40

	// noTime stands for an unknown modification time, and for one that int64 nanoseconds cannot hold.
	noTime = math.MinInt64
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Manifest is one immutable version of a dataset: its files in sample order, and their directories. It is safe for
// concurrent use. File and directory numbers out of range panic, as slice indices do.
type Manifest struct {
	*content
	Owner any // of whoever opened it; lives as long

	version      [32]byte
	files, dirs  int
	bytes        int64
	dirTab       []byte
	nameOff      []byte
	etagOff      []byte
	sizes        []byte
	mtimes       []byte
	ids          []byte
	fileDir      []byte
	dirNames     []byte
	names, etags []byte
	prefix       string
	skipped      Skipped

	dirTimes func() []int64 // the newest in or below each directory
}

// Dir is one directory. Its files are FirstFile..EndFile-1 and its subdirectories
// FirstDir..EndDir-1, both sorted by name. The root has the empty name and is its own parent.
type Dir struct {
	Name               string
	Parent             int
	FirstFile, EndFile int
	FirstDir, EndDir   int
}

// Node is a file or a directory of a manifest.
type Node struct {
	IsDir bool
	Index int // number of the file or directory
}

// Skipped tells which keys of a listing the tree cannot show.
type Skipped struct {
	// Markers counts empty objects whose key ends in "/", as some tools write for folders. They are shown as folders.
	Markers int `json:"markers"`
	// Hostile counts keys that are no valid path, see the package comment.
	Hostile int `json:"hostile"`
	// Shadowed counts files with the name of a directory; the directory is shown.
	Shadowed int `json:"shadowed"`
	// Examples holds the first few hostile and shadowed keys, quoted, each with the reason.
	Examples []string `json:"examples,omitempty"`
}

// Total returns the number of files that are missing in the tree. Markers are not counted.
func (s Skipped) Total() int { return s.Hostile + s.Shadowed }

// Load reads the manifest file at path and checks it: checksums, lengths, and the structure of the
// tree. Errors wrap [ErrCorrupt], [ErrNewerFormat], or the operating system's error.
func Load(path string) (*Manifest, error) { return load(path, nil) }

func load(path string, key *crypt.Key) (*Manifest, error) {
	m, err := loadFile(path, "manifest", key, parse)
	if err != nil {
		return nil, err
	}
	m.loaded = true
	return m, nil
}

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
}

// parse checks data and returns a manifest that reads from it. It trusts nothing: it checks each index that is used.
func parse(data []byte) (*Manifest, error) {
	_, err := CheckHeader(data, headerLen, manifestMagic, manifestVersion, manifestVersion, "a manifest")
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	h := data[:headerLen]
	files, dirs := le.Uint64(h[48:]), le.Uint64(h[56:])
	if n := le.Uint64(h[72:]); n != uint64(len(data)) {
		return nil, corrupt("%d bytes long, want %d", len(data), n)
	}
	if files > math.MaxUint32-1 || dirs > math.MaxUint32-1 || dirs == 0 {
		return nil, corrupt("%d files in %d directories", files, dirs)
	}
	var arena [5]uint64
	want := uint64(headerLen) + dirs*dirLen + 2*8*(files+1) + (8+8+12+4)*files
	for i := range arena {
		arena[i] = le.Uint64(h[80+8*i:])
		if arena[i] > uint64(len(data)) {
			return nil, corrupt("section of %d bytes", arena[i])
		}
		want += arena[i]
	}
	if want != uint64(len(data)) {
		return nil, corrupt("sections fill %d bytes of %d", want, len(data))
	}
	damaged := make(chan error, 1) // found while the rest is checked, which relies on nothing
	go func() { damaged <- CheckContent(data, headerLen) }()
	m, err := parseColumns(data, files, dirs, arena)
	if bad := <-damaged; bad != nil {
		return nil, bad
	}
	return m, err
}

// cutter returns a function that returns the next n bytes of a file's content each time.
func cutter(rest []byte) func(n uint64) []byte {
	return func(n uint64) []byte {
		s := rest[:n:n]
		rest = rest[n:]
		return s
	}
}

// parseColumns cuts the file into columns of the right lengths, and checks these.
func parseColumns(data []byte, files, dirs uint64, arena [5]uint64) (*Manifest, error) {
	h := data[:headerLen]
	m := &Manifest{content: &content{data: data}, version: [32]byte(h[16:48]), files: int(files), dirs: int(dirs),
		bytes: int64(binary.LittleEndian.Uint64(h[64:]))}
	m.dirTimes = sync.OnceValue(m.newest)
	cut := cutter(data[headerLen:])
	m.dirTab = cut(dirs * dirLen)
	m.nameOff, m.etagOff = cut(8*(files+1)), cut(8*(files+1))
	m.sizes, m.mtimes, m.ids, m.fileDir = cut(8*files), cut(8*files), cut(12*files), cut(4*files)
	m.dirNames, m.names, m.etags = cut(arena[0]), cut(arena[1]), cut(arena[2])
	m.prefix = string(cut(arena[3]))
	if err := json.Unmarshal(cut(arena[4]), &m.skipped); err != nil {
		return nil, corrupt("skipped: %v", err)
	}
	if err := m.checkDirs(); err != nil {
		return nil, err
	}
	return m, m.checkFiles()
}

// checkDirs checks that the directories are one tree, numbered breadth-first, with sorted names and sane file ranges.
func (m *Manifest) checkDirs() error {
	if m.prefix != "" && !strings.HasSuffix(m.prefix, "/") {
		return corrupt("prefix %q", m.prefix)
	}
	next := 1 // first directory without a parent yet
	for d := range m.dirs {
		r := m.dirRow(d)
		if r.name > uint64(len(m.dirNames)) || uint64(r.nameLen) > uint64(len(m.dirNames))-r.name {
			return corrupt("directory %d: name out of range", d)
		}
		if r.firstFile > r.endFile || int(r.endFile) > m.files {
			return corrupt("directory %d: files %d to %d of %d", d, r.firstFile, r.endFile, m.files)
		}
		if int(r.firstDir) != next || r.endDir < r.firstDir || int(r.endDir) > m.dirs {
			return corrupt("directory %d: subdirectories %d to %d of %d", d, r.firstDir, r.endDir, m.dirs)
		}
		next = int(r.endDir)
		if d == 0 {
			if r.parent != 0 || r.nameLen != 0 || r.depth != 0 {
				return corrupt("the root has a name or a parent")
			}
			continue
		}
		// A child has a greater breadth-first number than its parent, so the walk to the root always ends.
		if int(r.parent) >= d {
			return corrupt("directory %d: parent %d", d, r.parent)
		}
		p := m.dirRow(int(r.parent))
		if d < int(p.firstDir) || d >= int(p.endDir) || r.depth != p.depth+1 {
			return corrupt("directory %d: not below its parent %d", d, r.parent)
		}
		if n := m.dirName(d); len(n) == 0 || d > int(p.firstDir) && bytes.Compare(m.dirName(d-1), n) >= 0 {
			return corrupt("directory %d: name %q out of order", d, n)
		}
	}
	if next != m.dirs {
		return corrupt("%d of %d directories have no parent", m.dirs-next, m.dirs)
	}
	return nil
}

// checkFiles checks the columns: offsets ascend and stay inside their arena, every file lies in its
// directory's range, names ascend within a directory, and the sizes add up.
func (m *Manifest) checkFiles() error {
	if err := cmp.Or(ascends("names", m.nameOff, m.names), ascends("ETags", m.etagOff, m.etags)); err != nil {
		return err
	}
	for _, arena := range [][]byte{m.names, m.dirNames} {
		if bytes.IndexByte(arena, '/') >= 0 || bytes.IndexByte(arena, 0) >= 0 {
			return corrupt("a name holds a slash or a NUL")
		}
	}
	var sum int64
	prevDir, row := -1, dirRow{}
	for f := range m.files {
		d := int(binary.LittleEndian.Uint32(m.fileDir[4*f:]))
		if d != prevDir {
			if d >= m.dirs {
				return corrupt("file %d: directory %d of %d", f, d, m.dirs)
			}
			row = m.dirRow(d)
			if int(row.firstFile) != f {
				return corrupt("file %d: directory %d begins with file %d", f, d, row.firstFile)
			}
			prevDir = d
		} else if bytes.Compare(m.name(f-1), m.name(f)) >= 0 {
			return corrupt("file %d: name out of order", f)
		}
		if f >= int(row.endFile) || len(m.name(f)) == 0 {
			return corrupt("file %d: not in directory %d, or without a name", f, d)
		}
		size := m.Size(f)
		if size < 0 || sum > math.MaxInt64-size {
			return corrupt("file %d: size %d", f, size)
		}
		sum += size
	}
	if sum != m.bytes {
		return corrupt("sizes add up to %d, want %d", sum, m.bytes)
	}
	// Each file is in the range of its own directory; equal totals mean that no range claims a file of another one.
	claimed := 0
	for d := range m.dirs {
		r := m.dirRow(d)
		claimed += int(r.endFile - r.firstFile)
	}
	if claimed != m.files {
		return corrupt("directories hold %d files, want %d", claimed, m.files)
	}
	return nil
}

// ascends checks where texts begin.
func ascends(what string, off, texts []byte) error {
	prev := uint64(0)
	for i := 0; i < len(off); i += 8 {
		o := binary.LittleEndian.Uint64(off[i:])
		if i == 0 && o != 0 || o < prev {
			return corrupt("%s: offset %d descends", what, i/8)
		}
		prev = o
	}
	if prev != uint64(len(texts)) {
		return corrupt("%s: last offset is %d, want %d", what, prev, len(texts))
	}
	return nil
}

// dirRow is a row of the directory table.
type dirRow struct {
	name               uint64
	nameLen, parent    uint32
	firstFile, endFile uint32
	firstDir, endDir   uint32
	depth              uint32
}

func (m *Manifest) dirRow(d int) dirRow {
	b := m.dirTab[d*dirLen : (d+1)*dirLen]
	le := binary.LittleEndian
	return dirRow{
		name: le.Uint64(b), nameLen: le.Uint32(b[8:]), parent: le.Uint32(b[12:]),
		firstFile: le.Uint32(b[16:]), endFile: le.Uint32(b[20:]),
		firstDir: le.Uint32(b[24:]), endDir: le.Uint32(b[28:]), depth: le.Uint32(b[32:]),
	}
}

func (r dirRow) append(b []byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint64(b, r.name)
	for _, v := range [...]uint32{r.nameLen, r.parent, r.firstFile, r.endFile, r.firstDir, r.endDir, r.depth, 0} {
		b = le.AppendUint32(b, v)
	}
	return b
}

func (m *Manifest) dirName(d int) []byte {
	b := m.dirTab[d*dirLen : (d+1)*dirLen]
	off := binary.LittleEndian.Uint64(b)
	return m.dirNames[off : off+uint64(binary.LittleEndian.Uint32(b[8:]))]
}

// textAt returns the i-th text of those that appendOffsets told the places of.
func textAt(texts, offs []byte, i int) []byte {
	off := offs[8*i : 8*i+16]
	return texts[binary.LittleEndian.Uint64(off):binary.LittleEndian.Uint64(off[8:])]
}

func (m *Manifest) name(file int) []byte { return textAt(m.names, m.nameOff, file) }
func (m *Manifest) etag(file int) []byte { return textAt(m.etags, m.etagOff, file) }

// Version returns the dataset version, 64 hexadecimal digits.
func (m *Manifest) Version() string { return hex.EncodeToString(m.version[:]) }

// FileName returns the name of the manifest's file: the dataset version; with empty folders, which are not part of
// it, the SHA-256 of both.
func (m *Manifest) FileName() string {
	h := sha256.New()
	h.Write(m.version[:])
	empty := 0
	var path []byte
	for d := 1; d < m.dirs; d++ {
		if r := m.dirRow(d); r.firstFile == r.endFile && r.firstDir == r.endDir {
			empty++
			path = append(m.appendDirPath(path[:0], d), 0)
			h.Write(path)
		}
	}
	if empty == 0 {
		return m.Version()
	}
	return hex.EncodeToString(h.Sum(nil))
}

// VersionHash returns the dataset version as bytes, a SHA-256.
func (m *Manifest) VersionHash() [32]byte { return m.version }

// Len returns the number of files.
func (m *Manifest) Len() int { return m.files }

// Bytes returns the sum of the files' sizes.
func (m *Manifest) Bytes() int64 { return m.bytes }

// Prefix returns the part of the object's key before the path. It is empty or ends in "/".
func (m *Manifest) Prefix() string { return m.prefix }

// Path returns a file's path below the prefix.
func (m *Manifest) Path(file int) string {
	var buf [256]byte
	return string(m.AppendPath(buf[:0], file))
}

// AppendPath appends a file's path to dst.
func (m *Manifest) AppendPath(dst []byte, file int) []byte {
	if d := m.DirOf(file); d != 0 {
		dst = append(m.appendDirPath(dst, d), '/')
	}
	return append(dst, m.name(file)...)
}

func (m *Manifest) appendDirPath(dst []byte, d int) []byte {
	if d == 0 {
		return dst
	}
	if p := int(binary.LittleEndian.Uint32(m.dirTab[d*dirLen+12:])); p != 0 {
		dst = append(m.appendDirPath(dst, p), '/')
	}
	return append(dst, m.dirName(d)...)
}

// Name returns a file's name within its directory.
func (m *Manifest) Name(file int) string { return string(m.name(file)) }

// Size returns a file's size in bytes.
func (m *Manifest) Size(file int) int64 {
	return int64(binary.LittleEndian.Uint64(m.sizes[8*file:]))
}

// ETag returns the version tag of a file's object.
func (m *Manifest) ETag(file int) string { return string(m.etag(file)) }

// ModTime returns a file's modification time in UTC; the zero time if the listing has none.
func (m *Manifest) ModTime(file int) time.Time {
	return TimeOf(m.mtime(file))
}

func (m *Manifest) mtime(file int) int64 {
	return int64(binary.LittleEndian.Uint64(m.mtimes[8*file:]))
}

// Nanos encodes t as in manifests, layouts and the indexes of shards: in nanoseconds, unless it is unknown.
func Nanos(t time.Time) int64 {
	if t.IsZero() || t.Year() <= 1678 || t.Year() >= 2262 { // what UnixNano can hold
		return noTime
	}
	return t.UnixNano()
}

// TimeOf is the reverse of Nanos; the zero time if it is unknown.
func TimeOf(ns int64) time.Time {
	if ns == noTime {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}

// DirTime returns the time of the newest file in or below a directory; the zero time if none has one.
// The first call reads all files' times, some ms for a million, and keeps 8 bytes a directory.
func (m *Manifest) DirTime(dir int) time.Time {
	return TimeOf(m.dirTimes()[dir])
}

func (m *Manifest) newest() []int64 {
	newest := make([]int64, m.dirs)
	// A subdirectory has a greater number than its parent, so in reverse each is complete before its parent adds it.
	for d := m.dirs - 1; d >= 0; d-- {
		r := m.dirRow(d)
		t := int64(noTime)
		for f := int(r.firstFile); f < int(r.endFile); f++ {
			t = max(t, m.mtime(f))
		}
		for c := r.firstDir; c < r.endDir; c++ {
			t = max(t, newest[c])
		}
		newest[d] = t
	}
	return newest
}

// Object returns the object that holds a file's bytes.
func (m *Manifest) Object(file int) objstore.Object {
	return objstore.Object{Key: m.prefix + m.Path(file), Size: m.Size(file), ETag: m.ETag(file),
		ModTime: m.ModTime(file)}
}

// ID returns the ID of the version of a file's object in record tables.
func (m *Manifest) ID(file int) segment.VersionID { return segment.VersionID(m.ids[12*file:]) }

// computeID computes what ID reads.
func (m *Manifest) computeID(file int) segment.VersionID {
	return segment.IDOf(m.PathHash(file), m.Size(file), m.ETag(file))
}

// PathHash returns the first 16 bytes of the SHA-256 of a file's path, by which cached records name it.
func (m *Manifest) PathHash(file int) [16]byte {
	var buf [256]byte
	h := sha256.Sum256(m.AppendPath(buf[:0], file))
	return [16]byte(h[:16])
}

// DirOf returns the directory of a file.
func (m *Manifest) DirOf(file int) int {
	return int(binary.LittleEndian.Uint32(m.fileDir[4*file:]))
}

// Dirs returns the number of directories, the root included.
func (m *Manifest) Dirs() int { return m.dirs }

// Dir returns a directory; 0 is the root.
func (m *Manifest) Dir(d int) Dir {
	r := m.dirRow(d)
	return Dir{
		Name: string(m.dirName(d)), Parent: int(r.parent),
		FirstFile: int(r.firstFile), EndFile: int(r.endFile), FirstDir: int(r.firstDir), EndDir: int(r.endDir),
	}
}

// DirPath returns a directory's path; "" for the root.
func (m *Manifest) DirPath(d int) string {
	var buf [256]byte
	return string(m.appendDirPath(buf[:0], d))
}

// holdsFiles reports whether a file lies in or below a directory.
func (m *Manifest) holdsFiles(dir int) bool {
	r := m.dirRow(dir)
	for d := r.firstDir; d < r.endDir; d++ {
		if m.holdsFiles(int(d)) {
			return true
		}
	}
	return r.firstFile < r.endFile
}

// Lookup finds a name in a directory. It does not allocate.
func (m *Manifest) Lookup(dir int, name string) (Node, bool) {
	r := m.dirRow(dir)
	if file, ok := m.lookupFile(r, name); ok {
		return Node{Index: file}, true
	}
	lo, n := int(r.firstDir), int(r.endDir-r.firstDir)
	if i := sort.Search(n, func(i int) bool {
		return string(m.dirName(lo+i)) >= name
	}); i < n && string(m.dirName(lo+i)) == name {
		return Node{IsDir: true, Index: lo + i}, true
	}
	return Node{}, false
}

// Find finds a path; "" is the root. Paths have no leading, trailing or double slash. It does not allocate.
func (m *Manifest) Find(path string) (Node, bool) {
	at := Node{IsDir: true}
	for path != "" {
		name, rest, more := strings.Cut(path, "/")
		if more && rest == "" || !at.IsDir {
			return Node{}, false
		}
		var ok bool
		if at, ok = m.Lookup(at.Index, name); !ok {
			return Node{}, false
		}
		path = rest
	}
	return at, true
}

// Skipped returns the keys of the listing that the tree does not show.
func (m *Manifest) Skipped() Skipped { return m.skipped }

// Verify recomputes the dataset version and the files' IDs and compares them. Load leaves that out: its checksums
// find damage, and hashing a million files takes longer than all the rest.
func (m *Manifest) Verify() error {
	for f := range m.files {
		if id := m.computeID(f); id != m.ID(f) {
			return corrupt("file %d has ID %x, the manifest says %x", f, id, m.ID(f))
		}
	}
	if v := m.hash(); v != m.version {
		return corrupt("the files have dataset version %x, the manifest says %x", v, m.version)
	}
	return nil
}

// hash computes the dataset version; its encoding is in the package comment.
func (m *Manifest) hash() [32]byte {
	h := sha256.New()
	le := binary.LittleEndian
	buf := make([]byte, 0, 64<<10)
	for f := range m.files {
		at := len(buf)
		buf = m.AppendPath(append(buf, 0, 0, 0, 0), f)
		le.PutUint32(buf[at:], uint32(len(buf)-at-4))
		buf = le.AppendUint64(buf, uint64(m.Size(f)))
		tag := m.etag(f)
		buf = append(le.AppendUint32(buf, uint32(len(tag))), tag...)
		if len(buf) >= 48<<10 {
			h.Write(buf)
			buf = buf[:0]
		}
	}
	h.Write(buf)
	return [32]byte(h.Sum(nil))
}

// Save writes the manifest into the folder dir, which it makes if necessary, under its [Manifest.FileName], and makes
// it durable. An equal file there is kept; another one (the same version with another prefix) is replaced by rename.
func (m *Manifest) Save(dir string) (path string, err error) {
	return saveUnder(dir, m.FileName(), m.data, "manifest", nil)
}

// write replaces a file, so that after a crash either the old or the new content is there. The killpoints' names begin
// with what.
func write(path, what string, data iter.Seq[[]byte]) error {
	return durable.Write(path, "catalog."+what, 0o644, data)
}
