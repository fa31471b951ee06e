package findings

import (
	"encoding/json"
	"maps"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/peer"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/run"
)

// base is a daemon a minute after its start, which has followed a known order and waits for nobody.
func base() Snapshot {
	var s Snapshot
	s.PID, s.Uptime, s.Source, s.CacheDir = 7, 60, "s3://b/train/", "/cache"
	s.Samples, s.Files, s.Bytes = 100_000, 100_000, 100_000*80_000
	s.Opens, s.Delivered, s.Reads, s.Readers = 50_000, 50_000, 50_000, 8
	s.Hits = engine.Hits{Keep: 20_000, Ring: 30_000}
	s.GetRequests, s.GetBytes, s.Connections, s.LatencyP50 = 30_000, 30_000*80_000, 64, 0.03
	s.Lead, s.LeadSeconds = 4000, 4
	s.Order = engine.OrderState{Spec: "torch:seed=7", Epoch: 1, Position: 50_000, State: "following"}
	s.Streams = []run.Progress{
		{Name: "mount", Epoch: 1, Position: 50_000, Len: 100_000, Pace: 1000, Events: run.Events{Consumed: 50_000}}}
	s.Memory = engine.MemoryStats{Used: 200 << 20, Limit: 400 << 20}
	s.Disk = engine.DiskStats{Used: 1 << 30, Budget: 10 << 30, AllUsed: 1 << 30, Kept: 20_000, Extents: 100_000}
	s.StoreErrors = map[string]int64{"temporary failure": 3}
	return s
}

// later is base ten seconds later, after do.
func later(do func(s *Snapshot)) Snapshot {
	s := base()
	s.StoreErrors = maps.Clone(s.StoreErrors)
	s.Streams = slices.Clone(s.Streams)
	s.Uptime += 10
	if do != nil {
		do(&s)
	}
	return s
}

// reads lets the mount's readers open n files, of which late waited for the store, for stall seconds together.
func reads(s *Snapshot, n, late int64, stall float64) {
	s.Opens, s.Delivered, s.Reads = s.Opens+n, s.Delivered+n, s.Reads+n
	s.Hits.Ring += n - late
	s.Joined += late - late/4
	s.Misses += late / 4
	s.Stall += stall
	s.GetRequests, s.GetBytes = s.GetRequests+n, s.GetBytes+n*80_000
	s.Streams[0].Events.Consumed += int(n)
	s.InFlight = 40
}

// session is a feed with one session that has been open for all of the ten seconds.
func session(s *Snapshot, d loader.SessionStats) {
	d.Age = 10
	s.Feed = &loader.Stats{Open: 1, Sessions: 1, Total: d}
	s.Delivered += d.Samples
}

// inCluster is a node's view of a cluster of two.
func inCluster(state string, otherVersion int64) *engine.ClusterStats {
	c := &engine.ClusterStats{State: state, Nodes: []engine.ClusterNode{
		{ID: "a", Address: "a:7073", Open: true},
		{ID: "b", Address: "b:7073", Open: true,
			Asked: &peer.Stats{State: "on", Cause: "refused", No: map[string]int64{"version": otherVersion}}},
	}}
	if state != "joined" {
		c.Cause = "etcd at e:2379 does not answer"
	}
	return c
}

