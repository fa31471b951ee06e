package ckpt

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/internal/pause"
)

// Config says what to carry where.
type Config struct {
	Dir       string
	Prefix    string                 // of the keys: empty, or ending in "/"
	Dest      string                 // the destination, for people, or as by objstore.Source.Canonical
	Store     objstore.Layer         // with retries
	State     string                 // the folder of the journal; "" is folder.Home in Dir
	Last      func(path string) bool // as made by folder.LastNames
	Delete    bool                   // what is removed in Dir is removed in the bucket
	KeepLocal int                    // how many complete checkpoints stay in Dir; 0: all
	// Link is the path of a mount of the destination, or below one, that complete checkpoints are linked into if only
	// the bucket has them; "": none are. Nothing looks into it. Refresh has the mount show what the bucket has.
	Link      string
	Refresh   func(ctx context.Context) error
	Unordered bool // other hosts may use the prefix at the same time, without any order among the hosts
	// Cluster, if it has a name, orders those who share the prefix. TLS is for its etcd.
	Cluster cluster.Address
	TLS     *tls.Config
	// Drain is how long the end may take to publish what has been closed, unless Hurried is closed before.
	Drain   time.Duration
	Hurried <-chan struct{}
	Looked  func(files, of int) // hears how far the look at the folder is that Run begins with; may be nil
	Log     *slog.Logger
	// Copies is how many hosts of the cluster have each file that is closed, until the bucket has it: 2, or less for
	// one. Others reach this host at Advertise, HOST:PORT; "": at its address towards etcd.
	Copies    int
	Advertise string
	stead     stead // with an id: this carrier's files are another host's
}

// Carrier carries a folder to a bucket. Everything it knows belongs to the goroutine of Run.
type Carrier struct {
	Config
	folder  *folder.Folder
	looks   atomic.Int64 // how often all of it was looked at, or some removed: news from before may be older
	journal *journal
	lock    *prefixLock
	hosts   *order // nil without a cluster
	q       *Queue
	do      chan func()
	memory  *semaphore.Weighted // of parts in flight, bytes
	sends   map[string]*send
	closing map[string]bool // paths of sends that are ending
	noList  sync.Once       // the store does not list uploads: said
	abortAt time.Time       // when useless uploads may be aborted, after a failure or a crash
	links   links
	again   chan struct{} // has room for one: keepLocal may remove what it could not
	stats   Stats
	trouble trouble
	changed chan struct{} // closed by tell
	wake    *time.Timer   // for the next try
	running sync.WaitGroup
}

// trouble is why the next change could not be made so far.
type trouble struct {
	path  string
	turn  uint64 // of the change
	err   error
	since time.Time
	tries int
}

const (
	smallFile  = 4 << 20 // is sent by one request, when its turn comes
	leastPart  = 8 << 20
	partsBytes = 128 << 20 // of parts in flight
	sendsAhead = 6         // files whose parts are sent at once
	lookAhead  = 256       // changes among which they are looked for
	lateAnswer = 10 * time.Second
)

// Stats are counts since the start.
type Stats struct {
	Files   int64 `json:"files"`   // published
	Bytes   int64 `json:"bytes"`   // of them
	Copies  int64 `json:"copies"`  // of the files: by a copy in the bucket
	Resumed int64 `json:"resumed"` // parts of an earlier process that were not sent again
	Removed int64 `json:"removed"` // objects
	Foreign int64 `json:"foreign"` // objects that are, or may be, somebody else's, and stay
	Local   int64 `json:"local"`   // folders removed here, by KeepLocal
}

