package settings

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/shoalfs/shoal/internal/levenshtein"
)

// A file is one YAML mapping. A key is a setting, which applies to all verbs that have it, or a verb, whose value is a
// mapping of settings for that verb alone, which take precedence.
//
//	cache-dir: /nvme/shoal
//	serve:
//	  listen: [unix:///run/shoal/feed.sock, "tcp://127.0.0.1:7070"]
//
// A name that is both (mount is a verb, and a setting of serve) is a verb if its value is a mapping.

const (
	maxFile    = 1 << 20
	maxEntries = 10_000 // a few aliases can expand to many
	maxDepth   = 16     // of nested mappings, including aliases
)

// entry is one setting of a file.
type entry struct {
	verbs []string // the sections that contain it
	name  string
	texts []string
	line  int
}

// File is a parsed file.
type File struct {
	Path    string
	entries []entry
}

// Len returns how many settings the file holds.
func (f *File) Len() int { return len(f.entries) }

func (f *File) origin(e entry) Origin { return Origin{InFile, fmt.Sprintf("%s:%d", f.Path, e.line)} }

// Load reads a file. The error wraps fs.ErrNotExist if there is none.
func (s *Schema) Load(path string) (*File, error) {
	r, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("configuration file: %w", err)
	}
	defer r.Close()
	data, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("configuration file: %w", err)
	}
	return s.Parse(path, data)
}

// Parse parses a file. Unknown names, duplicate keys, and values of the wrong form are errors that wrap [ErrWrong] and
// name path and line; the file then has the rest. Whether values are valid is not checked yet.
func (s *Schema) Parse(path string, data []byte) (*File, error) {
	p := parser{schema: s, file: &File{Path: path}}
	if len(data) > maxFile {
		return nil, wrong{fmt.Sprintf("%s is larger than 1 MiB: it is no configuration file", path)}
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF): // nothing but comments
		return p.file, nil
	case err != nil:
		return nil, notYAML(path, err)
	}
	var second yaml.Node
	switch err := dec.Decode(&second); {
	case err == nil:
		p.fail(&second, "a second document; a configuration file has only one")
	case !errors.Is(err, io.EOF):
		return nil, notYAML(path, err)
	}
	p.section(s.Root, nil, doc.Content[0], 0)
	return p.file, errors.Join(p.errs...)
}

// notYAML returns the library's error, with line 1 if it names no line.
func notYAML(path string, err error) error {
	text, line := strings.TrimPrefix(err.Error(), "yaml: "), "1"
	if rest, ok := strings.CutPrefix(text, "line "); ok {
		line, text, _ = strings.Cut(rest, ": ")
	}
	return wrong{fmt.Sprintf("%s:%s: %s", path, line, text)}
}

type parser struct {
	schema *Schema
	file   *File
	errs   []error
}

func (p *parser) fail(at *yaml.Node, format string, args ...any) {
	p.errs = append(p.errs, wrong{fmt.Sprintf("%s:%d: %s", p.file.Path, at.Line, fmt.Sprintf(format, args...))})
}

// resolve follows an alias.
func resolve(n *yaml.Node) *yaml.Node {
	for i := 0; n.Kind == yaml.AliasNode && i < maxDepth; i++ {
		n = n.Alias
	}
	return n
}

// section parses the mapping of a command.
func (p *parser) section(c *cobra.Command, verbs []string, n *yaml.Node, depth int) {
	at, n := n, resolve(n)
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" { // all of it is commented out
		return
	}
	if n.Kind != yaml.MappingNode {
		if c == p.schema.Root {
			p.fail(at, "a configuration file is a mapping: lines such as cache-dir: /nvme/shoal")
		} else {
			p.fail(at, "%s: the settings of a verb are a mapping: indented lines such as cache-dir: /nvme/shoal",
				strings.Join(verbs, " "))
		}
		return
	}
	if depth > maxDepth {
		p.fail(at, "nested too deep")
		return
	}
	known, seen := settingsOf(c), map[string]int{} // of names, to their lines
	for i := 0; i+1 < len(n.Content); i += 2 {
		if len(p.file.entries) > maxEntries || len(p.errs) > 100 {
			p.errs = p.errs[:min(len(p.errs), 100)]
			p.fail(at, "too many settings")
			return
		}
		key, value := n.Content[i], n.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			p.fail(key, "a key is the name of a setting or of a verb")
			continue
		}
		if line, twice := seen[key.Value]; twice {
			p.fail(key, "%s: it is already set in line %d", key.Value, line)
			continue
		}
		seen[key.Value] = key.Line
		p.pair(c, known, verbs, key, value, depth)
	}
}

