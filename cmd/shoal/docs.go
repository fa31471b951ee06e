package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/settings"
)

// docsCommand writes the command line's documentation for packages and for docs/ (make docs).
func docsCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "docs DIR",
		Short:  "Write man pages, shell completions and the reference of the command line",
		Hidden: true,
		Long: `Writes DIR/man/man1/shoal*.1, DIR/completions/bash/shoal, DIR/completions/zsh/_shoal, DIR/completions/fish/shoal.fish,
DIR/shoal.yaml (every setting, commented out) and DIR/cli.md.`,
		RunE: func(_ *cobra.Command, args []string) error { return writeDocs(args[0]) },
	}
}

func writeDocs(dir string) error {
	defaultFeed = rootsFeed // whoever writes them
	files := map[string]func(io.Writer) error{
		"completions/bash/shoal":      func(w io.Writer) error { return root().GenBashCompletionV2(w, true) },
		"completions/zsh/_shoal":      root().GenZshCompletion,
		"completions/fish/shoal.fish": func(w io.Writer) error { return root().GenFishCompletion(w, true) },
		"shoal.yaml":                  func(w io.Writer) error { return schemaOf(root()).WriteExample(w) },
		"cli.md":                      writeReference,
	}
	cli.Documented(root(), func(c *cobra.Command) {
		files["man/man1/"+strings.ReplaceAll(c.CommandPath(), " ", "-")+".1"] = func(w io.Writer) error {
			return writeMan(w, c)
		}
	})
	for name, write := range files {
		path := filepath.Join(dir, name)
		var b bytes.Buffer
		err := errors.Join(write(&b), os.MkdirAll(filepath.Dir(path), 0o755))
		if err == nil {
			err = os.WriteFile(path, b.Bytes(), 0o644)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// manSections are the sections of every man page that cobra does not write.
const manSections = `

# EXIT STATUS
0: done. 1: failed, with one line on standard error that names the thing, the cause and the remedy. 2: wrong use.
`

const manEnvironment = `
# ENVIRONMENT
**SHOAL_NAME** sets the flag **--name** where it is not given: **SHOAL_CACHE_DIR** for **--cache-dir**. Of flags that may be given
several times, the values are separated by commas.

**SHOAL_CONFIG** names the configuration file where **--config** does not. **SHOAL_FEED_TOKEN** and **SHOAL_ENCRYPTION_KEY** hold
secrets, which no flag takes.

Endpoint, region and credentials of an s3:// source come from the variables and files of the AWS tools: **AWS_ENDPOINT_URL**,
**AWS_REGION**, **AWS_PROFILE**, **AWS_ACCESS_KEY_ID** and so on.

# FILES
*~/.config/shoal/shoal.yaml*, else */etc/shoal/shoal.yaml*: the configuration file. **shoal config --example** prints one.
`

func writeMan(w io.Writer, c *cobra.Command) error {
	c.DisableAutoGenTag = true
	c.Long = cli.AsMarkdown(cmp.Or(c.Long, c.Short+".")) + manSections
	if len(settings.Flags(c)) > 0 || !c.HasParent() {
		c.Long += manEnvironment
	}
	return doc.GenMan(c, &doc.GenManHeader{Section: "1", Source: "Shoal " + version, Manual: "Shoal"}, w)
}

// writeReference writes docs/cli.md.
func writeReference(w io.Writer) error {
	if _, err := io.WriteString(w, `# The command line

Generated from the help texts by `+"`make docs`"+`; a test holds it to them. Every flag can be set by a variable and in the configuration
file, too: [configuration.md](configuration.md). Exit codes: 0 done, 1 failed (one line on standard error names the thing, the
cause and the remedy), 2 wrong use. Sizes are written 512MiB, 20GiB or 1.5GB, durations 90s or 4h.

`); err != nil {
		return err
	}
	return cli.Reference(w, root(), configFlag)
}
