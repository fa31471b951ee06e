package ckpt

import (
	"cmp"
	"maps"
	"path"
	"slices"
	"time"
)

// Behind says what has been closed here and is not in the bucket.
type Behind struct {
	Files int       `json:"files"`
	Bytes int64     `json:"bytes"`
	Since time.Time `json:"since,omitzero"` // when the first of them was closed
	Next  string    `json:"next,omitempty"` // what is published next
	// WaitsFor is why Next, a last name, is not published yet: a path, and what is the matter with it.
	WaitsFor string `json:"waits_for,omitempty"`
	Removals int    `json:"removals,omitempty"` // objects that are to be removed
}

// Behind returns how far the bucket is behind.
func (q *Queue) Behind() (b Behind) {
	var head *file
	for f := range q.waiting.all {
		if head == nil {
			head = f
		}
		if f.state != whole {
			b.Removals++
			continue
		}
		b.Files++
		b.Bytes += f.print.Size
		if b.Since.IsZero() || f.since.Before(b.Since) {
			b.Since = f.since
		}
	}
	if head != nil {
		b.Next = head.path
		if g := q.waitsFor(head, false); g != nil && (head.last || head.state != whole) {
			b.WaitsFor = g.path + " (" + g.state.String() + ")"
		} else if head.stale() {
			b.WaitsFor = "the neighbour, which has an older one"
		} else if q.withheld(head) {
			b.WaitsFor = cmp.Or(head.held, "the other hosts")
		}
	}
	return b
}

func (s state) String() string {
	return [...]string{"gone", "being written", "torn or unreadable", "closed, not in the bucket yet"}[s]
}

// Lacks returns a path at or below p (".": all) that is not in the bucket as it is here, and why. known: some are.
// With copies it is enough that the neighbour has it, if the other hosts' files before a last name are as safe.
func (q *Queue) Lacks(p string, copies bool) (lacks, why string, known bool) {
	for name, f := range q.files {
		if name != p && p != "." && !under(name, p) || f.state == absent {
			continue
		}
		known = true
		if copies && f.covered() && (!f.last || !q.withheld(f) || f.vouched) {
			continue
		}
		if (f.state != whole || f.turn != 0) && (lacks == "" || name < lacks) {
			lacks, why = name, f.state.String()
		}
	}
	return lacks, why, known
}

// Checkpoint is a folder with a last name, and not in another one.
type Checkpoint struct {
	Path  string `json:"path"`
	Files int    `json:"files"`
	Bytes int64  `json:"bytes"`
	// Lacks is a file that is not in the bucket as it is here; "" if all are, and so is the checkpoint.
	Lacks string `json:"lacks,omitempty"`
	Why   string `json:"why,omitempty"`
	// Linked: only the bucket has it, and here is a link into its mount.
	Linked bool  `json:"linked,omitempty"`
	saved  int64 // Mtime of its latest last name: a chown changes Ctime
}

// besides reports whether two folders, in one that has no last name, may be parts of one checkpoint: their names differ
// by more than numbers. Accelerate saves the model and the optimizer of FSDP so.
func (c Checkpoint) besides(other Checkpoint) bool {
	stem := func(p string) string { return number.ReplaceAllString(p, "") }
	in := path.Dir(c.Path)
	return in != "." && in == path.Dir(other.Path) && stem(c.Path) != stem(other.Path)
}

// topOf returns the one of the folders that has a path and is nearest to the root, or "".
func topOf(p string, folders map[string]bool) (top string) {
	for dir := path.Dir(p); dir != "."; dir = path.Dir(dir) {
		if folders[dir] {
			top = dir
		}
	}
	return top
}

// Checkpoints returns the folders here with a last name, oldest first.
func (q *Queue) Checkpoints() []Checkpoint {
	tops := map[string]bool{}
	for f := range q.lasts {
		if dir := path.Dir(f.path); f.state == whole && dir != "." {
			tops[dir] = true
		}
	}
	found := map[string]Checkpoint{}
	for p, f := range q.files {
		top := topOf(p, tops)
		if f.state == absent || top == "" {
			continue
		}
		c := found[top]
		c.Path = top
		c.Files++
		c.Bytes += f.print.Size
		if f.last {
			c.saved = max(c.saved, f.print.Mtime)
		}
		if (f.state != whole || f.turn != 0) && (c.Lacks == "" || p < c.Lacks) {
			c.Lacks, c.Why = p, f.state.String()
		}
		found[top] = c
	}
	all := slices.AppendSeq([]Checkpoint{}, maps.Values(found))
	slices.SortFunc(all, older)
	return all
}
