package catalog

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"iter"
	"math"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
)

// ControlDir is the name at the top of a mount that belongs to Shoal itself.
const ControlDir = ".shoal"

const (
	maxName     = 255     // NAME_MAX
	maxPath     = 4095    // PATH_MAX without its NUL: a longer path cannot be opened
	maxSize     = 1 << 50 // 1 PiB. No store has such objects, and the cache counts extents
	maxExamples = 16
)

// BuildOptions tell Build how to read a listing.
type BuildOptions struct {
	// Prefix begins every key and is not part of the paths. It is empty or ends in "/".
	Prefix string
	// Empty lets a manifest have no files.
	Empty bool
}

// Build makes a manifest of a listing, in memory, in any order of the objects. It fails with the listing's error, if
// an object has no ETag, if a key was listed twice with different versions, and if no file is left to show, unless
// it may be empty.
func Build(objects iter.Seq2[objstore.Object, error], o BuildOptions) (*Manifest, error) {
	if o.Prefix != "" && !strings.HasSuffix(o.Prefix, "/") {
		return nil, fmt.Errorf("prefix %q must be empty or end in a slash", o.Prefix)
	}
	b := builder{opts: o, dirIndex: map[string]uint32{"": 0}, dirs: []buildDir{{}}}
	for obj, err := range objects {
		if err != nil {
			return nil, err
		}
		if err := b.add(obj); err != nil {
			return nil, err
		}
	}
	return b.finish()
}

// builder collects files in arenas without pointers, so that ten million of them cost the garbage collector nothing.
// Arenas grow by blocks, so growing neither copies them nor leaves garbage.
type builder struct {
	opts     BuildOptions
	skipped  Skipped
	markers  []string // paths of folders
	names    byteArena
	etags    byteArena
	files    fileArena
	dirIndex map[string]uint32
	dirs     []buildDir
	lastDir  string // listings come sorted, so the last directory is nearly always the next one's
	lastID   uint32
}

type buildFile struct {
	name    uint64
	etag    uint64
	size    int64
	mtime   int64
	dir     uint32
	etagLen uint16
	nameLen uint8
}

const (
	fileBlock = 1 << 12 // files a block: 160 KiB
	byteBlock = 256 << 10
)

type fileArena struct {
	blocks [][]buildFile
	n      int
}

func (a *fileArena) add(f buildFile) {
	if a.n%fileBlock == 0 {
		a.blocks = append(a.blocks, make([]buildFile, 0, fileBlock))
	}
	last := &a.blocks[len(a.blocks)-1]
	*last = append(*last, f)
	a.n++
}

func (a *fileArena) at(i uint32) *buildFile { return &a.blocks[i/fileBlock][i%fileBlock] }

// byteArena keeps strings of at most 64 KiB, none across two blocks.
type byteArena struct{ blocks [][]byte }

// add returns where s begins.
func (a *byteArena) add(s string) uint64 {
	if n := len(a.blocks); n == 0 || len(a.blocks[n-1])+len(s) > byteBlock {
		a.blocks = append(a.blocks, make([]byte, 0, byteBlock))
	}
	last := &a.blocks[len(a.blocks)-1]
	at := uint64(len(a.blocks)-1)*byteBlock + uint64(len(*last))
	*last = append(*last, s...)
	return at
}

func (a *byteArena) at(off uint64, n int) []byte {
	if n == 0 { // its place may be the end of a block
		return nil
	}
	return a.blocks[off/byteBlock][off%byteBlock:][:n]
}

type buildDir struct {
	path     string
	parent   uint32
	number   uint32 // breadth-first
	children []uint32
	files    []uint32
}

func (b *builder) nameOf(f uint32) []byte {
	e := b.files.at(f)
	return b.names.at(e.name, int(e.nameLen))
}

func (b *builder) etagOf(f uint32) []byte {
	e := b.files.at(f)
	return b.etags.at(e.etag, int(e.etagLen))
}

