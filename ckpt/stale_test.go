package ckpt

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/ckpt/folder"
)

// A daemon that was frozen, or cut off, for as long as another one waits publishes nothing until it has renewed the lock.
func TestStaleLock(t *testing.T) {
	dir, dest := t.TempDir(), t.TempDir()
	store, err := objstore.NewDir(dest)
	if err != nil {
		t.Fatal(err)
	}
	c, err := Open(t.Context(), Config{Dir: dir, Last: isLast, Store: objstore.Retry(store, objstore.RetryPolicy{}), Drain: time.Minute, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.lock.renewed.Store(time.Now().Add(-lockDead).UnixNano())
	if err := os.WriteFile(filepath.Join(dir, "a"), []byte("a"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx, func() {}) }()
	var s Status
	for !strings.Contains(s.Trouble, "is not renewed") {
		if !c.in(ctx, func() { s = c.status() }) {
			t.Fatal("it has ended")
		}
		if _, err := os.Stat(filepath.Join(dest, "a")); err == nil {
			t.Fatal("it was published under a lock that is not renewed")
		}
	}
	c.lock.renewed.Store(time.Now().UnixNano())
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dest, "a")); err != nil {
		t.Error(err)
	}
}

// A file that is written again and again behind one that waits takes no more memory.
func TestVoidTickets(t *testing.T) {
	q := NewQueue(isLast, false)
	q.HearAll(nil, time.Time{})
	print := folder.Print{Ino: 1, Size: 1}
	q.Hear([]folder.News{{Path: "head", State: folder.Whole, Print: print}, {Path: "torn", State: folder.Torn}, {Path: "last-a", State: folder.Whole, Print: print}}, time.Time{})
	for i := range int64(10_000) {
		print.Ctime = i
		q.Hear([]folder.News{{Path: "a", State: folder.Whole, Print: print}, {Path: "last", State: folder.Whole, Print: print}}, time.Time{})
	}
	if n := max(cap(q.plain.tickets), cap(q.end.tickets), cap(q.owed.tickets)); n > 100 {
		t.Errorf("%d tickets of 4 files", n)
	}
}

// A journal elsewhere does not outlive the folder that it is about, also if a new folder has the same inode.
func TestJournalOfAnotherFolder(t *testing.T) {
	file, want := filled(t)
	id := filepath.Join(filepath.Dir(file), "id")
	if err := os.Remove(id); err != nil {
		t.Fatal(err)
	}
	j, stale, err := openJournal(file, id, origin{Dest: "s3://b/p/", Dev: 1, Ino: 2})
	if err != nil || len(stale.Objects) != len(want.Objects) || len(j.known.Objects) > 0 {
		t.Fatalf("%+v, %+v, %v", j.known, stale, err)
	}
	// What somebody removes is made again.
	if err := os.RemoveAll(filepath.Dir(file)); err != nil {
		t.Fatal(err)
	}
	if err := j.write(entry{Path: "a", Object: &Published{ETag: "e"}}, true); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(file)
	if own, _ := os.ReadFile(id); err != nil || parse(b).Objects["a"].ETag != "e" || string(own) != j.known.Origin.ID {
		t.Errorf("%q, %q, %v", b, own, err)
	}
}
