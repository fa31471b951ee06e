package peer

import (
	"testing"

	"github.com/shoalfs/shoal/lab/rig/synced"
)

// A server that has as many connections as it may makes room by what has been idle longest, and no client notices. If
// none is idle, a read gets nothing, and the peer is asked again.
func TestTooManyConnections(t *testing.T) {
	s := newShelf(1)
	b := newBed(t, s)
	b.server.mu.Lock()
	b.server.most = 2
	b.server.mu.Unlock()
	read := func(c *Client, file int) int {
		pieces := want(100, file)
		c.Read(t.Context(), b.node, Request{Dataset: dataset, Version: version}, pieces)
		return filled(t, pieces)
	}
	var clients []*Client
	for range 4 {
		c := newPatient(ClientConfig{Log: quiet(&synced.Buffer{})})
		defer c.Close()
		clients = append(clients, c)
	}
	for range 3 { // each client keeps a connection, of which there may be two
		for _, c := range clients { // the server may still be about to note that an answer is sent
			until(t, "a connection", func() bool { return read(c, 1) == 1 })
		}
	}
	if n := b.server.Stats().Connections; n != 2 {
		t.Errorf("%d connections", n)
	}
	s.Lock()
	s.gate = make(chan struct{})
	s.Unlock()
	got := make(chan int)
	for _, c := range clients[:2] {
		go func() {
			n := 0
			for n == 0 {
				n = read(c, 2)
			}
			got <- n
		}()
	}
	refused := 0 // in a row: the two may have to try again
	until(t, "there is no connection left", func() bool {
		if refused++; read(clients[2], 1) != 0 {
			refused = 0
		}
		return refused == 20
	})
	if st := clients[2].Stats()[0]; st.State != "on" || st.No["busy"] < 20 || st.Errors != 0 {
		t.Errorf("%+v", st)
	}
	close(s.gate)
	if <-got+<-got != 2 {
		t.Error("those that were served got nothing")
	}
	until(t, "it is asked again", func() bool { return read(clients[2], 1) == 1 })
}

// Of many peers one connection each is kept idle, and of few as many as there were requests.
func TestIdleConnections(t *testing.T) {
	b := newBed(t, newShelf(1))
	r := b.client.remote(b.node)
	idle := func() int {
		for range 4 {
			c, err := r.dial(t.Context(), longest)
			if err != nil {
				t.Fatal(err)
			}
			r.putIdle(c)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.idle)
	}
	if n := idle(); n != 4 {
		t.Errorf("%d are idle", n)
	}
	r.drain()
	for i := range 2 * allPlaces {
		b.client.remote(Node{ID: string(rune('a' + i)), Address: b.node.Address})
	}
	if n := idle(); n != 1 {
		t.Errorf("of many peers %d are idle", n)
	}
}
