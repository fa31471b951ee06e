package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/lab/rig/etcd"
)

// halver codes files whose second half repeats the first; its tables are 8 bytes, with which the coded form begins.
type halver struct {
	trained *atomic.Int64
	begin   <-chan struct{} // before it is closed nothing is trained
}

func (h halver) Train([][]byte) ([]byte, error) {
	<-h.begin
	return fmt.Appendf(nil, "tables%02d", h.trained.Add(1)), nil
}

func (h halver) Learn(tables []byte) (func(dst, file []byte) ([]byte, bool), error) {
	if len(tables) != 8 {
		return nil, errors.New("no tables")
	}
	return func(dst, file []byte) ([]byte, bool) {
		half := len(file) / 2
		return append(append(dst, tables...), file[:half]...), bytes.Equal(file[:half], file[half:])
	}, nil
}

func (h halver) Decode(dst, coded []byte) ([]byte, error) {
	if !bytes.HasPrefix(coded, []byte("tables")) {
		return dst, errors.New("not coded")
	}
	return append(append(dst, coded[8:]...), coded[8:]...), nil
}

func (h halver) Form(coded []byte) [8]byte  { return [8]byte(coded) }
func (h halver) Name(tables []byte) [8]byte { return [8]byte(tables) }

// Two nodes recode by the tables of one of them, and what each keeps recoded the other gets so. A restart reads it from
// the disk, though it has not been in a cluster since.
func TestNodesShareRecoded(t *testing.T) {
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
	var content [][]byte
	total := 0
	for i := range 300 {
		half := bytes.Repeat(fmt.Appendf(nil, "%04d and so on", i), 800+i)
		content = append(content, bytes.Repeat(half, 2))
		total += 2 * len(half)
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("f%04d.jpg", i)), content[i], 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var trained atomic.Int64
	begin := make(chan struct{})
	recode := sync.OnceFunc(func() { close(begin) })
	defer recode()
	caches := []string{t.TempDir(), t.TempDir()}
	start := func(i int, cluster ClusterConfig) *Engine {
		return open(t, HostConfig{Options: cachedir.Options{Path: caches[i], Size: 256 << 20, Memory: 192 << 20},
			Cluster: cluster, Coder: halver{&trained, begin}},
			Config{Source: "file://" + dir, Recode: "on"})
	}
	var nodes []*Engine
	for i := range caches {
		nodes = append(nodes, start(i,
			ClusterConfig{URL: "etcd://" + server.Addr + "/test", Advertise: "127.0.0.1:0", Insecure: true}))
	}
	// check reads what the node keeps, or does not, as a feed and as a file.
	check := func(e *Engine, own bool) {
		t.Helper()
		v := e.cur.Load().volume
		var files []int
		for i := range content {
			if s := e.cur.Load().sharing; s != nil {
				if of, _ := s.keeper(s.now.Load(), i, 0, false); (of >= 0) == own {
					continue
				}
			}
			files = append(files, i)
			data, release, err := v.SampleCoded(t.Context(), i)
			if err != nil {
				t.Fatal(err)
			}
			if plain, err := (halver{}).Decode(nil, data); err != nil || !bytes.Equal(plain, content[i]) {
				t.Errorf("file %d: %d bytes of %d, %v", i, len(data), len(content[i]), err)
			}
			release()
			v.Spend(i)
		}
		if err := v.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, i := range files {
			p := make([]byte, len(content[i]))
			if _, err := v.ReadAt(t.Context(), i, p, 0); err != nil || !bytes.Equal(p, content[i]) {
				t.Errorf("file %d differs: %v", i, err)
			}
			v.Spend(i)
		}
	}
	for _, e := range nodes {
		waitFor(t, "they know each other", func() bool {
			m := e.cur.Load().sharing.now.Load()
			return len(m.nodes) == 2
		})
	}
	for _, e := range nodes {
		v, own := e.cur.Load().volume, 0
		for i := range content {
			s := e.cur.Load().sharing
			if of, _ := s.keeper(s.now.Load(), i, 0, false); of < 0 {
				p := make([]byte, len(content[i]))
				if _, err := v.ReadAt(t.Context(), i, p, 0); err != nil {
					t.Fatal(err)
				}
				own++
			}
		}
		waitFor(t, "it keeps what it owns", func() bool { return e.cur.Load().volume.Stats().Kept == own })
	}
	// from segments that hold nothing else: of few plain files among recoded ones nobody would make a segment anew
	recode()
	for _, e := range nodes {
		waitFor(t, "what it keeps is recoded", func() bool {
			s := e.cur.Load().volume.Stats()
			return s.Coded == s.Kept && s.Kept > 64
		})
	}
	if trained.Load() != 1 || nodes[0].recoding.encode.Load().form != nodes[1].recoding.encode.Load().form {
		t.Errorf("trained %d times", trained.Load())
	}
	before := nodes[0].Stats().GetRequests + nodes[1].Stats().GetRequests
	for k, e := range nodes {
		restored := nodes[1-k].cur.Load().volume.Stats().Restored
		check(e, false)
		s := e.cur.Load().volume.Stats()
		if owner := nodes[1-k].cur.Load().volume.Stats(); owner.Restored != restored || s.PeerBytes == 0 ||
			s.PeerBytes > int64(total)/3 {
			t.Errorf("%d bytes from the other node, which restored %d", s.PeerBytes, owner.Restored-restored)
		}
	}
	// a file:// source has no MD5 of them: one in 64, by chance, is compared with it
	if n := nodes[0].Stats().GetRequests + nodes[1].Stats().GetRequests - before; n > 24 {
		t.Errorf("%d requests to the store", n)
	}
	for _, e := range nodes {
		closeEngine(t, e)
	}
	for k := range nodes {
		e := start(k, ClusterConfig{})
		if s := e.cur.Load().volume.Stats(); s.Coded != len(content) {
			t.Errorf("%d of %d files are recoded after a restart", s.Coded, s.Kept)
		}
		check(e, true)
		if n := e.Stats().GetRequests; n != 0 || trained.Load() != 1 {
			t.Errorf("%d requests to the store, trained %d times", n, trained.Load())
		}
		closeEngine(t, e)
	}
}
