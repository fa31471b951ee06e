// Package settings gives the flags of a command line their values from the environment and from one
// YAML file as well, under the same names: --cache-dir is SHOAL_CACHE_DIR and cache-dir. A flag wins over
// the environment, which wins over the file, which wins over the default.
//
// It walks the flag sets of the commands, so that a flag needs nothing but to be there. What it sets counts
// as set ([pflag.Flag.Changed]): code that asks whether the user gave a flag learns that he did.
package settings

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// ErrWrong is wrapped by errors about what the environment or the file says.
var ErrWrong = errors.New("wrong setting")

// wrong is an error of the user's making, whose text is whole.
type wrong struct{ text string }

func (e wrong) Error() string        { return e.text }
func (e wrong) Is(target error) bool { return target == ErrWrong }

// Kind says where a value comes from. Higher kinds win.
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

// Origin is where the value of a flag comes from.
type Origin struct {
	Kind Kind
	Name string // of the variable
	File string
	Line int
}

// String returns flag, env NAME, FILE:LINE or default.
func (o Origin) String() string {
	switch o.Kind {
	case Env:
		return "env " + o.Name
	case InFile:
		return o.File + ":" + strconv.Itoa(o.Line)
	}
	return o.Kind.String()
}

// The annotations that an applied flag carries, since pflag keeps neither texts nor origins.
const (
	originKey = "settings-origin" // kind, name, file, line
	textKey   = "settings-text"   // what was passed to Set
	noneKey   = "settings-none"
)

// OriginOf returns where the value of a flag comes from, once the settings were applied.
func OriginOf(f *pflag.Flag) Origin {
	if a := f.Annotations[originKey]; len(a) == 4 {
		kind, _ := strconv.Atoi(a[0])
		line, _ := strconv.Atoi(a[3])
		return Origin{Kind(kind), a[1], a[2], line}
	}
	if f.Changed {
		return Origin{Kind: Flag}
	}
	return Origin{}
}

func note(f *pflag.Flag, o Origin, texts []string) {
	annotate(f, originKey, strconv.Itoa(int(o.Kind)), o.Name, o.File, strconv.Itoa(o.Line))
	annotate(f, textKey, texts...)
}

func annotate(f *pflag.Flag, key string, values ...string) {
	if f.Annotations == nil {
		f.Annotations = map[string][]string{}
	}
	f.Annotations[key] = values
}

// CommandLineOnly marks a flag that has neither variable nor key.
func CommandLineOnly(f *pflag.Flag) { annotate(f, noneKey, "") }

// Without marks a command whose flags have neither variables nor keys.
func Without(c *cobra.Command) {
	if c.Annotations == nil {
		c.Annotations = map[string]string{}
	}
	c.Annotations[noneKey] = ""
}

// Schema is what can be set: the flags of a root command and of those below it.
type Schema struct {
	// Root is the program's command. It is walked at every call, so that it can still grow.
	Root *cobra.Command
	// Reserved reports whether a variable that begins with the program's name is known, but sets no flag.
	Reserved func(name string) bool
	// Checks, by the name of a flag, refuse texts that its Set accepts. They are asked for values of the
	// environment and of the file, whose errors can then name the place; flags are checked by their verbs.
	Checks map[string]func(text string) error
}

// Has reports whether a command's flags are settings.
func Has(c *cobra.Command) bool {
	for p := c; p != nil; p = p.Parent() {
		_, none := p.Annotations[noneKey]
		if none || p.Hidden || p.HasParent() && !p.Parent().HasParent() && (p.Name() == "help" || p.Name() == "completion") {
			return false
		}
	}
	return true
}

// Flags returns a command's flags that are settings, those that it inherits among them, by name.
func Flags(c *cobra.Command) (list []*pflag.Flag) {
	if !Has(c) || c.DisableFlagParsing {
		return nil
	}
	_ = c.InheritedFlags() // joins them to the command's own
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if _, none := f.Annotations[noneKey]; !none && f.Name != "help" && f.Name != "version" && !f.Hidden && f.Deprecated == "" {
			list = append(list, f)
		}
	})
	return list
}

// Walk calls do for a command and all below it that have settings, in the order of their names.
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

// names returns the names of the settings of a command and of those below it, sorted.
func names(c *cobra.Command) (list []string) {
	Walk(c, func(c *cobra.Command) {
		for _, f := range Flags(c) {
			list = append(list, f.Name)
		}
	})
	slices.Sort(list)
	return slices.Compact(list)
}

// isList reports whether a flag takes several values.
func isList(f *pflag.Flag) bool {
	_, list := f.Value.(pflag.SliceValue)
	return list
}
