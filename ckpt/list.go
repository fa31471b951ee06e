package ckpt

import (
	"cmp"
	"context"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/ckpt/folder"
)

// Remote is a checkpoint in a bucket: a folder with a last name, not in another one, or what is at the prefix's top.
type Remote struct {
	Path  string `json:"path"`
	Files int    `json:"files"`
	Bytes int64  `json:"bytes"`
	// Time is when its newest last name became visible, as files may come later; or if it has none, its newest file.
	Time time.Time `json:"time"`
	// Complete: its last name is visible, or where no folder has one, one beside it that is newer than all its files.
	Complete bool `json:"complete"`
	Folder   bool `json:"folder"`
	sealed   bool // its last name is in it
}

// List returns the checkpoints under a prefix, oldest first. isLast reports whether a path is a last name.
func List(ctx context.Context, store objstore.Reader, prefix string, isLast func(path string) bool) ([]Remote, error) {
	var objects []objstore.Object
	tops := map[string]bool{}
	var latest time.Time // of the last names at the top
	for o, err := range store.List(ctx, prefix, "") {
		if err != nil {
			return nil, err
		}
		o.Key = strings.TrimPrefix(o.Key, prefix)
		if folder.Own(o.Key) || strings.HasSuffix(o.Key, "/") || strings.HasPrefix(o.Key, "/") {
			continue // nor is it a path if it begins with a slash
		}
		if dir := path.Dir(o.Key); isLast(o.Key) && dir != "." {
			tops[dir] = true
		} else if isLast(o.Key) {
			if o.ModTime.After(latest) {
				latest = o.ModTime
			}
			continue
		}
		objects = append(objects, o)
	}
	found := map[string]Remote{}
	for _, o := range objects {
		first, _, inFolder := strings.Cut(o.Key, "/")
		sealed := topOf(o.Key, tops)
		top := cmp.Or(sealed, first)
		r := found[top]
		r.Path, r.Folder, r.sealed = top, inFolder, sealed != ""
		r.Files++
		r.Bytes += o.Size
		if o.ModTime.After(r.Time) && (!r.sealed || isLast(o.Key)) {
			r.Time = o.ModTime
		}
		found[top] = r
	}
	all := make([]Remote, 0, len(found))
	for _, r := range found {
		r.Complete = r.sealed || len(tops) == 0 && !latest.IsZero() && !r.Time.After(latest)
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b Remote) int { return numbered(a.Time.Compare(b.Time), a.Path, b.Path) })
	return all, nil
}

func older(a, b Checkpoint) int { return numbered(cmp.Compare(a.saved, b.saved), a.Path, b.Path) }

var number = regexp.MustCompile(`[0-9]+`)

// numbered compares paths of one time by the numbers in them, step-9 before step-10: buckets often have whole seconds.
func numbered(times int, a, b string) int {
	if wide := func(n string) string { return fmt.Sprintf("%20s", n) }; times == 0 {
		times = strings.Compare(number.ReplaceAllStringFunc(a, wide), number.ReplaceAllStringFunc(b, wide))
	}
	return times
}

// Latest returns the newest complete folder, or file if no folder is complete. If no last name is there at all, it is
// the newest folder, or file, and sure is false.
func Latest(all []Remote) (newest Remote, sure, ok bool) {
	sure = slices.ContainsFunc(all, func(r Remote) bool { return r.Complete })
	for _, r := range all { // oldest first
		if r.Complete == sure && (r.Folder || !newest.Folder) {
			newest = r
		}
	}
	return newest, sure, newest.Path != ""
}
