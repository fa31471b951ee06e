package objstore

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"
)

// Action is what a fault does to a request.
type Action uint8

// The actions of faults.
const (
	ActionSlow     Action = iota // waits, then goes on: a slow first byte
	ActionStall                  // waits, then fails as temporary; without a duration until the context ends
	Action503                    // fails as temporary: throttled
	ActionReset                  // fails as temporary: connection reset
	ActionTruncate               // reads the first half of the range, then fails as temporary
	ActionFlip                   // reads, flips one bit, and reports success: only a checksum can tell
	ActionChanged                // fails as changed
	ActionNotFound               // fails as not found
	ActionDenied                 // fails as denied
	ActionLost                   // does all of the request, then fails as temporary: the answer was lost
	numActions
)

var actionNames = [numActions]string{"slow", "stall", "503", "reset", "truncate", "flip", "changed", "notfound", "denied", "lost"}

// String returns the action's word in a script.
func (a Action) String() string {
	if a < numActions {
		return actionNames[a]
	}
	return fmt.Sprintf("action %d", uint8(a))
}

// FaultRule says which requests fail, and how. In a script it is one line:
//
//	OP GLOB WHEN ACTION [DURATION]
//
//	read  *.jpg   1        503        the first read of each .jpg is throttled
//	read  a/b     2-3      reset      the second and third read of this key
//	read  *       total:7  flip       the seventh read of all
//	stat  *       all      slow 30ms
//	list  "x y/"  1-       denied     quotes where a key has spaces
//	put   *       2        lost       the second step of each upload succeeds and is reported as failed
//
// OP is read, stat, list, put (PutNew, Upload, Part and Complete), delete (Delete, AbortUploads and
// Abort) or * (all). GLOB matches the whole key, or a listing's prefix: "*" is any
// run of characters, "/" too, and "?" one. WHEN is N, N-M, N- or "all"; requests are counted for
// each rule and key, so that the outcome does not depend on the order in which parallel requests
// arrive; with "total:" they are counted for the rule. Every rule that matches counts the request; the
// first whose WHEN holds acts.
type FaultRule struct {
	Op       string // "read", "stat", "list", "put", "delete" or "*"
	Glob     string
	Total    bool  // count over all keys
	From, To int64 // the requests that fail, from 1; To is 0 for no end
	Action   Action
	Duration time.Duration // of ActionSlow and ActionStall
}

// String returns the rule as a line of a script.
func (r FaultRule) String() string {
	var b strings.Builder
	b.WriteString(r.Op + " ")
	if plainWord(r.Glob) {
		b.WriteString(r.Glob)
	} else {
		b.WriteString(strconv.Quote(r.Glob))
	}
	b.WriteByte(' ')
	if r.Total {
		b.WriteString("total:")
	}
	switch {
	case r.From == 1 && r.To == 0:
		b.WriteString("all")
	case r.To == 0:
		fmt.Fprintf(&b, "%d-", r.From)
	case r.From == r.To:
		fmt.Fprintf(&b, "%d", r.From)
	default:
		fmt.Fprintf(&b, "%d-%d", r.From, r.To)
	}
	b.WriteString(" " + r.Action.String())
	if r.Duration > 0 {
		b.WriteString(" " + r.Duration.String())
	}
	return b.String()
}

// plainWord says whether s can stand in a script without quotes.
func plainWord(s string) bool {
	return s != "" && utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool {
		return unicode.IsSpace(r) || !unicode.IsPrint(r) || r == '"' || r == '#'
	})
}

