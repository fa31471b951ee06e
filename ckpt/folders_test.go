package ckpt

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// carryTo carries a folder to another one while then runs. It returns the error of the end.
func carryTo(t *testing.T, cfg Config, then func(*Client)) error {
	t.Helper()
	cfg.Last, cfg.Log, cfg.Drain = isLast, slog.New(slog.DiscardHandler), time.Millisecond
	c, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- c.Run(ctx, func() { close(ready) }) }()
	<-ready
	client, _, err := Find(cfg.Dir)
	if err != nil {
		t.Fatal(err)
	}
	then(client)
	stop()
	return errors.Join(<-ended, c.Close())
}

// toFolder is a destination that is a folder.
func toFolder(t *testing.T) (objstore.Layer, string) {
	t.Helper()
	dest := t.TempDir()
	store, err := objstore.NewDir(dest)
	if err != nil {
		t.Fatal(err)
	}
	return objstore.Retry(store, objstore.RetryPolicy{}), dest
}

func isWhole(t *testing.T, c *Client, path string) {
	t.Helper()
	until(t, path+" is there", func() bool {
		w, err := c.Wait(t.Context(), path, 1, true)
		if err != nil {
			t.Fatal(err)
		}
		return w.Whole
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A new file with the inode, the size and the Mtime of one that has gone, as tar and cp -p make them, is not a rename
// of that.
func TestInodeOfAnother(t *testing.T) {
	store, dest := toFolder(t)
	dir := t.TempDir()
	saved := time.Unix(1_000_000, 0)
	at := func(p string) string { return filepath.Join(dir, p) }
	inode := func(p string) uint64 {
		var st unix.Stat_t
		must(t, unix.Stat(at(p), &st))
		return st.Ino
	}
	err := carryTo(t, Config{Dir: dir, Store: store}, func(c *Client) {
		must(t, os.WriteFile(at("a"), []byte("old"), 0o600))
		must(t, os.Chtimes(at("a"), saved, saved))
		isWhole(t, c, "a")
		was := inode("a")
		must(t, os.Remove(at("a")))
		for n := 0; ; n++ {
			name := strings.Repeat("x", 1+n) + ".tmp"
			must(t, os.WriteFile(at(name), []byte("new"), 0o600))
			if inode(name) == was {
				must(t, os.Chtimes(at(name), saved, saved))
				must(t, os.Rename(at(name), at("b")))
				break
			} else if n == 200 {
				t.Skip("this file system gives no inode twice")
			}
		}
		isWhole(t, c, "b")
	})
	if b, rerr := os.ReadFile(filepath.Join(dest, "b")); err != nil || rerr != nil || string(b) != "new" {
		t.Errorf("%q, %v, %v", b, err, rerr)
	}
}

// Other rights, another owner or another link make no other content: nothing is published again. A write is.
func TestChmodIsNoSave(t *testing.T) {
	store, dest := toFolder(t)
	dir := t.TempDir()
	at := filepath.Join(dir, "a")
	must(t, os.WriteFile(at, []byte("old"), 0o600))
	carried := func() (os.FileInfo, string) {
		must(t, carryTo(t, Config{Dir: dir, Store: store}, func(c *Client) { isWhole(t, c, "a") }))
		is, err := os.Stat(filepath.Join(dest, "a"))
		must(t, err)
		b, err := os.ReadFile(filepath.Join(dest, "a"))
		must(t, err)
		return is, string(b)
	}
	first, _ := carried()
	must(t, os.Chmod(at, 0o640))
	must(t, os.Link(at, filepath.Join(t.TempDir(), "b")))
	if again, _ := carried(); !os.SameFile(first, again) {
		t.Error("it was published again")
	}
	f, err := os.OpenFile(at, os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteString("new")
	must(t, errors.Join(err, f.Close()))
	if _, b := carried(); b != "new" {
		t.Errorf("%q is there", b)
	}
}

// A link to the folder that leads elsewhere some day takes nothing with it: --keep-local removes nothing there.
func TestFolderBehindALink(t *testing.T) {
	store, _ := toFolder(t)
	one, two, link := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "current")
	if err := errors.Join(os.Symlink(one, link), os.Mkdir(filepath.Join(two, folder.Home), 0o700)); err != nil {
		t.Fatal(err)
	}
	err := carryTo(t, Config{Dir: link, Store: store, KeepLocal: 1}, func(*Client) {
		client, _, err := Find(one)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range []string{"1/a", "1/last"} {
			save(t, filepath.Join(one, p), 1)
			save(t, filepath.Join(two, p), 2)
		}
		isWhole(t, client, "1")
		if err := errors.Join(os.Remove(link), os.Symlink(two, link)); err != nil {
			t.Fatal(err)
		}
		save(t, filepath.Join(one, "2/a"), 1)
		save(t, filepath.Join(one, "2/last"), 1)
		until(t, "one has gone", func() bool { return !there(filepath.Join(one, "1")) })
	})
	if b, rerr := os.ReadFile(filepath.Join(two, "1/a")); err != nil || rerr != nil || len(b) != 2 {
		t.Errorf("%q, %v, %v", b, err, rerr)
	}
}

// Nor does another folder that has taken the name: what is removed, and put back, is in the one that is carried.
func TestFolderThatMoved(t *testing.T) {
	store, _ := toFolder(t)
	dir := filepath.Join(t.TempDir(), "dir")
	old := dir + ".old"
	must(t, os.Mkdir(dir, 0o700))
	c, err := Open(t.Context(), Config{Dir: dir, Store: store, Last: isLast, Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	defer c.Close()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx, func() {}) }()
	save(t, filepath.Join(dir, "1/a"), 1)
	save(t, filepath.Join(dir, "1/last"), 1)
	until(t, "it is whole", func() (whole bool) {
		c.in(ctx, func() { lacks, _, known := c.q.Lacks("1/last", false); whole = known && lacks == "" })
		return whole
	})
	stop()
	must(t, <-ended)
	must(t, errors.Join(os.Rename(dir, old), os.MkdirAll(filepath.Join(dir, "1/others"), 0o700),
		os.Mkdir(filepath.Join(dir, folder.Home), 0o700)))
	must(t, c.journal.write(entry{Path: "b", Upload: &begun{Part: 1}}, true))
	b, err := os.ReadFile(filepath.Join(old, folder.Home, "journal"))
	if _, known := said(b).Uploads["b"]; !known || there(filepath.Join(dir, folder.Home, "journal")) {
		t.Errorf("the journal went with the name, not with the folder: %v", err)
	}
	must(t, c.removeLocal("1"))
	c.running.Wait()
	if there(filepath.Join(old, "1")) || !there(filepath.Join(dir, "1/others")) {
		t.Errorf("%v is there, and %v here", there(filepath.Join(old, "1")), there(filepath.Join(dir, "1/others")))
	}
}

// refuses is a store that neither removes nor copies.
type refuses struct{ objstore.Layer }

func (refuses) Delete(context.Context, string, string) error {
	return &objstore.Error{Op: "delete", Kind: objstore.KindDenied}
}

func (refuses) Copy(context.Context, objstore.Object, string) (objstore.Object, error) {
	return objstore.Object{}, &objstore.Error{Op: "put", Kind: objstore.KindDenied}
}

// A removal that the store refuses holds up no file.
func TestRemovalRefused(t *testing.T) {
	store, dest := toFolder(t)
	dir := t.TempDir()
	c, err := Open(t.Context(), Config{Dir: dir, Store: refuses{store}, Delete: true, Last: isLast,
		Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	defer c.Close()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx, func() {}) }()
	save(t, filepath.Join(dir, "a"), 1)
	until(t, "it is there", func() bool { return there(filepath.Join(dest, "a")) })
	must(t, os.Remove(filepath.Join(dir, "a")))
	until(t, "its removal is refused", func() (refused bool) {
		c.in(ctx, func() {
			if refused = c.trouble.tries > 0 && c.q.busy == nil; refused {
				c.trouble.since = time.Now().Add(time.Hour)
			}
		})
		return refused
	})
	save(t, filepath.Join(dir, "b"), 1)
	until(t, "another file is there", func() (known bool) {
		c.in(ctx, func() { known = c.q.files["b"] != nil && c.q.files["b"].there != nil && c.q.busy == nil })
		return known
	})
	stop()
	if err := <-ended; !strings.Contains(err.Error(), "0 files and 1 removals did not reach") {
		t.Error(err)
	}
}

// What the store does not copy, as of an object that it has archived, is sent.
func TestCopyRefused(t *testing.T) {
	store, dest := toFolder(t)
	dir := t.TempDir()
	must(t, carryTo(t, Config{Dir: dir, Store: refuses{store}}, func(c *Client) {
		for _, size := range []int{1, smallFile + 1} {
			name := fmt.Sprint(size)
			save(t, filepath.Join(dir, name), size)
			isWhole(t, c, name)
			must(t, os.Rename(filepath.Join(dir, name), filepath.Join(dir, name+"-again")))
			isWhole(t, c, name+"-again")
			if fi, err := os.Stat(filepath.Join(dest, name+"-again")); err != nil || fi.Size() != int64(size) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}))
}

// What a user has removed of a checkpoint goes with Delete, also if KeepLocal removes the rest before its news come, or
// before its turn.
func TestKeepLocalAfterARemoval(t *testing.T) {
	store, dest := toFolder(t)
	dir := t.TempDir()
	cfg := Config{Dir: dir, Store: store, Delete: true, Last: isLast, Log: slog.New(slog.DiscardHandler)}
	must(t, carryTo(t, cfg, func(client *Client) {
		for _, p := range []string{"1/a", "1/b", "1/last"} {
			save(t, filepath.Join(dir, p), 1)
		}
		isWhole(t, client, "1")
	}))
	c, err := Open(t.Context(), cfg)
	must(t, err)
	must(t, c.hearAll())
	must(t, os.Remove(filepath.Join(dir, "1/a")))
	if err := c.removeLocal("1"); err == nil || !there(filepath.Join(dir, "1")) {
		t.Errorf("it was removed here before the news came: %v", err)
	}
	must(t, c.hearAll())
	must(t, c.removeLocal("1"))
	c.q.Release("1")
	if change, ok := c.q.Next(); !ok || change.Put || change.Path != "1/a" || len(c.q.files) != 1 {
		t.Errorf("%t, %+v, %d files", ok, change, len(c.q.files))
	}
	c.running.Wait()
	must(t, c.Close())
	must(t, carryTo(t, cfg, func(client *Client) { // it is known after a crash, too
		until(t, "it has gone there", func() bool {
			s, err := client.Status(t.Context())
			return err == nil && s.Stats.Removed == 1
		})
	}))
	if !there(filepath.Join(dest, "1/b")) || there(filepath.Join(dest, "1/a")) || there(filepath.Join(dir, "1")) {
		t.Error("the rest is not in the bucket alone")
	}
}

// What somebody moves into a checkpoint while that is removed here has its place, though its files are older.
func TestKeepLocalWhileAFolderComes(t *testing.T) {
	store, _ := toFolder(t)
	dir := t.TempDir()
	at := func(p string) string { return filepath.Join(dir, p) }
	c, err := Open(t.Context(), Config{Dir: dir, Store: store, Last: isLast, Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	defer c.Close()
	save(t, at("1/sub/last"), 1)
	save(t, at("new/a"), 1)
	must(t, c.hearAll()) // the clock has passed their time
	var began unix.Timespec
	must(t, unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &began))
	bin := filepath.Join(folder.Home, removing+strconv.FormatInt(began.Nano(), 36))
	must(t, errors.Join(os.Rename(at("1"), at(bin)), os.Rename(at("new"), filepath.Join(at(bin), "new"))))
	if err := c.discard(bin, "1"); err == nil || !there(at("1/new/a")) || !there(at("1/sub/last")) {
		t.Errorf("what came is lost: %v", err)
	}
	must(t, errors.Join(os.Rename(at("1/new"), at("new")), os.Rename(at("1"), at(bin))))
	must(t, c.discard(bin, "1"))
	c.running.Wait()
	if there(at("1")) || there(at(bin)) {
		t.Error("what nobody has changed is still there")
	}
}

// Another store, with a bucket of the same name, has nothing of what the last one had: all is carried there before
// anything is removed here.
func TestAnotherEndpoint(t *testing.T) {
	dir := t.TempDir()
	for _, p := range []string{"1/last", "2/last"} {
		save(t, filepath.Join(dir, p), 1)
	}
	for _, endpoint := range []string{"https%3A%2F%2Fa", "https%3A%2F%2Fb"} {
		store, dest := toFolder(t)
		must(t, carryTo(t, Config{Dir: dir, Store: store, Dest: "s3://bucket/?endpoint=" + endpoint},
			func(client *Client) {
				isWhole(t, client, ".")
				if s, err := client.Status(t.Context()); err != nil || s.Dest != "s3://bucket/" {
					t.Errorf("%+v, %v", s, err)
				}
			}))
		if !there(filepath.Join(dest, "1/last")) || !there(filepath.Join(dest, "2/last")) {
			t.Errorf("%s lacks something", endpoint)
		}
	}
}

// A folder that becomes a file does so in a destination that is a folder, too.
func TestFolderBecomesAFile(t *testing.T) {
	store, dest := toFolder(t)
	dir := t.TempDir()
	must(t, carryTo(t, Config{Dir: dir, Store: store, Delete: true}, func(c *Client) {
		save(t, filepath.Join(dir, "a/b/c"), 1)
		isWhole(t, c, "a")
		must(t, os.RemoveAll(filepath.Join(dir, "a")))
		save(t, filepath.Join(dir, "a"), 2)
		isWhole(t, c, "a")
	}))
	if b, err := os.ReadFile(filepath.Join(dest, "a")); err != nil || len(b) != 2 {
		t.Errorf("%q, %v", b, err)
	}
}

// Who waits when the daemon ends hears that there is none, as one who comes later.
func TestWaitingAtTheEnd(t *testing.T) {
	store, _ := toFolder(t)
	dir := t.TempDir()
	waited := make(chan error, 1)
	_ = carryTo(t, Config{Dir: dir, Store: stuck{store, "a", make(chan struct{})}}, func(c *Client) {
		save(t, filepath.Join(dir, "a"), 1)
		if w, err := c.Wait(t.Context(), "a", 1, true); err != nil || w.Whole {
			t.Fatal(w, err)
		}
		asks := make(chan struct{})
		go func() {
			close(asks)
			for {
				if _, err := c.Wait(t.Context(), "a", 1, false); err != nil {
					waited <- err
					return
				}
			}
		}()
		<-asks
	})
	if err := <-waited; !strings.Contains(err.Error(), "no shoal ckpt carries it") {
		t.Error(err)
	}
}

// With Delete a file becomes a folder, and a folder a file, where the bucket is a folder, too.
func TestFileAndFolder(t *testing.T) {
	for _, size := range []int{1, smallFile + 1} {
		store, dest := toFolder(t)
		dir := t.TempDir()
		must(t, carryTo(t, Config{Dir: dir, Store: store, Delete: true}, func(c *Client) {
			for _, paths := range [][]string{{"a", "d/e/1", "d/2"}, {"a/b", "d"}} {
				must(t, errors.Join(os.RemoveAll(filepath.Join(dir, "a")), os.RemoveAll(filepath.Join(dir, "d"))))
				for _, p := range paths {
					save(t, filepath.Join(dir, p), size)
				}
				for _, p := range paths {
					isWhole(t, c, p)
				}
			}
		}))
		if !there(filepath.Join(dest, "a/b")) || there(filepath.Join(dest, "d/2")) {
			t.Error("a is no folder, or d is one")
		}
	}
}

// authored is a store in memory that knows what a journal has stored, as a bucket does.
type authored struct{ objstore.Layer }

func (a authored) Delete(ctx context.Context, key, etag string) error {
	return a.Layer.Delete(objstore.WithAuthor(ctx, ""), key, etag)
}

// carrying runs a carrier of a folder, which must end without an error.
func carrying(t *testing.T, dir string, store objstore.Layer) (c *Carrier, ctx context.Context, end func()) {
	t.Helper()
	c, err := Open(t.Context(), Config{Dir: dir, Store: store, Last: isLast, Drain: time.Minute,
		Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx, func() {}) }()
	return c, ctx, func() {
		t.Helper()
		stop()
		must(t, errors.Join(<-ended, c.Close()))
	}
}

// News of a checkpoint that come when it has just been removed here publish nothing, and take nothing from the bucket,
// nor does the next start.
func TestKeepLocalBeforeNews(t *testing.T) {
	store, dir := authored{memstore.New()}, t.TempDir()
	for range 2 {
		c, ctx, end := carrying(t, dir, store)
		for _, p := range []string{"1/last", "2/last"} {
			if !there(filepath.Join(dir, "2/last")) {
				save(t, filepath.Join(dir, p), 1)
				until(t, p+" is there", func() bool { _, err := store.Stat(t.Context(), p); return err == nil })
			}
		}
		until(t, "both are whole", func() (whole bool) {
			c.in(ctx, func() { lacks, _, _ := c.q.Lacks(".", false); whole = lacks == "" })
			return whole
		})
		c.in(ctx, func() {
			if there(filepath.Join(dir, "1")) {
				must(t, os.Chmod(filepath.Join(dir, "1/last"), 0o600))
				time.Sleep(time.Second / 4) // the news wait for this to end
				c.KeepLocal = 1
				c.keepLocal()
			}
		})
		until(t, "the older one has gone here", func() bool { return !there(filepath.Join(dir, "1")) })
		end()
		if _, err := store.Stat(t.Context(), "1/last"); err != nil {
			t.Fatal(err)
		}
	}
}

// A checkpoint that --keep-local could not remove goes soon after the others have gone, without another last name:
// somebody could write it, or it shares files with them, which their removal has changed.
func TestKeepLocalLooksAgain(t *testing.T) {
	store, _ := toFolder(t)
	dir := t.TempDir()
	at := func(p string) string { return filepath.Join(dir, p) }
	c, ctx, end := carrying(t, dir, store)
	for _, p := range []string{"1/last", "2/last", "3/last"} {
		save(t, at(p), 1)
		until(t, p+" is whole", func() (whole bool) {
			c.in(ctx, func() { lacks, _, known := c.q.Lacks(p, false); whole = known && lacks == "" })
			return whole
		})
	}
	c.in(ctx, func() {
		writer, err := os.OpenFile(at("2/last"), os.O_WRONLY, 0)
		must(t, err)
		c.KeepLocal = 1
		c.keepLocal()
		must(t, writer.Close())
	})
	if !there(at("2")) {
		t.Error("what somebody could write was removed")
	}
	until(t, "both have gone here", func() bool { return !there(at("1")) && !there(at("2")) })
	end()
}

// The newest checkpoint stays whole here, also if its parts have last names of their own, and it has none.
func TestKeepLocalKeepsParts(t *testing.T) {
	store, _ := toFolder(t)
	dir := t.TempDir()
	must(t, carryTo(t, Config{Dir: dir, Store: store, KeepLocal: 1}, func(c *Client) {
		for _, p := range []string{"9/model_0", "9/optimizer_0", "10/model_0", "10/optimizer_0", "11/step-1",
			"11/step-2"} {
			save(t, filepath.Join(dir, p, "last"), 1)
			isWhole(t, c, p)
			if p == "10/optimizer_0" && (there(filepath.Join(dir, "9/model_0")) ||
				!there(filepath.Join(dir, "10/model_0"))) {
				t.Error("the older one is here, or the newest is not whole")
			}
		}
		if there(filepath.Join(dir, "10/model_0")) || there(filepath.Join(dir, "11/step-1")) {
			t.Error("older ones are here")
		}
	}))
}

// listing is a store that lists nothing before it is told to.
type listing struct {
	objstore.Layer
	begin chan struct{}
}

func (l listing) List(ctx context.Context, prefix, after string) iter.Seq2[objstore.Object, error] {
	<-l.begin
	return l.Layer.List(ctx, prefix, after)
}

// Files are carried while the store is slow to say which checkpoints only it has; the daemon is ready with their links.
func TestCarriedBeforeLinks(t *testing.T) {
	store, dest := toFolder(t)
	dir, begin, ready := t.TempDir(), make(chan struct{}), make(chan struct{})
	save(t, filepath.Join(dest, "old/last"), 1)
	c, err := Open(t.Context(), Config{Dir: dir, Store: listing{store, begin}, Last: isLast, Drain: time.Minute,
		Link: t.TempDir(), Refresh: func(context.Context) error { return nil }, Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx, func() { close(ready) }) }()
	save(t, filepath.Join(dir, "new/last"), 1)
	until(t, "it is there", func() bool { return there(filepath.Join(dest, "new/last")) })
	select {
	case <-ready:
		t.Error("ready before the links")
	default:
	}
	close(begin)
	<-ready
	if !there(filepath.Join(dir, "old")) {
		t.Error("no link")
	}
	stop()
	must(t, errors.Join(<-ended, c.Close()))
}
