package fusefs

import (
	"math/bits"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache/catalog"
)

// pages tells which files of a version the kernel probably has in its page cache. The kernel does not say, but it
// sends no READ for a file that it has. Of the files that were opened again after about as many opens of others
// (within a power of two), pages counts how many needed no READ. If half did not, the next one is expected not to.
// So it is at first, since pages are kept only if the version fits half of the memory. Safe for concurrent use.
type pages struct {
	m      *catalog.Manifest
	closed atomic.Uint32   // opens that have ended
	last   []atomic.Uint32 // by file: closed when it had been read; 0: not yet
	read   []atomic.Uint32 // a bit a file: it had a READ since it was opened
	had    [33]atomic.Int32
}

const pageFiles = 4 << 20 // the largest that are followed: of a larger one the kernel may have a part

func newPages(m *catalog.Manifest) *pages {
	p := &pages{m: m, last: make([]atomic.Uint32, m.Len()), read: make([]atomic.Uint32, (m.Len()+31)/32)}
	for i := range p.had {
		p.had[i].Store(1 << 16)
	}
	return p
}

// has reports whether a READ of the file is unlikely.
func (p *pages) has(file int) bool {
	last := p.last[file].Load()
	return last > 0 && p.had[bits.Len32(p.closed.Load()-last)].Load() >= 1<<15
}

func (p *pages) opened(file int) { p.read[file/32].And(^(uint32(1) << (file % 32))) }

func (p *pages) asked(file int) {
	if bit := uint32(1) << (file % 32); p.read[file/32].Load()&bit == 0 {
		p.read[file/32].Or(bit)
	}
}

// released counts an open that has ended. That two at once of one file are one does little harm.
func (p *pages) released(file int) {
	read := p.read[file/32].Load()>>(file%32)&1 != 0
	last, now := p.last[file].Load(), p.closed.Add(1)
	switch {
	case last == 0 && !read, p.m.Size(file) > pageFiles:
		return
	case last > 0:
		had := &p.had[bits.Len32(now-last)]
		to := int32(1 << 16)
		if read {
			to = 0
		}
		had.Add((to - had.Load()) / 16)
	}
	p.last[file].Store(now)
}

// pagesOf returns what is known of a version; nil if the kernel keeps no pages.
func (f *filesystem) pagesOf(m *catalog.Manifest) *pages {
	if !f.opts.KernelCache {
		return nil
	}
	p := f.pages.Load()
	if p == nil || p.m != m && m == f.volume.Manifest() {
		p = newPages(m)
		f.pages.Store(p)
	}
	if p.m != m {
		return nil
	}
	return p
}

// has reports whether the kernel probably has a file.
func (f *filesystem) has(m *catalog.Manifest, file int) bool {
	p := f.pages.Load()
	return p != nil && p.m == m && p.has(file)
}
