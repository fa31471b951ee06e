// Package cli is the common part of the command lines of shoal and shoal-lab: usage errors that name the argument, the
// flag or the nearest verb, exit codes, sizes, and the reference in docs/.
//
// Exit codes: 0 done, 1 failed (one line on standard error that names the thing, the cause and the remedy), 2 wrong
// usage.
package cli

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	humanize "github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/internal/levenshtein"
	"github.com/shoalfs/shoal/internal/settings"
)

const wrongUse = 2

// Usage marks an error as one of the command line.
func Usage(err error) error { return coded{err, wrongUse} }

// Usagef returns an error of the command line.
func Usagef(format string, args ...any) error { return Usage(fmt.Errorf(format, args...)) }

// IsUsage reports whether an error is one of the command line.
func IsUsage(err error) bool { return Code(err) == wrongUse }

// Code returns the exit code of a program that ends with err.
func Code(err error) int {
	if own, ok := errors.AsType[coded](err); ok {
		return own.code
	} else if err != nil {
		return 1
	}
	return 0
}

type coded struct {
	error
	code int
}

func (e coded) Unwrap() error { return e.error }

// WithCode gives an error another exit code than 1.
func WithCode(code int, err error) error { return coded{err, code} }

// Failure recreates the error of another process from its Code and OneLine.
func Failure(code int, text string) error {
	if code == wrongUse {
		return Usagef("%s", text)
	}
	return errors.New(text)
}

// OneLine returns the text of an error without line breaks, and printable.
func OneLine(err error) string {
	return Printable(strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' }), "; "))
}

// Printable replaces what a terminal would take for a command, as a file's name may have.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && unicode.IsControl(r) {
			return '·'
		}
		return r
	}, text)
}

// Prepare sets up usage errors for all commands below root. Call it after adding all verbs. removed says what holds
// instead of flags that are no more.
func Prepare(root *cobra.Command, removed map[string]string) {
	root.SilenceUsage, root.SilenceErrors = true, true
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return flagError(c, err, removed) })
	root.SetHelpCommand(&cobra.Command{ // cobra's, with an error for unknown verbs
		Use: "help [VERB ...]", Short: "Show how a verb is used",
		RunE: func(c *cobra.Command, args []string) error {
			verb, rest, err := c.Root().Find(args)
			if err != nil || len(rest) > 0 && verb.HasSubCommands() {
				return UnknownVerb(verb, rest[0])
			}
			return verb.Help()
		},
	})
	prepare(root)
	root.RunE = RunVerbs
	root.Args = cobra.ArbitraryArgs
}

// SeeHelp ends a usage error.
func SeeHelp(c *cobra.Command) string { return "(see: " + c.CommandPath() + " --help)" }

// RunVerbs is what a command does whose work is its verbs': it shows them, and refuses an unknown one.
func RunVerbs(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return UnknownVerb(c, args[0])
	}
	return c.Help()
}

// UnknownVerb is the error for a word that is not a verb below c.
func UnknownVerb(c *cobra.Command, word string) error {
	var names []string
	for _, sub := range c.Commands() {
		if !sub.Hidden {
			names = append(names, sub.Name())
		}
	}
	if near := levenshtein.Nearest(word, names, 2); near != "" {
		return Usagef("there is no verb %q: did you mean %s %s? %s", word, c.CommandPath(), near, SeeHelp(c))
	}
	return Usagef("there is no verb %q %s", word, SeeHelp(c))
}

// ArgumentsOf returns the arguments in a verb's Use.
func ArgumentsOf(c *cobra.Command) (names []string) {
	for _, word := range strings.Fields(c.Use)[1:] {
		if strings.HasPrefix(strings.TrimPrefix(word, "["), "--") {
			break
		}
		names = append(names, word)
	}
	return names
}

// ArgumentsError says how the arguments of a verb differ from those in its Use.
func ArgumentsError(c *cobra.Command, args []string) error {
	names := ArgumentsOf(c)
	switch {
	case len(names) == 0:
		return Usagef("%s takes no arguments, and %q is one %s", c.CommandPath(), args[0], SeeHelp(c))
	case len(args) < len(names):
		return Usagef("%s takes %s: %s is missing %s", c.CommandPath(), strings.Join(names, " "), names[len(args)],
			SeeHelp(c))
	}
	return Usagef("%s takes %s: %q is one too many %s", c.CommandPath(), strings.Join(names, " "), args[len(names)],
		SeeHelp(c))
}

// prepare makes errors about arguments name them, and stops pflag from showing the zero value of flags whose help text
// has their default, for c and all commands below it.
func prepare(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			switch {
			case check(c, args) == nil:
				return nil
			case len(ArgumentsOf(c)) == 0 && c.HasSubCommands():
				return UnknownVerb(c, args[0])
			}
			return ArgumentsError(c, args)
		}
	}
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if strings.Contains(f.Usage, "(default") && f.Value.Type() != "string" {
			f.DefValue = "0"
		}
	})
	for _, sub := range c.Commands() {
		prepare(sub)
	}
}

func flagError(c *cobra.Command, err error, removed map[string]string) error {
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
		if instead, ok := removed[unknown.GetSpecifiedName()]; ok {
			return Usagef("--%s was removed: %s", unknown.GetSpecifiedName(), instead)
		}
		return unknownFlag(c, unknown)
	} else if invalid, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		return Usagef("--%s: %w %s", invalid.GetFlag().Name, settings.ValueError(invalid), SeeHelp(c))
	} else if missing, ok := errors.AsType[*pflag.ValueRequiredError](err); ok {
		return Usagef("--%s needs a value %s", missing.GetFlag().Name, SeeHelp(c))
	}
	return Usagef("%w %s", err, SeeHelp(c))
}

