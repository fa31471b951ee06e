package settings

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/shoalfs/shoal/internal/human"
)

// hidden replaces a secret.
const hidden = "***"

// Setting is the value in force of one flag.
type Setting struct {
	Name  string   `json:"name"`            // of the flag, and of the key in a file
	Env   string   `json:"env"`             // its variable
	Value string   `json:"value"`           // in the flag's syntax; lists are joined by commas
	List  []string `json:"list,omitempty"`  // of a flag that takes several values
	From  string   `json:"from"`            // flag, env, file or default
	Where string   `json:"where,omitempty"` // the variable, or FILE:LINE

	Origin string `json:"-"` // From and Where, for people
}

// Settings returns a command's values after [Schema.Apply], by name, without passwords in URLs: no flag has others.
func (s *Schema) Settings(c *cobra.Command) (list []Setting) {
	for _, f := range Flags(c) {
		list = append(list, s.setting(f))
	}
	return list
}

func (s *Schema) setting(f *pflag.Flag) Setting {
	o := OriginOf(f)
	row := Setting{Name: f.Name, Env: s.EnvName(f.Name), From: o.Kind.String(), Where: o.Where, Origin: o.String()}
	row.Value = Redact(f.Value.String())
	if texts := f.Annotations[textKey]; len(texts) == 1 { // exact; String may round
		row.Value = Redact(texts[0])
	}
	if v, ok := f.Value.(pflag.SliceValue); ok {
		row.List = []string{}
		for _, text := range v.GetSlice() {
			row.List = append(row.List, Redact(text))
		}
		row.Value = strings.Join(row.List, ",")
	}
	return row
}

// Redact hides the password of a URL.
func Redact(text string) string {
	if !strings.Contains(text, "@") || !strings.Contains(text, "://") {
		return text
	}
	u, err := url.Parse(text)
	switch {
	case err != nil || strings.HasPrefix(text, "etcd"): // a password, which an etcd's may be whatever it looks like
		scheme, _, _ := strings.Cut(text, "://")
		return scheme + "://" + hidden + text[strings.LastIndexByte(text, '@'):]
	case u.User == nil:
		return text
	}
	u.User = url.User(hidden)
	return strings.Replace(u.String(), url.QueryEscape(hidden)+"@", hidden+"@", 1)
}

// WriteExample prints a file with every setting at its default, commented out: first those that several verbs share
// with the same help, then those of each verb.
func (s *Schema) WriteExample(out io.Writer) error {
	lines, uses := map[*pflag.Flag]string{}, map[string][]*pflag.Flag{}
	Walk(s.Root, func(c *cobra.Command) {
		for _, f := range ownFlags(c) {
			lines[f], uses[f.Name] = yamlLine(s.setting(f)), append(uses[f.Name], f)
		}
	})
	// Not if the defaults differ, of which it would change some; nor if a verb has the name, or has lost it.
	common := map[string]*pflag.Flag{}
	for name, list := range uses {
		if subcommand(s.Root, name) != nil || s.RemovedFrom[name] != nil ||
			slices.ContainsFunc(list, func(f *pflag.Flag) bool { return lines[f] != lines[list[0]] }) {
			continue
		}
		for _, f := range list {
			shared := slices.ContainsFunc(list, func(o *pflag.Flag) bool { return o != f && o.Usage == f.Usage })
			if shared && (common[name] == nil || len(common[name].Usage) < len(f.Usage)) {
				common[name] = f
			}
		}
	}
	fmt.Fprintf(out, `## Configuration of %[1]s, with every setting at its default. Take away the # before what you change: a
## line has the name and the form of its flag. %[1]s config --check FILE checks a file, and %[1]s config VERB
## shows what holds.
##
## Settings of all verbs that have them. A verb's own section, further down, wins over them.
`, s.Root.Name())
	show := func(f *pflag.Flag, indent string) string {
		var b strings.Builder
		for _, line := range human.Fold(f.Usage, 100-len(indent)) {
			fmt.Fprintf(&b, "%s## %s\n", indent, line)
		}
		fmt.Fprintf(&b, "%s#%s\n", indent, lines[f])
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
				if same := common[f.Name]; same == nil || same.Usage != f.Usage {
					body.WriteString(show(f, indent+"  "))
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

// yamlLine returns NAME: VALUE.
func yamlLine(row Setting) string {
	value := scalarNode(row.Value)
	if row.List != nil {
		value = &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
		for _, text := range row.List {
			value.Content = append(value.Content, scalarNode(text))
		}
	}
	b, _ := yaml.Marshal(&yaml.Node{Kind: yaml.MappingNode, Content: []*yaml.Node{scalarNode(row.Name), value}})
	return strings.TrimSuffix(string(b), "\n")
}

// scalarNode returns text as a person would write it: a number without quotes.
func scalarNode(text string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Value: text}
	special := []string{"", "~", "null", "<<", "*"}
	if slices.Contains(special, strings.ToLower(text)) || strings.ContainsAny(text, "\n\r\t") {
		n.Style = yaml.DoubleQuotedStyle
	}
	return n
}

// WriteJSON prints v, indented.
func WriteJSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
