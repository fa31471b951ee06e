package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"github.com/shoalfs/shoal/lab/rig/testbed"
	"github.com/shoalfs/shoal/prefetch/order"
)

// mounted is a mount that is there, as its daemon tells of it.
type mounted struct {
	dir, shoal string
	stats      testbed.Stats
}

func statMount(ctx context.Context, dir string) (*mounted, error) {
	path, err := shoal()
	if err != nil {
		return nil, err
	}
	m := &mounted{dir: dir, shoal: path}
	out, err := m.run(ctx, "stat", dir, "--json")
	if err == nil {
		err = json.Unmarshal(out, &m.stats)
	}
	return m, err
}

// paths returns what an order reads, as paths in the mount.
func (m *mounted) paths(ctx context.Context, spec order.Spec) ([]string, error) {
	out, err := m.run(ctx, "order", spec.String(), "--mount", m.dir, "--paths")
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n"), err
}

func (m *mounted) run(ctx context.Context, args ...string) ([]byte, error) {
	out, err := exec.CommandContext(ctx, m.shoal, args...).Output()
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		return nil, fmt.Errorf("%s", strings.TrimPrefix(strings.TrimSpace(string(failed.Stderr)), "shoal: "))
	}
	return out, err
}
