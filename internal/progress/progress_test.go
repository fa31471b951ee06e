package progress

import (
	"bytes"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// clock is a time that the test moves.
type clock struct {
	mu sync.Mutex
	t  time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.t
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = c.t.Add(d)
}

// The bar's own clock shows nothing meanwhile: the bubble's stands still until the test waits.
func TestLinesWithoutTerminal(t *testing.T) { synctest.Test(t, linesWithoutTerminal) }

func linesWithoutTerminal(t *testing.T) {
	var out bytes.Buffer
	c := &clock{t: time.Unix(0, 0)}
	p := New(&out)
	p.now = c.now
	b := p.Start("uploading", 10)
	b.Set(3, 10, "fast")
	b.show() // too early
	c.add(6 * time.Second)
	b.show()
	c.add(6 * time.Second)
	b.Done("10 files")
	got := out.String()
	for _, want := range []string{"uploading ...\n", " 30% 3/10 6s, 14s left  fast\n", " 12s  10 files\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("got %q, lacks %q", got, want)
		}
	}
	if n := strings.Count(got, "30%"); n != 1 {
		t.Errorf("%d lines of progress in %q", n, got)
	}
	if strings.Contains(got, "\r") {
		t.Errorf("%q redraws without a terminal", got)
	}
}

func TestBarOnTerminal(t *testing.T) {
	var out bytes.Buffer
	c := &clock{t: time.Unix(0, 0)}
	p := New(&out)
	p.now, p.tty = c.now, true
	b := p.Start("making", 4)
	b.Set(2, 4, "")
	b.Set(1, 4, "") // reports may arrive out of order; the bar never goes back
	b.draw()
	b.Done("")
	if !strings.Contains(out.String(), "["+strings.Repeat("=", 15)+strings.Repeat(" ", 15)+"]  50% 2/4") {
		t.Errorf("got %q", out.String())
	}
	// No bar takes two lines, and the last line clears the rest of the bar that it replaces.
	if bars := strings.Count(out.String(), "\x1b[?7l"); bars == 0 || strings.Count(out.String(), "\x1b[K") != bars+1 ||
		!strings.Contains(out.String(), "\r\x1b[Kmaking") {
		t.Errorf("got %q", out.String())
	}
}
