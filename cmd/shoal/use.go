package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	humanize "github.com/dustin/go-humanize"
	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/engine"
	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/levenshtein"
	"github.com/shoalfs/shoal/internal/settings"
)

// What a wrong command line is told: the argument that is missing or too much, the nearest verb or flag, the value and
// how to write it.

// count writes a number of things.
func count[N int | int64](n N, thing string) string {
	return humanize.Comma(int64(n)) + " " + english.PluralWord(int(n), thing, "")
}

// seeHelp ends an error of use.
func seeHelp(c *cobra.Command) string { return "(see: " + c.CommandPath() + " --help)" }

// unknownVerb tells of a word that is no verb below c.
func unknownVerb(c *cobra.Command, word string) error {
	var names []string
	for _, sub := range c.Commands() {
		if !sub.Hidden {
			names = append(names, sub.Name())
		}
	}
	if near := levenshtein.Nearest(word, names, 2); near != "" {
		return usagef("there is no verb %q: did you mean %s %s? %s", word, c.CommandPath(), near, seeHelp(c))
	}
	return usagef("there is no verb %q %s", word, seeHelp(c))
}

// helpCommand is cobra's, but for verbs that there are not.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "help [VERB ...]",
		Short: "Show how a verb is used",
		RunE: func(c *cobra.Command, args []string) error {
			verb, rest, err := c.Root().Find(args)
			if err != nil || len(rest) > 0 && verb.HasSubCommands() {
				return unknownVerb(verb, rest[0])
			}
			return verb.Help()
		},
	}
}

// argumentsOf returns the arguments that a verb's Use names.
func argumentsOf(c *cobra.Command) (names []string) {
	for _, word := range strings.Fields(c.Use)[1:] {
		if strings.HasPrefix(word, "--") {
			break
		}
		names = append(names, word)
	}
	return names
}

// argumentsError tells how the arguments of a verb differ from what its Use names, which they do.
func argumentsError(c *cobra.Command, args []string) error {
	names := argumentsOf(c)
	switch {
	case len(names) == 0:
		return usagef("%s takes no arguments, and %q is one %s", c.CommandPath(), args[0], seeHelp(c))
	case len(args) < len(names):
		return usagef("%s takes %s: %s is missing %s", c.CommandPath(), strings.Join(names, " "), names[len(args)], seeHelp(c))
	}
	return usagef("%s takes %s: %q is one too many %s", c.CommandPath(), strings.Join(names, " "), args[len(names)], seeHelp(c))
}

// nameArguments makes errors about the arguments of c, and all below it, name them.
func nameArguments(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			err := check(c, args)
			if err != nil && c.HasSubCommands() {
				return unknownVerb(c, args[0])
			}
			if err != nil {
				return argumentsError(c, args)
			}
			return nil
		}
	}
	for _, sub := range c.Commands() {
		nameArguments(sub)
	}
}

// tellDefaults keeps pflag from telling the zero value of flags whose help says what their default is.
func tellDefaults(c *cobra.Command) {
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if strings.Contains(f.Usage, "(default") && f.Value.Type() != "string" {
			f.DefValue = "0"
		}
	})
	for _, sub := range c.Commands() {
		tellDefaults(sub)
	}
}

// flagError says what is wrong with a flag.
func flagError(c *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	var invalid *pflag.InvalidValueError
	var missing *pflag.ValueRequiredError
	switch {
	case errors.As(err, &unknown):
		return unknownFlag(c, unknown)
	case errors.As(err, &invalid):
		return usagef("--%s: %w %s", invalid.GetFlag().Name, settings.ValueError(invalid), seeHelp(c))
	case errors.As(err, &missing):
		return usagef("--%s needs a value %s", missing.GetFlag().Name, seeHelp(c))
	}
	return usagef("%w %s", err, seeHelp(c))
}

// unknownFlag names the flag that is meant, or the verbs that have it.
func unknownFlag(c *cobra.Command, err *pflag.NotExistError) error {
	name := err.GetSpecifiedName()
	if len(err.GetSpecifiedShortnames()) > 0 {
		return usagef("%s has no flag -%s %s", c.CommandPath(), name, seeHelp(c))
	}
	var known []string
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			known = append(known, f.Name)
		}
	})
	if near := levenshtein.Nearest(name, known, 2); near != "" {
		return usagef("%s has no flag --%s: did you mean --%s? %s", c.CommandPath(), name, near, seeHelp(c))
	}
	var verbs []string
	documented(c.Root(), func(other *cobra.Command) {
		if f := other.Flags().Lookup(name); f != nil && !f.Hidden {
			verbs = append(verbs, other.CommandPath())
		}
	})
	if len(verbs) > 0 {
		return usagef("%s has no flag --%s, which is of %s %s", c.CommandPath(), name, strings.Join(verbs, ", "), seeHelp(c))
	}
	return usagef("%s has no flag --%s %s", c.CommandPath(), name, seeHelp(c))
}

// oneMount returns the mount that args name, or the only one on this machine.
func oneMount(args []string) (string, error) {
	if len(args) > 0 {
		return args[0], nil
	}
	mounts, err := fusefs.Mounts()
	if err != nil {
		return "", err
	}
	return only(mounts, "give a mount point")
}

// oneDaemon returns the mount or feed that args name, or the only daemon's on this machine that has a mount or
// serves the default feed.
func oneDaemon(ctx context.Context, c *cobra.Command, args []string, security *clientSecurity) (string, error) {
	if len(args) > 0 {
		return args[0], nil
	}
	found, err := foundTargets()
	if err != nil {
		return "", err
	}
	if n := len(found); n > 1 && found[n-1] == defaultFeed {
		// A daemon serves both, or the socket is one that a dead one has left.
		feed := daemonOf(ctx, c, defaultFeed, security)
		if feed == 0 || slices.ContainsFunc(found[:n-1], func(mount string) bool { return daemonOf(ctx, c, mount, security) == feed }) {
			found = found[:n-1]
		}
	}
	return only(found, "give a mount point or a feed's address")
}

// daemonOf returns the process behind a mount or feed, 0 if it does not tell.
func daemonOf(ctx context.Context, c *cobra.Command, target string, security *clientSecurity) int {
	raw, err := anyStats(ctx, c, target, security)
	var s engine.Stats
	if err != nil || json.Unmarshal(raw, &s) != nil {
		return 0
	}
	return s.PID
}

// only returns the only one of found.
func only(found []string, remedy string) (string, error) {
	switch len(found) {
	case 0:
		return "", usagef("nothing of Shoal is seen here (%s)", remedy)
	case 1:
		return found[0], nil
	}
	return "", usagef("there are %d here (give one of %s)", len(found), strings.Join(found, ", "))
}

// say tells which target was taken where none was given.
func say(args []string, format string, target string) {
	if len(args) == 0 {
		fmt.Fprintf(os.Stderr, format+"\n", target)
	}
}
