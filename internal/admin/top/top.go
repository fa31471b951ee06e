// Package top is `shoal top`: the dashboard in a terminal. It draws frames from snapshots that a function fetches. It
// judges nothing itself; package verdict does.
package top

import (
	"context"
	"fmt"
	"io"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/shoalfs/shoal/internal/admin/verdict"
)

// Options say what to show and how.
type Options struct {
	Target   string // the daemon, in words
	Interval time.Duration

	// Fetch returns the daemon's current state. It is not called concurrently.
	Fetch func(ctx context.Context) (verdict.Snapshot, error)
}

// askFor is the timeout of a request.
const askFor = 5 * time.Second

// Once writes one frame over one interval as plain text, with the given width and any height.
func Once(ctx context.Context, o Options, w io.Writer, width int) error {
	var s series
	for i := range 2 {
		if i > 0 {
			select {
			case <-time.After(o.Interval):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		snap, err := fetch(ctx, o)
		if err != nil {
			return err
		}
		s.add(snap)
	}
	f := frame{styles: newStyles(), series: &s, target: o.Target, plain: true}
	_, err := fmt.Fprintln(w, f.render(width, 0))
	return err
}

// Run shows frames in the terminal until the user quits or ctx ends. It fails if the first request fails; later ones
// are retried.
func Run(ctx context.Context, o Options, in io.Reader, out io.Writer) error {
	first, err := fetch(ctx, o)
	if err != nil {
		return err
	}
	m := &model{o: o, ctx: ctx, width: 80, height: 24}
	m.frame = frame{styles: newStyles(), series: &m.series, target: o.Target}
	m.series.add(first)
	p := tea.NewProgram(m, tea.WithContext(ctx), tea.WithInput(in), tea.WithOutput(out), tea.WithoutSignalHandler())
	if _, err := p.Run(); err != nil && ctx.Err() == nil {
		return fmt.Errorf("the terminal: %w", err)
	}
	return nil
}

func fetch(ctx context.Context, o Options) (verdict.Snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	return o.Fetch(ctx)
}

// model is the state behind the frames.
type model struct {
	o      Options
	ctx    context.Context
	series series
	frame  frame
	width  int
	height int
}

type (
	tick   struct{}
	answer struct {
		snap verdict.Snapshot
		err  error
	}
)

// Init implements tea.Model.
func (m *model) Init() tea.Cmd { return m.wait() }

func (m *model) wait() tea.Cmd {
	return tea.Tick(m.o.Interval, func(time.Time) tea.Msg { return tick{} })
}

func (m *model) ask() tea.Msg {
	s, err := fetch(m.ctx, m.o)
	return answer{s, err}
}

// Update implements tea.Model.
func (m *model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case tick:
		if m.frame.paused {
			return m, m.wait()
		}
		return m, m.ask
	case answer:
		if m.frame.err = msg.err; msg.err == nil {
			m.series.add(msg.snap)
		}
		return m, m.wait()
	case tea.KeyPressMsg:
		return m, m.key(msg.String())
	}
	return m, nil
}

func (m *model) key(key string) tea.Cmd {
	f := &m.frame
	turn := func(by int) { f.pane, f.scroll, f.help = (f.pane+pane(by)+f.panes())%f.panes(), 0, false }
	switch key {
	case "q", "ctrl+c":
		return tea.Quit
	case "p", "space":
		f.paused = !f.paused
	case "?", "h":
		f.help = !f.help
	case "esc":
		f.help = false
	case "tab", "right", "l":
		turn(1)
	case "shift+tab", "left":
		turn(-1)
	case "1", "2", "3", "4", "5":
		f.pane, f.scroll, f.help = min(pane(key[0]-'1'), f.panes()-1), 0, false
	case "down", "j":
		f.scroll = min(f.scroll+1, m.rows())
	case "up", "k":
		f.scroll = max(0, f.scroll-1)
	case "pgdown":
		f.scroll = min(f.scroll+10, m.rows())
	case "pgup":
		f.scroll = max(0, f.scroll-10)
	case "home":
		f.scroll = 0
	}
	return nil
}

// rows is the farthest that the pane can be scrolled.
func (m *model) rows() int {
	s, v, ok := m.series.last()
	if !ok {
		return 0
	}
	all := m.frame.all(&s, v, m.width)
	return max(0, len(all[min(m.frame.pane, pane(len(all)-1))])-2)
}

// View implements tea.Model.
func (m *model) View() tea.View {
	v := tea.NewView(m.frame.render(m.width, m.height))
	v.AltScreen, v.WindowTitle = true, "shoal top "+clean(m.o.Target)
	return v
}
