package kubernetes

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/shoalfs/shoal/lab/rig/s3server"
)

const (
	driverFolder = "/var/lib/kubelet/plugins/csi.shoalfs.dev"
	driverPods   = "app.kubernetes.io/name=shoal-csi"
)

// csiDriver applies the driver, as docs/kubernetes.md has a user do it, with more of its environment, and waits until
// it runs.
func (c *cluster) csiDriver(t *testing.T, more ...string) {
	t.Helper()
	dir := t.TempDir()
	base, err := filepath.Rel(dir, absolute(t, "../../../deploy/kubernetes/csi"))
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), fmt.Appendf(nil, `resources: [%s]
namespace: shoal-csi
configMapGenerator:
  - name: shoal
    behavior: merge
    literals: ["%s"]
images:
  - {name: %sshoal, newTag: %s}
patches:
  - target: {kind: DaemonSet, name: shoal-csi}
    patch: |-
      - {op: replace, path: /spec/template/spec/containers/0/resources/requests, value: {cpu: 100m}}
      - {op: replace, path: /spec/template/spec/containers/0/args/3, value: --cache-size=1GiB}
`, base, strings.Join(append(more, "AWS_ENDPOINT_URL="+c.store.URL), `", "`), registry, tag), 0o600))
	c.kubectl(t, "apply", "-k", dir)
	c.kubectl(t, "rollout", "status", "daemonset/shoal-csi", "-n", "shoal-csi", "--timeout=3m")
}

// noDriver deletes the driver, which no pod uses any more, and checks that nothing is left.
func (c *cluster) noDriver(t *testing.T) {
	t.Helper()
	if left := strings.TrimSpace(c.inside(t, "ls", driverFolder+"/stages", driverFolder+"/tokens")); left !=
		driverFolder+"/stages:\n\n"+driverFolder+"/tokens:" {
		t.Errorf("the driver has left %s", left)
	}
	c.kubectl(t, "delete", "csidriver", "csi.shoalfs.dev")
	c.gone(t, "shoal-csi", c.pods(t, "shoal-csi", driverPods))
}

// secret makes the Secret of a trainer's volume.
func (c *cluster) secret(t *testing.T, namespace, key string) {
	t.Helper()
	c.kubectl(t, "create", "secret", "generic", "shoal-s3", "-n", namespace,
		"--from-literal=AWS_ACCESS_KEY_ID="+s3server.AccessKey, "--from-literal=AWS_SECRET_ACCESS_KEY="+key)
}

// csiTrainers applies overlays/csi in a namespace, in which every pod must be restricted.
func (c *cluster) csiTrainers(t *testing.T, namespace, bucket, patches string) {
	t.Helper()
	c.kubectl(t, "create", "namespace", namespace)
	c.kubectl(t, "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
	c.secret(t, namespace, s3server.SecretKey)
	dir := t.TempDir()
	base, err := filepath.Rel(dir, absolute(t, "../../../deploy/kubernetes/overlays/csi"))
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), fmt.Appendf(nil, `resources: [%s]
namespace: %s
images: [{name: %strainer, newTag: %s}]
patches:
  - target: {kind: Job}
    patch: |-
      - {op: replace, path: /spec/template/spec/volumes/0/csi/volumeAttributes/source, value: "s3://%s/train"}
      - {op: add, path: /spec/parallelism, value: 2}
      - {op: add, path: /spec/completions, value: 2}
%s`, base, namespace, registry, tag, bucket, patches), 0o600))
	c.kubectl(t, "apply", "-k", dir)
}

