package cluster

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/synced"
	"log/slog"
)

var quick = pace{lease: time.Second, beat: 50 * time.Millisecond, answer: 300 * time.Millisecond, quiet: 150 * time.Millisecond, gather: 800 * time.Millisecond}

func TestSmoke(t *testing.T) {
	ctx := context.Background()
	s, err := etcd.Start(ctx, false)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var log synced.Buffer
	defer func() { t.Log(log.String()) }()
	var cs []*Cluster
	for i := range 3 {
		c, err := join(Options{URL: "etcd://" + s.Addr + "/test", Self: Node{ID: fmt.Sprintf("%016x", i), Address: fmt.Sprint("x:", i), Weight: 1}, Log: slog.New(slog.NewTextHandler(&log, nil))}, quick)
		if err != nil {
			t.Fatal(err)
		}
		cs = append(cs, c)
	}
	for _, c := range cs {
		qctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		if err := c.Quiet(qctx); err != nil {
			t.Fatal(err)
		}
		cancel()
		t.Log(c.View(), c.State())
	}
	held, unlock, err := cs[0].Lock(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	if err := cs[0].Publish(held, "v", []byte("1")); err != nil {
		t.Fatal(err)
	}
	unlock()
	_, unlock, err = cs[1].Lock(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	if err := cs[0].Publish(held, "v", []byte("1")); err == nil {
		t.Error("published without the lock")
	} else {
		t.Log(err)
	}
	unlock()
	v, err := cs[2].Published(ctx, "v")
	t.Log(string(v), err)
	for i := range 2 {
		v, err := cs[i].Create(ctx, "r", []byte{'a' + byte(i)})
		t.Log(string(v), err)
	}
	t.Log(cs[0].Drain(ctx, cs[1].o.Self.ID))
	ch := cs[2].Changed()
	<-ch
	t.Log(cs[2].View())
	began := time.Now()
	ch = cs[0].Changed()
	cs[2].Close()
	t.Log("closed in", time.Since(began))
	<-ch
	t.Log(cs[0].View(), time.Since(began))
	s.Stop()
	time.Sleep(2 * time.Second)
	t.Log(cs[0].State())
	s.Restart(ctx, true)
	time.Sleep(1 * time.Second)
	t.Log(cs[0].State(), cs[0].View())
	cs[0].Close()
	cs[1].Close()
}
