package settings

import (
	"errors"
	"strings"
	"testing"
)

// Whatever a file holds, it is refused with its name and a line, or it can be applied.
func FuzzParse(f *testing.F) {
	for _, text := range []string{
		file, "", "a", "- a", "a: &a [*a]", "mount: &a {<<: *a}", "<<: [{timeout: 1s}, {timeout: 2s}]",
		"timeout: !!int 5", "serve: {listen: [a, b, ~]}",
		"? [a]\n: b", "mount: |\n  x\n", "%YAML 1.1\n---\ntimeout: 1s", "\xff", "timeout: \"\\x00\"",
		"cache: {ls: {json: true}, dir: /x}", "a: &x {b: *x}",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s := program()
		parsed, err := s.Parse("file", data)
		if err != nil {
			if !errors.Is(err, ErrWrong) || !strings.HasPrefix(err.Error(), "file:") {
				t.Fatalf("error %v", err)
			}
			return
		}
		for _, e := range parsed.entries {
			if e.line < 1 || e.line > strings.Count(string(data), "\n")+strings.Count(string(data), "\r")+
				strings.Count(string(data), "\u2028")+strings.Count(string(data), "\u2029")+strings.Count(string(data),
				"\u0085")+1 {
				t.Fatalf("%s: line %d", e.name, e.line)
			}
		}
		for _, verb := range [][]string{{"mount"}, {"serve"}, {"cache", "ls"}} {
			s := program()
			c := command(t, s, verb...)
			if err := s.Apply(c, nil, parsed); err != nil && !errors.Is(err, ErrWrong) {
				t.Fatalf("error %v", err)
			}
		}
	})
}