// Open takes the folder and the prefix, and reads the journal.
func Open(ctx context.Context, cfg Config) (_ *Carrier, err error) {
	dest, endpoint, _ := strings.Cut(cfg.Dest, "?endpoint=")
	cfg.Dest = dest
	c := &Carrier{Config: cfg, q: NewQueue(cfg.Last, cfg.Delete), do: make(chan func()),
		memory: semaphore.NewWeighted(partsBytes), wake: time.NewTimer(0), sends: map[string]*send{},
		changed: make(chan struct{}), closing: map[string]bool{}, again: make(chan struct{}, 1),
		links: links{skipped: map[string]bool{}, look: make(chan struct{}, 1)}}
	c.folder, err = folder.Open(cfg.Dir, folder.Options{Inner: cfg.stead.id != "", Last: cfg.Last,
		Prefix: len(cfg.Prefix), Looked: cfg.Looked, Log: cfg.Log})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	c.Dir = c.folder.Dir // cfg's may be a link, and lead elsewhere some day
	var st unix.Stat_t
	if err := unix.Stat(c.Dir, &st); err != nil {
		return nil, err
	}
	of := origin{ID: cfg.stead.id, Dest: cfg.Dest, At: endpoint, Dev: st.Dev, Ino: st.Ino}
	home := c.folder.At(folder.Home) // also when its name is another folder's
	j, err := openJournal(filepath.Join(cmp.Or(cfg.State, home), "journal"), filepath.Join(home, "journal.id"), of)
	if err != nil {
		return nil, fmt.Errorf("the journal in %s: %w (free some space there, or run shoal ckpt as a user who may "+
			"write it)", cmp.Or(cfg.State, c.Dir), err)
	}
	c.journal = j
	if cfg.Cluster.Name != "" {
		c.hosts = newOrder(cfg, c.q, j.known.Origin.ID)
	}
	if cfg.Copies > 1 {
		err = c.openCopies()
	} else if n := len(j.known.Copies); n > 0 {
		err = fmt.Errorf("another host has copies of %d files (start with --copies 2, until it has none)", n)
	}
	if err != nil {
		return nil, err
	}
	if c.lock, err = takePrefix(ctx, cfg, j.known.Origin.ID); err != nil {
		return nil, err
	}
	for p, o := range j.known.Objects {
		c.q.publish(c.q.file(p), o)
		c.folder.Know(p, o.Print)
	}
	maps.Copy(c.q.unsealed, j.known.Unsealed)
	for _, u := range j.known.Uploads {
		if u.ID == "" { // the store may not have begun it yet
			c.abortAt = time.Now().Add(lateAnswer)
		}
	}
	return c, nil
}

// Close gives everything back.
func (c *Carrier) Close() error {
	err := c.folder.Close()
	if c.journal != nil {
		err = errors.Join(err, c.journal.close())
	}
	if c.lock != nil {
		c.lock.release()
	}
	if c.hosts != nil && c.hosts.copies != nil {
		_ = c.hosts.copies.here.Close() // it may be closed
	}
	return err
}

func (c *Carrier) key(p string) string { return c.Prefix + p }

// Run carries until ctx ends, and then what was closed until then, for as long as Drain allows. ready is called when
// all that is in the folder is known, the cluster knows of this host, and links are made. Its error names what the
// bucket lacks.
func (c *Carrier) Run(ctx context.Context, ready func()) error {
	work, stop := context.WithCancelCause(
		objstore.WithAuthor(context.WithoutCancel(ctx), "ckpt-"+c.journal.known.Origin.ID))
	defer func() { stop(nil); c.running.Wait() }()
	if err := c.hearAll(); err != nil {
		return err
	}
	l, err := c.listen()
	if err != nil {
		return err
	}
	old, _ := filepath.Glob(c.folder.At(folder.Home + "/" + removing + "*"))
	for _, at := range old {
		_ = c.discard(path.Join(folder.Home, filepath.Base(at)), "")
	}
	c.keepLocal()
	c.running.Go(func() { c.serve(work, l) })
	c.running.Go(func() { c.follow(work, stop) })
	c.running.Go(func() { c.lock.keep(work, stop) })
	if c.Link != "" { // the store may be slow to say what to link: files are carried meanwhile
		linked, told := make(chan struct{}), ready
		c.running.Go(func() { c.keepLinks(work, linked) })
		ready = func() { c.running.Go(func() { <-linked; told() }) }
	}
	if c.hosts != nil {
		c.hosts.joined = ready
		c.running.Go(func() { c.meetHosts(work) })
		if c.hosts.copies != nil {
			c.running.Go(func() { c.serveCopies(work) })
		}
	} else {
		ready()
	}
	var deadline <-chan time.Time
	ending := ctx.Done()
	for {
		if c.pump(work); c.hosts != nil {
			c.hosts.stir()
		}
		if ending == nil && (c.idle() || c.stead.id != "" && c.q.busy == nil) {
			return nil
		}
		select {
		case f := <-c.do:
			f()
		case <-c.wake.C:
		case <-c.again:
			c.keepLocal()
		case <-ending:
			ending = nil
			if c.hosts != nil {
				c.hosts.ending = true
			}
			if c.stead.id != "" { // what may be under way must have come, and nothing more
				for _, s := range c.sends {
					s.cancel(folder.ErrWriting)
				}
				continue
			}
			deadline = time.After(c.Drain)
			if err := c.hearAll(); err != nil {
				c.Log.Error("cannot scan the folder", "cause", err)
			}
			if b := c.q.Behind(); b.Files+b.Removals > 0 {
				c.Log.Info("ending: publishing what was closed", "files", b.Files, "bytes", b.Bytes,
					"removals", b.Removals, "at most", c.Drain)
			}
		case <-deadline:
			return c.leftOver()
		case <-c.Hurried:
			return c.leftOver()
		case <-work.Done():
			return context.Cause(work)
		}
	}
}