// pair parses one key of a section, whose settings are known.
func (p *parser) pair(c *cobra.Command, known map[string]bool, verbs []string, key, value *yaml.Node, depth int) {
	v := resolve(value)
	name := key.Value
	sub := subcommand(c, name)
	takesList, isSetting := known[name]
	if sub != nil && (v.Kind == yaml.MappingNode || v.ShortTag() == "!!null" || !isSetting) {
		p.section(sub, append(slices.Clone(verbs), name), value, depth+1)
		return
	}
	if !isSetting {
		p.unknown(c, known, verbs, key)
		return
	}
	e := entry{verbs: verbs, name: name, line: key.Line}
	items := []*yaml.Node{v}
	if v.Kind == yaml.SequenceNode {
		if len(v.Content) == 0 {
			p.fail(key, "%s: an empty list; leave the line out for the default", name)
			return
		}
		items = v.Content
		if !takesList {
			p.fail(key, "%s: a list where one value is expected", name)
			return
		}
	}
	for _, item := range items {
		text, why := scalar(resolve(item))
		if why != "" {
			p.fail(key, "%s: %s", name, why)
			return
		}
		e.texts = append(e.texts, text)
	}
	p.file.entries = append(p.file.entries, e)
}

// scalar returns the text of a value as written, so that 0660, 2GiB and 4h have the same meaning as for a flag.
func scalar(n *yaml.Node) (text, why string) {
	if n.Kind != yaml.ScalarNode {
		return "", "one value is wanted here: a text, a number, true or false"
	}
	switch n.ShortTag() {
	case "!!null":
		return "", `no value; leave the line out for the default, or write "" for none`
	case "!!str", "!!int", "!!float", "!!bool", "!!timestamp":
		return n.Value, ""
	}
	return "", "the tag " + n.Tag + " is not known here"
}

func subcommand(c *cobra.Command, name string) *cobra.Command {
	for _, sub := range c.Commands() {
		if sub.Name() == name && Has(sub) {
			return sub
		}
	}
	return nil
}

func (p *parser) unknown(c *cobra.Command, known map[string]bool, verbs []string, key *yaml.Node) {
	settings := slices.Sorted(maps.Keys(known))
	for _, sub := range c.Commands() {
		if Has(sub) {
			settings = append(settings, sub.Name())
		}
	}
	word := strings.ToLower(strings.ReplaceAll(key.Value, "_", "-"))
	word = strings.TrimPrefix(strings.TrimPrefix(word, "--"), p.schema.Root.Name()+"-")
	if instead, ok := p.schema.Removed[word]; ok {
		p.fail(key, "%s was removed: %s", key.Value, instead)
		return
	}
	if slices.Contains(settings, word) { // not near enough for a suggestion, but certain
		p.fail(key, "%s: no such setting; write %s", key.Value, word)
		return
	}
	if near := levenshtein.Nearest(word, settings, 2); near != "" {
		p.fail(key, "%s: no such setting; did you mean %s?", key.Value, near)
		return
	}
	if _, others := settingsOf(p.schema.Root)[word]; others && c != p.schema.Root {
		p.fail(key, "%s: %s has no such setting, but other verbs have it: write it in the section of one, or at the "+
			"top for all", key.Value, strings.Join(append([]string{p.schema.Root.Name()}, verbs...), " "))
		return
	}
	p.fail(key, "%s: no such setting (see: %s config --example)", key.Value, p.schema.Root.Name())
}

// find returns the file's setting for a command, from the innermost section.
func (f *File) find(c *cobra.Command, name string) (best entry, ok bool) {
	if f == nil {
		return best, false
	}
	path := commandPath(c)
	for _, e := range f.entries {
		if e.name == name && len(e.verbs) <= len(path) && slices.Equal(e.verbs, path[:len(e.verbs)]) &&
			(!ok || len(e.verbs) > len(best.verbs)) {
			best, ok = e, true
		}
	}
	return best, ok
}

// commandPath returns the words of a command below the root.
func commandPath(c *cobra.Command) []string { return strings.Fields(c.CommandPath())[1:] }
