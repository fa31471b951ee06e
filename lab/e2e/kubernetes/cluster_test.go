// Package kubernetes runs the manifests of deploy/kubernetes in a cluster of one machine: etcd, Kubernetes' own
// programs, containerd and runc, and the real S3 server outside. The machine has mount, process and network namespaces
// of its own, so that nothing of it outlives a test.
//
// `make kubernetes-test` builds the programs and runs it.
package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/certtest"
	"github.com/shoalfs/shoal/lab/rig/netns"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// The images' names, as the manifests have them. Without a tag of its own the kubelet would ask a registry.
const registry, tag = "registry.example.org/", "test"

// cluster is a machine that runs Kubernetes, and the S3 server beside it.
type cluster struct {
	bin, dir, group, ip string
	node                *subproc.Proc
	authority           *certtest.Authority
	server              *s3server.Server
	store               *proxy.Proxy // the server, as pods reach it
}

func start(t *testing.T) *cluster {
	t.Helper()
	bin := os.Getenv("SHOAL_KUBERNETES")
	if bin == "" {
		t.Skip("SHOAL_KUBERNETES is not set to the folder of Kubernetes' programs, which make kubernetes-test builds")
	}
	if m := netns.Missing(); m != "" {
		t.Fatal(m)
	}
	began := time.Now()
	network, err := netns.New(1, 0)
	must(t, err)
	t.Cleanup(func() { must(t, network.Close()) })
	c := &cluster{bin: bin, dir: t.TempDir(), group: fmt.Sprintf("shoal-test-%d", os.Getpid()), ip: network.Nodes[0].IP}
	c.server, err = s3server.Start(t.Context(), s3server.Options{Dir: t.TempDir()})
	must(t, err)
	t.Cleanup(c.server.Stop)
	listener, err := net.Listen("tcp", network.Host+":0")
	must(t, err)
	c.store, err = proxy.Serve(t.Context(), listener, c.server.URL, proxy.Options{})
	must(t, err)
	t.Cleanup(c.store.Stop)
	c.configure(t)

	script, err := filepath.Abs("testdata/node.sh")
	must(t, err)
	cmd := network.Nodes[0].Command(script, c.dir, bin, c.ip, c.group)
	cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC |
		unix.CLONE_NEWUTS}
	c.node, err = subproc.Start("the cluster", cmd)
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			c.keepLogs(t)
		}
		_ = c.node.Signal(unix.SIGKILL)
		<-c.node.Done()
		c.removeGroups(t)
	})
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	for _, args := range []string{"get --raw /readyz", "get serviceaccount default",
		"wait --for=condition=Ready node/node --timeout=1s"} {
		must(t, c.node.Until(ctx, func(context.Context) error { _, err := c.try(strings.Fields(args)...); return err }))
	}
	t.Logf("the cluster is ready after %.1f s", time.Since(began).Seconds())
	c.images(t)
	t.Logf("its images are there after %.1f s", time.Since(began).Seconds())
	return c
}

// configure writes what the machine's programs are started with.
func (c *cluster) configure(t *testing.T) {
	t.Helper()
	for _, d := range []string{"lib", "log", "cni"} {
		must(t, os.Mkdir(filepath.Join(c.dir, d), 0o755))
	}
	c.authority = certtest.New(t, "cluster")
	c.copyFile(t, c.authority.File, "ca.crt")
	cert, key := c.authority.Issue(t, c.ip, time.Hour)
	c.copyFile(t, cert, "apiserver.crt")
	c.copyFile(t, key, "apiserver.key")
	_, key = c.authority.Issue(t, "accounts", time.Hour)
	c.copyFile(t, key, "accounts.key")

	var tokens strings.Builder
	for _, u := range []struct{ file, user, group string }{
		{"admin", "admin", "system:masters"}, {"manager", "system:kube-controller-manager", ""},
		{"scheduler", "system:kube-scheduler", ""}, {"node", "system:node:node", "system:nodes"},
	} {
		fmt.Fprintf(&tokens, "token-%s,%s,%s,%q\n", u.file, u.user, u.user, u.group)
		c.write(t, u.file+".conf", fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: it, cluster: {server: "https://%s:6443", certificate-authority: %q}}]
users: [{name: it, user: {token: token-%s}}]
contexts: [{name: it, context: {cluster: it, user: it}}]
current-context: it
`, c.ip, filepath.Join(c.dir, "ca.crt"), u.file))
	}
	c.write(t, "tokens.csv", tokens.String())
	subnet := c.ip[:strings.LastIndexByte(c.ip, '.')]
	c.write(t, "cni/pods.conflist", fmt.Sprintf(`{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods", "ipam": {"type": "host-local",
"dataDir": %q, "ranges": [[{"subnet": "%s.0/24", "rangeStart": "%[2]s.100", "rangeEnd": "%[2]s.200", "gateway": %[3]q}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}`,
		filepath.Join(c.dir, "addresses"), subnet, c.ip))
	c.write(t, "containerd.toml", fmt.Sprintf(`version = 2
root = "%[1]s/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "%[2]spause:%[3]s"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "%[1]s/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
`, c.dir, registry, tag))
	c.write(t, "kubelet.yaml", fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: %[1]s
authentication: {anonymous: {enabled: false}, webhook: {enabled: false}, x509: {clientCAFile: %[2]s/ca.crt}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: /%[3]s
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
failSwapOn: false
resolvConf: ""
# The disk is the host's, and may be fuller than a kubelet likes.
evictionHard: {memory.available: 100Mi, nodefs.available: 1Gi, imagefs.available: 1Gi}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
`, c.ip, c.dir, c.group))
}