// follow passes the folder's news on.
func (c *Carrier) follow(ctx context.Context, stop context.CancelCauseFunc) {
	for {
		looks := c.looks.Load()
		news, err := c.folder.Next(ctx)
		if err != nil {
			stop(err)
			return
		}
		c.in(ctx, func() {
			if c.looks.Load() != looks && c.hearAll() == nil {
				return // the news may be older than what was seen since
			}
			c.hear(news, c.q.Hear)
		})
	}
}

// post has Run do f.
func (c *Carrier) post(ctx context.Context, f func()) bool {
	select {
	case c.do <- f:
		return true
	case <-ctx.Done():
		return false
	}
}

// hearAll looks at the whole folder.
func (c *Carrier) hearAll() error {
	news, err := c.folder.Look()
	if c.looks.Add(1); err == nil {
		c.hear(news, c.q.HearAll)
	}
	return err
}

// hear takes news, by the queue's Hear or HearAll.
func (c *Carrier) hear(news []folder.News, take func([]folder.News, time.Time)) {
	for _, n := range news {
		known := c.links.skipped[n.Path]
		if delete(c.links.skipped, n.Path); n.State == folder.Skipped {
			if c.links.skipped[n.Path] = true; !known && n.Why != folder.NoFile {
				c.Log.Warn("a path is left out", "path", n.Path, "why", n.Why)
			}
		}
		if f := c.q.files[n.Path]; n.State == folder.Torn && (f == nil || f.state != torn) {
			c.Log.Warn("a file is not published, nor are the last names of its folder", "file", n.Path, "why", n.Why)
		}
	}
	take(news, time.Now())
	c.tell()
}

// tell wakes those who wait for a change.
func (c *Carrier) tell() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// idle reports whether the bucket has all that it can, no upload of ours can be aborted, and no host waits for us.
func (c *Carrier) idle() bool {
	b, ours := c.q.Behind(), len(c.journal.uploads()) > 0 && time.Until(c.abortAt) <= lateAnswer
	return b.Files+b.Removals+len(c.closing) == 0 && c.q.busy == nil && !ours && (c.hosts == nil || c.hosts.left)
}

// leftOver names what the bucket lacks at the end.
func (c *Carrier) leftOver() error {
	b := c.q.Behind()
	if b.Files+b.Removals == 0 && c.hosts != nil && !c.hosts.left {
		return fmt.Errorf("other hosts of %s go on waiting for this one: it could not tell them that it has nothing "+
			"left to send (torn files, files being written, no etcd? start shoal ckpt again)", c.Cluster)
	} else if b.Files+b.Removals == 0 {
		return nil
	}
	var names []string
	for f := range c.q.waiting.all {
		if names = append(names, f.path); len(names) == 5 {
			names = append(names, "…")
			break
		}
	}
	why := ""
	if c.trouble.err != nil {
		why = ": " + c.trouble.err.Error()
	} else if b.WaitsFor != "" {
		why = ": " + b.Next + " waits for " + b.WaitsFor
	}
	return fmt.Errorf(
		"%d files and %d removals did not reach %s (%s)%s (start shoal ckpt again: it goes on where it stopped)",
		b.Files, b.Removals, c.Dest, strings.Join(names, ", "), why)
}

