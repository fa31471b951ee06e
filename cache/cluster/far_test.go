package cluster

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/etcd"
)

// far puts a server away by a round trip: what is sent either way arrives half of it later. It returns where it then
// is.
func far(t *testing.T, s *etcd.Server, trip time.Duration) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup // each ends when the connection does
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	type packet struct {
		at time.Time
		p  []byte
	}
	carry := func(to, from net.Conn, connects time.Duration) {
		way := make(chan packet, 1<<16)
		all.Go(func() {
			defer close(way)
			for {
				p := make([]byte, 32<<10)
				n, err := from.Read(p)
				if err != nil {
					return
				}
				way <- packet{time.Now().Add(trip/2 + connects), p[:n]}
				connects = 0
			}
		})
		for x := range way {
			time.Sleep(time.Until(x.at))
			if _, err := to.Write(x.p); err != nil {
				break
			}
		}
		_, _ = to.Close(), from.Close()
	}
	all.Go(func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp", s.Addr)
			if err != nil {
				_ = a.Close()
				continue
			}
			all.Go(func() { carry(b, a, trip) }) // the connection itself takes one, too
			all.Go(func() { carry(a, b, 0) })
		}
	})
	return l.Addr().String()
}

// Nodes join an etcd that is far away, at the usual pace, and stay; what they say of themselves arrives, and locks are
// held.
func TestFar(t *testing.T) {
	for _, trip := range []time.Duration{500 * time.Millisecond, time.Second} {
		t.Run(trip.String(), func(t *testing.T) {
			s := server(t)
			at := "etcd://" + far(t, s, trip) + "/test"
			var cs []*Cluster
			var logs []fmt.Stringer
			for i := range 3 {
				c, log := joinAt(t, Options{URL: at, Self: node(i + 1)}, usual)
				cs, logs = append(cs, c), append(logs, log)
			}
			for _, c := range cs {
				if err := c.Quiet(within(t, patience)); err != nil {
					t.Fatal(err)
				}
				see(t, c, ids(3)...)
			}
			same := unchanged(t, cs)
			held, unlock, err := cs[0].Lock(t.Context(), "l")
			if err != nil {
				t.Fatal(err)
			}
			publish(t, cs[0], held, "k", []byte("v"))
			if v, err := cs[1].Published(t.Context(), "k"); err != nil || string(v) != "v" {
				t.Errorf("%q, %v", v, err)
			}
			time.Sleep(usual.lease + usual.quiet) // it is renewed all the while
			same()
			if held.Err() != nil {
				t.Error("the lock was lost:", context.Cause(held))
			}
			unlock()
			for i := range 2 { // each beat has all that one may have
				cs[2].Open(fmt.Sprint(i))
				eventually(t, "the dataset", func() bool { return cs[1].View().Nodes[2].Has(fmt.Sprint(i)) })
			}
			for _, log := range logs {
				_, joined, _ := strings.Cut(log.String(), "joined the cluster")
				// a busy machine may need a second try
				if strings.Contains(joined, "WARN") || trip < time.Second && strings.Contains(log.String(), "WARN") {
					t.Error(log)
				}
			}
		})
	}
}
