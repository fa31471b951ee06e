package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/workload"
)

// Completions follow from the names of flags and from the words of Use (SOURCE, MOUNTPOINT), so that new verbs and flags
// have them without more code. They use nothing slow: no store, and no cache directory that is not open in a
// daemon.

// orderWords are the beginnings of orders. Text can follow words that end in = or :.
var orderWords = []string{
	"auto\twhat is written to .shoal/plan, else what is seen", "none\tno order", "plan\twhat is written to .shoal/plan", "sequential\tby number",
	"torch:seed=\tDistributedSampler", "torch-loader:seed=\tDataLoader(shuffle=True)", "uniform:seed=\tShoal's own", "windowed:seed=\tof packed sources",
	"mixture:seed=\tby weights", "buckets:seed=\tby length", "list:\tof a file",
}

// flagWords are the values of flags whose values are fixed words.
var flagWords = map[string][]string{
	"order":     orderWords,
	"log-level": {"debug", "info", "warn", "error"},
	"samples":   {"images", "*", ".jpg,.png", "rows"},
	"policy":    {"keep", "lru", "belady", "none", "all"}, "transport": {"auto", "slots", "chunks"}, "bad": {"error", "skip:0.1%"},
	"tail": {"uneven", "drop", "pad"}, "workload": workload.Names(),
	"transform": {"RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw", "Resize(256)|CenterCrop(224)|uint8|nchw"}, "resize": {"short="}, "label": {"folder", "cls", "json:", "none"},
}

// flagFolders are the flags whose values are folders, flagTexts those whose values are not files.
var (
	flagFolders = []string{"cache-dir", "work-dir", "spool", "mount", "mountpoint"}
	flagTexts   = []string{"state", "session", "server-name", "socket-group", "target"}
)

// addCompletions completes the flags and the arguments of a command and of all commands below it.
func addCompletions(c *cobra.Command) {
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if _, there := c.GetFlagCompletionFunc(f.Name); there {
			return
		}
		_ = c.RegisterFlagCompletionFunc(f.Name, flagCompletion(f)) // fails if there is one already
	})
	if c.ValidArgsFunction == nil && len(c.Commands()) == 0 && !c.Hidden {
		c.ValidArgsFunction = argCompletion(strings.Fields(c.Use)[1:])
	}
	for _, sub := range c.Commands() {
		addCompletions(sub)
	}
}

// offered returns the words that a flag accepts; nil if it also accepts other values.
func offered(f *pflag.Flag) []string {
	switch v := f.Value.(type) {
	case choice:
		return v.words()
	case *amount:
		return []string{"auto", "80%", "20GiB"}
	case *connections:
		return []string{"auto"}
	case *bandwidth:
		return []string{"10Gbit", "1GiB/s", "unlimited"}
	}
	return flagWords[f.Name]
}

func flagCompletion(f *pflag.Flag) cobra.CompletionFunc {
	if words := offered(f); words != nil {
		return wordsThatGoOn(words)
	}
	switch {
	case slices.Contains(flagFolders, f.Name):
		return folders
	case f.Name == "shards" || f.Name == "publish":
		return sources
	case f.Name == "listen":
		return wordsThatGoOn([]string{"unix:///run/shoal/feed.sock", "tcp://127.0.0.1:7070", "tls://0.0.0.0:7070"})
	case f.Name == "admin":
		return wordsThatGoOn([]string{"127.0.0.1:7071"})
	}
	if f.Value.Type() == "string" && !slices.Contains(flagTexts, f.Name) {
		return cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault) // files
	}
	return cobra.NoFileCompletions
}

// wordsThatGoOn offers words, without a space after one that ends in = or :.
func wordsThatGoOn(words []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
		var fit []string
		goOn := cobra.ShellCompDirectiveNoFileComp
		for _, w := range words {
			if strings.HasPrefix(w, typed) {
				fit = append(fit, w)
				if word, _, _ := strings.Cut(w, "\t"); strings.HasSuffix(word, "=") || strings.HasSuffix(word, ":") {
					goOn |= cobra.ShellCompDirectiveNoSpace
				}
			}
		}
		if path, ok := strings.CutPrefix(typed, "list:"); ok && path != "" {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return fit, goOn
	}
}

func folders(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return nil, cobra.ShellCompDirectiveFilterDirs
}

// argCompletion completes arguments by the words of Use: "SOURCE", "[MOUNTPOINT|ADDR", "...]".
func argCompletion(use []string) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		n := len(args)
		if len(use) > 1 && strings.Trim(use[len(use)-1], "[]") == "..." {
			n = min(n, len(use)-2) // the last argument repeats
		}
		if n >= len(use) {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var all []string
		directive := cobra.ShellCompDirectiveNoFileComp
		for _, word := range strings.Split(strings.Trim(use[n], "[]."), "|") {
			complete := argWords[word]
			if complete == nil {
				continue
			}
			if word == "MOUNTPOINT" && c.Name() == "mount" {
				complete = folders
			}
			list, d := complete(c, args, typed)
			all = append(all, list...)
			if d != cobra.ShellCompDirectiveNoFileComp {
				directive = d
			}
		}
		return all, directive
	}
}

var argWords = map[string]cobra.CompletionFunc{
	"SOURCE": sources, "DEST": folders, "CACHE-DIR": folders, "SPEC": wordsThatGoOn(orderWords), "WORKLOAD": wordsThatGoOn(workload.Names()),
	"MOUNTPOINT": func(*cobra.Command, []string, string) (list []string, _ cobra.ShellCompDirective) {
		mounts, _ := fusefs.Mounts()
		for _, m := range mounts {
			list = append(list, m.Point+"\t"+m.Source)
		}
		return list, cobra.ShellCompDirectiveNoFileComp
	},
	"ADDR": func(*cobra.Command, []string, string) (list []string, _ cobra.ShellCompDirective) {
		if _, err := os.Stat(strings.TrimPrefix(defaultFeed, "unix://")); err == nil {
			list = append(list, defaultFeed)
		}
		return list, cobra.ShellCompDirectiveNoFileComp
	},
}

// completionPatience is how long completion waits for a daemon.
const completionPatience = 500 * time.Millisecond

// sources offers the sources that are mounted, and those open in daemons of the user's cache directories.
func sources(c *cobra.Command, args []string, _ string) (list []string, _ cobra.ShellCompDirective) {
	mounts, _ := fusefs.Mounts()
	for _, m := range mounts {
		list = append(list, m.Source)
	}
	dirs, _ := defaultDirs()
	if len(args) > 0 && strings.Contains(c.Use, "CACHE-DIR SOURCE") {
		dirs = args[:1]
	}
	if !settled {
		_ = applySettings(c) // the verb reports errors when it runs
	}
	if f := c.Flags().Lookup("cache-dir"); f != nil && f.Value.String() != "" {
		dirs = append(dirs, f.Value.String())
	}
	ctx, cancel := context.WithTimeout(c.Context(), completionPatience)
	defer cancel()
	for _, dir := range dirs {
		var out bytes.Buffer
		var entries []cacheEntry
		if attach(ctx, dir, []string{"cache", "ls", dir, "--json"}, &out) != nil || json.Unmarshal(out.Bytes(), &entries) != nil {
			continue
		}
		for _, e := range entries {
			source, _, _ := strings.Cut(e.Source, "?")
			list = append(list, source)
		}
	}
	slices.Sort(list)
	return slices.Compact(list), cobra.ShellCompDirectiveDefault
}
