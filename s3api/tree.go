package s3api

import (
	"sort"
	"strings"
	"sync"

	"github.com/shoalfs/shoal/cache/catalog"
)

// tree finds a manifest's files in the order of their keys.
type tree struct {
	m    *catalog.Manifest
	sort sync.Once
	dirs []uint32 // directories, the children of each in the order of name and slash
}

// next returns the first file whose path is greater than after, or also equal if equal is set.
func (t *tree) next(after string, equal bool) (file int, ok bool) {
	t.sort.Do(func() {
		t.dirs = make([]uint32, t.m.Dirs())
		for d := range t.dirs {
			t.dirs[d] = uint32(d)
		}
		for d := range t.m.Dirs() {
			x := t.m.Dir(d)
			children := t.dirs[x.FirstDir:x.EndDir]
			sort.Slice(children, func(i, j int) bool { return t.name(children[i]) < t.name(children[j]) })
		}
	})
	return t.below(0, after, equal)
}

// name is a directory's part of its files' keys.
func (t *tree) name(dir uint32) string { return t.m.Dir(int(dir)).Name + "/" }

// below is next within a directory, with paths from there.
func (t *tree) below(dir int, after string, equal bool) (file int, ok bool) {
	// All keys of the folder that after begins with come before those of its siblings that are greater than after.
	if head, rest, deeper := strings.Cut(after, "/"); deeper {
		if node, found := t.m.Lookup(dir, head); found && node.IsDir {
			if file, ok = t.below(node.Index, rest, equal); ok {
				return file, true
			}
		}
	}
	d := t.m.Dir(dir)
	file = d.FirstFile + sort.Search(d.EndFile-d.FirstFile, func(i int) bool {
		name := t.m.Name(d.FirstFile + i)
		return name > after || equal && name == after
	})
	children := t.dirs[d.FirstDir:d.EndDir]
	children = children[sort.Search(len(children), func(i int) bool { return t.name(children[i]) > after }):]
	for _, child := range children {
		if file < d.EndFile && t.m.Name(file) < t.name(child) {
			break
		}
		if first, ok := t.below(int(child), "", false); ok { // a folder may be empty
			return first, true
		}
	}
	return file, file < d.EndFile
}
