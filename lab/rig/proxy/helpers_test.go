package proxy_test

import (
	"io"
	"net/http"
	"os"
	"testing"
)

// saveProfile writes five seconds of a proxy's CPU profile to file.
func saveProfile(tb testing.TB, control, file string) {
	resp, err := http.Get(control + "/debug/pprof/profile?seconds=5")
	if err != nil {
		tb.Log(err)
		return
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil {
		err = os.WriteFile(file, b, 0o644)
	}
	if err != nil {
		tb.Log(err)
	}
}
