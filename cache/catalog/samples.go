package catalog

import (
	"bytes"
	"fmt"
	"path"
	"slices"
	"sort"
	"strings"
	"sync"
)

// Samples numbers a manifest's files that are samples, in sample order: those below a class folder. It is immutable
// and safe for concurrent use. It reads from the manifest, which must stay open.
type Samples struct {
	m       *Manifest
	first   int      // file of sample 0, while list is nil
	n       int      // number of samples
	list    []uint32 // files of the samples, nil where all files from first on are samples
	classes []string

	mu    sync.Mutex
	kinds map[string]Kind // the answers of Kind
}

// Filter says which files are samples.
type Filter struct {
	match func(name []byte) bool
	path  bool // it looks at the path, not at the base name alone
}

// Samples numbers the files that match; all if match is nil. Files at the root belong to no class and are not
// numbered, unless no folder holds a file: then they are the samples, as in most of WebDataset's shards, and have no
// label. If every file matches, it uses no memory per file.
func (m *Manifest) Samples(match *Filter) *Samples {
	root := m.Dir(0)
	s := &Samples{m: m, first: root.EndFile, n: m.files - root.EndFile}
	if root.EndFile == m.files {
		s.first, s.n = 0, m.files
	} else {
		for d := root.FirstDir; d < root.EndDir; d++ {
			s.classes = append(s.classes, string(m.dirName(d)))
		}
	}
	if match == nil {
		return s
	}
	var buf []byte
	for f := s.first; f < m.files; f++ {
		name := m.name(f)
		if match.path {
			buf = m.AppendPath(buf[:0], f)
			name = buf
		}
		switch ok := match.match(name); {
		case ok && s.list != nil:
			s.list = append(s.list, uint32(f))
		case !ok && s.list == nil:
			// The first file that is left out: from here on the samples are listed.
			s.list = make([]uint32, 0, s.n-1)
			for g := s.first; g < f; g++ {
				s.list = append(s.list, uint32(g))
			}
		}
	}
	if s.list != nil {
		s.list = slices.Clip(s.list)
		s.n = len(s.list)
	}
	return s
}

// Len returns the number of samples.
func (s *Samples) Len() int { return s.n }

// File returns the file of a sample.
func (s *Samples) File(sample int) int {
	if s.list != nil {
		return int(s.list[sample])
	}
	if sample < 0 || sample >= s.n {
		panic(fmt.Sprintf("catalog: sample %d of %d", sample, s.n))
	}
	return s.first + sample
}

// Sample returns the number of a file, or false if the file is not a sample.
func (s *Samples) Sample(file int) (int, bool) {
	if s.list != nil {
		return slices.BinarySearch(s.list, uint32(file))
	}
	if file < s.first || file >= s.first+s.n {
		return 0, false
	}
	return file - s.first, true
}

// Label returns the class of a sample, as an index in Classes; -1 if there are none.
func (s *Samples) Label(sample int) int {
	d := s.m.DirOf(s.File(sample))
	if d == 0 {
		return -1
	}
	r := s.m.dirRow(d)
	for r.depth > 1 {
		d = int(r.parent)
		r = s.m.dirRow(d)
	}
	return d - 1 // the root's subdirectories are numbered from 1
}

// Classes returns the names of all top-level folders, sorted. As in torchvision, an empty one is a class too. There
// are none if the samples have no label. The caller must not change it.
func (s *Samples) Classes() []string { return s.classes }

// Tree is a folder that a trainer may use as a dataset of its own, as in ImageFolder(mount/train).
type Tree struct {
	Folder     string
	First, Len int // its samples: First is number 0 for that trainer
}

// Trees returns the top-level folders that hold class folders, if these hold only files: then the samples below have
// the same order when numbered by themselves.
func (s *Samples) Trees() (trees []Tree) {
	root := s.m.Dir(0)
	for d := root.FirstDir; d < root.EndDir; d++ {
		dir := s.m.Dir(d)
		from, to, flat := s.m.files, 0, true
		for c := dir.FirstDir; c < dir.EndDir; c++ {
			class := s.m.Dir(c)
			from, to = min(from, class.FirstFile), max(to, class.EndFile)
			for sub := class.FirstDir; flat && sub < class.EndDir; sub++ {
				flat = !s.m.holdsFiles(sub)
			}
		}
		if !flat || from >= to {
			continue
		}
		first, end := s.atOrAfter(from), s.atOrAfter(to)
		if first < end {
			trees = append(trees, Tree{Folder: dir.Name, First: first, Len: end - first})
		}
	}
	return trees
}

// atOrAfter returns the first sample whose file is file or one after it.
func (s *Samples) atOrAfter(file int) int {
	return sort.Search(s.n, func(i int) bool { return s.File(i) >= file })
}

// images are torchvision's IMG_EXTENSIONS.
var images = []string{".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}

// isImage reports whether a name ends in one of them, in any case, with or without the suffix of `shoal pack --decode`.
func isImage(name []byte) bool {
	name = bytes.TrimSuffix(name, []byte(".npy"))
	ext := name[max(bytes.LastIndexByte(name, '.'), 0):]
	return slices.ContainsFunc(images, func(e string) bool {
		return len(e) == len(ext) && bytes.EqualFold(ext, []byte(e))
	})
}

// Match returns the filter that glob names: "images" for torchvision's IMG_EXTENSIONS in any case, with or without
// the suffix of pictures that pack has decoded; "*" for all files; a list such as ".jpg,.jpeg" of extensions; else a
// pattern for [path.Match], applied to the base name, or to the whole path if it contains a "/".
func Match(glob string) (*Filter, error) {
	switch glob {
	case "images":
		return &Filter{match: isImage}, nil
	case "*":
		return &Filter{match: func([]byte) bool { return true }}, nil
	}
	if match, ok := extensions(glob); ok {
		return &Filter{match: match}, nil
	}
	if _, err := path.Match(glob, ""); err != nil || glob == "" {
		return nil, fmt.Errorf("samples pattern %q is not valid (use images, *, extensions such as .jpg,.png or a "+
			"pattern such as *.jpg or */train/*.png)", glob)
	}
	return &Filter{path: strings.Contains(glob, "/"), match: func(name []byte) bool {
		ok, _ := path.Match(glob, string(name)) // the pattern was checked above
		return ok
	}}, nil
}
