package kubernetes

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// dataset puts files of seeded content into a bucket, and returns their sums by path, and the paths as they are sorted:
// a sample's number in a feed is its place there.
func (c *cluster) dataset(t *testing.T, bucket string, count, size int) (sums map[string]string, paths []string) {
	t.Helper()
	dir, sums := t.TempDir(), map[string]string{}
	rng := rand.NewChaCha8([32]byte{'p', 'o', 'd'})
	data := make([]byte, size)
	for i := range count {
		_, _ = rng.Read(data) // never fails
		path := fmt.Sprintf("class%d/img%04d.jpg", i%4, i)
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755))
		must(t, os.WriteFile(filepath.Join(dir, path), data, 0o600))
		sum := sha256.Sum256(data)
		sums[path], paths = hex.EncodeToString(sum[:]), append(paths, path)
	}
	slices.Sort(paths)
	_, err := c.server.Upload(t.Context(), dir, bucket, "train", nil)
	must(t, err)
	return sums, paths
}

// small is what the test's machine lacks of what the manifests ask for: processors, and a disk for the cache.
const small = `
  - target: {kind: Job}
    patch: |-
      - {op: replace, path: /spec/template/spec/initContainers/%d/resources/requests/cpu, value: 100m}
      - {op: replace, path: /spec/template/spec/initContainers/%[1]d/args/4, value: --cache-size=1GiB}
`

// apply makes an overlay of one of ours, as docs/kubernetes.md has a user write it, with the bucket's keys, and applies
// it.
func (c *cluster) apply(t *testing.T, overlay, namespace, bucket, patches string) {
	t.Helper()
	dir := t.TempDir()
	base, err := filepath.Rel(dir, absolute(t, "../../../deploy/kubernetes/"+overlay))
	must(t, err)
	if _, err := c.try("create", "namespace", namespace); err != nil && !strings.Contains(err.Error(),
		"AlreadyExists") {
		t.Fatal(err)
	}
	c.kubectl(t, "create", "secret", "generic", "shoal-s3", "-n", namespace,
		"--from-literal=AWS_ACCESS_KEY_ID="+s3server.AccessKey, "--from-literal=AWS_SECRET_ACCESS_KEY="+
			s3server.SecretKey)
	must(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), fmt.Appendf(nil, `resources: [%s]
namespace: %s
configMapGenerator:
  - name: shoal
    behavior: merge
    literals: ["DATASET=s3://%s/train", "AWS_ENDPOINT_URL=%s"]
images:
  - {name: %sshoal, newTag: %s}
  - {name: %[5]strainer, newTag: %[6]s}
patches:%s`, base, namespace, bucket, c.store.URL, registry, tag, patches), 0o600))
	c.kubectl(t, "apply", "-k", dir)
}

// line is one that the trainer prints.
type line struct {
	Name  any
	SHA   string
	Half  int
	Done  int
	Took  float64 // seconds
	Error string
}

func (c *cluster) trained(t *testing.T, namespace, pod string) (lines []line) {
	t.Helper()
	return parse(c.kubectl(t, "logs", "-n", namespace, pod, "-c", "train"))
}

func parse(log string) (lines []line) {
	for text := range strings.Lines(log) {
		var l line
		if json.Unmarshal([]byte(text), &l) == nil {
			lines = append(lines, l)
		}
	}
	return lines
}

// check compares what trainers have read with the dataset: every file once, with its bytes.
func check(t *testing.T, sums map[string]string, paths []string, lines []line) {
	t.Helper()
	read := map[string]int{}
	for _, l := range lines {
		if l.SHA == "" {
			continue
		}
		path, ok := l.Name.(string)
		if number, is := l.Name.(float64); is {
			path, ok = paths[int(number)], true
		}
		if read[path]++; !ok || l.SHA != sums[path] || read[path] > 1 {
			t.Errorf("%v was read as %s, %d times; it is %s", l.Name, l.SHA, read[path], sums[path])
		}
	}
	if len(read) != len(sums) {
		t.Errorf("%d files of %d were read", len(read), len(sums))
	}
}

