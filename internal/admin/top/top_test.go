package top

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/shoalfs/shoal/cache/peer"
	"github.com/shoalfs/shoal/internal/admin/verdict"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/run"
)

var update = flag.Bool("update", false, "write testdata/*.txt anew")

func TestMain(m *testing.M) {
	time.Local = time.UTC // frames show times of day
	os.Exit(m.Run())
}

var start = time.Date(2026, 11, 21, 18, 0, 0, 0, time.UTC)

// at is a daemon t seconds after its start: fast until 40, then the store cannot keep up.
func at(t int) verdict.Snapshot {
	var s verdict.Snapshot
	fast, slow := float64(min(t, 40)), float64(max(0, t-40))
	s.PID, s.Uptime, s.Source, s.Samples, s.Bytes = 7, float64(t), "s3://photos/train/", 120_000, 9<<30
	s.Opens = int64(2000*fast + 900*slow)
	s.Delivered, s.Reads, s.Readers = s.Opens, s.Opens, 8
	s.ReadBytes = s.Reads * 75_000
	s.Hits = engine.Hits{Keep: int64(900*fast + 400*slow), Ring: int64(1100*fast + 100*slow)}
	s.Joined, s.Misses = int64(350*slow), int64(50*slow)
	s.Stall = 4.4 * slow
	s.GetRequests = int64(1100*fast + 500*slow)
	s.GetBytes = s.GetRequests * 75_000
	s.InFlight, s.Connections, s.LatencyP50, s.LatencyP99 = 60, 64, 0.031, 0.095
	s.Lead, s.LeadSeconds = 20_000-t*250, float64(20_000-t*250)/1800
	s.Order = engine.OrderState{Spec: "torch:seed=7", Epoch: 3, Position: int(s.Opens), State: "following"}
	s.Streams = []run.Progress{
		{Name: "mount", Epoch: 3, Position: int(s.Opens), Len: 120_000, Lead: s.Lead, InFlight: 41, Held: 180 << 20, Share: 0.5, Pace: 1800, Events: run.Events{Consumed: int(s.Opens)}},
		{Name: "feed/resnet50/rank0/epoch2", Position: 5000, Len: 120_000, Lead: 300, InFlight: 19, Held: 20 << 20, Share: 0.5, Pace: 610, Strays: 3},
	}
	s.Memory = engine.MemoryStats{Used: 310 << 20, Limit: 384 << 20, Peak: 380 << 20, Ring: 200 << 20, RSS: 640 << 20}
	s.Disk = engine.DiskStats{Used: 4 << 30, Budget: 4 << 30, AllUsed: 4 << 30, Kept: 54_000, Extents: 120_000}
	s.Feed = &loader.Stats{Open: 1, Sessions: 2, List: []loader.SessionStats{{
		Session: "resnet50", Client: "host-17 (pid 4711)", Rank: 0, World: 8, Epoch: 2, Batch: int64(t), Age: float64(t),
		Samples: int64(600 * t), Stall: 0.02 * float64(t), Credit: 0.6 * float64(t), Decode: 3.2 * float64(t),
	}}}
	s.Feed.Total = s.Feed.List[0]
	for i := range 9 {
		s.Slowest = append(s.Slowest, engine.SlowKey{Key: fmt.Sprintf("train/n0%d440764/ILSVRC_%08d.JPEG", i, i*777), Seconds: 1.9 / float64(i+1), Bytes: 110_000, Time: start, Failed: i == 2})
	}
	s.Errors = []engine.ErrorEvent{
		{Time: start, Level: "WARN", Text: "a stream began late; cause: slow", Count: 1},
		{Time: start.Add(time.Minute), Level: "ERROR", Text: "the disk tier is out of use; cause: no space; remedy: free space in, or repair, the disk of the cache directory", Count: 3},
	}
	return s
}

// inCluster makes the daemon a node of a cluster of three, of which one is away.
func inCluster(s verdict.Snapshot) verdict.Snapshot {
	s.Cluster = &engine.ClusterStats{Node: "a", State: "joined", Owned: 0.25, PeerBytes: 3 << 30, DiskBytes: 2 << 30, Nodes: []engine.ClusterNode{
		{ID: "a", Address: "10.0.0.1:7073", Weight: 4096, Open: true, Owned: 0.25},
		{ID: "b", Address: "10.0.0.2:7073", Weight: 8192, Open: true, Owned: 0.5, Asked: &peer.Stats{State: "on", Asked: 9_000, Hits: 8_990, Bytes: 3 << 30, No: map[string]int64{"version": 10}}},
		{ID: "c", Address: "10.0.0.3:7073", Weight: 4096, Open: true, Owned: 0.25, Asked: &peer.Stats{State: "away", Cause: "connection refused"}, Problem: "left out: connection refused"},
	}}
	return s
}

