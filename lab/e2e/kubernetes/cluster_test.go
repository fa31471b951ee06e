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
	machine   // with the control plane
	bin       string
	network   *netns.Net
	authority *certtest.Authority
	server    *s3server.Server
	store     *proxy.Proxy // the server, as pods reach it
	archives  []string     // the images
}

// machine is a node of the cluster, in namespaces of its own.
type machine struct {
	name, dir, group, ip string
	node                 *subproc.Proc
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
	network, err := netns.New(2, 0)
	must(t, err)
	t.Cleanup(func() { must(t, network.Close()) })
	c := &cluster{bin: bin, network: network}
	c.machine = c.newMachine(t, 0)
	c.server, err = s3server.Start(t.Context(), s3server.Options{Dir: t.TempDir(), Accounts: true})
	must(t, err)
	t.Cleanup(c.server.Stop)
	listener, err := net.Listen("tcp", network.Host+":0")
	must(t, err)
	c.store, err = proxy.Serve(t.Context(), listener, c.server.URL, proxy.Options{})
	must(t, err)
	t.Cleanup(c.store.Stop)
	c.names(t)
	c.configure(t)

	c.boot(t, &c.machine, 0)
	c.until(t, &c.machine, "get --raw /readyz", "get serviceaccount default")
	c.until(t, &c.machine, "wait --for=condition=Ready node/node0 --timeout=1s")
	t.Logf("the cluster is ready after %.1f s", time.Since(began).Seconds())
	c.images(t)
	t.Logf("its images are there after %.1f s", time.Since(began).Seconds())
	return c
}

func (c *cluster) newMachine(t *testing.T, number int) machine {
	return machine{name: fmt.Sprint("node", number), dir: t.TempDir(), ip: c.network.Nodes[number].IP,
		group: fmt.Sprintf("shoal-test-%d-%d", os.Getpid(), number)}
}

// boot starts a machine.
func (c *cluster) boot(t *testing.T, m *machine, number int) {
	t.Helper()
	cmd := c.network.Nodes[number].Command(absolute(t, "testdata/node.sh"), m.dir, c.bin, m.ip, m.group, m.name)
	cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC |
		unix.CLONE_NEWUTS}
	var err error
	m.node, err = subproc.Start(m.name, cmd)
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			c.keepLogs(t, m)
		}
		_ = m.node.Signal(unix.SIGKILL)
		<-m.node.Done()
		m.removeGroups(t)
	})
}

// until waits until all of these succeed.
func (c *cluster) until(t *testing.T, m *machine, commands ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	for _, args := range commands {
		must(t, m.node.Until(ctx, func(context.Context) error { _, err := c.try(strings.Fields(args)...); return err }))
	}
}

// join adds another machine, which only runs pods.
func (c *cluster) join(t *testing.T) *machine {
	t.Helper()
	m := c.newMachine(t, 1)
	c.describe(t, &m, 1)
	c.boot(t, &m, 1)
	c.until(t, &m, "wait --for=condition=Ready node/"+m.name+" --timeout=1s")
	c.imports(t, &m)
	return &m
}

// configure writes what the first machine's programs are started with.
func (c *cluster) configure(t *testing.T) {
	t.Helper()
	c.authority = certtest.New(t, "cluster")
	cert, key := c.authority.Issue(t, c.ip, time.Hour)
	c.copyFile(t, cert, "apiserver.crt")
	c.copyFile(t, key, "apiserver.key")
	_, key = c.authority.Issue(t, "accounts", time.Hour)
	c.copyFile(t, key, "accounts.key")

	var tokens strings.Builder
	for _, u := range []struct{ file, user, group string }{
		{"admin", "admin", "system:masters"}, {"manager", "system:kube-controller-manager", ""},
		{"scheduler", "system:kube-scheduler", ""}, {"node0", "system:node:node0", "system:nodes"},
		{"node1", "system:node:node1", "system:nodes"},
	} {
		fmt.Fprintf(&tokens, "token-%s,%s,%s,%q\n", u.file, u.user, u.user, u.group)
		c.kubeconfig(t, &c.machine, u.file)
	}
	c.write(t, "tokens.csv", tokens.String())
	c.describe(t, &c.machine, 0)
}

func (c *cluster) kubeconfig(t *testing.T, m *machine, user string) {
	t.Helper()
	m.write(t, user+".conf", fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: it, cluster: {server: "https://%s:6443", certificate-authority: %q}}]