// complete waits until the Job of a namespace has completed, and returns its pods.
func (c *cluster) complete(t *testing.T, namespace string) []pod {
	t.Helper()
	var state string
	c.within(t, 3*time.Minute, "the job completes", func() bool {
		state = c.kubectl(t, "get", "jobs", "-n", namespace, "-o", "jsonpath={.items[*].status.conditions[*].type}")
		return state != ""
	})
	pods := c.pods(t, namespace, ofJob)
	if state != "Complete" {
		for _, p := range pods {
			logs, _ := c.try("logs", "-n", namespace, p.Metadata.Name, "--all-containers", "--prefix", "--tail=30")
			t.Logf("%s", logs)
		}
		t.Fatalf("the job: %s", state)
	}
	return pods
}

// gone deletes a namespace with all that is in it, and checks that the machine has nothing of its pods.
func (c *cluster) gone(t *testing.T, namespace string, pods []pod) {
	t.Helper()
	c.kubectl(t, "delete", "namespace", namespace, "--timeout=2m")
	for _, p := range pods {
		if left := c.mounts(t, p.Metadata.UID); len(left) > 0 {
			t.Errorf("mounts of %s are left:\n%s", p.Metadata.Name, left)
		}
	}
	if left := c.mounts(t, "fuse.shoal"); len(left) > 0 {
		t.Errorf("mounts are left:\n%s", left)
	}
}

// succeeded checks what a completed pod says: its sidecars ended in good order, the one named shoal after so many
// restarts.
func succeeded(t *testing.T, p pod, sidecars, restarts int) {
	t.Helper()
	if p.Status.Phase != "Succeeded" || len(p.Status.InitContainerStatuses) != sidecars {
		t.Errorf("%+v", p)
	}
	for _, s := range p.Status.InitContainerStatuses {
		want := 0
		if s.Name == "shoal" {
			want = restarts
		}
		if e := s.State.Terminated; e == nil {
			t.Fatalf("the sidecar %s runs: %+v", s.Name, s)
		} else if e.ExitCode != 0 || s.RestartCount != want {
			t.Errorf("the sidecar %s: %+v", s.Name, s)
		}
	}
	// They are started in their order, and stopped in the other one.
	if !slices.IsSortedFunc(p.Status.InitContainerStatuses, func(a, b container) int {
		return b.State.Terminated.FinishedAt.Compare(a.State.Terminated.FinishedAt)
	}) {
		t.Errorf("the sidecars ended in the wrong order: %+v", p.Status.InitContainerStatuses)
	}
}

// ofJob is a label of the pods of all Jobs. A namespace of these tests has one Job.
const ofJob = "job-name"

// sidecars are the overlays with a sidecar.
var sidecars = []struct {
	name, overlay string
	count         int    // of sidecars
	doctor        string // what shoal doctor finds in it
}{
	{"feed", "overlays/feed-only", 1, `fail +fuse/device +/dev/fuse`},
	{"mount", "overlays/mount", 2, `ok +fuse/mounts +1 of`},
}

// The Jobs of the manifests: the trainer has read everything and ends, the sidecars end in good order, the Job
// completes, and nothing is left mounted.
func testJob(t *testing.T, c *cluster) {
	sums, paths := c.dataset(t, "job", 240, 30_000)
	for _, row := range sidecars {
		t.Run(row.name, func(t *testing.T) {
			began, namespace := time.Now(), "job-"+row.name
			c.apply(t, row.overlay, namespace, "job", fmt.Sprintf(small, row.count-1))
			pods := c.complete(t, namespace)
			t.Logf("from apply to completion: %.1f s", time.Since(began).Seconds())
			if len(pods) != 1 {
				t.Fatalf("%+v", pods)
			}
			succeeded(t, pods[0], row.count, 0)
			check(t, sums, paths, c.trained(t, namespace, pods[0].Metadata.Name))
			c.gone(t, namespace, pods)
		})
	}
}

