package admin

import "testing"

func TestLocal(t *testing.T) {
	for addr, want := range map[string]string{
		"7071": "127.0.0.1:7071", ":7071": "127.0.0.1:7071", "127.0.0.1:7071": "127.0.0.1:7071",
		"0.0.0.0:7071": "0.0.0.0:7071",
		"[::]:7071":    "[::]:7071", "localhost:http": "localhost:http", "nonsense": "nonsense",
	} {
		if got := local(addr); got != want {
			t.Errorf("%q: %q, want %q", addr, got, want)
		}
	}
}
