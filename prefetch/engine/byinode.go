package engine

import (
	"cmp"
	"slices"
	"sort"
	"sync"

	"github.com/shoalfs/shoal/cache/catalog"
)

// maxByInode is the limit of files of a version for sorting folders by inode number: it takes 8 bytes per file.
const maxByInode = 1 << 22

// byInode is the order in which cp -r, and fts(3) in large folders, read a tree: a folder's entries are sorted by
// inode number. Here a folder's files come together, before its folders. Folders are sorted at their first use. It is
// safe for concurrent use.
type byInode struct {
	m    *catalog.Manifest
	walk func() *folderWalk

	mu     sync.Mutex
	sorted map[int]*sortedFolder
}

// folderWalk is the order of the folders.
type folderWalk struct {
	dirs  []uint32 // as they come
	first []uint32 // position of the first file of each of those
	start []uint32 // the same, by the number of the folder
}

// sortedFolder has a folder's files, numbered from its first.
type sortedFolder struct{ at, rank []uint32 }

func newByInode(m *catalog.Manifest) *byInode {
	return &byInode{m: m, walk: sync.OnceValue(func() *folderWalk { return walkByInode(m) }), sorted: map[int]*sortedFolder{}}
}

func walkByInode(m *catalog.Manifest) *folderWalk {
	w := &folderWalk{start: make([]uint32, m.Dirs())}
	pos := 0
	for todo := []int{0}; len(todo) > 0; {
		dir := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		d := m.Dir(dir)
		w.start[dir] = uint32(pos)
		if files := d.EndFile - d.FirstFile; files > 0 {
			w.dirs, w.first = append(w.dirs, uint32(dir)), append(w.first, uint32(pos))
			pos += files
		}
		at := sortByInode(d.EndDir-d.FirstDir, func(i int) []byte { return []byte(m.DirPath(d.FirstDir + i)) })
		for _, i := range slices.Backward(at) { // the next one last
			todo = append(todo, d.FirstDir+int(i))
		}
	}
	return w
}

// sortByInode returns the numbers below n by the inode numbers of their paths.
func sortByInode(n int, path func(i int) []byte) []uint32 {
	inodes, at := make([]uint64, n), make([]uint32, n)
	for i := range n {
		inodes[i], at[i] = catalog.Inode(path(i)), uint32(i)
	}
	slices.SortFunc(at, func(a, b uint32) int { return cmp.Compare(inodes[a], inodes[b]) })
	return at
}

func (b *byInode) folder(dir int) *sortedFolder {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.sorted[dir]
	if s == nil {
		d, buf := b.m.Dir(dir), []byte(nil)
		at := sortByInode(d.EndFile-d.FirstFile, func(i int) []byte { buf = b.m.AppendPath(buf[:0], d.FirstFile+i); return buf })
		s = &sortedFolder{at: at, rank: make([]uint32, len(at))}
		for rank, i := range at {
			s.rank[i] = uint32(rank)
		}
		b.sorted[dir] = s
	}
	return s
}

// Len implements order.Order.
func (b *byInode) Len() int { return b.m.Len() }

// At implements order.Order.
func (b *byInode) At(pos int) int {
	w := b.walk()
	i := sort.Search(len(w.first), func(i int) bool { return int(w.first[i]) > pos }) - 1
	dir := int(w.dirs[i])
	return b.m.Dir(dir).FirstFile + int(b.folder(dir).at[pos-int(w.first[i])])
}

// Find implements order.Locator.
func (b *byInode) Find(file, from int) int {
	if file < 0 || file >= b.m.Len() {
		return -1
	}
	dir := b.m.DirOf(file)
	pos := int(b.walk().start[dir]) + int(b.folder(dir).rank[file-b.m.Dir(dir).FirstFile])
	if pos < from {
		return -1
	}
	return pos
}
