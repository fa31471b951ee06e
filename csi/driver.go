// Package csi is the node's part of Kubernetes' Container Storage Interface: a volume is a dataset, mounted for a pod,
// and read-only.
//
// A stage is a mount in the driver's folder. All volumes of a node that ask for the same, with the same rights, have
// one stage, and each pod's target is a bind mount of it. A stage is
//
//   - absent: nothing is mounted at its path.
//   - starting: its verb runs. Who publishes waits, for patience at a time; then the kubelet asks again, or
//     unpublishes. If the verb fails, the stage is absent, and all who wait get its error.
//   - ready: targets are bound to it.
//   - ending, once its last target is gone and none is wanted: it is unmounted, and its verb ends.
//
// The kernel's table of mounts says which targets a stage has, so a driver that starts again knows what the one before
// it did. A keeper holds the stages meanwhile (internal/daemon), and each verb is run again. Other mounts in the
// driver's folder are dead, and are detached.
//
// What a volume of other rights has read is never used: its scope is a part of the dataset's identity.
//
// The kubelet publishes a volume again and again, for new tokens. If its Secret has other keys by then, the pod's
// target stays with its stage all the same: the containers that run would not see another mount.
package csi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/shoalfs/shoal/csi/registrationpb"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/machine"
)

// Name is the driver's.
const Name = "csi.shoalfs.dev"

// patience is how long a request waits for a stage. Then its user sees what takes so long.
const patience = 8 * time.Second

// Runner serves stages.
type Runner interface {
	// Mount begins to serve v at path, an empty folder. tokenFile has the service account's token, if v has a role.
	Mount(path string, v Volume, tokenFile string) *daemon.Running
	// Usage returns the files and bytes of a mount; ok is false while it is not served.
	Usage(path string) (files, bytes int64, ok bool)
}

// Driver is csi.NodeServer and csi.IdentityServer.
type Driver struct {
	csi.UnimplementedNodeServer
	csi.UnimplementedIdentityServer
	node, version string
	dir           string
	run           Runner
	patience      time.Duration

	mu     sync.Mutex // of the stages, and of changes to the table of mounts
	stages map[string]*stage
}

type stage struct {
	*daemon.Running
	wanted map[string]bool // targets that were asked for and are not bound yet
}

// New returns the driver of a node. The stages that a predecessor has left are in held, by path.
func New(node, version, dir string, run Runner, held map[string]*daemon.Running) (*Driver, error) {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, err
	}
	d := &Driver{node: node, version: version, dir: dir, run: run, patience: patience, stages: map[string]*stage{}}
	for _, sub := range []string{"stages", "tokens"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return nil, err
		}
	}
	mounts, err := machine.Mounts("/")
	if err != nil {
		return nil, err
	}
	// One that is not mounted there any more is used by pods alone, and ends with the last of them.
	for path, r := range held {
		if filepath.Dir(path) == filepath.Join(dir, "stages") && machine.Top(mounts, path) != nil {
			d.stages[path] = &stage{r, map[string]bool{}}
		}
	}
	left, err := fs.Glob(os.DirFS(dir), "*/????????????????") // what Volume.id makes
	for _, path := range left {
		if stage := filepath.Join(dir, "stages", filepath.Base(path)); d.stages[stage] == nil {
			err = errors.Join(err, detach(filepath.Join(dir, path)))
		}
	}
	return d, err
}

func (d *Driver) tokenFile(path string) string {
	return filepath.Join(d.dir, "tokens", filepath.Base(path))
}

// NodePublishVolume implements csi.NodeServer.
func (d *Driver) NodePublishVolume(ctx context.Context, r *csi.NodePublishVolumeRequest) (
	*csi.NodePublishVolumeResponse, error) {
	if r.GetVolumeId() == "" || r.GetTargetPath() == "" || r.GetVolumeCapability() == nil {
		return nil, status.Error(codes.InvalidArgument, "a volume's id, target path or capability is missing")
	}
	v, err := volumeOf(r.GetVolumeContext(), r.GetSecrets())
	flags, unbindable := bindFlags(r.GetVolumeCapability(), r.GetReadonly(),
		r.GetVolumeContext()[pod+"ephemeral"] == "true")
	target, nowhere := placeOf(r.GetTargetPath())
	if err = cmp.Or(err, unbindable, nowhere); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	path, s, err := d.begin(target, v)
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	select {
	case <-s.Ready:
	case <-s.Ended:
	case <-time.After(d.patience):
	case <-ctx.Done():
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case ctx.Err() != nil: // a kubelet that is gone would not take the mount away
		return nil, status.FromContextError(ctx.Err()).Err()
	case is(s.Ended):
		d.tidy()
		err := cmp.Or(s.Err, errors.New("it was unmounted meanwhile (the kubelet asks again)"))
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	case !is(s.Ready):
		return nil, status.Errorf(codes.DeadlineExceeded, "%s is not mounted yet, and goes on: %s", v.Source,
			cmp.Or(s.Said(), "it is being opened"))
	}
	if err := bind(path, target, flags); err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	delete(s.wanted, target)
	return &csi.NodePublishVolumeResponse{}, nil
}

