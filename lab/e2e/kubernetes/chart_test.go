package kubernetes

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// The chart is installed; in mid-epoch it is upgraded to its next version, with another image, and then once more,
// which changes nothing; it is uninstalled, and nothing is left.
func testChart(t *testing.T, c *cluster) {
	const namespace, next = "chart", "next"
	sums, paths := c.dataset(t, namespace, 240, 30_000)
	c.ctr(t, "images", "tag", registry+"shoal:"+tag, registry+"shoal:"+next)
	c.kubectl(t, "create", "namespace", namespace)
	c.secret(t, namespace, s3server.SecretKey)
	objects := func() string {
		t.Helper()
		return c.kubectl(t, "get", "jobs,pods,secrets,configmaps", "-n", namespace, "-o", "name")
	}
	var before string
	c.within(t, time.Minute, "the namespace has what Kubernetes puts there", func() bool {
		before = objects()
		return strings.Contains(before, "kube-root-ca.crt")
	})
	dir := t.TempDir()
	must(t, os.CopyFS(dir, os.DirFS("../../../deploy/kubernetes/helm/shoal")))
	chart, err := os.ReadFile(filepath.Join(dir, "Chart.yaml"))
	must(t, err)
	c.write(t, "values.yaml", fmt.Sprintf(`
source: s3://chart/train
mount: {enabled: true}
memory: 512Mi
cpu: 100m
cache: {size: 1GiB, volume: 2Gi}
env: [{name: AWS_ENDPOINT_URL, value: %q}, {name: AWS_REGION, value: us-east-1}]
envFrom: [{secretRef: {name: shoal-s3}}]
terminationGracePeriodSeconds: 5
trainer: {image: "%strainer:%s", args: [--data=/mnt/shoal/data, --half=100]}
`, c.store.URL, registry, tag))
	helm := func(args ...string) {
		t.Helper()
		cmd := exec.Command(filepath.Join(c.bin, "helm"), append(args, "--namespace", namespace, "--kubeconfig",
			filepath.Join(c.dir, "admin.conf"))...)
		cmd.Env = append(os.Environ(), "HOME="+c.dir)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	release := func(verb, version, image string) {
		t.Helper()
		text := regexp.MustCompile(`(?m)^version: .*`).ReplaceAll(chart, []byte("version: "+version))
		text = regexp.MustCompile(`(?m)^appVersion: .*`).ReplaceAll(text, []byte("appVersion: "+image))
		must(t, os.WriteFile(filepath.Join(dir, "Chart.yaml"), text, 0o600))
		helm(verb, "run", dir, "--values", filepath.Join(c.dir, "values.yaml"))
	}

	began := time.Now()
	release("install", "1.0.0", tag)
	old := c.half(t, namespace)[0]
	release("upgrade", "1.0.1", next)
	var pods []pod
	c.within(t, 2*time.Minute, "another pod is there, and alone", func() bool {
		pods = c.pods(t, namespace, ofJob)
		return len(pods) == 1 && pods[0].Metadata.Name != old
	})
	trainer := c.half(t, namespace)[0]
	release("upgrade", "1.0.1", next)
	c.goOn(t, namespace, trainer)
	pods = c.complete(t, namespace)
	t.Logf("from the installation to the upgraded job's completion: %.1f s", time.Since(began).Seconds())
	if len(pods) != 1 || pods[0].Metadata.Name != trainer {
		t.Fatalf("%s was to go on: %+v", trainer, pods)
	}
	succeeded(t, pods[0], 2, 0)
	check(t, sums, paths, c.trained(t, namespace, trainer))
	images := strings.Fields(c.kubectl(t, "get", "pods", "-n", namespace, "-o",
		"jsonpath={.items[*].spec.initContainers[*].image}"))
	if want := registry + "shoal:" + next; !slices.Equal(images, []string{want, want}) {
		t.Errorf("the sidecars are of %s", images)
	}

	helm("uninstall", "run", "--wait")
	c.within(t, time.Minute, "nothing of the release is left", func() bool { return objects() == before })
	c.gone(t, namespace, pods)
}