// Volumes of Jobs in two namespaces: each pod reads all, and each file is fetched once.
func testCSI(t *testing.T, c *cluster) {
	const size = 30_000
	sums, paths := c.dataset(t, "volume", 240, size)
	before := c.store.Stats()
	c.csiDriver(t)
	began := time.Now()
	for _, team := range teams {
		c.csiTrainers(t, team, "volume", "")
	}
	for _, team := range teams {
		for _, p := range c.complete(t, team) {
			check(t, sums, paths, c.trained(t, team, p.Metadata.Name))
		}
	}
	t.Logf("two Jobs of two pods, from apply to completion: %.1f s", time.Since(began).Seconds())
	if gets := c.store.Stats().Sub(before).Gets; gets > int64(len(sums))+8 { // hedged, a slow GET is sent twice
		t.Errorf("%d GETs for %d files", gets, len(sums))
	}
	c.kubectl(t, "delete", "namespace", teams[0], teams[1], "--timeout=2m")

	// A persistent volume, which a pod has by a claim, with the driver's own keys.
	c.secret(t, "shoal-csi", s3server.SecretKey)
	c.kubectl(t, "rollout", "restart", "daemonset/shoal-csi", "-n", "shoal-csi")
	c.kubectl(t, "rollout", "status", "daemonset/shoal-csi", "-n", "shoal-csi", "--timeout=3m")
	c.kubectl(t, "create", "namespace", "claims")
	c.write(t, "claim.yaml", fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolume
metadata: {name: photos}
spec:
  capacity: {storage: 1Gi} # Kubernetes wants a number; nobody reads it
  accessModes: [ReadOnlyMany]
  storageClassName: ""
  mountOptions: [noexec]
  csi: {driver: csi.shoalfs.dev, volumeHandle: photos, volumeAttributes: {source: "s3://volume/train", order: "torch:seed=7"}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: photos, namespace: claims}
spec: {accessModes: [ReadOnlyMany], storageClassName: "", volumeName: photos, resources: {requests: {storage: 1Gi}}}
---
apiVersion: batch/v1
kind: Job
metadata: {name: train, namespace: claims}
spec:
  template:
    spec:
      restartPolicy: Never
      containers:
        - {name: train, image: "%strainer:%s", command: [python, train.py, --data=/data], volumeMounts: [{name: data, mountPath: /data, readOnly: true}]}
      volumes: [{name: data, persistentVolumeClaim: {claimName: photos, readOnly: true}}]
`, registry, tag))
	c.kubectl(t, "apply", "-f", filepath.Join(c.dir, "claim.yaml"))
	for _, p := range c.complete(t, "claims") {
		check(t, sums, paths, c.trained(t, "claims", p.Metadata.Name))
	}
	c.kubectl(t, "delete", "namespace", "claims", "--timeout=2m")
	c.kubectl(t, "delete", "persistentvolume", "photos")
	c.noDriver(t)
}

// The commands of docs/kubernetes.md, as they stand there, lead from a cluster without Shoal to an epoch.
func testFiveCommands(t *testing.T, c *cluster) {
	page, err := os.ReadFile("../../../docs/kubernetes.md")
	must(t, err)
	block := regexp.MustCompile("(?s)## A volume.*?```sh\n(.*?)```").FindSubmatch(page)
	commands := strings.Split(strings.TrimSpace(string(block[1])), "\n")
	if len(commands) != 5 {
		t.Fatalf("the page has the commands %q", commands)
	}
	sums, paths := c.dataset(t, "photos", 240, 30_000)
	dir := t.TempDir()
	manifests := filepath.Join(dir, "deploy/kubernetes")
	must(t, os.CopyFS(manifests, os.DirFS("../../../deploy/kubernetes")))
	for _, name := range []string{"csi", "overlays/csi"} { // what the page has a user name
		path := filepath.Join(manifests, name, "kustomization.yaml")
		text, err := os.ReadFile(path)
		must(t, err)
		must(t, os.WriteFile(path, []byte(strings.NewReplacer("newTag: latest", "newTag: "+tag,
			"- AWS_REGION=us-east-1", "- AWS_REGION=us-east-1\n      - AWS_ENDPOINT_URL="+c.store.URL).
			Replace(string(text))), 0o600))
	}
	script := fmt.Appendf(nil, "#!/bin/sh\nexec %s --kubeconfig %s/admin.conf --cache-dir %[2]s/kubectl \"$@\"\n",
		filepath.Join(c.bin, "kubectl"), c.dir)
	must(t, os.WriteFile(filepath.Join(dir, "kubectl"), script, 0o700)) //nolint:gosec // it is run
	began := time.Now()
	var out []byte
	for _, command := range commands {
		command = strings.Replace(command, "…", s3server.AccessKey, 1)
		command = strings.Replace(command, "…", s3server.SecretKey, 1)
		cmd := exec.Command("sh", "-c", command)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		if out, err = cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", command, err, out)
		}
	}
	check(t, sums, paths, parse(string(out)))
	t.Logf("from an empty cluster to an epoch: %.1f s", time.Since(began).Seconds())
	c.kubectl(t, "delete", "job", "train", "--timeout=2m")
	c.kubectl(t, "delete", "secret", "shoal-s3")
	c.within(t, time.Minute, "no volume is left", func() bool { return len(c.mounts(t, "fuse.shoal")) == 0 })
	c.noDriver(t)
}

// The driver is killed, and then updated, while trainers are in mid-epoch: they see nothing of it.
func testCSIReplaced(t *testing.T, c *cluster) {
	sums, paths := c.dataset(t, "volume2", 240, 30_000)
	c.csiDriver(t)
	c.csiTrainers(t, teams[0], "volume2", `
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --half=100}
`)
	waiting := c.half(t, teams[0])
	began := time.Now()
	c.kill(t, c.pods(t, "shoal-csi", driverPods)[0].Status.ContainerStatuses[0].ContainerID)
	c.goOn(t, teams[0], waiting[0]) // reads while there is no driver
	c.within(t, time.Minute, "the driver runs again", func() bool {
		s := c.pods(t, "shoal-csi", driverPods)[0].Status.ContainerStatuses[0]
		return s.RestartCount == 1 && s.Ready
	})
	t.Logf("the killed driver was ready again after %.1f s", time.Since(began).Seconds())
	c.kubectl(t, "rollout", "restart", "daemonset/shoal-csi", "-n", "shoal-csi")
	c.goOn(t, teams[0], waiting[1])
	c.kubectl(t, "rollout", "status", "daemonset/shoal-csi", "-n", "shoal-csi", "--timeout=3m")
	for _, p := range c.complete(t, teams[0]) {
		lines := c.trained(t, teams[0], p.Metadata.Name)
		check(t, sums, paths, lines)
		if p.Status.ContainerStatuses[0].RestartCount != 0 || !strings.HasPrefix(failures(lines), "0 ") {
			t.Errorf("%s: %s", p.Metadata.Name, failures(lines))
		}
		t.Logf("%s: %s, the longest read took %.2f s", p.Metadata.Name, failures(lines), slowest(lines))
	}
	c.kubectl(t, "delete", "namespace", teams[0], "--timeout=2m")
	c.noDriver(t)
}

// The driver is killed and updated, and then the kubelet and containerd are killed, again and again and at random
// moments, while three pods read on: none gets an error or another byte.
func testCSIShaken(t *testing.T, c *cluster) {
	rounds, kills := 2, 2
	if os.Getenv("SHOAL_KUBERNETES_KILLS") == "100" {
		rounds, kills = 50, 20
	}
	const readers = 3
	sums, paths := c.dataset(t, "volume5", 240, 30_000)
	c.csiDriver(t)
	c.csiTrainers(t, teams[0], "volume5", fmt.Sprintf(`
      - {op: replace, path: /spec/parallelism, value: 3}
      - {op: replace, path: /spec/completions, value: 3}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --readers=%d}
