package order

import (
	"slices"
	"strings"
	"testing"
)

func TestVersioned(t *testing.T) {
	for text, want := range map[string]string{
		"uniform:seed=1,epoch=4,world=8,rank=3":   "uniform@1:seed=1",
		"torch:seed=1,world=8,rank=3,drop_last=1": "torch@1:seed=1,world=8,drop_last=1",
		"sequential": "sequential@1", "plan": "",
	} {
		if got := must(t, text).Versioned(); got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
	for _, text := range []string{"uniform@1:seed=5", "torch@1:seed=5,world=8", "sequential@1"} {
		if s, err := ParseVersioned(text); err != nil || s.Versioned() != text {
			t.Errorf("%s: %v, %v", text, s, err)
		}
	}
	for text, words := range map[string]string{"uniform@2:seed=1": "uniform@1", "unifrom@1:seed=1": "no order",
		"plan": "this program", "": ""} {
		if _, err := ParseVersioned(text); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v, want %q", text, err, words)
		}
	}
}

func TestParseList(t *testing.T) {
	find := func(name string) (int, bool) {
		i := slices.Index([]string{"a/x.jpg", "a/y.jpg", "7"}, name)
		return i, i >= 0
	}
	l, err := ParseList([]byte("# of mine\n2\n\na/y.jpg\r\n./7\n2\n./a/x.jpg"), 3, find)
	if err != nil || !slices.Equal(l, []uint32{2, 1, 2, 2, 0}) {
		t.Errorf("%v, %v", l, err)
	}
	for words, text := range map[string]string{
		`line 2: no sample "b"`:        "0\nb",
		"line 1: sample 3":             "3",
		"and 2 more":                   "a\nb\nc\nd\ne\nf\ng",
		`line 1: no sample "-1"`:       "-1",
		`line 1: no sample "999999999`: "99999999999999",
	} {
		if _, err := ParseList([]byte(text), 3, find); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%q: %v, want %q", text, err, words)
		}
	}
	if _, err := ParseList([]byte("a"), 3, nil); err == nil || !strings.Contains(err.Error(), "not a sample number") {
		t.Errorf("%v", err)
	}
}

func FuzzParseList(f *testing.F) {
	f.Add([]byte("1\n2\n./3\n#\n\r\na"))
	f.Fuzz(func(t *testing.T, data []byte) {
		l, err := ParseList(data, 10, func(name string) (int, bool) { return len(name), len(name) < 10 })
		for _, s := range l {
			if s >= 10 || err != nil {
				t.Errorf("%q: sample %d, %v", data, s, err)
			}
		}
	})
}
