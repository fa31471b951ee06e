package gpuingest

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/internal/levenshtein"
)

// SpecError is an error in a transform SPEC, with its place.
type SpecError struct {
	Spec string
	Pos  int // byte offset of the word in Spec
	Len  int // its length, at least 1
	Msg  string
	Hint string // the remedy, if one is known
}

func (e *SpecError) Error() string {
	s := fmt.Sprintf("transform, column %d: %s", e.Pos+1, e.Msg)
	if e.Hint != "" {
		s += ": " + e.Hint
	}
	return s
}

// maxSpec bounds a SPEC, since it comes from the network.
const maxSpec = 4096

// maxDepth bounds nesting.
const maxDepth = 4

// value is a Python literal: int, float, str, bool, None, a tuple or list of values, or a call.
type value struct {
	kind byte // 'i', 'f', 's', 'b', 'n', 't', 'c'; 'o': text as it is
	num  float64
	str  string
	list []value
	call call
	pos  int
	len  int
}

func (v value) String() string {
	switch v.kind {
	case 'i':
		return strconv.FormatInt(int64(v.num), 10)
	case 'f':
		return pyFloat(v.num)
	case 's':
		return quote(v.str)
	case 'b':
		if v.num != 0 {
			return "True"
		}
		return "False"
	case 'n':
		return "None"
	case 'c':
		return v.call.name + "(...)"
	case 'o':
		return v.str
	}
	parts := make([]string, len(v.list))
	for i, x := range v.list {
		parts[i] = x.String()
	}
	if len(parts) == 1 {
		return "(" + parts[0] + ",)"
	}
	return "(" + strings.Join(parts, ", ") + ")"
}

// quote writes a string of a SPEC; no string holds both quotes.
func quote(s string) string {
	if strings.Contains(s, "'") {
		return `"` + s + `"`
	}
	return "'" + s + "'"
}

func number[T int | uint8](n T) value { return value{kind: 'i', num: float64(n)} }

func float(f float64) value { return value{kind: 'f', num: f} }

func tuple[T any](of func(T) value, list ...T) value {
	v := value{kind: 't'}
	for _, x := range list {
		v.list = append(v.list, of(x))
	}
	return v
}

func (v value) number() bool { return v.kind == 'i' || v.kind == 'f' }

// pair returns a tuple of two numbers.
func (v value) pair() (p [2]float64, ok bool) {
	if v.kind != 't' || len(v.list) != 2 || !v.list[0].number() || !v.list[1].number() {
		return p, false
	}
	return [2]float64{v.list[0].num, v.list[1].num}, true
}

// spread returns n values from one number, or from a tuple of one of these lengths, over and over; nil if it is
// neither.
func (v value) spread(n int, lengths ...int) (out []value) {
	list := v.list
	if v.number() {
		list = []value{v}
	}
	for i := 0; i < n && slices.Contains(lengths, len(list)); i++ {
		out = append(out, list[i%len(list)])
	}
	return out
}

// pyFloat writes a float so that it reads back as the same float and not as an int.
func pyFloat(f float64) string {
	s := strconv.FormatFloat(f, 'g', -1, 64)
	if !strings.ContainsAny(s, ".e") {
		s += ".0"
	}
	return s
}

// arg is a positional argument (name empty) or a keyword.
type arg struct {
	name string
	pos  int
	val  value
}

// call is one word of the SPEC, with its arguments if it has parentheses.
type call struct {
	name   string
	pos    int
	parens bool
	args   []arg
	views  []viewGroup // of the word views
}

// parser parses `call ('|' call)*`, and in views such chains in brackets.
type parser struct {
	s  string
	i  int
	v2 bool // the SPEC has this word
}

func (p *parser) fail(pos, n int, hint, format string, a ...any) *SpecError {
	return &SpecError{Spec: p.s, Pos: min(pos, len(p.s)), Len: max(n, 1), Msg: fmt.Sprintf(format, a...), Hint: hint}
}

func (p *parser) space() {
	for p.i < len(p.s) && strings.IndexByte(" \t\r\n", p.s[p.i]) >= 0 {
		p.i++
	}
}

// peek returns the next byte after white space, 0 at the end.
func (p *parser) peek() byte {
	p.space()
	if p.i == len(p.s) {
		return 0
	}
	return p.s[p.i]
}

func (p *parser) accept(c byte) bool {
	if p.peek() == c && p.i < len(p.s) {
		p.i++
		return true
	}
	return false
}

func wordByte(c byte) bool {
	return c == '_' || c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z'
}

func (p *parser) word() (string, int) {
	p.space()
	from := p.i
	for p.i < len(p.s) && (wordByte(p.s[p.i]) || p.s[p.i] == '.' && p.i > from) {
		p.i++
	}
	return p.s[from:p.i], from
}

// what describes the next token for an error message.
func (p *parser) what() string {
	if p.peek() == 0 && p.i == len(p.s) {
		return "the end"
	}
	return strconv.QuoteRune([]rune(p.s[p.i:])[0])
}

func parseSpec(s string) ([]call, error) {
	p := &parser{s: s}
	if len(s) > maxSpec {
		return nil, p.fail(maxSpec, 1, "", "%d bytes long, the limit is %d", len(s), maxSpec)
	}
	return p.calls(0)
}