func (c *Carrier) pump(ctx context.Context) {
	if c.stead.id != "" && c.hosts.ending {
		return
	}
	if c.hosts != nil {
		c.keepCopies(ctx)
	}
	if wait := time.Until(c.abortAt); wait > 0 {
		c.wake.Reset(wait)
	}
	c.sendAhead(ctx)
	known := c.journal.known.Unsealed
	for p, since := range c.q.unsealed {
		if was, noted := known[p]; !noted || was != since {
			c.note(entry{Path: p, Unsealed: true, Since: since})
		}
	}
	for p := range known {
		_, waits := c.q.unsealed[p]
		if f := c.q.files[p]; !waits && f != nil && f.state == whole && f.turn == 0 && f.there != nil {
			c.note(entry{Path: p, Object: f.there}) // it is visible, as it is here
		}
	}
	if f := c.q.files[c.trouble.path]; f == nil || f.turn != c.trouble.turn { // that change waits no more
		c.trouble = trouble{}
	}
	change, ok := c.q.Next()
	if !ok {
		return
	}
	if wait := c.pause(change); wait > 0 {
		c.q.busy = nil
		c.wake.Reset(wait)
		return
	}
	var s *send
	if c.inParts(change) {
		if s = c.begin(ctx, change); s == nil || s.turn != change.Turn {
			c.q.Failed(change, false) // again when the file's last send has ended
			return
		}
	} else if copiedInParts(change) && c.ending(change.Path) {
		c.q.Failed(change, false)
		return
	}
	perhaps := Published{} // before it is made: a crash must not forget an object, nor take one for there
	if !change.Put {
		perhaps.ETag = change.There.ETag
	}
	c.note(entry{Path: change.Path, Object: &perhaps})
	c.running.Go(func() {
		r := c.make(ctx, change, s)
		c.post(ctx, func() { c.made(ctx, change, r) })
	})
}

// pause is how long to wait before a change is tried.
func (c *Carrier) pause(change Change) time.Duration {
	if !c.lock.fresh() {
		c.trouble.err = cmp.Or(c.trouble.err, errors.New(
			"the lock of the destination is not renewed: another daemon may have it by now"))
		return time.Second
	}
	if c.trouble.tries == 0 || !c.q.files[change.Path].failed { // what passes one that failed does not wait for it
		return 0
	}
	return time.Until(c.trouble.since.Add(min(time.Minute, 50*time.Millisecond<<min(c.trouble.tries, 11))))
}

// note writes to the journal, durably what is about a last name. If it cannot, a crash costs work, and what is removed
// before the next start stays in the bucket.
func (c *Carrier) note(e entry) {
	if err := c.journal.write(e, e.Object != nil && c.q.isLast(e.Path)); err != nil {
		c.Log.Error("the journal cannot be written", "cause", err)
	}
}

// result is what came of a change.
type result struct {
	there   Published
	foreign bool // the object is somebody else's, or may be
	copied  bool
	inParts bool
	err     error
}

func (c *Carrier) made(ctx context.Context, change Change, r result) {
	if s := c.sends[change.Path]; s != nil && s.turn == change.Turn && !errors.Is(r.err, errNotSent) {
		c.close(ctx, change.Path)
	}
	if r.err != nil {
		c.q.Failed(change, !errors.Is(r.err, errNotSent) && !isWriting(r.err))
		c.failed(change, r.err)
		return
	}
	c.trouble = trouble{}
	if r.foreign {
		c.stats.Foreign++
		c.Log.Warn("an object is not, or may not be, what this daemon published; it stays", "key", c.key(change.Path))
	}
	c.q.Made(change, r.there)
	c.tell()
	if !change.Put {
		c.stats.Removed++
		c.note(entry{Path: change.Path, Removed: true})
		return
	}
	c.stats.Files++
	c.stats.Bytes += change.Print.Size
	if r.copied {
		c.stats.Copies++
	}
	c.note(entry{Path: change.Path, Object: &r.there})
	if r.inParts { // else an upload of the file is of no use now
		c.note(entry{Path: change.Path, Ended: true})
	}
	if c.stead.id != "" {
		_ = os.Remove(c.folder.At(change.Path))
	}
	if c.q.isLast(change.Path) {
		c.Log.Info("published, with all that was closed before", "key", c.key(change.Path))
	} else {
		c.Log.Debug("published", "key", c.key(change.Path), "bytes", change.Print.Size)
	}
	if c.KeepLocal == 0 {
		return
	}
	for l := range c.q.lasts { // which may have come before the file
		if l.path == change.Path || l.state == whole && l.turn == 0 && under(change.Path, path.Dir(l.path)) {
			c.keepLocal()
			return
		}
	}
}

