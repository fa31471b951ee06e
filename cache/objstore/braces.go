package objstore

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	// maxNames bounds the names of one pattern: 64 TiB in shards of 64 MiB.
	maxNames = 1 << 20
	// maxNameBytes bounds their memory: with maxNames, 128 bytes a name.
	maxNameBytes = 128 << 20
)

// looksLikeRange finds text that the user meant as a pattern.
var looksLikeRange = regexp.MustCompile(`\{-?\d+\.\.-?\d+(\.\.[^{}]*)?\}`)

// ExpandBraces returns the names that a pattern stands for, as in bash and WebDataset: "{000..127}" is a range, up or
// down, whose numbers are zero-padded to the longer end's length if one of the ends begins with a zero; "{a,b,}" is a
// list; of several groups the last varies fastest. A group without ".." or "," is plain text, even "{}". Unlike bash
// it refuses anything ambiguous: nested groups, unbalanced braces, ranges in lists, steps, letters and negative
// numbers; also more than 1,048,576 names, or 128 MiB of them.
func ExpandBraces(pattern string) ([]string, error) {
	groups, n, err := parseBraces(pattern)
	if err != nil {
		return nil, err
	}
	return expand(nil, groups, make([]string, 0, n)), nil
}

// expand appends to names what begins with b and goes on with one text of each group.
func expand(b []byte, groups [][]string, names []string) []string {
	if len(groups) == 0 {
		return append(names, string(b))
	}
	for _, text := range groups[0] {
		names = expand(append(b, text...), groups[1:], names)
	}
	return names
}

// braceParts matches plain text, what a brace begins up to the next one, and a closing brace.
var braceParts = regexp.MustCompile(`[^{}]+|\{[^{}]*[{}]?|\}`)

// parseBraces splits a pattern into groups, the texts of each, and returns how many names they make.
func parseBraces(pattern string) (groups [][]string, names int, err error) {
	names, longest := 1, 0
	for _, part := range braceParts.FindAllString(pattern, -1) {
		g := []string{part}
		switch {
		case part == "}":
			err = errors.New("a } without its {")
		case part[0] != '{':
		case strings.HasSuffix(part, "}"):
			g, err = parseGroup(part[1 : len(part)-1])
		case part == "{" || !strings.HasSuffix(part, "{"):
			err = errors.New("a { without its }")
		default:
			err = errors.New(
				"braces in braces are not supported; write the names out, or name several ranges side by side")
		}
		if err != nil {
			return nil, 0, err
		}
		// Each factor is at most maxNames, so that the product cannot overflow.
		if names *= len(g); names > maxNames {
			return nil, 0, fmt.Errorf("the pattern makes more than %d names", maxNames)
		}
		n := 0
		for _, text := range g {
			n = max(n, len(text))
		}
		if longest += n; names*longest > maxNameBytes {
			return nil, 0, fmt.Errorf("the pattern makes more than %d MiB of names", maxNameBytes>>20)
		}
		groups = append(groups, g)
	}
	return groups, names, nil
}

// parseGroup returns what the text between two braces stands for.
func parseGroup(text string) ([]string, error) {
	if strings.Contains(text, ",") {
		list := strings.Split(text, ",")
		for _, s := range list {
			if strings.Contains(s, "..") {
				return nil, fmt.Errorf("{%.60s}: a range in a list is not supported; give it braces of its own", text)
			}
		}
		return list, nil
	}
	from, to, isRange := strings.Cut(text, "..")
	if !isRange {
		return []string{"{" + text + "}"}, nil
	}
	first, err1 := parseEnd(from)
	last, err2 := parseEnd(to)
	if err1 != nil || err2 != nil {
		return nil, fmt.Errorf("{%.60s}: a range is {FIRST..LAST}, two numbers of up to 18 digits", text)
	}
	low, high := min(first, last), max(first, last)
	if high-low >= maxNames {
		return nil, fmt.Errorf("{%.60s} makes more than %d names", text, maxNames)
	}
	width := 0 // without padding
	if (len(from) > 1 && from[0] == '0') || (len(to) > 1 && to[0] == '0') {
		width = max(len(from), len(to))
	}
	var list []string
	for v := low; v <= high; v++ {
		list = append(list, fmt.Sprintf("%0*d", width, v))
	}
	if last < first {
		slices.Reverse(list)
	}
	return list, nil
}

func parseEnd(s string) (int64, error) {
	if s == "" || len(s) > 18 || strings.Trim(s, "0123456789") != "" {
		return 0, strconv.ErrSyntax
	}
	return strconv.ParseInt(s, 10, 64)
}
