package ckpt

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"time"

	v3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/internal/durable"
	"github.com/shoalfs/shoal/internal/pause"
)

// shelf is what other hosts have copied here, DIR/ID/NAME by host and name. It serves
//
//	POST   /copies/AT/ID/NAME/?after=A[&new=1]      answers whether the copies are here; with new they begin
//	PUT    /copies/AT/ID/NAME/PATH?after=A&size=N   a file, whole
//	DELETE /copies/AT/ID/NAME/PATH?after=A          a file that is not needed any more, or is not there
//
// AT is this host's ID: an address may have been another one's. Each POST chooses A; what bears an earlier one is
// refused. 404: there are no such copies; 507: there is no room.
type shelf struct {
	*http.ServeMux
	c   *Carrier
	dir string

	all sync.Map // *shelved by host
}

// shelved are the copies of a host.
type shelved struct {
	id string

	mu     sync.Mutex // of requests, and of what begins
	name   string
	after  string // the last POST's: what the host asked for before may still come
	cancel context.CancelFunc
	ended  chan struct{} // closed when nobody publishes them
}

// stead is on whose behalf a carrier publishes: a host, its copies and its registration.
type stead struct{ id, name, self string }

var journalID = regexp.MustCompile(`^[A-Z2-7]{26}$`)

// spare is the part of a disk that copies leave free, in percent.
var spare uint64 = 10

