package loader

import "testing"

func FuzzLabel(f *testing.F) {
	f.Add("cls", []byte(" 12\n"))
	f.Add("json:a.b", []byte(`{"a": {"b": 3}}`))
	f.Add("json:a", []byte(`{"a": 1e3}`))
	f.Add("json:", []byte(`[`))
	f.Fuzz(func(t *testing.T, text string, part []byte) {
		l, err := parseLabel(text)
		if err != nil {
			return
		}
		if again, err := parseLabel(l.String()); err != nil || again.String() != l.String() {
			t.Fatalf("%q reads back as %v, %v", l.String(), again, err)
		}
		if n, err := l.of(5, part); err != nil && n != 0 {
			t.Fatalf("%d beside %v", n, err)
		}
	})
}

func TestParseCls(t *testing.T) {
	for text, want := range map[string]int64{"3": 3, " 12\n": 12, "-1\r\n": -1, "007": 7} {
		if n, err := parseCls([]byte(text)); err != nil || n != want {
			t.Errorf("%q: %d, %v", text, n, err)
		}
	}
	for _, text := range []string{"", "3.0", "1 2", "dog", "9999999999999999999", "0x3", "3                                       4"} {
		if n, err := parseCls([]byte(text)); err == nil {
			t.Errorf("%q: %d", text, n)
		}
	}
}
