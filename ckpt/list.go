package ckpt

import (
	"cmp"
	"context"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Remote is a checkpoint in a bucket: a folder with a last name that is in no other such folder, or something at the top
// of the prefix.
type Remote struct {
	Path  string `json:"path"`
	Files int    `json:"files"`
	Bytes int64  `json:"bytes"`
	// Time is when its newest file became visible.
	Time time.Time `json:"time"`
	// Complete: its last name is visible, or one beside it that is newer than all its files.
	Complete bool `json:"complete"`
	Folder   bool `json:"folder"`
}

// List returns the checkpoints under a prefix, oldest first. isLast reports whether a path is a last name.
func List(ctx context.Context, store objstore.Reader, prefix string, isLast func(path string) bool) ([]Remote, error) {
	var objects []objstore.Object
	tops := map[string]bool{}
	var sealed time.Time // of the newest last name at the top
	for o, err := range store.List(ctx, prefix) {
		if err != nil {
			return nil, err
		}
		o.Key = strings.TrimPrefix(o.Key, prefix)
		if o.Key == Home || under(o.Key, Home) || strings.HasSuffix(o.Key, "/") {
			continue
		}
		if dir := path.Dir(o.Key); isLast(o.Key) && dir != "." {
			tops[dir] = true
		} else if isLast(o.Key) {
			if o.ModTime.After(sealed) {
				sealed = o.ModTime
			}
			continue
		}
		objects = append(objects, o)
	}
	found := map[string]*Remote{}
	for _, o := range objects {
		top, _, folder := strings.Cut(o.Key, "/")
		marked := false
		for dir := path.Dir(o.Key); dir != "."; dir = path.Dir(dir) {
			if tops[dir] {
				top, marked = dir, true // the one nearest to the top
			}
		}
		r := found[top]
		if r == nil {
			r = &Remote{Path: top, Folder: folder, Complete: marked}
			found[top] = r
		}
		r.Files++
		r.Bytes += o.Size
		if o.ModTime.After(r.Time) {
			r.Time = o.ModTime
		}
	}
	all := make([]Remote, 0, len(found))
	for _, r := range found {
		r.Complete = r.Complete || !sealed.IsZero() && !r.Time.After(sealed)
		all = append(all, *r)
	}
	slices.SortFunc(all, func(a, b Remote) int { return cmp.Or(a.Time.Compare(b.Time), strings.Compare(a.Path, b.Path)) })
	return all, nil
}

// Latest returns the newest complete folder. If no last name is there at all, it is the newest folder, or file, and
// sure is false.
func Latest(all []Remote) (newest Remote, sure, ok bool) {
	for _, r := range all { // oldest first
		if r.Complete && r.Folder {
			newest, sure = r, true
		}
	}
	for _, r := range all {
		if !sure && (r.Folder || !newest.Folder) && !slices.ContainsFunc(all, func(r Remote) bool { return r.Complete }) {
			newest = r
		}
	}
	return newest, sure, newest.Path != ""
}
