package loader

import "testing"

func FuzzLabel(f *testing.F) {
	f.Add("cls", []byte(" 12\n"))
	f.Add("json:a.b", []byte(`{"a": {"b": 3}}`))
	f.Add("json:a", []byte(`{"a": 1e3}`))
	f.Add("json:", []byte(`[`))
	f.Add("label.int16", []byte{1, 255})
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
	for _, text := range []string{"", "3.0", "1 2", "dog", "9999999999999999999", "0x3",
		"3                                       4", "00000000000000000000000000000003 dogs"} {
		if n, err := parseCls([]byte(text)); err == nil {
			t.Errorf("%q: %d", text, n)
		}
	}
}

func TestNumberLabels(t *testing.T) {
	for _, c := range []struct {
		text string
		part []byte
		want int64
	}{
		{"y.int64", []byte{254, 255, 255, 255, 255, 255, 255, 255}, -2},
		{"y.int8", []byte{254}, -2},
		{"y.uint8", []byte{254}, 254},
		{"a.b.int16", []byte{0, 128}, -32768},
		{"label.uint16", []byte{0, 128}, 32768},
		{"label.int32", []byte{1, 0, 0, 128}, -2147483647},
		{"label.uint32", []byte{1, 0, 0, 128}, 2147483649},
	} {
		l, err := parseLabel(c.text)
		if err != nil || l.part() != c.text || l.hashed("h") != "h,label="+c.text {
			t.Errorf("%s: %v, %v, %s", c.text, l, err, l.part())
		}
		if n, err := l.of(5, c.part); err != nil || n != c.want {
			t.Errorf("%s of %d: %d, %v, want %d", c.text, c.part, n, err, c.want)
		}
		for _, part := range [][]byte{nil, c.part[1:], append(c.part, 0)} {
			if n, err := l.of(5, part); err == nil {
				t.Errorf("%s of %d: %d", c.text, part, n)
			}
		}
	}
	for _, text := range []string{"label", "int64", "label.uint64", "label.float32", "label.int64.", "../label.int64"} {
		if l, err := parseLabel(text); err == nil {
			t.Errorf("%s: %v", text, l)
		}
	}
}
