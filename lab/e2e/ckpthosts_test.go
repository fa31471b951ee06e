package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v3 "go.etcd.io/etcd/client/v3"

	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// Four hosts save in the form of DCP under one prefix: each its shards, and after a barrier the first one its metadata. Their ways to
// the bucket are slow at random; one is frozen and one is killed at random. The metadata is never visible before a shard that
// it names. SHOAL_SAVES says how many times they save.
func TestCkptHosts(t *testing.T) {
	if _, err := etcd.FindBinary(); err != nil {
		t.Skip(err)
	}
	s, err := etcd.Start(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	saves := 10
	if text := os.Getenv("SHOAL_SAVES"); text != "" {
		if saves, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	name := newBucket(t, "")
	dest, cluster := "s3://"+name+"/run", "etcd://"+s.Addr+"/train"
	var dirs []string
	var envs [][]string
	var daemons []*foreground
	var ways []*proxy.Proxy
	start := func(i int) *foreground { return carry(t, envs[i], dirs[i], dest, "--cluster", cluster) }
	for i := range 4 {
		p, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
		ways, dirs, envs = append(ways, p), append(dirs, t.TempDir()), append(envs, env)
		daemons = append(daemons, start(i))
	}
	w := watchBucket(name, "run")
	for step := range saves {
		at := fmt.Sprint("step-", step)
		for _, p := range ways {
			if err := p.Set(proxy.Options{Latency: time.Duration(rng.IntN(40)) * time.Millisecond, Sigma: 0.5}); err != nil {
				t.Fatal(err)
			}
		}
		var barrier sync.WaitGroup
		for i, dir := range dirs {
			sizes := rand.New(rand.NewPCG(seed, uint64(step*4+i)))
			barrier.Go(func() {
				for f := range 1 + sizes.IntN(3) {
					size := 1000
					if sizes.IntN(4) == 0 {
						size = 9 << 20
					}
					write(t, filepath.Join(dir, at, fmt.Sprintf("__%d_%d.distcp", i, f)), make([]byte, size))
				}
			})
		}
		i := rng.IntN(4)
		switch rng.IntN(3) {
		case 0:
			daemons[i].signal(t, syscall.SIGSTOP)
			barrier.Wait()
			write(t, filepath.Join(dirs[0], at, ".metadata"), []byte("m"))
			time.Sleep(time.Duration(rng.IntN(300)) * time.Millisecond) // any moment is as good
			daemons[i].signal(t, syscall.SIGCONT)
		case 1:
			daemons[i].signal(t, syscall.SIGKILL)
			<-daemons[i].exited
			barrier.Wait()
			write(t, filepath.Join(dirs[0], at, ".metadata"), []byte("m"))
			daemons[i] = start(i)
		default:
			barrier.Wait()
			write(t, filepath.Join(dirs[0], at, ".metadata"), []byte("m"))
		}
		if rng.IntN(2) == 0 { // else the next save comes on top
			mustShoal(t, envs[0], "ckpt", "wait", dirs[0], "--timeout", "120s")
		}
	}
	all := map[string]string{}
	for i, dir := range dirs {
		mustShoal(t, envs[i], "ckpt", "wait", dir, "--timeout", "120s")
		for p, b := range local(t, dir) {
			all[p] = b
		}
	}
	t.Logf("%d saves, %d looks", saves, w.end(t, all))
	sameFiles(t, published(t, name, "run"), all)
	// A host that never comes back is named, with a remedy that works.
	daemons[3].signal(t, syscall.SIGKILL)
	<-daemons[3].exited
	write(t, filepath.Join(dirs[0], "latest"), []byte("m"))
	said := ""
	within(t, patience, "the lost host is named", func() bool {
		said = mustShoal(t, envs[0], "ckpt", "ls", dirs[0])
		return strings.Contains(said, dirs[3]) && strings.Contains(said, " del /shoal")
	})
	_, key, _ := strings.Cut(strings.SplitN(said, "\n", 2)[0], " del ")
	client, err := v3.New(v3.Config{Endpoints: []string{s.Addr}})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if got, err := client.Delete(t.Context(), key); err != nil || got.Deleted != 1 {
		t.Fatalf("%q: %v, %v", key, got, err)
	}
	mustShoal(t, envs[0], "ckpt", "wait", dirs[0], "--timeout", "60s")
}
