package objstore_test

import (
	"encoding/base64"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/objstore"
)

func TestParseCustomerKey(t *testing.T) {
	raw := []byte("\x00\n0123456789abcdefghijklmnopqr \xff")
	want, err := objstore.ParseCustomerKey(raw)
	must(t, err)
	for name, text := range map[string]string{
		"raw": string(raw), "hex": hex.EncodeToString(raw) + "\n", "HEX": strings.ToUpper(hex.EncodeToString(raw)),
		"base64": " " + base64.StdEncoding.EncodeToString(raw) + "\r\n",
		"short":  "hush", "long": strings.Repeat("h", 33), "no hex": strings.Repeat("x", 64),
		"no base64": strings.Repeat("!", 44), "base64 of 33": base64.StdEncoding.EncodeToString(append(raw, 1)),
		"empty": "",
	} {
		got, err := objstore.ParseCustomerKey([]byte(text))
		switch name {
		case "raw", "hex", "HEX", "base64":
			if err != nil || got != want {
				t.Errorf("%s: %v", name, err)
			}
		default:
			if err == nil || !strings.Contains(err.Error(), "32 bytes") || strings.Contains(err.Error(), "hush") {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func FuzzParseCustomerKey(f *testing.F) {
	for _, s := range []string{"", strings.Repeat("a", 32), strings.Repeat("0", 64), strings.Repeat("A", 43) + "=",
		strings.Repeat("A", 44)} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		k, err := objstore.ParseCustomerKey(text)
		if (err == nil) == k.IsZero() {
			t.Errorf("%q: %v, zero %v", text, err, k.IsZero())
		}
	})
}