// An indexed Job of two pods: together they read an epoch, each its part.
func testIndexed(t *testing.T, c *cluster) {
	sums, paths := c.dataset(t, "indexed", 240, 30_000)
	for _, row := range sidecars {
		t.Run(row.name, func(t *testing.T) {
			namespace := "indexed-" + row.name
			c.apply(t, row.overlay, namespace, "indexed", fmt.Sprintf(small, row.count-1)+`
  - target: {kind: Job}
    patch: |-
      - {op: add, path: /spec/parallelism, value: 2}
      - {op: add, path: /spec/completions, value: 2}
      - {op: add, path: /spec/completionMode, value: Indexed}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --world=2}
`)
			pods := c.complete(t, namespace)
			if len(pods) != 2 {
				t.Fatalf("%+v", pods)
			}
			var all []line
			for _, p := range pods {
				succeeded(t, p, row.count, 0)
				lines := c.trained(t, namespace, p.Metadata.Name)
				if n := lines[len(lines)-1].Done; n != len(sums)/2 {
					t.Errorf("%s has read %d files of %d", p.Metadata.Name, n, len(sums))
				}
				all = append(all, lines...)
			}
			check(t, sums, paths, all)
			c.gone(t, namespace, pods)
		})
	}
}

// half waits until all trainers of a Job wait in mid-epoch (--half), and returns their pods' names.
func (c *cluster) half(t *testing.T, namespace string) (names []string) {
	t.Helper()
	waits := func(p pod) bool {
		return len(p.Status.ContainerStatuses) == 1 && p.Status.ContainerStatuses[0].State.Running != nil &&
			slices.ContainsFunc(c.trained(t, namespace, p.Metadata.Name), func(l line) bool { return l.Half > 0 })
	}
	var pods []pod
	c.within(t, 3*time.Minute, "the trainers are in mid-epoch", func() bool {
		pods = c.pods(t, namespace, ofJob)
		return len(pods) > 0 && !slices.ContainsFunc(pods, func(p pod) bool { return !waits(p) })
	})
	for _, p := range pods {
		names = append(names, p.Metadata.Name)
	}
	return names
}

func (c *cluster) goOn(t *testing.T, namespace, pod string) {
	t.Helper()
	c.kubectl(t, "exec", "-n", namespace, pod, "-c", "train", "--", "python", "-c", "open('/tmp/go', 'w')")
}

// sidecar returns the daemon's container of the only pod of a Job.
func (c *cluster) sidecar(t *testing.T, namespace string) container {
	t.Helper()
	all := c.pods(t, namespace, ofJob)[0].Status.InitContainerStatuses
	return all[slices.IndexFunc(all, func(s container) bool { return s.Name == "shoal" })]
}

// failures says what a trainer has got in place of files.
func failures(lines []line) string {
	var errors []string
	for _, l := range lines {
		if l.Error != "" {
			errors = append(errors, l.Error)
		}
	}
	return fmt.Sprintf("%d tries failed: %s", len(errors), strings.Join(slices.Compact(errors), "; "))
}

