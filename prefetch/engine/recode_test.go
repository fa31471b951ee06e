package engine

import "testing"

// auto recodes once feeds have decoded more than was read as files.
func TestRecodes(t *testing.T) {
	for _, c := range []struct {
		mode           string
		files, decoded int64
		want           bool
	}{
		{"auto", 0, 0, false}, {"auto", 10, 0, false}, {"auto", 10, 9, false}, {"auto", 10, 10, true},
		{"auto", 0, 1, true},
		{"on", 10, 0, true}, {"off", 0, 10, false}, {"", 0, 10, false},
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
