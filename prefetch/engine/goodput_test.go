package engine

import (
	"math"
	"testing"
	"time"
)

func TestGoodput(t *testing.T) {
	var g goodput
	start := time.Unix(1000, 0)
	check := func(after time.Duration, n int64, want float64) {
		t.Helper()
		gotN, got := g.rate(start.Add(after))
		if gotN != n || math.Abs(got-want) > 1e-9 {
			t.Errorf("after %v: %d samples, %v a second; want %d, %v", after, gotN, got, n, want)
		}
	}
	check(0, 0, 0)
	g.delivered.Add(100)
	check(0, 100, 0) // in no time
	check(500*time.Millisecond, 100, 200)
	check(2*time.Second, 100, 50) // asking in between has changed nothing
	for s := 3; s <= 300; s++ {
		g.delivered.Add(10)
		g.rate(start.Add(time.Duration(s) * time.Second))
	}
	check(300*time.Second, 100+298*10, 10)
	if n := len(g.marks); n > int(goodputWindow/goodputStep)+2 {
		t.Errorf("%d marks are kept", n)
	}
	check(3900*time.Second, 100+298*10, 600./(3600+60)) // since somebody last asked, and what the window held then
	check(3960*time.Second, 100+298*10, 0)
}
