package findings

import (
	"strings"

	"github.com/shoalfs/shoal/prefetch/engine"
)

// Advice is a warning or error of the log, with its remedy separated.
type Advice struct {
	engine.ErrorEvent        // its Text is without the remedy
	Remedy            string `json:"remedy,omitempty"`
}

// Explain returns the events, newest first. An event's remedy is its attribute of that name, or the text in parentheses
// at its end, as in all errors of Shoal.
func Explain(events []engine.ErrorEvent) []Advice {
	list := make([]Advice, 0, len(events))
	for i := len(events) - 1; i >= 0; i-- {
		a := Advice{ErrorEvent: events[i]}
		a.Text, a.Remedy = split(a.Text)
		list = append(list, a)
	}
	return list
}

func split(text string) (what, remedy string) {
	const attr = "; remedy: "
	if at := strings.Index(text, attr); at >= 0 {
		remedy = text[at+len(attr):]
		return text[:at], remedy
	}
	if !strings.HasSuffix(text, ")") {
		return text, ""
	}
	depth := 0
	for i := len(text) - 1; i >= 0; i-- {
		switch text[i] {
		case ')':
			depth++
		case '(':
			if depth--; depth == 0 {
				if inner := text[i+1 : len(text)-1]; i > 0 && text[i-1] == ' ' && strings.Contains(inner, " ") {
					return text[:i-1], inner
				}
				return text, ""
			}
		}
	}
	return text, ""
}