// failed notes why a change was not made.
func (c *Carrier) failed(change Change, err error) {
	if f := c.q.files[change.Path]; errors.Is(err, errNotSent) {
		if f != nil {
			f.uncopied = change.Turn
		}
		return
	}
	if isWriting(err) { // no trouble: its news are about to come
		c.trouble = trouble{path: change.Path, turn: change.Turn, since: time.Now(), tries: 1}
		return
	}
	c.trouble.path, c.trouble.turn, c.trouble.err, c.trouble.since = change.Path, change.Turn, err, time.Now()
	if c.trouble.tries++; c.trouble.tries == 1 {
		c.Log.Error("cannot publish; it is tried again", "file", change.Path, "cause", err)
	}
}

// isWriting reports whether an error is the folder's: the file is not as it was.
func isWriting(err error) bool {
	return errors.Is(err, folder.ErrWriting) || errors.Is(err, folder.ErrChanged) || errors.Is(err, folder.ErrGone)
}

func (c *Carrier) make(ctx context.Context, change Change, s *send) (r result) {
	r.there.Print = change.Print
	key := c.key(change.Path)
	if !change.Put {
		if r.err = c.Store.Delete(ctx, key, change.There.ETag); objstore.KindOf(r.err) == objstore.KindChanged {
			r.foreign, r.err = true, nil
		}
		return r
	}
	if change.From != "" && s == nil {
		if r.err = c.folder.Sync(change.Path); r.err != nil {
			return r
		}
		if copiedInParts(change) { // an upload that a failed try leaves is ended by sendAhead
			if _, _, r.err = c.announce(ctx, change, 0); r.err != nil {
				return r
			}
		}
		from := objstore.Object{Key: c.key(change.From), Size: change.Print.Size, ETag: change.FromThere.ETag}
		o, err := c.Store.Copy(ctx, from, key)
		switch k := objstore.KindOf(err); {
		case err == nil:
			r.there.ETag, r.copied = o.ETag, true
			return r
		case slices.Contains([]objstore.Kind{objstore.KindTransient, objstore.KindOther, objstore.KindExists}, k):
			r.err = err // else it is sent: the object may have been archived
			return r
		}
	}
	switch {
	case change.Print.Size <= smallFile:
		r.there.ETag, r.err = c.putSmall(ctx, change)
	case s == nil:
		r.err = errNotSent
	default:
		var o objstore.Object
		o, r.err = s.complete(ctx)
		r.there.ETag, r.inParts = o.ETag, true
	}
	return r
}

var errNotSent = errors.New("its parts are not sent yet")

// putSmall reads a file, and publishes it by one request.
func (c *Carrier) putSmall(ctx context.Context, change Change) (etag string, err error) {
	h, err := c.folder.Hold(change.Path, change.Print)
	if err != nil {
		return "", err
	}
	b := make([]byte, change.Print.Size)
	if err = c.folder.Sync(change.Path); err == nil && len(b) > 0 {
		_, err = h.ReadAt(b, 0)
	}
	whole := h.Whole()
	if err = errors.Join(err, h.Close()); err == nil && !whole {
		err = folder.ErrWriting
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", change.Path, err)
	}
	return put(ctx, c.Store, c.key(change.Path), b)
}

// put stores an object by one request.
func put(ctx context.Context, store objstore.Uploader, key string, b []byte) (etag string, err error) {
	u, err := store.Upload(ctx, key, int64(len(b)), max(int64(len(b)), 1))
	if err == nil && len(b) > 0 {
		err = u.Part(ctx, 0, b)
	}
	if err != nil {
		return "", err
	}
	o, err := u.Complete(ctx)
	return o.ETag, err
}

// keepLocal removes the oldest complete checkpoints here, if more than KeepLocal are complete.
func (c *Carrier) keepLocal() {
	complete := slices.DeleteFunc(c.q.Checkpoints(), func(k Checkpoint) bool { return k.Lacks != "" })
	for _, k := range complete[:max(0, len(complete)-cmp.Or(c.KeepLocal, len(complete)))] {
		if k.besides(complete[len(complete)-1]) {
			continue
		}
		if err := c.removeLocal(k.Path); err != nil {
			c.Log.Warn("a complete checkpoint stays here", "folder", k.Path, "cause", err)
			continue
		}
		c.q.Release(k.Path)
		c.looks.Add(1) // news on their way may say that its files are here: they would be published, and withdrawn
		pause.Poke(c.links.look)
		c.stats.Local++
		c.Log.Info("removed here; the bucket has it", "folder", k.Path, "files", k.Files)
	}
}