func (b *builder) add(o objstore.Object) error {
	path, ok := strings.CutPrefix(o.Key, b.opts.Prefix)
	if !ok {
		return fmt.Errorf("key %q was listed but does not begin with the prefix %q", o.Key, b.opts.Prefix)
	}
	if o.Size == 0 && utf8.ValidString(path) && (path == "" || strings.HasSuffix(path, "/")) {
		b.skipped.Markers++
		if folder := strings.TrimSuffix(path, "/"); hostile(folder) == "" {
			b.markers = append(b.markers, strings.Clone(folder))
		}
		return nil
	}
	if why := hostile(path); why != "" {
		b.skipped.Hostile++
		b.example(o.Key, why)
		return nil
	}
	if o.Size < 0 || o.Size > maxSize {
		return fmt.Errorf("object %q was listed with a size of %d bytes: the store's listing is wrong", o.Key, o.Size)
	}
	if o.ETag == "" {
		return fmt.Errorf("object %q has no ETag, so a change could not be detected", o.Key)
	}
	if len(o.ETag) > segment.MaxETag {
		return fmt.Errorf("object %q has an ETag of %d bytes", o.Key, len(o.ETag))
	}
	if b.files.n >= math.MaxUint32-1 {
		return fmt.Errorf("more than %d objects", b.files.n)
	}
	dir, name := split(path)
	if dir != b.lastDir {
		b.lastID = b.dirID(dir)
		b.lastDir = b.dirs[b.lastID].path
	}
	b.dirs[b.lastID].files = append(b.dirs[b.lastID].files, uint32(b.files.n))
	b.files.add(buildFile{
		name: b.names.add(name), nameLen: uint8(len(name)),
		etag: b.etags.add(o.ETag), etagLen: uint16(len(o.ETag)),
		size: o.Size, mtime: Nanos(o.ModTime), dir: b.lastID,
	})
	return nil
}

// hostile returns why path cannot be shown as a file, or "".
func hostile(path string) string {
	if len(path) > maxPath {
		return "path over 4095 bytes"
	}
	if strings.IndexByte(path, 0) >= 0 {
		return "NUL in the name"
	}
	if !utf8.ValidString(path) {
		return "not UTF-8"
	}
	for first, rest, more := true, path, true; more; first = false {
		var c string
		c, rest, more = strings.Cut(rest, "/")
		switch {
		case c == "":
			return "empty path component"
		case c == "." || c == "..":
			return "path component " + c
		case len(c) > maxName:
			return "name over 255 bytes"
		case first && c == ControlDir:
			return "the name " + ControlDir + " is reserved"
		}
	}
	return ""
}

func (b *builder) example(key, why string) {
	if len(b.skipped.Examples) < maxExamples {
		if len(key) > 300 {
			key = key[:300] + "..."
		}
		b.skipped.Examples = append(b.skipped.Examples, strconv.Quote(key)+": "+why)
	}
}

func split(path string) (dir, name string) {
	i := strings.LastIndexByte(path, '/')
	return path[:max(i, 0)], path[i+1:]
}

// dirID returns the number of a directory, which it makes with all its ancestors.
func (b *builder) dirID(path string) uint32 {
	if id, ok := b.dirIndex[path]; ok {
		return id
	}
	dir, _ := split(path)
	parent := b.dirID(dir)
	id := uint32(len(b.dirs))
	path = strings.Clone(path) // not the whole key
	b.dirs = append(b.dirs, buildDir{path: path, parent: parent})
	b.dirs[parent].children = append(b.dirs[parent].children, id)
	b.dirIndex[path] = id
	return id
}

