package objstore_test

import (
	"encoding/pem"
	"os"
	"testing"
)

func writePEM(t *testing.T, path string, cert []byte) {
	t.Helper()
	data := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}
