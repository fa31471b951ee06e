package ckpt

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// A daemon that was frozen, or cut off, for as long as another one waits publishes nothing until it has renewed the
// lock.
func TestStaleLock(t *testing.T) {
	dir, dest := t.TempDir(), t.TempDir()
	store, err := objstore.NewDir(dest)
	if err != nil {
		t.Fatal(err)
	}
	c, err := Open(t.Context(),
		Config{Dir: dir, Last: isLast, Store: objstore.Retry(store, objstore.RetryPolicy{}), Drain: time.Minute,
			Log: slog.New(slog.DiscardHandler)})
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
	q.Hear([]folder.News{{Path: "head", State: folder.Whole, Print: print}, {Path: "torn", State: folder.Torn},
		{Path: "last-a", State: folder.Whole, Print: print}}, time.Time{})
	for i := range int64(10_000) {
		print.Ctime = i
		q.Hear([]folder.News{{Path: "a", State: folder.Whole, Print: print},
			{Path: "last", State: folder.Whole, Print: print}}, time.Time{})
	}
	if n := max(cap(q.waiting.tickets), cap(q.owed.tickets)); n > 100 {
		t.Errorf("%d tickets of 4 files", n)
	}
}

// A journal elsewhere does not outlive the folder that it is about, also if a new folder has the same inode.
func TestJournalOfAnotherFolder(t *testing.T) {
	file, _ := filled(t)
	id := filepath.Join(filepath.Dir(file), "id")
	if err := os.Remove(id); err != nil {
		t.Fatal(err)
	}
	j, err := openJournal(file, id, origin{Dest: "s3://b/p/", Dev: 1, Ino: 2})
	if err != nil || len(j.known.Objects) > 0 {
		t.Fatalf("%+v, %v", j.known, err)
	}
	// What somebody removes is made again.
	if err := os.RemoveAll(filepath.Dir(file)); err != nil {
		t.Fatal(err)
	}
	if err := j.write(entry{Path: "a", Object: &Published{ETag: "e"}}, true); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(file)
	if own, _ := os.ReadFile(id); err != nil || said(b).Objects["a"].ETag != "e" || string(own) != j.known.Origin.ID {
		t.Errorf("%q, %q, %v", b, own, err)
	}
}

// between calls before once, when an upload has all its parts and is about to appear.
type between struct {
	objstore.Layer
	before func()
}

type betweenUpload struct {
	objstore.Upload
	at *between
}

func (b *between) Upload(ctx context.Context, key string, size, part int64) (objstore.Upload, error) {
	u, err := b.Layer.Upload(ctx, key, size, part)
	return &betweenUpload{u, b}, err
}

func (u *betweenUpload) Complete(ctx context.Context) (objstore.Object, error) {
	if before := u.at.before; before != nil {
		u.at.before = nil
		before()
	}
	return u.Upload.Complete(ctx)
}

