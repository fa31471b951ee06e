package engine

import (
	"io"
	"log/slog"
	"slices"
	"testing"
)

// What is over is not among the errors any more.
func TestErrorsThatAreOver(t *testing.T) {
	r := &errorRing{next: slog.NewTextHandler(io.Discard, nil)}
	log := slog.New(r)
	log.Error("disk tier dropped", "dir", "/a")
	log.Warn("disk tier is still out of use")
	log.Warn("another")
	log.Info("ready")
	log.Warn("disk tier in use again", "over", "disk tier")
	var got []string
	for _, e := range r.snapshot() {
		got = append(got, e.Text)
	}
	if !slices.Equal(got, []string{"another"}) {
		t.Errorf("%q", got)
	}
}

// A derived logger's events are among the others, by their message.
func TestErrorsOfDerivedLoggers(t *testing.T) {
	r := &errorRing{next: slog.NewTextHandler(io.Discard, nil)}
	log := slog.New(r).With("cluster", "a")
	log.Warn("etcd is away", "cause", "b")
	log.WithGroup("c").With("d", 1).Error("etcd is away")
	slog.New(r).Error("another", "cause", "e")
	got := r.snapshot()
	if len(got) != 2 || got[0].Text != "etcd is away" || got[0].Count != 2 || got[1].Text != "another; cause: e" {
		t.Errorf("%+v", got)
	}
}
