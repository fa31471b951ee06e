package kubernetes

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// ofNode is a label of the node cache's pods.
const ofNode = "app.kubernetes.io/name=shoal-node"

// teams are namespaces whose trainers share the cache of a node.
var teams = []string{"red", "blue"}

// applyNode makes a namespace for an overlay with the DaemonSet, and applies it.
func (c *cluster) applyNode(t *testing.T, overlay, namespace, bucket, patches string) {
	t.Helper()
	c.kubectl(t, "create", "namespace", namespace)
	cert, key := c.authority.Issue(t, "node", time.Hour)
	c.kubectl(t, "create", "secret", "generic", "shoal-cluster", "-n", namespace, "--from-file=tls.crt="+cert,
		"--from-file=tls.key="+key, "--from-file=ca.crt="+c.authority.File)
	c.apply(t, overlay, namespace, bucket, `
  - target: {kind: DaemonSet}
    patch: |-
      - {op: replace, path: /spec/template/spec/containers/0/resources/requests/cpu, value: 100m}
      - {op: replace, path: /spec/template/spec/containers/0/args/7, value: --cache-size=1GiB}`+patches)
}

// nodeCache applies the DaemonSet in the namespace cache, and waits until it is ready.
func (c *cluster) nodeCache(t *testing.T, bucket string) {
	t.Helper()
	c.applyNode(t, "node-cache", "cache", bucket, fmt.Sprintf(`
  - target: {kind: ConfigMap}
    patch: |-
      - {op: replace, path: /data/SHOAL_CLUSTER, value: "etcd://%s:2379/photos"}
`, c.ip))
	c.kubectl(t, "rollout", "status", "daemonset/shoal-node", "-n", "cache", "--timeout=3m")
}

// trainers applies the trainers' Job of overlays/node-cache in the namespace of each team.
func (c *cluster) trainers(t *testing.T, patches string) {
	t.Helper()
	train, err := os.ReadFile("../../../deploy/kubernetes/overlays/node-cache/train.yaml")
	must(t, err)
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "train.yaml"), train, 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), fmt.Appendf(nil, `resources: [train.yaml]
images: [{name: trainer, newName: %strainer, newTag: %s}]
%s`, registry, tag, patches), 0o600))
	for _, team := range teams {
		c.kubectl(t, "create", "namespace", team)
		c.kubectl(t, "apply", "-n", team, "-k", dir)
	}
}

// allRead waits until the teams' Jobs complete, and checks that each of their pods has read everything twice, by mount
// and by feed.
func (c *cluster) allRead(t *testing.T, sums map[string]string, paths []string) {
	t.Helper()
	for _, team := range teams {
		c.readTwice(t, team, sums, paths)
	}
}

func (c *cluster) readTwice(t *testing.T, namespace string, sums map[string]string, paths []string) {
	t.Helper()
	pods := c.complete(t, namespace)
	if len(pods) != 2 {
		t.Errorf("%+v", pods)
	}
	for _, p := range pods {
		var files, samples []line
		lines := c.trained(t, namespace, p.Metadata.Name)
		for _, l := range lines {
			if _, ok := l.Name.(string); ok {
				files = append(files, l)
			} else {
				samples = append(samples, l)
			}
		}
		check(t, sums, paths, files)
		check(t, sums, paths, samples)
		t.Logf("%s of %s: %s", p.Metadata.Name, namespace, failures(lines))
	}
}

// noCache deletes all of it, and checks that nothing is left mounted.
func (c *cluster) noCache(t *testing.T) {
	t.Helper()
	pods := c.pods(t, "cache", ofNode)
	for _, team := range teams {
		c.kubectl(t, "delete", "namespace", team, "--timeout=2m")
	}
	c.gone(t, "cache", pods)
}

// onNode runs shoal in the DaemonSet's container.
func (c *cluster) onNode(t *testing.T, namespace string, args ...string) string {
	t.Helper()
	return c.kubectl(t, append([]string{"exec", "-n", namespace, "daemonset/shoal-node", "--", "/usr/bin/shoal"},
		args...)...)
}

