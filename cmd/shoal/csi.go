package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/csi"
	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/internal/prom"
)

// scopeEnv has, for the verb of a volume, with whose rights it reads (csi.Volume.Scope).
const scopeEnv = "SHOAL_SCOPE"

func csiCommand() *cobra.Command {
	var eo engineOptions
	var node, kubelet string
	c := &cobra.Command{
		Use:   "csi",
		Short: "Mount volumes for the pods of a Kubernetes node, from one cache",
		Long: `Runs the node plugin of the CSI driver csi.shoalfs.dev, which mounts volumes for pods, each a dataset in a bucket. All
share the daemon's memory and cache directory, but no data read with other credentials (docs/kubernetes.md).

It needs a keeper (shoal keeper) at the address in SHOAL_KEEPER, which holds the mounts while the driver is replaced.`,
		Example: "  shoal csi --node-id $NODE_NAME --cache-dir /var/cache/shoal --cache-size 500GiB",
		RunE: func(c *cobra.Command, _ []string) error {
			inv := invocationOf(c.Context())
			keeper := os.Getenv(daemon.KeeperEnv)
			switch {
			case keeper == "":
				return cli.Usagef("%s is not set: give the address of a keeper, such as unix:///run/shoal/keeper.sock",
					daemon.KeeperEnv)
			case eo.cacheDir == "":
				return cli.Usagef("give a --cache-dir on a disk of the node")
			}
			if err := eo.resolveCacheDir(inv, ""); err != nil {
				return err
			}
			host, err := eo.host(inv)
			if err != nil {
				return err
			}
			inv.logLimits(host.Logger)
			if err := daemon.Connect(keeper, eo.cacheDir); err != nil {
				return err
			}
			o, err := ownHost(c.Context(), host)
			for start := time.Now(); errors.Is(err, cachedir.ErrInUse) && time.Since(start) < silentPatience; {
				if err = pause.For(c.Context(), 50*time.Millisecond); err == nil { // a probe has it for a moment
					o, err = ownHost(c.Context(), host)
				}
			}
			if err != nil {
				return err
			}
			name, _ := os.Hostname() // else it must be given
			return o.closeAfter(c.Context(), o.drive(c.Context(), cmp.Or(node, name), kubelet, eo.admin))
		},
	}
	f := c.Flags()
	f.StringVar(&node, "node-id", "", "this node's name in the cluster (default: the host's name)")
	f.StringVar(&kubelet, "kubelet-dir", "/var/lib/kubelet",
		"the kubelet's folder, mounted here with Bidirectional propagation")
	f.StringVar(&eo.admin, "admin", "",
		"HOST:PORT for /metrics, of each dataset, and /healthz, such as 127.0.0.1:7071 (docs/metrics.md)")
	eo.addHost(c)
	return c
}

// datasets sends the metrics of all that this process serves, each with the label dataset.
func datasets(to prom.Sink) {
	of := map[string]admin.Snapshot{} // volumes may share one
	services.Lock()
	for _, s := range services.all {
		if s.snapshot != nil {
			stats := s.snapshot()
			of[stats.DatasetID] = stats
		}
	}
	services.Unlock()
	for id, stats := range of {
		c := admin.Collector(version, func() admin.Snapshot { return stats })
		prometheus.WrapCollectorWith(prometheus.Labels{"dataset": id[:12]}, c).Collect(to)
	}
}

// redrive is how long a driver that cannot serve waits before it tries again.
const redrive = 5 * time.Second

// drive serves the node's volumes until ctx ends. If it fails while pods have mounts of its predecessor, it tries
// again: only the kubelet takes these away, so to wait for the last one would be to wait for ever.
func (o *owner) drive(ctx context.Context, node, kubelet, admin string) (err error) {
	var d *csi.Driver
	serve := func() error {
		if admin != "" {
			_, stop, err := prom.Listen(admin, prom.Collector(datasets), slog.Default())
			if err != nil {
				return err
			}
			defer stop()
		}
		if d == nil {
			if err := os.MkdirAll(csi.Dir(kubelet), 0o700); err != nil {
				return fmt.Errorf("--kubelet-dir: %w", err)
			}
			made, err := csi.New(node, version, csi.Dir(kubelet), volumes{ctx, o}, o.replayed)
			if err != nil {
				return err
			}
			d = made
		}
		return d.Serve(ctx, kubelet, daemon.Own.Ready)
	}
	for err = serve(); err != nil; err = serve() {
		select {
		case <-o.answers.Idle():
			return err
		default:
		}
		slog.Error("the kubelet is not answered; this is tried again, since pods have mounts", "cause", err)
		if pause.For(ctx, redrive) != nil {
			break
		}
	}
	handOn(o.host)
	return err
}

// volumes runs the mounts of volumes: it is csi.Runner.
type volumes struct {
	ctx context.Context
	*owner
}

func (v volumes) Mount(path string, of csi.Volume, tokenFile string) *daemon.Running {
	env := of.Env(os.Environ(), tokenFile)
	env[scopeEnv] = of.Scope()
	args := append([]string{"mount", of.Source, path, "--allow-other", "--cache-dir=" + v.host.Path()}, of.Args()...)
	return v.answers.Start(v.ctx, args, "/", env)
}

func (v volumes) Usage(path string) (files, bytes int64, ok bool) {
	services.Lock()
	defer services.Unlock()
	for _, s := range services.all {
		if s.mountpoint == path && s.mounted != nil {
			m := s.mounted.door.Manifest()
			return int64(m.Len()), m.Bytes(), true
		}
	}
	return 0, 0, false
}

func keeperCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "keeper ADDRESS",
		Short: "Hold the mounts of containers while their daemons are replaced",
		Long: `Listens at ADDRESS, unix:///PATH. Daemons that have it in SHOAL_KEEPER hand it their mounts' descriptors, and take them
back when they restart: files stay open, and reads wait. Two minutes after a daemon's end its mounts are dropped.

Whoever reaches the socket (mode 0600) can take every mount. Never replace a keeper with clients (docs/kubernetes.md).`,
		Example: "  shoal keeper unix:///run/shoal/keeper.sock",
		RunE: func(c *cobra.Command, args []string) error {
			return daemon.ServeKeeper(c.Context(), args[0])
		},
	}
}
