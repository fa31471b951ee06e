package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/human"
)

func fsckCommand() *cobra.Command {
	var repair, asJSON bool
	var crypt cryptOptions
	c := &cobra.Command{
		Use:   "fsck CACHE-DIR",
		Short: "Check a cache directory, record by record",
		Long: `Reads every record, the catalog and the manifests in CACHE-DIR and verifies their checksums, and that each recoded file
can be restored. Exit code 0: clean; 1: damage was found, even if --repair has repaired it. Damaged data is never
served, repaired or not, because a daemon verifies what it reads. The directory must not be in use.`,
		Example: `  shoal fsck /nvme/shoal
  shoal fsck /nvme/shoal --repair`,
		RunE: func(c *cobra.Command, args []string) error {
			secret, err := crypt.secret(invocationOf(c.Context()))
			if err != nil {
				return err
			}
			bar := daemon.Own.Step("checking " + args[0])
			o := cachedir.FsckOptions{Secret: secret, Repair: repair, Progress: func(done, total int64) {
				bar.Set(int(done>>20), int(total>>20), "MiB")
			}}
			if jpeg.Available {
				o.Coder = jpegCoder{}
			}
			r, err := cachedir.Fsck(c.Context(), args[0], o)
			bar.Done("")
			if err != nil {
				return err
			}
			out := c.OutOrStdout()
			if asJSON {
				err = json.NewEncoder(out).Encode(r)
			} else {
				_, err = fmt.Fprintf(out, "%s, %s, %s, %s\n", human.Count(r.Datasets, "dataset"),
					human.Count(r.Segments, "segment"), human.Count(r.Records, "record"), human.Bytes(r.Bytes))
				for _, f := range r.Findings {
					_, err = fmt.Fprintln(out, f)
				}
				if r.More > 0 {
					_, err = fmt.Fprintf(out, "and %d more\n", r.More)
				} else if r.Damage == 0 {
					_, err = fmt.Fprintln(out, "clean")
				}
			}
			switch n := r.Damage; {
			case n == 0 || err != nil:
				return err
			case repair:
				return fmt.Errorf("%s: damage was found in %s; what was lost with it is fetched again", args[0],
					human.Count(n, "place"))
			default:
				return fmt.Errorf("%s: damage in %s (repair it with: shoal fsck %s --repair)",
					args[0], human.Count(n, "place"), human.Shell(args[0]))
			}
		},
	}
	crypt.add(c.Flags())
	c.Flags().BoolVar(&repair, "repair", false,
		"truncate incomplete tails, drop damaged records and segments, move foreign files aside")
	c.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	return c
}