func (c *cluster) write(t *testing.T, name, text string) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o600))
}

func (c *cluster) copyFile(t *testing.T, from, name string) {
	t.Helper()
	b, err := os.ReadFile(from)
	must(t, err)
	c.write(t, name, string(b))
}

// try runs kubectl.
func (c *cluster) try(args ...string) (string, error) {
	flags := []string{"--kubeconfig", filepath.Join(c.dir, "admin.conf"), "--cache-dir",
		filepath.Join(c.dir, "kubectl")}
	out, err := exec.Command(filepath.Join(c.bin, "kubectl"), append(flags, args...)...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("kubectl %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

func (c *cluster) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.try(args...)
	must(t, err)
	return out
}

// inside runs a program on the machine.
func (c *cluster) inside(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.Command("nsenter",
		append([]string{"-t", fmt.Sprint(c.node.Pid()), "-m", "-n", "-p", "--", program}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// mounts returns those on the machine whose line in mountinfo contains text. Mounts are never touched: their daemons
// may be dead.
func (c *cluster) mounts(t *testing.T, text string) (lines []string) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", c.node.Pid()))
	must(t, err)
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, text) {
			lines = append(lines, line)
		}
	}
	return lines
}

// within waits until the cluster is as ok says.
func (c *cluster) within(t *testing.T, d time.Duration, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(d); !ok(); time.Sleep(100 * time.Millisecond) {
		if err := c.node.Failed(); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			all, _ := c.try("describe", "pods", "--all-namespaces")
			t.Fatalf("not within %s: %s\n%s", d, what, all)
		}
	}
}

func (c *cluster) keepLogs(t *testing.T) {
	events, _ := c.try("get", "events", "--all-namespaces")
	must(t, os.WriteFile(filepath.Join(t.ArtifactDir(), "events"), []byte(events), 0o600))
	must(t, os.CopyFS(filepath.Join(t.ArtifactDir(), "log"), os.DirFS(filepath.Join(c.dir, "log"))))
}

// removeGroups removes the control groups that containers have left, each after those in it.
func (c *cluster) removeGroups(t *testing.T) {
	tops, err := filepath.Glob("/sys/fs/cgroup/*/" + c.group)
	must(t, err)
	var all []string
	for _, top := range tops {
		must(t, filepath.WalkDir(top, func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				all = append(all, p)
			}
			return err
		}))
	}
	for _, p := range slices.Backward(all) {
		// Killed processes leave a moment later.
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			if err = unix.Rmdir(p); !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
				break
			}
		}
		must(t, err)
	}
}

// pod is what the tests look at of a pod.
type pod struct {
	Metadata struct{ Name, UID string }
	Status   struct {
		Phase, Reason, PodIP                     string
		InitContainerStatuses, ContainerStatuses []container
	}
}

type container struct {
	Name, ContainerID string
	Ready             bool
	RestartCount      int
	State             struct {
		Running    *struct{}
		Terminated *struct {
			ExitCode   int
			Reason     string
			FinishedAt time.Time
		}
	}
}

// pods returns those of a namespace that have the label.
func (c *cluster) pods(t *testing.T, namespace, label string) []pod {
	t.Helper()
	var list struct{ Items []pod }
	must(t, json.Unmarshal([]byte(c.kubectl(t, "get", "pods", "-n", namespace, "-l", label, "-o", "json")), &list))
	return list.Items
}

// kill kills a container's first process.
func (c *cluster) kill(t *testing.T, containerID string) {
	t.Helper()
	c.inside(t, "kill", "-KILL", c.pidOf(t, containerID))
}

// pidOf returns a container's first process.
func (c *cluster) pidOf(t *testing.T, containerID string) string {
	t.Helper()
	_, id, _ := strings.Cut(containerID, "://")
	out := c.inside(t, "ctr", "--address", "/run/containerd/containerd.sock", "-n", "k8s.io", "tasks", "ls")
	m := regexp.MustCompile(`(?m)^` + id + ` +(\d+) +RUNNING`).FindStringSubmatch(out)
	if m == nil {
		t.Fatalf("%s does not run:\n%s", id, out)
	}
	return m[1]
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
