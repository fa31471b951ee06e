// Package settings sets the flags of a command line also from the environment and from one YAML file, under the same
// names: --cache-dir is SHOAL_CACHE_DIR and cache-dir. A flag overrides the environment, which overrides the file,
// which overrides the default.
//
// It walks the flag sets of the commands, so that flags need no registration. Values that it sets count as set
// ([pflag.Flag.Changed]): code that checks whether the user gave a flag sees them as given.
package settings

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// ErrWrong is wrapped by errors about values in the environment or the file.
var ErrWrong = errors.New("wrong setting")

// wrong is a user's error with its complete text.
type wrong struct{ text string }

func (e wrong) Error() string        { return e.text }
func (e wrong) Is(target error) bool { return target == ErrWrong }

// Kind is the source of a value. Higher kinds take precedence.
type Kind int

// The kinds.
const (
	Default Kind = iota
	InFile
	Env
	Flag
)

// String returns default, file, env or flag.
func (k Kind) String() string { return [...]string{"default", "file", "env", "flag"}[k] }

// Origin is the source of a flag's value.
type Origin struct {
	Kind  Kind
	Where string // the variable, or FILE:LINE
}

// String returns flag, env NAME, FILE:LINE or default.
func (o Origin) String() string {
	switch o.Kind {
	case Env:
		return "env " + o.Where
	case InFile:
		return o.Where
	}
	return o.Kind.String()
}

// The annotations of an applied flag, since pflag keeps neither texts nor origins.
const (
	originKey = "settings-origin" // kind, where
	textKey   = "settings-text"   // what was passed to Set
	noneKey   = "settings-none"
)

// OriginOf returns the origin of a flag's value, after the settings were applied.
func OriginOf(f *pflag.Flag) Origin {
	if a := f.Annotations[originKey]; len(a) == 2 {
		kind, _ := strconv.Atoi(a[0])
		return Origin{Kind(kind), a[1]}
	}
	if f.Changed {
		return Origin{Kind: Flag}
	}
	return Origin{}
}

func note(f *pflag.Flag, o Origin, texts []string) {
	annotate(f, originKey, strconv.Itoa(int(o.Kind)), o.Where)
	annotate(f, textKey, texts...)
}

func annotate(f *pflag.Flag, key string, values ...string) {
	if f.Annotations == nil {
		f.Annotations = map[string][]string{}
	}
	f.Annotations[key] = values
}

// CommandLineOnly marks a flag without variable and key.
func CommandLineOnly(f *pflag.Flag) { annotate(f, noneKey, "") }

// Without marks a command whose flags have no variables and no keys.
func Without(c *cobra.Command) {
	if c.Annotations == nil {
		c.Annotations = map[string]string{}
	}
	c.Annotations[noneKey] = ""
}

// Schema is the set of settings: the flags of a root command and of the commands below it.
type Schema struct {
	// Root is the program's command. It is walked at every call, so that it can still grow.
	Root *cobra.Command
	// Reserved reports whether a variable that begins with the program's name is known, but is not a flag's.
	Reserved func(name string) bool
	// Removed says what holds instead of settings that are no more. RemovedFrom has the verbs that lost one which
	// others still have: for these verbs, its variable, and its key at the top of the file, are errors.
	Removed     map[string]string
	RemovedFrom map[string][]string
	// Checks reject texts that a flag's Set accepts, by the name of the flag. They apply to values from the environment
	// and the file, so that errors can name the place; verbs check their command line's flags themselves.
	Checks map[string]func(text string) error
	// Rivals are flags that exclude each other: of a pair, what comes from a lower kind of source is left out.
	Rivals [][2]string
}

// Has reports whether a command's flags are settings.
func Has(c *cobra.Command) bool {
	for p := c; p != nil; p = p.Parent() {
		_, none := p.Annotations[noneKey]
		if none || p.Hidden || p.HasParent() && !p.Parent().HasParent() &&
			(p.Name() == "help" || p.Name() == "completion") {
			return false
		}
	}
	return true
}

// Flags returns a command's flags that are settings, including inherited ones, by name.
func Flags(c *cobra.Command) (list []*pflag.Flag) {
	if !Has(c) || c.DisableFlagParsing {
		return nil
	}
	_ = c.InheritedFlags() // merges them with the command's own
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if _, none := f.Annotations[noneKey]; !none && f.Name != "help" && f.Name != "version" && !f.Hidden &&
			f.Deprecated == "" {
			list = append(list, f)
		}
	})
	return list
}

// Walk calls do for a command and all commands below it that have settings, in the order of their names.
func Walk(c *cobra.Command, do func(*cobra.Command)) {
	if !Has(c) {
		return
	}
	do(c)
	for _, sub := range c.Commands() {
		Walk(sub, do)
	}
}

// EnvName returns the variable of a flag: SHOAL_CACHE_DIR for cache-dir.
func (s *Schema) EnvName(flag string) string {
	return s.prefix() + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

func (s *Schema) prefix() string {
	return strings.ToUpper(strings.ReplaceAll(s.Root.Name(), "-", "_")) + "_"
}

// lost reports whether a command is one of Schema.RemovedFrom.
func (s *Schema) lost(c *cobra.Command, name string) bool {
	return c.Parent() == s.Root && slices.Contains(s.RemovedFrom[name], c.Name())
}

// settingsOf returns the names of the settings of a command and of those below it, and whether each can be a list.
func settingsOf(c *cobra.Command) map[string]bool {
	all := map[string]bool{}
	Walk(c, func(c *cobra.Command) {
		for _, f := range Flags(c) {
			all[f.Name] = all[f.Name] || isList(f)
		}
	})
	return all
}

// isList reports whether a flag accepts several values.
func isList(f *pflag.Flag) bool {
	_, list := f.Value.(pflag.SliceValue)
	return list
}
