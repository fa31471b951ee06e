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
