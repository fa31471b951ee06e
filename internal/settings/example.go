package settings

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/internal/human"
)

// WriteExample prints a file with every setting at its default, commented out: first those that several verbs share
// with the same help, then those of each verb.
func (s *Schema) WriteExample(out io.Writer) error {
	type use struct {
		flag *pflag.Flag
		row  Setting
		line string
	}
	uses := map[string][]use{}
	var failure error
	Walk(s.Root, func(c *cobra.Command) {
		for _, f := range ownFlags(c) {
			row := s.setting(f)
			line, err := yamlLine(row)
			if err != nil {
				failure = err
			}
			uses[f.Name] = append(uses[f.Name], use{f, row, line})
		}
	})
	if failure != nil {
		return failure
	}
	// Not if the defaults differ: one line for all verbs would change some. Nor if a verb has the name, for its section, or lost it.
	common := map[string]use{}
	for name, list := range uses {
		if subcommand(s.Root, name) != nil || s.RemovedFrom[name] != nil || slices.ContainsFunc(list, func(u use) bool { return u.line != list[0].line }) {
			continue
		}
		for _, u := range list {
			shared := slices.ContainsFunc(list, func(o use) bool { return o.flag != u.flag && o.row.Usage == u.row.Usage })
			if shared && len(common[name].row.Usage) < len(u.row.Usage) {
				common[name] = u
			}
		}
	}
	fmt.Fprintf(out, `## Configuration of %[1]s, with every setting at its default. Take away the # before what you change: a
## line has the name and the form of its flag. %[1]s config --check FILE checks a file, and %[1]s config VERB
## shows what holds.
##
## Settings of all verbs that have them. A verb's own section, further down, wins over them.
`, s.Root.Name())
	show := func(u use, indent string) string {
		var b strings.Builder
		for _, line := range human.Fold(u.row.Usage, 100-len(indent)) {
			fmt.Fprintf(&b, "%s## %s\n", indent, line)
		}
		fmt.Fprintf(&b, "%s#%s\n", indent, u.line)
		return b.String()
	}
	for _, name := range slices.Sorted(maps.Keys(common)) {
		fmt.Fprint(out, "\n", show(common[name], ""))
	}
	var section func(c *cobra.Command, indent string) string
	section = func(c *cobra.Command, indent string) string {
		var b strings.Builder
		for _, sub := range c.Commands() {
			if !Has(sub) {
				continue
			}
			var body strings.Builder
			for _, f := range ownFlags(sub) {
				if u, ok := common[f.Name]; !ok || u.row.Usage != f.Usage {
					i := slices.IndexFunc(uses[f.Name], func(u use) bool { return u.flag == f })
					body.WriteString(show(uses[f.Name][i], indent+"  "))
				}
			}
			body.WriteString(section(sub, indent+"  "))
			if body.Len() > 0 {
				fmt.Fprintf(&b, "\n%s## %s\n%s#%s:\n%s", indent, sub.Short, indent, sub.Name(), body.String())
			}
		}
		return b.String()
	}
	_, err := io.WriteString(out, section(s.Root, ""))
	return err
}

// ownFlags returns the flags of a command without inherited ones.
func ownFlags(c *cobra.Command) []*pflag.Flag {
	return slices.DeleteFunc(Flags(c), func(f *pflag.Flag) bool { return c.InheritedFlags().Lookup(f.Name) == f })
}
