package csi

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/machine"
)

// disks is a Runner whose mounts are file systems in memory, each with a file that is named after its source. A source
// that begins with slow mounts once it may, without a word if it begins with slow-mute, and one that begins with bad
// fails.
type disks struct {
	answers daemon.Answers
	mu      sync.Mutex
	may     map[string]chan struct{} // by source
	running map[string]*daemon.Running
}

func newDisks() *disks {
	d := &disks{may: map[string]chan struct{}{}, running: map[string]*daemon.Running{}}
	d.answers.Failed = func(*daemon.Verb, error) {}
	d.answers.Run = d.serve
	return d
}

func name(source string) string { return strings.TrimPrefix(source, "s3://") }

func (d *disks) serve(ctx context.Context, v *daemon.Verb) error {
	source, path := v.Args[1], v.Args[2]
	if strings.HasPrefix(name(source), "bad") {
		return errors.New("it is bad")
	}
	if !strings.HasPrefix(name(source), "slow-mute") {
		v.Notice("listing")
	}
	select {
	case <-d.door(source):
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := unix.Mount(source, path, "tmpfs", 0, "size=1m"); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(path, name(source)), nil, 0o600); err != nil {
		return err
	}
	_ = v.Ready()
	for { // until it is unmounted
		if ctx.Err() != nil {
			return unix.Unmount(path, unix.MNT_DETACH)
		}
		if mounts, err := machine.Mounts("/"); err != nil || machine.Top(mounts, path) == nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

func (d *disks) door(source string) chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.may[source]
	if c == nil {
		c = make(chan struct{})
		if d.may[source] = c; !strings.HasPrefix(name(source), "slow") {
			close(c)
		}
	}
	return c
}

// Mount implements Runner.
func (d *disks) Mount(path string, v Volume, _ string) *daemon.Running {
	r := d.answers.Start(context.Background(), []string{"mount", v.Source, path}, "/", nil)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running[path] = r
	return r
}

// Usage implements Runner.
func (d *disks) Usage(string) (files, bytes int64, ok bool) { return 1, 2, true }

// held is what a keeper has.
func (d *disks) held() map[string]*daemon.Running {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := maps.Clone(d.running)
	maps.DeleteFunc(all, func(_ string, r *daemon.Running) bool { return is(r.Ended) || !is(r.Ready) })
	return all
}

// The driver against a model of two maps: what each pod has, and what it waits for.
func TestDriver(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounts need root")
	}
	root := t.TempDir()
	n := 0
	rapid.Check(t, func(t *rapid.T) {
		n++
		dir := filepath.Join(root, fmt.Sprintf("[%d", n)) // no pattern
		if err := os.MkdirAll(filepath.Join(dir, "pods"), 0o755); err != nil {
			t.Fatal(err)
		}
		run := newDisks()
		start := func(held map[string]*daemon.Running) *Driver {
			d, err := New("node", "test", dir, run, held)
			if err != nil {
				t.Fatal(err)
			}
			d.patience = 5 * time.Millisecond
			return d
		}
		d, bound, waits, open := start(nil), map[string]string{}, map[string]string{}, map[string]bool{}
		pods := rapid.SampledFrom([]string{"a", "b", "c", "d"})
		sources := rapid.SampledFrom([]string{"s3://x", "s3://y", "s3://slow1", "s3://slow2", "s3://bad"})
		target := func(pod string) string { return filepath.Join(dir, "pods", pod) }
		publish := func(pod, source string) error {
			_, err := d.NodePublishVolume(context.Background(),
				&csi.NodePublishVolumeRequest{VolumeId: pod, TargetPath: target(pod),
					VolumeContext: map[string]string{"source": source, pod + kubernetes: "not asked"}, Readonly: true,
					VolumeCapability: &csi.VolumeCapability{
						AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}}}})
			return err
		}
		unpublish := func(pod string) {
			if _, err := d.NodeUnpublishVolume(context.Background(),
				&csi.NodeUnpublishVolumeRequest{VolumeId: pod, TargetPath: target(pod)}); err != nil {
				t.Fatal(err)
			}
			delete(bound, pod)
			delete(waits, pod)
		}
		t.Repeat(map[string]func(*rapid.T){
			"publish": func(t *rapid.T) {
				pod, source := pods.Draw(t, "pod"), sources.Draw(t, "source")
				if had := bound[pod] + waits[pod]; had != "" { // the kubelet asks for one volume at one target
					source = had
				}
				err := publish(pod, source)
				switch late := strings.HasPrefix(name(source), "slow") && !open[source]; {
				case status.Code(err) == codes.DeadlineExceeded:
					waits[pod] = source
				case name(source) == "bad" && status.Code(err) == codes.FailedPrecondition &&
					strings.Contains(err.Error(), "it is bad"):
					delete(waits, pod)
				case err == nil && !late && name(source) != "bad":
					bound[pod] = source
					delete(waits, pod)
				default:
					t.Fatalf("%s for %s, late %v: %v", source, pod, late, err)
				}
			},
			"open": func(t *rapid.T) {
				source := rapid.SampledFrom([]string{"s3://slow1", "s3://slow2"}).Draw(t, "source")
				if door := run.door(source); !open[source] {
					close(door)
					open[source] = true
				}
			},
			"unpublish": func(t *rapid.T) { unpublish(pods.Draw(t, "pod")) },
			"killed": func(*rapid.T) { // what was starting is gone, and the kubelet asks again
				for _, r := range run.running {
					if !is(r.Ready) {
						r.End()
						<-r.Ended
					}
				}
				d = start(run.held())
			},
			"": func(t *rapid.T) {
				mounts, err := machine.Mounts("/")
				if err != nil {
					t.Fatal(err)
				}
				for _, pod := range []string{"a", "b", "c", "d"} {
					at := machine.Top(mounts, target(pod))
					if (at != nil) != (bound[pod] != "") {
						t.Fatalf("%s has %q, and mounted is %v", pod, bound[pod], at)
					}
					if at == nil {
						continue
					}
					if _, err := os.Lstat(filepath.Join(target(pod), name(bound[pod]))); err != nil {
						t.Fatalf("%s: %v", pod, err)
					}
					if err := os.WriteFile(filepath.Join(target(pod), "x"), nil, 0o600); !errors.Is(err, unix.EROFS) {
						t.Fatalf("a write: %v", err)
					}
				}
				used := slices.Concat(slices.Collect(maps.Values(bound)), slices.Collect(maps.Values(waits)))
				for _, m := range mounts {
					if filepath.Dir(m.Point) == filepath.Join(dir, "stages") && !slices.Contains(used, m.Source) {
						t.Fatalf("%s is staged, and nobody uses it: %v", m.Source, used)
					}
				}
			},
		})
		for _, pod := range []string{"a", "b", "c", "d"} {
			unpublish(pod)
		}
		for _, r := range run.running {
			<-r.Ended
		}
		for _, sub := range []string{"stages", "pods"} {
			if left, err := os.ReadDir(filepath.Join(dir, sub)); err != nil || len(left) > 0 {
				t.Fatalf("%s: %v, %v", sub, left, err)
			}
		}
	})
}

