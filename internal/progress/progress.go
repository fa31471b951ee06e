// Package progress shows the progress of long steps: a bar that redraws itself on a terminal, or a line every few
// seconds elsewhere (a log, a CI run).
package progress

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/pause"
)

const (
	redraw    = 100 * time.Millisecond
	lineEvery = 5 * time.Second
	barWidth  = 30
)

// Printer shows steps on a writer, one after the other.
type Printer struct {
	mu  sync.Mutex
	w   io.Writer
	tty bool
	now func() time.Time
}

// New returns a printer. It draws bars if w is a terminal.
func New(w io.Writer) *Printer {
	return &Printer{w: w, now: time.Now, tty: Terminal(w)}
}

// Terminal reports whether a writer is a terminal that takes commands.
func Terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// Printf prints a line.
func (p *Printer) Printf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.w, format+"\n", args...)
}

// Bar is the progress of one step. Its methods may be called from several goroutines.
type Bar struct {
	p     *Printer
	label string
	start time.Time
	last  time.Time // when something was shown last; the clock's
	stop  func()    // ends the clock

	mu          sync.Mutex
	done, total int
	note        string
}

// Start begins a step of total units; 0 means that the number is unknown. The step is shown at once and its clock runs
// by itself, so that a long wait is visible.
func (p *Printer) Start(label string, total int) *Bar {
	b := &Bar{p: p, label: label, total: total, start: p.now()}
	b.last = b.start
	if p.tty {
		b.draw()
	} else {
		p.Printf("%s ...", label)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var ticking sync.WaitGroup
	ticking.Go(func() {
		for range pause.Every(ctx, redraw) {
			b.show()
		}
	})
	b.stop = func() { cancel(); ticking.Wait() }
	return b
}

// show draws the bar, or prints a line if the last one is old enough.
func (b *Bar) show() {
	if b.p.tty {
		b.draw()
		return
	}
	if now := b.p.now(); now.Sub(b.last) >= lineEvery {
		b.last = now
		b.p.Printf("%s", b.text())
	}
}

// Set sets the number of units done, and a short text that is shown after the numbers.
func (b *Bar) Set(done, total int, note string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.done, b.total, b.note = max(done, b.done), total, note
}

func (b *Bar) text() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	elapsed := b.p.now().Sub(b.start).Round(100 * time.Millisecond)
	var s strings.Builder
	fmt.Fprintf(&s, "%-34s ", b.label)
	if b.total > 0 {
		fraction := min(float64(b.done)/float64(b.total), 1)
		if b.p.tty {
			full := int(fraction * barWidth)
			s.WriteString("[" + strings.Repeat("=", full) + strings.Repeat(" ", barWidth-full) + "] ")
		}
		fmt.Fprintf(&s, "%3.0f%% %d/%d ", 100*fraction, b.done, b.total)
	}
	fmt.Fprintf(&s, "%v", elapsed)
	if b.total > 0 && b.done > 0 && b.done < b.total && elapsed > time.Second {
		left := time.Duration(float64(elapsed) / float64(b.done) * float64(b.total-b.done))
		fmt.Fprintf(&s, ", %v left", left.Round(time.Second))
	}
	if b.note != "" {
		s.WriteString("  " + b.note)
	}
	return s.String()
}

func (b *Bar) draw() {
	text := b.text()
	b.p.mu.Lock()
	defer b.p.mu.Unlock()
	fmt.Fprint(b.p.w, "\r\x1b[?7l"+text+"\x1b[K\x1b[?7h") // the terminal cuts at its width, and clears the rest
}

// Done ends the step with a line that has its time and result ("" for none). It must be called once, also after a
// failure.
func (b *Bar) Done(result string) {
	b.stop()
	elapsed := b.p.now().Sub(b.start).Round(100 * time.Millisecond)
	line := fmt.Sprintf("%-34s %v", b.label, elapsed)
	if result != "" {
		line += "  " + result
	}
	b.p.mu.Lock()
	defer b.p.mu.Unlock()
	if b.p.tty {
		line = "\r\x1b[K" + line
	}
	fmt.Fprintln(b.p.w, line)
}