users: [{name: it, user: {token: token-%s}}]
contexts: [{name: it, context: {cluster: it, user: it}}]
current-context: it
`, c.ip, c.authority.File, user))
}

// describe writes what the kubelet and containerd of a machine are started with.
func (c *cluster) describe(t *testing.T, m *machine, number int) {
	t.Helper()
	for _, d := range []string{"lib", "log", "cni"} {
		must(t, os.Mkdir(filepath.Join(m.dir, d), 0o755))
	}
	m.copyFile(t, c.authority.File, "ca.crt")
	c.kubeconfig(t, m, m.name)
	subnet, first := m.ip[:strings.LastIndexByte(m.ip, '.')], 100+60*number
	m.write(t, "cni/pods.conflist", fmt.Sprintf(`{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods", "ipam": {"type": "host-local",
"dataDir": %q, "ranges": [[{"subnet": "%s.0/24", "rangeStart": "%[2]s.%[4]d", "rangeEnd": "%[2]s.%[5]d", "gateway": %[3]q}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}`,
		filepath.Join(m.dir, "addresses"), subnet, m.ip, first, first+59))
	m.write(t, "containerd.toml", fmt.Sprintf(`version = 2
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
`, m.dir, registry, tag))
	m.write(t, "kubelet.yaml", fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: %[1]s
authentication: {anonymous: {enabled: false}, webhook: {enabled: false}, x509: {clientCAFile: %[2]s/ca.crt}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: /%[3]s
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
failSwapOn: false
resolvConf: ""
clusterDNS: [%[4]s]
clusterDomain: cluster.local
volumeStatsAggPeriod: 10s # how soon it sees that a pod's cache is too large
# The disk is the host's, and may be fuller than a kubelet likes.
evictionHard: {memory.available: 100Mi, nodefs.available: 1Gi, imagefs.available: 1Gi}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
`, m.ip, m.dir, m.group, c.network.Host))
}

func (m *machine) write(t *testing.T, name, text string) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(m.dir, name), []byte(text), 0o600))
}

func (m *machine) copyFile(t *testing.T, from, name string) {
	t.Helper()
	b, err := os.ReadFile(from)
	must(t, err)
	m.write(t, name, string(b))
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
func (m *machine) inside(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.Command("nsenter",
		append([]string{"-t", fmt.Sprint(m.node.Pid()), "-m", "-n", "-p", "--", program}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// mounts returns those on the machine whose line in mountinfo contains text. Mounts are never touched: their daemons
// may be dead.
func (m *machine) mounts(t *testing.T, text string) (lines []string) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", m.node.Pid()))
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

func (c *cluster) keepLogs(t *testing.T, m *machine) {
	events, _ := c.try("get", "events", "--all-namespaces")
	must(t, os.WriteFile(filepath.Join(t.ArtifactDir(), "events"), []byte(events), 0o600))
	must(t, os.CopyFS(filepath.Join(t.ArtifactDir(), m.name), os.DirFS(filepath.Join(m.dir, "log"))))
}

// removeGroups removes the control groups that containers have left, each after those in it.
func (m *machine) removeGroups(t *testing.T) {
	tops, err := filepath.Glob("/sys/fs/cgroup/*/" + m.group)
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
	Spec     struct{ NodeName string }
	Status   struct {
		Phase, Reason, PodIP                     string
		InitContainerStatuses, ContainerStatuses []container
	}
}

type container struct {
	Name, ContainerID string
	Ready             bool
	RestartCount      int
	State, LastState  struct {
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
func (m *machine) kill(t *testing.T, containerID string) {
	t.Helper()
	m.inside(t, "kill", "-KILL", m.pidOf(t, containerID))
}

// oom has the kernel kill a container's first process for want of memory: another process takes all that the container
// may have, in the first one's namespace, and so ends with it.
func (m *machine) oom(t *testing.T, containerID string) {
	t.Helper()
	m.inside(t, "sh", "-c", `
echo 1000 >/proc/$0/oom_score_adj # of the two it is the one to kill
group=$(sed -n 's/^[0-9]*:memory://p' /proc/$0/cgroup)
nsenter -t $0 -p python3 -c 'import sys
open(f"/sys/fs/cgroup/memory{sys.argv[1]}/cgroup.procs", "w").write("0")
taken = [b"x" * (1 << 20) for _ in range(1024)]' "$group" || true`, m.pidOf(t, containerID))
}

// evict evicts a pod, as kubectl drain does.
func (c *cluster) evict(t *testing.T, namespace, pod string) {
	t.Helper()
	c.write(t, "eviction.json", fmt.Sprintf(
		`{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": %q, "namespace": %q}}`, pod, namespace))
	c.kubectl(t, "create", "--raw", "/api/v1/namespaces/"+namespace+"/pods/"+pod+"/eviction", "-f",
		filepath.Join(c.dir, "eviction.json"))
}

// pidOf returns a container's first process.
func (m *machine) pidOf(t *testing.T, containerID string) string {
	t.Helper()
	_, id, _ := strings.Cut(containerID, "://")
	out := m.inside(t, "ctr", "--address", "/run/containerd/containerd.sock", "-n", "k8s.io", "tasks", "ls")
	running := regexp.MustCompile(`(?m)^` + id + ` +(\d+) +RUNNING`).FindStringSubmatch(out)
	if running == nil {
		t.Fatalf("%s does not run:\n%s", id, out)
	}
	return running[1]
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
