package main

import (
	"bytes"
	"os"
	"testing"
)

// docs/cli-lab.md says what the help says.
func TestReferenceIsUpToDate(t *testing.T) {
	var b bytes.Buffer
	if err := writeReference(&b); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../../docs/cli-lab.md")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(text, b.Bytes()) {
		t.Error("docs/cli-lab.md is not what the help texts say: run `make docs`")
	}
}
