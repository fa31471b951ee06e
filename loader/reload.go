package loader

import (
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"
)

// reloaded is what was read from files that may be replaced while the server runs, as certificates and
// secrets are. It looks at the files when it is asked, so it takes no goroutine and misses no change.
type reloaded[T any] struct {
	what  string // for the log
	paths []string
	read  func() (T, error)
	log   *slog.Logger

	mu    sync.Mutex
	seen  []stamp
	value T
}

// stamp tells one content of a file from the next. The inode is in it because a renamed file, and the
// symbolic links of a mounted Kubernetes secret, may have the time and the length of the one before.
type stamp struct {
	modified time.Time
	size     int64
	file     os.FileInfo
}

func (s stamp) equal(o stamp) bool {
	return s.size == o.size && s.modified.Equal(o.modified) && (s.file == nil) == (o.file == nil) && (s.file == nil || os.SameFile(s.file, o.file))
}

// newReloaded reads the files for the first time, which has to succeed.
func newReloaded[T any](what string, paths []string, log *slog.Logger, read func() (T, error)) (*reloaded[T], error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	r := &reloaded[T]{what: what, paths: paths, read: read, log: log}
	r.seen = r.stamps() // before reading: what changes in between is read again
	var err error
	r.value, err = read()
	return r, err
}

func (r *reloaded[T]) stamps() []stamp {
	list := make([]stamp, len(r.paths))
	for i, path := range r.paths {
		if info, err := os.Stat(path); err == nil {
			list[i] = stamp{info.ModTime(), info.Size(), info}
		}
	}
	return list
}

// get returns what the files say now. Files that cannot be used leave what was there before in force,
// since a certificate and its key are not replaced at one instant.
func (r *reloaded[T]) get() T {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.stamps()
	if slices.EqualFunc(now, r.seen, stamp.equal) {
		return r.value
	}
	r.seen = now
	v, err := r.read()
	if err != nil {
		r.log.Warn("feed: "+r.what+" changed and cannot be used; what was read before stays in force", "error", err)
		return r.value
	}
	r.log.Info("feed: " + r.what + " read again")
	r.value = v
	return v
}
