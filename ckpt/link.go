package ckpt

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

// links are what rule 18 is about. It belongs to the goroutine of Run.
type links struct {
	skipped map[string]bool // paths here that are no files
	made    []Checkpoint
	look    chan struct{} // has room for one
}

const linkEvery = time.Minute

// keepLinks makes and removes links from time to time. It closes linked after the first time.
func (c *Carrier) keepLinks(ctx context.Context, linked chan<- struct{}) {
	c.link(ctx)
	close(linked)
	for {
		select {
		case <-time.After(linkEvery):
		case <-c.links.look:
		case <-ctx.Done():
			return
		}
		c.link(ctx)
	}
}

// link makes and removes links (rule 18).
func (c *Carrier) link(ctx context.Context) {
	all, err := List(ctx, c.Store, c.Prefix, c.Last)
	root, openErr := os.OpenRoot(c.folder.At("")) // which never follows a link out of the folder
	if openErr == nil {
		defer func() { _ = root.Close() }()
	}
	if err = cmp.Or(err, openErr); err != nil {
		if ctx.Err() == nil {
			c.Log.Warn("cannot find out which checkpoints only the bucket has", "cause", err)
		}
		return
	}
	wanted := map[string]bool{}
	for _, r := range all {
		if r.sealed {
			wanted[r.Path] = true
		}
	}
	var skipped []string
	if !c.in(ctx, func() {
		for p := range c.q.files {
			delete(wanted, topOf(p, wanted))
		}
		skipped = slices.Collect(maps.Keys(c.links.skipped))
	}) {
		return
	}
	for _, p := range skipped {
		if to, err := root.Readlink(p); err == nil && to == c.target(p) && !wanted[p] && root.Remove(p) == nil {
			c.Log.Info("removed the link to a checkpoint that the bucket no longer has", "link", p)
		}
	}
	refresh := sync.OnceFunc(func() {
		if err := c.Refresh(ctx); err != nil {
			c.Log.Warn("the mount is not refreshed; links may lead nowhere until it is", "mountpoint", c.Link,
				"cause", err)
		}
	})
	var made []Checkpoint
	for _, r := range all {
		if !wanted[r.Path] {
			continue
		}
		to, err := root.Readlink(r.Path)
		if errors.Is(err, fs.ErrNotExist) {
			refresh()
			if err := c.linkOne(root, r.Path); err != nil {
				c.Log.Warn("cannot link a checkpoint", "link", r.Path, "cause", err)
				continue
			}
			to = c.target(r.Path)
		}
		if to == c.target(r.Path) {
			made = append(made, Checkpoint{Path: r.Path, Files: r.Files, Bytes: r.Bytes, Linked: true,
				saved: r.Time.UnixNano()})
		}
	}
	c.in(ctx, func() { c.links.made = made })
}

// target is where the link at a path leads. What leads elsewhere is a user's.
func (c *Carrier) target(p string) string { return filepath.Join(c.Link, filepath.FromSlash(p)) }

// linkOne makes a link, and the folders above it, which belong to the owner of the one that is carried.
func (c *Carrier) linkOne(root *os.Root, p string) error {
	dir, err := root.Lstat(".")
	if err != nil {
		return err
	}
	owner := dir.Sys().(*syscall.Stat_t)
	for i := range p {
		if p[i] == '/' && root.Mkdir(p[:i], dir.Mode().Perm()) == nil {
			err = errors.Join(err, root.Chown(p[:i], int(owner.Uid), int(owner.Gid)))
		}
	}
	if err = errors.Join(err, root.Symlink(c.target(p), p)); err == nil {
		c.Log.Info("linked a checkpoint that only the bucket has", "link", p)
	}
	return err
}
