// Package logs writes a daemon's log: one line for each event, as text or JSON, without floods of equal events.
//
// A [Limiter] stands between a process's loggers and their output. Of events of one kind (level, message, and subject:
// source, session, folder, ...) it passes burst events in a window. Of the events beyond that it writes the last one
// when the window ends, with the number of all that it held back, `repeated`. So a line may be late, but none is lost
// unless the process is killed. Debug output is not limited.
package logs

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// Help explains a flag that Parse understands.
const Help = "debug, info, warn or error; with \",json\", such as info,json: one JSON object a line"

// Parse parses the level of a log, and whether each line is to be a JSON object instead of slog's text.
func Parse(text string) (level slog.Level, asJSON bool, err error) {
	name, asJSON := strings.CutSuffix(text, ",json")
	if level.UnmarshalText([]byte(name)) != nil {
		return 0, false, fmt.Errorf(
			"%q is not a log level: give debug, info, warn or error, or one of them with \",json\"", text)
	}
	return level, asJSON, nil
}

const (
	burst  = 5                // as many events of one kind as a person reads at a glance
	window = 10 * time.Second // how late a summary may be
	// mostKinds bounds the memory. Kinds beyond it are not limited: there are few sources of events, so that many
	// kinds in one window do not normally occur.
	mostKinds = 4096
)

// identity holds the attributes that distinguish sources of events. Others, such as a path or a cause, differ between
// the events of one flood.
var identity = map[string]bool{
	"source": true, "session": true, "rank": true, "dir": true, "mountpoint": true, "plan": true, "listen": true,
	"address": true, "destination": true, "file": true, "method": true, "kind": true, "errno": true,
}

// Limiter holds back repetitions, for all loggers of a process. Flush it at the end.
type Limiter struct {
	mu    sync.Mutex
	kinds map[string]*kind
}

// kind is the state of one kind of events, in the window that began with its first event.
type kind struct {
	written int
	held    int
	next    slog.Handler // handler of the last event held back
	last    slog.Record
	end     *time.Timer
}

// NewLimiter returns an empty limiter.
func NewLimiter() *Limiter { return &Limiter{kinds: map[string]*kind{}} }

// New returns a logger that writes events of at least level to w.
func (l *Limiter) New(w io.Writer, asJSON bool, level slog.Leveler) *slog.Logger {
	var h slog.Handler = slog.NewTextHandler(w, &slog.HandlerOptions{Level: level, ReplaceAttr: present})
	if asJSON {
		h = slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level, ReplaceAttr: plain})
	}
	return slog.New(&handler{l: l, next: h})
}

// present drops empty attributes, such as the cause of a normal end.
func present(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindAny && a.Value.Any() == nil {
		return slog.Attr{}
	}
	return a
}

// plain formats durations as in text, 47ms, and not as a bare number of nanoseconds.
func plain(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(a.Value.Duration().String())
	}
	return present(nil, a)
}

// Flush writes the events held back.
func (l *Limiter) Flush() {
	l.mu.Lock()
	all := l.kinds
	l.kinds = map[string]*kind{}
	l.mu.Unlock()
	for _, k := range all {
		k.end.Stop()
		k.summarise()
	}
}

// pass counts an event, and reports whether it is to be written now.
func (l *Limiter) pass(key string, next slog.Handler, r slog.Record) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.kinds[key]
	if k == nil {
		if len(l.kinds) == mostKinds {
			return true
		}
		k = l.begin(key, 0)
	}
	if k.written < burst {
		k.written++
		return true
	}
	k.held++
	k.next, k.last = next, r.Clone()
	return false
}

// begin begins a window of a kind of which so many events were written.
func (l *Limiter) begin(key string, written int) *kind {
	k := &kind{written: written}
	k.end = time.AfterFunc(window, func() { l.over(key, k) })
	l.kinds[key] = k
	return k
}

// over ends a window. A continuing flood gets one line for each window.
func (l *Limiter) over(key string, k *kind) {
	l.mu.Lock()
	if l.kinds[key] != k { // flushed
		l.mu.Unlock()
		return
	}
	delete(l.kinds, key)
	if k.held > 0 {
		l.begin(key, burst)
	}
	l.mu.Unlock()
	k.summarise()
}

// summarise writes the last event held back. Nothing changes k any more.
func (k *kind) summarise() {
	if k.held == 0 {
		return
	}
	k.last.AddAttrs(slog.Int("repeated", k.held))
	_ = k.next.Handle(context.Background(), k.last) // like slog.Logger: the error has nowhere to go
}

type handler struct {
	l    *Limiter
	next slog.Handler
	with string // the part of the key from the logger's own attributes
}

func (h *handler) Enabled(ctx context.Context, level slog.Level) bool {
	return h.next.Enabled(ctx, level)
}

func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo && !h.l.pass(h.key(r), h.next, r) {
		return nil
	}
	return h.next.Handle(ctx, r)
}

func (h *handler) key(r slog.Record) string {
	var b strings.Builder
	b.WriteString(r.Level.String() + "\x00" + r.Message + h.with)
	r.Attrs(func(a slog.Attr) bool {
		addKey(&b, a)
		return true
	})
	return b.String()
}

func addKey(b *strings.Builder, a slog.Attr) {
	if identity[a.Key] {
		b.WriteString("\x00" + a.Key + "\x00" + a.Value.String())
	}
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	var b strings.Builder
	b.WriteString(h.with)
	for _, a := range attrs {
		addKey(&b, a)
	}
	return &handler{h.l, h.next.WithAttrs(attrs), b.String()}
}

func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{h.l, h.next.WithGroup(name), h.with}
}