func TestVerdicts(t *testing.T) {
	busy := func(s *Snapshot) { reads(s, 10_000, 0, 0) }
	starved := func(s *Snapshot) { reads(s, 3000, 1500, 40) } // 8 readers, 10 s: half of the time
	for name, c := range map[string]struct {
		do     func(s *Snapshot)
		code   string
		level  Level
		detail string // part of it
		remedy string // part of it; "": there must be none
	}{
		"fed": {busy, "fed", OK,
			"1,000 samples/s; 100% of the reads did not wait; Shoal is 4,000 samples (4 s) ahead", ""},
		"page cache": {func(s *Snapshot) {
			s.Opens += 5000
			s.Delivered += 5000
		}, "fed", OK, "all from the kernel's page cache", ""},
		"a little late": {func(s *Snapshot) {
			reads(s, 10_000, 20, 0.5)
		}, "fed", OK, "99.8% of the reads did not wait", ""},
		"a bit late": {func(s *Snapshot) {
			reads(s, 10_000, 500, 8)
		}, "store-slow", Warn, "10% of the time", "Pack"},
		"store slow": {starved, "store-slow", Fail,
			"It waits 50% of the time. The store delivers 23 MiB/s in 300 requests/s",
			"Pack the dataset, since a request fetches only 78 KiB"},
		"budget": {func(s *Snapshot) {
			starved(s)
			s.Cost.Budget = &objstore.BudgetStats{PerHour: 3600, WaitingDemand: 8}
		}, "budget-spent", Fail, "Waiting: 8 reads; 3600 GETs an hour", "gets-per-hour"},
		"budget left": {func(s *Snapshot) {
			starved(s)
			s.Cost.Budget = &objstore.BudgetStats{PerHour: 3600, Left: 9}
		}, "store-slow", Fail, "", "Pack"},
		"all slots held": {func(s *Snapshot) { session(s, loader.SessionStats{Slots: 9}) }, "slots-held", Fail,
			"released none for 10 s", "more slots"},
		"all connections": {func(s *Snapshot) { starved(s); s.InFlight = 63; s.Packed = true }, "store-slow", Fail,
			"63 of 64", "Raise --connections, unless it is auto."},
		"cache full": {func(s *Snapshot) {
			starved(s)
			s.Packed = true
			s.Disk.AllUsed = 10 << 30
		}, "store-slow", Fail, "", "Raise --cache-size, since only 20% of the dataset is kept."},
		"quota full": {func(s *Snapshot) { starved(s); s.Packed = true; s.Disk.Limit, s.Disk.Used = 2<<30, 2<<30 },
			"store-slow", Fail, "", "Raise --cache-size"},
		"no reason seen": {func(s *Snapshot) {
			starved(s)
			s.Packed = true
		}, "store-slow", Fail, "20% of the dataset is kept so far", "shoal doctor s3://b/train/"},
		"memory": {func(s *Snapshot) {
			starved(s)
			s.InFlight = 8
			s.Memory.Used = 390 << 20
		}, "memory-small", Fail, "8 of 64 connections", "--memory"},
		"order unknown": {func(s *Snapshot) {
			starved(s)
			s.Order.State = "none"
		}, "order-unknown", Fail, "50% of the reads were not prefetched", "shoal.hint"},
		"searching": {func(s *Snapshot) { starved(s); s.Order.State = "searching" }, "order-unknown", Fail, "",
			"may not finish"},
		"watching": {func(s *Snapshot) { starved(s); s.Order.State = "watching" }, "order-unknown", Fail, "",
			".shoal/plan"},
		"given up": {func(s *Snapshot) { starved(s); s.Order.State = "unknown" }, "order-unknown", Fail, "",
			".shoal/plan"},
		"unknown, warm": {func(s *Snapshot) {
			busy(s)
			s.Order.State = "none"
			s.Hits.Keep += s.Hits.Ring
		}, "fed", OK, "", ""},
		"unknown, fast enough": {func(s *Snapshot) { reads(s, 10_000, 3000, 1); s.Order.State = "none" }, "fed", Warn,
			"", "shoal.hint"},
		"another order": {func(s *Snapshot) {
			starved(s)
			s.Streams[0].Strays = 2900
			s.Streams[0].Events.Consumed -= 2900
		}, "order-differs", Fail, "2900 were not", "--order"},
		"moves about": {func(s *Snapshot) {
			starved(s)
			s.Streams[0].Events.Jumps = 9
		}, "order-differs", Fail, "moved 9 times", "--order"},
		"idle": {nil, "idle", Idle, "No reads for 10 s; 4,000 samples can be read", ""},
		"finished": {func(s *Snapshot) { s.Order.State, s.Order.Position = "finished", 100_000 },
			"finished", Idle, "All 100,000 samples of epoch 1", ""},
		"denied": {func(s *Snapshot) {
			busy(s)
			s.StoreErrors["access denied"] = 4
		}, "access-denied", Fail, "4 requests refused", "s3:GetObject"},
		"changed": {func(s *Snapshot) { busy(s); s.StoreErrors["changed"] = 1 }, "dataset-changed", Fail,
			"1 object changed", "shoal refresh"},
		"gone": {func(s *Snapshot) {
			busy(s)
			s.StoreErrors["not found"] = 2
		}, "dataset-changed", Fail, "2 objects", "shoal refresh"},
		"few failures": {func(s *Snapshot) {
			busy(s)
			s.StoreErrors["temporary failure"] = 40
		}, "fed", OK, "", ""},
		"failures": {func(s *Snapshot) { busy(s); s.StoreErrors["temporary failure"] = 603 },
			"store-errors", Warn, "600 of 10,000 requests failed (600 temporary failure)", "--connections"},
		"failures that cost": {func(s *Snapshot) {
			starved(s)
			s.StoreErrors["temporary failure"] = 603
			s.FetchErrors = 2
		}, "store-errors", Fail, "2 prefetches given up", "503"},
		"disk out": {func(s *Snapshot) { busy(s); s.Disk.OutOfUse, s.Disk.Reason = true, "full" },
			"disk-down", Warn, "(full)", "/cache"},
		"disk out, waiting": {func(s *Snapshot) { starved(s); s.Disk.OutOfUse = true }, "disk-down", Fail,
			"", "/cache"},
		"disk slow": {func(s *Snapshot) {
			busy(s)
			s.Disk.GaveUp = 30
		}, "disk-slow", Warn, "30 reads waited too long", "--cache-dir"},
		"disk full for a moment": {func(s *Snapshot) {
			busy(s)
			s.Disk.Errors = 3
		}, "disk-errors", Warn, "3 disk errors", "/cache"},
		"etcd away": {func(s *Snapshot) { busy(s); s.Cluster = inCluster("away", 0) }, "cluster-apart", Warn,
			"the 2 nodes known last. The cause: etcd at", "etcd"},
		"refused": {func(s *Snapshot) { busy(s); s.Cluster = inCluster("refused", 0) }, "cluster-apart", Warn,
			"etcd at", "/cache"},
		"node away": {func(s *Snapshot) {
			busy(s)
			s.Cluster = inCluster("joined", 0)
			s.Cluster.Nodes[1].Asked.State = "away"
		}, "nodes-away", Warn, "b:7073 (refused)", "shoal cluster ls"},
		"node away, waits": {func(s *Snapshot) {
			starved(s)
			s.Cluster = inCluster("joined", 0)
			s.Cluster.Nodes[1].Asked.State = "away"
		}, "nodes-away", Fail, "", "shoal cluster ls"},
		"versions": {func(s *Snapshot) { busy(s); s.Cluster = inCluster("joined", 7) }, "versions-differ", Warn,
			"7 pieces", "shoal refresh"},
		"a sound cluster": {func(s *Snapshot) { busy(s); s.Cluster = inCluster("joined", 0) }, "fed", OK, "", ""},
		"another daemon": {func(s *Snapshot) {
			s.PID = 8
			s.Uptime = 4
			s.Stall = 16
			s.Joined = 5000
		}, "filling", Warn, "50%", ""},
		"all was read": {func(s *Snapshot) {
			s.PID = 8
			s.Uptime = 4
			s.Stall = 16
			s.Joined = 5000
			s.Order.Position = s.Samples
		}, "filling", Warn, "nothing is left to fetch", ""},
		"just born": {func(s *Snapshot) { s.PID = 8; s.Uptime = 0.1 }, "starting", Idle, "", ""},

		"feed idle": {func(s *Snapshot) { session(s, loader.SessionStats{Credit: 10}) }, "idle", Idle,
			"1 open session", ""},
		"trainer slower": {func(s *Snapshot) { session(s, loader.SessionStats{Samples: 5000, Credit: 6, Stall: 0.1}) },
			"trainer-slower", OK, "60% of the time, at 500 samples/s", ""},
		"slots held": {func(s *Snapshot) {
			session(s, loader.SessionStats{Samples: 5000, Slots: 4})
		}, "trainer-slower", OK, "40% of the time", ""},
		"decode": {func(s *Snapshot) {
			session(s, loader.SessionStats{Samples: 5000, Batches: 50, Stall: 5, Decode: 39, Fetch: 0.1})
		}, "decode-bound", Fail, "3.9 workers", "more cores"},
		"decode, beside a mount": {func(s *Snapshot) {
			busy(s)
			session(s, loader.SessionStats{Samples: 5000, Batches: 50, Stall: 8, Decode: 37, Fetch: 4})
		}, "decode-bound", Fail, "sessions wait 80% of the time", "more cores"},
		"link": {func(s *Snapshot) {
			session(s, loader.SessionStats{Samples: 5000, Batches: 50, Bytes: 1 << 30, Stall: 1.5, Decode: 2, Send: 8,
				Fetch: 0.1})
		}, "link-slow", Warn, "80% of the time, at 102 MiB/s", "unix://"},
		"link, in shared memory": {func(s *Snapshot) {
			session(s, loader.SessionStats{Samples: 5000, Batches: 50, InSlots: 50, Stall: 1.5, Decode: 2, Send: 8,
				Fetch: 0.1})
		}, "link-slow", Warn, "80% of the time", "Send uint8"},
		"feed store": {func(s *Snapshot) {
			session(s, loader.SessionStats{Samples: 3000, Stall: 7, Decode: 5, Fetch: 60})
			reads(s, 3000, 2000, 60)
			s.Opens, s.Delivered = base().Opens, s.Delivered-3000 // the feed's reads are no opens
		}, "store-slow", Fail, "It waits 70% of the time", "Pack"},
		"feed memory": {func(s *Snapshot) {
			session(s, loader.SessionStats{Samples: 3000, Stall: 7, Decode: 5, Reserve: 60})
		}, "memory-small", Fail, "", "--memory"},
		"mount and feed": {func(s *Snapshot) {
			session(s, loader.SessionStats{Samples: 3000, Stall: 0.1, Credit: 3, Fetch: 40})
			reads(s, 5000, 10, 41) // of which the feed waited 40 s
		}, "trainer-slower", OK, "30% of the time", ""},
	} {
		t.Run(name, func(t *testing.T) {
			v := Of(base(), later(c.do))
			if v.Code != c.code || v.Level != c.level || !strings.Contains(v.Cause, c.detail) ||
				!strings.Contains(v.Remedy, c.remedy) || c.remedy == "" && v.Remedy != "" {
				t.Errorf("%s, %s: %q, %q, %q\n%+v", v.Code, v.Level, v.Thing, v.Cause, v.Remedy, v.Rates)
			}
			if v.Thing == "" || v.Cause == "" || !strings.HasSuffix(v.Cause, ".") {
				t.Errorf("%q, %q", v.Thing, v.Cause)
			}
		})
	}
}

