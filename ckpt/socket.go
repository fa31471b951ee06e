package ckpt

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/internal/pause"
)

// What the daemon's socket, folder.Socket, speaks is HTTP:
//
//	GET /status            Status
//	GET /wait?path=P       Wait: P is relative to the folder. It answers within a second or so; look=1 looks at the
//	                       files first, which counts what was closed a moment ago; copies=2: one at the neighbour will do
//
// Errors come as {"error": "…"}.

// Status is what a daemon tells of itself.
type Status struct {
	V           int           `json:"v"` // 1
	Dir         string        `json:"dir"`
	Dest        string        `json:"dest"`
	PID         int           `json:"pid"`
	Since       time.Time     `json:"since"`
	Behind      Behind        `json:"behind"`
	Trouble     string        `json:"trouble,omitempty"` // why the next change could not be made so far
	Here        folder.Counts `json:"here"`              // files that are not published, by state
	Stats       Stats         `json:"stats"`
	Checkpoints []Checkpoint  `json:"checkpoints"` // oldest first
}

// Wait says whether the bucket has all that is here at or below a path.
type Wait struct {
	Whole bool   `json:"whole"`
	Lacks string `json:"lacks,omitempty"` // a file that the bucket lacks
	Why   string `json:"why,omitempty"`
}

// listen opens the socket. Only who may reach the folder reaches it.
func (c *Carrier) listen() (l net.Listener, err error) {
	folder.MakeHome(filepath.Join(c.Dir, folder.Home)) // somebody may have removed it
	err = folder.AtSocket(c.Dir, func(address string) error {
		if err := os.Remove(address); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if l, err = net.Listen("unix", address); err == nil {
			l.(*net.UnixListener).SetUnlinkOnClose(false) // the short path is not valid any more
			err = os.Chmod(address, 0o666)
		}
		return err
	})
	return l, err
}

// serve answers at the socket until ctx ends.
func (c *Carrier) serve(ctx context.Context, l net.Listener) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, r *http.Request) {
		var s Status
		if !c.in(ctx, func() { s = c.status() }) {
			panic(http.ErrAbortHandler) // the daemon ends
		}
		reply(w, http.StatusOK, s)
	})
	mux.HandleFunc("GET /wait", func(w http.ResponseWriter, r *http.Request) {
		got, err := c.wait(ctx, r.FormValue("path"), r.FormValue("look") != "", r.FormValue("copies") == "2")
		if err != nil {
			reply(w, http.StatusNotFound, map[string]string{"error": err.Error()})
			return
		}
		reply(w, http.StatusOK, got)
	})
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	defer func() { _ = s.Close() }()
	c.running.Go(func() { _ = s.Serve(l) })
	for pause.For(ctx, time.Second) == nil {
		if there(filepath.Join(c.Dir, folder.Home, folder.Socket)) {
			continue
		}
		if l, err := c.listen(); err == nil {
			c.Log.Warn("the daemon's socket had been removed; it is there again", "folder",
				filepath.Join(c.Dir, folder.Home))
			c.running.Go(func() { _ = s.Serve(l) })
		}
	}
}

func reply(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(v)
}

// in has Run do f, and waits for it.
func (c *Carrier) in(ctx context.Context, f func()) bool {
	done := make(chan struct{})
	ok := c.post(ctx, func() { f(); close(done) })
	if ok {
		<-done
	}
	return ok
}

func (c *Carrier) status() Status {
	checkpoints := append(c.q.Checkpoints(), c.links.made...)
	slices.SortFunc(checkpoints, older)
	s := Status{
		V: 1, Dir: c.Dir, Dest: c.Dest, PID: os.Getpid(), Since: c.lock.mine.Since.Local(), Behind: c.q.Behind(),
		Here: c.folder.Counts(), Stats: c.stats, Checkpoints: checkpoints,
	}
	s.Here.Skipped = max(0, s.Here.Skipped-len(c.links.made))
	if c.trouble.err != nil {
		s.Trouble = c.trouble.err.Error()
	}
	return s
}