`, readers))
	pods := c.half(t, teams[0])
	began := time.Now()
	for range rounds {
		time.Sleep(rand.N(2 * time.Second)) // a random moment of the readers
		// The kubelet starts a container again at once only if that is the first time: so each pod has it once.
		c.kill(t, c.pods(t, "shoal-csi", driverPods)[0].Status.ContainerStatuses[0].ContainerID)
		c.within(t, time.Minute, "the driver runs again", func() bool {
			s := c.pods(t, "shoal-csi", driverPods)[0].Status.ContainerStatuses[0]
			return s.RestartCount == 1 && s.Ready
		})
		time.Sleep(rand.N(2 * time.Second))
		c.kubectl(t, "rollout", "restart", "daemonset/shoal-csi", "-n", "shoal-csi")
		c.kubectl(t, "rollout", "status", "daemonset/shoal-csi", "-n", "shoal-csi", "--timeout=3m")
	}
	t.Logf("%d kills and %[1]d updates of the driver in %.0f s", rounds, time.Since(began).Seconds())
	began = time.Now()
	for range kills {
		time.Sleep(rand.N(2 * time.Second))
		killed := time.Now()
		c.inside(t, "pkill", "-KILL", "-x", "kubelet")
		c.within(t, time.Minute, "the kubelet runs again", func() bool {
			renewed, err := time.Parse(time.RFC3339, c.kubectl(t, "get", "lease", c.name, "-n", "kube-node-lease", "-o",
				"jsonpath={.spec.renewTime}"))
			return err == nil && renewed.After(killed)
		})
		time.Sleep(rand.N(2 * time.Second))
		c.inside(t, "pkill", "-KILL", "-x", "containerd")
		c.within(t, time.Minute, "containerd runs again", func() bool {
			return c.inside(t, "sh", "-c", "ctr --address /run/containerd/containerd.sock version >/dev/null 2>&1 && "+
				"echo yes || true") != ""
		})
	}
	t.Logf("%d kills of the kubelet and %[1]d of containerd in %.0f s", kills, time.Since(began).Seconds())
	for _, pod := range pods { // the kubelet may not know it again yet
		c.within(t, time.Minute, pod+" hears that it is to stop", func() bool {
			_, err := c.try("exec", "-n", teams[0], pod, "-c", "train", "--", "python", "-c", "open('/tmp/stop', 'w')")
			return err == nil
		})
	}
	for _, p := range c.complete(t, teams[0]) {
		lines := c.trained(t, teams[0], p.Metadata.Name)
		check(t, sums, paths, lines)
		if p.Status.ContainerStatuses[0].RestartCount != 0 || !strings.HasPrefix(failures(lines), "0 ") {
			t.Errorf("%s: %s", p.Metadata.Name, failures(lines))
		}
		t.Logf("%s: %d reads, %s, the longest took %.2f s", p.Metadata.Name, lines[len(lines)-1].Done,
			failures(lines), slowest(lines))
	}
	c.kubectl(t, "delete", "namespace", teams[0], "--timeout=2m")
	c.noDriver(t)
}

// From kubectl apply to the first bytes of a warm volume, beside a folder of the node.
func testCSIFirstByte(t *testing.T, c *cluster) {
	c.dataset(t, "volume6", 8, 30_000)
	c.csiDriver(t)
	c.kubectl(t, "create", "namespace", "first")
	c.secret(t, "first", s3server.SecretKey)
	folder := t.TempDir()
	must(t, os.WriteFile(filepath.Join(folder, "a"), make([]byte, 30_000), 0o600))
	volumes := map[string]string{
		"csi": `csi: {driver: csi.shoalfs.dev, readOnly: true, volumeAttributes: {source: "s3://volume6/train"}, ` +
			`nodePublishSecretRef: {name: shoal-s3}}`,
		"folder": "hostPath: {path: " + folder + "}",
	}
	took := map[string][]float64{}
	for round := range 6 { // the first one warms, and does not count
		for name, volume := range volumes {
			c.write(t, "first.yaml", fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: first}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 0
  containers:
    - {name: train, image: "%strainer:%s", command: [python, train.py, --data=/data],
       volumeMounts: [{name: data, mountPath: /data}]}
  volumes: [{name: data, %s}]
`, name, registry, tag, volume))
			began := time.Now()
			c.kubectl(t, "apply", "-f", filepath.Join(c.dir, "first.yaml"))
			var log string
			c.within(t, time.Minute, name+" has read a file", func() bool {
				log, _ = c.try("logs", "-n", "first", name)
				return strings.Contains(log, `"sha"`)
			})
			if round > 0 {
				took[name] = append(took[name], time.Since(began).Seconds())
			}
			c.kubectl(t, "delete", "pod", name, "-n", "first", "--timeout=1m")
		}
	}
	for name, seconds := range took {
		slices.Sort(seconds)
		t.Logf("from apply to the first file, %s: median %.2f s, %.2f to %.2f", name, seconds[len(seconds)/2],
			seconds[0], seconds[len(seconds)-1])
	}
	c.kubectl(t, "delete", "namespace", "first", "--timeout=2m")
	c.noDriver(t)
}