// The cache of a node: trainers of two namespaces, two pods each and without rights, read one dataset through its mount
// and its feed, and each file is fetched once.
func testNodeCache(t *testing.T, c *cluster) {
	const size = 30_000
	sums, paths := c.dataset(t, "shared", 240, size)
	before := c.store.Stats()
	c.nodeCache(t, "shared")
	c.trainers(t, "")
	c.allRead(t, sums, paths)
	// Hedged, a slow GET is sent twice, and one of the answers is taken.
	var daemon struct {
		Files    int
		GetBytes int64 `json:"get_bytes"`
		Hedges   struct{ Sent int64 }
	}
	must(t, json.Unmarshal([]byte(c.onNode(t, "cache", "stat", "/mnt/shoal/data", "--json")), &daemon))
	// It has nothing left to fetch.
	c.onNode(t, "cache", "warm", "s3://shared/train", "--cache-dir", "/var/cache/shoal/photos")
	gets := c.store.Stats().Sub(before).Gets
	if daemon.GetBytes != int64(len(sums)*size) || gets != int64(len(sums))+daemon.Hedges.Sent {
		t.Errorf("%d GETs for %d files of %d bytes: %+v", gets, len(sums), size, daemon)
	}
	t.Logf("%d GETs for %d files: %+v", gets, len(sums), daemon)
	c.noCache(t)
}

// killPod kills the first process of a pod's only container.
func (c *cluster) killPod(t *testing.T, namespace, name string) {
	t.Helper()
	all := c.pods(t, namespace, ofNode)
	p := all[slices.IndexFunc(all, func(p pod) bool { return p.Metadata.Name == name })]
	c.kill(t, p.Status.ContainerStatuses[0].ContainerID)
}

// The node's daemon is killed while trainers are in mid-epoch, and is started again, or its pod is evicted: they go on,
// with the successor's mount.
func testNodeEnds(t *testing.T, c *cluster, bucket string, end func(t *testing.T, namespace, pod string)) {
	sums, paths := c.dataset(t, bucket, 240, 30_000)
	c.nodeCache(t, bucket)
	c.trainers(t, `patches:
  - target: {kind: Job}
    patch: |-
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --half=100}
`)
	waiting := map[string][]string{}
	for _, team := range teams {
		waiting[team] = c.half(t, team)
	}
	before := c.pods(t, "cache", ofNode)[0].Metadata
	began := time.Now()
	end(t, "cache", before.Name)
	for team, pods := range waiting {
		for _, pod := range pods {
			c.goOn(t, team, pod)
		}
	}
	c.allRead(t, sums, paths)
	t.Logf("from the daemon's end to completion: %.1f s", time.Since(began).Seconds())
	p := c.pods(t, "cache", ofNode)[0]
	if n := p.Status.ContainerStatuses[0].RestartCount; (n == 1) == (p.Metadata.UID != before.UID) || n > 1 {
		t.Errorf("the daemon of %+v was started again %d times, in %+v", before, n, p.Metadata)
	}
	c.noCache(t)
}

