package settings

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/internal/levenshtein"
)

// Apply sets the flags of c that are not on its command line from environ (in the form of [os.Environ]) and from file,
// which may be nil. An empty variable counts as unset. Its errors wrap [ErrWrong].
func (s *Schema) Apply(c *cobra.Command, environ []string, file *File) error {
	env, errs := s.environment(environ)
	for _, f := range Flags(c) {
		if f.Changed {
			continue
		}
		o := Origin{Env, s.EnvName(f.Name)}
		var texts []string
		if text, ok := env[o.Where]; ok {
			if texts = []string{text}; isList(f) {
				texts = strings.Split(text, ",")
			}
		} else if e, ok := file.find(c, f.Name); ok {
			o, texts = file.origin(e), e.texts
		} else {
			continue
		}
		if err := s.set(c, f, texts); err != nil {
			errs = append(errs, place(o, f.Name, texts, err))
			continue
		}
		note(f, o, texts)
	}
	for _, name := range slices.Sorted(maps.Keys(s.RemovedFrom)) {
		_, inEnv := env[s.EnvName(name)]
		e, inFile := file.find(c, name)
		switch {
		case !s.lost(c, name):
		case inEnv:
			errs = append(errs, wrong{fmt.Sprintf("%s was removed from %s: %s; unset it here",
				s.EnvName(name), c.CommandPath(), s.Removed[name])})
		case inFile:
			errs = append(errs, s.lostIn(file, e, c))
		}
	}
	for _, pair := range s.Rivals {
		for i, name := range pair {
			f, other := c.Flags().Lookup(name), c.Flags().Lookup(pair[1-i]) // empty or no, it excludes nothing
			if f != nil && other != nil && f.Changed && OriginOf(f).Kind < OriginOf(other).Kind &&
				(other.Value.Type() != "bool" && other.Value.String() != "" || other.Value.String() == "true") {
				f.Changed, f.Annotations = false, nil
				errs = append(errs, f.Value.Set(f.DefValue))
			}
		}
	}
	return errors.Join(errs...)
}

// lostIn is the error of a setting at the top of a file that one verb has no more.
func (s *Schema) lostIn(file *File, e entry, c *cobra.Command) error {
	return wrong{fmt.Sprintf("%s: %s was removed from %s: %s; move this line into the section of a verb that has it",
		file.origin(e), e.name, c.CommandPath(), s.Removed[e.name])}
}

// set sets a flag like its command line would.
func (s *Schema) set(c *cobra.Command, f *pflag.Flag, texts []string) error {
	if check := s.Checks[f.Name]; check != nil {
		for _, text := range texts {
			if text == f.DefValue { // such as an empty one
				continue
			}
			if err := check(text); err != nil {
				return err
			}
		}
	}
	if list, ok := f.Value.(pflag.SliceValue); ok {
		f.Changed = true
		return list.Replace(texts)
	}
	if len(texts) != 1 {
		return errors.New("a list where one value is expected")
	}
	err := c.Flags().Set(f.Name, texts[0])
	if invalid, ok := errors.AsType[*pflag.InvalidValueError](err); ok { // without the flag's name, which was not given
		return ValueError(invalid)
	}
	return err
}

// ValueError explains an invalid value of a flag, without naming the flag.
func ValueError(err *pflag.InvalidValueError) error {
	text, kind := err.GetValue(), err.GetFlag().Value.Type()
	var number *strconv.NumError
	switch {
	case kind == "duration":
		return fmt.Errorf("%q is not a duration (write 90s, 15m or 4h)", text)
	case !errors.As(err, &number):
		return err.Unwrap()
	case kind == "bool":
		return fmt.Errorf("%q is neither true nor false", text)
	case errors.Is(err, strconv.ErrRange):
		return fmt.Errorf("%s is out of range", text)
	case strings.HasPrefix(kind, "uint") && strings.HasPrefix(text, "-"):
		return fmt.Errorf("%s: it must be at least 0", text)
	}
	return fmt.Errorf("%q is not a number", text)
}

