package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/settings"
	"github.com/shoalfs/shoal/python"
)

func pythonCommand() *cobra.Command {
	var install, path bool
	interpreter := "python3"
	c := &cobra.Command{
		Use:   "python [--path | --install]",
		Short: "Install the Python client that this binary carries, or print its path",
		Long: `Provides the Python client in this binary, so that both have the same version.

--path unpacks the package into the user's cache folder, and prints the folder for PYTHONPATH.
--install has the interpreter's pip install it as shoalfs-client. pip fetches numpy and grpcio only if they are missing.`,
		Example: `  export PYTHONPATH=$(shoal python --path)
  shoal python --install --python .venv/bin/python`,
		RunE: func(c *cobra.Command, _ []string) error {
			switch {
			case install == path:
				return cli.Usagef("give --path or --install %s", cli.SeeHelp(c))
			case path:
				dir, err := unpackedClient()
				if err == nil {
					_, err = fmt.Fprintln(c.OutOrStdout(), dir)
				}
				return err
			}
			return installClient(c, interpreter)
		},
	}
	settings.Without(c)
	f := c.Flags()
	f.BoolVar(&path, "path", false, "unpack the package, and print the folder that belongs on PYTHONPATH")
	f.BoolVar(&install, "install", false, "install the package for --python")
	f.StringVar(&interpreter, "python", interpreter, "Python interpreter to install for")
	return c
}

// unpackedClient returns a folder that holds the package, named by its content: other versions may be in use beside it.
func unpackedClient() (_ string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("unpack the Python client: %w (set XDG_CACHE_HOME to a folder of yours)", err)
		}
	}()
	files, err := python.Client(version)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	for _, f := range files {
		fmt.Fprintf(h, "%s %d\n%s", f.Name, len(f.Data), f.Data)
	}
	parent := filepath.Join(cacheBase(), "python")
	dir := filepath.Join(parent, fmt.Sprintf("%x", h.Sum(nil)[:8]))
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	if err := os.MkdirAll(filepath.Join(parent, ".new"), 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(filepath.Join(parent, ".new"), "")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	whole := filepath.Join(tmp, "whole")
	for _, f := range files {
		path := filepath.Join(whole, f.Name)
		if err = os.MkdirAll(filepath.Dir(path), 0o755); err == nil {
			err = os.WriteFile(path, f.Data, f.Mode)
		}
		if err != nil {
			return "", err
		}
	}
	err = os.Rename(whole, dir)
	if _, there := os.Stat(dir); there == nil { // if not by this process, by a faster one
		err = nil
	}
	return dir, err
}

// installClient has an interpreter's pip install the package from a wheel.
func installClient(c *cobra.Command, interpreter string) error {
	dir, err := os.MkdirTemp("", "shoal-python-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	w := python.Wheel{Name: "shoalfs_client", Version: version, Tags: []string{"py3-none-any"}, Created: time.Now()}
	var data bytes.Buffer
	if err := w.Write(&data); err != nil {
		return err
	}
	wheel := filepath.Join(dir, w.FileName())
	if err := os.WriteFile(wheel, data.Bytes(), 0o644); err != nil {
		return err
	}
	pip := exec.CommandContext(c.Context(), interpreter, "-m", "pip", "install", "--disable-pip-version-check", wheel)
	pip.Stdout, pip.Stderr = c.OutOrStdout(), c.ErrOrStderr()
	if err := pip.Run(); err != nil {
		return fmt.Errorf("%s -m pip install failed: %w (see above; give a virtual environment's interpreter by "+
			"--python, or use: export PYTHONPATH=$(shoal python --path))", interpreter, err)
	}
	return nil
}
