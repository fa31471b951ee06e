package top

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"

	"github.com/shoalfs/shoal/internal/admin/verdict"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/run"
)

// all draws every pane. The first line of a pane names its columns, or says that it is empty.
func (f *frame) all(s *verdict.Snapshot, v verdict.Verdict, width int) [][]string {
	all := [][]string{orders: f.orders(s, width), sessions: f.sessions(s, width), slowest: f.slowest(s, width), failures: f.errors(v, width)}
	if s.Cluster != nil {
		all = append(all, f.nodes(s.Cluster, width))
	}
	return all
}

// panes is the number of panes that there are now.
func (f *frame) panes() pane {
	if s, _, ok := f.series.last(); ok && s.Cluster != nil {
		return panes
	}
	return nodes
}

// nodes draws a cluster as this node sees it: what it asked each other node for, and got.
func (f *frame) nodes(c *engine.ClusterStats, width int) []string {
	var rows [][]string
	for _, n := range c.Nodes {
		row := []string{clean(n.Address), human.Bytes(int64(n.Weight) << 20), human.Percent(n.Owned), cmp.Or(clean(n.Problem), "ok"), "–", "–", "–"}
		if a := n.Asked; a != nil {
			row[4], row[5], row[6] = human.Number(int(a.Hits))+" of "+human.Number(int(a.Asked)), human.Bytes(a.Bytes), human.Number(int(a.No["version"]))
		}
		if n.ID == c.Node {
			row[3] = "this one"
		}
		rows = append(rows, row)
	}
	return f.table([]column{{name: "node", width: 16}, {name: "cache", right: true}, {name: "owns", right: true}, {name: "state", width: 12, grow: true}, {name: "gave", right: true}, {name: "bytes", right: true},
		{name: "other version", right: true}}, rows, width)
}

var feedStream = regexp.MustCompile(`^feed/(.*)/rank(\d+)/epoch(\d+)$`)

// whose returns the owner of a stream's order, and the epoch. A feed has a stream for each epoch, named after it.
func whose(p run.Progress, spec string) (name, epoch string) {
	if m := feedStream.FindStringSubmatch(p.Name); m != nil {
		return fmt.Sprintf("feed %s, rank %s", clean(m[1]), m[2]), m[3]
	}
	epoch = human.Number(p.Epoch)
	if p.Name == "mount" {
		return "mount " + clean(spec), epoch
	}
	if p.Name == "sequence" {
		return "mount, in sequence", epoch
	}
	return "plan " + clean(p.Name), epoch
}

func (f *frame) orders(s *verdict.Snapshot, width int) []string {
	if len(s.Streams) == 0 {
		switch s.Order.State {
		case "watching":
			return []string{f.dim.Render("Shoal watches the trainer's opens; they match no known order yet.")}
		case "searching":
			return []string{f.dim.Render("Shoal is searching for the order behind the trainer's opens.")}
		case "unknown":
			return []string{f.dim.Render("Order unknown: run the trainer by `shoal run`.")}
		}
		return []string{f.dim.Render("No order is known: nothing is fetched ahead.")}
	}
	var rows [][]string
	for _, p := range s.Streams {
		name, epoch := whose(p, s.Order.Spec)
		pace := "–"
		if p.Pace > 0 {
			pace = human.Rate(p.Pace) + "/s"
		}
		rows = append(rows, []string{name, epoch, fmt.Sprintf("%s of %s", human.Number(p.Position), human.Number(p.Len)), human.Number(p.Lead), pace,
			human.Number(p.InFlight), human.Bytes(p.Held), human.Percent(p.Share), moves(p)})
	}
	return f.table([]column{{name: "order", width: 22, grow: true}, {name: "epoch", right: true}, {name: "position", right: true}, {name: "ahead", right: true},
		{name: "pace", right: true}, {name: "in flight", right: true}, {name: "holds", right: true}, {name: "share", right: true}, {name: "reader"}}, rows, width)
}