// place says where an invalid value comes from.
func place(o Origin, name string, texts []string, err error) error {
	if o.Kind == Env {
		return wrong{fmt.Sprintf("%s=%s: %v", o.Where, strings.Join(texts, ","), err)}
	}
	return wrong{fmt.Sprintf("%s: %s: %v", o, name, err)}
}

// Kubernetes puts the address of every service into the environment of every pod: SHOAL_FEED_PORT_7070_TCP_ADDR.
var serviceLink = regexp.MustCompile(
	`_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`)

// environment returns the variables that are settings, and errors for variables that are probably misspelt settings.
func (s *Schema) environment(environ []string) (map[string]string, []error) {
	env, prefix := map[string]string{}, s.prefix()
	var words []string // of the variables
	for _, name := range slices.Sorted(maps.Keys(settingsOf(s.Root))) {
		words = append(words, strings.TrimPrefix(s.EnvName(name), prefix))
	}
	var errs []error
	for _, kv := range environ {
		name, text, _ := strings.Cut(kv, "=")
		word, ours := strings.CutPrefix(name, prefix)
		switch {
		case !ours:
		case slices.Contains(words, word):
			if text != "" {
				env[name] = text
			}
		case s.Reserved != nil && s.Reserved(name) || serviceLink.MatchString(name):
		case s.Removed[flagName(word)] != "":
			errs = append(errs, wrong{fmt.Sprintf("%s was removed: %s", name, s.Removed[flagName(word)])})
		default:
			if near := levenshtein.Nearest(strings.ToUpper(word), words, 4); near != "" {
				errs = append(errs, wrong{fmt.Sprintf("%s: no such variable; did you mean %s%s?", name, prefix, near)})
			}
		}
	}
	return env, errs
}

// flagName is the flag of a variable, without the program's name.
func flagName(word string) string { return strings.ToLower(strings.ReplaceAll(word, "_", "-")) }

// Args returns arguments that pass the values that c got from environment and file to another process's command, and
// the names of these flags, for [Standing]. They go before the user's arguments.
func Args(c *cobra.Command) (args, standing []string) {
	for _, f := range Flags(c) {
		if o := OriginOf(f); o.Kind == Env || o.Kind == InFile {
			standing = append(standing, f.Name)
			for _, text := range f.Annotations[textKey] {
				args = append(args, "--"+f.Name+"="+text)
			}
		}
	}
	return args, standing
}

// Standing marks flags on a command line made by [Args] as not given by the user.
func Standing(c *cobra.Command, names []string) error {
	for _, name := range names {
		f := c.Flags().Lookup(name)
		if f == nil {
			return fmt.Errorf("%s has no --%s", c.CommandPath(), name)
		}
		note(f, Origin{Kind: InFile}, nil)
	}
	return nil
}

// Mentioned returns the flags named in a text (--NAME) whose values do not come from the command line.
func Mentioned(c *cobra.Command, text string) (list []*pflag.Flag) {
	for _, f := range Flags(c) {
		o := OriginOf(f)
		if (o.Kind == Env || o.Kind == InFile) && regexp.MustCompile("--"+f.Name+"([^-a-z0-9]|$)").MatchString(text) {
			list = append(list, f)
		}
	}
	return list
}

// Check returns all errors in a file's values, for each command that they apply to. It sets the flags of the schema's
// commands, which must not be used afterwards.
func (s *Schema) Check(file *File) error {
	var errs []error
	for _, e := range file.entries {
		section := s.Root
		for _, verb := range e.verbs {
			section = subcommand(section, verb)
		}
		var first error
		Walk(section, func(c *cobra.Command) {
			f := c.Flags().Lookup(e.name)
			best, _ := file.find(c, e.name)
			switch {
			case first != nil || len(best.verbs) > len(e.verbs): // the verb's own section has another
			case s.lost(c, e.name):
				first = s.lostIn(file, e, c)
			case slices.Contains(Flags(c), f):
				if err := s.set(c, f, e.texts); err != nil {
					first = place(file.origin(e), e.name, e.texts, fmt.Errorf("%w (for %s)", err, c.CommandPath()))
				}
			}
		})
		if first != nil {
			errs = append(errs, first)
		}
	}
	return errors.Join(errs...)
}
