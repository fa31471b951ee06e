package main

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/logs"
	"github.com/shoalfs/shoal/internal/settings"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/order"
)

const (
	// configEnv names the configuration file if no --config is given.
	configEnv = "SHOAL_CONFIG"
	// settledEnv marks a process that reads neither environment nor file. argsEnv has what its parent read there: as
	// arguments other users would see it. Older programs, to which an upgrade may go back, do not know it.
	settledEnv, argsEnv = "SHOAL_SETTLED", "_SHOAL_ARGS"
	configFlag          = "config"
	// standingFlag names, for a process whose command line is complete, the flags that no user gave.
	standingFlag = "standing"
)

// reservedEnv are variables with the prefix of settings that are none: for Shoal's processes, tests and Python client.
var reservedEnv = []string{configEnv, settledEnv, daemon.ReadyEnv, daemon.SupervisedEnv, daemon.KeptEnv,
	daemon.KeeperEnv, scopeEnv, pprofEnv, s3ConnectionsEnv, daemon.DrainEnv, "SHOAL_DEBUG", "SHOAL_RUN_NAME",
	"SHOAL_CERTS", "SHOAL_FEEDSERVER", "SHOAL_VERSITYGW", "SHOAL_PTXAS", "SHOAL_KILLS", "SHOAL_HANG",
	"SHOAL_FEED_KILLS", "SHOAL_FEED_RUN", "SHOAL_KILLPOINT", "SHOAL_KILLPOINTS_LOG", "SHOAL_STEPS", "SHOAL_PYTHON",
	"SHOAL_BENCH_FILES", "SHOAL_BENCH_HUGE", "SHOAL_FUSEFS_TEST_READER", "SHOAL_FUSEFS_TEST_SERVE", "SHOAL_WEIGHTS"}

// secretEnv are the variables that hold secrets, which no flag may.
var secretEnv = []string{tokenEnv, keyEnv, customerKeyVariable}

func reserved(name string) bool {
	return slices.Contains(slices.Concat(reservedEnv, secretEnv), name) || strings.HasPrefix(name, "SHOAL_TEST_") ||
		strings.HasPrefix(name, "SHOAL_CUDA_")
}

var (
	settled bool // this process reads neither environment nor file
	// selfArgs are arguments for another process with the same task: once read, with what environment and file hold.
	selfArgs = os.Args[1:]
)

func init() {
	text, _ := base64.StdEncoding.DecodeString(os.Getenv(argsEnv))
	typed, args, _ := strings.Cut(string(text), "\x01")
	settled = os.Getenv(settledEnv) != ""
	_, _ = os.Unsetenv(argsEnv), os.Unsetenv(settledEnv)          // other child processes must not see them
	if args != "" && typed == strings.Join(os.Args[1:], "\x00") { // an older program hands it on to others
		settled, selfArgs = true, strings.Split(args, "\x00")
	}
}

func schemaOf(root *cobra.Command) *settings.Schema {
	return &settings.Schema{Root: root, Reserved: reserved, Removed: removed, RemovedFrom: removedFrom, Rivals: rivals,
		Checks: map[string]func(string) error{
			"log-level": func(text string) error {
				_, _, err := logs.Parse(text)
				return err
			},
			"samples": engine.CheckSamples,
			"order": func(text string) error {
				_, err := order.Parse(text)
				return err
			},
		}}
}

// addSettings lets environment and file set all flags below root.
func addSettings(root *cobra.Command) {
	f := root.PersistentFlags()
	f.String(configFlag, "",
		"configuration file (default: "+configEnv+
			", else shoal/shoal.yaml under the user's configuration folder, else /etc/shoal/shoal.yaml)")
	f.String(standingFlag, "", "flags that environment and file have set")
	f.Lookup(standingFlag).Hidden = true
	settings.CommandLineOnly(f.Lookup(configFlag))
	settings.CommandLineOnly(f.Lookup(standingFlag))
	root.PersistentPreRunE = func(c *cobra.Command, _ []string) error {
		if passedOn(c) {
			return settings.Standing(c, strings.FieldsFunc(c.Flags().Lookup(standingFlag).Value.String(),
				func(r rune) bool { return r == ',' }))
		}
		if len(settings.Flags(c)) == 0 {
			return nil
		}
		s := schemaOf(c.Root())
		file, err := configFile(s, c.Flags().Lookup(configFlag).Value.String())
		if err == nil {
			err = wrongUse(s.Apply(c, os.Environ(), file))
		}
		if err != nil {
			return err
		}
		_, rest, _ := c.Root().Find(os.Args[1:]) // the root takes any
		words := strings.Fields(c.CommandPath())[1:]
		args, standing := settings.Args(c)
		if args != nil {
			words = append(append(words, args...), "--"+standingFlag+"="+strings.Join(standing, ","))
		}
		selfArgs = append(words, rest...)
		return nil
	}
	settings.Walk(root, func(c *cobra.Command) {
		if run := c.RunE; run != nil {
			c.RunE = func(c *cobra.Command, args []string) (err error) {
				c.Flags().Visit(func(f *pflag.Flag) {
					kind, text := f.Value.Type(), f.Value.String()
					if (kind == "int" || kind == "duration") && strings.HasPrefix(text, "-") {
						err = cli.Usagef("--%s %s: it must be at least 0", f.Name, text)
					}
				})
				if err == nil {
					err = run(c, args)
				}
				return withOrigins(c, err)
			}
		}
	})
}

// passedOn reports whether the command line is complete: another process has read environment and file.
func passedOn(c *cobra.Command) bool { return settled || invocationOf(c.Context()).attached() }

