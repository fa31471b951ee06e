package crypt

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func newSecret(t testing.TB) Secret {
	t.Helper()
	b := make([]byte, secretLen)
	Random(b)
	s, err := ParseSecret(b)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestParseSecret(t *testing.T) {
	raw := make([]byte, secretLen)
	Random(raw)
	raw[0], raw[31] = 0xfb, '\n' // -_ and +/ in base64; a byte that could be taken for the end of a line
	want, err := ParseSecret(raw)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		hex.EncodeToString(raw), strings.ToUpper(hex.EncodeToString(raw)) + "\n",
		base64.StdEncoding.EncodeToString(raw) + "\r\n",
		"  " + base64.RawStdEncoding.EncodeToString(raw), base64.URLEncoding.EncodeToString(raw),
		base64.RawURLEncoding.EncodeToString(raw),
	} {
		if s, err := ParseSecret([]byte(text)); err != nil || s != want {
			t.Errorf("%q: %v", text, err)
		}
	}
	for _, bad := range [][]byte{nil, []byte("short"), raw[:31], append(raw[:32:32], 1),
		[]byte(hex.EncodeToString(raw[:16])), make([]byte, 32), []byte(strings.Repeat("0", 64)),
		[]byte(strings.Repeat("g", 64))} {
		if _, err := ParseSecret(bad); !errors.Is(err, errSecret) {
			t.Errorf("%q was taken: %v", bad, err)
		}
	}
	if _, err := ParseSecret([]byte("no key at all, but a password")); strings.Contains(err.Error(), "password") {
		t.Error(err)
	}
}

// TestSecretsAreHidden prints secrets in every way that a log or an error might.
func TestSecretsAreHidden(t *testing.T) {
	raw := []byte("0123456789abcdefghijklmnopqrstuv")
	s, err := ParseSecret(raw)
	if err != nil {
		t.Fatal(err)
	}
	k := KeyOf([32]byte(raw))
	var b bytes.Buffer
	// The time has digits, too, which may be any.
	timeless := &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}
	for _, v := range []any{s, &s, k, struct{ S Secret }{s}, []Secret{s}, struct{ K *Key }{k},
		map[string]any{"k": k, "s": s}} {
		for _, f := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d"} {
			fmt.Fprintf(&b, f+"\n", v)
		}
		fmt.Fprintln(&b, v)
		slog.New(slog.NewTextHandler(&b, timeless)).Info("x", "v", v)
		slog.New(slog.NewJSONHandler(&b, timeless)).Info("x", "v", v)
		if j, err := json.Marshal(v); err == nil {
			b.Write(j)
		}
	}
	for _, form := range []string{string(raw), hex.EncodeToString(raw), base64.StdEncoding.EncodeToString(raw)[:40],
		"48 49 50", "0x30, 0x31", "[48,49", "303132"} {
		if strings.Contains(strings.ToLower(b.String()), form) {
			t.Errorf("%q is shown in\n%s", form, b.String())
		}
	}
	if !strings.Contains(b.String(), hidden) {
		t.Error("nothing was printed")
	}
}

func TestKeyFile(t *testing.T) {
	dir, s := t.TempDir(), newSecret(t)
	if has, err := Exists(dir); has || err != nil {
		t.Fatal(has, err)
	}
	k, err := Create(dir, s)
	if err != nil {
		t.Fatal(err)
	}
	if has, err := Exists(dir); !has || err != nil {
		t.Fatal(has, err)
	}
	again, err := Open(dir, s)
	if err != nil || again.b != k.b || again.SecretID() != s.ID() {
		t.Fatal(err)
	}
	if bytes.Equal(k.Derive("a", nil), k.Derive("b", nil)) ||
		bytes.Equal(k.Derive("a", nil), k.Derive("a", []byte{1})) {
		t.Error("two purposes have one key")
	}
	other := newSecret(t)
	if _, err := Open(dir, other); !errors.Is(err, ErrWrongSecret) || !strings.Contains(err.Error(), s.ID()) ||
		!strings.Contains(err.Error(), other.ID()) {
		t.Error(err)
	}
	if err := k.Rewrap(dir, other); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, s); !errors.Is(err, ErrWrongSecret) {
		t.Error(err)
	}
	if again, err = Open(dir, other); err != nil || again.b != k.b {
		t.Fatal(err)
	}
	path := filepath.Join(dir, FileName)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	for i := range b {
		for _, change := range [][]byte{append(bytes.Clone(b[:i]), b[i+1:]...),
			append(bytes.Clone(b[:i]), append([]byte{b[i] ^ 1}, b[i+1:]...)...), b[:i]} {
			if err := os.WriteFile(path, change, 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := Open(dir, other)
			if err == nil && got.b != k.b {
				t.Fatalf("byte %d changed, and another key came of it", i)
			}
			if errors.Is(err, ErrWrongSecret) {
				t.Errorf("byte %d changed, and the user's key is blamed: %v", i, err)
			}
		}
	}
}