// A lock that another daemon takes while this one is about to renew it stays the other's; this one ends, and says who
// has it. A lock whose renewal was answered by nobody is renewed again, and one that somebody has removed is there
// again.
func TestLockIsRenewedByOneWrite(t *testing.T) {
	beat := lockBeat
	lockBeat = 20 * time.Millisecond
	defer func() { lockBeat = beat }()
	bucket, _ := bucketOf(t)
	folders, err := objstore.NewDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for name, store := range map[string]objstore.Layer{"bucket": bucket,
		"folder": objstore.Retry(folders, objstore.RetryPolicy{})} {
		t.Run(name, func(t *testing.T) {
			b := &between{Layer: store}
			cfg := Config{Dest: "there", Prefix: "p/", Store: b, Log: slog.New(slog.DiscardHandler)}
			var l *prefixLock
			for _, before := range []func(){
				func() { err = store.Delete(t.Context(), l.key, "") },
				func() { _, err = put(t.Context(), store, l.key, encode(l.mine)) },
				func() { _, err = put(t.Context(), store, l.key, []byte(`{"id":"2","host":"other"}`)) },
				// with a copy of this one's journal
				func() { _, err = put(t.Context(), store, l.key, []byte(`{"id":"1","host":"other"}`)) },
			} {
				if l, err = takePrefix(t.Context(), cfg, "1"); err != nil {
					t.Fatal(err)
				}
				b.before = before
				ctx, stop := context.WithCancelCause(t.Context())
				l.renewed.Store(0)
				ended := make(chan struct{})
				go func() { defer close(ended); l.keep(ctx, stop) }()
				until(t, "it is renewed, or given up", func() bool { return ctx.Err() != nil || l.renewed.Load() > 0 })
				lost := context.Cause(ctx)
				stop(nil)
				<-ended
				if err != nil {
					t.Fatal(err)
				}
				if _, has, err := l.read(t.Context()); err != nil || has.Host == "other" != (lost != nil) ||
					lost != nil && !strings.Contains(lost.Error(), "host other") {
					t.Errorf("%+v, %v: %v", has, err, lost)
				}
				if err := store.Delete(t.Context(), l.key, ""); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// A store that says that the lock exists, and does not find it, is asked again after a pause.
func TestLockOfAStoreOfTwoMinds(t *testing.T) {
	folders, err := objstore.NewDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		store := &twoMinds{Layer: objstore.Retry(folders, objstore.RetryPolicy{})}
		began := time.Now()
		if _, err := takePrefix(t.Context(), Config{Dest: "there", Store: store, Log: slog.New(slog.DiscardHandler)},
			"1"); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took != 3*lockLook {
			t.Errorf("three refusals took %s", took)
		}
	})
}

type twoMinds struct {
	objstore.Layer
	asked int
}

func (s *twoMinds) PutNew(ctx context.Context, key string, b []byte) (objstore.Object, error) {
	if s.asked++; s.asked <= 3 {
		return objstore.Object{}, objstore.Exists(key)
	}
	return s.Layer.PutNew(ctx, key, b)
}

// A withdrawn folder loses its last names first, also one that becomes visible just then: whoever finds one finds what
// it names.
func TestWithdrawnOrder(t *testing.T) {
	made := func(q *Queue) (order []string) {
		for c, ok := q.Next(); ok; c, ok = q.Next() {
			order = append(order, c.Path)
			q.Made(c, Published{ETag: "e"})
		}
		return order
	}
	want := []string{"step/last", "step/a", "step/z"}
	q := NewQueue(isLast, false)
	for _, p := range want {
		q.publish(q.file(p), Published{ETag: "e"})
	}
	q.unsealed["step/last"] = 0
	q.HearAll(nil, time.Time{})
	if order := made(q); !slices.Equal(order, want) {
		t.Errorf("removed in this order: %v", order)
	}
	q = NewQueue(isLast, false)
	q.HearAll(nil, time.Time{})
	var whole, gone []folder.News
	for i, p := range []string{"step/a", "step/z", "step/last"} {
		whole = append(whole, folder.News{Path: p, State: folder.Whole, Print: folder.Print{Ino: uint64(i), Size: 1}})
		gone = append(gone, folder.News{Path: p, State: folder.Gone})
	}
	q.Hear(whole[:2], time.Time{})
	made(q)
	q.Hear(whole[2:], time.Time{})
	c, _ := q.Next()
	q.Hear(gone, time.Time{})
	q.Made(c, Published{ETag: "e"})
	if order := made(q); c.Path != "step/last" || !slices.Equal(order, want) {
		t.Errorf("removed in this order, after %s: %v", c.Path, order)
	}
}

// A run's folder is removed while its own last name is under way, as after a training has ended: its complete
// checkpoints stay, also those that only an earlier latest beside them completes (DeepSpeed), and the others go.
func TestCompleteStays(t *testing.T) {
	q := NewQueue(isLast, false)
	for i, p := range []string{"run/1/a", "run/1/b/c", "run/2/a", "run/old/a", "run/old/b/c", "run/z/a", "run/last",
		"run/1/last", "run/2/last", "run/new/a", "run/a"} {
		q.publish(q.file(p), Published{Print: folder.Print{Ino: 1, Ctime: int64(i)}, ETag: "e"})
	}
	q.unsealed["run/2/last"], q.unsealed["run/last"], q.unsealed["run/z/last"] = 0, 6, 0
	q.HearAll(nil, time.Time{})
	var removed []string
	for c, ok := q.Next(); ok; c, ok = q.Next() {
		removed = append(removed, c.Path)
		q.Made(c, Published{})
	}
	want := []string{"run/2/last", "run/2/a", "run/last", "run/a", "run/new/a", "run/z/a"}
	if !slices.Equal(removed, want) {
		t.Errorf("removed: %v", removed)
	}
}

// What is being written when a daemon starts may be a log that nobody closes: a last name beside it does not wait, not
// even if the file was closed before. With a daemon that has seen that, it waits.
func TestStartWhileRewritten(t *testing.T) {
	print := func(ino uint64) folder.Print { return folder.Print{Ino: ino, Size: 1, Ctime: int64(ino)} }
	shard, last := folder.News{Path: "s/a", State: folder.Whole, Print: print(1)},
		folder.News{Path: "s/last", State: folder.Whole, Print: print(2)}
	rewritten := folder.News{Path: "s/a", State: folder.Writing}
	q := NewQueue(isLast, false)
	q.HearAll(nil, time.Time{})
	q.Hear([]folder.News{shard, last}, time.Time{})
	q.Hear([]folder.News{rewritten}, time.Time{})
	if c, ok := q.Next(); ok {
		t.Errorf("%+v before what was closed before it", c)
	}
	started := NewQueue(isLast, false)
	started.HearAll([]folder.News{rewritten, last}, time.Time{})
	if c, ok := started.Next(); !ok || c.Path != "s/last" {
		t.Errorf("%+v, %v: docs/adr/0072 says otherwise", c, ok)
	}
}

// Last names appear in their turn, so that a host that closes faster than it publishes has complete checkpoints, too.
// They wait for files beside them that the bucket never had, and let files pass after a failure.
func TestLastNamesHaveTheirTurn(t *testing.T) {
	ino := uint64(0)
	close := func(q *Queue, paths ...string) {
		for _, p := range paths {
			ino++
			q.Hear([]folder.News{{Path: p, State: folder.Whole, Print: folder.Print{Ino: ino}}}, time.Time{})
		}
	}
	next := func(q *Queue, fail bool) string {
		c, _ := q.Next()
		if fail {
			q.Failed(c, false)
		} else {
			q.Made(c, Published{Print: c.Print, ETag: "e"})
		}
		return c.Path
	}
	q := NewQueue(isLast, false)
	q.HearAll(nil, time.Time{})
	close(q, "1/a", "1/last", "2/a", "2/last", "3/a", "2/b", "3/last")
	var order []string
	for range 7 {
		order = append(order, next(q, false))
	}
	if want := []string{"1/a", "1/last", "2/a", "3/a", "2/b", "2/last", "3/last"}; !slices.Equal(order, want) {
		t.Errorf("%v, want %v", order, want)
	}
	close(q, "4/a", "4/last", "5/a")
	order = []string{next(q, false), next(q, true), next(q, false), next(q, false)}
	if want := []string{"4/a", "4/last", "5/a", "4/last"}; !slices.Equal(order, want) {
		t.Errorf("%v, want %v", order, want)
	}
}

// What comes into an old checkpoint later, or a chown of all files, does not make another one the newest; nor does a
// last name beside one that has none, where others have their own. Of the same second, the higher number is the newer.
func TestNewest(t *testing.T) {
	store, dest := toFolder(t)
	for p, at := range map[string]int64{"1/a": 1, "1/last": 2, "9/last": 4, "10/a": 3, "10/last": 4, "1/eval": 9,
		"3/a": 5, "last": 10} {
		save(t, filepath.Join(dest, p), 1)
		if err := os.Chtimes(filepath.Join(dest, p), time.Unix(at, 0), time.Unix(at, 0)); err != nil {
			t.Fatal(err)
		}
	}
	all, err := List(t.Context(), store, "", isLast)
	if newest, sure, ok := Latest(all); err != nil || newest.Path != "10" || !sure || !ok {
		t.Errorf("%+v, %v", all, err)
	}
	q := NewQueue(isLast, false)
	for p, n := range map[string]folder.Print{"1/last": {Ino: 1, Mtime: 1, Ctime: 9},
		"2/last": {Ino: 2, Mtime: 2, Ctime: 8}} {
		q.Hear([]folder.News{{Path: p, State: folder.Whole, Print: n}}, time.Time{})
	}
	if all := q.Checkpoints(); len(all) != 2 || all[1].Path != "2" {
		t.Errorf("%+v", all)
	}
}

// dies is a store that begins an upload to copy, and does no more until the process has gone.
type dies struct {
	objstore.Layer
	begun chan struct{}
}

func (d dies) Copy(ctx context.Context, from objstore.Object, key string) (o objstore.Object, err error) {
	if _, err = d.Upload(ctx, key, from.Size, from.Size); err == nil {
		d.begun <- struct{}{}
		<-ctx.Done()
		err = ctx.Err()
	}
	return o, err
}

// A copy in the bucket that needs an upload leaves none behind if the daemon is killed amid it, and what others have
// begun stays.
func TestKilledAmidCopy(t *testing.T) {
	defer func(most int64) { copyMost = most }(copyMost)
	copyMost = smallFile
	for _, stays := range []bool{true, false} {
		store, dir := objstore.Layer(memstore.New()), t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "a"), make([]byte, smallFile+1), 0o600); err != nil {
			t.Fatal(err)
		}
		run := func(store objstore.Layer, drain time.Duration, until func(c *Carrier) bool) {
			c, err := Open(t.Context(),
				Config{Dir: dir, Last: isLast, Store: store, Drain: drain, Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			c.abortAt = time.Now().Add(drain / 100) // the last one has ended
			ctx, stop := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- c.Run(ctx, func() {}) }()
			for done := false; !done; {
				if !c.in(ctx, func() { done = until(c) }) {
					t.Fatal("it has ended")
				}
			}
			stop()
			<-ended
		}
		left := func() (n int) {
			for _, key := range []string{"a", "b"} {
				all, err := store.Uploads(t.Context(), key)
				if err != nil {
					t.Fatal(err)
				}
				n += len(all)
			}
			return n
		}
		published := func(p string) func(c *Carrier) bool {
			return func(c *Carrier) bool {
				f := c.q.files[p]
				return f != nil && f.there != nil && f.turn == 0 && c.idle()
			}
		}
		run(store, 0, published("a"))
		if _, err := store.Upload(t.Context(), "b", 1, 1); err != nil {
			t.Fatal(err)
		}
		if err := os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "b")); err != nil {
			t.Fatal(err)
		}
		begun := make(chan struct{}, 1)
		run(dies{store, begun}, 0, func(*Carrier) bool { return len(begun) > 0 })
		if n := left(); n != 2 {
			t.Fatalf("%d uploads, not one of the copy, and one of others", n)
		}
		if !stays {
			if err := os.Remove(filepath.Join(dir, "b")); err != nil {
				t.Fatal(err)
			}
		}
		if stays {
			run(store, 0, published("b"))
		} else { // it ends when it may have aborted it
			run(store, time.Minute, func(*Carrier) bool { return true })
		}
		if n := left(); n != 1 {
			t.Errorf("the file stays: %t; %d uploads, not one of others", stays, n)
		}
	}
}

