package engine

import "testing"

// auto recodes once feeds have decoded much more than was read as it came, and keeps what is restored once it is less.
func TestRecodes(t *testing.T) {
	for _, c := range []struct {
		mode           string
		files, decoded int64
		want, plain    bool
	}{
		{"auto", 0, 0, false, false}, {"auto", 10, 0, false, true},
		{"auto", 5, 0, false, false}, {"auto", 10, 9, false, false},
		{"auto", 10, 4, false, true},
		{"auto", 10, 10, false, false}, {"auto", 10, 29, false, false}, {"auto", 10, 30, true, false},
		{"auto", 0, 1, true, false}, {"on", 10, 0, true, false}, {"off", 0, 10, false, false},
		{"off", 10, 0, false, true}, {"", 0, 10, false, false},
	} {
		e := &Engine{}
		e.recoding.join(c.mode)
		e.recoding.asFiles.Store(c.files)
		e.recoding.decoded.Store(c.decoded)
		if e.recodes() {
			t.Errorf("%+v: without a codec", c)
		}
		e.recoding.Coder = fakeCoder{}
		if got := e.recodes(); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
		e.recoding.judge(5)
		if got := e.recoding.KeepRestored(); got != c.plain {
			t.Errorf("%+v: keeps what is restored: %v", c, got)
		}
		if sum := e.recoding.asFiles.Load() + e.recoding.decoded.Load(); sum > 20 || sum < min(10, c.files+c.decoded) {
			t.Errorf("%+v: %d remembered", c, sum)
		}
	}
}

// Who says no mode, like a warm-up, or leaves it to shoal, agrees with all.
func TestRecodeJoin(t *testing.T) {
	var r recoding
	for _, c := range []struct {
		mode string
		ok   bool
	}{{"", true}, {"on", true}, {"", true}, {"auto", true}, {"on", true}, {"off", false}} {
		if r.join(c.mode) != c.ok {
			t.Errorf("%+v", c)
		}
	}
}

type fakeCoder struct{ Coder }
