package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/settings"
)

// configReport is what `shoal config --json` prints (docs/configuration.md).
type configReport struct {
	Version  int                `json:"version"` // of this schema
	File     string             `json:"file"`    // "" for none
	Verb     string             `json:"verb,omitempty"`
	Settings []settings.Setting `json:"settings,omitempty"` // of the verb
	// without a verb: values set by environment and file
	Verbs    map[string][]settings.Setting `json:"verbs,omitempty"`
	Secrets  []secretSetting               `json:"secrets,omitempty"`
	AWS      []s3.Setting                  `json:"aws"`
	AWSError string                        `json:"aws_error,omitempty"` // why a source on s3:// could not be opened
}

type secretSetting struct {
	Env   string `json:"env"`
	Value string `json:"value"` // not the secret
}

type configOptions struct {
	check           string
	example, asJSON bool
}

func configCommand() *cobra.Command {
	var o configOptions
	c := &cobra.Command{
		Use:   "config [VERB [FLAG...]]",
		Short: "Show settings and where they come from; check a configuration file",
		Long: `Shows what the environment and the configuration file set. With a VERB it shows every setting of that verb, its
value and its origin. Arguments after VERB are read as its command line, which is not run. It also shows
which AWS settings an s3:// source would use. Nothing is contacted, and secrets are not shown.

Every flag is also an environment variable and a key of the configuration file: --cache-dir, SHOAL_CACHE_DIR, cache-dir.
Flags override variables, variables override the file, and the file overrides the defaults (docs/configuration.md).`,
		Example: `  shoal config
  shoal config mount --memory 4GiB
  shoal config --check shoal.yaml
  shoal config --example > ~/.config/shoal/shoal.yaml`,
		RunE: func(c *cobra.Command, args []string) error { return o.run(c, args) },
	}
	settings.Without(c)
	f := c.Flags()
	f.SetInterspersed(false)
	f.StringVar(&o.check, "check", "", "check only this configuration file; exit code 2 if it is not valid")
	f.BoolVar(&o.example, "example", false, "print a configuration file with every setting, commented out")
	o.addJSON(c)
	return c
}

// addJSON adds --json, after VERB, too, unless the verb has one of its own.
func (o *configOptions) addJSON(c *cobra.Command) {
	if c.Flags().Lookup("json") == nil {
		c.Flags().BoolVar(&o.asJSON, "json", o.asJSON, "print JSON (docs/configuration.md)")
		settings.CommandLineOnly(c.Flags().Lookup("json"))
	}
}

func (o *configOptions) run(c *cobra.Command, args []string) error {
	out := c.OutOrStdout()
	schema := schemaOf(root()) // a new command, since flags keep their values
	if check := c.Flags().Changed("check"); check || o.example {
		if len(args) > 0 || check && o.example || o.asJSON {
			return cli.Usagef("--check and --example take no other arguments (see: shoal config --help)")
		}
		if o.example {
			return schema.WriteExample(out)
		}
		return checkFile(out, schema, o.check)
	}
	verb, rest, _ := schema.Root.Find(args) // the root takes any
	own := c.Flags().Lookup(configFlag)
	switch {
	case len(rest) > 0 && isGroup(verb) && !strings.HasPrefix(rest[0], "-"):
		return cli.UnknownVerb(verb, rest[0])
	case len(rest) > 0 && verb == schema.Root:
		return cli.Usagef("%s: name the verb before its flags (see: shoal config --help)", rest[0])
	case verb == schema.Root:
	case !settings.Has(verb) || len(settings.Flags(verb)) == 0:
		return cli.Usagef("%s has no settings", verb.CommandPath())
	default:
		o.addJSON(verb)
		if err := verb.ParseFlags(rest); errors.Is(err, pflag.ErrHelp) {
			return verb.Help()
		} else if err != nil {
			return verb.FlagErrorFunc()(verb, err)
		}
		if theirs := verb.Flags().Lookup(configFlag); theirs.Changed {
			own = theirs
		}
	}
	file, err := configFile(schema, own.Value.String())
	if err != nil {
		return err
	}
	r := configReport{Version: 1}
	if file != nil {
		r.File = file.Path
	}
	verbs, err := r.apply(schema, verb, file)
	if err == nil {
		err = r.print(out, verbs, o.asJSON)
	}
	return err
}

// isGroup reports whether only the verbs below a command do anything. shoal ckpt works itself, too.
func isGroup(c *cobra.Command) bool { return c.HasSubCommands() && len(cli.ArgumentsOf(c)) == 0 }