// calls parses up to a closing bracket, or, with 0, to the end.
func (p *parser) calls(end byte) (calls []call, err error) {
	for {
		name, pos := p.word()
		if name == "" {
			return nil, p.fail(p.i, 1, "", "expected an operation, found %s", p.what())
		}
		c := call{name: name, pos: pos}
		if p.accept('(') {
			c.parens = true
			switch {
			case name != viewsWord:
				c.args, err = p.args(0)
			case end == 0:
				c.views, err = p.views()
			default:
				err = p.fail(pos, len(name), "list all views in one", "views inside of a view")
			}
			if err != nil {
				return nil, err
			}
		}
		calls = append(calls, c)
		switch {
		case p.accept('|'):
		case end != 0 && p.accept(end), end == 0 && p.peek() == 0 && p.i == len(p.s):
			return calls, nil
		default:
			return nil, p.fail(p.i, 1, "operations are separated by |", "unexpected %s after %s", p.what(), name)
		}
	}
}

// args parses arguments up to the closing parenthesis. depth bounds their nesting.
func (p *parser) args(depth int) ([]arg, error) {
	var args []arg
	for {
		if p.accept(')') {
			return args, nil
		}
		a, err := p.arg(depth)
		if err != nil {
			return nil, err
		}
		if a.name == "" && len(args) > 0 && args[len(args)-1].name != "" {
			return nil, p.fail(a.pos, a.val.len, "", "positional argument after a keyword")
		}
		args = append(args, a)
		if !p.accept(',') && p.peek() != ')' {
			return nil, p.fail(p.i, 1, "", "expected , or ) after an argument, found %s", p.what())
		}
	}
}

func (p *parser) arg(depth int) (arg, error) {
	p.space()
	from := p.i
	if c := p.peek(); c != 0 && wordByte(c) && (c < '0' || c > '9') {
		name, pos := p.word()
		if p.accept('=') {
			v, err := p.value(depth)
			return arg{name: name, pos: pos, val: v}, err
		}
		p.i = from
	}
	v, err := p.value(depth)
	return arg{pos: from, val: v}, err
}

func (p *parser) value(depth int) (value, error) {
	c := p.peek()
	from := p.i
	switch {
	case (c == '(' || c == '[') && depth < maxDepth:
		p.i++
		end := byte(')')
		if c == '[' {
			end = ']'
		}
		v := value{kind: 't', pos: from}
		comma := false
		for !p.accept(end) {
			x, err := p.value(depth + 1)
			if err != nil {
				return v, err
			}
			v.list = append(v.list, x)
			if p.accept(',') {
				comma = true
			} else if p.peek() != end {
				return v, p.fail(p.i, 1, "", "expected , or %c, found %s", end, p.what())
			}
		}
		v.len = p.i - from
		if c == '(' && len(v.list) == 1 && !comma { // (3) is 3 in Python
			x := v.list[0]
			x.pos, x.len = from, v.len
			return x, nil
		}
		return v, nil
	case c == '\'' || c == '"':
		n := strings.IndexByte(p.s[from+1:], c)
		if n < 0 {
			return value{}, p.fail(from, len(p.s)-from, "", "unterminated string")
		}
		p.i = from + n + 2
		return value{kind: 's', str: p.s[from+1 : from+1+n], pos: from, len: n + 2}, nil
	case c == '-' || c == '+' || c == '.' || c >= '0' && c <= '9':
		return p.numeral()
	case c != 0 && wordByte(c):
		w, pos := p.word()
		v := value{pos: pos, len: len(w)}
		switch w {
		case "True":
			v.kind, v.num = 'b', 1
		case "False":
			v.kind = 'b'
		case "None":
			v.kind = 'n'
		default: // an enum such as InterpolationMode.BILINEAR, or a call
			v.kind, v.str = 's', w
			if depth < maxDepth && p.accept('(') {
				args, err := p.args(depth + 1)
				if err != nil {
					return v, err
				}
				v.kind, v.call, v.len = 'c', call{name: w, pos: pos, parens: true, args: args}, p.i-pos
			}
		}
		return v, nil
	}
	return value{}, p.fail(from, 1, "", "expected a number, a tuple, a string, True, False or None, found %s", p.what())
}

func (p *parser) numeral() (value, error) {
	from := p.i
	if c := p.s[p.i]; c == '-' || c == '+' {
		p.i++
	}
	float := false
	for p.i < len(p.s) {
		c := p.s[p.i]
		exp := (c == '-' || c == '+') && (p.s[p.i-1] == 'e' || p.s[p.i-1] == 'E')
		if !wordByte(c) && c != '.' && !exp {
			break
		}
		float = float || c == '.' || c == 'e' || c == 'E'
		p.i++
	}
	text := p.s[from:p.i]
	v := value{kind: 'i', pos: from, len: len(text)}
	// Go reads hexadecimal floats, Inf, NaN: not Python's decimal literals
	if strings.ContainsAny(text, "xXpPnN_bBoO") {
		return v, p.fail(from, len(text), "", "%q is not a decimal number", text)
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || !float && (f > 1<<53 || f < -1<<53) {
		return v, p.fail(from, len(text), "", "%q is not a number in range", text)
	}
	v.num = f + 0 // -0 becomes 0: one canonical form
	if float {
		v.kind = 'f'
	}
	return v, nil
}

// nearest suggests the name that was probably meant.
func nearest(word string, names []string) string {
	slices.Sort(names)
	best, at := "", max(2, len(word)/3)+1
	for _, n := range names {
		if d := levenshtein.Distance(strings.ToLower(word), strings.ToLower(n)); d < at {
			best, at = n, d
		}
	}
	if best == "" {
		return "known: " + strings.Join(names, ", ")
	}
	return "did you mean " + best + "?"
}
