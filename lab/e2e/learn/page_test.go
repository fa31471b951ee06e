package learn

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// The commands on a Markdown page are run (pagerun_test.go), and their output is compared with the output on the page.
// The page is the only source: what a reader copies is what is run.
//
//   - A block marked sh is run. All of a page's blocks run in one bash, with -e and pipefail, one after the other.
//   - A block marked python whose first line is "# NAME.py" is saved as NAME.py in the current folder; any other
//     is run by python3.
//   - A block marked output is what the block before it prints, on standard output and error together. In a
//     line … stands for any text, and a line of … alone for any lines, or none.
//   - A block marked "sh not-run" is not run. The line above it must say so to the reader, with the words
//     "Not run by the tests", and why.
//
// Other blocks are ignored.

// blockKind is how a block is handled.
type blockKind int

const (
	shellBlock  blockKind = iota // run by bash
	pythonBlock                  // run by python3, or saved as a file
	notRunBlock                  // shown only
)

// docBlock is one block of a page.
type docBlock struct {
	Kind   blockKind
	Line   int    // of its first line in the page, from 1
	Code   string // with its last newline
	Output *string
}

const notRunWords = "Not run by the tests"

var fence = regexp.MustCompile("^(`{3,})(.*)$")

// parsePage returns the blocks of a page that are commands.
func parsePage(page string) ([]docBlock, error) {
	var blocks []docBlock
	lines := strings.Split(page, "\n")
	above := "" // the last line of text that is not empty
	last := -1  // index of the block that an output block would belong to
	for i := 0; i < len(lines); i++ {
		m := fence.FindStringSubmatch(lines[i])
		if m == nil {
			if strings.TrimSpace(lines[i]) != "" {
				above = lines[i]
			}
			continue
		}
		first := i + 1
		i++
		for i < len(lines) && lines[i] != m[1] {
			i++
		}
		if i == len(lines) {
			return nil, fmt.Errorf("line %d: the block has no end", first)
		}
		code := strings.Join(lines[first:i], "\n") + "\n"
		switch strings.TrimSpace(m[2]) {
		case "sh":
			blocks = append(blocks, docBlock{Kind: shellBlock, Line: first + 1, Code: code})
		case "python":
			blocks = append(blocks, docBlock{Kind: pythonBlock, Line: first + 1, Code: code})
		case "sh not-run":
			if !strings.Contains(above, notRunWords) {
				return nil, fmt.Errorf("line %d: the block is not run: the line above it must say %q and why", first,
					notRunWords)
			}
			blocks = append(blocks, docBlock{Kind: notRunBlock, Line: first + 1, Code: code})
			last = -1
			continue
		case "output":
			if last < 0 || blocks[last].Output != nil {
				return nil, fmt.Errorf("line %d: an output block without a block before it", first)
			}
			blocks[last].Output = &code
			continue
		default:
			continue
		}
		last = len(blocks) - 1
	}
	return blocks, nil
}

// progressLine is what a command prints of a step that takes longer than it does for the page's reader.
var progressLine = regexp.MustCompile(`^[a-z]+ing( .*)? (\.\.\.|[0-9.]+m?s( .*)?|[0-9,]+ objects?)$`)

// matchOutput compares output with a page's, and reports the first difference.
func matchOutput(want, got string) error {
	wants, gots := cleaned(want), cleaned(got)
	if matchLines(wants, gots) || matchLines(wants, slices.DeleteFunc(slices.Clone(gots), progressLine.MatchString)) {
		return nil
	}
	for i, w := range wants {
		if i >= len(gots) || w == "…" {
			break
		}
		if !matchLine(w, gots[i]) {
			return fmt.Errorf("line %d is not what the page shows\n want: %s\n  got: %s\nthe whole output:\n%s", i+1, w,
				gots[i], got)
		}
	}
	return fmt.Errorf("the output is not what the page shows\nwant:\n%s\ngot:\n%s", want, got)
}

func cleaned(s string) []string {
	lines := strings.Split(strings.Trim(s, "\n"), "\n")
	for i, l := range lines {
		lines[i] = strings.TrimRight(l, " \t\r")
	}
	return lines
}

func matchLines(want, got []string) bool {
	if len(want) == 0 {
		return len(got) == 0
	}
	if want[0] == "…" {
		for skip := 0; skip <= len(got); skip++ {
			if matchLines(want[1:], got[skip:]) {
				return true
			}
		}
		return false
	}
	return len(got) > 0 && matchLine(want[0], got[0]) && matchLines(want[1:], got[1:])
}

func matchLine(want, got string) bool {
	parts := strings.Split(want, "…")
	if len(parts) == 1 {
		return want == got
	}
	for i := range parts {
		parts[i] = regexp.QuoteMeta(parts[i])
	}
	return regexp.MustCompile("^" + strings.Join(parts, ".*") + "$").MatchString(got)
}
