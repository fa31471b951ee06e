package loader

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shoalfs/shoal/lab/rig/synced"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// A client that takes its time to get hold of all its slots is reported as one that has them at once.
func TestSlotWarningComesLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log synced.Buffer
		srv := NewServer(func() Dataset {
			return nil
		}, Options{Readers: 1, Log: slog.New(slog.NewTextHandler(&log, nil))})
		defer srv.Close()
		mem, err := newSlotMemory(1, slotBytes(100))
		if err != nil {
			t.Fatal(err)
		}
		p := srv.newPass(passKey{}, false, mem)
		ctx, cancel := context.WithCancelCause(t.Context())
		s := &session{srv: srv, spec: &spec{batch: 1, world: 1}, window: newWindow(1, 1), pass: p, ctx: ctx,
			cancel: cancel}
		srv.passMu.Lock()
		s.lease = p.lease(1, s)
		srv.passMu.Unlock()
		claim := func(cursor int) (*batch, error) {
			at := place{0, cursor}
			return p.claim(ctx, s, &batch{by: s, at: at, source: &source{at: at}, ctx: ctx,
				header: &feedpb.BatchHeader{}}, 100)
		}
		first, err := claim(0)
		if err != nil {
			t.Fatal(err)
		}
		p.completed(first)
		go func() { _, _ = claim(1) }() // ends with the context
		time.Sleep(2 * slotWarning)     // the batch is not delivered yet
		s.lease.give(first)
		s.window.grant(1)
		p.poke()
		time.Sleep(2 * slotWarning)
		if n := strings.Count(log.String(), "holds all its slots"); n != 1 {
			t.Errorf("%d warnings:\n%s", n, log.String())
		}
		cancel(nil)
		synctest.Wait()
		if err := p.leave(s.lease); err != nil {
			t.Error(err)
		}
	})
}
