package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/signal"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// Verb is the argument by which each program with a testbed runs Main.
const Verb = "rig-proxy"

// Main runs a proxy as a process of its own until SIGTERM or SIGINT: UPSTREAM (http://host:port) and [Options] in JSON.
// It prints one line of JSON with its URL and that of its control server (see [subproc.Serve]).
func Main(args []string) error {
	if len(args) != 2 {
		return errors.New("proxy: give http://host:port and the options, in JSON")
	}
	var o Options
	if err := json.Unmarshal([]byte(args[1]), &o); err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	p, err := Start(ctx, args[0], o)
	if err != nil {
		return err
	}
	defer p.Stop()
	return subproc.Serve(ctx, p.URL, p.Stats, p.Set)
}

// Process is a proxy that runs in a process of its own.
type Process struct {
	URL string // the endpoint to give to clients
	subproc.Controlled[Stats, Options]
}

// Spawn runs command, which calls [Main], until this process ends, and returns when it accepts connections.
func Spawn(ctx context.Context, command []string, upstream string, o Options) (*Process, error) {
	options, err := json.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	url, c, err := subproc.SpawnControlled[Stats, Options](ctx, "the S3 proxy", command, upstream, string(options))
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	return &Process{url, c}, nil
}

// Stop ends the process.
func (p *Process) Stop() { p.Proc.Stop(2 * time.Second) }