func TestSealedFiles(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	k := KeyOf([32]byte{7})
	sealed := func(data []byte) []byte {
		var b []byte
		for part := range k.SealFile("manifest", "name", data) {
			b = append(b, part...)
		}
		return b
	}
	for _, n := range []int{1, 17, fileChunk - 1, fileChunk, fileChunk + 1, 3 * fileChunk} {
		data := make([]byte, n)
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		b := sealed(data)
		if got := FileLen(int64(len(b))); got != int64(n) {
			t.Fatalf("%d bytes: FileLen says %d", n, got)
		}
		open := func(b []byte, purpose, name string) ([]byte, error) {
			dst := make([]byte, FileLen(int64(len(b))))
			return dst, k.OpenFile(purpose, name, bytes.NewReader(b), dst)
		}
		if got, err := open(b, "manifest", "name"); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%d bytes: %v", n, err)
		}
		if bytes.Equal(b, sealed(data)) {
			t.Error("two files are encrypted alike")
		}
		for range 10 {
			bad := bytes.Clone(b)
			bad[rng.IntN(len(bad))] ^= byte(1 + rng.IntN(255))
			if _, err := open(bad, "manifest", "name"); err == nil {
				t.Errorf("%d bytes: a change was not noticed", n)
			}
		}
		for what, bad := range map[string][]byte{"longer": append(bytes.Clone(b), make([]byte, 40)...),
			"cut": b[:len(b)-1], "a chunk less": b[:max(fileHeaderLen+17, len(b)-fileChunk-tagLen)]} {
			if len(bad) == len(b) {
				continue
			}
			if _, err := open(bad, "manifest", "name"); err == nil {
				t.Errorf("%d bytes: %s, and not noticed", n, what)
			}
		}
		if n > 2*fileChunk { // two chunks exchanged
			bad := slices.Concat(b[:fileHeaderLen],
				b[fileHeaderLen+fileChunk+tagLen:fileHeaderLen+2*(fileChunk+tagLen)],
				b[fileHeaderLen:fileHeaderLen+fileChunk+tagLen], b[fileHeaderLen+2*(fileChunk+tagLen):])
			if _, err := open(bad, "manifest", "name"); !errors.Is(err, ErrOpen) {
				t.Error(err)
			}
		}
		if _, err := open(b, "layout", "name"); !errors.Is(err, ErrOpen) {
			t.Error(err)
		}
		if _, err := open(b, "manifest", "another"); !errors.Is(err, ErrOpen) {
			t.Error(err)
		}
	}
	for _, size := range []int64{0, 1, 32, 48} {
		if n := FileLen(size); n != 0 {
			t.Errorf("FileLen(%d) = %d", size, n)
		}
	}
	small := k.Sealer("x", nil).Seal(nil, nil, []byte("content"), []byte("a"))
	if b, err := k.Sealer("x", nil).Open(nil, nil, small, []byte("a")); err != nil || string(b) != "content" {
		t.Error(err)
	}
	for _, bad := range [][]byte{nil, small[:5], small[:len(small)-1]} {
		if _, err := k.Sealer("x", nil).Open(nil, nil, bad, []byte("a")); err == nil {
			t.Error(err)
		}
	}
}
