package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	v3 "go.etcd.io/etcd/client/v3"

	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// copiesHost is a host of TestCkptCopies.
type copiesHost struct {
	dir, state string
	bucket     *proxy.Proxy // its way there
	*foreground
}

// Three hosts save under one prefix with --copies 2, each its shards and one of them the metadata. One cannot reach the
// bucket; when wait --copies 2 has returned on all, it is killed, and its folder and its journal are lost. All that it
// had saved arrives, the metadata after all. SHOAL_DEATHS says how many hosts are lost.
func TestCkptCopies(t *testing.T) {
	if _, err := etcd.FindBinary(); err != nil {
		t.Skip(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var disk syscall.Statfs_t
	if must(syscall.Statfs(t.TempDir(), &disk)); disk.Bavail < disk.Blocks/9 {
		t.Skip("copies leave a tenth of the disk free, which is not free here")
	}
	s, err := etcd.Start(t.Context(), false)
	must(err)
	t.Cleanup(s.Close)
	client, err := v3.New(v3.Config{Endpoints: []string{s.Addr}})
	must(err)
	t.Cleanup(func() { _ = client.Close() })
	deaths := 2
	if text := os.Getenv("SHOAL_DEATHS"); text != "" {
		deaths, err = strconv.Atoi(text)
		must(err)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	name := newBucket(t, "")
	var hosts [3]*copiesHost
	start := func(h *copiesHost) {
		h.foreground = carry(t, s3server.Env(h.bucket.URL), h.dir, "s3://"+name+"/run", "--cache-dir", h.state,
			"--cluster", "etcd://"+s.Addr+"/train", "--cluster-insecure", "--copies", "2")
	}
	bucket := func() *proxy.Proxy {
		p, err := proxy.Start(context.Background(), server.URL, proxy.Options{})
		must(err)
		t.Cleanup(p.Stop)
		return p
	}
	for i := range hosts {
		hosts[i] = &copiesHost{dir: t.TempDir(), state: t.TempDir(), bucket: bucket()}
		start(hosts[i])
	}
	w := watchBucket(name, "run")
	all := map[string]string{}
	lost := 0
	for step := range deaths {
		lose, leads, restarts := rng.IntN(3), rng.IntN(3), rng.IntN(3)
		at := fmt.Sprint("step-", step)
		must(hosts[lose].bucket.Set(proxy.Options{Latency: time.Hour}))
		save := func(i int, p string, size int) {
			b := make([]byte, size)
			for i := range b {
				b[i] = byte(rng.IntN(256))
			}
			write(t, filepath.Join(hosts[i].dir, at, p), b)
			all[filepath.Join(at, p)] = string(b)
			if i == lose {
				lost++
			}
		}
		for i := range hosts {
			for f := range 1 + rng.IntN(3) {
				save(i, fmt.Sprintf("__%d_%d.distcp", i, f), []int{1000, 1000, 9 << 20}[rng.IntN(3)])
			}
		}
		save(leads, ".metadata", 100)
		for _, h := range hosts {
			mustShoal(t, nil, "ckpt", "wait", h.dir, "--copies", "2", "--timeout", "120s")
		}
		if found := published(t, name, "run"); found[at+"/.metadata"] != "" {
			t.Fatal("the metadata is there already: nothing depends on copies")
		}
		h := hosts[lose]
		h.signal(t, syscall.SIGKILL)
		<-h.exited
		h.bucket.Stop()
		must(os.RemoveAll(h.dir))
		must(os.RemoveAll(h.state))
		if restarts != lose { // perhaps the neighbour: it has the copies on its disk
			hosts[restarts].signal(t, syscall.SIGKILL)
			<-hosts[restarts].exited
			start(hosts[restarts])
		}
		within(t, 2*patience, at, func() bool { return published(t, name, "run")[at+"/.metadata"] != "" })
		// Whoever starts another host in its place gives it up.
		got, err := client.Get(t.Context(), "/shoal/v1/train/ckpt/", v3.WithPrefix())
		must(err)
		for _, kv := range got.Kvs {
			var r struct{ Dir, Instance string }
			if json.Unmarshal(kv.Value, &r) == nil && r.Dir == h.dir {
				_, err = client.Delete(t.Context(), string(kv.Key))
				must(err)
			}
		}
		hosts[lose] = &copiesHost{dir: t.TempDir(), state: t.TempDir(), bucket: bucket()}
		start(hosts[lose])
	}
	sameFiles(t, published(t, name, "run"), all)
	t.Logf("%d hosts lost, with %d files; %d looks at the bucket", deaths, lost, w.end(t, all))
	for _, h := range hosts { // what has arrived is not kept
		within(t, patience, "no copies are left", func() bool {
			left, err := filepath.Glob(h.state + "/ckpt/*/copies/*/*/step-*/*")
			must(err)
			return len(left) == 0
		})
	}
}
