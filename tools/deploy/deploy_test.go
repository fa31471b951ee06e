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
	m, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), filepath.Join(kubernetes, dir))
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
	c, err := loader.LoadDir(filepath.Join(kubernetes, "helm", "shoal"))
	if err != nil {
		t.Fatal(err)
	}
	v, err := chartutil.ReadValues([]byte(values))
	if err != nil {
		t.Fatal(err)
	}
	all, err := chartutil.ToRenderValues(c, v, chartutil.ReleaseOptions{Name: "run", Namespace: "training", IsInstall: true}, chartutil.DefaultCapabilities)
	if err != nil {
		t.Fatal(err)
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
	return out.Bytes()
}

// job returns the pod of the only Job in a stream that the API takes.
func job(t *testing.T, stream []byte) *corev1.PodTemplateSpec {
	t.Helper()
	kinds, err := validate(stream)
	if err != nil {
		t.Fatalf("%v\n%s", err, stream)
	}
	if len(kinds["Job"]) != 1 {
		t.Fatalf("%d jobs in\n%s", len(kinds["Job"]), stream)
	}
	var j struct {
		Spec struct{ Template corev1.PodTemplateSpec }
	}
	if err := yaml.Unmarshal(kinds["Job"][0], &j); err != nil {
		t.Fatal(err)
	}
	return &j.Spec.Template
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
		t.Error("the sidecar is no native one: the pod would wait for its end before the trainer, and for ever after it")
	}
	if s.RestartPolicy == corev1.RestartPolicyAlways || s.RestartPolicy == "" {
		t.Errorf("restartPolicy %q: the pod cannot complete", s.RestartPolicy)
	}
	for name, p := range map[string]*corev1.Probe{"startup": side.StartupProbe, "readiness": side.ReadinessProbe, "liveness": side.LivenessProbe} {
		switch {
		case p == nil || p.Exec == nil || !slices.Contains(p.Exec.Command, "health"):
			t.Errorf("the %s probe does not ask `shoal health`", name)
		case !slices.Contains(p.Exec.Command, "unix:///run/shoal/feed.sock"), mount != slices.Contains(p.Exec.Command, "/mnt/shoal/data"):
			t.Errorf("the %s probe asks %v", name, p.Exec.Command)
		case p.TimeoutSeconds <= 5: // of shoal health
			t.Errorf("the %s probe is cut off before it can say why", name)
		}
	}
	c := side.SecurityContext
	if c == nil || c.ReadOnlyRootFilesystem == nil || !*c.ReadOnlyRootFilesystem {
		t.Error("the sidecar's root file system can be written to")
	}
	privileged := c.Privileged != nil && *c.Privileged
	if privileged != mount {
		t.Errorf("privileged: %v", privileged)
	}
	if !mount && (c.RunAsNonRoot == nil || !*c.RunAsNonRoot || c.AllowPrivilegeEscalation == nil || *c.AllowPrivilegeEscalation ||
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
			if v.EmptyDir == nil || v.EmptyDir.SizeLimit == nil {
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

func TestKustomize(t *testing.T) {
	for dir, mount := range map[string]bool{"base": false, "overlays/feed-only": false, "overlays/mount": true, "overlays/monitored": true} {
		t.Run(dir, func(t *testing.T) {
			pod := job(t, kustomize(t, dir))
			checkPod(t, pod, mount)
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
		"metrics: {enabled: true}\nsource: s3://other/set\nextraArgs: [--order, 'torch:seed=7']\nenvFrom: [{secretRef: {name: s3}}]\nserviceAccountName: reader": false,
	} {
		t.Run(values, func(t *testing.T) {
			out := helm(t, values)
			pod := job(t, out)
			checkPod(t, pod, mount)
			if strings.Contains(values, "other") && (!bytes.Contains(out, []byte("s3://other/set")) || pod.Annotations["prometheus.io/port"] != "7071" || pod.Spec.ServiceAccountName != "reader") {
				t.Errorf("values are not taken:\n%s", out)
			}
		})
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
	pods := map[string]*corev1.PodTemplateSpec{"helm": job(t, helm(t, "mount: {enabled: true}\nmetrics: {enabled: true}"))}
	for _, dir := range []string{"base", "overlays/mount", "overlays/monitored"} {
		pods[dir] = job(t, kustomize(t, dir))
	}
	for name, pod := range pods {
		for _, c := range pod.Spec.InitContainers {
			checkFlags(t, bin, name, c.Args)
			for _, p := range []*corev1.Probe{c.StartupProbe, c.ReadinessProbe, c.LivenessProbe} {
				checkFlags(t, bin, name, p.Exec.Command[1:])
			}
		}
	}
}
