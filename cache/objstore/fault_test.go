package objstore_test

import (
	"bytes"
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

func TestParseFaults(t *testing.T) {
	rules, err := objstore.ParseFaults("\n# comment\nread *.jpg 1 503 # throttled\nstat * total:2-3 slow 30ms\nlist \"x y/\" 4- denied\n* k all stall\n")
	if err != nil {
		t.Fatal(err)
	}
	want := []objstore.FaultRule{
		{Op: "read", Glob: "*.jpg", From: 1, To: 1, Action: objstore.Action503},
		{Op: "stat", Glob: "*", Total: true, From: 2, To: 3, Action: objstore.ActionSlow, Duration: 30 * time.Millisecond},
		{Op: "list", Glob: "x y/", From: 4, Action: objstore.ActionDenied},
		{Op: "*", Glob: "k", From: 1, Action: objstore.ActionStall},
	}
	if !reflect.DeepEqual(rules, want) {
		t.Errorf("rules %+v\nwant %+v", rules, want)
	}
	for _, c := range []struct{ script, text string }{
		{"read *", "OP GLOB WHEN ACTION"},
		{"\nwrite * 1 503", "line 2"},
		{"write * 1 503", `operation "write"`},
		{"read * 0 503", "counted from 1"},
		{"read * 3-2 503", `"3-2"`},
		{"read * x 503", `"x"`},
		{"read * 1 explode", `action "explode" is none of slow, stall`},
		{"read * 1 slow", "needs a duration"},
		{"read * 1 slow -1s", "positive duration"},
		{"read * 1 503 1s", "takes no duration"},
		{"stat * 1 flip", "on operation read only"},
		{`read "x 1 503`, "quoted"},
		{"read * 1 503 1s extra", "6 words"},
	} {
		if _, err := objstore.ParseFaults(c.script); err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%q: error %v, want %q", c.script, err, c.text)
		}
	}
}

func FuzzParseFaults(f *testing.F) {
	f.Add("read *.jpg 1 503\nstat * total:2-3 slow 30ms\nlist \"x y/\" 4- denied # c")
	f.Add("* \"\" all stall 1h2m\nread \"\\x00\\\"#\" 9223372036854775807- flip")
	f.Fuzz(func(t *testing.T, script string) {
		rules, err := objstore.ParseFaults(script)
		if err != nil {
			return
		}
		var lines []string
		for _, r := range rules {
			lines = append(lines, r.String())
		}
		text := strings.Join(lines, "\n")
		again, err := objstore.ParseFaults(text)
		if err != nil || !slices.Equal(rules, again) {
			t.Errorf("%q\nparses as %+v\nprints as %q\nwhich parses as %+v (%v)", script, rules, text, again, err)
		}
	})
}

func TestFaultActions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		m := objstore.NewMem()
		data := []byte("0123456789")
		o := m.PutBytes("d/k.jpg", data)
		read := func(script string) ([]byte, error) {
			p := make([]byte, 10)
			err := faulty(t, m, script).ReadAt(ctx, o, p, 0)
			return p, err
		}
		for action, kind := range map[string]objstore.Kind{
			"503": objstore.KindTransient, "reset": objstore.KindTransient, "truncate": objstore.KindTransient,
			"stall 3s": objstore.KindTransient, "changed": objstore.KindChanged, "notfound": objstore.KindNotFound, "denied": objstore.KindDenied,
		} {
			if _, err := read("read *.jpg 1 " + action); err == nil || objstore.KindOf(err) != kind {
				t.Errorf("%s: %v", action, err)
			}
		}
		start := time.Now()
		if p, err := read("read * 1 slow 3s"); err != nil || !bytes.Equal(p, data) || time.Since(start) != 3*time.Second {
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
		if err := faulty(t, m, "read * 1 stall").ReadAt(ctx2, o, make([]byte, 10), 0); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("stall: %v", err)
		}
		if p, err := read("stat * all denied\nlist * all denied\nread *.png all denied"); err != nil || !bytes.Equal(p, data) {
			t.Errorf("rules for others: %v", err)
		}
	})
}

// TestFaultCounts: requests are counted for each key, or over all with total.
func TestFaultCounts(t *testing.T) {
	m := objstore.NewMem()
	a, b := m.PutBytes("a", []byte("x")), m.PutBytes("b", []byte("x"))
	for _, c := range []struct{ script, want string }{
		{"read * 2 503", "..xx..."}, // a b a b a b a
		{"read * total:2 503", ".x....."},
		{"read * 2-3 503", "..xxxx."},
		{"read a 2- 503", "..x.x.x"},
		{"read a 1 503\nread * total:2 503", "xx....."},
		{"read a 1 503\nread a 2 reset\nread a 1-2 changed", "x.x...."},
	} {
		f := faulty(t, m, c.script)
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