// apply applies environment and file to a verb, or to all for the root: then verbs are those with a value from either.
func (r *configReport) apply(schema *settings.Schema, verb *cobra.Command, file *settings.File) (
	verbs []string, err error) {
	name := func(c *cobra.Command) string {
		return strings.TrimPrefix(c.CommandPath(), schema.Root.Name()+" ")
	}
	if verb != schema.Root {
		err := wrongUse(schema.Apply(verb, os.Environ(), file))
		r.Verb, r.Settings = name(verb), schema.Settings(verb)
		return nil, err
	}
	r.Verbs = map[string][]settings.Setting{}
	told := map[string]bool{} // an unknown variable is reported once, not for each verb
	var errs []error
	settings.Walk(verb, func(c *cobra.Command) {
		if err := schema.Apply(c, os.Environ(), file); err != nil {
			for _, err := range err.(interface{ Unwrap() []error }).Unwrap() { //nolint:errorlint // it is joined
				if text := err.Error(); !told[text] {
					told[text] = true
					if c != verb { // the root is the first, and has no settings of its own
						err = fmt.Errorf("%w (for %s)", err, c.CommandPath())
					}
					errs = append(errs, err)
				}
			}
			return
		}
		list := slices.DeleteFunc(schema.Settings(c), func(s settings.Setting) bool {
			return s.From == settings.Default.String()
		})
		if len(list) > 0 && !isGroup(c) {
			verbs = append(verbs, name(c))
			r.Verbs[name(c)] = list
		}
	})
	return verbs, wrongUse(errors.Join(errs...))
}

// print prints the report. verbs are those of Verbs, in order.
func (r *configReport) print(out io.Writer, verbs []string, asJSON bool) (err error) {
	for _, name := range secretEnv {
		if os.Getenv(name) != "" {
			r.Secrets = append(r.Secrets, secretSetting{name, "***"})
		}
	}
	if r.AWS, err = s3.Describe(os.Getenv); err != nil {
		r.AWSError = cli.OneLine(err)
	}
	if asJSON {
		return settings.WriteJSON(out, r)
	}
	if r.File == "" {
		fmt.Fprintf(out, "no configuration file (%s)\n", strings.Join(configPaths(), ", "))
	} else {
		fmt.Fprintf(out, "configuration file %s\n", r.File)
	}
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	switch {
	case r.Verb != "":
		fmt.Fprintln(w, "\nSETTING\tVALUE\tFROM")
		for _, s := range r.Settings {
			fmt.Fprintf(w, "%s\t%s\t%s\n", s.Name, cmp.Or(s.Value, "-"), s.Origin)
		}
	case len(verbs) == 0:
		fmt.Fprintln(out, "neither environment nor file set anything (shoal config VERB shows the defaults)")
	default:
		fmt.Fprintln(w, "\nSETTING\tVALUE\tFROM\tVERBS")
		for _, v := range verbs {
			for _, s := range r.Verbs[v] {
				of, same := []string{v}, func(o settings.Setting) bool {
					return o.Name == s.Name && o.Value == s.Value && o.Where == s.Where
				}
				for _, other := range verbs {
					if i := slices.IndexFunc(r.Verbs[other], same); other != v && i >= 0 {
						of = append(of, other)
						r.Verbs[other] = slices.Delete(r.Verbs[other], i, i+1)
					}
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", s.Name, cmp.Or(s.Value, "-"), s.Origin, strings.Join(of, ", "))
			}
		}
	}
	fmt.Fprintln(w, "\nSECRET OR AWS\tVALUE\tFROM")
	for _, s := range r.Secrets {
		fmt.Fprintf(w, "secret\t%s\tenv %s\n", s.Value, s.Env)
	}
	for _, s := range r.AWS {
		fmt.Fprintf(w, "%s\t%s\t%s\n", s.Name, cmp.Or(s.Value, "-"), s.From)
	}
	if r.AWSError != "" {
		fmt.Fprintf(w, "error\t%s\t\n", r.AWSError)
	}
	return w.Flush()
}

func checkFile(out io.Writer, schema *settings.Schema, path string) error {
	file, err := loadConfig(schema, "--check", path)
	if file != nil {
		err = errors.Join(err, wrongUse(schema.Check(file)))
	}
	if err == nil {
		_, err = fmt.Fprintf(out, "%s: all settings are valid (%d)\n", path, file.Len())
	}
	return err
}