// podsDriver is a driver with a folder for pods in dir.
func podsDriver(t *testing.T) (d *Driver, run *disks, dir string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("mounts need root")
	}
	dir, run = t.TempDir(), newDisks()
	if err := os.Mkdir(filepath.Join(dir, "pods"), 0o755); err != nil {
		t.Fatal(err)
	}
	d, err := New("node", "test", dir, run, nil)
	if err != nil {
		t.Fatal(err)
	}
	return d, run, dir
}

// A Secret with new keys moves no pod that has its mount, and one that still waits for it waits for one stage alone.
func TestChangedSecret(t *testing.T) {
	d, run, dir := podsDriver(t)
	target := func(pod string) string { return filepath.Join(dir, "pods", pod) }
	publish := func(pod, key string) error {
		_, err := d.NodePublishVolume(t.Context(),
			&csi.NodePublishVolumeRequest{VolumeId: pod, TargetPath: target(pod), Readonly: true,
				VolumeContext: map[string]string{"source": "s3://slow-mute"},
				Secrets:       map[string]string{"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": key},
				VolumeCapability: &csi.VolumeCapability{
					AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}}}})
		return err
	}
	device := func(pod string) string {
		mounts, err := machine.Mounts("/")
		if err != nil || machine.Top(mounts, target(pod)) == nil {
			t.Fatalf("%s has no mount: %v", pod, err)
		}
		return machine.Top(mounts, target(pod)).Device
	}
	d.patience = time.Millisecond
	for _, key := range []string{"first", "second"} {
		if err := publish("a", key); status.Code(err) != codes.DeadlineExceeded || len(d.stages) != 1 ||
			!strings.HasSuffix(err.Error(), ": it is being opened") {
			t.Fatalf("%d stages: %v", len(d.stages), err)
		}
	}
	close(run.door("s3://slow-mute"))
	d.patience = time.Hour
	steps := []struct {
		pod, key string
		stages   int
	}{{"a", "second", 1}, {"a", "third", 1}, {"b", "third", 2}, {"a", "third", 2}, {"b", "third", 2}}
	var was string
	for _, step := range steps {
		if err := publish(step.pod, step.key); err != nil || len(d.stages) != step.stages {
			t.Fatalf("%v: %d stages, %v", step, len(d.stages), err)
		}
		if was == "" {
			was = device("a")
		}
		if device("a") != was || step.pod == "b" && device("b") == was {
			t.Errorf("%v: a has %s and had %s", step, device("a"), was)
		}
	}
	for _, pod := range []string{"a", "b"} {
		if _, err := d.NodeUnpublishVolume(t.Context(),
			&csi.NodeUnpublishVolumeRequest{VolumeId: pod, TargetPath: target(pod)}); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range run.running {
		<-r.Ended
	}
}

