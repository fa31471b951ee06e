package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// seaweedCluster starts a master, three volume servers that hold each file twice, a filer, and an S3 gateway that
// listens at host. It returns the gateway's URL, and the volume servers.
func seaweedCluster(t *testing.T, weed, host string) (url string, volumes []*subproc.Proc) {
	t.Helper()
	dir := t.TempDir()
	port := func() string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		_, p, _ := net.SplitHostPort(l.Addr().String())
		return p
	}
	start := func(verb string, args ...string) (at, p string, proc *subproc.Proc) {
		t.Helper()
		p, grpc, folder := port(), port(), filepath.Join(dir, fmt.Sprint(verb, len(volumes)))
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		args = append([]string{verb, "-ip.bind=127.0.0.1", "-port=" + p, "-port.grpc=" + grpc}, args...)
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "DIR", folder)
		}
		cmd := exec.Command(weed, args...)
		cmd.Dir = folder
		log, err := os.Create(filepath.Join(folder, "log"))
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stdout, cmd.Stderr = log, log
		proc, err = subproc.Start("weed "+verb, cmd)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { proc.Stop(5 * time.Second) })
		return "127.0.0.1:" + p + "." + grpc, p, proc
	}
	keys := fmt.Sprintf(`{"identities":[{"name":"test","actions":["Admin","Read","Write","List","Tagging"],"credentials":[{"accessKey":%q,"secretKey":%q}]}]}`, s3server.AccessKey, s3server.SecretKey)
	write(t, filepath.Join(dir, "s3.json"), []byte(keys))
	master, _, _ := start("master", "-ip=127.0.0.1", "-mdir=DIR", "-defaultReplication=001", "-volumeSizeLimitMB=64")
	for range 3 {
		_, _, v := start("volume", "-ip=127.0.0.1", "-dir=DIR", "-mserver="+master, "-dataCenter=d",
			"-rack=r", "-max=30")
		volumes = append(volumes, v)
	}
	filer, _, _ := start("filer", "-ip=127.0.0.1", "-master="+master, "-defaultReplicaPlacement=001")
	_, p, _ := start("s3", "-ip.bind="+host, "-filer="+filer, "-config="+filepath.Join(dir, "s3.json"))
	url = "http://" + net.JoinHostPort(host, p)
	within(t, patience, "SeaweedFS is ready", func() bool {
		c, err := s3server.Client(url, 4)
		if err != nil {
			return false
		}
		_ = c.MakeBucket(context.Background(), "near", minio.MakeBucketOptions{})
		_, err = c.PutObject(context.Background(), "near", "ready", strings.NewReader("x"), 1, minio.PutObjectOptions{})
		return err == nil
	})
	return url, volumes
}

// SeaweedFS as the near tier, with each copy on two of three servers: one is killed in mid-epoch. It runs with
// SHOAL_TEST_WEED=PATH (the wheel of tools/conformance/requirements.txt has one).
func TestNearTierOfSeaweedFS(t *testing.T) {
	weed := os.Getenv("SHOAL_TEST_WEED")
	if weed == "" {
		t.Skip("no SHOAL_TEST_WEED")
	}
	dir, paths := tree(t, 10, 100, 63<<10)
	source, env := bucket(t, dir), s3server.Env(server.URL)
	url, volumes := seaweedCluster(t, weed, "127.0.0.1")
	flags := []string{"--near", "s3://near/train", "--near-endpoint", url, "--order", "none", "--kernel-cache", "off",
		"--cache-size", "0"}
	pass := func(mnt string, paths []string) {
		t.Helper()
		start := time.Now()
		readAll(t, mnt, dir, paths)
		s := readNear(t, mnt)
		t.Logf("%d files in %v: %d GETs of the origin, near %+v", len(paths), time.Since(start), s.Gets, s.Near)
	}
	one := mount(t, env, source, flags...)
	pass(one, paths)
	copies(t, one, len(paths)*9/10)
	umount(t, one)
	two := mount(t, env, source, flags...)
	pass(two, paths[:len(paths)/2])
	volumes[0].Stop(0)
	t.Log("one volume server is killed")
	pass(two, paths[len(paths)/2:])
	umount(t, two)
	three := mount(t, env, source, flags...)
	pass(three, paths)
	if s := readNear(t, three); s.Near.Hits < int64(len(paths)/2) {
		t.Errorf("%+v", s)
	}
	umount(t, three)
	volumes[1].Stop(0)
	t.Log("another one is killed: some copies are lost, and none can be put")
	four := mount(t, env, source, flags...)
	pass(four, paths)
	time.Sleep(5 * time.Second)
	pass(four, paths)
	for _, e := range readNear(t, four).Errors {
		t.Log(e.Text)
	}
}
