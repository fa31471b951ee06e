package ckpt

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/ckpt/folder"
)

// send is a large file whose parts are being sent, before its turn comes. It is held until it is published. If it is
// given up, requests under way are waited for: a cancelled one could bring an upload back that was aborted after it.
type send struct {
	path   string
	turn   uint64
	work   context.Context // of requests: Run's
	cancel context.CancelCauseFunc
	ended  <-chan struct{} // by cancel
	done   chan struct{}   // all parts are stored, or err is set
	err    error
	held   *folder.Held
	upload objstore.Upload
}

// sendAhead begins to send the parts of the next large files, gives up those whose change does not wait any more, and
// aborts uploads that are of no use.
func (c *Carrier) sendAhead(ctx context.Context) {
	wanted := map[string]bool{}
	looked := 0
	for change := range c.q.Ahead {
		if looked++; looked > lookAhead {
			break
		}
		if !c.inParts(change) {
			continue
		}
		s := c.begin(ctx, change)
		wanted[change.Path] = s != nil && s.turn == change.Turn
		if len(wanted) == sendsAhead {
			break
		}
	}
	for p := range c.sends {
		switch busy := c.q.busy; {
		case wanted[p]:
		case busy == nil || busy.path != p:
			c.close(ctx, p)
		case busy.turn != c.sends[p].turn:
			c.sends[p].cancel(folder.ErrWriting) // if it is not complete yet
		}
	}
	for p, b := range c.journal.uploads() {
		f := c.q.files[p]
		if busy := c.q.busy; c.sends[p] == nil && !c.closing[p] && (busy == nil || busy.path != p) &&
			time.Now().After(c.abortAt) && (f == nil || f.turn == 0 || f.state != whole || f.print != b.Print) {
			c.apart(ctx, p, func() {
				if err := c.endUpload(ctx, p, b); err != nil && ctx.Err() == nil {
					c.Log.Error("cannot abort an upload that is no longer needed", "key", c.key(p), "cause", err)
					c.post(ctx, func() { c.abortAt = time.Now().Add(time.Minute) })
				}
			})
		}
	}
}

// apart does something about a file that nothing else may do meanwhile.
func (c *Carrier) apart(ctx context.Context, p string, f func()) {
	c.closing[p] = true
	c.running.Go(func() {
		f()
		c.post(ctx, func() { delete(c.closing, p) })
	})
}

// inParts reports whether a file must be sent before its turn comes.
func (c *Carrier) inParts(change Change) bool {
	return change.Put && change.Print.Size > smallFile && change.From == ""
}

// copiedInParts reports whether the bucket may need an upload to copy a file.
func copiedInParts(change Change) bool { return change.From != "" && change.Print.Size > copyMost }

var copyMost int64 = objstore.CopyMost // tests lower it

// ending reports whether the last send of a file is ending, or may yet appear in the store.
func (c *Carrier) ending(p string) bool {
	before, known := c.journal.uploads()[p]
	return c.closing[p] || known && before.ID == "" && time.Now().Before(c.abortAt)
}

// begin returns the send of a file, which it begins unless there is one; nil while the last one is ending.
func (c *Carrier) begin(ctx context.Context, change Change) *send {
	if s := c.sends[change.Path]; s != nil || c.ending(change.Path) {
		return s
	}
	s := &send{path: change.Path, turn: change.Turn, work: ctx, done: make(chan struct{})}
	ctx, s.cancel = context.WithCancelCause(ctx)
	s.ended = ctx.Done()
	c.sends[change.Path] = s
	c.running.Go(func() {
		defer close(s.done)
		s.err = c.send(ctx, s, change)
	})
	return s
}

// close ends a send. The parts stay in the store, for another try.
func (c *Carrier) close(ctx context.Context, p string) {
	s := c.sends[p]
	delete(c.sends, p)
	s.cancel(folder.ErrWriting)
	c.apart(ctx, p, func() {
		<-s.done
		if s.held != nil {
			_ = s.held.Close()
		}
	})
}

func (c *Carrier) send(ctx context.Context, s *send, change Change) (err error) {
	if s.held, err = c.folder.Hold(change.Path, change.Print); err != nil {
		return err
	}
	go func() {
		select {
		case <-s.held.Broken: // or closed, at the latest when Run ends
			s.cancel(fmt.Errorf("%s: %w", change.Path, folder.ErrWriting))
		case <-ctx.Done():
		}
	}()
	size, part := change.Print.Size, partSize(change.Print.Size)
	if before := c.journal.uploads()[change.Path]; before.Print.SameContent(change.Print) && before.Part == part &&
		before.ID != "" {
		up, stored, err := c.Store.Resume(ctx, c.key(change.Path), before.ID, size, part)
		// A store that does not tell the parts: the file is sent again.
		if k := objstore.KindOf(err); err != nil && k != objstore.KindNotFound && k != objstore.KindDenied &&
			k != objstore.KindInvalid {
			return err
		}
		if err == nil {
			s.upload = up
			c.post(ctx, func() { c.stats.Resumed += int64(stored) })
		}
	}
	if s.upload == nil {
		if err := c.newUpload(ctx, s, change, part); err != nil {
			return err
		}
	}
	if err = c.sendParts(ctx, s, size, part); err == nil {
		err = c.folder.Sync(change.Path)
	}
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err == nil && !s.held.Whole() {
		err = fmt.Errorf("%s: %w", change.Path, folder.ErrWriting)
	}
	return err
}