// A kubelet that is gone gets no mount, though the stage is ready, and what it wanted ends without the pod's folder.
func TestPublishForNobody(t *testing.T) {
	d, run, dir := podsDriver(t)
	gone, end := context.WithCancel(t.Context())
	end()
	for pod, ctx := range []context.Context{t.Context(), gone} {
		target := filepath.Join(dir, "pods", fmt.Sprint(pod))
		_, err := d.NodePublishVolume(ctx,
			&csi.NodePublishVolumeRequest{VolumeId: "v", TargetPath: target, Readonly: true,
				VolumeContext: map[string]string{"source": "s3://x"},
				VolumeCapability: &csi.VolumeCapability{
					AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}}}})
		mounts, failed := machine.Mounts("/")
		if bound := machine.Top(mounts, target) != nil; failed != nil || bound != (ctx != gone) ||
			status.Code(err) != map[bool]codes.Code{true: codes.OK, false: codes.Canceled}[bound] {
			t.Errorf("pod %d: bound %v, %v, %v", pod, bound, err, failed)
		}
	}
	for pod := range 2 {
		if _, err := d.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: "v",
			TargetPath: filepath.Join(dir, "pods", fmt.Sprint(pod))}); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(filepath.Join(dir, "pods")); err != nil { // the other pod's folder, too
			t.Fatal(err)
		}
	}
	for _, r := range run.running {
		<-r.Ended
	}
}