func modelAt(t int) *model {
	m := &model{o: Options{Target: "/mnt/train", Interval: time.Second}, ctx: context.Background(), width: 80, height: 24}
	m.frame = frame{styles: newStyles(), series: &m.series, target: "/mnt/train", plain: true}
	for i := 1; i <= t; i++ {
		m.Update(answer{snap: at(i)})
	}
	return m
}

func press(m *model, keys ...string) {
	special := map[string]tea.KeyPressMsg{"tab": {Code: tea.KeyTab}, "shift+tab": {Code: tea.KeyTab, Mod: tea.ModShift}, "down": {Code: tea.KeyDown}, "pgdown": {Code: tea.KeyPgDown}, "esc": {Code: tea.KeyEscape}}
	for _, k := range keys {
		msg, ok := special[k]
		if !ok {
			msg = tea.KeyPressMsg{Code: []rune(k)[0], Text: k}
		}
		m.Update(msg)
	}
}

func view(m *model) string { return m.View().Content }

// golden compares a frame with the one that was looked at and found good.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".txt")
	if *update {
		if err := os.WriteFile(path, []byte(got+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got+"\n" {
		t.Errorf("%s (go test ./internal/admin/top -update writes it anew):\n%s", path, got)
	}
}

func TestFrames(t *testing.T) {
	for _, c := range []struct {
		name          string
		width, height int
		keys          []string
		seconds       int
	}{
		{"80x24-good", 80, 24, nil, 38},
		{"80x24", 80, 24, nil, 60},
		{"80x24-sessions", 80, 24, []string{"tab"}, 60},
		{"80x24-slowest", 80, 24, []string{"3", "down", "down"}, 60},
		{"80x24-errors", 80, 24, []string{"4"}, 60},
		{"80x24-help", 80, 24, []string{"?"}, 60},
		{"120x40", 120, 40, nil, 60},
		{"40x12", 40, 12, nil, 60},
		{"80x24-first", 80, 24, nil, 1},
		{"120-all", 120, 0, nil, 60},
		{"100x24-nodes", 100, 24, []string{"5"}, 60},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := modelAt(c.seconds)
			if strings.HasSuffix(c.name, "nodes") {
				m.Update(answer{snap: inCluster(at(c.seconds + 1))})
			}
			press(m, c.keys...)
			m.Update(tea.WindowSizeMsg{Width: c.width, Height: c.height})
			got := view(m)
			lines := strings.Split(got, "\n")
			if c.height > 0 && len(lines) != c.height {
				t.Errorf("%d lines", len(lines))
			}
			for _, line := range lines {
				if ansi.StringWidth(line) > c.width {
					t.Errorf("%d columns: %q", ansi.StringWidth(line), line)
				}
			}
			golden(t, c.name, got)
		})
	}
}

// Every size holds, and no frame breaks out of it.
func TestSizes(t *testing.T) {
	m := modelAt(60)
	m.Update(answer{snap: inCluster(at(61))})
	for width := 20; width < 200; width += 29 {
		for height := 1; height < 60; height += 7 {
			for p := range panes {
				press(m, fmt.Sprint(int(p)+1))
				m.Update(tea.WindowSizeMsg{Width: width, Height: height})
				lines := strings.Split(view(m), "\n")
				if len(lines) != height {
					t.Fatalf("%dx%d: %d lines", width, height, len(lines))
				}
				for _, line := range lines {
					if ansi.StringWidth(line) > width {
						t.Fatalf("%dx%d: %q", width, height, line)
					}
				}
			}
		}
	}
}

