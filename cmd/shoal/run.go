package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/settings"
)

func runCommand() *cobra.Command {
	var name string
	var verbose bool
	c := &cobra.Command{
		Use:   "run COMMAND [ARG...]",
		Short: "Run a trainer and pass its sampler's order to the mount",
		Long: `Runs a command. In every Python that it starts, each iteration of a torch DataLoader first writes its order as a plan
into the mount that holds its files, as shoal.hint does, for any sampler that ends. The trainer is not changed: it draws
the same random numbers, and a failed hint does not make it fail. Files outside any mount, and datasets whose files
cannot be found, are read as usual.

The command replaces this process, so its exit code, signals, input and output are its own.`,
		Example: `  shoal run -- python3 train.py /mnt/train
  shoal run --name ablation-3 -- torchrun train.py`,
		RunE: func(c *cobra.Command, args []string) error {
			if strings.Contains(name, "/") || strings.HasPrefix(name, ".") || len(name) > 200 {
				return cli.Usagef("--name %.40q: it becomes a file's name in .shoal/plans of the mount: at most 200 "+
					"bytes, without / and no dot first", name)
			}
			signal.Reset() // the command's own; one that came before this is seen below
			path, err := exec.LookPath(args[0])
			if err != nil && !errors.Is(err, exec.ErrDot) { // a PATH may have the current folder
				return notStarted(args[0], err)
			}
			env := os.Environ()
			dir, err := unpackedClient()
			if err == nil && strings.Contains(dir, ":") {
				err = fmt.Errorf("PYTHONPATH cannot have %s (set XDG_CACHE_HOME to a folder without a colon)", dir)
			}
			if err != nil {
				fmt.Fprintf(os.Stderr, "shoal: run: no hints: %s\n", cli.OneLine(err)) // but the trainer runs
			} else {
				env = withHints(env, dir, name, verbose)
			}
			if err := c.Context().Err(); err != nil {
				return err
			}
			if err = syscall.Exec(path, args, env); errors.Is(err, syscall.ENOEXEC) { // as execvp and shells do
				err = syscall.Exec("/bin/sh", append([]string{"sh", path}, args[1:]...), env)
			}
			return notStarted(args[0], err)
		},
	}
	settings.Without(c)
	f := c.Flags()
	f.SetInterspersed(false) // the command's flags are its own
	f.StringVar(&name, "name", "",
		"name of the plans; jobs that read one mount at the same time need different ones (default: default, or rankN)")
	f.BoolVarP(&verbose, "verbose", "v", false,
		"say on standard error which orders were given to which mount, and why none was")
	return c
}

// withHints returns env for a command whose Pythons load the client in dir.
func withHints(env []string, dir, name string, verbose bool) []string {
	set := func(variable, value string) { env = append(env, variable+"="+value) }
	path := filepath.Join(dir, "shoal", "_site")
	if own := os.Getenv("PYTHONPATH"); own != "" { // and if it ends with a colon, it ends with the current folder
		path += ":" + own
	}
	set("PYTHONPATH", path)
	if name != "" {
		set("SHOAL_RUN_NAME", name)
	}
	if verbose {
		set("SHOAL_DEBUG", strings.TrimPrefix(os.Getenv("SHOAL_DEBUG")+",run", ","))
	}
	return (&exec.Cmd{Env: env}).Environ() // of two values the last
}

// notStarted says why a command cannot run, with the exit code that a shell would give.
func notStarted(command string, err error) error {
	code, remedy := 126, "see: ls -l "+command
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		code, remedy = 127, "check the name, or give its path"
	}
	if e := new(exec.Error); errors.As(err, &e) {
		err = e.Err
	}
	return cli.WithCode(code, fmt.Errorf("run %s: %w (%s)", command, err, remedy))
}
