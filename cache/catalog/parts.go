package catalog

import (
	"bytes"
	"encoding/binary"
	"iter"
	"slices"
	"sort"
	"strings"
	"sync"
)

// Cut cuts a base name at its first dot into the stem, by which files form one sample, as WebDataset has it, and
// the extension. Leading dots belong to the stem. dotted says whether there is a dot.
func Cut(name string) (stem, ext string, dotted bool) {
	lead := len(name) - len(strings.TrimLeft(name, "."))
	if i := strings.IndexByte(name[lead:], '.'); i >= 0 {
		return name[:lead+i], name[lead+i+1:], true
	}
	return name, "", false
}

// Part returns the file that belongs to a file by its extension, which begins after the first dot: the one
// in the same folder with the same stem. a/7.jpg has the part "json" where a/7.json is, and the part
// "mask.png" where a/7.mask.png is. Letters count as they are. It costs a binary search of the folder.
func (m *Manifest) Part(file int, ext string) (part int, ok bool) {
	name := m.name(file)
	stem, _, _ := Cut(string(name))
	var buf [256]byte
	want := append(append(append(buf[:0], stem...), '.'), ext...)
	r := m.dirRow(m.DirOf(file))
	return m.lookupFile(r, want)
}

func (m *Manifest) lookupFile(r dirRow, name []byte) (file int, ok bool) {
	i := m.atOrAfter(r, name)
	return i, i < int(r.endFile) && bytes.Equal(m.name(i), name)
}

// atOrAfter returns the first file of a directory whose name is name or comes after it.
func (m *Manifest) atOrAfter(r dirRow, name []byte) int {
	lo := int(r.firstFile)
	return lo + sort.Search(int(r.endFile)-lo, func(i int) bool { return bytes.Compare(m.name(lo+i), name) >= 0 })
}

// fileAt returns the file whose name holds the byte at an offset in names.
func (m *Manifest) fileAt(off int) int {
	return sort.Search(m.files, func(f int) bool { return binary.LittleEndian.Uint64(m.nameOff[8*f+8:]) > uint64(off) })
}

// maxBeside bounds how many files of one stem are looked at. A stem of more is no sample of several files, but a
// name with a dot in it: img.0001.jpg, img.0002.jpg.
const maxBeside = 256

// Beside yields the files of the samples that a file has its folder and stem in common with, itself among
// them if it is one: those whose part it may be. It yields at most 256.
func (s *Samples) Beside(file int) iter.Seq[int] {
	return func(yield func(int) bool) {
		stem, _, _ := Cut(s.m.Name(file))
		r := s.m.dirRow(s.m.DirOf(file))
		key := append(make([]byte, 0, len(stem)+1), stem...)
		if f, ok := s.m.lookupFile(r, key); ok {
			if _, is := s.Sample(f); is && !yield(f) {
				return
			}
		}
		key = append(key, '.')
		for f, n := s.m.atOrAfter(r, key), 0; f < int(r.endFile) && bytes.HasPrefix(s.m.name(f), key) && n < maxBeside; f, n = f+1, n+1 {
			if _, is := s.Sample(f); is && !yield(f) {
				return
			}
		}
	}
}

// Kind says whether a dataset has parts of an extension.
type Kind struct {
	Found    bool // some sample has one
	Numbered bool // those parts are numbered as samples themselves, as masks are where every picture is
}

// kinds remembers the parts that were asked for.
type kinds struct {
	mu  sync.Mutex
	has map[string]Kind
}

// maxKinds bounds what is remembered: extensions come from the network.
const maxKinds = 64

// Kind tells whether the samples have parts of an extension. The first call for an extension searches all
// names, which takes some ms for a million, and is remembered.
func (s *Samples) Kind(ext string) Kind {
	s.kinds.mu.Lock()
	defer s.kinds.mu.Unlock()
	if k, ok := s.kinds.has[ext]; ok {
		return k
	}
	k := s.findKind(ext)
	if s.kinds.has == nil || len(s.kinds.has) == maxKinds {
		s.kinds.has = map[string]Kind{}
	}
	s.kinds.has[ext] = k
	return k
}

func (s *Samples) findKind(ext string) Kind {
	m, suffix := s.m, []byte("."+ext)
	for off := 0; ; {
		i := bytes.Index(m.names[off:], suffix)
		if i < 0 {
			return Kind{}
		}
		f := m.fileAt(off + i)
		if _, e, _ := Cut(m.Name(f)); e == ext {
			for range s.Beside(f) {
				_, numbered := s.Sample(f)
				return Kind{Found: true, Numbered: numbered}
			}
		}
		off += i + 1
	}
}

// Part returns the file that belongs to a sample by its extension, see [Manifest.Part].
func (s *Samples) Part(sample int, ext string) (file int, ok bool) {
	return s.m.Part(s.File(sample), ext)
}

// extensions returns the match of files by what follows their stem: ".jpg,.jpeg" takes 1.jpg and leaves
// 1.mask.jpg. ok is false for a glob that is no such list.
func extensions(glob string) (match func(name []byte) bool, ok bool) {
	list := strings.Split(glob, ",")
	for i, e := range list {
		if len(e) < 2 || e[0] != '.' || strings.ContainsAny(e, `/*?[\`) {
			return nil, false
		}
		list[i] = e[1:]
	}
	return func(name []byte) bool {
		_, ext, _ := Cut(string(name))
		return slices.Contains(list, ext)
	}, true
}
