package ckpt

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	v3 "go.etcd.io/etcd/client/v3"

	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/synced"
)

// team is hosts that share a destination.
type team struct {
	store  objstore.Layer
	src    objstore.Source
	server *etcd.Server
	at     cluster.Address
	client *v3.Client
	copies int
}

// member is a host, and its daemon if one runs.
type member struct {
	dir   string
	c     *Carrier
	log   synced.Buffer
	stop  context.CancelFunc
	ended chan error
}

func newTeam(t *testing.T) *team {
	t.Helper()
	if _, err := etcd.FindBinary(); err != nil {
		t.Skip(err)
	}
	s, err := etcd.Start(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	tm := &team{server: s}
	tm.store, tm.src = bucketOf(t)
	if tm.at, err = cluster.Parse("etcd://" + s.Addr + "/test"); err != nil {
		t.Fatal(err)
	}
	if tm.client, _, err = tm.at.Dial(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tm.client.Close() })
	return tm
}

// start starts a daemon, and waits until the others know it.
func (tm *team) start(t *testing.T, m *member, drain time.Duration) {
	t.Helper()
	last, err := folder.LastNames()
	if err != nil {
		t.Fatal(err)
	}
	m.c, err = Open(t.Context(),
		Config{Dir: m.dir, Prefix: tm.src.Prefix, Dest: tm.src.String(), Store: tm.store, Last: last, Cluster: tm.at,
			Copies: tm.copies, Drain: drain,
			Log: slog.New(slog.NewTextHandler(&m.log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	m.stop, m.ended = stop, make(chan error, 1)
	ready := make(chan struct{})
	go func() {
		m.ended <- errors.Join(m.c.Run(ctx, func() { close(ready) }), m.c.Close())
	}()
	<-ready
}

func (m *member) end() error {
	m.stop()
	return <-m.ended
}

func (tm *team) has(t *testing.T, path string) bool {
	t.Helper()
	_, err := tm.store.Stat(t.Context(), tm.src.Prefix+path)
	if err != nil && objstore.KindOf(err) != objstore.KindNotFound {
		t.Fatal(err)
	}
	return err == nil
}

// keys returns what etcd has of the destination.
func (tm *team) keys(t *testing.T) (keys []string) {
	t.Helper()
	got, err := tm.client.Get(t.Context(), tm.at.Root()+"ckpt/", v3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range got.Kvs {
		keys = append(keys, string(kv.Key))
	}
	return keys
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what + ": not within a minute")
		}
	}
}

// Hosts save together, while one of them restarts and etcd does. A last name is visible only beside the files of all.
// In the end etcd has nothing of them.
func TestHosts(t *testing.T) {
	tm := newTeam(t)
	var members [3]*member
	for i := range members {
		members[i] = &member{dir: t.TempDir()}
		tm.start(t, members[i], time.Minute)
	}
	for step := range 6 {
		at := fmt.Sprint("step-", step)
		var savers sync.WaitGroup
		for i, m := range members {
			savers.Go(func() {
				for f := range 3 {
					save(t, filepath.Join(m.dir, at, fmt.Sprintf("__%d_%d.distcp", i, f)), 1000+f*(3<<20))
				}
			})
		}
		savers.Wait()
		save(t, filepath.Join(members[0].dir, at, ".metadata"), 10)
		switch step {
		case 1:
			if err := tm.server.Restart(t.Context(), false); err != nil {
				t.Fatal(err)
			}
		case 2, 4:
			m := members[step/2%3]
			if err := m.end(); err != nil {
				t.Error(err)
			}
			tm.start(t, m, time.Minute)
		}
		if step%2 == 1 {
			continue // the next one begins before
		}
		until(t, "the last name is visible", func() bool { return tm.has(t, at+"/.metadata") })
		for i := range members {
			for f := range 3 {
				if p := fmt.Sprintf("%s/__%d_%d.distcp", at, i, f); !tm.has(t, p) {
					t.Errorf("%s/.metadata is visible, and %s is not", at, p)
				}
			}
		}
	}
	var ends sync.WaitGroup
	for _, m := range members {
		ends.Go(func() {
			if err := m.end(); err != nil {
				t.Error(err)
			}
		})
	}
	ends.Wait()
	if left := tm.keys(t); len(left) > 0 {
		t.Errorf("left in etcd: %v", left)
	}
	if !tm.has(t, "step-5/.metadata") {
		t.Error("the last step is not there")
	}
}

// A host that is lost holds up last names, and nothing else; who it is, is said, with a remedy that works. So does
// etcd.
func TestHostLost(t *testing.T) {
	tm := newTeam(t)
	a, b := &member{dir: t.TempDir()}, &member{dir: t.TempDir()}
	tm.start(t, a, time.Minute)
	tm.start(t, b, time.Millisecond)
	save(t, filepath.Join(b.dir, "torn.safetensors"), 100) // it cannot leave
	save(t, filepath.Join(b.dir, "s/b"), 1)
	until(t, "b", func() bool { return tm.has(t, "s/b") })
	save(t, filepath.Join(a.dir, "latest"), 1)
	until(t, "a waits for b", func() bool { return strings.Contains(waitsFor(t, a), b.dir) })
	if err := b.end(); err == nil || !strings.Contains(err.Error(), "go on waiting for this one") {
		t.Fatal(err)
	}
	save(t, filepath.Join(a.dir, "s/a"), 1)
	until(t, "an ordinary file", func() bool { return tm.has(t, "s/a") })
	if tm.has(t, "latest") {
		t.Fatal("the last name is visible")
	}
	tm.server.Stop()
	until(t, "etcd is away", func() bool { return strings.Contains(waitsFor(t, a), "cannot be reached") })
	if err := tm.server.Restart(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	until(t, "it is back", func() bool { return strings.Contains(waitsFor(t, a), b.dir) })
	_, key, _ := strings.Cut(waitsFor(t, a), " del ")
	if got, err := tm.client.Delete(t.Context(), key); err != nil || got.Deleted != 1 {
		t.Fatalf("%q: %v, %v", key, got, err)
	}
	until(t, "the last name", func() bool { return tm.has(t, "latest") })
	if err := a.end(); err != nil {
		t.Error(err)
	}
}

func waitsFor(t *testing.T, m *member) (why string) {
	t.Helper()
	client, _, err := Find(m.dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s.Behind.WaitsFor
}

// Hosts of one cluster share a prefix, however they write its servers. Others are refused, and told what it is.
func TestOneCluster(t *testing.T) {
	store, err := objstore.NewDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	beat, look := lockBeat, lockLook
	lockBeat, lockLook = 20*time.Millisecond, 20*time.Millisecond
	defer func() { lockBeat, lockLook = beat, look }()
	cfg := Config{Dest: "there", Store: objstore.Retry(store, objstore.RetryPolicy{}),
		Log: slog.New(slog.DiscardHandler)}
	in := func(url string) Config {
		t.Helper()
		c := cfg
		if c.Cluster, err = cluster.Parse(url); err != nil {
			t.Fatal(err)
		}
		return c
	}
	l, err := takePrefix(t.Context(), in("etcd://a,b/one"), "1")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancelCause(t.Context())
	var kept sync.WaitGroup
	kept.Go(func() { l.keep(ctx, stop) })
	second, err := takePrefix(t.Context(), in("etcd://u:p@b:2379,a:2379/one"), "2")
	if err != nil {
		t.Fatal(err)
	}
	kept.Go(func() { second.keep(ctx, stop) })
	unordered := cfg
	unordered.Unordered = true
	for _, other := range []Config{cfg, unordered, in("etcd://a,b/two"), in("etcd://c/one")} {
		_, err := takePrefix(t.Context(), other, "3")
		if err == nil || !strings.Contains(err.Error(), "--cluster etcd://a:2379,b:2379/one") {
			t.Errorf("%+v: %v", other.Cluster, err)
		}
	}
	stop(nil)
	kept.Wait()
	if !errors.Is(context.Cause(ctx), context.Canceled) {
		t.Error(context.Cause(ctx))
	}
}
