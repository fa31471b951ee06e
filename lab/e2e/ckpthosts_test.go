package e2e

import (
	"context"
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
	"github.com/shoalfs/shoal/lab/rig/netns"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// Four hosts save in the form of DCP: each its shards, and after a barrier the first one its metadata.
func TestCkptHosts(t *testing.T) {
	ckptHosts(t, func(dirs []string, seed uint64) func(int) func() {
		return func(step int) (finish func()) {
			at := fmt.Sprint("step-", step)
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
			return func() {
				barrier.Wait()
				write(t, filepath.Join(dirs[0], at, ".metadata"), []byte("m"))
			}
		}
	})
}

// ckptHosts has four hosts, each in a network namespace, save under one prefix by what saver returns: it begins a save
// into step-N of each of dirs, of sizes by seed, and finish waits for its end. Their ways to the bucket are slow at
// random; one is frozen, killed, or cut off from the bucket and etcd, at random. The metadata is never visible before a
// shard that it names. SHOAL_SAVES says how many times they save.
func ckptHosts(t *testing.T, saver func(dirs []string, seed uint64) func(step int) (finish func())) {
	if m := netns.Missing(); m != "" {
		t.Skip(m)
	}
	if _, err := etcd.FindBinary(); err != nil {
		t.Skip(err)
	}
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	f, err := makeFleet(context.Background(),
		fleetOptions{Shoal: shoalBin, Dir: t.TempDir(), Nodes: 4, Store: server.URL,
			Far: proxy.Options{Latency: 2 * time.Millisecond}})
	must(err)
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	_, err = f.StartEtcd(t.Context())
	must(err)
	saves := 10
	if text := os.Getenv("SHOAL_SAVES"); text != "" {
		saves, err = strconv.Atoi(text)
		must(err)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	name := newBucket(t, "")
	dest, cluster := "s3://"+name+"/run", "etcd://"+f.Etcd.Addr+"/train"
	var dirs []string
	var daemons []*foreground
	start := func(i int) *foreground {
		cmd := f.Nodes[i].Command(shoalBin, "ckpt", dirs[i], dest, "--cluster", cluster)
		cmd.Env = f.Nodes[i].Env()
		d := startForeground(t, cmd)
		d.says(t, "carrying", dirs[i])
		return d
	}
	for i := range f.Nodes {
		dirs = append(dirs, t.TempDir())
		daemons = append(daemons, start(i))
	}
	save, w := saver(dirs, seed), watchBucket(name, "run")
	for step := range saves {
		for _, n := range f.Nodes {
			must(n.Far(proxy.Options{Latency: time.Duration(rng.IntN(40)) * time.Millisecond, Sigma: 0.5}))
		}
		finish := save(step)
		i := rng.IntN(4)
		switch rng.IntN(4) {
		case 0:
			daemons[i].signal(t, syscall.SIGSTOP)
			finish()
			time.Sleep(time.Duration(rng.IntN(300)) * time.Millisecond) // any moment is as good
			daemons[i].signal(t, syscall.SIGCONT)
		case 1:
			daemons[i].signal(t, syscall.SIGKILL)
			<-daemons[i].exited
			finish()
			daemons[i] = start(i)
		case 2:
			must(f.Nodes[i].Down())
			finish()
			time.Sleep(time.Duration(rng.IntN(2000)) * time.Millisecond)
			must(f.Nodes[i].Up())
		default:
			finish()
		}
		if rng.IntN(2) == 0 { // else the next save comes on top
			mustShoal(t, nil, "ckpt", "wait", dirs[0], "--timeout", "120s")
		}
	}
	all := map[string]string{}
	for _, dir := range dirs {
		mustShoal(t, nil, "ckpt", "wait", dir, "--timeout", "120s")
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
		said = mustShoal(t, nil, "ckpt", "ls", dirs[0])
		return strings.Contains(said, dirs[3]) && strings.Contains(said, " del /shoal")
	})
	_, key, _ := strings.Cut(strings.SplitN(said, "\n", 2)[0], " del ")
	client, err := v3.New(v3.Config{Endpoints: []string{f.Etcd.Addr}})
	must(err)
	defer client.Close()
	if got, err := client.Delete(t.Context(), key); err != nil || got.Deleted != 1 {
		t.Fatalf("%q: %v, %v", key, got, err)
	}
	mustShoal(t, nil, "ckpt", "wait", dirs[0], "--timeout", "60s")
}
