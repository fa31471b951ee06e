package logs

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/slogtest"
	"testing/synctest"
	"time"
)

// lines is a writer that tells what was written in each call: an event is one call and one line.
type lines struct {
	mu  sync.Mutex
	all []string
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, string(p))
	return len(p), nil
}

func (l *lines) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.all
	l.all = nil
	return all
}

// The handler keeps the rules of slog's handlers.
func TestHandler(t *testing.T) {
	var buf bytes.Buffer
	slogtest.Run(t, func(t *testing.T) slog.Handler {
		buf.Reset()
		return NewLimiter().New(&buf, true, slog.LevelInfo).Handler()
	}, func(t *testing.T) map[string]any {
		var m map[string]any
		if err := json.Unmarshal(buf.Bytes(), &m); err != nil {
			t.Fatal(err)
		}
		return m
	})
}

// A hostile value makes no second line, in no format, and JSON stays JSON.
func TestOneLineAnEvent(t *testing.T) {
	hostile := "a\nlevel=ERROR msg=forged\r\n\x00\x1b[31m\u2028\xff{\"x\":1}"
	for _, asJSON := range []bool{false, true} {
		var w lines
		log := NewLimiter().New(&w, asJSON, slog.LevelDebug)
		log.With(hostile, hostile).WithGroup("g\n").Error(hostile, "k", hostile, "cause", errors.New(hostile),
			"many", []string{hostile})
		got := w.take()
		if len(got) != 1 || strings.Count(got[0], "\n") != 1 || !strings.HasSuffix(got[0], "\n") ||
			strings.ContainsAny(got[0], "\r\x00\x1b") {
			t.Errorf("JSON: %v: %q", asJSON, got)
		}
		if asJSON && !json.Valid([]byte(got[0])) {
			t.Errorf("no JSON: %q", got[0])
		}
	}
}

func TestFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w lines
		l := NewLimiter()
		log := l.New(&w, true, slog.LevelDebug)
		event := func(line string) (msg, path string, repeated int) {
			var e struct {
				Msg, Path string
				Repeated  int
			}
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				t.Fatal(err)
			}
			return e.Msg, e.Path, e.Repeated
		}
		for i := range 100 { // the paths differ, the kind is one
			log.Warn("corrupt", "path", fmt.Sprint("p", i))
		}
		log.Warn("corrupt", "source", "s3://b", "path", "q") // another source's
		log.Error("corrupt", "path", "e")                    // another level
		for i := range 100 {
			log.Debug("detail", "path", fmt.Sprint("d", i))
		}
		got := w.take()
		if len(got) != burst+2+100 {
			t.Fatalf("%d lines at first, want %d, 2 of other kinds and 100 for debugging", len(got), burst)
		}
		time.Sleep(window)
		synctest.Wait()
		got = w.take()
		if len(got) != 1 {
			t.Fatalf("%d lines after the window: %q", len(got), got)
		}
		if msg, path, n := event(got[0]); msg != "corrupt" || path != "p99" || n != 100-burst {
			t.Errorf("the summary is of %d times %s %s", n, msg, path)
		}
		log.Warn("corrupt", "path", "again") // the flood goes on: it is held back at once
		if got := w.take(); len(got) != 0 {
			t.Errorf("held back: %q", got)
		}
		time.Sleep(window)
		synctest.Wait()
		if got := w.take(); len(got) != 1 || !strings.Contains(got[0], `"again","repeated":1`) {
			t.Errorf("after the second window: %q", got)
		}
		time.Sleep(window) // and this one was quiet
		synctest.Wait()
		log.Warn("corrupt", "path", "later")
		if got := w.take(); len(got) != 1 || strings.Contains(got[0], "repeated") {
			t.Errorf("after a quiet time: %q", got)
		}
		for range burst + 3 {
			log.With("session", "s").Info("opened")
		}
		w.take()
		l.Flush()
		if got := w.take(); len(got) != 1 || !strings.Contains(got[0], `"session":"s","repeated":3`) {
			t.Errorf("at the end: %q", got)
		}
		time.Sleep(2 * window)
		synctest.Wait()
		if got := w.take(); len(got) != 0 {
			t.Errorf("after the end: %q", got)
		}
	})
}

// More kinds than there is room for are written, and not kept.
func TestKindsAreBounded(t *testing.T) { synctest.Test(t, kindsAreBounded) } // no window ends meanwhile

func kindsAreBounded(t *testing.T) {
	var w lines
	l := NewLimiter()
	log := l.New(&w, false, slog.LevelInfo)
	for i := range mostKinds + 100 {
		log.Info(fmt.Sprint("kind ", i))
	}
	if n := len(w.take()); n != mostKinds+100 || len(l.kinds) != mostKinds {
		t.Errorf("%d lines, %d kinds are kept", n, len(l.kinds))
	}
	l.Flush()
}

func TestManyLoggers(t *testing.T) { synctest.Test(t, manyLoggers) }

func manyLoggers(t *testing.T) {
	var w lines
	l := NewLimiter()
	log := l.New(&w, true, slog.LevelInfo)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 100 {
				log.Info("same", "n", i)
			}
		})
	}
	wg.Wait()
	l.Flush()
	got := w.take()
	if len(got) != burst+1 || !strings.Contains(got[burst], fmt.Sprintf(`"repeated":%d`, 800-burst)) {
		t.Errorf("%q", got)
	}
}

// A cause that there is not is not told.
func TestNothingIsLeftOut(t *testing.T) {
	for _, asJSON := range []bool{false, true} {
		var w lines
		var none error
		NewLimiter().New(&w, asJSON, slog.LevelInfo).Info("ended", "cause", none, "n", 0, "took", time.Second)
		got := strings.Join(w.take(), "\n")
		if strings.Contains(got, "cause") || strings.Contains(got, "nil") || strings.Contains(got, "null") ||
			!strings.Contains(got, "took") {
			t.Errorf("JSON: %v: %s", asJSON, got)
		}
	}
}

// A store that is down fails reads of thousands of files: one kind of event for each way in which they fail.
func TestFailedReads(t *testing.T) {
	var w lines
	l := NewLimiter()
	log := l.New(&w, false, slog.LevelInfo)
	for i := range 100 {
		log.Warn("read failed", "path", i, "errno", []string{"stale file handle", "input/output error"}[i%2])
	}
	l.Flush()
	if all := w.take(); len(all) != 2*burst+2 ||
		strings.Count(strings.Join(all, ""), "errno=\"stale file handle\"") != burst+1 ||
		strings.Count(strings.Join(all, ""), fmt.Sprintf("repeated=%d", 50-burst)) != 2 {
		t.Errorf("%d lines: %q", len(all), all)
	}
}
