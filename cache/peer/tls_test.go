package peer

import (
	"crypto/tls"
	"testing"

	"github.com/shoalfs/shoal/lab/rig/synced"
)

func newBedTLS(t testing.TB, s *shelf, server, client *tls.Config) *bed {
	t.Helper()
	b := &bed{shelf: s, log: &synced.Buffer{}}
	b.server = NewServer(ServerConfig{Self: "node-b", Version: "v0", Serving: s, Memory: 32 << 20, TLS: server, Log: quiet(b.log)})
	l := listen(t)
	done := make(chan error, 1)
	go func() { done <- b.server.Listen(l) }()
	b.client = NewClient(ClientConfig{TLS: client, Log: quiet(b.log)})
	b.node = Node{ID: "node-b", Address: l.Addr().String()}
	t.Cleanup(func() {
		b.client.Close()
		b.server.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if st := b.server.Stats(); st.InFlight != 0 || st.Memory != 0 || st.Connections != 0 || s.lent.Load() != 0 || s.open.Load() != 0 {
			t.Errorf("left: %+v, %d lent, %d open", st, s.lent.Load(), s.open.Load())
		}
	})
	return b
}
