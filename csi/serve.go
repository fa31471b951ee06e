package csi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/shoalfs/shoal/csi/registrationpb"
)

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
