package deploy

import (
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"sigs.k8s.io/yaml"
)

// csiSets returns the DaemonSets of the CSI driver by name.
func csiSets(t *testing.T) map[string]appsv1.DaemonSet {
	t.Helper()
	kinds, err := validate(kustomize(t, "csi"))
	if err != nil {
		t.Fatal(err)
	}
	sets := map[string]appsv1.DaemonSet{}
	for _, doc := range kinds["DaemonSet"] {
		var s appsv1.DaemonSet
		if err := yaml.Unmarshal(doc, &s); err != nil {
			t.Fatal(err)
		}
		sets[s.Name] = s
	}
	return sets
}

// The parts of the CSI driver fit together: driver and keeper share a socket, which outlives both, and a trainer names
// the driver.
func TestCSI(t *testing.T) {
	sets := csiSets(t)
	keeper, driver := sets["shoal-keeper"].Spec, sets["shoal-csi"].Spec
	if keeper.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType {
		t.Errorf("the keeper is updated with the driver: %+v", keeper.UpdateStrategy)
	}
	if at, of := folders(&keeper.Template), folders(&driver.Template); at["/run/shoal"] == "" ||
		at["/run/shoal"] != of["/run/shoal"] || of["/var/lib/kubelet"] != "/var/lib/kubelet" {
		t.Errorf("folders: %v, %v", at, of)
	}
	if !driver.Template.Spec.HostPID {
		t.Error("the driver does not see who reads: all pods of a volume are one reader to it")
	}
	c := driver.Template.Spec.Containers[0]
	if i := slices.IndexFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == "SHOAL_KEEPER" }); i < 0 ||
		c.Env[i].Value != keeper.Template.Spec.Containers[0].Args[1] {
		t.Errorf("the driver's keeper: %+v", c.Env)
	}
	if s := keeper.Template.Spec.Containers[0].SecurityContext; s.Privileged != nil || *s.AllowPrivilegeEscalation ||
		!*s.ReadOnlyRootFilesystem || len(s.Capabilities.Drop) != 1 {
		t.Errorf("the keeper has rights: %+v", s)
	}
	kinds, err := validate(kustomize(t, "csi"))
	if err != nil {
		t.Fatal(err)
	}
	var d storagev1.CSIDriver
	if err := yaml.Unmarshal(kinds["CSIDriver"][0], &d); err != nil {
		t.Fatal(err)
	}
	if len(d.Spec.VolumeLifecycleModes) != 2 || *d.Spec.AttachRequired || !*d.Spec.PodInfoOnMount ||
		!*d.Spec.RequiresRepublish || d.Spec.TokenRequests[0].Audience != "sts.amazonaws.com" {
		t.Errorf("%+v", d.Spec)
	}
	trainer := pod(t, kustomize(t, "overlays/csi"), "Job")
	if v := trainer.Spec.Volumes[0].CSI; v.Driver != d.Name || !*v.ReadOnly {
		t.Errorf("%+v", v)
	}
}
