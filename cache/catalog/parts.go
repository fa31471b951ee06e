package catalog

import (
	"bytes"
	"encoding/binary"
	"iter"
	"slices"
	"sort"
	"strings"
)

// Cut cuts a base name at its first dot into stem and extension. As in WebDataset, files with one stem form one
// sample. Leading dots belong to the stem. dotted says whether there is a dot.
func Cut(name string) (stem, ext string, dotted bool) {
	lead := len(name) - len(strings.TrimLeft(name, "."))
	if i := strings.IndexByte(name[lead:], '.'); i >= 0 {
		return name[:lead+i], name[lead+i+1:], true
	}
	return name, "", false
}

// Part returns the file with the same folder and stem and the extension ext, which begins after the first dot.
// a/7.jpg has the part "json" if there is a/7.json, and the part "mask.png" if there is a/7.mask.png. Case matters.
// It costs a binary search of the folder.
func (m *Manifest) Part(file int, ext string) (part int, ok bool) {
	stem, _, _ := Cut(m.Name(file))
	return m.lookupFile(m.dirRow(m.DirOf(file)), stem+"."+ext)
}

func (m *Manifest) lookupFile(r dirRow, name string) (file int, ok bool) {
	i := m.atOrAfter(r, name)
	return i, i < int(r.endFile) && string(m.name(i)) == name
}

// atOrAfter returns the first file of a directory whose name is name or comes after it.
func (m *Manifest) atOrAfter(r dirRow, name string) int {
	lo := int(r.firstFile)
	return lo + sort.Search(int(r.endFile)-lo, func(i int) bool { return string(m.name(lo+i)) >= name })
}

// maxBeside bounds how many files of one stem are looked at. A stem with more is not a sample of several files, but a
// name with a dot in it: img.0001.jpg, img.0002.jpg.
const maxBeside = 256

// Beside yields the samples with the file's folder and stem, itself included if it is a sample: those whose part it
// may be. It yields at most 256.
func (s *Samples) Beside(file int) iter.Seq[int] {
	return func(yield func(int) bool) {
		stem, _, _ := Cut(s.m.Name(file))
		r := s.m.dirRow(s.m.DirOf(file))
		if f, ok := s.m.lookupFile(r, stem); ok {
			if _, is := s.Sample(f); is && !yield(f) {
				return
			}
		}
		first := s.m.atOrAfter(r, stem+".")
		for f := first; f < min(int(r.endFile), first+maxBeside) && strings.HasPrefix(s.m.Name(f), stem+"."); f++ {
			if _, is := s.Sample(f); is && !yield(f) {
				return
			}
		}
	}
}

// Kind says whether a dataset has parts of an extension.
type Kind struct {
	Found    bool // some sample has one
	Numbered bool // those parts are samples themselves, as masks are if every picture is a sample
}

// maxKinds bounds the cache of Kind's answers: extensions come from the network.
const maxKinds = 64

// Kind tells whether the samples have parts of an extension. The first call for an extension searches all names, some
// ms for a million; the result is cached.
func (s *Samples) Kind(ext string) Kind {
	s.mu.Lock()
	defer s.mu.Unlock()
	k, ok := s.kinds[ext]
	if !ok {
		k = s.findKind(ext)
		if s.kinds == nil || len(s.kinds) == maxKinds {
			s.kinds = map[string]Kind{}
		}
		s.kinds[ext] = k
	}
	return k
}

func (s *Samples) findKind(ext string) Kind {
	m, suffix := s.m, []byte("."+ext)
	for off := 0; ; {
		i := bytes.Index(m.names[off:], suffix)
		if i < 0 {
			return Kind{}
		}
		f := sort.Search(m.files, func(f int) bool {
			return binary.LittleEndian.Uint64(m.nameOff[8*f+8:]) > uint64(off+i)
		})
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

// extensions returns a match of files by their extension: ".jpg,.jpeg" matches 1.jpg, but not 1.mask.jpg. "images" in
// the list stands for all pictures. ok is false if glob is not such a list.
func extensions(glob string) (match func(name []byte) bool, ok bool) {
	list := strings.Split(glob, ",")
	images := slices.Contains(list, "images")
	for i, e := range list {
		if e == "images" {
			continue
		}
		if len(e) < 2 || e[0] != '.' || strings.ContainsAny(e, `/*?[\`) {
			return nil, false
		}
		list[i] = e[1:]
	}
	return func(name []byte) bool {
		_, ext, _ := Cut(string(name))
		return slices.Contains(list, ext) || images && isImage(name)
	}, true
}