// What is wrong with a volume is an event of the pod within ten seconds, and nothing is mounted.
func testCSIBad(t *testing.T, c *cluster) {
	c.dataset(t, "volume3", 8, 1000)
	c.csiDriver(t)
	c.kubectl(t, "create", "namespace", "bad")
	c.secret(t, "bad", "wrong")
	for i, row := range []struct{ attributes, secret, says string }{
		{`{source: "s3://volume3/train"}`, "", "no credentials"},
		{`{source: "s3://volume3/train"}`, "shoal-s3",
			"SignatureDoesNotMatch.*check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"},
		{`{source: "s3://volume3/train", sauce: x}`, "", `attribute \\?"sauce\\?" is unknown \(there are source`},
		{`{source: "file:///etc"}`, "", "give s3://BUCKET/PREFIX"},
		{`{source: "s3://volume3/train", memory: "7MiB"}`, "", "--memory 7.0 MiB: another value is in force"},
	} {
		c.refused(t, "bad", fmt.Sprint("bad", i), row.attributes, row.secret, row.says)
	}
	if left := c.mounts(t, "fuse.shoal"); len(left) > 0 {
		t.Errorf("mounted: %s", left)
	}
	c.kubectl(t, "delete", "namespace", "bad", "--timeout=2m")
	c.noDriver(t)
}

