package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// ready is the line that a proxy process prints when it accepts connections.
type ready struct {
	URL     string `json:"url"`
	Control string `json:"control"`
}

// Main runs a proxy as a process of its own until SIGTERM or SIGINT: UPSTREAM (http://host:port) and [Options] in JSON.
// It prints one line of JSON with its URL and that of its control server, which answers GET /stats ([Stats]), PUT /options
// ([Options]) and /debug/pprof/.
//
// It is the body of `go run ./lab/bench s3proxy` and of the hidden verb `shoal-lab rig-proxy`.
func Main(args []string) error {
	if len(args) != 2 {
		return errors.New("s3proxy: give http://host:port and the options, in JSON")
	}
	o, err := subproc.Decode[Options](strings.NewReader(args[1]))
	if err != nil {
		return fmt.Errorf("s3proxy: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	p, err := Start(ctx, args[0], o)
	if err != nil {
		return err
	}
	defer p.Stop()
	control, end, err := subproc.Serve(p.Stats, "/options", p.Set)
	if err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	err = json.NewEncoder(os.Stdout).Encode(ready{URL: p.URL, Control: control})
	if err == nil {
		<-ctx.Done()
	}
	return errors.Join(err, end())
}

// Process is a proxy that runs in a process of its own.
type Process struct {
	// URL is the endpoint to give to clients.
	URL string
	// Control is the URL of the control server, see [Main].
	Control string
	proc    *subproc.Proc
}

// Spawn runs command (a program and its first arguments: {"bench", "s3proxy"} or {"shoal-lab", "rig-proxy"})
// as a proxy before upstream and returns when it accepts connections. It dies with this process.
func Spawn(ctx context.Context, command []string, upstream string, o Options) (*Process, error) {
	options, err := json.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	args := append(command[1:len(command):len(command)], upstream, string(options))
	var r ready
	proc, err := subproc.StartReady(ctx, "the S3 proxy", exec.Command(command[0], args...), &r)
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	return &Process{URL: r.URL, Control: r.Control, proc: proc}, nil
}

// Stop ends the process.
func (p *Process) Stop() { p.proc.Stop(2 * time.Second) }

// Pid returns the process id.
func (p *Process) Pid() int { return p.proc.Pid() }

// Failed returns an error, with the last output, if the process has ended by itself.
func (p *Process) Failed() error { return p.proc.Failed() }

// Stats asks the process for its counters.
func (p *Process) Stats(ctx context.Context) (Stats, error) {
	var s Stats
	err := p.do(ctx, http.MethodGet, "/stats", nil, &s)
	return s, err
}

// Set is [Proxy.Set] for the process.
func (p *Process) Set(ctx context.Context, o Options) error {
	return p.do(ctx, http.MethodPut, "/options", o, nil)
}

func (p *Process) do(ctx context.Context, method, path string, in, out any) error {
	if err := subproc.Control(ctx, method, p.Control+path, in, out); err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	return nil
}
