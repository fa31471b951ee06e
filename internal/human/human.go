// Package human formats figures and texts for people.
package human

import (
	"fmt"
	"regexp"
	"strings"

	humanize "github.com/dustin/go-humanize"
	"github.com/dustin/go-humanize/english"
)

// Bytes formats a size: 1.5 MiB.
func Bytes(n int64) string { return humanize.IBytes(uint64(max(n, 0))) }

// Number formats a whole number: 1,024.
func Number[N int | int64](n N) string { return humanize.Comma(int64(n)) }

// Count formats a number of things: 1,024 samples.
func Count[N int | int64](n N, thing string) string {
	return Number(n) + " " + english.PluralWord(int(n), thing, "")
}

// Rate formats a number, with one decimal if it is small.
func Rate(x float64) string {
	if x < 10 {
		return fmt.Sprintf("%.1f", x)
	}
	return humanize.Comma(int64(x + 0.5))
}

// Percent formats a share (0 to 1). Only exactly nothing and all are shown as 0% and 100%.
func Percent(x float64) string {
	if p := 100 * x; p > 0 && p < 1 || p > 99 && p < 100 {
		return fmt.Sprintf("%.1f%%", min(p, 99.9))
	}
	return fmt.Sprintf("%.0f%%", 100*x)
}

// Fold breaks a text between words into lines of at most width bytes; a longer word stays whole.
func Fold(text string, width int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		switch {
		case line == "":
			line = word
		case len(line)+1+len(word) > width:
			lines, line = append(lines, line), word
		default:
			line += " " + word
		}
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}

var shellChars = regexp.MustCompile(`[^\pL\pN_@%+=:,./\x00-]`)

// Shell escapes what a shell would change in words: a space in a folder's name, the braces of shards.
func Shell(words ...string) string {
	return strings.ReplaceAll(shellChars.ReplaceAllString(strings.Join(words, "\x00"), `\$0`), "\x00", " ")
}
