package ckpt

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	v3 "go.etcd.io/etcd/client/v3"

	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/internal/pause"
)

// copies is what a host knows of its neighbour. It belongs to the goroutine of Run.
type copies struct {
	to   string // the neighbour's HOST:PORT; "": none, or etcd does not have this host's choice yet
	open bool   // it has the copies that bear the name
	busy bool   // it is being asked
	// names the last POST: the neighbour does nothing that it was asked for before, however late it comes
	after string
	since time.Time // it has not answered
	void  bool      // what it has is of no use: another name is wanted, and another neighbour if there is one
	why   string    // the copies are not complete
	http  http.Client
	here  net.Listener
	at    string // of here, for others
	shelf *shelf
}

// leaseSeconds after it last renewed its lease in etcd a host is dead. A neighbour may be silent for copyPatience.
const leaseSeconds, copyPatience = 10, 20 * time.Second

// errVoid: the neighbour has no such copies. errRoom: it has no room.
var errVoid, errRoom = errors.New("it has lost the copies"), errors.New("less than a tenth of its disk is free")

// openCopies makes this host one that has a neighbour, and is one.
func (c *Carrier) openCopies() (err error) {
	o, known := c.hosts, c.journal.known
	o.copies = &copies{shelf: newShelf(c)}
	o.copies.http.Transport = &http.Transport{TLSClientConfig: c.TLS.Clone(), IdleConnTimeout: time.Minute}
	o.host.Neighbour = known.Neighbour
	o.self = string(encode(o.host))
	for p, has := range known.Copies {
		c.q.Copy(p, has)
	}
	o.copies.here, o.copies.at, err = c.Cluster.Listen(c.Advertise, "0")
	return err
}

func (c *Carrier) serveCopies(ctx context.Context) {
	k := c.hosts.copies
	s := &http.Server{Handler: k.shelf, ReadHeaderTimeout: copyPatience, IdleTimeout: 2 * time.Minute}
	defer context.AfterFunc(ctx, func() { _ = s.Close() })()
	if c.TLS != nil {
		k.here = tls.NewListener(k.here, c.TLS)
	}
	if err := s.Serve(k.here); ctx.Err() == nil {
		c.Log.Error("copies of other hosts are not taken any more", "cause", err)
	}
}

// live says in etcd that this host lives, for as long as its lease is renewed. What the neighbour has is perhaps in the
// bucket by now: another lease may have ended.
func (c *Carrier) live(ctx context.Context, client *v3.Client, end context.CancelCauseFunc) (v3.LeaseID, error) {
	o := c.hosts
	asking, cancel := context.WithTimeout(ctx, hostsPatience)
	defer cancel()
	lease, err := client.Grant(asking, leaseSeconds)
	if err != nil {
		return v3.NoLease, err
	}
	beats, err := client.KeepAlive(ctx, lease.ID)
	if err != nil {
		return v3.NoLease, err
	}
	c.running.Go(func() {
		for range beats {
		}
		end(cluster.ErrLost)
	})
	c.in(ctx, func() {
		for f := range c.q.copies {
			c.note(entry{Path: f.path, Object: &Published{}})
			c.q.arrived(f, Published{})
		}
	})
	_, err = transact(ctx, client,
		deed{then: []v3.Op{v3.OpPut(o.root+"alive/"+o.id, o.copies.at, v3.WithLease(lease.ID))}})
	return lease.ID, err
}

// meetNeighbour takes what etcd says of the neighbour.
func (c *Carrier) meetNeighbour(b board) {
	o, k := c.hosts, c.hosts.copies
	if k == nil {
		return
	}
	if b.self == o.self && c.journal.known.Neighbour != o.host.Neighbour {
		if err := c.journal.write(entry{Neighbour: &o.host.Neighbour}, true); err != nil {
			c.lackCopies(err.Error())
			return
		}
		o.forgetCopies()
	}
	o.choose(b.alive)
	if k.to = ""; b.self == o.self {
		k.to = b.alive[o.host.At].value
	}
	if o.host.At == "" {
		c.lackCopies("there is no other host of " + c.Cluster.String() + " with --copies 2")
	}
	c.tell()
}

// lackCopies notes why copies are not complete, and logs it.
func (c *Carrier) lackCopies(why string) {
	if k := c.hosts.copies; why != k.why {
		if k.why = why; why != "" {
			c.Log.Warn("closed files get no second copy", "cause", why)
		}
	}
}