// What a run was like does not change when it is over: not after a minute, and not after a day.
func TestAfterTheRun(t *testing.T) {
	for name, run := range map[string]func(s *Snapshot){
		"feed": func(s *Snapshot) {
			s.Feed = &loader.Stats{Sessions: 2,
				Total: loader.SessionStats{Age: 120, Samples: 60_000, Batches: 600, Stall: 83, Decode: 240, Fetch: 20}}
			s.Opens, s.Reads = 0, 60_000
			s.Hits = engine.Hits{Keep: 60_000}
		},
		"mount": func(s *Snapshot) { s.Stall, s.ReaderTime = 331, 480 },
	} {
		for _, uptime := range []float64{61, 120, 86_400} {
			s := base()
			s.Readers, s.Uptime = 0, uptime
			run(&s)
			if v := Of(Snapshot{}, s); v.Level != Fail || math.Abs(v.Rates.Stall-0.69) > 0.005 {
				t.Errorf("%s, %g s after the start: %s, %s: %q, %+v", name, uptime, v.Code, v.Level, v.Thing, v.Rates)
			}
		}
	}
}

func TestSilentStore(t *testing.T) {
	before, now := base(), later(func(s *Snapshot) { s.Opens += 8; s.Delivered += 8; s.GetRequests += 8 })
	before.InFlight, now.InFlight, before.Silent, now.Silent = 40, 40, 2, 12
	soon := now
	soon.Uptime = before.Uptime + 1 // as in the first frame of top
	for name, v := range map[string]Verdict{"window": Of(before, now), "second": Of(before, soon),
		"since the start": Of(Snapshot{}, now)} {
		if v.Code != "store-silent" || v.Level != Fail ||
			!strings.Contains(v.Cause, "40 requests to the store in flight, and no answer for 12 s") {
			t.Errorf("%s: %+v", name, v.Finding)
		}
	}
	// Requests that were not yet out long enough say nothing.
	now.Silent = 2
	if v := Of(before, now); v.Code == "store-silent" {
		t.Errorf("%+v", v.Finding)
	}
}

