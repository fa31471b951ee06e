package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/prefetch/run"
)

// HostConfig says which cache directory a daemon owns, and how it serves it.
type HostConfig struct {
	cachedir.Options
	// Audit configures the log of opens; without a path there is none.
	Audit audit.Options
	// Searcher is a command line that calls ServeSearch with its standard input and output. Without one none is found.
	Searcher []string
	Cluster  ClusterConfig
	// Coder has a shorter form of some files for the cache's disk; nil: none.
	Coder Coder
	// Held names the lists of versions that mounts need whose datasets are still to be opened; nil: none.
	Held func() []string
	// Log is how the process logs; it is compared alone.
	Log struct {
		Level string `flag:"log-level"`
	}
}

// Host is a cache directory with its open datasets, and the runner of their streams. Safe for concurrent use.
type Host struct {
	*cachedir.Dir
	cfg    HostConfig
	log    *slog.Logger
	audit  *audit.Log // nil: none
	errs   errorRing
	runner *run.Runner
	node   *node // nil: in no cluster

	changed    atomic.Pointer[time.Time] // the last call of MarkStale
	background sync.WaitGroup
	stop       context.CancelFunc

	mu     sync.Mutex
	closed bool
	open   map[[16]byte]*Engine
}

// OpenHost locks and opens the cache directory. Its errors name the thing, the cause and the remedy.
func OpenHost(cfg HostConfig) (_ *Host, err error) {
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	h := &Host{cfg: cfg, open: map[[16]byte]*Engine{}}
	h.errs.next = cfg.Logger.Handler()
	h.log = slog.New(&h.errs)
	h.cfg.Secret = nil // not needed any more; rekeying may replace it
	o := cfg.Options
	o.Logger = h.log
	h.Dir, err = cachedir.Open(o)
	if err == nil || errors.Is(err, cachedir.ErrEncryption) {
		err = errors.Join(err, h.openAudit(err))
	}
	if err != nil {
		return nil, errors.Join(err, h.Close())
	}
	h.runner = run.New(h.Cache)
	ctx, stop := context.WithCancel(context.Background())
	h.stop = stop
	h.background.Go(func() { h.runner.Run(ctx) })
	if err := h.join(); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return h, nil
}

// Datasets returns the datasets in the cache directory, by source, with their users.
func (h *Host) Datasets() ([]cachedir.Info, error) {
	infos, err := h.Dir.Datasets()
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range infos {
		if e := h.open[infos[i].ID]; e != nil && e.cur.Load() != nil {
			v := e.cur.Load()
			infos[i].Users, infos[i].DiskBytes = e.users, v.volume.Stats().DiskUsed
			infos[i].Kept, infos[i].Extents = v.volume.Kept()
		}
	}
	return infos, err
}

// Refresh refreshes the open datasets one after another, by do.
func (h *Host) Refresh(do func(e *Engine) error) error {
	for _, e := range h.engines() {
		if e, ok := h.Use(e.dataset); ok {
			if err := errors.Join(do(e), e.Close()); err != nil {
				return err
			}
		}
	}
	return nil
}

// Use returns the dataset if it is open here and stays so, with another user, who closes it.
func (h *Host) Use(id [16]byte) (e *Engine, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if e = h.open[id]; e == nil || e.cur.Load() == nil || e.failed.Load() || e.users == 0 {
		return nil, false
	}
	e.users++
	return e, true
}

// engines returns the open datasets, which may be closed at any moment.
func (h *Host) engines() (list []*Engine) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range h.open {
		if e.cur.Load() != nil {
			list = append(list, e)
		}
	}
	return list
}

// users returns the number of mounts and feeds.
func (h *Host) users() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range h.open {
		n += e.users
	}
	return n
}

// Fetched counts the extents whose fetch was started.
func (h *Host) Fetched() int64 {
	c := h.Cache.Stats()
	return c.Prefetched + c.Misses
}

// Remove deletes a dataset from the cache directory. It must not be open; who opens it now waits.
func (h *Host) Remove(id [16]byte) error {
	h.mu.Lock()
	for e := h.open[id]; e != nil; e = h.open[id] {
		users := e.users
		h.mu.Unlock()
		if users > 0 {
			return fmt.Errorf("%s is open (unmount it first)", e.source)
		}
		<-e.gone // it is on its way out, or being removed
		h.mu.Lock()
	}
	nobody := &Engine{lifetime: lifetime{gone: make(chan struct{})}} // without users, as one on its way out
	h.open[id] = nobody
	h.mu.Unlock()
	err := h.Dir.Remove(id)
	h.mu.Lock()
	delete(h.open, id)
	close(nobody.gone)
	keep := h.versions()
	h.mu.Unlock()
	if err == nil {
		_, err = h.Catalog.GC(keep...)
	}
	return err
}