func (c *Carrier) wait(ctx context.Context, p string, look, copies bool) (got Wait, err error) {
	if copies && c.Copies < 2 {
		return got, errors.New("no copies are made (start shoal ckpt with --copies 2)")
	}
	p = filepath.Clean(p)
	end := time.After(time.Second)
	for {
		var changed chan struct{}
		ok := c.in(ctx, func() {
			if look {
				// At all of it: what was closed before a last name may lie elsewhere, and its news be on their way.
				if err = c.hearAll(); err != nil {
					return
				}
			}
			changed = c.changed
			var known bool
			if got.Lacks, got.Why, known = c.q.Lacks(p, copies && c.hosts.vouches()); !known {
				err = c.unknown(p)
			}
			if got.Lacks != "" && copies && c.hosts.copies.why != "" {
				got.Why += "; no copy: " + c.hosts.copies.why
			}
		})
		got.Whole, look = got.Lacks == "", false
		switch {
		case !ok:
			panic(http.ErrAbortHandler) // the daemon ends
		case err != nil || got.Whole:
			return got, err
		}
		select {
		case <-changed:
		case <-end:
			return got, nil
		case <-ctx.Done():
		}
	}
}

// unknown is why there is nothing to publish at p.
func (c *Carrier) unknown(p string) error {
	switch fi, err := os.Lstat(filepath.Join(c.Dir, p)); {
	case err != nil:
		return fmt.Errorf("%s is not in %s", p, c.Dir)
	case folder.Temporary(p):
		return fmt.Errorf("%s is a temporary name: it is published when it is renamed", p)
	case fi.IsDir():
		return fmt.Errorf("there is no file in %s that can be published", p)
	case !fi.Mode().IsRegular():
		return fmt.Errorf("%s is not a regular file, and is not published", p)
	}
	return fmt.Errorf("%s is not published: it cannot be the key of an object, or belongs to another user (the "+
		"daemon's log says which)", p)
}

// Client asks the daemon that carries a folder.
type Client struct {
	Dir  string // the folder
	http http.Client
}

// Find returns a client of the daemon that carries path, and path as the daemon knows it.
func Find(path string) (c *Client, rel string, err error) {
	if path, err = filepath.Abs(path); err != nil {
		return nil, "", err
	}
	path = filepath.Join(objstore.RealPath(filepath.Dir(path)), filepath.Base(path))
	for dir := path; ; dir = filepath.Dir(dir) {
		sockErr := folder.CheckSocket(dir)
		if sockErr == nil {
			rel, err = filepath.Rel(dir, path)
			return newClient(dir), rel, err
		} else if errors.Is(sockErr, fs.ErrPermission) {
			err = cmp.Or(err, fmt.Errorf(
				"cannot see whether a shoal ckpt carries it: %w (run as a user who may enter the folder)", sockErr))
		}
		if dir == filepath.Dir(dir) {
			return nil, "", cmp.Or(err, fmt.Errorf(
				"%s: no shoal ckpt carries it (start one: shoal ckpt DIR s3://BUCKET/PREFIX)", path))
		}
	}
}

func newClient(dir string) *Client {
	dial := func(ctx context.Context, _, _ string) (conn net.Conn, err error) {
		err = folder.AtSocket(dir, func(address string) error {
			var d net.Dialer
			conn, err = d.DialContext(ctx, "unix", address)
			return err
		})
		return conn, err
	}
	return &Client{Dir: dir, http: http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}
}

// Status asks for the daemon's status.
func (c *Client) Status(ctx context.Context) (s Status, err error) {
	err = c.get(ctx, "/status", &s)
	return s, err
}

// Wait asks whether the bucket, or with 2 copies the bucket or a neighbour, has what is at or below rel.
func (c *Client) Wait(ctx context.Context, rel string, copies int, look bool) (w Wait, err error) {
	q := url.Values{"path": {rel}, "copies": {strconv.Itoa(copies)}}
	if look {
		q.Set("look", "1")
	}
	err = c.get(ctx, "/wait?"+q.Encode(), &w)
	return w, err
}

func (c *Client) get(ctx context.Context, what string, into any) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://shoal"+what, nil)
	if err != nil {
		return err
	}
	answer, err := c.http.Do(r)
	if err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("cannot reach the shoal ckpt of %s: %w (run as its user)", c.Dir, err)
		}
		return fmt.Errorf("%s: no shoal ckpt carries it (its last one has ended: start it again)", c.Dir)
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(io.LimitReader(answer.Body, 64<<20))
	if err != nil {
		return fmt.Errorf("the daemon of %s: %w", c.Dir, err)
	}
	if answer.StatusCode != http.StatusOK {
		var e struct{ Error string }
		if json.Unmarshal(b, &e) != nil || e.Error == "" {
			e.Error = answer.Status
		}
		return errors.New(e.Error)
	}
	return json.Unmarshal(b, into)
}
