package learn

import (
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unicode"
)

const repository = "../../.."

// pages returns the Markdown files of the repository, by path.
func pages(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	walk(t, ".md", func(p, text string) { found[p] = text })
	return found
}

// walk calls f for every file of the repository whose name ends in suffix.
func walk(t *testing.T, suffix string, f func(path, text string)) {
	t.Helper()
	err := filepath.WalkDir(repository, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(repository, p)
		if err != nil {
			return err
		}
		if d.IsDir() && rel != "." && (strings.HasPrefix(d.Name(), ".") || rel == "bin" || d.Name() == "testdata") {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(p, suffix) {
			return nil
		}
		text, err := os.ReadFile(p)
		f(filepath.ToSlash(rel), string(text))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

var (
	fenced  = regexp.MustCompile("(?ms)^```.*?^```$")
	spans   = regexp.MustCompile("`[^`\n]+`")
	links   = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#{1,6} +(.+)$`)
)

// prose is a page without its code.
func prose(page string) string {
	return spans.ReplaceAllString(fenced.ReplaceAllString(page, ""), "")
}

// anchors returns what a page's headings are called in links, as GitHub names them.
func anchors(page string) map[string]bool {
	found := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(page, ""), -1) {
		var b strings.Builder
		for _, r := range strings.ToLower(links.ReplaceAllString(m[1], "]")) {
			switch {
			case r == ' ':
				b.WriteByte('-')
			case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
				b.WriteRune(r)
			}
		}
		name := b.String()
		for n := 1; found[name]; n++ {
			name = b.String() + "-" + strconv.Itoa(n)
		}
		found[name] = true
	}
	return found
}

// Every link inside the repository leads somewhere, and every page of docs can be found from README.md.
func TestLinks(t *testing.T) {
	all := pages(t)
	to := map[string][]string{}
	for name, page := range all {
		for _, m := range links.FindAllStringSubmatch(prose(page), -1) {
			target := m[1]
			if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			file, anchor, _ := strings.Cut(target, "#")
			where := name
			if file != "" {
				where = path.Join(path.Dir(name), file)
			}
			if _, err := os.Stat(filepath.Join(repository, where)); err != nil {
				t.Errorf("%s: the link to %s leads nowhere", name, target)
				continue
			}
			if anchor != "" && !anchors(all[where])[anchor] {
				t.Errorf("%s: %s has no heading #%s", name, where, anchor)
			}
			to[name] = append(to[name], where)
		}
	}
	reached, queue := map[string]bool{"README.md": true}, []string{"README.md"}
	for len(queue) > 0 {
		page := queue[0]
		queue = queue[1:]
		for _, next := range to[page] {
			if !reached[next] {
				reached[next] = true
				queue = append(queue, next)
			}
		}
	}
	index := all["docs/README.md"]
	for name := range all {
		if path.Dir(name) != "docs" {
			continue
		}
		if !reached[name] {
			t.Errorf("%s cannot be found from README.md", name)
		}
		if base := path.Base(name); base != "README.md" && !strings.Contains(index, "("+base+")") {
			t.Errorf("%s does not stand in docs/README.md", name)
		}
	}
}

// Every room of the house stands in the table of ARCHITECTURE.md.
func TestArchitectureHasAllRooms(t *testing.T) {
	page := pages(t)["docs/ARCHITECTURE.md"]
	rooms := map[string]bool{}
	walk(t, ".go", func(p, _ string) {
		top, rest, inside := strings.Cut(p, "/")
		switch {
		case !inside:
			return
		case top == "cmd" || top == "internal" || top == "docs":
			second, _, _ := strings.Cut(rest, "/")
			top += "/" + second
		}
		rooms[top] = true
	})
	for room := range rooms {
		if room != "tools" && !strings.Contains(page, "`"+room+"`") {
			t.Errorf("docs/ARCHITECTURE.md has no row of %s", room)
		}
	}
}

var testName = regexp.MustCompile(`^(Test|Fuzz)[A-Z]\w*$|^test_\w+$`)

// Every test that SEMANTICS.md names as the proof of a promise exists.
func TestPromisesHaveTheirTests(t *testing.T) {
	var tests strings.Builder
	walk(t, "_test.go", func(_, text string) { tests.WriteString(text) })
	walk(t, ".py", func(_, text string) { tests.WriteString(text) })
	code := tests.String()
	named := 0
	page := pages(t)["docs/SEMANTICS.md"]
	promises := false // in a table of promises
	for line := range strings.Lines(page) {
		cells := strings.Split(strings.TrimSpace(line), " | ")
		last := cells[len(cells)-1]
		switch {
		case !strings.HasPrefix(line, "| "):
			promises = false
		case last == "test |":
			promises = true
		case promises && cells[0] != "| ---" && !slices.ContainsFunc(spans.FindAllString(last, -1),
			func(s string) bool { return testName.MatchString(strings.Trim(s, "`")) }):
			t.Errorf("docs/SEMANTICS.md: no test is named for: %s", line)
		}
	}
	for _, span := range spans.FindAllString(page, -1) {
		name := strings.Trim(span, "`")
		if !testName.MatchString(name) {
			continue
		}
		named++
		if !strings.Contains(code, "func "+name+"(") && !strings.Contains(code, "def "+name+"(") {
			t.Errorf("docs/SEMANTICS.md: there is no test %s", name)
		}
	}
	if named < 100 {
		t.Errorf("only %d tests are named", named)
	}
}

// A page that shows something which is not run says so, and few do.
func TestFewAreNotRun(t *testing.T) {
	notRun := 0
	for name, page := range pages(t) {
		if strings.HasPrefix(name, "docs/tutorial-") {
			blocks, err := parsePage(page)
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			for _, b := range blocks {
				if b.Kind == notRunBlock {
					notRun++
				}
			}
		}
	}
	if notRun > 3 {
		t.Errorf("%d blocks of the tutorials are not run", notRun)
	}
}

// literals returns what the programs may say: the string literals of a Go file, neighbours joined, and verbs
// of formats replaced by …; of a Python file its text, prepared the same way.
func literals(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	walk(t, ".go", func(p, text string) {
		if strings.HasSuffix(p, "_test.go") {
			return
		}
		var s scanner.Scanner
		files := token.NewFileSet()
		s.Init(files.AddFile(p, -1, len(text)), []byte(text), nil, 0)
		previous := token.ILLEGAL
		for {
			_, tok, lit := s.Scan()
			if tok == token.EOF {
				break
			}
			if tok == token.STRING {
				if previous != token.ADD {
					all.WriteByte('\n')
				}
				if v, err := strconv.Unquote(lit); err == nil {
					all.WriteString(strings.ReplaceAll(formatVerb.ReplaceAllString(v, "…"), "%%", "%"))
				}
			}
			previous = tok
		}
	})
	walk(t, ".py", func(p, text string) {
		if strings.HasPrefix(p, "python/shoal/") {
			text = pythonJoin.ReplaceAllString(text, "")
			all.WriteString(strings.ReplaceAll(pythonValue.ReplaceAllString(text, "…"), `\"`, `"`))
		}
	})
	for errno := syscall.Errno(1); errno < 134; errno++ { // the system's own words
		all.WriteString("\n" + errno.Error())
	}
	return all.String()
}

var (
	formatVerb  = regexp.MustCompile(`%[-+# 0-9.\[\]]*[a-zA-Z]`)
	pythonValue = regexp.MustCompile(`\{[^{}\n]*\}`)
	pythonJoin  = regexp.MustCompile(`"\n\s+f?"`)
	errorTitle  = regexp.MustCompile("(?m)^### `+ ?(.+?) ?`+$")
)

// Every error that docs/troubleshooting.md explains is one that the programs can give, word for word.
func TestErrorTexts(t *testing.T) {
	said := literals(t)
	page := pages(t)["docs/troubleshooting.md"]
	titles := errorTitle.FindAllStringSubmatch(page, -1)
	if len(titles) < 30 {
		t.Errorf("only %d errors are explained", len(titles))
	}
	for _, m := range titles {
		checked := 0
		for part := range strings.SplitSeq(m[1], "…") {
			part = strings.TrimSpace(part)
			if len(part) < 4 {
				continue // a quotation mark, a unit
			}
			checked += len(part)
			if !strings.Contains(said, part) {
				t.Errorf("docs/troubleshooting.md: nothing says %q, of: %s", part, m[1])
			}
		}
		if checked < 10 {
			t.Errorf("docs/troubleshooting.md: nothing to check in: %s", m[1])
		}
	}
	// Each says why, and what to do.
	for _, section := range regexp.MustCompile(`(?m)^### `).Split(page, -1)[1:] {
		title, body, _ := strings.Cut(section, "\n")
		body, _, _ = strings.Cut(body, "\n## ")
		if len(strings.TrimSpace(body)) < 40 {
			t.Errorf("docs/troubleshooting.md: %s: no cause and remedy", title)
		}
	}
}