// keepCopies has the neighbour keep what is closed and not in the bucket, one file after another.
func (c *Carrier) keepCopies(ctx context.Context) {
	k, name := c.hosts.copies, c.journal.known.Copy
	if k == nil || k.busy {
		return
	}
	change, do := c.nextCopy(ctx)
	if do == nil {
		return
	}
	k.busy = true
	c.running.Go(func() {
		has, failed := do()
		c.post(ctx, func() {
			err := failed
			if has != nil && c.journal.known.Copy == name {
				c.q.Copy(change.Path, *has)
				err = cmp.Or(err, c.journal.write(entry{Path: change.Path, Copy: has}, false))
			}
			k.asked(err)
			if err == nil || isWriting(err) {
				c.lackCopies("")
			} else {
				c.lackCopies(k.to + ": " + err.Error())
			}
			c.tell()
		})
		if failed != nil {
			_ = pause.For(ctx, time.Second/2)
		}
		c.post(ctx, func() { k.busy = false })
	})
}

func (k *copies) asked(err error) {
	if err == nil || isWriting(err) || errors.Is(err, errRoom) {
		k.since = time.Time{}
	} else if k.open = false; k.since.IsZero() { // it is asked anew, or may yet do what it was asked for
		k.since = time.Now()
	}
	if errors.Is(err, errVoid) || !k.since.IsZero() && time.Since(k.since) > leaseSeconds*time.Second {
		k.void, k.since = true, time.Time{}
	}
}

// nextCopy returns what is to be done at the neighbour now. That returns what it has of the file then; nil: no change.
func (c *Carrier) nextCopy(ctx context.Context) (change Change, do func() (*copyOf, error)) {
	o, k := c.hosts, c.hosts.copies
	if k.void || k.to == "" {
		return change, nil
	}
	u := url.URL{Scheme: "http", Host: k.to, Path: "/copies/" + o.host.At + "/" + o.id + "/" + o.host.Copy +
		"/", RawQuery: "after=" + k.after}
	if c.TLS != nil {
		u.Scheme = "https"
	}
	ask := func(method string) error { return c.ask(ctx, method, u, nil) }
	if !k.open {
		k.after = rand.Text()
		if u.RawQuery = "after=" + k.after; len(c.q.copies) == 0 {
			u.RawQuery += "&new=1"
		}
		at := o.host.Neighbour
		return change, func() (*copyOf, error) {
			err := ask(http.MethodPost)
			c.in(ctx, func() { k.open = err == nil && at == o.host.Neighbour })
			return nil, err
		}
	}
	change, ok := c.q.NextCopy()
	u.Path += change.Path
	switch {
	case !ok:
		return change, nil
	case !change.Put:
		return change, func() (*copyOf, error) {
			if err := ask(http.MethodDelete); err != nil {
				return nil, err
			}
			return &copyOf{}, nil
		}
	}
	has := copyOf{Has: c.q.files[change.Path].copy.Has, Sent: &change.Print}
	c.q.Copy(change.Path, has)
	return change, func() (*copyOf, error) {
		err := c.copy(ctx, change, has, u)
		switch {
		case err == nil:
			return &copyOf{Has: &change.Print}, nil
		case !errors.Is(err, errRoom):
		case has.Has != nil:
			err = errVoid // it must not hold up what cannot replace it
		case ask(http.MethodDelete) == nil:
			return &copyOf{}, err
		}
		return nil, err
	}
}

func (c *Carrier) copy(ctx context.Context, change Change, has copyOf, u url.URL) error {
	err := cmp.Or(c.journal.write(entry{Path: change.Path, Copy: &has}, true), c.folder.Sync(change.Path))
	if err != nil {
		return err
	}
	h, err := c.folder.Hold(change.Path, change.Print)
	if err != nil {
		return err
	}
	defer func() { _ = h.Close() }()
	u.RawQuery += fmt.Sprint("&size=", change.Print.Size)
	return c.ask(ctx, http.MethodPut, u, &guarded{io.NewSectionReader(h, 0, change.Print.Size), func() error {
		if !h.Whole() {
			return folder.ErrWriting
		}
		return nil
	}})
}

// guarded asks before what was read counts.
type guarded struct {
	io.Reader
	ask func() error
}

func (g *guarded) Read(p []byte) (n int, err error) {
	n, err = g.Reader.Read(p)
	return n, cmp.Or(g.ask(), err)
}

// ask has the neighbour do something. A body has no length on the way: so the neighbour sees whether it is whole.
func (c *Carrier) ask(ctx context.Context, method string, u url.URL, body io.Reader) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	timer := time.AfterFunc(copyPatience, cancel)
	defer timer.Stop()
	if body != nil {
		body = &guarded{body, func() error { timer.Reset(copyPatience); return nil }}
	}
	r, err := http.NewRequestWithContext(ctx, method, u.String(), body)
	if err != nil {
		return err
	}
	answer, err := c.hosts.copies.http.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	text, _ := io.ReadAll(io.LimitReader(answer.Body, 1<<10))
	switch answer.StatusCode {
	case http.StatusOK:
		return nil
	case http.StatusNotFound:
		return errVoid
	case http.StatusInsufficientStorage:
		return errRoom
	}
	return errors.New(cmp.Or(strings.TrimSpace(string(text)), answer.Status))
}
