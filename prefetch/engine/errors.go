package engine

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
)

// errorRing is a slog handler that passes everything on and keeps the last warnings and errors, each distinct text
// once with a count, for `.shoal/stats`. A warning with the attribute "over" is not kept, and ends
// those that begin with its value.
type errorRing struct {
	next slog.Handler
	of   *errorRing // of a derived logger: that which has its events; nil: it has them itself

	mu   sync.Mutex
	list []ErrorEvent
}

// ErrorEvent is a warning or error that the daemon logged.
type ErrorEvent struct {
	Time  time.Time `json:"time"` // of the latest
	Level string    `json:"level"`
	Text  string    `json:"text"`
	Count int       `json:"count"`
}

const keptErrors = 32

func (r *errorRing) Enabled(ctx context.Context, l slog.Level) bool { return r.next.Enabled(ctx, l) }

func (r *errorRing) Handle(ctx context.Context, rec slog.Record) error {
	switch {
	case rec.Level < slog.LevelWarn:
	case r.of != nil:
		r.of.add(rec.Time, rec.Level, rec.Message)
	default:
		var b strings.Builder
		b.WriteString(rec.Message)
		over := ""
		rec.Attrs(func(a slog.Attr) bool {
			if a.Key == "over" {
				over = a.Value.String()
			}
			b.WriteString("; " + a.Key + ": " + a.Value.String())
			return true
		})
		if over != "" {
			r.end(over)
		} else {
			r.add(rec.Time, rec.Level, b.String())
		}
	}
	return r.next.Handle(ctx, rec)
}

// end drops the events that begin with text.
func (r *errorRing) end(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = slices.DeleteFunc(r.list, func(e ErrorEvent) bool { return strings.HasPrefix(e.Text, text) })
}

func (r *errorRing) add(t time.Time, l slog.Level, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ev := ErrorEvent{t, l.String(), text, 1}
	if i := slices.IndexFunc(r.list, func(e ErrorEvent) bool { return e.Text == text }); i >= 0 {
		ev.Count += r.list[i].Count
		r.list = slices.Delete(r.list, i, i+1)
	} else if len(r.list) == keptErrors {
		r.list = r.list[1:]
	}
	r.list = append(r.list, ev)
}

// WithAttrs implements slog.Handler. Attributes of a derived logger are not part of the kept text.
func (r *errorRing) WithAttrs(a []slog.Attr) slog.Handler {
	return &errorRing{next: r.next.WithAttrs(a), of: cmp.Or(r.of, r)}
}

func (r *errorRing) WithGroup(name string) slog.Handler {
	return &errorRing{next: r.next.WithGroup(name), of: cmp.Or(r.of, r)}
}

func (r *errorRing) snapshot() []ErrorEvent {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]ErrorEvent{}, r.list...)
}