// ParseFaults parses a script: one rule a line, blank lines and comments from "#" left out. Its
// errors name the line.
func ParseFaults(script string) ([]FaultRule, error) {
	var rules []FaultRule
	n := 0
	for line := range strings.Lines(script) {
		n++
		words, err := splitWords(strings.TrimRight(line, "\n"))
		if err == nil && len(words) == 0 {
			continue
		}
		var r FaultRule
		if err == nil {
			r, err = parseFault(words)
		}
		if err != nil {
			return nil, fmt.Errorf("fault script, line %d: %w", n, err)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

func parseFault(words []string) (r FaultRule, err error) {
	if len(words) < 4 || len(words) > 5 {
		return r, fmt.Errorf("want OP GLOB WHEN ACTION [DURATION], have %d words", len(words))
	}
	r.Op, r.Glob = words[0], words[1]
	switch r.Op {
	case "read", "stat", "list", "put", "delete", "*":
	default:
		return r, fmt.Errorf("operation %q is not read, stat, list, put, delete or *", r.Op)
	}
	if r.From, r.To, r.Total, err = parseWhen(words[2]); err != nil {
		return r, err
	}
	action := slices.Index(actionNames[:], words[3])
	r.Action = Action(max(0, action))
	switch {
	case action < 0:
		return r, fmt.Errorf("action %q is none of %s", words[3], strings.Join(actionNames[:], ", "))
	case len(words) == 5 && r.Action != ActionSlow && r.Action != ActionStall:
		return r, fmt.Errorf("action %s takes no duration", r.Action)
	case len(words) == 5:
		if r.Duration, err = time.ParseDuration(words[4]); err != nil || r.Duration <= 0 {
			return r, fmt.Errorf("duration %q is not a positive duration such as 30ms", words[4])
		}
	case r.Action == ActionSlow:
		return r, errors.New("action slow needs a duration such as 30ms")
	}
	if (r.Action == ActionTruncate || r.Action == ActionFlip) && r.Op != "read" {
		return r, fmt.Errorf("action %s works on operation read only", r.Action)
	}
	if r.Action == ActionLost && r.Op == "list" {
		return r, errors.New("action lost does not work on listings")
	}
	return r, nil
}

func parseWhen(s string) (from, to int64, total bool, err error) {
	spec, total := strings.CutPrefix(s, "total:")
	if spec == "all" {
		return 1, 0, total, nil
	}
	first, last, isRange := strings.Cut(spec, "-")
	if from, err = strconv.ParseInt(first, 10, 64); err == nil {
		switch {
		case !isRange:
			to = from
		case last != "":
			if to, err = strconv.ParseInt(last, 10, 64); err == nil && to < from {
				err = strconv.ErrRange
			}
		}
	}
	if err != nil || from < 1 {
		return 0, 0, false, fmt.Errorf("%q is not N, N-M, N- or all, counted from 1", s)
	}
	return from, to, total, nil
}

// splitWords splits at spaces; a word may be a quoted Go string; "#" begins a comment.
func splitWords(line string) ([]string, error) {
	var words []string
	for {
		line = strings.TrimLeftFunc(line, unicode.IsSpace)
		if line == "" || line[0] == '#' {
			return words, nil
		}
		if line[0] == '"' {
			quoted, err := strconv.QuotedPrefix(line)
			if err != nil {
				return nil, errors.New("unfinished or wrong quoted word")
			}
			word, err := strconv.Unquote(quoted)
			if err != nil {
				return nil, err
			}
			words, line = append(words, word), line[len(quoted):]
			continue
		}
		end := strings.IndexFunc(line, func(r rune) bool { return unicode.IsSpace(r) || r == '"' || r == '#' })
		if end < 0 {
			end = len(line)
		}
		words, line = append(words, line[:end]), line[end:]
	}
}

// matchGlob matches the whole of s; "*" is any run of bytes, "?" one byte. It is linear in s for
// each "*", without recursion.
func matchGlob(glob, s string) bool {
	star, mark := -1, 0 // where the last "*" stands, and where in s it ends for now
	i, j := 0, 0
	for j < len(s) {
		switch {
		case i < len(glob) && glob[i] == '*':
			star, mark = i, j
			i++
		case i < len(glob) && (glob[i] == '?' || glob[i] == s[j]):
			i++
			j++
		case star >= 0:
			mark++
			i, j = star+1, mark
		default:
			return false
		}
	}
	for i < len(glob) && glob[i] == '*' {
		i++
	}
	return i == len(glob)
}

// Faulty makes requests fail by script. It is for tests, benchmarks and rehearsals.
type Faulty struct {
	r     Reader
	rules []FaultRule

	mu     sync.Mutex
	counts []map[string]int64 // by rule: key (or "" for total) to requests seen
	hits   []int64            // by rule
}

// Fault decorates r with the rules.
func Fault(r Reader, rules []FaultRule) *Faulty {
	f := &Faulty{r: r, rules: rules, counts: make([]map[string]int64, len(rules)), hits: make([]int64, len(rules))}
	for i := range f.counts {
		f.counts[i] = make(map[string]int64)
	}
	return f
}

var (
	_ Reader      = (*Faulty)(nil)
	_ Prefixer    = (*Faulty)(nil)
	_ ListerAfter = (*Faulty)(nil)
	_ SpanReader  = (*Faulty)(nil)
	_ Uploader    = (*Faulty)(nil)
)

// Hits returns how often each rule has acted.
func (f *Faulty) Hits() []int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]int64(nil), f.hits...)
}