// loses is a store that begins the first upload of parts, and whose answer is lost. It refuses the first listings.
type loses struct {
	objstore.Layer
	once   sync.Once
	denied int
}

func (l *loses) Uploads(ctx context.Context, prefix string) ([]objstore.Unfinished, error) {
	if l.denied--; l.denied >= 0 {
		return nil, &objstore.Error{Kind: objstore.KindDenied}
	}
	return l.Layer.Uploads(ctx, prefix)
}

func (l *loses) Upload(ctx context.Context, key string, size, partSize int64) (u objstore.Upload, err error) {
	u, err = l.Layer.Upload(ctx, key, size, partSize)
	if size > smallFile {
		l.once.Do(func() { u, err = nil, &objstore.Error{Kind: objstore.KindTransient} })
	}
	return u, err
}

// An upload whose beginning was not answered, and was asked for again, does not stay; another's does.
func TestLostAnswerOfAnUpload(t *testing.T) {
	for _, denied := range []int{0, 1} { // the first listing: then nobody can tell ours from theirs
		mem, dir := memstore.New(), t.TempDir()
		others, err := mem.Upload(t.Context(), "a", 1, 1)
		must(t, err)
		store := objstore.Retry(&loses{Layer: mem, denied: denied}, objstore.RetryPolicy{Base: time.Nanosecond})
		must(t, carryTo(t, Config{Dir: dir, Store: store}, func(c *Client) {
			save(t, filepath.Join(dir, "a"), smallFile+1)
			isWhole(t, c, "a")
		}))
		left, err := mem.Uploads(t.Context(), "a")
		if err != nil || len(left) != 1+denied || store.Stats().Retries != 1 ||
			!slices.Contains(left, objstore.Unfinished{Key: "a", ID: others.ID()}) {
			t.Errorf("%v are left, not %s alone; %v, %+v", left, others.ID(), err, store.Stats())
		}
	}
}