// wrongUse makes errors about a setting usage errors, of whatever part of Shoal.
func wrongUse(err error) error {
	if slices.ContainsFunc(
		[]error{settings.ErrWrong, loader.ErrAddress, loader.ErrTLS, engine.ErrOther, engine.ErrNear},
		func(e error) bool { return errors.Is(err, e) }) {
		return cli.Usage(err)
	}
	return err
}

// configFile loads the flag's configuration file, else the environment's, else the first default that exists, or none.
func configFile(s *settings.Schema, path string) (*settings.File, error) {
	from := "--" + configFlag
	if path == "" {
		path, from = os.Getenv(configEnv), configEnv
	}
	for _, usual := range configPaths() { // one in an inaccessible folder, as root's home, is none
		if path != "" {
			break // the home folder may hang
		} else if _, err := os.Stat(usual); err == nil {
			path = usual
		}
	}
	if path == "" {
		return nil, nil
	}
	return loadConfig(s, from, path)
}

// loadConfig loads a file. One with errors that wrap settings.ErrWrong has the rest.
func loadConfig(s *settings.Schema, from, path string) (*settings.File, error) {
	file, err := s.Load(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, cli.Usagef("%s %s: there is no such file", from, path)
	case err != nil:
		return file, cli.Usage(err)
	}
	return file, nil
}

// configPaths are the default paths of the configuration file, in order of precedence.
func configPaths() (paths []string) {
	if dir, err := os.UserConfigDir(); err == nil {
		paths = append(paths, filepath.Join(dir, "shoal", "shoal.yaml"))
	}
	return append(paths, "/etc/shoal/shoal.yaml")
}

// withOrigins adds the origins of values to an error that names flags, unless they come from the command line.
func withOrigins(c *cobra.Command, err error) error {
	if err == nil || passedOn(c) { // the process that passed the verb on does it
		return err
	}
	var from []string
	for _, f := range settings.Mentioned(c, err.Error()) {
		from = append(from, fmt.Sprintf("--%s is from %s", f.Name, settings.OriginOf(f)))
	}
	if from == nil {
		return err
	}
	return cli.WithCode(cli.Code(err), fmt.Errorf("%w (%s)", err, strings.Join(from, ", ")))
}

// given reports whether a flag is on the command line. Standing settings do not conflict with arguments; flags do.
func given(c *cobra.Command, flag string) bool {
	f := c.Flags().Lookup(flag)
	return f != nil && settings.OriginOf(f).Kind == settings.Flag
}

// outranks reports whether a flag was set at no lower level than another: on the command line, say, or in the file.
func outranks(c *cobra.Command, flag, other string) bool {
	f, o := c.Flags().Lookup(flag), c.Flags().Lookup(other)
	return f.Changed && settings.OriginOf(f).Kind >= settings.OriginOf(o).Kind
}

// rivals are the flags of which a verb takes one.
var rivals = [][2]string{{"list", "fraction"}, {"watch", "json"}, {"s3-keys", "s3-anonymous"}, {"decode", "recode"},
	{"mount", "n"}, {"cluster-insecure", "cluster-cert"}, {"cluster-insecure", "cluster-key"},
	{"cluster-insecure", "cluster-ca"}}

// removedFrom are the verbs that had those of the flags which other verbs still have.
var removedFrom = map[string][]string{
	"epoch": {"mount", "serve", "s3"}, "nodes": {"mount", "serve", "s3", "warm", "pack"},
	"refresh": {"mount", "serve", "s3"},
	"weight":  {"mount", "serve", "s3"}, "publish": {"serve", "s3"}, "workers": {"serve"},
}

// removed says what holds instead of flags that are no more (ADR 66).
var removed = map[string]string{
	"allow-remote":   "use a tls:// address with --tls-client-ca or --token-file, tcp:// on loopback, or a unix socket",
	"audit-log-keep": "5 old files are kept",
	"audit-log-size": "it is rotated at 100 MiB",
	"debug-fuse":     "trace the reader (strace), or the daemon (--log-level debug)",
	"drain-timeout":  "set SHOAL_DRAIN_TIMEOUT",
	"entry-timeout":  "it is 4 h", "epoch": "write it into the order, such as --order torch:seed=7,epoch=3",
	"gets-per-hour": "give --store gets-per-hour=N",
	"gid":           "files belong to the daemon's group, and all may read them",
	"links-outside": "give --store links-outside", "log-format": "give --log-level info,json",
	"log-size": "it is rotated at 10 MiB", "mkdir": "a missing mount point is created",
	"nodes":           "a node begins once no more have joined for 1.5 s",
	"policy":          "the kept set is what daemons have; docs/plan.md compares",
	"object-versions": "versions are read where the bucket has them", "pprof": "set SHOAL_PPROF=1",
	"price":      "give --store get=0.0004/1000,currency=USD",
	"publish":    "give it to shoal mount, or run shoal pack",
	"quota":      "use shoal cache quota once the dataset is in the cache",
	"read-ahead": "it follows from the size of the files", "records": "give --samples rows",
	"refresh": "mount, then shoal refresh MOUNTPOINT", "requester-pays": "give --store requester-pays",
	"s3-anonymous-write": "give --s3-anonymous=write", "s3-connections": "set SHOAL_S3_CONNECTIONS",
	"socket-mode": "it is 0660, for the owner and --socket-group", "sse-c-key-file": "set SHOAL_SSE_C_KEY",
	"supervise": "give --daemon=supervised; in the foreground the service manager restarts it",
	"uid":       "files belong to the daemon's user, and all may read them", "umask": "all may read the files",
	"weight":    "give it to the sessions of a feed",
	"weak-etag": "give --store weak-etag", "workers": "it is one for each processor; set GOMAXPROCS for another number",
}
