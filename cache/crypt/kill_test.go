//go:build killpoints

package crypt

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestKill kills a process at each moment of making a key file and of changing it: afterwards the one before or
// the one after is there, and both hold the same key.
func TestKill(t *testing.T) {
	first, second := KeyOf([32]byte{1, 5}).b, KeyOf([32]byte{2, 5}).b
	if dir := os.Getenv("CRYPT_KILL"); dir != "" {
		k, err := Create(dir, Secret{first})
		if err == nil {
			err = k.Rewrap(dir, Secret{second})
		}
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	for _, point := range []string{"crypt.key.created", "crypt.key.written", "crypt.key.synced", "crypt.key.renamed",
		"crypt.key.durable"} {
		for _, n := range []string{":1", ":2"} {
			dir := t.TempDir()
			cmd := exec.Command(os.Args[0], "-test.run=^TestKill$")
			cmd.Env = append(os.Environ(), "CRYPT_KILL="+dir, "SHOAL_KILLPOINT="+point+n)
			if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(err.Error(), "killed") {
				t.Fatalf("%s%s: %v\n%s", point, n, err, out)
			}
			_, a := Open(dir, Secret{first})
			_, b := Open(dir, Secret{second})
			has, err := Exists(dir)
			if err != nil || n == ":2" && !has || has && (a == nil) == (b == nil) {
				t.Errorf("%s%s: there %v; by the first secret %v, by the second %v", point, n, has, a, b)
			}
			left, _ := filepath.Glob(filepath.Join(dir, ".tmp-*"))
			// catalog.Lock removes it
			if (len(left) == 1) != (point != "crypt.key.renamed" && point != "crypt.key.durable") {
				t.Errorf("%s%s: %v", point, n, left)
			}
		}
	}
}
