package objstore_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

func TestFaultActions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		m := memstore.New()
		data := []byte("0123456789")
		o := m.PutBytes("d/k.jpg", data)
		read := func(script string) ([]byte, error) {
			p := make([]byte, 10)
			err := Fault(t, m, script).ReadAt(ctx, o, p, 0)
			return p, err
		}
		for action, kind := range map[string]objstore.Kind{
			"503": objstore.KindTransient, "reset": objstore.KindTransient, "truncate": objstore.KindTransient,
			"stall 3s": objstore.KindTransient, "changed": objstore.KindChanged, "notfound": objstore.KindNotFound,
			"denied": objstore.KindDenied,
		} {
			if _, err := read("read *.jpg 1 " + action); err == nil || objstore.KindOf(err) != kind {
				t.Errorf("%s: %v", action, err)
			}
		}
		start := time.Now()
		if p, err := read("read * 1 slow 3s"); err != nil || !bytes.Equal(p, data) ||
			time.Since(start) != 3*time.Second {
			t.Errorf("slow: %q, %v after %v", p, err, time.Since(start))
		}
		p, err := read("read * 1 flip")
		differing := 0
		for i := range p {
			if p[i] != data[i] {
				differing++
			}
		}
		if err != nil || differing != 1 {
			t.Errorf("flip: %q, %v", p, err)
		}
		ctx2, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		if err := Fault(t, m, "read * 1 stall").ReadAt(ctx2, o, make([]byte, 10), 0); !errors.Is(err,
			context.DeadlineExceeded) {
			t.Errorf("stall: %v", err)
		}
		if p, err := read("stat * all denied\nlist * all denied\nread *.png all denied"); err != nil ||
			!bytes.Equal(p, data) {
			t.Errorf("rules for others: %v", err)
		}
	})
}

// TestFaultCounts: requests are counted for each key, or over all with total.
func TestFaultCounts(t *testing.T) {
	m := memstore.New()
	a, b := m.PutBytes("a", []byte("x")), m.PutBytes("b", []byte("x"))
	for _, c := range []struct{ script, want string }{
		{"read * 2 503", "..xx..."}, // a b a b a b a
		{"read * total:2 503", ".x....."},
		{"read * 2-3 503", "..xxxx."},
		{"read a 2- 503", "..x.x.x"},
		{"read a 1 503\nread * total:2 503", "xx....."},
		{"read a 1 503\nread a 2 reset\nread a 1-2 changed", "x.x...."},
	} {
		f := Fault(t, m, c.script)
		got := ""
		for i := range 7 {
			o := a
			if i%2 == 1 {
				o = b
			}
			if err := f.ReadAt(t.Context(), o, make([]byte, 1), 0); err != nil {
				got += "x"
			} else {
				got += "."
			}
		}
		if got != c.want {
			t.Errorf("%q: %s, want %s", c.script, got, c.want)
		}
		var hits int64
		for _, h := range f.Hits() {
			hits += h
		}
		if int(hits) != strings.Count(c.want, "x") {
			t.Errorf("%q: hits %v", c.script, f.Hits())
		}
	}
}
