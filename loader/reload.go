package loader

import (
	"cmp"
	"log/slog"
	"os"
	"slices"
	"sync"
)

// reloaded is a value read from files that may be replaced while the server runs, such as certificates and secrets.
// It checks the files on each use, so it needs no goroutine and misses no change.
type reloaded[T any] struct {
	what  string // for the log
	paths []string
	read  func() (T, error)
	log   *slog.Logger

	mu    sync.Mutex
	seen  []os.FileInfo
	value T
}

// sameContent compares a file's entries. It looks at the inode because a renamed file, or the symbolic links of a
// mounted Kubernetes secret, may have the time and the length of the previous one. nil: the file cannot be read.
func sameContent(a, b os.FileInfo) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Size() == b.Size() && a.ModTime().Equal(b.ModTime()) && os.SameFile(a, b)
}

// newReloaded reads the files for the first time, which must succeed.
func newReloaded[T any](what string, paths []string, log *slog.Logger, read func() (T, error)) (*reloaded[T], error) {
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	r := &reloaded[T]{what: what, paths: paths, read: read, log: log}
	r.seen = r.entries() // before reading: a change in between is read again
	var err error
	r.value, err = read()
	return r, err
}

func (r *reloaded[T]) entries() []os.FileInfo {
	list := make([]os.FileInfo, len(r.paths))
	for i, path := range r.paths {
		list[i], _ = os.Stat(path) // an error shows when it is read
	}
	return list
}

// get returns the current value. Invalid files leave the previous value in force, since a certificate and its key are
// not replaced at one instant.
func (r *reloaded[T]) get() T {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.entries()
	if slices.EqualFunc(now, r.seen, sameContent) {
		return r.value
	}
	r.seen = now
	v, err := r.read()
	if err != nil {
		r.log.Warn("feed: "+r.what+" changed and is not usable; the previous version stays in force", "error", err)
		return r.value
	}
	r.log.Info("feed: " + r.what + " reloaded")
	r.value = v
	return v
}