// A sidecar that is killed in mid-epoch is started again, and the trainer goes on: it gets errors meanwhile, or waits,
// and never other bytes. The Job completes, and no dead mount is left. The kernel may kill it, too, for want of memory.
func testKilled(t *testing.T, c *cluster, bucket, reason string, kill func(t *testing.T, containerID string)) {
	sums, paths := c.dataset(t, bucket, 240, 30_000)
	for _, row := range sidecars {
		t.Run(row.name, func(t *testing.T) {
			namespace := bucket + "-" + row.name
			c.apply(t, row.overlay, namespace, bucket, fmt.Sprintf(small, row.count-1)+fmt.Sprintf(`
  - target: {kind: Job}
    patch: |-
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --half=100}
      - {op: replace, path: /spec/template/spec/initContainers/%d/resources/requests/memory, value: 512Mi}
      - {op: replace, path: /spec/template/spec/initContainers/%[1]d/resources/limits/memory, value: 512Mi}
`, row.count-1))
			name := c.half(t, namespace)[0]
			found, _ := c.try("exec", "-n", namespace, name, "-c", "shoal", "--", "/usr/bin/shoal", "doctor", "--quick")
			if !regexp.MustCompile(row.doctor).MatchString(found) {
				t.Errorf("shoal doctor says\n%s", found)
			}
			kill(t, c.sidecar(t, namespace).ContainerID)
			began := time.Now()
			c.goOn(t, namespace, name)
			c.within(t, time.Minute, "the sidecar's end: "+reason, func() bool {
				last := c.sidecar(t, namespace).LastState.Terminated
				return last != nil && last.ExitCode == 137 && last.Reason == reason
			})
			pods := c.complete(t, namespace)
			lines := c.trained(t, namespace, name)
			t.Logf("from SIGKILL to completion: %.1f s; %s", time.Since(began).Seconds(), failures(lines))
			succeeded(t, pods[0], row.count, 1)
			check(t, sums, paths, lines)
			c.gone(t, namespace, pods)
		})
	}
}

// A pod that is deleted ends although its daemon was killed and left a dead mount, which nobody but the second sidecar
// removes: a daemon is not started again in a pod that ends.
func testDeleted(t *testing.T, c *cluster) {
	const namespace = "deleted"
	c.dataset(t, namespace, 240, 30_000)
	c.apply(t, "overlays/mount", namespace, namespace, fmt.Sprintf(small, 1)+`
  - target: {kind: Job}
    patch: |-
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --half=100}
      - {op: replace, path: /spec/template/spec/terminationGracePeriodSeconds, value: 10}
`)
	c.half(t, namespace)
	daemon, pods := c.sidecar(t, namespace).ContainerID, c.pods(t, namespace, ofJob)
	began := time.Now()
	c.kubectl(t, "delete", "job", "train", "-n", namespace, "--wait=false") // the trainer does not heed SIGTERM
	// Until then a daemon that dies is started again, since the kubelet may be at its last look at a pod that shall
	// run.
	c.within(t, time.Minute, "the kubelet stops the trainer", func() bool {
		return strings.Contains(c.kubectl(t, "get", "events", "-n", namespace, "--field-selector=reason=Killing"),
			"container train")
	})
	c.kill(t, daemon)
	if len(c.mounts(t, "fuse.shoal")) == 0 {
		t.Error("the daemon has left no mount")
	}
	c.within(t, time.Minute, "the pod is gone", func() bool { return len(c.pods(t, namespace, ofJob)) == 0 })
	t.Logf("from the deletion to the end of the pod, of which the trainer takes 10 s: %.1f s",
		time.Since(began).Seconds())
	c.gone(t, namespace, pods)
}

// A sidecar that is no native one, as before Kubernetes 1.29: the trainer, which may start first, ends it, and the Job
// completes.
func testPlain(t *testing.T, c *cluster) {
	const namespace = "plain"
	sums, paths := c.dataset(t, namespace, 240, 30_000)
	c.apply(t, "overlays/feed-only", namespace, namespace, fmt.Sprintf(small, 0)+`
  - target: {kind: Job}
    patch: |-
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --stop}
      - {op: add, path: /spec/template/spec/shareProcessNamespace, value: true}
      - {op: move, from: /spec/template/spec/initContainers/0, path: /spec/template/spec/containers/-}
      - {op: remove, path: /spec/template/spec/containers/1/restartPolicy}
      - {op: remove, path: /spec/template/spec/initContainers}
`)
	pods := c.complete(t, namespace)
	if len(pods) != 1 || len(pods[0].Status.InitContainerStatuses) != 0 || len(pods[0].Status.ContainerStatuses) != 2 {
		t.Fatalf("%+v", pods)
	}
	for _, s := range pods[0].Status.ContainerStatuses {
		if e := s.State.Terminated; e == nil || e.ExitCode != 0 || s.RestartCount != 0 {
			t.Errorf("the container %s: %+v", s.Name, s)
		}
	}
	check(t, sums, paths, c.trained(t, namespace, pods[0].Metadata.Name))
	c.gone(t, namespace, pods)
}