func TestKeys(t *testing.T) {
	m := modelAt(5)
	press(m, "tab", "tab", "tab", "tab")
	if m.frame.pane != orders {
		t.Errorf("after four tabs: pane %d", m.frame.pane)
	}
	press(m, "shift+tab")
	if m.frame.pane != failures {
		t.Errorf("before the first: pane %d", m.frame.pane)
	}
	press(m, "3", "pgdown", "pgdown", "pgdown")
	if m.frame.pane != slowest || m.frame.scroll != 8 {
		t.Errorf("pane %d scrolled to %d of 9 rows", m.frame.pane, m.frame.scroll)
	}
	press(m, "p")
	if _, cmd := m.Update(tick{}); !m.frame.paused || cmd == nil || !strings.Contains(view(m), "paused") {
		t.Error("not paused")
	}
	press(m, "p", "?")
	if !strings.Contains(view(m), "share of the time") {
		t.Error("no help")
	}
	press(m, "esc")
	if strings.Contains(view(m), "share of the time") {
		t.Error("the help stays")
	}
	if _, cmd := m.Update(tea.KeyPressMsg{Code: 'q', Text: "q"}); cmd == nil || cmd() != tea.Quit() {
		t.Error("q does not quit")
	}
}

// A daemon that dies is told, what it said last stays, and another one's figures do not mix with its own.
func TestTheDaemonDies(t *testing.T) {
	m := modelAt(30)
	m.Update(answer{err: errors.New("/mnt/train is not a live shoal mount: transport endpoint is not connected")})
	if v := view(m); !strings.Contains(v, "The daemon does not answer") || !strings.Contains(v, "not connected") || !strings.Contains(v, "Orders (2)") {
		t.Errorf("%s", v)
	}
	again := at(2)
	again.PID = 8
	m.Update(answer{snap: again})
	if v := view(m); strings.Contains(v, "does not answer") || len(m.series.snaps) != 1 {
		t.Errorf("%d snapshots\n%s", len(m.series.snaps), v)
	}
}

// What a daemon tells may hold anything: names of files and sessions come from elsewhere.
func TestHostileText(t *testing.T) {
	evil := "a\x1b[2Jb\x1b]0;owned\x07c\nd\u202ee\u009b31mf\x7fg"
	s := at(50)
	s.Source, s.Streams[0].Name, s.Order.Spec, s.Slowest[0].Key, s.Feed.List[0].Session, s.Feed.List[0].Client = evil, evil, evil, evil, evil, evil
	s.Errors[0].Text, s.CacheDir = evil, evil
	s.Streams[1].Name = "feed/" + evil + "/rank0/epoch1"
	s.Disk.OutOfUse, s.Disk.Reason = true, evil
	s = inCluster(s)
	s.Cluster.Nodes[1].Address, s.Cluster.Nodes[2].Problem, s.Cluster.Nodes[2].Asked.Cause = evil, evil, evil
	m := modelAt(49)
	m.Update(answer{snap: s})
	m.Update(answer{err: errors.New(evil)})
	for _, lost := range []bool{true, false} {
		if !lost {
			m.frame.err = nil
		}
		m.Update(tea.WindowSizeMsg{Width: 160, Height: 70})
		v := view(m)
		if !strings.Contains(v, "c␊d") {
			t.Errorf("the text is gone:\n%s", v)
		}
		for _, r := range v {
			if r != '\n' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r)) {
				t.Fatalf("%U in a frame:\n%q", r, v)
			}
		}
	}
}

func TestOnce(t *testing.T) {
	var out strings.Builder
	n := 0
	o := Options{Target: "x", Interval: time.Millisecond, Fetch: func(context.Context) (verdict.Snapshot, error) { n++; return at(50 + n), nil }}
	if err := Once(context.Background(), o, &out, 100); err != nil {
		t.Fatal(err)
	}
	if n != 2 || !strings.Contains(out.String(), "the store is too slow") || strings.Contains(out.String(), "\x1b") {
		t.Errorf("%d questions\n%s", n, out.String())
	}
	o.Fetch = func(context.Context) (verdict.Snapshot, error) { return verdict.Snapshot{}, errors.New("nobody there") }
	if err := Once(context.Background(), o, &out, 100); err == nil || err.Error() != "nobody there" {
		t.Error(err)
	}
}

func TestColours(t *testing.T) {
	m := modelAt(60)
	m.frame.plain = false
	if v := view(m); !strings.Contains(v, "\x1b[") {
		t.Error("no colours")
	} else if plain := ansi.Strip(v); !strings.Contains(plain, "the store is too slow") {
		t.Error(plain)
	}
}