// unknownFlag names the verbs that have the flag, or the flag that was probably meant.
func unknownFlag(c *cobra.Command, err *pflag.NotExistError) error {
	name := err.GetSpecifiedName()
	if len(err.GetSpecifiedShortnames()) > 0 {
		return Usagef("%s has no flag -%s %s", c.CommandPath(), name, SeeHelp(c))
	}
	var verbs []string
	Documented(c.Root(), func(other *cobra.Command) {
		if f := other.Flags().Lookup(name); f != nil && !f.Hidden {
			verbs = append(verbs, other.CommandPath())
		}
	})
	if len(verbs) > 0 {
		return Usagef("%s has no flag --%s, which belongs to %s %s", c.CommandPath(), name, strings.Join(verbs, ", "),
			SeeHelp(c))
	}
	var known []string
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			known = append(known, f.Name)
		}
	})
	if near := levenshtein.Nearest(name, known, 2); near != "" {
		return Usagef("%s has no flag --%s: did you mean --%s? %s", c.CommandPath(), name, near, SeeHelp(c))
	}
	return Usagef("%s has no flag --%s %s", c.CommandPath(), name, SeeHelp(c))
}

// Documented calls do for every command that users see, in the order of the help.
func Documented(c *cobra.Command, do func(*cobra.Command)) {
	if c.Hidden {
		return
	}
	do(c)
	for _, sub := range c.Commands() {
		Documented(sub, do)
	}
}

// Size is a flag value in bytes, written 512MiB, 20GiB, 1.5GB.
type Size int64

// String returns the size with a unit.
func (s *Size) String() string { return humanize.IBytes(uint64(*s)) }

// Type implements pflag.Value.
func (s *Size) Type() string { return "size" }

// Set implements pflag.Value.
func (s *Size) Set(text string) error {
	n, err := ParseSize(text, "write 512MiB, 20GiB or 1.5GB")
	if err == nil {
		*s = Size(n)
	}
	return err
}

const leastBare = 64 << 10 // the fewest bytes that are accepted without a unit: 10 does not mean bytes

// ParseSize parses a size. remedy says how to write one.
func ParseSize(text, remedy string) (int64, error) {
	n, err := humanize.ParseBytes(text)
	if err != nil || n > 1<<60 || strings.Contains(text, ",") { // which would count for nothing: 1,5GB as 15 GB
		return 0, fmt.Errorf("%q is not a size (%s)", text, remedy)
	}
	if bare, err := strconv.ParseFloat(text, 64); err == nil && bare > 0 && n < leastBare {
		return 0, fmt.Errorf("%q has no unit and would be %s bytes (write %sGiB, %sMiB, or %sB if you mean it)",
			text, text, text, text, text)
	}
	return int64(n), nil
}

// AsMarkdown converts indented parts of a help text to code blocks, and escapes Markdown's characters.
func AsMarkdown(text string) string {
	var b strings.Builder
	block := false
	for line := range strings.Lines(text) {
		indented := strings.HasPrefix(line, "  ")
		if indented != block && strings.TrimSpace(line) != "" {
			if !strings.HasSuffix(b.String(), "\n\n") {
				b.WriteByte('\n')
			}
			block = indented
		}
		if indented {
			line = "  " + line
		} else {
			line = strings.NewReplacer("<", "\\<", "*", "\\*", "{", "\\{").Replace(line)
		}
		b.WriteString(line)
	}
	return b.String()
}

// Reference writes the reference of a command line as Markdown: a table of its verbs, and the help of each. Flags named
// in hidden are left out.
func Reference(w io.Writer, r *cobra.Command, hidden ...string) error {
	var b strings.Builder
	b.WriteString("| verb | |\n| --- | --- |\n")
	Documented(r, func(c *cobra.Command) {
		if c != r {
			fmt.Fprintf(&b, "| [%s](#%s) | %s |\n", c.CommandPath(),
				strings.ReplaceAll(c.CommandPath(), " ", "-"), c.Short)
		}
	})
	Documented(r, func(c *cobra.Command) {
		if c == r {
			return
		}
		fmt.Fprintf(&b, "\n## %s\n\n%s.\n\n```\n%s\n```\n", c.CommandPath(), c.Short, c.UseLine())
		if c.Long != "" {
			fmt.Fprintf(&b, "\n%s\n", strings.TrimRight(AsMarkdown(c.Long), "\n"))
		}
		if c.Example != "" {
			fmt.Fprintf(&b, "\n```sh\n%s\n```\n", indent.ReplaceAllString(c.Example, ""))
		}
		own := pflag.NewFlagSet("", pflag.ContinueOnError)
		_ = c.InheritedFlags() // merges them
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Name != "help" && !slices.Contains(hidden, f.Name) {
				own.AddFlag(f)
			}
		})
		if text := own.FlagUsagesWrapped(120); text != "" {
			fmt.Fprintf(&b, "\n```\n%s```\n", text)
		}
	})
	_, err := io.WriteString(w, b.String())
	return err
}

var indent = regexp.MustCompile(`(?m)^  `) // of cobra's help