func is(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// begin returns the stage that target has, or else the one for v, of which target, and of no other, is wanted now.
func (d *Driver) begin(target string, v Volume) (path string, s *stage, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	mounts, err := machine.Mounts("/")
	if err != nil {
		return "", nil, err
	}
	path = cmp.Or(d.shown(mounts, target), filepath.Join(d.dir, "stages", v.id()))
	for other, s := range d.stages {
		if other != path {
			delete(s.wanted, target)
		}
	}
	d.tidy()
	if v.token != "" { // it changes, and is read again
		file := d.tokenFile(path)
		if err := os.WriteFile(file+".new", []byte(v.token), 0o600); err != nil {
			return "", nil, err
		}
		if err := os.Rename(file+".new", file); err != nil {
			return "", nil, err
		}
	}
	if s = d.stages[path]; s == nil {
		if err := os.MkdirAll(path, 0o700); err != nil {
			return "", nil, err
		}
		s = &stage{d.run.Mount(path, v, d.tokenFile(path)), map[string]bool{}}
		d.stages[path] = s
	}
	s.wanted[target] = true
	return path, s, nil
}

// shown returns the path of the stage that is mounted at target, too; "" if there is none that lives.
func (d *Driver) shown(mounts []machine.Mount, target string) string {
	if at := machine.Top(mounts, target); at != nil {
		for path, s := range d.stages {
			if m := machine.Top(mounts, path); m != nil && m.Device == at.Device && !is(s.Ended) {
				return path
			}
		}
	}
	return ""
}

// NodeUnpublishVolume implements csi.NodeServer.
func (d *Driver) NodeUnpublishVolume(_ context.Context, r *csi.NodeUnpublishVolumeRequest) (
	*csi.NodeUnpublishVolumeResponse, error) {
	if r.GetVolumeId() == "" || r.GetTargetPath() == "" {
		return nil, status.Error(codes.InvalidArgument, "a volume's id or target path is missing")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	target, err := placeOf(r.GetTargetPath())
	if err == nil {
		err = detach(target)
	} else if errors.Is(err, fs.ErrNotExist) { // its folder is gone, and a stage may still be wanted there
		target, err = filepath.Clean(r.GetTargetPath()), nil
	}
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	for _, s := range d.stages {
		delete(s.wanted, target)
	}
	d.tidy()
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// tidy ends stages that nobody uses. d.mu is locked.
func (d *Driver) tidy() {
	mounts, err := machine.Mounts("/")
	if err != nil {
		slog.Error("stages that nobody uses are not ended", "cause", err)
		return
	}
	for path, s := range d.stages {
		there := !is(s.Ready) || machine.Top(mounts, path) != nil // else it was detached, and is of no use to others
		if !is(s.Ended) && (len(s.wanted) > 0 && there || bound(mounts, path)) {
			continue
		}
		delete(d.stages, path)
		if err := errors.Join(detach(path), os.RemoveAll(d.tokenFile(path))); err != nil {
			slog.Error("a stage is not ended", "path", path, "cause", err)
		}
		if !is(s.Ready) { // the others end since they are unmounted
			s.End()
		}
	}
}

// NodeGetVolumeStats implements csi.NodeServer. It asks no mount, which may be of this process.
func (d *Driver) NodeGetVolumeStats(_ context.Context, r *csi.NodeGetVolumeStatsRequest) (
	*csi.NodeGetVolumeStatsResponse, error) {
	if r.GetVolumeId() == "" || r.GetVolumePath() == "" {
		return nil, status.Error(codes.InvalidArgument, "a volume's id or path is missing")
	}
	target, err := placeOf(r.GetVolumePath())
	if err != nil {
		return nil, status.Error(codes.NotFound, err.Error())
	}
	mounts, err := machine.Mounts("/")
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	if machine.Top(mounts, target) == nil {
		return nil, status.Errorf(codes.NotFound, "nothing is mounted at %s", target)
	}
	condition := &csi.VolumeCondition{Abnormal: true,
		Message: "no daemon serves it: one that starts takes it over, or it is dead (then delete the pod)"}
	var usage []*csi.VolumeUsage
	d.mu.Lock()
	defer d.mu.Unlock()
	if files, bytes, ok := d.run.Usage(d.shown(mounts, target)); ok {
		condition = &csi.VolumeCondition{Message: "served"}
		usage = []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: bytes, Used: bytes},
			{Unit: csi.VolumeUsage_INODES, Total: files, Used: files}}
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: usage, VolumeCondition: condition}, nil
}

// NodeGetCapabilities implements csi.NodeServer.
func (d *Driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (
	*csi.NodeGetCapabilitiesResponse, error) {
	can := func(t csi.NodeServiceCapability_RPC_Type) *csi.NodeServiceCapability {
		rpc := &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}}
		return &csi.NodeServiceCapability{Type: rpc}
	}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{
		can(csi.NodeServiceCapability_RPC_GET_VOLUME_STATS), can(csi.NodeServiceCapability_RPC_VOLUME_CONDITION)}}, nil
}

