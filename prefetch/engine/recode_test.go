package engine

import "testing"

// auto recodes once feeds have decoded more than was read as files.
func TestRecodes(t *testing.T) {
	for _, c := range []struct {
		mode           string
		files, decoded int64
		want           bool
	}{
		{"auto", 0, 0, false}, {"auto", 10, 0, false}, {"auto", 10, 9, false}, {"auto", 10, 10, true}, {"auto", 0, 1, true},
		{"on", 10, 0, true}, {"off", 0, 10, false}, {"", 0, 10, false},
	} {
		e := &Engine{cfg: Config{Recode: c.mode}}
		e.recoding.asFiles.Store(c.files)
		e.recoding.decoded.Store(c.decoded)
		if e.recodes() {
			t.Errorf("%+v: without a codec", c)
		}
		e.recoding.coder = fakeCoder{}
		if got := e.recodes(); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

type fakeCoder struct{ Coder }
