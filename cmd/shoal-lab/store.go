package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/lab/demo"
)

// servingEnv marks the process that serves the store, which storeCommand starts.
const servingEnv = "SHOAL_LAB_SERVES"

func storeCommand() *cobra.Command {
	o := demo.Defaults()
	c := &cobra.Command{
		Use:   "store",
		Short: "Run the demo's S3 server with photographs in the background, to try things on",
		Long: `Makes photographs, puts them into a real S3 server behind a slow network as s3://photos/train, and goes to the
background once it answers. It prints shell commands that set AWS_ENDPOINT_URL, AWS_REGION and credentials for
it, and STORE_PID, to end it with kill. It needs Debian's wallpaper packages and versitygw.`,
		Example: `  eval "$(shoal-lab store --photos 1024)"
  shoal mount s3://photos/train /mnt/train --daemon
  kill $STORE_PID`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := check(o); err != nil {
				return err
			}
			if os.Getenv(servingEnv) == "" {
				return serveApart(c)
			}
			o.Progress = os.Stderr
			return demo.Store(c.Context(), o, func(vars []string) error {
				_, err := fmt.Print(demo.Exports(vars, os.Getpid()))
				return errors.Join(err, detach(filepath.Join(o.WorkDir, "store.log")))
			})
		},
	}
	f := c.Flags()
	f.StringVar(&o.WorkDir, "work-dir", o.WorkDir, "folder for photographs and objects")
	f.DurationVar(&o.Latency, "latency", o.Latency, "median time of the store to the first byte")
	f.IntVar(&o.Photos, "photos", o.Photos, "photographs in the bucket")
	return c
}

// serveApart runs the same command line in a session of its own, and returns when that has told how to reach its store.
func serveApart(c *cobra.Command) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(c.Context(), self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), servingEnv+"=1")
	cmd.Stderr = os.Stderr // until it detaches
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	exports, err := io.ReadAll(out)
	if err != nil || len(exports) == 0 { // it has failed, and said why
		if err = errors.Join(err, cmd.Wait()); err == nil {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("the store did not start: %w", err)
	}
	_, err = c.OutOrStdout().Write(exports)
	return err
}

// detach sends what this process still has to say to a file, so that whoever waits for the ends of its output may go
// on.
func detach(path string) error {
	log, err := os.OpenFile(filepath.Clean(path), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	return errors.Join(syscall.Dup3(int(log.Fd()), 2, 0), syscall.Dup3(int(log.Fd()), 1, 0))
}