// rule returns the rule that acts on this request, nil for none.
func (f *Faulty) rule(op, key string) *FaultRule {
	f.mu.Lock()
	defer f.mu.Unlock()
	acts := -1
	for i := range f.rules {
		r := &f.rules[i]
		if (r.Op != "*" && r.Op != op) || !matchGlob(r.Glob, key) {
			continue
		}
		counter := key
		if r.Total {
			counter = ""
		}
		f.counts[i][counter]++
		if n := f.counts[i][counter]; acts < 0 && n >= r.From && (r.To == 0 || n <= r.To) {
			acts = i
		}
	}
	if acts < 0 {
		return nil
	}
	f.hits[acts]++
	return &f.rules[acts]
}

func scripted(op, key string, k Kind, text string) error {
	return &Error{Op: op, Key: key, Kind: k, Err: errors.New(text + " (scripted fault)")}
}

// before acts on a request that has not begun. It returns an action left to do after a read.
func (f *Faulty) before(ctx context.Context, op, key string) (after Action, err error) {
	r := f.rule(op, key)
	if r == nil {
		return 0, nil
	}
	fail := func(k Kind, text string) error { return scripted(op, key, k, text) }
	switch r.Action {
	case ActionSlow:
		return 0, sleep(ctx, r.Duration)
	case ActionStall:
		if r.Duration == 0 {
			<-ctx.Done()
			return 0, ctx.Err()
		}
		if err := sleep(ctx, r.Duration); err != nil {
			return 0, err
		}
		return 0, fail(KindTransient, "stalled")
	case Action503:
		return 0, &Error{Op: op, Key: key, Kind: KindTransient, SlowDown: true, Err: errors.New("503 Slow Down (scripted fault)")}
	case ActionReset:
		return 0, fail(KindTransient, "connection reset by peer")
	case ActionChanged:
		return 0, fail(KindChanged, "412 Precondition Failed")
	case ActionNotFound:
		return 0, fail(KindNotFound, "404 Not Found")
	case ActionDenied:
		return 0, fail(KindDenied, "403 Forbidden")
	}
	return r.Action, nil
}

// do runs f, a whole request, under the script.
func (f *Faulty) do(ctx context.Context, op, key string, request func() error) error {
	after, err := f.before(ctx, op, key)
	if err != nil {
		return err
	}
	if err = request(); err == nil && after == ActionLost {
		return scripted(op, key, KindTransient, "the answer was lost")
	}
	return err
}

// Stat implements [Reader].
func (f *Faulty) Stat(ctx context.Context, key string) (o Object, err error) {
	err = f.do(ctx, "stat", key, func() (err error) { o, err = f.r.Stat(ctx, key); return err })
	return o, err
}

// ReadAt implements [Reader].
func (f *Faulty) ReadAt(ctx context.Context, o Object, p []byte, off int64) error {
	after, err := f.before(ctx, "read", o.Key)
	if err != nil {
		return err
	}
	if after == ActionTruncate {
		if err := f.r.ReadAt(ctx, o, p[:len(p)/2], off); err != nil {
			return err
		}
		return cutShort(o, int64(len(p)))
	}
	if err := f.r.ReadAt(ctx, o, p, off); err != nil {
		return err
	}
	return afterRead(after, o, p)
}

func cutShort(o Object, n int64) error {
	return scripted("read", o.Key, KindTransient, fmt.Sprintf("body ended after %d of %d bytes", n/2, n))
}