// refused applies a pod with a volume, and waits until an event of the pod says what is wrong with it.
func (c *cluster) refused(t *testing.T, namespace, name, attributes, secret, wrong string) {
	t.Helper()
	if secret != "" {
		secret = ", nodePublishSecretRef: {name: " + secret + "}"
	}
	c.write(t, "bad.yaml", fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: %s}
spec:
  containers: [{name: train, image: "%strainer:%s", command: [python], volumeMounts: [{name: data, mountPath: /data}]}]
  volumes: [{name: data, csi: {driver: csi.shoalfs.dev, readOnly: true, volumeAttributes: %s%s}}]
`, name, namespace, registry, tag, attributes, secret))
	began := time.Now()
	c.kubectl(t, "apply", "-f", filepath.Join(c.dir, "bad.yaml"))
	var says string
	c.within(t, 10*time.Second, name+" has an event: "+wrong, func() bool {
		says = c.kubectl(t, "get", "events", "-n", namespace,
			"--field-selector=involvedObject.name="+name+",reason=FailedMount", "-o", "jsonpath={.items[*].message}")
		return regexp.MustCompile(wrong).MatchString(says)
	})
	t.Logf("after %.1f s: %s", time.Since(began).Seconds(), says)
}

// What the node lacks is an event of the pod, too: /dev/fuse, and room for the cache. Once it is there, the pods run.
func testCSILacks(t *testing.T, c *cluster) {
	const cache, attributes = "/var/lib/shoal/cache", `{source: "s3://volume7/train"}`
	c.dataset(t, "volume7", 8, 1000)
	c.inside(t, "mkdir", "-p", cache)
	c.inside(t, "mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", cache)
	c.csiDriver(t)
	c.kubectl(t, "create", "namespace", "lacks")
	c.secret(t, "lacks", s3server.SecretKey)
	running := func(name string) {
		t.Helper()
		c.within(t, 5*time.Minute, name+" runs", func() bool {
			return c.kubectl(t, "get", "pod", name, "-n", "lacks", "-o", "jsonpath={.status.phase}") == "Running"
		})
	}

	c.inside(t, "sh", "-c", "head -c 1G /dev/zero >"+cache+"/full || true")
	c.refused(t, "lacks", "room", attributes, "shoal-s3", "no space left on device.*(free space|make room)")
	c.inside(t, "rm", cache+"/full")
	running("room")

	driver := c.pods(t, "shoal-csi", driverPods)[0].Status.ContainerStatuses[0].ContainerID
	device := "/proc/" + c.pidOf(t, driver) + "/root/dev/fuse"
	c.inside(t, "mv", device, device+"0")
	c.refused(t, "lacks", "device", `{source: "s3://volume7/train", order: "torch:seed=7"}`, "shoal-s3",
		"/dev/fuse: no such file or directory.*modprobe fuse")
	c.inside(t, "mv", device+"0", device)
	running("device")

	c.kubectl(t, "delete", "namespace", "lacks", "--timeout=2m")
	if left := c.mounts(t, "fuse.shoal"); len(left) > 0 {
		t.Errorf("mounted: %s", left)
	}
	c.noDriver(t)
	c.inside(t, "umount", cache)
}

// Pods with volumes come and go, twenty at a time, and nothing is left of them.
func testCSIMany(t *testing.T, c *cluster) {
	c.dataset(t, "volume4", 8, 1000)
	c.csiDriver(t)
	c.kubectl(t, "create", "namespace", "many")
	c.secret(t, "many", s3server.SecretKey)
	process := func() (files, kib int) {
		pid := c.pidOf(t, c.pods(t, "shoal-csi", driverPods)[0].Status.ContainerStatuses[0].ContainerID)
		_, _ = fmt.Sscan(c.inside(t, "sh", "-c", "ls /proc/"+pid+"/fd | wc -l"), &files)
		_, _ = fmt.Sscan(c.inside(t, "sh", "-c", "awk '/VmRSS/{print $2}' /proc/"+pid+"/status"), &kib)
		return files, kib
	}
	rounds, atOnce := 3, 20
	if os.Getenv("SHOAL_KUBERNETES_PODS") == "200" {
		rounds = 10
	}
	first, memory := 0, 0
	began := time.Now()
	for round := range rounds {
		var all strings.Builder
		for i := range atOnce {
			fmt.Fprintf(&all, `---
apiVersion: v1
kind: Pod
metadata: {name: p%d-%d, namespace: many}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 0
  containers: [{name: train, image: "%strainer:%s", command: [python, train.py, --data=/data], volumeMounts: [{name: data, mountPath: /data}]}]
  volumes: [{name: data, csi: {driver: csi.shoalfs.dev, readOnly: true, volumeAttributes: {source: "s3://volume4/train", order: "torch:seed=%d"}, nodePublishSecretRef: {name: shoal-s3}}}]
`, round, i, registry, tag, i%4)
		}
		c.write(t, "many.yaml", all.String())
		c.kubectl(t, "apply", "-f", filepath.Join(c.dir, "many.yaml"))
		c.within(t, 5*time.Minute, "the pods have read everything", func() bool {
			return strings.Count(c.kubectl(t, "get", "pods", "-n", "many", "-o", "jsonpath={.items[*].status.phase}"),
				"Succeeded") == atOnce
		})
		c.kubectl(t, "delete", "pods", "--all", "-n", "many", "--timeout=2m")
		c.within(t, time.Minute, "no volume is left", func() bool { return len(c.mounts(t, "fuse.shoal")) == 0 })
		files, kib := process()
		if round == 0 {
			first, memory = files, kib
		}
		t.Logf("%d pods: %d files open, %d KiB", (round+1)*atOnce, files, kib)
		if files > first+5 {
			t.Errorf("%d files are open, where there were %d after the first round", files, first)
		}
	}
	_, kib := process()
	t.Logf("%d pods in %.0f s; the driver's memory grew by %d KiB since the first %d",
		rounds*atOnce, time.Since(began).Seconds(), kib-memory, atOnce)
	c.kubectl(t, "delete", "namespace", "many", "--timeout=2m")
	c.noDriver(t)
}

// The community's own suite, against the driver in its pod.
func testCSISanity(t *testing.T, c *cluster) {
	c.dataset(t, "sanity", 8, 1000)
	c.csiDriver(t)
	l, err := net.Listen("unix", filepath.Join(c.dir, "controller.sock"))
	must(t, err)
	s := grpc.NewServer()
	csi.RegisterControllerServer(s, provisioner{})
	csi.RegisterIdentityServer(s, provisioner{})
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.Serve(l) })
	defer func() { s.Stop(); serving.Wait() }()
	c.write(t, "secrets.yaml", fmt.Sprintf(
		"NodePublishVolumeSecret: {AWS_ACCESS_KEY_ID: %s, AWS_SECRET_ACCESS_KEY: %s}\n", s3server.AccessKey,
		s3server.SecretKey))
	out := c.inside(t, filepath.Join(c.bin, "csi-sanity"), "--csi.endpoint=unix://"+driverFolder+"/csi.sock",
		"--csi.controllerendpoint=unix://"+filepath.Join(c.dir, "controller.sock"),
		"--csi.mountdir=/var/lib/kubelet/sanity-mount", "--csi.stagingdir=/var/lib/kubelet/sanity-stage",
		"--csi.secrets="+filepath.Join(c.dir, "secrets.yaml"),
		"--ginkgo.skip=Controller Server", "--ginkgo.no-color")
	for line := range strings.Lines(out) {
		if strings.Contains(line, "Passed") || strings.Contains(line, "[FAIL") {
			t.Log(strings.TrimSpace(line))
		}
	}
	c.noDriver(t)
}

// provisioner gives the suite volumes. The driver has none to give: they are written by users.
type provisioner struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedIdentityServer
}

func (provisioner) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: "provisioner.example.org", VendorVersion: "1"}, nil
}

func (provisioner) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (
	*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{}, nil
}

func (provisioner) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}

func (provisioner) CreateVolume(_ context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	return &csi.CreateVolumeResponse{
		Volume: &csi.Volume{VolumeId: r.GetName(), CapacityBytes: r.GetCapacityRange().GetRequiredBytes(),
			VolumeContext: map[string]string{"source": "s3://sanity/train",
				"csi.storage.k8s.io/ephemeral": "true"}}}, nil
}

func (provisioner) DeleteVolume(context.Context, *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	return &csi.DeleteVolumeResponse{}, nil
}

func (provisioner) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (
	*csi.ControllerGetCapabilitiesResponse, error) {
	return &csi.ControllerGetCapabilitiesResponse{}, nil
}

// slowest returns how many seconds the longest read took.
func slowest(lines []line) (most float64) {
	for _, l := range lines {
		most = max(most, l.Took)
	}
	return most
}
