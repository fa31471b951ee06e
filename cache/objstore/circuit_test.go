package objstore_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

func TestCircuit(t *testing.T) {
	clock := time.Unix(0, 0)
	said := ""
	c := objstore.NewCircuit(func() time.Time { return clock }, func(cause error) {
		if said += "closed "; cause != nil {
			said = strings.TrimSuffix(said, "closed ") + "open "
		}
	})
	failed := errors.New("x")
	step := func(after time.Duration, probe, ok bool) {
		t.Helper()
		clock = clock.Add(after)
		if p, o := c.Enter(); p != probe || o != ok {
			t.Fatalf("at %v: probe %v, ok %v", clock.Sub(time.Unix(0, 0)), p, o)
		}
	}
	step(0, false, true)
	step(0, false, true)
	c.Leave(false, failed)
	c.Leave(false, failed) // began before: not counted twice
	c.Leave(false, nil)
	step(999*time.Millisecond, false, false)
	pause := time.Second
	clock = clock.Add(-999 * time.Millisecond)
	for range 9 {
		step(pause, true, true)
		step(0, false, false) // one tries
		c.Leave(true, failed)
		pause = min(2*pause, time.Minute)
		step(pause-1, false, false)
		clock = clock.Add(1 - pause)
	}
	step(pause, true, true)
	c.Withdraw(true) // it said nothing, so another tries at once
	step(0, true, true)
	c.Leave(true, nil)
	step(0, false, true)
	c.Leave(false, failed)
	step(time.Second, true, true)
	if said != "open closed open " || !c.IsOpen() || c.Ready() {
		t.Error(said)
	}
}