// What comes into an old checkpoint at the moment in which it is removed here is not lost.
func TestKeepLocalWhileSaved(t *testing.T) {
	dir, store := t.TempDir(), objstore.Layer(memstore.New())
	c, err := Open(t.Context(),
		Config{Dir: dir, Last: isLast, Store: store, KeepLocal: 1, Drain: time.Minute,
			Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx, func() {}) }()
	has := func(p string) bool {
		_, err := store.Stat(t.Context(), p)
		return err == nil
	}
	late, longer, rounds := []string{}, []string{}, 70
	for n := range rounds {
		step := fmt.Sprint("step", n)
		for i := range 5 {
			save(t, filepath.Join(dir, step, fmt.Sprint(i)), 1)
		}
		save(t, filepath.Join(dir, step, "last"), 1)
		for !has(step + "/last") {
		}
		for range n * 1000 { // at another moment each time
			runtime.Gosched()
		}
		p := fmt.Sprintf("step%d/late", n-1)
		if n%2 == 0 {
			if os.WriteFile(filepath.Join(dir, p), []byte("late"), 0o600) == nil {
				late = append(late, p)
			}
			continue
		}
		p = fmt.Sprintf("step%d/3", n-1)
		if f, err := os.OpenFile(filepath.Join(dir, p), os.O_WRONLY|os.O_APPEND, 0); err == nil {
			if _, err := f.WriteString("late"); err != nil {
				t.Fatal(err)
			}
			_ = f.Close()
			longer = append(longer, p)
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	for _, p := range late {
		if !has(p) && !there(filepath.Join(dir, p)) {
			t.Errorf("%s is lost", p)
		}
	}
	for _, p := range longer {
		o, _ := store.Stat(t.Context(), p)
		here, err := os.Stat(filepath.Join(dir, p))
		if o.Size != 5 && (err != nil || here.Size() != 5) {
			t.Errorf("what was appended to %s is lost", p)
		}
	}
	t.Logf("%d files came late, and %d were longer, of %d rounds", len(late), len(longer), rounds)
}

// A checkpoint that becomes complete by a file that came after its last name counts.
func TestKeepLocalAfterALateFile(t *testing.T) {
	store, _ := toFolder(t)
	dir := t.TempDir()
	must(t, carryTo(t, Config{Dir: dir, Store: store, KeepLocal: 1}, func(client *Client) {
		save(t, filepath.Join(dir, "1/last"), 1)
		isWhole(t, client, "1")
		must(t, os.Mkdir(filepath.Join(dir, "2"), 0o755))
		late, err := os.Create(filepath.Join(dir, "2/late"))
		must(t, err)
		save(t, filepath.Join(dir, "2/last"), 1)
		isWhole(t, client, "2/last")
		_, err = late.WriteString("late")
		must(t, errors.Join(err, late.Close()))
		until(t, "the older one has gone", func() bool { return !there(filepath.Join(dir, "1")) })
	}))
}

// What a crash has left of checkpoints that were being removed here goes at the next start, but for what was written
// since, or is being written.
func TestKeepLocalAfterACrash(t *testing.T) {
	store, _ := toFolder(t)
	dir := t.TempDir()
	bin := func(name string, began time.Time) string {
		return filepath.Join(dir, folder.Home, name+strconv.FormatInt(began.UnixNano(), 36))
	}
	before, since, now := time.Now().Add(time.Hour), time.Now().Add(-time.Hour), time.Now().Add(2*time.Hour)
	for _, began := range []time.Time{before, since, now} {
		save(t, filepath.Join(bin(removing, began), "sub/a"), 1)
	}
	writer, err := os.OpenFile(filepath.Join(bin(removing, now), "sub/a"), os.O_WRONLY, 0)
	must(t, err)
	defer writer.Close()
	must(t, carryTo(t, Config{Dir: dir, Store: store}, func(*Client) {
		for _, began := range []time.Time{before, since, now} {
			until(t, "it has gone there", func() bool { return !there(bin(removing, began)) })
		}
	}))
	for began, kept := range map[time.Time]bool{before: false, since: true, now: true} {
		if there(filepath.Join(bin("kept-", began), "sub/a")) != kept {
			t.Errorf("what was taken away at %v: kept %t", began, !kept)
		}
	}
}

// Keys that are no paths, as others make them, are no checkpoints, and hang nothing.
func TestListOddKeys(t *testing.T) {
	store := memstore.New()
	for _, key := range []string{"run/s/last", "run/s/a", "run//last", "run//a", "run///b", "run/a//b", "run/../c"} {
		store.PutBytes(key, []byte("x"))
	}
	all, err := List(t.Context(), store, "run/", isLast)
	if newest, sure, ok := Latest(all); err != nil || newest.Path != "s" || !sure || !ok {
		t.Errorf("%+v, %v", all, err)
	}
}

// Who waits for a last name does not have it published before what was closed before it, whose news are on their way.
func TestWaitForALastName(t *testing.T) {
	dir := t.TempDir()
	c, err := Open(t.Context(),
		Config{Dir: dir, Last: isLast, Store: objstore.Layer(memstore.New()), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case f := <-c.do:
				f()
			case <-ctx.Done():
				return
			}
		}
	}()
	save(t, filepath.Join(dir, "step/a"), 1)
	save(t, filepath.Join(dir, "last"), 1)
	if got, err := c.wait(ctx, "last", true, false); err != nil || got.Whole {
		t.Errorf("%+v, %v", got, err)
	}
	stop()
	<-ended
	if change, ok := c.q.Next(); !ok || change.Path != "step/a" {
		t.Errorf("%t, %s", ok, change.Path)
	}
}

// A chmod of what the bucket has does not keep it here, nor does a daemon that ended before it removed it.
func TestKeepLocalAfterChmod(t *testing.T) {
	store, dest := toFolder(t)
	dir := t.TempDir()
	err := carryTo(t, Config{Dir: dir, Store: store}, func(client *Client) {
		for _, p := range []string{"before/last", "first/last", "second/last"} {
			save(t, filepath.Join(dir, p), 1)
			isWhole(t, client, p)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	err = carryTo(t, Config{Dir: dir, Store: store, KeepLocal: 1}, func(*Client) {
		until(t, "older ones have gone here", func() bool {
			return !there(filepath.Join(dir, "before")) && !there(filepath.Join(dir, "first"))
		})
		if !there(filepath.Join(dir, "second")) {
			t.Error("the newest has gone, too")
		}
		for _, step := range []string{"s0", "s1", "s2"} {
			save(t, filepath.Join(dir, step, "a"), 1)
			save(t, filepath.Join(dir, step, "last"), 1)
			until(t, step+" is in the bucket", func() bool { return there(filepath.Join(dest, step, "last")) })
			if err := os.Chmod(filepath.Join(dir, step, "a"), 0o640); err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Error(err)
			}
		}
		until(t, "s0 and s1 have gone here", func() bool {
			return !there(filepath.Join(dir, "s0")) && !there(filepath.Join(dir, "s1"))
		})
	})
	if err != nil {
		t.Error(err)
	}
}
