package cluster

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// etcdOf is c's connection, which may be the one after a lease that has ended.
func etcdOf(t *testing.T, c *Cluster) (s *session) {
	t.Helper()
	eventually(t, "a session", func() bool { s = c.session.Load(); return s != nil })
	return s
}

// The node that makes the batches hangs: another makes them when its lease has ended. When it is back it is a node like
// others.
func TestLeadHangs(t *testing.T) {
	s := server(t)
	p := process(t, where(s))
	eventually(t, "the lock", func() bool { return p.out.String() == "locked\n" })
	first, _ := joinAs(t, Options{URL: where(s), Self: node(1)})
	see(t, first, node(1).ID, node(9).ID)
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	c, _ := joinAs(t, Options{URL: where(s), Self: node(2)})
	looker, _ := joinAs(t, Options{URL: where(s)})
	for _, c := range []*Cluster{first, c, looker} {
		see(t, c, ids(2)...)
	}
	if err := p.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for _, c := range []*Cluster{first, c, looker} {
		see(t, c, node(1).ID, node(2).ID, node(9).ID)
	}
	_ = first.Close() // also when the next one leaves
	see(t, c, node(2).ID, node(9).ID)
	// Nodes of the release before read the list when this key has another value.
	c.Open("d")
	eventually(t, "the dataset", func() bool { return looker.View().Nodes[0].Has("d") })
	for _, key := range []string{"last", "written"} {
		if got, err := etcdOf(t, looker).Get(t.Context(), c.key(key, "")); err != nil ||
			toldBy(string(got.Kvs[0].Value)) == 0 {
			t.Error(key, got, err)
		}
	}
}

// What was written while a node was cut off is compacted when it is back, and so is what its list was read at.
func TestWatchCompacted(t *testing.T) {
	s := server(t)
	patient := quick
	patient.lease = usual.lease // it stays what it is
	relay := newRelay(t, s.Addr)
	c, _ := joinAt(t, Options{URL: "etcd://" + relay.Addr().String() + "/test", Self: node(3)}, patient)
	see(t, c, node(3).ID)
	var cs []*Cluster
	for i := range 2 {
		c, _ := joinAs(t, Options{URL: where(s), Self: node(i + 1)})
		cs = append(cs, c)
	}
	for _, c := range append(cs, c) {
		see(t, c, ids(3)...)
	}
	relay.cut(true)
	relay.drop()
	session := etcdOf(t, c)
	for _, d := range []string{"d", "e", "f"} {
		cs[0].Open(d)
		eventually(t, "it is written", func() bool {
			got, err := etcdOf(t, cs[1]).Get(t.Context(), cs[0].key("nodes/", node(1).ID))
			return err == nil && len(got.Kvs) > 0 && nodeOf(got.Kvs[0]).Has(d)
		})
	}
	got, err := etcdOf(t, cs[1]).Get(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := etcdOf(t, cs[1]).Compact(t.Context(), got.Header.Revision); err != nil {
		t.Fatal(err)
	}
	relay.cut(false)
	for _, c := range append(cs, c) {
		eventually(t, "the datasets", func() bool {
			return slices.Equal(c.View().Nodes[0].Open, []string{"d", "e", "f"})
		})
	}
	if c.session.Load() != session {
		t.Error("its session has ended")
	}
}

// etcd is restored from an older copy: what was written since is written again by whom it was, and what only the copy
// has ends with its lease.
func TestEtcdTurnedBack(t *testing.T) {
	s := server(t)
	cs := nodes(t, s, 2)
	gone, _ := joinAs(t, Options{URL: where(s), Self: node(4)})
	for _, c := range append(cs, gone) {
		see(t, c, node(1).ID, node(2).ID, node(4).ID)
	}
	publish(t, cs[0], t.Context(), "k", []byte("old"))
	restore, err := s.Save(within(t, patience))
	if err != nil {
		t.Fatal(err)
	}
	seen := make(chan string, 100)
	last := ""
	go cs[1].WatchPublished(t.Context(), "k", func(v []byte) { // which may come twice
		if last != string(v) {
			last = string(v)
			seen <- last
		}
	})
	if v := <-seen; v != "old" {
		t.Fatal(v)
	}
	_ = gone.Close()
	c, _ := joinAs(t, Options{URL: where(s), Self: node(3)})
	cs = append(cs, c)
	cs[0].Open("d")
	all := func() {
		t.Helper()
		for _, c := range cs {
			see(t, c, ids(3)...)
			eventually(t, "the dataset", func() bool { return c.View().Nodes[0].Has("d") })
		}
	}
	all()
	publish(t, cs[0], t.Context(), "k", []byte("new"))
	if v := <-seen; v != "new" {
		t.Fatal(v)
	}
	if err := restore(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	if v := <-seen; v != "old" {
		t.Fatal(v)
	}
	eventually(t, "all are in etcd as they are", func() bool {
		s := cs[1].session.Load()
		if s == nil {
			return false
		}
		for i := range 5 {
			got, err := s.Get(t.Context(), s.c.key("nodes/", node(i).ID))
			if err != nil || (len(got.Kvs) > 0) != slices.Contains(ids(3), node(i).ID) ||
				i == 1 && !nodeOf(got.Kvs[0]).Has("d") {
				return false
			}
		}
		return true
	})
	all()
	cs[1].Open("e") // and all hear what is new
	for _, c := range cs {
		eventually(t, "the dataset", func() bool { return c.View().Nodes[1].Has("e") })
	}
}

// A lock that a copy of etcd's data has, and that was let go of since, does not outlive a restore from it.
func TestEtcdTurnedBackToALock(t *testing.T) {
	s := server(t)
	cs := nodes(t, s, 2)
	lock := func(c *Cluster) (unlock func()) {
		t.Helper()
		answered(t, func() (err error) { _, unlock, err = c.Lock(within(t, patience), "l"); return err })
		if unlock == nil {
			t.Fatal(c.o.Self.ID, " cannot have the lock")
		}
		return unlock
	}
	unlock := lock(cs[0])
	restore, err := s.Save(within(t, patience))
	if err != nil {
		t.Fatal(err)
	}
	unlock()
	lock(cs[1])()
	const later = 200 // more than is written anew after the restore: by then the revision shows it
	for i := range later {
		publish(t, cs[1], t.Context(), "k", fmt.Appendf(nil, "later%d.", i))
	}
	for _, c := range cs {
		eventually(t, "a later revision", func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			return strings.Contains(c.last, fmt.Sprintf("later%d.", later-1))
		})
	}
	if err := restore(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	for _, c := range cs {
		lock(c)()
	}
}