// What is not the verdict is a note, and causes of waiting exclude each other.
func TestNotes(t *testing.T) {
	v := Of(base(), later(func(s *Snapshot) {
		reads(s, 3000, 1500, 40)
		s.StoreErrors["access denied"] = 4
		s.Disk.OutOfUse = true
		s.InFlight, s.Memory.Used = 8, 390<<20
	}))
	var codes []string
	for _, n := range v.Notes {
		codes = append(codes, n.Code)
	}
	if v.Code != "access-denied" || !slices.Equal(codes, []string{"disk-down", "memory-small"}) &&
		!slices.Equal(codes, []string{"store-errors", "disk-down", "memory-small"}) {
		t.Errorf("%s, %v", v.Code, codes)
	}
}

func TestRates(t *testing.T) {
	r := Of(base(), later(func(s *Snapshot) { reads(s, 4000, 1000, 20) })).Rates
	want := Rates{Seconds: 10, Samples: 400, Requests: 400, Bytes: 400 * 80_000, Stall: 0.25,
		Hits: Areas{Ring: 0.75, Joined: 0.1875, Missed: 0.0625}, Lead: 4000, LeadSeconds: 4}
	if r != want {
		t.Errorf("%+v, want %+v", r, want)
	}
}

// codes are all that a Finding can have (docs/dashboard.md).
var codes = []string{
	"starting", "store-silent", "budget-spent", "access-denied", "dataset-changed", "store-errors", "disk-down",
	"disk-slow", "disk-errors", "cluster-apart", "nodes-away", "versions-differ",
	"order-differs", "order-unknown", "memory-small", "filling", "decode-bound", "link-slow", "store-slow",
	"finished", "slots-held", "idle", "trainer-slower", "fed",
}

