package demo

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// Store runs the demo's object store alone: photographs in a real S3 server, behind the latency of o, as
// s3://photos/train, so that mounts and feeds can be tried by hand. It calls ready with the environment
// that leads there, as KEY=VALUE, and serves until ctx ends; the photographs stay in o.WorkDir for the
// next time. Of o only WorkDir, Photos, Latency, Sigma and Progress matter.
func Store(ctx context.Context, o Options, ready func(env []string) error) error {
	j, err := newJob(o)
	if err != nil {
		return err
	}
	if err := j.prepare(ctx); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	defer j.close()
	if err := ready(s3server.Env(j.bed.Proxy.URL)); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	select {
	case <-ctx.Done():
		return nil
	case <-j.bed.Server.Done():
		return fmt.Errorf("demo: the S3 server ended: %w", j.bed.Server.Failed())
	}
}

// Exports writes an environment and the id of the process that serves it as shell commands, for eval.
func Exports(env []string, pid int) string {
	var b strings.Builder
	for _, kv := range slices.Sorted(slices.Values(env)) {
		k, v, _ := strings.Cut(kv, "=")
		fmt.Fprintf(&b, "export %s='%s'\n", k, strings.ReplaceAll(v, "'", `'\''`))
	}
	fmt.Fprintf(&b, "STORE_PID=%d\n", pid)
	return b.String()
}