// NodeGetInfo implements csi.NodeServer.
func (d *Driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.node}, nil
}

// GetPluginInfo implements csi.IdentityServer.
func (d *Driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: Name, VendorVersion: d.version}, nil
}

// GetPluginCapabilities implements csi.IdentityServer.
func (d *Driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (
	*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{}, nil
}

// Probe implements csi.IdentityServer.
func (d *Driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}

// placeOf returns a path as the kernel names it. What is mounted there is not asked.
func placeOf(path string) (string, error) {
	if !filepath.IsAbs(path) {
		return "", fmt.Errorf("the path %q is not absolute", path)
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(filepath.Clean(path)))
	return filepath.Join(dir, filepath.Base(path)), err
}

// bound reports whether the mount at a stage's path is anywhere else, too.
func bound(mounts []machine.Mount, path string) bool {
	at := machine.Top(mounts, path)
	return at != nil && slices.ContainsFunc(mounts, func(m machine.Mount) bool {
		return m.Device == at.Device && m.Point != path
	})
}

// bind makes a target of a stage, unless it is one.
func bind(path, target string, flags uintptr) error {
	mounts, err := machine.Mounts("/")
	if err != nil {
		return err
	}
	from, at := machine.Top(mounts, path), machine.Top(mounts, target)
	switch {
	case from == nil:
		return fmt.Errorf("%s is not mounted any more (the kubelet asks again)", path)
	case at != nil && at.Device == from.Device:
		return nil
	case at != nil: // of a driver that is gone
		err = detach(target)
	}
	if err = errors.Join(err, os.MkdirAll(target, 0o750)); err != nil {
		return err
	}
	if err = unix.Mount(path, target, "", unix.MS_BIND, ""); err == nil {
		err = unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|flags, "")
	}
	if err != nil {
		return errors.Join(&os.PathError{Op: "bind", Path: target, Err: err}, detach(target))
	}
	return nil
}

// detach unmounts all that is mounted at a path, in use or not, and removes the folder.
func detach(path string) error {
	var err error
	for err == nil {
		err = unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	}
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, fs.ErrNotExist) { // nothing is mounted there, or nothing there
		return &os.PathError{Op: "unmount", Path: path, Err: err}
	}
	if err = os.Remove(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Dir returns the driver's folder in the kubelet's.
func Dir(kubelet string) string { return filepath.Join(kubelet, "plugins", Name) }

// Serve answers the kubelet, and makes the driver known to it, until ctx ends. ready is called once it listens.
func (d *Driver) Serve(ctx context.Context, kubelet string, ready func() error) error {
	endpoint := filepath.Join(Dir(kubelet), "csi.sock")
	log := grpc.UnaryInterceptor(
		func(ctx context.Context, in any, info *grpc.UnaryServerInfo, do grpc.UnaryHandler) (any, error) {
			out, err := do(ctx, in)
			if v, of := in.(interface{ GetVolumeId() string }); of && err != nil {
				slog.Warn("a request of the kubelet failed", "request", filepath.Base(info.FullMethod),
					"volume", v.GetVolumeId(), "cause", err)
			}
			return out, err
		})
	plugin, registration := grpc.NewServer(log), grpc.NewServer()
	csi.RegisterIdentityServer(plugin, d)
	csi.RegisterNodeServer(plugin, d)
	registrationpb.RegisterRegistrationServer(registration, registrar{endpoint: endpoint})
	defer plugin.Stop()
	defer registration.Stop()
	ended := make(chan error, 2)
	for _, s := range []struct { // who is registered must answer
		path string
		*grpc.Server
	}{{endpoint, plugin}, {filepath.Join(kubelet, "plugins_registry", Name+"-reg.sock"), registration}} {
		if err := os.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		l, err := net.Listen("unix", s.path)
		if err != nil {
			return fmt.Errorf("%w (is the kubelet's folder %s mounted here?)", err, kubelet)
		}
		go func() { ended <- s.Serve(l) }()
	}
	if err := ready(); err != nil {
		return err
	}
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return nil
	}
}

type registrar struct {
	registrationpb.UnimplementedRegistrationServer
	endpoint string
}

func (r registrar) GetInfo(context.Context, *registrationpb.InfoRequest) (*registrationpb.PluginInfo, error) {
	return &registrationpb.PluginInfo{Type: "CSIPlugin", Name: Name, Endpoint: r.endpoint,
		SupportedVersions: []string{"1.0.0"}}, nil
}

func (r registrar) NotifyRegistrationStatus(_ context.Context, s *registrationpb.RegistrationStatus) (
	*registrationpb.RegistrationStatusResponse, error) {
	if s.GetPluginRegistered() {
		slog.Info("the kubelet knows the driver", "driver", Name)
	} else {
		slog.Error("the kubelet refuses the driver", "driver", Name, "cause", s.GetError())
	}
	return &registrationpb.RegistrationStatusResponse{}, nil
}