// arrange sorts the files of every directory by name and removes double and shadowed ones.
func (b *builder) arrange() error {
	var buf []byte
	for d := range b.dirs {
		dir := &b.dirs[d]
		byName := func(x, y uint32) int { return bytes.Compare(b.nameOf(x), b.nameOf(y)) }
		if !slices.IsSortedFunc(dir.files, byName) {
			slices.SortFunc(dir.files, byName)
		}
		kept := dir.files[:0]
		var prev uint32
		for i, f := range dir.files {
			if i > 0 && byName(prev, f) == 0 {
				if b.files.at(prev).size != b.files.at(f).size || !bytes.Equal(b.etagOf(prev), b.etagOf(f)) {
					return fmt.Errorf(
						"object %q was listed twice, with different versions: it changed meanwhile (list again)",
						b.opts.Prefix+path.Join(dir.path, string(b.nameOf(f))))
				}
				continue
			}
			prev = f
			if len(dir.children) > 0 {
				buf = buf[:0]
				if d != 0 {
					buf = append(append(buf, dir.path...), '/')
				}
				buf = append(buf, b.nameOf(f)...)
				if _, ok := b.dirIndex[string(buf)]; ok {
					b.skipped.Shadowed++
					b.example(b.opts.Prefix+string(buf), "a folder has the same name")
					continue
				}
			}
			kept = append(kept, f)
		}
		dir.files = kept
	}
	return nil
}

// addFolder makes the folder that a marker names, and its parents. It comes after arrange: if a file has the name of
// one of them, the file is shown, not the folder.
func (b *builder) addFolder(path string) (id uint32, ok bool) {
	if id, ok := b.dirIndex[path]; ok {
		return id, true
	}
	dir, name := split(path)
	parent, ok := b.addFolder(dir)
	if !ok {
		return 0, false
	}
	if _, file := slices.BinarySearchFunc(b.dirs[parent].files, []byte(name), func(f uint32, name []byte) int {
		return bytes.Compare(b.nameOf(f), name)
	}); file {
		return 0, false
	}
	return b.dirID(path), true
}

// breadthFirst returns the directories in the order of their numbers, and sets those.
func (b *builder) breadthFirst() []uint32 {
	order := make([]uint32, 1, len(b.dirs))
	for i := 0; i < len(order); i++ {
		dir := &b.dirs[order[i]]
		dir.number = uint32(i)
		// Siblings share all but the last component, so their paths sort as their names do.
		slices.SortFunc(dir.children, func(x, y uint32) int { return cmp.Compare(b.dirs[x].path, b.dirs[y].path) })
		order = append(order, dir.children...)
	}
	return order
}

// sampleOrder returns the directories in the order in which their files are numbered.
func (b *builder) sampleOrder() []uint32 {
	order := make([]uint32, len(b.dirs))
	for i := range order {
		order[i] = uint32(i)
	}
	slices.SortFunc(order, func(x, y uint32) int {
		p, q := b.dirs[x].path, b.dirs[y].path
		cp, _, _ := strings.Cut(p, "/")
		cq, _, _ := strings.Cut(q, "/")
		return cmp.Or(cmp.Compare(cp, cq), cmp.Compare(p, q))
	})
	return order
}

func (b *builder) finish() (*Manifest, error) {
	if err := b.arrange(); err != nil {
		return nil, err
	}
	var files int
	for i := range b.dirs {
		files += len(b.dirs[i].files)
	}
	if files == 0 && !b.opts.Empty {
		var what string
		if n := b.skipped.Total(); n > 0 {
			what = fmt.Sprintf(" that a file system can show (%d cannot: %s)",
				n, strings.Join(b.skipped.Examples, ", "))
		}
		return nil, fmt.Errorf("no objects under %q%s; check bucket and prefix", b.opts.Prefix, what)
	}
	for _, path := range b.markers {
		b.addFolder(path)
	}
	d := b.folders()
	d.order = make([]uint32, 0, files)
	for _, id := range b.sampleOrder() {
		dir := &b.dirs[id]
		r := &d.rows[dir.number]
		r.firstFile = uint32(len(d.order))
		d.order = append(d.order, dir.files...)
		r.endFile = uint32(len(d.order))
		for _, f := range dir.files {
			d.names += uint64(b.files.at(f).nameLen)
			d.etags += uint64(b.files.at(f).etagLen)
			if size := b.files.at(f).size; d.bytes > math.MaxInt64-size {
				return nil, fmt.Errorf("the objects under %q together exceed 8 EiB", b.opts.Prefix)
			}
			d.bytes += b.files.at(f).size
		}
	}
	var err error
	if d.skipped, err = json.Marshal(b.skipped); err != nil {
		return nil, fmt.Errorf("manifest: %w", err)
	}
	out := b.encode(d)
	seal(out)
	m, err := parse(out)
	if err != nil {
		return nil, fmt.Errorf("manifest: a bug made an invalid one: %w", err)
	}
	m.version = m.hash()
	putIDs(m)
	copy(out[16:], m.version[:])
	seal(out)
	return m, nil
}

