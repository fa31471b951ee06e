// Package deploy checks what deploy/ holds for other tools against those tools' own code: Kustomize and Helm render
// the manifests, and the Kubernetes API's schemas (kubectl-validate carries them) take every field or do not. It is a
// module of its own, because those are large.
package deploy

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	corev1 "k8s.io/api/core/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/kubectl-validate/pkg/openapiclient"
	"sigs.k8s.io/kubectl-validate/pkg/validator"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// apiVersion of Kubernetes whose schemas are asked: the newest that kubectl-validate carries. Native sidecars are on by
// default since 1.29.
const apiVersion = "1.30"

const kubernetes = "../../deploy/kubernetes"

// validate takes a stream of documents as the API server would, strictly, and returns them by kind.
func validate(stream []byte) (byKind map[string][][]byte, err error) {
	v, err := validator.New(openapiclient.NewHardcodedBuiltins(apiVersion))
	if err != nil {
		return nil, err
	}
	byKind = map[string][][]byte{}
	for docs := utilyaml.NewYAMLReader(reader(stream)); ; {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			return byKind, nil
		}
		if err != nil {
			return nil, err
		}
		if len(bytes.TrimSpace(doc)) == 0 {
			continue
		}
		if bytes.Contains(doc, []byte("kind: PodMonitor")) { // of an operator, and not Kubernetes' own
			byKind["PodMonitor"] = append(byKind["PodMonitor"], doc)
			continue
		}
		gvk, obj, err := v.Parse(doc)
		if err != nil {
			return nil, err
		}
		if err := v.Validate(obj); err != nil {
			return nil, err
		}
		byKind[gvk.Kind] = append(byKind[gvk.Kind], doc)
	}
}

