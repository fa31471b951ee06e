package kit

import (
	"os"
	"path/filepath"
	"testing"
)

func TestRecords(t *testing.T) {
	path := filepath.Join(t.TempDir(), "r.jsonl")
	open := func(fresh bool) *Records[int] {
		r, err := OpenRecords[int](path, fresh)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := open(false)
	add := func(name string, v int) {
		if err := r.Add(name, v); err != nil {
			t.Fatal(err)
		}
	}
	add("a", 1)
	add("b", 2)
	add("a", 3)
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = f.WriteString(`{"name":"c","val`) // a run that was killed here
	f.Close()
	r = open(false)
	add("d", 4)
	r = open(false)
	for name, want := range map[string]int{"a": 3, "b": 2, "d": 4} {
		if v, ok := r.Get(name); !ok || v != want {
			t.Errorf("%s: %d, %v", name, v, ok)
		}
	}
	if _, ok := r.Get("c"); ok {
		t.Error("half a line is a record")
	}
	if _, ok := open(true).Get("a"); ok {
		t.Error("not forgotten")
	}
}
