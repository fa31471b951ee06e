package engine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/lab/rig/etcd"
)

// A node that gave other bytes is asked nothing any more, whatever etcd does, until it starts again: then it is another
// one.
func TestDistrustEnds(t *testing.T) {
	if _, err := etcd.FindBinary(); err != nil {
		t.Skip(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	server, err := etcd.Start(ctx, false)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	dir := t.TempDir()
	for i := range 100 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("f%04d.jpg", i)), fmt.Appendf(nil, "%9d", i),
			0o644); err != nil {
			t.Fatal(err)
		}
	}
	caches := []string{t.TempDir(), t.TempDir()}
	start := func(i int) *Engine {
		return open(t, HostConfig{Options: cachedir.Options{Path: caches[i], Size: 256 << 20, Memory: 192 << 20},
			Cluster: ClusterConfig{URL: "etcd://" + server.Addr + "/test", Advertise: "127.0.0.1:0", Insecure: true}},
			Config{Source: "file://" + dir})
	}
	a, b := start(0), start(1)
	defer func() { closeEngine(t, a) }()
	defer func() { closeEngine(t, b) }()
	s := a.cur.Load().sharing
	// theirs is a file that the other node keeps, and that node as this one sees it.
	theirs := func() (file int, instance string) {
		file = -1
		waitFor(t, "they know each other", func() bool {
			for i := range 100 {
				if of, _ := s.keeper(s.now.Load(), i, 0, false); of >= 0 {
					file, instance = i, s.now.Load().nodes[of].Instance
				}
			}
			return file >= 0
		})
		return file, instance
	}
	gives := func() bool {
		file, _ := theirs()
		w := []cache.Want{{File: file, P: make([]byte, 9)}}
		return len(s.Read(t.Context(), w, false, func(context.Context, cache.Want) error { return nil })) == 0
	}
	waitFor(t, "the other node gives", gives)
	file, was := theirs()
	of, _ := s.keeper(s.now.Load(), file, 0, false)
	s.distrust(s.now.Load().nodes[of], file)
	if gives() {
		t.Error("a liar was asked")
	}
	if err := server.Restart(ctx, true); err != nil { // it registers again, and is the same
		t.Fatal(err)
	}
	waitFor(t, "it is back", func() bool {
		return len(b.host.node.cluster.View().Nodes) == 2 && a.host.node.cluster.State().Phase == "joined"
	})
	if _, is := theirs(); is != was || gives() {
		t.Error("a liar was asked after it had registered again")
	}
	closeEngine(t, b)
	b = start(1)
	waitFor(t, "it is asked again", func() bool { _, is := theirs(); return is != was && gives() })
}

// Who asks a node for its datasets while one is closed gets the others.
func TestDatasetsWhileOneCloses(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "a.jpg"), []byte("a"))
	e := openEngine(t, dir, t.TempDir(), "auto")
	h := e.host
	was := h.engines()
	closeEngine(t, e)
	for _, e := range was { // as they were seen before
		if e.guests.enter() {
			t.Error("it is asked for its stats")
		}
	}
}