func kustomize(t *testing.T, dir string) []byte {
	t.Helper()
	m, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(),
		filepath.Join(kubernetes, dir))
	if err != nil {
		t.Fatalf("%s: %v", dir, err)
	}
	out, err := m.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func helm(t *testing.T, values string) []byte {
	t.Helper()
	out, err := render(t, values)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// render returns what the chart makes of values, or why they are refused.
func render(t *testing.T, values string) ([]byte, error) {
	t.Helper()
	return renderAs(t, "run", values)
}

func renderAs(t *testing.T, release, values string) ([]byte, error) {
	t.Helper()
	c, err := loader.LoadDir(filepath.Join(kubernetes, "helm", "shoal"))
	if err != nil {
		t.Fatal(err)
	}
	v, err := chartutil.ReadValues([]byte(values))
	if err != nil {
		t.Fatal(err)
	}
	all, err := chartutil.ToRenderValues(c, v,
		chartutil.ReleaseOptions{Name: release, Namespace: "training", IsInstall: true}, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	files, err := engine.Engine{Strict: true}.Render(c, all)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	for name, text := range files {
		if strings.HasSuffix(name, ".yaml") && strings.TrimSpace(text) != "" {
			out.WriteString("---\n" + text + "\n")
		}
	}
	return out.Bytes(), nil
}

// job returns the pod of the only Job in a stream that the API takes.
func job(t *testing.T, stream []byte) *corev1.PodTemplateSpec {
	t.Helper()
	return pod(t, stream, "Job")
}

// pod returns the pod of the only object of a kind in a stream that the API takes.
func pod(t *testing.T, stream []byte, kind string) *corev1.PodTemplateSpec {
	t.Helper()
	kinds, err := validate(stream)
	if err != nil {
		t.Fatalf("%v\n%s", err, stream)
	}
	if len(kinds[kind]) != 1 {
		t.Fatalf("%d of %s in\n%s", len(kinds[kind]), kind, stream)
	}
	var o struct {
		Spec struct{ Template corev1.PodTemplateSpec }
	}
	if err := yaml.Unmarshal(kinds[kind][0], &o); err != nil {
		t.Fatal(err)
	}
	return &o.Spec.Template
}

// checkPod tells what is wrong with a trainer's pod beyond what a schema can say.
func checkPod(t *testing.T, pod *corev1.PodTemplateSpec, mount bool) {
	t.Helper()
	s := pod.Spec
	i := slices.IndexFunc(s.InitContainers, func(c corev1.Container) bool { return c.Name == "shoal" })
	if i < 0 || len(s.Containers) != 1 {
		t.Fatalf("%d init containers, %d containers", len(s.InitContainers), len(s.Containers))
	}
	side, trainer := s.InitContainers[i], s.Containers[0]
	if side.RestartPolicy == nil || *side.RestartPolicy != corev1.ContainerRestartPolicyAlways {
		t.Error(
			"the sidecar is no native one: the pod would wait for its end before the trainer, and for ever after it")
	}
	if s.RestartPolicy == corev1.RestartPolicyAlways || s.RestartPolicy == "" {
		t.Errorf("restartPolicy %q: the pod cannot complete", s.RestartPolicy)
	}
	for name, p := range map[string]*corev1.Probe{"startup": side.StartupProbe, "readiness": side.ReadinessProbe,
		"liveness": side.LivenessProbe} {
		switch {
		case p == nil || p.Exec == nil || !slices.Contains(p.Exec.Command, "health"):
			t.Errorf("the %s probe does not ask `shoal health`", name)
		case !slices.Contains(p.Exec.Command, "unix:///run/shoal/feed.sock"),
			mount != slices.Contains(p.Exec.Command, "/mnt/shoal/data"):
			t.Errorf("the %s probe asks %v", name, p.Exec.Command)
		case p.TimeoutSeconds <= 5: // of shoal health
			t.Errorf("the %s probe is cut off before it can say why", name)
		}
	}
	// Told to end last, whoever cleans up after the sidecar stands before it.
	if j := slices.IndexFunc(s.InitContainers, func(c corev1.Container) bool {
		return slices.Contains(c.Args, "--at-exit")
	}); mount != (j == 0) {
		t.Errorf("who unmounts what a killed sidecar has left is container %d", j)
	} else if mount {
		by := s.InitContainers[j]
		if by.RestartPolicy == nil || by.SecurityContext.Privileged == nil || by.Image != side.Image ||
			by.VolumeMounts[0].MountPropagation == nil ||
			*by.VolumeMounts[0].MountPropagation != corev1.MountPropagationBidirectional ||
			by.VolumeMounts[0].MountPath != "/mnt/shoal" || by.Args[2] != "/mnt/shoal/data" {
			t.Errorf("it cannot unmount: %+v", by)
		}
	}
	checkAdmin(t, pod, side)
	c := side.SecurityContext
	if c == nil || c.ReadOnlyRootFilesystem == nil || !*c.ReadOnlyRootFilesystem {
		t.Error("the sidecar's root file system can be written to")
	}
	privileged := c.Privileged != nil && *c.Privileged
	if privileged != mount {
		t.Errorf("privileged: %v", privileged)
	}
	if !mount && (c.RunAsNonRoot == nil || !*c.RunAsNonRoot || c.AllowPrivilegeEscalation == nil ||
		*c.AllowPrivilegeEscalation ||
		c.Capabilities == nil || !slices.Contains(c.Capabilities.Drop, "ALL") || c.SeccompProfile == nil) {
		t.Errorf("a feed needs no rights, and has %+v", c)
	}
	if s.SecurityContext == nil || s.SecurityContext.FSGroup == nil || *s.SecurityContext.FSGroup != 65532 {
		t.Error("without fsGroup 65532 the trainer cannot open the socket")
	}
	if side.Resources.Limits.Memory().IsZero() {
		t.Error("the sidecar has no memory limit")
	}
	volumes := map[string]corev1.Volume{}
	for _, v := range s.Volumes {
		volumes[v.Name] = v
	}
	propagation := func(c corev1.Container, path string) corev1.MountPropagationMode {
		for _, m := range c.VolumeMounts {
			v := volumes[m.Name]
			if outlives := v.HostPath != nil ||
				v.PersistentVolumeClaim != nil; !outlives && (v.EmptyDir == nil || v.EmptyDir.SizeLimit == nil) {
				t.Errorf("%s: volume %s is no emptyDir with a limit", c.Name, m.Name)
			}
			if m.MountPath == path && m.MountPropagation != nil {
				return *m.MountPropagation
			}
		}
		return ""
	}
	if got := propagation(side, "/mnt/shoal"); mount != (got == corev1.MountPropagationBidirectional) {
		t.Errorf("the sidecar's propagation is %q", got)
	}
	if got := propagation(trainer, "/mnt/shoal"); mount != (got == corev1.MountPropagationHostToContainer) {
		t.Errorf("the trainer's propagation is %q", got)
	}
}

// checkAdmin tells who reaches the admin address: nobody in the cluster, but where metrics are asked for.
func checkAdmin(t *testing.T, pod *corev1.PodTemplateSpec, side corev1.Container) {
	t.Helper()
	var at []string
	for _, e := range side.Env {
		if e.Name == "SHOAL_ADMIN" {
			at = append(at, e.Value)
		}
	}
	for _, a := range side.Args {
		if v, ok := strings.CutPrefix(a, "--admin="); ok {
			at = append(at, v)
		}
	}
	if len(at) == 0 && side.EnvFrom[0].ConfigMapRef != nil {
		return // TestKustomize looks into it
	}
	asked := pod.Annotations["prometheus.io/scrape"] == "true" || pod.Annotations["test"] == "monitored"
	if want := map[bool]string{false: "127.0.0.1:7071", true: "0.0.0.0:7071"}[asked]; len(at) != 1 || at[0] != want ||
		(len(side.Ports) == 1) != asked {
		t.Errorf("the admin address is %v with ports %v, want %s", at, side.Ports, want)
	}
	if slices.ContainsFunc(side.Env, func(e corev1.EnvVar) bool { return e.Name == "SHOAL_PPROF" }) {
		t.Error("profiles are served")
	}
}

func TestKustomize(t *testing.T) {
	for dir, mount := range map[string]bool{"base": false, "overlays/feed-only": false, "overlays/mount": true,
		"overlays/monitored": true} {
		t.Run(dir, func(t *testing.T) {
			out := kustomize(t, dir)
			pod := job(t, out)
			checkPod(t, pod, mount)
			if at := map[bool]string{false: "127.0.0.1", true: "0.0.0.0"}[dir == "overlays/monitored"]; !bytes.Contains(
				out, []byte("SHOAL_ADMIN: "+at+":7071\n")) {
				t.Errorf("the admin address is not on %s", at)
			}
			if got := pod.Annotations["prometheus.io/scrape"] == "true"; got != (dir == "overlays/monitored") {
				t.Errorf("annotations %v", pod.Annotations)
			}
		})
	}
}

func TestHelm(t *testing.T) {
	for values, mount := range map[string]bool{
		"{}":                     false,
		"mount: {enabled: true}": true,
		"metrics: {enabled: true}\nsource: s3://other/set\nextraArgs: [--order, 'torch:seed=7']\nenvFrom: " +
			"[{secretRef: {name: s3}}]\nserviceAccountName: reader": false,
	} {
		t.Run(values, func(t *testing.T) {
			out := helm(t, values)
			pod := job(t, out)
			checkPod(t, pod, mount)
			if strings.Contains(values, "other") && (!bytes.Contains(out, []byte("s3://other/set")) ||
				pod.Annotations["prometheus.io/port"] != "7071" || pod.Spec.ServiceAccountName != "reader") {
				t.Errorf("values are not taken:\n%s", out)
			}
		})
	}
}

// A cache that stays, where it may be scheduled, and several pods.
func TestHelmPlacement(t *testing.T) {
	const values = "parallelism: 4\nimagePullSecrets: [{name: registry}]\nnodeSelector: {gpu: h100}\ntolerations: " +
		"[{key: gpu, operator: Exists}]\n"
	for cache, check := range map[string]func(v corev1.Volume) bool{
		"cache: {hostPath: /mnt/nvme}": func(v corev1.Volume) bool {
			return v.HostPath != nil && v.HostPath.Path == "/mnt/nvme"
		},
		"cache: {claim: photos}": func(v corev1.Volume) bool {
			return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == "photos"
		},
	} {
		out := helm(t, values+cache)
		pod := job(t, out)
		checkPod(t, pod, false)
		s := pod.Spec
		i := slices.IndexFunc(s.Volumes, func(v corev1.Volume) bool { return v.Name == "shoal-cache" })
		if i < 0 || !check(s.Volumes[i]) {
			t.Errorf("%s: %+v", cache, s.Volumes)
		}
		if !slices.Contains(s.InitContainers[0].Args,
			"--cache-dir=/var/cache/shoal/training_run_$(JOB_COMPLETION_INDEX)") {
			t.Errorf("%s: pods share a folder: %v", cache, s.InitContainers[0].Args)
		}
		if s.ImagePullSecrets[0].Name != "registry" || s.NodeSelector["gpu"] != "h100" ||
			s.Tolerations[0].Key != "gpu" || !bytes.Contains(out, []byte("completionMode: Indexed")) ||
			!bytes.Contains(out, []byte("parallelism: 4")) {
			t.Errorf("values are not taken:\n%s", out)
		}
	}
	if args := job(t, helm(t, "cache: {hostPath: /mnt/nvme}")).Spec.InitContainers[0].Args; !slices.Contains(args,
		"--cache-dir=/var/cache/shoal/training_run") {
		t.Errorf("one pod: %v", args)
	}
}

// The API refuses another template for a Job: what changes one makes another Job. What changes none leaves the Job that
// runs.
func TestHelmUpgrade(t *testing.T) {
	of := func(release, values string) (name string) {
		t.Helper()
		out, err := renderAs(t, release, values)
		if err != nil {
			t.Fatal(err)
		}
		kinds, err := validate(out)
		if err != nil || len(kinds["Job"]) != 1 {
			t.Fatalf("%v\n%s", err, out)
		}
		var job struct{ Metadata struct{ Name string } }
		if err := yaml.Unmarshal(kinds["Job"][0], &job); err != nil {
			t.Fatal(err)
		}
		return job.Metadata.Name
	}
	const monitored = "metrics: {enabled: true, podMonitor: {enabled: true, interval: "
	if a, b := of("run", monitored+"10s}}"), of("run", monitored+"20s}}"); a != b || !strings.HasPrefix(a, "run-") {
		t.Errorf("another interval of the PodMonitor makes %s of %s", b, a)
	}
	seen := map[string]string{}
	for _, values := range []string{"{}", "memory: 8Gi", "parallelism: 2", "trainer: {args: [--epochs=2]}",
		"image: {tag: v2}", "trainer: {backoffLimit: 1}"} {
		name := of("run", values)
		if other, has := seen[name]; has {
			t.Errorf("%s and %s make %s", values, other, name)
		}
		seen[name] = values
	}
	// Helm's longest. The host of a pod is named after the Job and the pod's index.
	if name := of(strings.Repeat("runs-", 10)+"abc", "parallelism: 99999"); len(name+"-99998") > 63 ||
		strings.Contains(name, "--") {
		t.Errorf("%s-99998 is no name of a host", name)
	}
}

// Names that YAML takes for numbers and the like stay names, and a dot in a release's is none in those of hosts.
func TestHelmNames(t *testing.T) {
	for _, release := range []string{"20261130", "true", "1e5", "run.1"} {
		out, err := renderAs(t, release, "{parallelism: 2, cache: {claim: '7', size: '5GiB # is no comment'}, "+
			"serviceAccountName: '8', metrics: {enabled: true, podMonitor: {enabled: true}}}")
		if err != nil {
			t.Fatal(err)
		}
		pod := job(t, out)
		kinds, _ := validate(out)
		if pod.Labels["app.kubernetes.io/name"] != release || pod.Spec.ServiceAccountName != "8" ||
			!slices.Contains(pod.Spec.InitContainers[0].Args, "--cache-size=5GiB # is no comment") ||
			bytes.Contains(kinds["Job"][0], []byte("name: run.1-")) ||
			!bytes.Contains(kinds["PodMonitor"][0], []byte(`name: "`+release+`"`)) {
			t.Errorf("%s:\n%s", release, out)
		}
	}
}

func TestHelmPodMonitor(t *testing.T) {
	out := helm(t, "metrics: {enabled: true, podMonitor: {enabled: true, labels: {release: prometheus}}}")
	kinds, err := validate(out)
	if err != nil || len(kinds["PodMonitor"]) != 1 {
		t.Fatalf("%v\n%s", err, out)
	}
	var m struct {
		APIVersion, Kind string
		Metadata         struct {
			Name   string
			Labels map[string]string
		}
		Spec struct {
			Selector            struct{ MatchLabels map[string]string }
			PodMetricsEndpoints []struct{ Port, Path, Interval string }
		}
	}
	if err := yaml.UnmarshalStrict(kinds["PodMonitor"][0], &m); err != nil {
		t.Fatal(err)
	}
	pod := job(t, out)
	if pod.Annotations != nil {
		t.Errorf("it is scraped twice: %v", pod.Annotations)
	}
	pod.Annotations = map[string]string{"test": "monitored"}
	checkPod(t, pod, false)
	name := "app.kubernetes.io/name"
	if m.Metadata.Labels["release"] != "prometheus" || m.Spec.Selector.MatchLabels[name] != pod.Labels[name] ||
		m.Spec.PodMetricsEndpoints[0].Port != pod.Spec.InitContainers[0].Ports[0].Name {
		t.Errorf("%+v", m)
	}
}

// Values that would be passed over in silence, or make a pod that does not start, are refused.
func TestHelmSchema(t *testing.T) {
	for values, says := range map[string]string{
		"cachesize: 5":                           "cachesize",
		"mount: {enable: true}":                  "enable",
		"cache: {hostPath: nvme}":                "hostPath",
		"cache: {hostPath: /a, claim: b}":        "cache",
		"memory: 4 GB":                           "memory",
		"parallelism: 0":                         "parallelism",
		"metrics: {podMonitor: {enabled: true}}": "metrics",
		"imagePullSecrets: [registry]":           "imagePullSecrets",
		"image: {pullPolicy: Sometimes}":         "pullPolicy",
		"trainer: {command: python}":             "command",
		"source: ''":                             "source",
		"terminationGracePeriodSeconds: 2":       "terminationGracePeriodSeconds",
	} {
		if out, err := render(t, values); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v\n%s", values, err, out)
		}
	}
}

// The check can fail: a field that the API does not know, one of a wrong type, and a wrong value.
func TestValidatorIsStrict(t *testing.T) {
	good := kustomize(t, "overlays/mount")
	if _, err := validate(good); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ from, to, says string }{
		{"restartPolicy: Always", "restartPolicyy: Always", "restartPolicyy"},
		{"mountPropagation: Bidirectional", "mountPropagations: Bidirectional", "mountPropagations"},
		{"privileged: true", "privileged: very", "privileged"},
		{"failureThreshold: ", "failureThreshold: x", "failureThreshold"},
		{"apiVersion: batch/v1", "apiVersion: batch/v9", "batch/v9"},
	} {
		bad := bytes.Replace(good, []byte(c.from), []byte(c.to), 1)
		if bytes.Equal(bad, good) {
			t.Errorf("%q is not in the manifest", c.from)
			continue
		}
		if _, err := validate(bad); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s was taken: %v", c.to, err)
		}
	}
}

// The manifests' commands are those of the binary: every flag that they give is one that it has.
func TestFlagsExist(t *testing.T) {
	bin := os.Getenv("DEPLOY_BINARY")
	if bin == "" {
		t.Fatal("DEPLOY_BINARY names no binary; `make deploy-check` sets it")
	}
	pods := map[string]*corev1.PodTemplateSpec{
		"helm": job(t, helm(t, "mount: {enabled: true}\nmetrics: {enabled: true}"))}
	for _, dir := range []string{"base", "overlays/mount", "overlays/monitored"} {
		pods[dir] = job(t, kustomize(t, dir))
	}
	pods["node-cache"] = pod(t, kustomize(t, "node-cache"), "DaemonSet")
	for name, set := range csiSets(t) {
		pods[name] = &set.Spec.Template
	}
	for name, pod := range pods {
		for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			if !strings.Contains(c.Image, "/shoal:") {
				continue // a trainer
			}
			checkFlags(t, bin, name, c.Args)
			for _, p := range []*corev1.Probe{c.StartupProbe, c.ReadinessProbe, c.LivenessProbe} {
				if p == nil {
					continue
				}
				checkFlags(t, bin, name, p.Exec.Command[1:])
			}
		}
	}
}
