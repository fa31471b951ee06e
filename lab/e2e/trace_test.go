package e2e

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/shoalfs/shoal/lab/rig/otlp"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// What a daemon tells a collector of a session of a client with a trace, of one without, of a mount's reader who
// waits, and of a store that stumbles.
func TestTraces(t *testing.T) {
	collector := otlp.Start()
	defer collector.Close()
	dir, paths := tree(t, 2, 20, 8<<10)
	p, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	source := bucket(t, dir)
	env = append(env, "OTEL_EXPORTER_OTLP_ENDPOINT="+collector.URL, "OTEL_SERVICE_NAME=under test",
		"OTEL_BSP_SCHEDULE_DELAY=100")
	// Far above the largest number of spans here, so that none is dropped on a slow machine.
	env = append(env, "OTEL_BSP_MAX_QUEUE_SIZE=100000")
	addr, mnt := serve(t, env, source, "--order", "none", "--kernel-cache", "off")
	if err := p.Set(proxy.Options{Latency: 2 * time.Millisecond,
		Faults: []proxy.Fault{{Kind: proxy.Unavailable, Count: 6}}}); err != nil {
		t.Fatal(err)
	}
	readAll(t, mnt, dir, paths[:10])

	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	epoch := func(header ...string) (batches int) {
		c, err := feedclient.Dial(addr, feedclient.Security{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		s, err := c.Open(metadata.AppendToOutgoingContext(t.Context(), header...),
			&feedpb.Open{Batch: 8, Epochs: 1, Order: "sequential", Credits: 4})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		for {
			b, err := s.Next()
			if errors.Is(err, io.EOF) {
				return batches
			}
			if err != nil {
				t.Fatal(err)
			}
			batches++
			b.Release()
		}
	}
	batches := epoch("traceparent", parent)
	if n := epoch(); n != batches {
		t.Fatalf("%d batches, and %d", batches, n)
	}
	const script = `
import shoal, sys
for batch in shoal.Feed(sys.argv[1], batch_size=8, epochs=1, order="sequential"):
    pass
`
	cmd := python(t, script, addr)
	cmd.Env = append(cmd.Env, "TRACEPARENT="+strings.Replace(parent, "0af7", "beef", 1))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	umount(t, mnt) // the daemon ends, and sends what is left

	by := map[string][]otlp.Span{}
	ids := map[string]otlp.Span{}
	for _, s := range collector.Spans() {
		by[s.Name] = append(by[s.Name], s)
		ids[s.ID] = s
		if s.Resource["service.name"] != "under test" || s.End.Before(s.Start) {
			t.Errorf("%+v", s)
		}
	}
	one := func(name string, where func(s otlp.Span) bool) otlp.Span {
		t.Helper()
		found := slices.DeleteFunc(slices.Clone(by[name]), func(s otlp.Span) bool { return !where(s) })
		if len(found) != 1 {
			t.Fatalf("%d spans %s, want 1: %+v", len(found), name, by[name])
		}
		return found[0]
	}
	if l := one("dataset.list", func(otlp.Span) bool { return true }); l.Attributes["shoal.files"] != "40" || l.Failed {
		t.Errorf("%+v", l)
	}
	given := one("feed.session", func(s otlp.Span) bool { return s.Trace == parent[3:35] })
	one("feed.session", func(s otlp.Span) bool { return s.Trace == "beef"+parent[7:35] })
	alone := one("feed.session", func(s otlp.Span) bool { return s.Parent == "" })
	if given.Parent != parent[36:52] || given.Attributes["shoal.samples"] != "40" || given.Failed {
		t.Errorf("the session of the client with a trace: %+v", given)
	}
	under, beside := 0, 0
	for _, b := range by["feed.batch"] {
		switch {
		case b.Parent == given.ID && b.Trace == given.Trace && b.Attributes["shoal.samples"] == "8":
			under++
		case b.Parent == "" && slices.Contains(b.Links, alone.Trace) && b.Trace != alone.Trace:
			beside++
		}
	}
	if under != batches || beside != batches {
		t.Errorf("%d batches in the client's trace, %d that link to the session without; want %d each",
			under, beside, batches)
	}
	// The mount's readers waited, each for a GET of its own, and six of these were refused at first.
	waits, refused := 0, 0
	for _, g := range by["store.read"] {
		w, ok := ids[g.Parent]
		if ok && w.Name == "read.wait" && w.Attributes["shoal.area"] == "miss" && g.Trace == w.Trace &&
			!g.Start.Before(w.Start) && !g.End.After(w.End) {
			waits++
		}
		for _, e := range g.Events {
			if e.Name == "failed try" && strings.Contains(e.Attributes["cause"], "temporary failure") {
				refused++
			}
		}
	}
	if waits < 10 || refused != 6 {
		t.Errorf("%d GETs that somebody waited for, want 10 at least; %d refusals told, want 6", waits, refused)
	}
}

// A variable that is wrong is told at once.
func TestTracesWrongUse(t *testing.T) {
	_, errs, code := shoal(t, []string{"OTEL_TRACES_EXPORTER=zipkin"}, "version")
	if code != 2 || !strings.Contains(errs, "give otlp or none") {
		t.Errorf("exit %d, %s", code, errs)
	}
}
