package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// csiNode is a node's keeper and driver, and a client in the kubelet's place. There is no cluster; lab/e2e/kubernetes
// has one.
type csiNode struct {
	t                      *testing.T
	env                    []string
	kubelet, cache, keeper string
	flags                  []string
	driver                 *subproc.Proc
	csi.NodeClient
}

// newCSI starts a node. Its driver has env and no rights, unless rights are added.
func newCSI(t *testing.T, env []string, flags ...string) *csiNode {
	t.Helper()
	n := &csiNode{t: t, env: env, kubelet: t.TempDir(), cache: t.TempDir(), flags: flags}
	for _, dir := range []string{"plugins_registry", "pods"} {
		if err := os.Mkdir(filepath.Join(n.kubelet, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.startKeeper()
	n.start()
	conn, err := grpc.NewClient("unix://"+filepath.Join(n.kubelet, "plugins/csi.shoalfs.dev/csi.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	n.NodeClient = csi.NewNodeClient(conn)
	t.Cleanup(func() { // what a failed test has left
		for _, point := range n.mounts() {
			_ = unix.Unmount(point, unix.MNT_DETACH)
		}
	})
	return n
}

func (n *csiNode) startKeeper() *subproc.Proc {
	n.t.Helper()
	if n.keeper == "" {
		n.keeper = "unix://" + filepath.Join(n.t.TempDir(), "keeper.sock")
	}
	p, err := subproc.Start("the keeper", exec.Command(shoalBin, "keeper", n.keeper))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { p.Stop(time.Second) })
	within(n.t, patience, "the keeper listens", func() bool {
		_, err := os.Lstat(strings.TrimPrefix(n.keeper, "unix://"))
		return err == nil
	})
	return p
}

func (n *csiNode) start() {
	n.t.Helper()
	args := append([]string{"csi", "--node-id", "node", "--kubelet-dir", n.kubelet, "--cache-dir", n.cache, "--memory",
		"256MiB"}, n.flags...)
	cmd := exec.Command(shoalBin, args...)
	cmd.Env = append(append(os.Environ(), n.env...), "SHOAL_KEEPER="+n.keeper)
	socket := filepath.Join(n.kubelet, "plugins_registry/csi.shoalfs.dev-reg.sock")
	_ = os.Remove(socket)
	p, err := subproc.Start("the driver", cmd)
	if err != nil {
		n.t.Fatal(err)
	}
	n.driver = p
	n.t.Cleanup(func() { p.Stop(5 * time.Second) })
	within(n.t, patience, "the driver is registered", func() bool {
		if err := p.Failed(); err != nil {
			n.t.Fatal(err)
		}
		_, err := os.Lstat(socket)
		return err == nil
	})
}

// inTime fails the test if an error was no pod's event within ten seconds (docs/kubernetes.md). The driver waits for 8
// of them, and on a machine that wakes programs late the rest takes longer.
func (n *csiNode) inTime(what string, took, late time.Duration) {
	n.t.Helper()
	if took > 10*time.Second+6*late {
		n.t.Errorf("%s: refused after %v, on a machine that was late by %v", what, took, late)
	}
}

// mounts are those below the kubelet's folder.
func (n *csiNode) mounts() (points []string) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		n.t.Error(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); strings.HasPrefix(f[4], n.kubelet) {
			points = append(points, f[4])
		}
	}
	return points
}

func (n *csiNode) target(pod string) string { return filepath.Join(n.kubelet, "pods", pod, "mount") }

// publish asks once for a pod's volume.
func (n *csiNode) publish(pod string, attributes, secrets map[string]string) error {
	target := n.target(pod)
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	all := map[string]string{"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.name": pod}
	for k, v := range attributes {
		all[k] = v
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err := n.NodePublishVolume(ctx,
		&csi.NodePublishVolumeRequest{VolumeId: "csi-" + pod, TargetPath: target, VolumeContext: all, Secrets: secrets,
			VolumeCapability: &csi.VolumeCapability{
				AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
				AccessMode: &csi.VolumeCapability_AccessMode{
					Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}}, grpc.WaitForReady(true))
	return err
}

// mustPublish asks as often as it must.
func (n *csiNode) mustPublish(pod string, attributes, secrets map[string]string) (mnt string) {
	n.t.Helper()
	within(n.t, patience, "the volume of "+pod+" is published", func() bool {
		err := n.publish(pod, attributes, secrets)
		if err != nil && status.Code(err) != codes.DeadlineExceeded {
			n.t.Fatal(err)
		}
		return err == nil
	})
	return n.target(pod)
}

func (n *csiNode) unpublish(pods ...string) {
	n.t.Helper()
	for _, pod := range pods {
		if _, err := n.NodeUnpublishVolume(context.Background(),
			&csi.NodeUnpublishVolumeRequest{VolumeId: "csi-" + pod, TargetPath: n.target(pod)},
			grpc.WaitForReady(true)); err != nil {
			n.t.Error(err)
		}
		if _, err := os.Lstat(n.target(pod)); !errors.Is(err, os.ErrNotExist) {
			n.t.Errorf("%s: %v", n.target(pod), err)
		}
	}
}

// nothingLeft checks that no mount and no open dataset is left.
func (n *csiNode) nothingLeft() {
	n.t.Helper()
	if left := n.mounts(); len(left) > 0 {
		n.t.Errorf("mounts are left: %s", left)
	}
	within(n.t, patience, "no dataset is open", func() bool {
		return !strings.Contains(mustShoal(n.t, nil, "cache", "ls", n.cache, "--json"), `"users":1`)
	})
	for _, sub := range []string{"stages", "tokens"} {
		if left, err := os.ReadDir(filepath.Join(n.kubelet, "plugins/csi.shoalfs.dev", sub)); err != nil ||
			len(left) > 0 {
			n.t.Errorf("%s: %v, %v", sub, left, err)
		}
	}
}

// podKeys are those of a Secret.
func podKeys() map[string]string {
	return map[string]string{"AWS_ACCESS_KEY_ID": s3server.AccessKey, "AWS_SECRET_ACCESS_KEY": s3server.SecretKey}
}

// withoutRights is the environment of a driver that knows where the store is, and has no keys.
func withoutRights(url string) []string {
	return []string{"AWS_ENDPOINT_URL=" + url, "AWS_REGION=us-east-1", "AWS_ACCESS_KEY_ID=", "AWS_SECRET_ACCESS_KEY=",
		"AWS_EC2_METADATA_DISABLED=true", "HOME=/nonexistent"}
}

// Pods of one volume share a stage, and each byte is fetched once; what is left of them is nothing.
func TestCSI(t *testing.T) {
	dir, paths := tree(t, 4, 20, 40<<10)
	p, env := far(t, proxy.Options{})
	at := freePort(t)
	n := newCSI(t, env, "--admin", at)
	volume := map[string]string{"source": bucket(t, dir), "order": "torch:seed=7"}
	before := p.Stats()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() { readAll(t, n.mustPublish(fmt.Sprint("pod", i), volume, nil), dir, paths) })
	}
	wg.Wait()
	if gets := p.Stats().Sub(before).Gets; gets > int64(len(paths))+8 {
		t.Errorf("%d GETs for %d files", gets, len(paths))
	}
	if points := n.mounts(); len(points) != 9 {
		t.Errorf("mounts: %s", points)
	}
	mnt := n.mustPublish("pod0", volume, nil) // as the kubelet does from time to time
	if err := os.WriteFile(filepath.Join(mnt, "x"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("a write: %v", err)
	}
	if err := os.WriteFile(filepath.Join(mnt, ".shoal", "plan"), []byte(paths[1]+"\n"+paths[0]+"\n"),
		0o600); err != nil {
		t.Errorf("a plan: %v", err)
	}
	s, err := n.NodeGetVolumeStats(context.Background(),
		&csi.NodeGetVolumeStatsRequest{VolumeId: "csi-pod0", VolumePath: mnt})
	if err != nil || s.GetVolumeCondition().GetAbnormal() || len(s.GetUsage()) != 2 ||
		s.GetUsage()[1].GetUsed() != int64(len(paths)) {
		t.Errorf("%v, %v", s, err)
	}
	if _, err := n.NodeGetVolumeStats(context.Background(),
		&csi.NodeGetVolumeStatsRequest{VolumeId: "csi-pod9", VolumePath: n.target("pod9")}); status.Code(err) !=
		codes.NotFound {
		t.Errorf("stats of no volume: %v", err)
	}
	// Other settings are another stage, of the same dataset.
	readAll(t, n.mustPublish("other", map[string]string{"source": volume["source"], "order": "torch:seed=7",
		"kernel-cache": "off"}, nil), dir, paths)
	n.mustPublish("part", map[string]string{"source": volume["source"] + "/class00"}, nil)
	files := map[string]int{}
	for line := range strings.Lines(string(metricsText(t, at))) {
		var dataset string
		var n int
		if got, _ := fmt.Sscanf(line, "shoal_dataset_files{dataset=%q} %d", &dataset, &n); got == 2 {
			files[dataset] = n
		}
	}
	if is := slices.Sorted(maps.Values(files)); !slices.Equal(is, []int{20, len(paths)}) {
		t.Errorf("metrics of datasets with %v files", is)
	}
	for i := range 8 {
		n.unpublish(fmt.Sprint("pod", i))
	}
	n.unpublish("pod0", "other", "part", "never")
	n.nothingLeft()
}

// What pods read goes on while the driver is killed and replaced, and pods come and go.
func TestCSIDriverReplaced(t *testing.T) {
	dir, paths := tree(t, 4, 25, 100<<10)
	_, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	n := newCSI(t, env)
	volume := map[string]string{"source": bucket(t, dir)}
	off := map[string]string{"source": volume["source"], "kernel-cache": "off"}
	mnts := []string{n.mustPublish("a", volume, nil), n.mustPublish("b", off, nil), n.mustPublish("c", volume, nil)}
	readers := startUpgradeReaders(t, 6, mnts, dir, paths)
	for round := range atMost(6, 100) {
		time.Sleep(time.Duration(rand.IntN(500)) * time.Millisecond) // a random moment
		sig := []syscall.Signal{unix.SIGKILL, unix.SIGTERM}[round%2]
		if err := n.driver.Signal(sig); err != nil {
			t.Fatal(err)
		}
		<-n.driver.Done()
		n.start()
		pod := fmt.Sprint("round", round)
		readAll(t, n.mustPublish(pod, off, nil), dir, paths)
		n.unpublish(pod)
	}
	for _, r := range readers {
		r.end(t)
	}
	if points := n.mounts(); len(points) != 5 {
		t.Errorf("mounts: %s", points)
	}
	n.unpublish("a", "b", "c")
	n.nothingLeft()
}

// A keeper that ends is missed by nobody while the driver lives, and the next one has everything.
func TestCSIKeeperReplaced(t *testing.T) {
	dir, paths := tree(t, 2, 10, 40<<10)
	_, env := far(t, proxy.Options{})
	n := newCSI(t, env)
	mnt := n.mustPublish("a", map[string]string{"source": bucket(t, dir)}, nil)
	reader := startUpgradeReaders(t, 1, []string{mnt}, dir, paths)[0]
	path := strings.TrimPrefix(n.keeper, "unix://")
	for _, pid := range processes(path) {
		if cmd, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); bytes.Contains(cmd, []byte("\x00keeper\x00")) {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	n.startKeeper()
	within(t, patience, "the driver has found it", func() bool {
		return strings.Contains(n.driver.Tail(), "another keeper has what is served")
	})
	if err := n.driver.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-n.driver.Done()
	n.start()
	readAll(t, mnt, dir, paths)
	reader.end(t)
	n.unpublish("a")
	n.nothingLeft()
}

// A driver that cannot listen serves the mounts that pods have, and listens once it can.
func TestCSIListensLater(t *testing.T) {
	dir, paths := tree(t, 1, 5, 1000)
	_, env := far(t, proxy.Options{})
	n := newCSI(t, env)
	mnt := n.mustPublish("a", map[string]string{"source": bucket(t, dir)}, nil)
	if err := n.driver.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-n.driver.Done()
	registry := filepath.Join(n.kubelet, "plugins_registry")
	if err := os.RemoveAll(registry); err != nil {
		t.Fatal(err)
	}
	made := make(chan error, 1)
	go func() {
		for {
			// The socket is the old driver's, and then the new one's until it fails for want of the registry.
			if _, err := os.Lstat(filepath.Join(n.kubelet, "plugins/csi.shoalfs.dev/csi.sock")); err != nil {
				made <- os.Mkdir(registry, 0o755)
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	n.start()
	if err := <-made; err != nil {
		t.Error(err)
	}
	readAll(t, mnt, dir, paths)
	n.unpublish("a")
	n.nothingLeft()
}

// Nobody sees what other rights have read: not with wrong keys, not by an endpoint of one's own, and not while the
// store is away.
func TestCSIRights(t *testing.T) {
	dir, paths := tree(t, 2, 10, 40<<10)
	p, _ := far(t, proxy.Options{})
	n := newCSI(t, withoutRights(p.URL))
	source := bucket(t, dir)
	volume := map[string]string{"source": source}
	readAll(t, n.mustPublish("right", volume, podKeys()), dir, paths)
	wrong := map[string]string{"AWS_ACCESS_KEY_ID": s3server.AccessKey, "AWS_SECRET_ACCESS_KEY": "wrong"}
	refused := func(pod string, attributes, secrets map[string]string, says ...string) {
		t.Helper()
		begun, late := time.Now(), lag()
		err := n.publish(pod, attributes, secrets)
		if err == nil {
			t.Fatalf("%s: published", pod)
		}
		for _, s := range says {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("%s: %v lacks %q", pod, err, s)
			}
		}
		n.inTime(pod, time.Since(begun), late())
		if mounted(n.target(pod)) {
			t.Errorf("%s: something is mounted", pod)
		}
	}
	refused("none", volume, nil, "no credentials")
	refused("wrong", volume, wrong, bucketName(t), "AWS_SECRET_ACCESS_KEY")
	// An endpoint of the pod's own has other objects under the same names.
	evil, _ := far(t, proxy.Options{})
	other := map[string]string{"source": source, "endpoint": evil.URL}
	readAll(t, n.mustPublish("other", other, podKeys()), dir, paths)
	if evil.Stats().Gets < int64(len(paths)) {
		t.Errorf("%d GETs at the other endpoint: it was served from the first one's", evil.Stats().Gets)
	}
	p.Stop()
	refused("away", volume, wrong, bucketName(t))
	readAll(t, n.mustPublish("again", volume, podKeys()), dir, paths)
	n.unpublish("right", "other", "again", "wrong", "none", "away")
}

// What is wrong with a volume is said at once, with the thing, the cause and the remedy, and nothing is half mounted.
func TestCSIBadInput(t *testing.T) {
	dir, _ := tree(t, 1, 3, 1000)
	_, env := far(t, proxy.Options{})
	n := newCSI(t, env)
	source := bucket(t, dir)
	for _, row := range []struct {
		attributes, secrets map[string]string
		says                string
	}{
		{map[string]string{}, nil, "source or shards is \"\" (give s3://BUCKET/PREFIX)"},
		{map[string]string{"source": "file:///etc"}, nil, "give s3://BUCKET/PREFIX"},
		{map[string]string{"source": source, "shards": "file:///etc"}, nil, "give s3://BUCKET/PREFIX"},
		{map[string]string{"source": source, "order": "list:/etc/passwd"}, nil, "names a file of the driver"},
		{map[string]string{"source": source, "endpoint": "http://127.0.0.1:1"}, nil,
			"where the driver's keys do not go"},
		{map[string]string{"source": source, "sources": "x"}, nil, `"sources" is unknown (there are source,`},
		{map[string]string{"source": source, "order": "torch:sed=7"}, nil, "--order"},
		{map[string]string{"source": source, "memory": "1GiB"}, nil, "--memory 1.0 GiB"},
		{map[string]string{"source": source, "cache": "1GiB"}, nil, "--cache-size 1.0 GiB"},
		{map[string]string{"source": "s3://no-such-bucket/x"}, nil, "no-such-bucket"},
		{map[string]string{"source": source}, map[string]string{"key": "x"},
			`the Secret has the key "key" (it may have AWS_ACCESS_KEY_ID`},
		{map[string]string{"source": source}, map[string]string{"AWS_ACCESS_KEY_ID": "x"}, "the Secret lacks"},
		{map[string]string{"source": source, "role": "arn:aws:iam::1:role/x"}, nil, "no token for sts.amazonaws.com"},
		{map[string]string{"source": source, "role": "arn:aws:iam::1:role/x"}, podKeys(), "a role and a Secret"},
	} {
		begun, late := time.Now(), lag()
		err := n.publish("bad", row.attributes, row.secrets)
		if err == nil || !strings.Contains(err.Error(), row.says) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v: %v lacks %q", row.attributes, err, row.says)
		}
		n.inTime(fmt.Sprint(row.attributes), time.Since(begun), late())
		t.Log(err)
	}
	n.unpublish("bad")
	n.nothingLeft()
}