// What a volume is mounted with never has the driver's rights beside others'.
func TestVolumeEnv(t *testing.T) {
	environ := []string{"AWS_ACCESS_KEY_ID=driver", "AWS_SECRET_ACCESS_KEY=driver", "AWS_PROFILE=driver",
		"AWS_ROLE_ARN=driver", "AWS_WEB_IDENTITY_TOKEN_FILE=driver",
		"AWS_CONTAINER_CREDENTIALS_FULL_URI=driver", "HOME=driver", "AWS_REGION=here", "AWS_ENDPOINT_URL=http://store",
		"AWS_ENDPOINT_URL_S3=http://s3", "PATH=x"}
	token := `{"sts.amazonaws.com": {"token": "t", "expirationTimestamp": "2030-01-01T00:00:00Z"}}`
	keys := map[string]string{"AWS_ACCESS_KEY_ID": "pod", "AWS_SECRET_ACCESS_KEY": "pod"}
	for _, row := range []struct {
		attributes, secrets map[string]string
		want                map[string]string
	}{
		{map[string]string{}, nil, map[string]string{"AWS_ACCESS_KEY_ID": "driver", "AWS_SECRET_ACCESS_KEY": "driver",
			"AWS_PROFILE": "driver", "AWS_ROLE_ARN": "driver",
			"AWS_WEB_IDENTITY_TOKEN_FILE": "driver", "AWS_CONTAINER_CREDENTIALS_FULL_URI": "driver", "HOME": "driver",
			"AWS_REGION":       "here",
			"AWS_ENDPOINT_URL": "http://store", "AWS_ENDPOINT_URL_S3": "http://s3"}},
		{map[string]string{}, keys, map[string]string{"AWS_ACCESS_KEY_ID": "pod", "AWS_SECRET_ACCESS_KEY": "pod",
			"AWS_EC2_METADATA_DISABLED": "true",
			"AWS_REGION":                "here", "AWS_ENDPOINT_URL": "http://store",
			"AWS_ENDPOINT_URL_S3": "http://s3"}},
		{map[string]string{"role": "r", pod + "serviceAccount.tokens": token}, nil,
			map[string]string{"AWS_ROLE_ARN": "r", "AWS_WEB_IDENTITY_TOKEN_FILE": "file",
				"AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "here", "AWS_ENDPOINT_URL": "http://store",
				"AWS_ENDPOINT_URL_S3": "http://s3"}},
		{map[string]string{"endpoint": "http://mine", "region": "there"}, keys,
			map[string]string{"AWS_ACCESS_KEY_ID": "pod", "AWS_SECRET_ACCESS_KEY": "pod",
				"AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "there", "AWS_ENDPOINT_URL": "http://mine"}},
	} {
		row.attributes["source"] = "s3://x"
		v, err := volumeOf(row.attributes, row.secrets)
		if got := v.Env(environ, "file"); err != nil || !maps.Equal(got, row.want) {
			t.Errorf("%v, %v: %v, %v", row.attributes, row.secrets, got, err)
		}
		if (v.Scope() == "") != (len(row.attributes) == 1 && row.secrets == nil) {
			t.Errorf("%v: scope %q", row.attributes, v.Scope())
		}
	}
}

// Volumes share a stage if they ask for the same with the same rights, and bytes if where and whose they are is the
// same.
func TestVolumeScopes(t *testing.T) {
	of := func(attributes, secrets map[string]string) Volume {
		t.Helper()
		v, err := volumeOf(attributes, secrets)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	role := func(token, account string) Volume {
		return of(map[string]string{"source": "s3://x",
			"role": "r", pod + "pod.namespace": "n", pod + "serviceAccount.name": account,
			pod + "serviceAccount.tokens": `{"sts.amazonaws.com": {"token": "` + token + `"}}`}, nil)
	}
	keys := func(secret string) map[string]string {
		return map[string]string{"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": secret}
	}
	plain := of(map[string]string{"source": "s3://x"}, nil)
	ordered := of(map[string]string{"source": "s3://x", "order": "torch:seed=1"}, nil)
	if plain.id() == ordered.id() || plain.Scope() != ordered.Scope() {
		t.Error("another order is not another stage of one dataset")
	}
	if a, b := role("t1", "a"), role("t2", "a"); a.id() != b.id() {
		t.Error("a new token is another stage")
	}
	seen := map[string]int{}
	for i, v := range []Volume{plain, of(map[string]string{"source": "s3://x"}, keys("1")),
		of(map[string]string{"source": "s3://x"}, keys("2")),
		role("t", "a"), role("t", "b"), of(map[string]string{"source": "s3://x", "region": "there"}, nil),
		of(map[string]string{"source": "s3://x", "endpoint": "http://mine"}, keys("1"))} {
		if other, is := seen[v.Scope()]; is {
			t.Errorf("%d and %d have one scope", i, other)
		}
		seen[v.Scope()] = i
	}
}

func FuzzVolume(f *testing.F) {
	f.Add("source", "s3://x", "order", "list:/etc/passwd", "AWS_ACCESS_KEY_ID")
	f.Add("shards", "file:///x", pod+"serviceAccount.tokens", "{", "role")
	f.Fuzz(func(t *testing.T, k1, v1, k2, v2, secret string) {
		v, err := volumeOf(map[string]string{"source": "s3://b/p", k1: v1, k2: v2}, map[string]string{secret: v1})
		if err != nil {
			return
		}
		if !strings.HasPrefix(v.Source, "s3://") || strings.Contains(v.Flags["order"], "list:") ||
			v.Own["AWS_ENDPOINT_URL"] != "" && !v.Rights {
			t.Errorf("%+v", v)
		}
		for name := range v.Env(nil, "") {
			if strings.Contains(name, "FILE") && v.Role == "" || name == "AWS_PROFILE" || name == "AWS_CA_BUNDLE" {
				t.Errorf("%s is set: %+v", name, v)
			}
		}
	})
}
