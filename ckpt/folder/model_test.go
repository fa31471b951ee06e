package folder

import (
	"errors"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// An inode is what a reader may publish: its content while nobody can write it.
type inode struct {
	content []byte
	writers int
}

// A model knows what is in a folder.
type model struct {
	*watcher
	process *process
	files   map[string]*inode
	dirs    []string
	open    []handle
}

type handle struct {
	file *os.File
	page int // of the other process
	ino  *inode
}

func (m *model) at(p string) string { return filepath.Join(m.dir, p) }

// path draws a path whose folder there is.
func (m *model) path(r *rapid.T) string {
	dir := rapid.SampledFrom(m.dirs).Draw(r, "dir")
	return path.Join(dir, rapid.SampledFrom([]string{"a", "b", "c.tmp", "latest"}).Draw(r, "name"))
}

func (m *model) some(r *rapid.T) (string, *inode) {
	if len(m.files) == 0 {
		r.Skip("no files")
	}
	p := rapid.SampledFrom(slices.Sorted(maps.Keys(m.files))).Draw(r, "file")
	return p, m.files[p]
}

func must(r *rapid.T, err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (m *model) Open(r *rapid.T) {
	p := m.path(r)
	file, err := os.OpenFile(m.at(p), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o666)
	must(r, err)
	if m.files[p] == nil {
		m.files[p] = &inode{}
	}
	m.files[p].writers++
	m.open = append(m.open, handle{file: file, ino: m.files[p]})
}

func (m *model) Map(r *rapid.T) {
	p, ino := m.some(r)
	if len(ino.content) == 0 {
		r.Skip("empty")
	}
	ino.writers++
	m.open = append(m.open, handle{page: m.process.do("map %s", m.at(p)), ino: ino})
}

func (m *model) handle(r *rapid.T) int {
	if len(m.open) == 0 {
		r.Skip("nothing is open")
	}
	return rapid.IntRange(0, len(m.open)-1).Draw(r, "handle")
}

func (m *model) Write(r *rapid.T) {
	h := m.open[m.handle(r)]
	if h.file == nil {
		h.ino.content[0] = rapid.Byte().Draw(r, "byte")
		m.process.do("store %d %d", h.page, h.ino.content[0])
		return
	}
	_, err := h.file.Write([]byte("x"))
	must(r, err)
	h.ino.content = append(h.ino.content, 'x')
}

func (m *model) Close(r *rapid.T) {
	i := m.handle(r)
	h := m.open[i]
	if h.file == nil {
		m.process.do("close %d", h.page)
	} else {
		must(r, h.file.Close())
	}
	h.ino.writers--
	m.open = slices.Delete(m.open, i, i+1)
}

func (m *model) Rewrite(r *rapid.T) {
	p := m.path(r)
	if slices.ContainsFunc(m.open, func(h handle) bool { return h.file == nil && h.ino == m.files[p] }) {
		r.Skip("a page of it would be no more")
	}
	content := rapid.SliceOfN(rapid.Byte(), 0, 3).Draw(r, "content")
	must(r, os.WriteFile(m.at(p), content, 0o666))
	if m.files[p] == nil {
		m.files[p] = &inode{}
	}
	m.files[p].content = slices.Clone(content)
}

func (m *model) Link(r *rapid.T) {
	from, ino := m.some(r)
	to := m.path(r)
	if m.files[to] == nil {
		must(r, os.Link(m.at(from), m.at(to)))
		m.files[to] = ino
	}
}

func (m *model) Rename(r *rapid.T) {
	from, ino := m.some(r)
	to := m.path(r)
	if m.files[to] != ino { // a rename to another name of the same file does nothing
		must(r, os.Rename(m.at(from), m.at(to)))
		delete(m.files, from)
		m.files[to] = ino
	}
}

func (m *model) Remove(r *rapid.T) {
	p, _ := m.some(r)
	must(r, os.Remove(m.at(p)))
	delete(m.files, p)
}

func (m *model) Chmod(r *rapid.T) {
	p, _ := m.some(r)
	must(r, os.Chmod(m.at(p), rapid.SampledFrom([]os.FileMode{0o600, 0o644}).Draw(r, "mode")))
}

func (m *model) Mkdir(r *rapid.T) {
	p := rapid.SampledFrom([]string{"d", "e", "d/d", "f.tmp"}).Draw(r, "folder")
	if !slices.Contains(m.dirs, p) && slices.Contains(m.dirs, path.Dir(p)) {
		must(r, os.Mkdir(m.at(p), 0o777))
		m.dirs = append(m.dirs, p)
	}
}

func (m *model) RenameFolder(r *rapid.T) {
	from := rapid.SampledFrom(m.dirs).Draw(r, "from")
	to := rapid.SampledFrom([]string{"d", "e", "g", "f.tmp", "e/d"}).Draw(r, "to")
	if from == "." || slices.Contains(m.dirs, to) || !slices.Contains(m.dirs, path.Dir(to)) ||
		strings.HasPrefix(to, from+"/") {
		r.Skip("no such rename")
	}
	must(r, os.Rename(m.at(from), m.at(to)))
	files := map[string]*inode{}
	for p, ino := range m.files {
		files[moved(p, from, to)] = ino
	}
	m.files = files
	for i, d := range m.dirs {
		m.dirs[i] = moved(d, from, to)
	}
}

func moved(p, from, to string) string {
	if p == from || strings.HasPrefix(p, from+"/") {
		return to + p[len(from):]
	}
	return p
}

func (m *model) RemoveFolder(r *rapid.T) {
	d := rapid.SampledFrom(m.dirs).Draw(r, "folder")
	if d == "." {
		r.Skip("all")
	}
	must(r, os.RemoveAll(m.at(d)))
	maps.DeleteFunc(m.files, func(p string, _ *inode) bool { return strings.HasPrefix(p, d+"/") })
	m.dirs = slices.DeleteFunc(m.dirs, func(p string) bool { return p == d || strings.HasPrefix(p, d+"/") })
}

// Settle waits until Next has said all that there is to say.
func (m *model) Settle(r *rapid.T) {
	for _, p := range slices.Sorted(maps.Keys(m.files)) {
		ino := m.files[p]
		switch {
		case Temporary(p):
		case ino.writers > 0:
			if _, err := m.f.Hold(p, Print{}); !errors.Is(err, ErrWriting) {
				r.Fatalf("%s can be written: %v", p, err)
			}
		default:
			m.publish(r, p, ino.content)
		}
	}
	m.await("what is no more", func() bool {
		for p, n := range m.view {
			if _, ok := m.files[p]; !ok && n.State != Gone {
				return false
			}
		}
		return true
	})
	m.mu.Lock() // so that what Next says after it is seen after it, perhaps for the second time
	defer m.mu.Unlock()
	news, err := m.f.Look()
	must(r, err)
	for _, n := range news {
		n.Why = "looked"
		m.view[n.Path] = n
		if ino := m.files[n.Path]; ino == nil && n.State != Gone ||
			ino != nil && (n.State == Whole) != (ino.writers == 0) {
			r.Fatalf("%+v of %+v", n, ino)
		}
	}
}

// publish holds a file with the last print, and reads it. A link or a chmod makes another one.
func (m *model) publish(r *rapid.T, p string, content []byte) {
	var tried News
	for {
		var n News
		m.await(p, func() bool { n = m.view[p]; return n.State == Whole && n != tried })
		tried = n
		h, err := m.f.Hold(p, n.Print)
		if err != nil {
			continue
		}
		b := make([]byte, n.Print.Size+1)
		k, _ := h.ReadAt(b, 0)
		if !h.Whole() || string(b[:k]) != string(content) {
			r.Fatalf("%s: %q, want %q", p, b[:k], content)
		}
		must(r, h.Close())
		return
	}
}

func (m *model) Check(*rapid.T) {}

func TestModel(t *testing.T) {
	places(t, func(t *testing.T, base string) {
		p := startWriter(t)
		rapid.Check(t, func(r *rapid.T) {
			dir, err := os.MkdirTemp(base, "r")
			must(r, err)
			defer os.RemoveAll(dir)
			w := follow(r, dir)
			defer w.stop()
			p.t = r
			m := &model{watcher: w, process: p, files: map[string]*inode{}, dirs: []string{"."}}
			defer func() {
				for _, h := range m.open {
					if h.file != nil {
						h.file.Close()
					} else {
						p.do("close %d", h.page)
					}
				}
			}()
			actions := rapid.StateMachineActions(m)
			r.Repeat(actions)
			m.Settle(r)
			for len(m.open) > 0 {
				m.Close(r)
			}
			m.Settle(r)
		})
	})
}