// Whatever a daemon says, the verdict is one of those that are documented, and its rates are what they claim.
func TestAnySnapshots(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 2_000 {
		before, now := base(), later(nil)
		now.Feed, before.Feed = &loader.Stats{}, &loader.Stats{}
		scramble(rng, reflect.ValueOf(&now.Stats).Elem())
		scramble(rng, reflect.ValueOf(&now.Feed.Total).Elem())
		now.Feed.Open = rng.IntN(3)
		now.Order.State = []string{"none", "waiting", "following", "finished", "searching", "inferred"}[rng.IntN(6)]
		if rng.IntN(4) == 0 {
			before = Snapshot{}
		}
		v := Of(before, now)
		if !slices.Contains(codes, v.Code) || v.Thing == "" || v.Level == "" {
			t.Fatalf("%+v", v.Finding)
		}
		for _, x := range []float64{v.Rates.Stall, v.Rates.Spare} {
			if math.IsNaN(x) || x < 0 || x > 1 {
				t.Fatalf("%+v", v.Rates)
			}
		}
		if _, err := json.Marshal(v); err != nil {
			t.Fatal(err)
		}
	}
}

// scramble changes numbers of a struct, one in three.
func scramble(rng *rand.Rand, v reflect.Value) {
	for i := range v.NumField() {
		f := v.Field(i)
		if f.Kind() == reflect.Struct && f.CanSet() && f.Type() != reflect.TypeFor[time.Time]() {
			scramble(rng, f)
			continue
		}
		if rng.IntN(3) > 0 || !f.CanSet() {
			continue
		}
		switch f.Kind() {
		case reflect.Int, reflect.Int64:
			f.SetInt(f.Int() + rng.Int64N(1<<uint(rng.IntN(30)+1)) - 10)
		case reflect.Float64:
			f.SetFloat(f.Float() + rng.ExpFloat64()*20)
		case reflect.Bool:
			f.SetBool(!f.Bool())
		}
	}
}

func TestExplain(t *testing.T) {
	at := time.Unix(1000, 0)
	events := []engine.ErrorEvent{
		{Time: at, Level: "WARN", Text: "a stream ended; cause: x (y)", Count: 1},
		{Time: at, Level: "WARN",
			Text: "the disk is out of use; cause: read /a: no space; remedy: free space (much); later: more", Count: 2},
		{Time: at, Level: "ERROR",
			Text: "cannot read s3://b/k: 403 (the credentials need s3:GetObject (and more))", Count: 3},
		{Time: at, Level: "ERROR", Text: "unbalanced)", Count: 1},
		{Time: at, Level: "ERROR", Text: "(all of it is in brackets)", Count: 1},
	}
	want := [][2]string{
		{"(all of it is in brackets)", ""},
		{"unbalanced)", ""},
		{"cannot read s3://b/k: 403", "the credentials need s3:GetObject (and more)"},
		{"the disk is out of use; cause: read /a: no space", "free space (much); later: more"},
		{"a stream ended; cause: x (y)", ""},
	}
	got := Explain(events)
	for i, w := range want {
		if got[i].Text != w[0] || got[i].Remedy != w[1] {
			t.Errorf("%d: %q, %q", i, got[i].Text, got[i].Remedy)
		}
	}
	if got[2].Count != 3 || len(got) != len(want) {
		t.Errorf("%+v", got)
	}
}
