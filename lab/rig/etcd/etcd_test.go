package etcd

import (
	"context"
	"testing"
	"time"

	v3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// Data outlives a stop and a freeze, and not a start without it; a frozen one does not answer.
func TestServer(t *testing.T) {
	if _, err := FindBinary(); err != nil {
		t.Skip(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := Start(ctx, false)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	client, err := v3.New(v3.Config{Endpoints: []string{s.Addr}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.Put(ctx, "k", "v"); err != nil {
		t.Fatal(err)
	}
	holds := func(want int64) {
		t.Helper()
		if got, err := client.Get(ctx, "k"); err != nil || got.Count != want {
			t.Errorf("%v %v", got, err)
		}
	}
	if err := s.Freeze(); err != nil {
		t.Fatal(err)
	}
	soon, stop := context.WithTimeout(ctx, 300*time.Millisecond)
	defer stop()
	if _, err := client.Get(soon, "k"); err == nil {
		t.Error("a frozen one answers")
	}
	if err := s.Thaw(); err != nil {
		t.Fatal(err)
	}
	holds(1)
	s.Stop()
	if err := s.Restart(ctx, false); err != nil {
		t.Fatal(err)
	}
	holds(1)
	if err := s.Restart(ctx, true); err != nil {
		t.Fatal(err)
	}
	holds(0)
}
