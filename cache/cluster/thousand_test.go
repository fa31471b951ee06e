package cluster

import (
	"bufio"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/etcd"
)

// etcdUse is what etcd has done since its start, as its own metrics say.
type etcdUse struct{ bytes, cpu float64 }

func useOf(t *testing.T, s *etcd.Server) (u etcdUse) {
	t.Helper()
	answer, err := http.Get("http://" + s.Addr + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), " ")
		v, _ := strconv.ParseFloat(value, 64)
		switch name {
		case "etcd_network_client_grpc_sent_bytes_total", "etcd_network_client_grpc_received_bytes_total":
			u.bytes += v
		case "process_cpu_seconds_total":
			u.cpu += v
		}
	}
	return u
}

// TestManyNodes is what nodes cost etcd: at rest, when one more joins, and when all change at once. SHOAL_NODES=1000 is
// the size of lab/bench/results/membership.md.
func TestManyNodes(t *testing.T) {
	n := 100
	if s := os.Getenv("SHOAL_NODES"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	s := server(t)
	var cs []*Cluster
	t.Cleanup(func() { // without etcd, so that not each sees all others leave
		s.Stop()
		var left sync.WaitGroup
		for _, c := range cs {
			left.Go(func() { _ = c.Close() })
		}
		left.Wait()
	})
	start := func(i int) {
		self := Node{ID: fmt.Sprintf("%016x", uint64(i+1)*0x9e3779b97f4a7c15), Version: "0.1.0", Weight: 1 << 20,
			Address: fmt.Sprintf("10.1.%d.%d:7073", i/250, i%250)}
		c, err := Join(Options{URL: where(s), Self: self})
		if err != nil {
			t.Fatal(err)
		}
		cs = append(cs, c)
	}
	all := func(what string, ok func(View) bool) {
		t.Helper()
		for end := time.Now().Add(5 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
			if !slices.ContainsFunc(cs, func(c *Cluster) bool { return !ok(c.View()) }) {
				return
			}
			if time.Now().After(end) {
				t.Fatal("does not come: " + what)
			}
		}
	}
	// cost is what it took until all have seen it.
	cost := func(what string, do func(), ok func(View) bool) (bytes float64, took time.Duration) {
		t.Helper()
		before, began := useOf(t, s), time.Now()
		do()
		all(what, ok)
		took = time.Since(began)
		after := useOf(t, s)
		bytes = after.bytes - before.bytes
		t.Logf("%d nodes, %s: %.2f MB, %.2f s of etcd's CPU time, after %v",
			n, what, bytes/1e6, after.cpu-before.cpu, took.Round(10*time.Millisecond))
		return bytes, took
	}
	there := func(n int) func(View) bool { return func(v View) bool { return len(v.Nodes) == n } }
	cost("all join", func() {
		for i := range n { // this one process is all of them
			start(i)
			if i%25 == 24 {
				for cs[i].State().Phase != Joined {
					time.Sleep(10 * time.Millisecond)
				}
			}
		}
	}, there(n))
	rests := time.Now()
	before := useOf(t, s)
	time.Sleep(time.Duration(5+n/100) * time.Second) // what is measured is rest
	after := useOf(t, s)
	rested := time.Since(rests).Seconds()
	core := (after.cpu - before.cpu) / rested
	t.Logf("%d nodes at rest: %.3f of a core, %.2f MB/s", n, core, (after.bytes-before.bytes)/1e6/rested)
	joined, took := cost("one joins", func() { start(n) }, there(n+1))
	changed, _ := cost("all change", func() {
		for _, c := range cs {
			c.Open("0123456789abcdef0123456789abcdef")
		}
	}, func(v View) bool {
		return !slices.ContainsFunc(v.Nodes, func(n Node) bool { return !n.Has("0123456789abcdef0123456789abcdef") })
	})
	if joined > 30e6 || changed > 30e6 {
		t.Errorf("a join costs %.1f MB and a change of all %.1f MB", joined/1e6, changed/1e6)
	}
	if os.Getenv("SHOAL_NODES") != "" && (core > 0.1 || took > 2*time.Second) { // on a machine with little else to do
		t.Errorf("%.3f of a core at rest, and a join is seen after %v", core, took)
	}
}