func newShelf(c *Carrier) *shelf {
	s := &shelf{ServeMux: http.NewServeMux(), c: c,
		dir: filepath.Join(cmp.Or(c.State, filepath.Join(c.Dir, folder.Home)), "copies")}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		c.Log.Error("no copies of other hosts are taken", "cause", err)
	}
	found, _ := fs.Glob(os.DirFS(s.dir), "*/*")
	for _, at := range found {
		s.of(path.Dir(at)).name = path.Base(at)
	}
	found, _ = fs.Glob(os.DirFS(s.dir), durable.TempPrefix+"*")
	for _, at := range found {
		_ = os.Remove(filepath.Join(s.dir, at))
	}
	s.HandleFunc("/copies/{at}/{id}/{name}/{path...}", func(w http.ResponseWriter, r *http.Request) {
		id, name, p := r.PathValue("id"), r.PathValue("name"), r.PathValue("path")
		err := fs.ErrNotExist
		if r.PathValue("at") == c.hosts.id && journalID.MatchString(id) && journalID.MatchString(name) &&
			(p == "" || fs.ValidPath(p) && !folder.Own(p)) {
			err = s.serve(s.of(id), name, p, w, r)
		}
		switch {
		case errors.Is(err, fs.ErrNotExist):
			http.NotFound(w, r)
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
			http.Error(w, err.Error(), http.StatusInsufficientStorage)
		case err != nil:
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	return s
}

// of returns a host's copies, which may not be there.
func (s *shelf) of(id string) *shelved {
	k := &shelved{id: id, cancel: func() {}, ended: make(chan struct{})}
	close(k.ended)
	was, _ := s.all.LoadOrStore(id, k)
	return was.(*shelved)
}

func (k *copies) kept() (all []*shelved) {
	if k != nil {
		k.shelf.all.Range(func(_, k any) bool { all = append(all, k.(*shelved)); return true })
	}
	return all
}

// stop has nobody publish copies any more, soon.
func (s *shelf) stop() {
	for _, k := range s.c.hosts.copies.kept() {
		k.mu.Lock()
		k.cancel()
		k.mu.Unlock()
	}
}

func (s *shelf) at(k *shelved) string { return filepath.Join(s.dir, k.id, k.name) }

// serve does what a host asks for. It lives, then: nobody publishes its copies any more when it has its answer.
func (s *shelf) serve(k *shelved, name, p string, w http.ResponseWriter, r *http.Request) error {
	incoming, err := "", error(nil)
	if r.Method == http.MethodPut {
		if incoming, err = s.receive(w, r); err != nil {
			return err
		}
		defer func() { _ = os.Remove(incoming) }() // unless it has moved
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.cancel()
	<-k.ended
	if r.Method == http.MethodPost && r.FormValue("new") != "" && k.name != name {
		err = os.RemoveAll(filepath.Join(s.dir, k.id))
		k.name = name
		err = cmp.Or(err, os.MkdirAll(s.at(k), 0o700), durable.SyncDir(filepath.Dir(s.at(k))), durable.SyncDir(s.dir))
	}
	switch after := r.FormValue("after"); {
	case k.name != name:
		return cmp.Or(err, fs.ErrNotExist)
	case r.Method == http.MethodPost:
		k.after = after
		return err
	case k.after != after:
		return errors.New("it comes too late")
	}
	at := filepath.Join(s.at(k), filepath.FromSlash(p))
	if r.Method == http.MethodDelete {
		if err = os.Remove(at); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return cmp.Or(err, durable.SyncDir(filepath.Dir(at)))
	}
	if err = os.MkdirAll(filepath.Dir(at), 0o700); err == nil {
		err = os.Rename(incoming, at)
	}
	for dir := path.Dir(p); err == nil; dir = path.Dir(dir) {
		if err = durable.SyncDir(filepath.Join(s.at(k), dir)); dir == "." {
			break
		}
	}
	return err
}

// receive stores what comes, durably, in a file without a name for others.
func (s *shelf) receive(w http.ResponseWriter, r *http.Request) (name string, err error) {
	size, err := strconv.ParseUint(r.FormValue("size"), 10, 62)
	var disk unix.Statfs_t
	if err = cmp.Or(err, unix.Statfs(s.dir, &disk)); err == nil && disk.Bavail*uint64(disk.Bsize) < size+
		disk.Blocks*uint64(disk.Bsize)/100*spare {
		err = unix.ENOSPC
	}
	if err != nil {
		return "", err
	}
	f, err := os.CreateTemp(s.dir, durable.TempPrefix+"*")
	if err != nil {
		return "", err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	deadline := http.NewResponseController(w)
	body := &guarded{r.Body, func() error { return deadline.SetReadDeadline(time.Now().Add(copyPatience)) }}
	for err == nil { // synced as it comes: all at the end could take longer than the host waits for the answer
		_, err = io.CopyN(f, body, 64<<20)
		err = cmp.Or(f.Sync(), err)
	}
	_ = deadline.SetReadDeadline(time.Time{})
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return f.Name(), err
}

// tend publishes the copies of a host whose lease has ended, and removes those of no use. k was there before b.
func (c *Carrier) tend(ctx context.Context, client *v3.Client, lease v3.LeaseID, b board, k *shelved) (err error) {
	if !k.mu.TryLock() { // the host asks for something
		return nil
	}
	defer k.mu.Unlock()
	o, was := c.hosts, b.hosts[k.id].value
	_, lives := b.alive[k.id]
	_, mine := b.adopted[k.id]
	key, useless := o.root+"adopted/"+k.id, b.hosts[k.id].host().Copy != k.name
	select {
	case <-k.ended:
	default:
		if useless || lives {
			k.cancel()
		}
		return nil
	}
	if useless {
		k.name = ""
		err = os.RemoveAll(filepath.Join(o.copies.shelf.dir, k.id))
	} else if !lives {
		got, err := transact(ctx, client,
			deed{when: []v3.Cmp{isNot(o.root + "alive/" + k.id), v3.Compare(v3.Value(o.root+"hosts/"+k.id), "=", was)},
				then: []v3.Op{v3.OpPut(key, o.id, v3.WithLease(lease))}})
		if err == nil && got.Succeeded {
			o.copies.shelf.publish(ctx, k, stead{k.id, k.name, was})
		}
		return err
	}
	if mine {
		_, err = transact(ctx, client, deed{then: []v3.Op{v3.OpDelete(key)}})
	}
	return err
}

// publish publishes a host's copies, in the order of the host, and as the host (rule 17 of the package).
func (s *shelf) publish(ctx context.Context, k *shelved, of stead) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	k.cancel, k.ended = cancel, ended
	cfg := s.c.Config
	cfg.Dir, cfg.State, cfg.Delete, cfg.KeepLocal, cfg.Link, cfg.Copies, cfg.Looked, cfg.stead = s.at(k), "", false, 0,
		"", 0, nil, of
	cfg.Log = cfg.Log.With("for", of.id)
	s.c.running.Go(func() {
		defer close(ended)
		defer pause.Poke(s.c.hosts.wake)
		carrier, err := Open(ctx, cfg)
		if err == nil {
			cfg.Log.Warn("a host's lease has ended: its copies are published here", "host", of.self)
			err = errors.Join(carrier.Run(ctx, func() {}), carrier.endUploads(), carrier.Close())
		}
		if err != nil && ctx.Err() == nil {
			cfg.Log.Error("cannot publish the copies of a host; it is tried again", "cause", err)
		}
	})
}

// endUploads aborts what was under way, as nobody goes on with it if the host is back.
func (c *Carrier) endUploads() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), copyPatience/2)
	defer cancel()
	for p, b := range c.journal.uploads() {
		err = cmp.Or(err, c.endUpload(ctx, p, b))
	}
	return err
}
