//go:build cuda

// Command shoal-gpu runs beside `shoal serve` on a host with an NVIDIA GPU: it reads the feed's batches from shared
// memory, finishes them on the GPU, and serves them to trainers as GPU memory (docs/gpu.md).
//
// It is a separate process so that a failure in the driver cannot end the mount or the cache.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cmd/shoal-gpu/relay"
	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/gpuingest/cuda"
	"github.com/shoalfs/shoal/gpuingest/cuda/nvtx"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/logs"
	"github.com/shoalfs/shoal/internal/prom"
	"github.com/shoalfs/shoal/loader"
)

var version = "dev"

// exitNoDevice is the exit code without a usable device, so that a script can go on.
const exitNoDevice = 3

// defaultListen is the address that trainers use by default.
const defaultListen = "unix:///run/shoal/gpu.sock"

func main() {
	err := command().Execute()
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "shoal-gpu:", err)
	if errors.Is(err, gpuingest.ErrNoDriver) || errors.Is(err, gpuingest.ErrNoDevice) ||
		errors.Is(err, gpuingest.ErrDeviceMemory) {
		os.Exit(exitNoDevice)
	}
	os.Exit(cli.Code(err))
}

func command() *cobra.Command {
	var listen, group, level, admin string
	var device int
	c := &cobra.Command{
		Use:   "shoal-gpu FEED",
		Short: "Serves the batches of a feed as memory of an NVIDIA GPU",
		Long: "FEED is where `shoal serve` listens: unix:///PATH (shared memory) or tcp://HOST:PORT.\n" +
			"Trainers open Feed(\"" + defaultListen +
			"\", device=\"cuda\"); what the device cannot serve comes to host memory.\n" +
			"Exit 0: ended by a signal; 1: failed; 2: wrong use; 3: no usable device.",
		Version: version, SilenceErrors: true, SilenceUsage: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return cli.Usagef("%d arguments: give the address of the feed, such as unix:///run/shoal/feed.sock",
					len(args))
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			lv, asJSON, err := logs.Parse(level)
			if err != nil {
				return cli.Usagef("--log-level: %w", err)
			}
			if !strings.HasPrefix(listen, "unix://") {
				return cli.Usagef("--listen %q: device memory is handed over on unix:///PATH only", listen)
			}
			limiter := logs.NewLimiter()
			defer limiter.Flush()
			return serve(args[0], listen, admin, loader.ListenOptions{SocketGroup: group}, device,
				limiter.New(os.Stderr, asJSON, lv))
		},
	}
	f := c.Flags()
	f.StringVar(&listen, "listen", defaultListen, "where trainers connect: unix:///PATH")
	f.IntVar(&device, "device", 0, "number of the device, as the driver counts")
	f.StringVar(&group, "socket-group", "", "group of the socket, by name or number")
	f.StringVar(&level, "log-level", "info", logs.Help)
	f.StringVar(&admin, "admin", "", "HOST:PORT for /metrics and /healthz, such as 127.0.0.1:7072 (default: none)")
	c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return cli.Usage(err) })
	c.AddCommand(deviceCommand())
	return c
}

// deviceCommand reports whether a device can be used.
func deviceCommand() *cobra.Command {
	var n int
	c := &cobra.Command{
		Use: "check", Short: "Tells which device there is, as JSON, or what is missing",
		Args: func(c *cobra.Command, args []string) error {
			if err := cobra.NoArgs(c, args); err != nil {
				return cli.Usage(err)
			}
			return nil
		},
		RunE: func(*cobra.Command, []string) error {
			d, err := cuda.Open(n)
			if err != nil {
				return err
			}
			out, err := json.Marshal(map[string]any{"version": 1, "device": d.Name(), "uuid": d.UUID(),
				"model": d.Model()})
			if err != nil {
				return err
			}
			fmt.Println(string(out))
			return d.Close()
		},
	}
	c.Flags().IntVar(&n, "device", 0, "number of the device, as the driver counts")
	return c
}

// device adapts package cuda to the relay.
type device struct{ *cuda.Device }

func (d device) Open(slots []byte, slotBytes, buffers, bufferBytes int) (relay.Ring, error) {
	r, err := d.NewRing(slots, slotBytes, buffers, bufferBytes)
	if err != nil {
		return nil, err // not a non-nil interface around a nil *Ring
	}
	return r, nil
}

func serve(feed, listen, admin string, o loader.ListenOptions, number int, log *slog.Logger) (err error) {
	d, err := cuda.Open(number)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	srv, err := relay.New(relay.Options{Feed: feed, Device: device{d}, Log: log, Range: nvtx.Range})
	if err != nil {
		return cli.Usage(err)
	}
	stop := sync.OnceValue(srv.Close)
	defer func() { err = errors.Join(err, stop()) }()
	if admin != "" {
		_, stopAdmin, err := prom.Listen(admin, srv.Metrics(version), log)
		if err != nil {
			return err
		}
		defer stopAdmin()
	}
	l, err := loader.Listen(listen, o)
	if err != nil {
		if errors.Is(err, loader.ErrAddress) {
			err = cli.Usage(err)
		}
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	// a second signal ends it at once; the error is returned below
	context.AfterFunc(ctx, func() { cancel(); _ = stop() })
	log.Info("serving", "listen", listen, "feed", feed, "device", d.Name(), "model", d.Model(), "uuid", d.UUID())
	return srv.Serve(l)
}
