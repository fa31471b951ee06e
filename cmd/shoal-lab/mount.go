package main

import (
	"context"
	"errors"
	"os/exec"
	"strings"

	"github.com/shoalfs/shoal/prefetch/order"
)

// paths returns what an order reads of a mount, as its daemon says, as paths in it.
func paths(ctx context.Context, dir string, spec order.Spec) ([]string, error) {
	program, err := shoal()
	if err != nil {
		return nil, err
	}
	out, err := exec.CommandContext(ctx, program, "order", spec.String(), "--mount", dir, "--paths").Output()
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		return nil, errors.New(strings.TrimPrefix(strings.TrimSpace(string(failed.Stderr)), "shoal: "))
	}
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n"), err
}