// overlays/node-cache as a whole: the daemon finds etcd by the name of its Service, and trainers of the same namespace,
// which may start first, read everything. The network policies, which nothing here enforces, are about pods that are
// there and ports that those have.
func testOverlay(t *testing.T, c *cluster) {
	const namespace = "overlay"
	sums, paths := c.dataset(t, namespace, 240, 30_000)
	c.applyNode(t, "overlays/node-cache", namespace, namespace, fmt.Sprintf(`
  - target: {kind: Deployment}
    patch: |-
      - {op: replace, path: /spec/template/spec/containers/0/image, value: "%strainer:%s"}
`, registry, tag))
	c.readTwice(t, namespace, sums, paths)
	type selector struct{ MatchLabels map[string]string }
	label := func(s selector) (text string) {
		for k, v := range s.MatchLabels {
			text += k + "=" + v
		}
		return text
	}
	var policies struct {
		Items []struct {
			Metadata struct{ Name string }
			Spec     struct {
				PodSelector selector
				Ingress     []struct {
					From  []struct{ PodSelector selector }
					Ports []struct{ Port string }
				}
			}
		}
	}
	must(t, json.Unmarshal([]byte(c.kubectl(t, "get", "networkpolicies", "-n", namespace, "-o", "json")), &policies))
	nodes := c.pods(t, namespace, ofNode)
	for _, p := range policies.Items {
		in := p.Spec.Ingress[0]
		from := c.pods(t, namespace, label(in.From[0].PodSelector))
		ports := c.kubectl(t, "get", "pods", "-n", namespace, "-l", label(p.Spec.PodSelector), "-o",
			"jsonpath={.items[*].spec.containers[*].ports[*].name}")
		if len(from) != 1 || from[0].Metadata != nodes[0].Metadata || ports != in.Ports[0].Port {
			t.Errorf("%s lets %+v reach the port %q of pods that have %q", p.Metadata.Name, from, in.Ports[0].Port,
				ports)
		}
	}
	if len(policies.Items) != 2 {
		t.Errorf("%+v", policies)
	}
	c.within(t, time.Minute, "the daemon has joined the cluster", func() bool {
		var daemon struct{ Cluster struct{ State string } }
		must(t, json.Unmarshal([]byte(c.onNode(t, namespace, "stat", "/mnt/shoal/data", "--json")), &daemon))
		return daemon.Cluster.State == "joined"
	})
	c.gone(t, namespace, nodes)
}

// Two nodes share a cache: trainers of two namespaces, one of each on each node, read one dataset, and each file is
// fetched once for both nodes. After a restart of a node they fetch nothing.
func testTwoNodes(t *testing.T, c *cluster) {
	const size, count = 30_000, 480
	sums, paths := c.dataset(t, "both", count, size)
	began := time.Now()
	m := c.join(t)
	t.Logf("the second node has its images after %.1f s", time.Since(began).Seconds())
	before := c.store.Stats()
	c.nodeCache(t, "both")
	read := func(most int64) {
		t.Helper()
		c.trainers(t, `patches:
  - target: {kind: Job}
    patch: |-
      - op: add
        path: /spec/template/spec/topologySpreadConstraints
        value:
          - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule,
             labelSelector: {matchLabels: {job-name: train}}}
`)
		c.allRead(t, sums, paths)
		for _, team := range teams {
			if p := c.pods(t, team, "job-name=train"); p[0].Spec.NodeName == p[1].Spec.NodeName {
				t.Errorf("all trainers of %s ran on %s", team, p[0].Spec.NodeName)
			}
		}
		fetched := c.store.Stats().Sub(before).GetBytes
		t.Logf("%.3f of the dataset were fetched", float64(fetched)/(size*count))
		if fetched > most {
			t.Errorf("%d bytes were fetched, %d at most were to be", fetched, most)
		}
		before = c.store.Stats()
	}
	read(size * count * 103 / 100)
	for _, team := range teams {
		c.kubectl(t, "delete", "namespace", team, "--timeout=2m")
	}
	_ = m.node.Signal(unix.SIGKILL)
	<-m.node.Done()
	c.boot(t, m, 1)
	c.within(t, 3*time.Minute, "the daemon runs again on the second node", func() bool {
		must(t, m.node.Failed())
		return slices.ContainsFunc(c.pods(t, "cache", ofNode), func(p pod) bool {
			s := p.Status.ContainerStatuses
			return p.Spec.NodeName == m.name && len(s) == 1 && s[0].RestartCount > 0 && s[0].Ready
		})
	})
	read(size * count / 100) // an audit of what the other node gives reads a granule now and then
	c.noCache(t)
	if left := m.mounts(t, "fuse.shoal"); len(left) > 0 {
		t.Errorf("mounts are left on the second node:\n%s", left)
	}
	c.kubectl(t, "delete", "node", m.name)
}
