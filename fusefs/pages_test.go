package fusefs

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// A model of a kernel that keeps the pages of what was read last: what it will need no READ for is foreseen, and so
// is that it will need one.
func TestPages(t *testing.T) {
	const n, epochs = 1000, 6
	for _, room := range []int{n, n / 10} {
		p := newPages(buildManifest(alike(n, 63_000)))
		var has []int // the oldest first
		for epoch := range epochs {
			wrong := 0
			for _, file := range rand.New(rand.NewPCG(1, uint64(epoch))).Perm(n) {
				i := slices.Index(has, file)
				if p.has(file) != (i >= 0) {
					wrong++
				}
				p.opened(file)
				if i < 0 {
					p.asked(file)
				} else {
					has = slices.Delete(has, i, i+1)
				}
				p.released(file)
				has = append(has, file)
				if len(has) > room {
					has = has[1:]
				}
			}
			// With little room few are there again, and some of each age must be tried once.
			if most := n / 10; room == n && wrong > 0 || epoch > 0 && wrong > most {
				t.Errorf("room for %d, epoch %d: %d of %d were foreseen wrongly", room, epoch, wrong, n)
			}
		}
	}
}

// A file that was opened and not read is not taken for one that the kernel has; nor is a large one.
func TestPagesOfFilesNotRead(t *testing.T) {
	p := newPages(buildManifest([]testFile{{"c/a.bin", "e", 100, day}, {"c/b.bin", "e", pageFiles + 1, day}}))
	for file := range 2 {
		p.opened(file)
		if file == 1 {
			p.asked(file)
		}
		p.released(file)
		if p.has(file) {
			t.Errorf("file %d", file)
		}
	}
}
