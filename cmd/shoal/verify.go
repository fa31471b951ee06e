package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/python"
)

// verifyNeeds prints the modules that a Python lacks for `shoal verify`.
const verifyNeeds = `import importlib.util as u; print(*(m for m in ("numpy", "grpc", "torch", "torchvision", "PIL") if u.find_spec(m) is None))`

func verifyCommand() *cobra.Command {
	var security clientSecurity
	var interpreter string
	c := &cobra.Command{
		Use:   "verify ADDR",
		Short: "Replay a feed's batches in your own torchvision, and compare",
		Long: `Takes batches of pictures from the feed at ADDR, applies the same random transforms to the original files with your
own torchvision, and compares every value. It prints for each row whether it is equal, or what differs. --transform takes
MODULE:NAME, too: a torchvision transform of your own in a module on PYTHONPATH, whose classes then replay.
Exit code 0: all are equal; 1: some differ; 2: they could not be compared. It runs the Python package that this binary
carries; python3 -m shoal verify does the same.`,
		Example: `  shoal verify unix:///run/shoal/feed.sock
  shoal verify unix:///run/shoal/feed.sock --transform "RandomResizedCrop(224)|RandAugment()|fp32" --batches 10`,
		RunE: func(c *cobra.Command, args []string) error {
			client, err := security.dial(args[0]) // reports errors in the flags
			if err != nil {
				return err
			}
			client.Close()
			missing, err := exec.CommandContext(c.Context(), interpreter, "-c", verifyNeeds).Output()
			if err != nil {
				return cli.Usagef("%s does not run: %w (name another by --python)", interpreter, err)
			}
			if list := strings.Fields(string(missing)); len(list) > 0 {
				return cli.Usagef("%s lacks %s, needed to replay the batches (%[1]s -m pip install numpy grpcio "+
					"torch torchvision pillow, or name another Python by --python)",
					interpreter, english.WordSeries(list, "and"))
			}
			dir, err := os.MkdirTemp("", "shoal-verify-")
			if err != nil {
				return err
			}
			defer func() { _ = os.RemoveAll(dir) }()
			if err := os.CopyFS(dir, python.Files); err != nil {
				return err
			}
			argv := []string{"-B", "-m", "shoal", "verify", args[0]}
			for _, name := range []string{"transform", "batch", "batches", "order", "seed", "epoch", "ca", "cert",
				"key", "server-name"} {
				if f := c.Flags().Lookup(name); f.Value.String() != "" {
					argv = append(argv, "--"+name+"="+f.Value.String())
				}
			}
			var said bytes.Buffer
			cmd := exec.CommandContext(c.Context(), interpreter, argv...)
			cmd.Env = append(os.Environ(), "PYTHONPATH="+dir+string(os.PathListSeparator)+os.Getenv("PYTHONPATH"),
				tokenEnv+"="+security.s.Token)
			cmd.Stdout, cmd.Stderr = c.OutOrStdout(), &said
			err = cmd.Run()
			var exit *exec.ExitError
			switch {
			case errors.As(err, &exit) && exit.ExitCode() == 1:
				return fmt.Errorf("%s: some rows differ from what torchvision makes of them (see the lines above)",
					args[0])
			case err != nil:
				why := strings.TrimPrefix(strings.TrimSpace(said.String()), "shoal verify: ")
				return cli.Usagef("%s could not be compared: %s", args[0], cmp.Or(why, err.Error()))
			}
			return nil
		},
	}
	security.add(c)
	f := c.Flags()
	f.String("transform", "RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw", "what is done to the pictures")
	f.Int("batch", 16, "rows of a batch")
	f.Int("batches", 1, "batches to compare")
	f.String("order", "uniform", "order of the samples")
	f.Uint64("seed", 0, "seed for order and augmentation")
	f.Uint32("epoch", 0, "epoch")
	f.StringVar(&interpreter, "python", "python3", "Python interpreter whose torchvision is compared with")
	return c
}