// The kubelet evicts a pod in mid-epoch whose cache is larger than its volume may be: it gives its containers two
// seconds, all at once. No dead mount keeps the pod's volumes.
func testEvicted(t *testing.T, c *cluster) {
	const namespace = "evicted"
	c.dataset(t, namespace, 240, 30_000)
	c.apply(t, "overlays/mount", namespace, namespace, fmt.Sprintf(small, 1)+`
  - target: {kind: Job}
    patch: |-
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --half=100}
      - {op: replace, path: /spec/backoffLimit, value: 0}
  - target: {kind: Job}
    patch: |-
      apiVersion: batch/v1
      kind: Job
      metadata: {name: train}
      spec: {template: {spec: {volumes: [{name: cache, emptyDir: {sizeLimit: 64Ki}}]}}}
`)
	began := time.Now()
	var pods []pod
	c.within(t, 3*time.Minute, "the pod is evicted", func() bool {
		pods = c.pods(t, namespace, ofJob)
		return len(pods) == 1 && pods[0].Status.Phase == "Failed" && pods[0].Status.Reason == "Evicted"
	})
	t.Logf("evicted after %.1f s: %s", time.Since(began).Seconds(), c.kubectl(t, "get", "pods", "-n", namespace, "-o",
		"jsonpath={.items[*].status.message}"))
	c.within(t, time.Minute, "its volumes are gone", func() bool { return len(c.mounts(t, pods[0].Metadata.UID)) == 0 })
	c.gone(t, namespace, pods)
}

// All that runs in a cluster, in one: it takes a while to start.
func TestCluster(t *testing.T) {
	c := start(t)
	t.Run("job", func(t *testing.T) { testJob(t, c) })
	t.Run("indexed", func(t *testing.T) { testIndexed(t, c) })
	t.Run("plain", func(t *testing.T) { testPlain(t, c) })
	t.Run("killed", func(t *testing.T) { testKilled(t, c, "killed", "Error", c.kill) })
	t.Run("out of memory", func(t *testing.T) { testKilled(t, c, "oom", "OOMKilled", c.oom) })
	t.Run("deleted", func(t *testing.T) { testDeleted(t, c) })
	t.Run("evicted", func(t *testing.T) { testEvicted(t, c) })
	t.Run("chart", func(t *testing.T) { testChart(t, c) })
	t.Run("node cache", func(t *testing.T) { testNodeCache(t, c) })
	t.Run("node killed", func(t *testing.T) { testNodeEnds(t, c, "again", c.killPod) })
	t.Run("node evicted", func(t *testing.T) { testNodeEnds(t, c, "anew", c.evict) })
	t.Run("overlay", func(t *testing.T) { testOverlay(t, c) })
	t.Run("csi", func(t *testing.T) { testCSI(t, c) })
	t.Run("five commands", func(t *testing.T) { testFiveCommands(t, c) })
	t.Run("csi replaced", func(t *testing.T) { testCSIReplaced(t, c) })
	t.Run("csi shaken", func(t *testing.T) { testCSIShaken(t, c) })
	t.Run("csi first byte", func(t *testing.T) { testCSIFirstByte(t, c) })
	t.Run("csi bad", func(t *testing.T) { testCSIBad(t, c) })
	t.Run("csi lacks", func(t *testing.T) { testCSILacks(t, c) })
	t.Run("csi roles", func(t *testing.T) { testCSIRoles(t, c) })
	t.Run("csi many", func(t *testing.T) { testCSIMany(t, c) })
	t.Run("csi sanity", func(t *testing.T) { testCSISanity(t, c) })
	// The last ones: pods may be on either node.
	t.Run("two nodes", func(t *testing.T) { testTwoNodes(t, c) })
	t.Run("service", func(t *testing.T) { testService(t, c) })
}