// announce writes down that an upload is about to begin, with those that others have under its key, so that ours is
// found after a crash; not if theirs are not told, which would be taken for ours. It aborts the one before.
func (c *Carrier) announce(ctx context.Context, change Change, part int64) (b begun, listed bool, err error) {
	if before, known := c.journal.uploads()[change.Path]; known {
		if err := c.endUpload(ctx, change.Path, before); err != nil {
			return b, false, err
		}
	}
	b = begun{Print: change.Print, Part: part}
	if b.Others, listed, err = c.uploads(ctx, c.key(change.Path)); err == nil && listed {
		err = c.journal.write(entry{Path: change.Path, Upload: &b}, true)
	}
	return b, listed, err
}

func (c *Carrier) newUpload(ctx context.Context, s *send, change Change, part int64) error {
	b, listed, err := c.announce(ctx, change, part)
	if err != nil {
		return err
	}
	key, before := c.key(change.Path), c.retries()
	if s.upload, err = c.Store.Upload(s.work, key, change.Print.Size, part); err != nil {
		return err
	}
	b.ID = s.upload.ID()
	if listed && c.retries() != before { // a try whose answer was lost may have begun one, too
		if err := c.abortAllBut(ctx, key, append(b.Others, b.ID)); err != nil {
			return err
		}
	}
	b.Others = nil
	return c.journal.write(entry{Path: change.Path, Upload: &b}, true)
}

// retries is how many requests were tried again so far.
func (c *Carrier) retries() int64 {
	if r, ok := c.Store.(*objstore.Retrier); ok {
		return r.Stats().Retries
	}
	return 0
}

// uploads returns the ids of a key's unfinished uploads. listed is false, with a warning, if they cannot be listed.
func (c *Carrier) uploads(ctx context.Context, key string) (ids []string, listed bool, err error) {
	all, err := c.Store.Uploads(ctx, key)
	if k := objstore.KindOf(err); k == objstore.KindInvalid || k == objstore.KindDenied {
		c.noList.Do(func() {
			c.Log.Warn("after a crash an upload may be left unfinished: the store does not list uploads", "cause", err,
				"remedy", "have a lifecycle rule of the bucket abort them")
		})
		return nil, false, nil
	}
	for _, u := range all {
		if u.Key == key {
			ids = append(ids, u.ID)
		}
	}
	return ids, true, err
}

func (c *Carrier) sendParts(ctx context.Context, s *send, size, part int64) error {
	g, sending := errgroup.WithContext(ctx) // which ends with the first error
	for n := range int((size + part - 1) / part) {
		length := min(part, size-int64(n)*part)
		room := min(length, partsBytes)
		if err := c.memory.Acquire(sending, room); err != nil {
			break
		}
		g.Go(func() error {
			defer c.memory.Release(room)
			b := buffer(length)
			defer buffers.Put(&b)
			if _, err := s.held.ReadAt(b, int64(n)*part); err != nil {
				return fmt.Errorf("read %s: %w", s.path, err)
			}
			return s.upload.Part(s.work, n, b)
		})
	}
	return cmp.Or(g.Wait(), ctx.Err())
}

var buffers sync.Pool // for parts

// buffer returns n bytes, which go back to buffers.
func buffer(n int64) []byte {
	if b, ok := buffers.Get().(*[]byte); ok && int64(cap(*b)) >= n {
		return (*b)[:n]
	}
	return make([]byte, n, max(n, leastPart))
}

// complete publishes the file, once its parts are stored.
func (s *send) complete(ctx context.Context) (objstore.Object, error) {
	select {
	case <-s.done:
	case <-s.ended: // others need not wait for the requests that are under way
		return objstore.Object{}, fmt.Errorf("%s: %w", s.path, folder.ErrWriting)
	}
	if s.err != nil {
		return objstore.Object{}, s.err
	}
	return s.upload.Complete(ctx)
}

// endUpload aborts an upload of this daemon, now or of an earlier process.
func (c *Carrier) endUpload(ctx context.Context, p string, b begun) (err error) {
	if b.ID == "" {
		err = c.abortAllBut(ctx, c.key(p), b.Others)
	} else {
		err = c.Store.AbortUpload(ctx, c.key(p), b.ID)
	}
	if err != nil {
		return err
	}
	return c.journal.write(entry{Path: p, Ended: true}, false)
}

// abortAllBut aborts the unfinished uploads of a key, but these.
func (c *Carrier) abortAllBut(ctx context.Context, key string, these []string) error {
	ids, _, err := c.uploads(ctx, key)
	for _, id := range ids {
		if err == nil && !slices.Contains(these, id) {
			err = c.Store.AbortUpload(ctx, key, id)
		}
	}
	return err
}