func moves(p run.Progress) string {
	var said []string
	e := p.Events
	if e.Restarts > 0 {
		said = append(said, fmt.Sprintf("%d× again", e.Restarts))
	}
	if n := e.Jumps + e.PrevEpochs + e.Found; n > 0 {
		said = append(said, fmt.Sprintf("%d moves", n))
	}
	if p.Strays > 0 {
		said = append(said, human.Number(p.Strays)+" strays")
	}
	if len(said) == 0 {
		return "in order"
	}
	return strings.Join(said, ", ")
}

func (f *frame) sessions(s *verdict.Snapshot, width int) []string {
	if s.Feed == nil {
		return []string{f.dim.Render("No feed is served here.")}
	}
	if len(s.Feed.List) == 0 {
		return []string{f.dim.Render(fmt.Sprintf("No session is open; %d have ended.", s.Feed.Sessions))}
	}
	before := f.series.before()
	dt := s.Uptime - before.Uptime
	var rows [][]string
	for _, now := range s.Feed.List {
		was, ok := sessionOf(before.Feed, now)
		samples, stall, credit, decode := "–", "–", "–", "–"
		if ok && dt > 0 {
			samples = human.Rate(float64(now.Samples-was.Samples)/dt) + "/s"
			stall = human.Percent(min(1, (now.Stall-was.Stall)/dt))
			credit = human.Percent(min(1, (now.Credit+now.Slots-was.Credit-was.Slots)/dt))
			decode = fmt.Sprintf("%.1f", (now.Decode-was.Decode)/dt)
		}
		rows = append(rows, []string{clean(now.Session), fmt.Sprintf("%d of %d", now.Rank, max(now.World, 1)), fmt.Sprint(now.Epoch), fmt.Sprint(now.Batch),
			samples, stall, credit, decode, human.Number(int(now.Bad)), clean(now.Client)})
	}
	return f.table([]column{{name: "session", width: 10, grow: true}, {name: "rank", right: true}, {name: "epoch", right: true}, {name: "batch", right: true},
		{name: "samples", right: true}, {name: "stalled", right: true}, {name: "busy", right: true}, {name: "decode", right: true}, {name: "bad", right: true}, {name: "client"}}, rows, width)
}

func sessionOf(f *loader.Stats, s loader.SessionStats) (loader.SessionStats, bool) {
	if f != nil {
		for _, b := range f.List {
			if b.Session == s.Session && b.Rank == s.Rank && b.Age <= s.Age {
				return b, true
			}
		}
	}
	return loader.SessionStats{}, false
}

func (f *frame) slowest(s *verdict.Snapshot, width int) []string {
	if len(s.Slowest) == 0 {
		return []string{f.dim.Render("Nothing was fetched in the last minutes.")}
	}
	var rows [][]string
	for _, k := range s.Slowest {
		took := span(k.Seconds)
		if k.Failed {
			took += " failed"
		}
		rows = append(rows, []string{took, human.Bytes(k.Bytes), k.Time.Local().Format("15:04:05"), clean(k.Key)})
	}
	return f.table([]column{{name: "took", right: true}, {name: "asked", right: true}, {name: "when"}, {name: "key", width: 16, grow: true}}, rows, width)
}

func (f *frame) errors(v verdict.Verdict, width int) []string {
	if len(v.Error) == 0 {
		return []string{f.dim.Render("No warnings and no errors.")}
	}
	var rows [][]string
	for _, e := range v.Error {
		text := clean(e.Text)
		if e.Remedy != "" {
			text = "→ " + clean(e.Remedy) + "  | " + text
		}
		times := ""
		if e.Count > 1 {
			times = fmt.Sprintf("%d×", e.Count)
		}
		rows = append(rows, []string{e.Time.Local().Format("15:04:05"), strings.ToLower(e.Level), times, text})
	}
	return f.table([]column{{name: "last"}, {name: "level"}, {name: ""}, {name: "what to do  | what happened", width: 20, grow: true}}, rows, width)
}