// afterRead does what is left of a fault when a read has succeeded.
func afterRead(after Action, o Object, p []byte) error {
	switch {
	case after == ActionLost:
		return scripted("read", o.Key, KindTransient, "the answer was lost")
	case after == ActionFlip && len(p) > 0:
		p[len(p)/2] ^= 0x10
	}
	return nil
}

// ReadSpans implements [SpanReader]. A flip strikes in the middle span, a truncation reads the first
// half of them.
func (f *Faulty) ReadSpans(ctx context.Context, o Object, spans []Span) error {
	after, err := f.before(ctx, "read", o.Key)
	if err != nil {
		return err
	}
	if after == ActionTruncate && len(spans) > 0 {
		if err := ReadSpans(ctx, f.r, o, spans[:len(spans)/2]); err != nil {
			return err
		}
		return cutShort(o, spansLength(spans))
	}
	if err := ReadSpans(ctx, f.r, o, spans); err != nil || len(spans) == 0 {
		return err
	}
	return afterRead(after, o, spans[len(spans)/2].P)
}

// PutNew implements [Uploader].
func (f *Faulty) PutNew(ctx context.Context, key string, data []byte) (o Object, err error) {
	w, err := uploaderOf(f.r, "put", key)
	if err != nil {
		return Object{}, err
	}
	err = f.do(ctx, "put", key, func() (err error) { o, err = w.PutNew(ctx, key, data); return err })
	return o, err
}

// Upload implements [Uploader].
func (f *Faulty) Upload(ctx context.Context, key string, size, partSize int64) (Upload, error) {
	w, err := uploaderOf(f.r, "put", key)
	if err != nil {
		return nil, err
	}
	u := &faultyUpload{f: f, key: key}
	err = f.do(ctx, "put", key, func() (err error) { u.u, err = w.Upload(ctx, key, size, partSize); return err })
	if err != nil {
		return nil, err
	}
	return u, nil
}

// AbortUploads implements [Uploader].
func (f *Faulty) AbortUploads(ctx context.Context, prefix string) (n int, err error) {
	w, err := uploaderOf(f.r, "delete", prefix)
	if err != nil {
		return 0, err
	}
	err = f.do(ctx, "delete", prefix, func() (err error) { n, err = w.AbortUploads(ctx, prefix); return err })
	return n, err
}

// Delete implements [Uploader].
func (f *Faulty) Delete(ctx context.Context, key string) error {
	w, err := uploaderOf(f.r, "delete", key)
	if err != nil {
		return err
	}
	return f.do(ctx, "delete", key, func() error { return w.Delete(ctx, key) })
}

type faultyUpload struct {
	f   *Faulty
	u   Upload
	key string
}

func (u *faultyUpload) Part(ctx context.Context, n int, p []byte) error {
	return u.f.do(ctx, "put", u.key, func() error { return u.u.Part(ctx, n, p) })
}

func (u *faultyUpload) Complete(ctx context.Context) (o Object, err error) {
	err = u.f.do(ctx, "put", u.key, func() (err error) { o, err = u.u.Complete(ctx); return err })
	return o, err
}

func (u *faultyUpload) Abort(ctx context.Context) error {
	return u.f.do(ctx, "delete", u.key, func() error { return u.u.Abort(ctx) })
}

// List implements [Reader].
func (f *Faulty) List(ctx context.Context, prefix string) iter.Seq2[Object, error] {
	return f.ListAfter(ctx, prefix, "")
}

// ListAfter implements [ListerAfter].
func (f *Faulty) ListAfter(ctx context.Context, prefix, after string) iter.Seq2[Object, error] {
	return f.list(ctx, prefix, listAfter(ctx, f.r, prefix, after))
}

// ListLevel implements [Prefixer].
func (f *Faulty) ListLevel(ctx context.Context, prefix string) iter.Seq2[Object, error] {
	return f.list(ctx, prefix, listLevel(ctx, f.r, prefix))
}

func (f *Faulty) list(ctx context.Context, prefix string, seq iter.Seq2[Object, error]) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		if _, err := f.before(ctx, "list", prefix); err != nil {
			yield(Object{}, err)
			return
		}
		for o, err := range seq {
			if !yield(o, err) {
				return
			}
		}
	}
}