// draft is what a manifest consists of.
type draft struct {
	rows         []dirRow // breadth first
	dirNames     []byte
	order        []uint32 // the files, as they are numbered
	names, etags uint64   // bytes of all
	bytes        int64    // of the objects
	skipped      []byte
}

// folders returns the rows of the directory table in breadth-first order, without their files.
func (b *builder) folders() *draft {
	d := &draft{rows: make([]dirRow, len(b.dirs))}
	next := uint32(1)
	for i, id := range b.breadthFirst() {
		dir := &b.dirs[id]
		r := &d.rows[i]
		_, name := split(dir.path)
		r.name, r.nameLen = uint64(len(d.dirNames)), uint32(len(name))
		d.dirNames = append(d.dirNames, name...)
		if i > 0 {
			r.parent = b.dirs[dir.parent].number
			r.depth = d.rows[r.parent].depth + 1
		}
		r.firstDir, r.endDir = next, next+uint32(len(dir.children))
		next = r.endDir
	}
	return d
}

// encode writes a manifest, which is still to be sealed.
func (b *builder) encode(d *draft) []byte {
	le, files := binary.LittleEndian, len(d.order)
	total := uint64(headerLen) + uint64(len(d.rows))*dirLen + 2*8*(uint64(files)+1) + (8+8+12+4)*uint64(files) +
		uint64(len(d.dirNames)) + d.names + d.etags + uint64(len(b.opts.Prefix)) + uint64(len(d.skipped))
	out := make([]byte, headerLen, total)
	for _, r := range d.rows {
		out = r.append(out)
	}
	out = appendOffsets(out, d.order, func(f uint32) int { return int(b.files.at(f).nameLen) })
	out = appendOffsets(out, d.order, func(f uint32) int { return int(b.files.at(f).etagLen) })
	for _, f := range d.order {
		out = le.AppendUint64(out, uint64(b.files.at(f).size))
	}
	for _, f := range d.order {
		out = le.AppendUint64(out, uint64(b.files.at(f).mtime))
	}
	out = out[:len(out)+12*files]
	for _, f := range d.order {
		out = le.AppendUint32(out, b.dirs[b.files.at(f).dir].number)
	}
	out = append(out, d.dirNames...)
	for _, f := range d.order {
		out = append(out, b.nameOf(f)...)
	}
	for _, f := range d.order {
		out = append(out, b.etagOf(f)...)
	}
	out = append(out, b.opts.Prefix...)
	out = append(out, d.skipped...)

	h := out[:headerLen]
	copy(h, manifestMagic)
	le.PutUint32(h[8:], manifestVersion)
	le.PutUint32(h[12:], headerLen)
	le.PutUint64(h[48:], uint64(files))
	le.PutUint64(h[56:], uint64(len(d.rows)))
	le.PutUint64(h[64:], uint64(d.bytes))
	le.PutUint64(h[72:], uint64(len(out)))
	for i, n := range []uint64{uint64(len(d.dirNames)), d.names, d.etags, uint64(len(b.opts.Prefix)),
		uint64(len(d.skipped))} {
		le.PutUint64(h[80+8*i:], n)
	}
	return out
}

// putIDs fills in the files' IDs, for which finish has left space, on all processors: each takes two hashes.
func putIDs(m *Manifest) {
	var wg sync.WaitGroup
	parts := runtime.GOMAXPROCS(0)
	for i := range parts {
		wg.Go(func() {
			for f := i * m.files / parts; f < (i+1)*m.files/parts; f++ {
				id := m.computeID(f)
				copy(m.ids[12*f:], id[:])
			}
		})
	}
	wg.Wait()
}
