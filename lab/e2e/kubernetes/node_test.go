package kubernetes

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// The cache of a node: trainers of two namespaces, two pods each and without rights, read one dataset through its mount and its feed,
// and each file is fetched once. When the DaemonSet is deleted, nothing is left mounted.
func testNodeCache(t *testing.T, c *cluster) {
	const size = 30_000
	sums, paths := c.dataset(t, "shared", 240, size)
	before := c.store.Stats()
	c.kubectl(t, "create", "namespace", "cache")
	cert, key := c.authority.Issue(t, "node", time.Hour)
	c.kubectl(t, "create", "secret", "generic", "shoal-cluster", "-n", "cache", "--from-file=tls.crt="+cert, "--from-file=tls.key="+key, "--from-file=ca.crt="+c.authority.File)
	c.apply(t, "node-cache", "cache", "shared", fmt.Sprintf(`
  - target: {kind: DaemonSet}
    patch: |-
      - {op: replace, path: /spec/template/spec/containers/0/resources/requests/cpu, value: 100m}
      - {op: replace, path: /spec/template/spec/containers/0/args/7, value: --cache-size=1GiB}
  - target: {kind: ConfigMap}
    patch: |-
      - {op: replace, path: /data/SHOAL_CLUSTER, value: "etcd://%s:2379/photos"}
`, c.ip))
	c.kubectl(t, "rollout", "status", "daemonset/shoal-node", "-n", "cache", "--timeout=3m")

	train, err := os.ReadFile("../../../deploy/kubernetes/overlays/node-cache/train.yaml")
	must(t, err)
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "train.yaml"), train, 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), fmt.Appendf(nil, `resources: [train.yaml]
images: [{name: trainer, newName: %strainer, newTag: %s}]
`, registry, tag), 0o600))
	teams := []string{"red", "blue"}
	for _, team := range teams {
		c.kubectl(t, "create", "namespace", team)
		c.kubectl(t, "apply", "-n", team, "-k", dir)
	}
	for _, team := range teams {
		pods := c.complete(t, team)
		if len(pods) != 2 {
			t.Errorf("%+v", pods)
		}
		for _, p := range pods {
			var files, samples []line
			for _, l := range c.trained(t, team, p.Metadata.Name) {
				if _, ok := l.Name.(string); ok {
					files = append(files, l)
				} else {
					samples = append(samples, l)
				}
			}
			check(t, sums, paths, files)
			check(t, sums, paths, samples)
		}
	}
	// Hedged, a slow GET is sent twice, and one of the answers is taken.
	var daemon struct {
		Files    int
		GetBytes int64 `json:"get_bytes"`
		Hedges   struct{ Sent int64 }
	}
	node := func(args ...string) string {
		return c.kubectl(t, append([]string{"exec", "-n", "cache", "daemonset/shoal-node", "--", "/usr/bin/shoal"}, args...)...)
	}
	must(t, json.Unmarshal([]byte(node("stat", "/mnt/shoal/data", "--json")), &daemon))
	node("warm", "s3://shared/train", "--cache-dir", "/var/cache/shoal/photos") // has nothing left to fetch
	gets := c.store.Stats().Sub(before).Gets
	if daemon.GetBytes != int64(len(sums)*size) || gets != int64(len(sums))+daemon.Hedges.Sent {
		t.Errorf("%d GETs for %d files of %d bytes: %+v", gets, len(sums), size, daemon)
	}
	t.Logf("%d GETs for %d files, which four trainers have read by mount and by feed: %+v", gets, len(sums), daemon)
	pods := c.pods(t, "cache", "app.kubernetes.io/name=shoal-node")
	for _, team := range teams {
		c.kubectl(t, "delete", "namespace", team, "--timeout=2m")
	}
	c.gone(t, "cache", pods)
}