// versions returns the versions of manifests and layouts that are open, or are to be. h.mu is held.
func (h *Host) versions() (versions []string) {
	if h.cfg.Held != nil {
		versions = h.cfg.Held()
	}
	for _, e := range h.open {
		versions = append(versions, e.openVersions()...)
	}
	return versions
}

// SetQuota limits a dataset's bytes on disk; 0 means no limit but the cache's. An open dataset over it drops segments.
func (h *Host) SetQuota(id [16]byte, n int64) error {
	if err := h.Catalog.SetQuota(id, n); err != nil {
		return err
	}
	h.mu.Lock()
	e := h.open[id]
	h.mu.Unlock()
	if e != nil {
		e.setQuota(n)
	}
	return nil
}

// ErrOther is wrapped by errors about settings that a further user asks for and that are not in force.
var ErrOther = errors.New("another value is in force")

// Accepts compares what another process that shares the host asks for with what is in force: its key, and what it gave
// explicitly of the settings of the whole process, which are the fields of HostConfig with the tag flag.
func (h *Host) Accepts(o HostConfig, given func(flag string) bool) error {
	if err := h.Dir.Accepts(o.Secret); err != nil {
		return err
	}
	return h.sameFields(reflect.ValueOf(h.cfg), reflect.ValueOf(o), func(flag string) bool {
		return given(flag) || flag == "cluster" && o.Cluster.URL != "" || flag == "audit-log" && o.Audit.Path != ""
	})
}

func (h *Host) sameFields(in, asked reflect.Value, given func(flag string) bool) error {
	for i := range in.NumField() {
		field, flag := in.Type().Field(i), in.Type().Field(i).Tag.Get("flag")
		switch {
		case flag == "" && field.Type.Kind() == reflect.Struct && field.IsExported():
			if err := h.sameFields(in.Field(i), asked.Field(i), given); err != nil {
				return err
			}
		case flag != "" && given(flag) && !in.Field(i).Equal(asked.Field(i)):
			return fmt.Errorf("--%s %s: %w: the daemon of %s has %s until it ends (leave --%s out, or end it first: "+
				"shoal stop %s --all)",
				flag, shown(asked.Field(i)), ErrOther, h.Path(), shown(in.Field(i)), flag, h.Path())
		}
	}
	return nil
}

func shown(v reflect.Value) string {
	switch {
	case v.Kind() == reflect.Int64:
		return humanize.IBytes(uint64(v.Int()))
	case v.Kind() == reflect.String && v.String() == "":
		return "none"
	}
	return fmt.Sprint(v)
}

// Limits returns the bytes of disk and of memory in force.
func (h *Host) Limits() (disk, memory int64) { return h.cfg.Size, h.cfg.Memory }

// Audit returns the log of opens; if there is none it is nil, which accepts events, too.
func (h *Host) Audit() *audit.Log { return h.audit }

// openAudit opens the log. refused is the reason for not opening the directory, if any: it is logged.
func (h *Host) openAudit(refused error) error {
	if h.cfg.Audit.Path == "" {
		return nil
	}
	o := h.cfg.Audit
	o.Logger = h.log
	log, err := audit.Open(o)
	if err != nil {
		return err
	}
	h.audit = log.With(audit.Event{CacheDir: h.cfg.Path})
	e := audit.Event{Event: "cache_open", Peer: audit.Self()}
	if refused != nil {
		e.Outcome, e.Cause = "refused", refused.Error()
	} else if h.Key != nil {
		e.KeyID = h.Key.SecretID()
	}
	h.audit.Write(e)
	return nil
}

// Close releases the cache directory for the next owner. The datasets must have been closed.
func (h *Host) Close() (err error) {
	h.mu.Lock()
	h.closed = true
	open := len(h.open)
	h.mu.Unlock()
	if open > 0 {
		return fmt.Errorf("engine: %d datasets are still open", open)
	}
	h.node.leave()
	if h.stop != nil {
		h.stop()
		h.background.Wait()
	}
	if h.Dir != nil {
		err = h.Dir.Close()
		h.audit.Write(audit.Event{Event: "cache_close"})
	}
	return errors.Join(err, h.audit.Close())
}