// removeLocal takes away a folder that the bucket has.
func (c *Carrier) removeLocal(dir string) error {
	var began unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &began) // what changes from now on has no earlier ctime
	if err := c.published(dir); err != nil {
		return err
	}
	// The journal forgets it first, and then it goes at once: Delete must not take its files for removed one by one.
	files := slices.DeleteFunc(slices.Collect(maps.Keys(c.q.files)), func(p string) bool {
		return !under(p, dir) || c.q.files[p].there == nil || c.q.files[p].leaving()
	})
	var err error
	for i := 0; i < len(files) && err == nil; i++ {
		err = c.journal.write(entry{Path: files[i], Removed: true}, i == len(files)-1)
		if err == nil && c.Delete && !there(c.folder.At(files[i])) {
			err = errors.New("some of it has just gone")
		}
	}
	bin := path.Join(folder.Home, fmt.Sprint(removing, strconv.FormatInt(began.Nano(), 36), "-", time.Now().UnixNano()))
	if err == nil {
		err = os.Rename(c.folder.At(dir), c.folder.At(bin))
	}
	if err == nil {
		err = c.discard(bin, dir)
	}
	for i := 0; i < len(files) && err != nil; i++ {
		c.note(entry{Path: files[i], Object: c.q.files[files[i]].there})
	}
	return err
}

// published returns an error if the bucket does not have all of a folder, also what no news tell of yet.
func (c *Carrier) published(dir string) error {
	return filepath.WalkDir(c.folder.At(dir), func(p string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		p = strings.TrimPrefix(p, c.folder.At(""))
		f := c.q.files[p]
		if f == nil || f.state != whole || f.turn != 0 {
			return errors.New("the bucket lacks " + p)
		}
		if err := c.folder.Unchanged(p, f.print); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		return nil
	})
}

// discard removes what removeLocal has taken away. If somebody has written it since, or can, that is an error. Such a
// folder has its place back, also if a writer comes late; or it is kept, if that is taken, or dir is "" after a crash.
func (c *Carrier) discard(bin, dir string) error {
	stamp := strings.Split(path.Base(bin), "-")
	began, _ := strconv.ParseInt(stamp[1], 36, 64)
	var all []string
	err := filepath.WalkDir(c.folder.At(bin), func(p string, e fs.DirEntry, err error) error {
		if all = append(all, p); err != nil || e.IsDir() && (len(all) == 1 || dir == "") { // ours is the change
			return err
		}
		var st unix.Stat_t
		if err = unix.Lstat(p, &st); err == nil && !e.IsDir() {
			err = c.folder.Unchanged(strings.TrimPrefix(p, c.folder.At("")), folder.Print{})
		}
		if st.Ctim.Nsec == 0 {
			st.Ctim.Sec++ // a file system that keeps whole seconds
		}
		if (err == nil || errors.Is(err, folder.ErrChanged)) && st.Ctim.Nano() < began {
			return nil // nobody has written it, or moved it here, and nobody can write it
		}
		return cmp.Or(err, folder.ErrChanged)
	})
	putBack := func() error {
		kept := path.Join(folder.Home, "kept-"+strings.Join(stamp[1:], "-"))
		to := func(p string) error { return os.Rename(c.folder.At(bin), c.folder.At(p)) }
		if to(dir) == nil || to(kept) != nil {
			return err
		}
		c.Log.Error("a folder was written, or created again, while it was being removed here; its old files are kept",
			"folder", dir, "at", filepath.Join(c.Dir, kept))
		return nil
	}
	if err != nil {
		return putBack()
	}
	c.running.Go(func() {
		for _, p := range slices.Backward(all) {
			if err := os.Remove(p); err != nil && !errors.Is(err, unix.ENOTEMPTY) {
				c.Log.Error("cannot remove what the bucket has", "cause", err)
				return
			}
		}
		_ = putBack()
		// Other names of the same files (cp -al) have changed with that, and were kept for it.
		time.AfterFunc(time.Second, func() { pause.Poke(c.again) })
	})
	return nil
}

// removing begins the names in folder.Home of folders that are being removed; the time follows at which that began.
const removing = "removing-"

// partSize is max(8 MiB, size/10,000), in whole MiB.
func partSize(size int64) int64 {
	const mib = 1 << 20
	return max(leastPart, ((size+9_999)/10_000+mib-1)/mib*mib)
}
