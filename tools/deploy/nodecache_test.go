package deploy

import (
	"bytes"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"
)

// The parts of the node cache fit together: etcd, the service, the certificates, the policies and a trainer find what
// they name.
func TestNodeCache(t *testing.T) {
	out := kustomize(t, "overlays/node-cache")
	node, store, trainer := pod(t, out, "DaemonSet"), pod(t, out, "Deployment"), pod(t, out, "Job")
	kinds, err := validate(out)
	if err != nil {
		t.Fatal(err)
	}
	c := node.Spec.Containers[0]
	checkNode(t, node, c)

	services := map[string]corev1.Service{}
	for _, doc := range kinds["Service"] {
		var s corev1.Service
		if err := yaml.Unmarshal(doc, &s); err != nil {
			t.Fatal(err)
		}
		services[s.Name] = s
	}
	peers, etcd := services["shoal-nodes"].Spec, services["etcd"].Spec
	if peers.ClusterIP != corev1.ClusterIPNone || !selects(peers.Selector, node.Labels) ||
		peers.Ports[0].TargetPort.StrVal != c.Ports[0].Name {
		t.Errorf("the headless service does not lead to the nodes: %+v", peers)
	}
	if !selects(etcd.Selector, store.Labels) ||
		etcd.Ports[0].TargetPort.StrVal != store.Spec.Containers[0].Ports[0].Name ||
		!bytes.Contains(out, []byte("SHOAL_CLUSTER: etcd://etcd:2379/photos\n")) ||
		etcd.Ports[0].Port != 2379 || store.Spec.Containers[0].Ports[0].ContainerPort != 2379 {
		t.Errorf("the nodes do not find etcd: %+v", etcd)
	}

	open := map[string]bool{}
	for _, doc := range kinds["NetworkPolicy"] {
		var p networkingv1.NetworkPolicy
		if err := yaml.Unmarshal(doc, &p); err != nil {
			t.Fatal(err)
		}
		for name, to := range map[string]*corev1.PodTemplateSpec{"node": node, "etcd": store} {
			from := p.Spec.Ingress[0].From[0].PodSelector.MatchLabels
			if !selects(p.Spec.PodSelector.MatchLabels, to.Labels) {
				continue
			}
			open[name] = p.Spec.Ingress[0].Ports[0].Port.StrVal == to.Spec.Containers[0].Ports[0].Name &&
				selects(from, node.Labels)
			if selects(from, trainer.Labels) {
				t.Errorf("a trainer reaches the %s", name)
			}
		}
	}
	if !open["node"] || !open["etcd"] {
		t.Errorf("the policies let nodes reach %v", open)
	}
	if s := store.Spec.Containers[0].SecurityContext; !*s.ReadOnlyRootFilesystem || *s.AllowPrivilegeEscalation ||
		!*store.Spec.SecurityContext.RunAsNonRoot {
		t.Errorf("etcd has rights: %+v", s)
	}

	// The trainer reads what the node offers, without rights.
	reads, offers := folders(trainer), folders(node)
	for _, at := range []string{"/mnt/shoal", "/run/shoal"} {
		if reads[at] == "" || reads[at] != offers[at] {
			t.Errorf("%s is %q for the trainer, %q for the node", at, reads[at], offers[at])
		}
	}
	if s := trainer.Spec; len(s.InitContainers) > 0 || s.Containers[0].SecurityContext != nil ||
		*s.Containers[0].VolumeMounts[0].MountPropagation != corev1.MountPropagationHostToContainer ||
		!slices.Contains(s.SecurityContext.SupplementalGroups, *c.SecurityContext.RunAsGroup) {
		t.Errorf("the trainer: %+v", s)
	}
}

// checkNode tells what is wrong with the daemon's pod beyond what a schema can say.
func checkNode(t *testing.T, node *corev1.PodTemplateSpec, c corev1.Container) {
	t.Helper()
	has := func(arg string) bool { return slices.Contains(c.Args, arg) }
	for _, want := range []string{"--advertise=[$(POD_IP)]:7073", "--mount=/mnt/shoal/data", "--allow-other",
		"--listen=unix:///run/shoal/feed.sock", "--cache-dir=/var/cache/shoal/photos"} {
		if !has(want) {
			t.Errorf("%s is missing in %v", want, c.Args)
		}
	}
	if e := c.Env[0]; e.Name != "POD_IP" || e.ValueFrom.FieldRef.FieldPath != "status.podIP" ||
		c.Ports[0].ContainerPort != 7073 {
		t.Errorf("the address for other nodes is of %+v", e)
	}
	if !*c.SecurityContext.Privileged || *c.SecurityContext.RunAsUser != 0 ||
		!*c.SecurityContext.ReadOnlyRootFilesystem {
		t.Errorf("%+v", c.SecurityContext)
	}
	for name, p := range map[string]*corev1.Probe{"startup": c.StartupProbe, "readiness": c.ReadinessProbe,
		"liveness": c.LivenessProbe} {
		if want := []string{"/usr/bin/shoal", "health", "unix:///run/shoal/feed.sock",
			"/mnt/shoal/data"}; !slices.Equal(p.Exec.Command, want) || p.TimeoutSeconds <= 5 {
			t.Errorf("the %s probe is %+v", name, p)
		}
	}
	at := folders(node)
	for _, path := range []string{"/var/cache/shoal", "/run/shoal", "/mnt/shoal"} {
		if !strings.HasPrefix(at[path], "/var/lib/shoal/") {
			t.Errorf("%s is not a folder of the node: %v", path, at)
		}
	}
	for _, m := range c.VolumeMounts {
		v := node.Spec.Volumes[slices.IndexFunc(node.Spec.Volumes, func(v corev1.Volume) bool {
			return v.Name == m.Name
		})]
		if (m.MountPropagation != nil && *m.MountPropagation == corev1.MountPropagationBidirectional) !=
			(m.MountPath == "/mnt/shoal") {
			t.Errorf("propagation of %s: %v", m.MountPath, m.MountPropagation)
		}
		if v.Secret == nil {
			continue
		}
		// Of the environment, as the cluster's name is: what kubectl exec runs in the container has them, too.
		for _, want := range []corev1.EnvVar{{Name: "SHOAL_CLUSTER_CERT", Value: m.MountPath + "/tls.crt"},
			{Name: "SHOAL_CLUSTER_KEY", Value: m.MountPath + "/tls.key"},
			{Name: "SHOAL_CLUSTER_CA", Value: m.MountPath + "/ca.crt"}} {
			if !slices.Contains(c.Env, want) || !m.ReadOnly || v.Secret.SecretName != "shoal-cluster" ||
				*v.Secret.DefaultMode != 0o400 {
				t.Errorf("%+v is missing in %v, or the secret is not for the daemon alone: %+v", want, c.Env, v.Secret)
			}
		}
	}
}

// folders returns the folders of the node that a pod's first container has, by their paths in it.
func folders(p *corev1.PodTemplateSpec) map[string]string {
	of, at := map[string]string{}, map[string]string{}
	for _, v := range p.Spec.Volumes {
		if v.HostPath != nil {
			of[v.Name] = v.HostPath.Path
		}
	}
	for _, m := range p.Spec.Containers[0].VolumeMounts {
		at[m.MountPath] = of[m.Name]
	}
	return at
}

func selects(selector, labels map[string]string) bool {
	wanted := maps.Clone(labels)
	maps.Copy(wanted, selector)
	return len(selector) > 0 && maps.Equal(wanted, labels)
}
