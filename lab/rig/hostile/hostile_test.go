package hostile

import (
	"bytes"
	"io"
	"net/http"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A sound answer, and then one that never comes: Stop ends the connection of whoever waits for it.
func TestStopEndsWhatStalls(t *testing.T) {
	data := []byte("content")
	stalls := make(chan struct{})
	s, err := Start(map[string][]byte{"d/a.bin": data}, nil, func(x *Exchange) bool {
		if x.N == 0 {
			return false
		}
		close(stalls)
		x.Stall()
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 1}}
	defer client.CloseIdleConnections()
	get := func() ([]byte, error) {
		r, err := client.Get("http://" + s.Addr() + "/bucket/d/a.bin")
		if err != nil {
			return nil, err
		}
		defer r.Body.Close()
		return io.ReadAll(r.Body)
	}
	if got, err := get(); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%q, %v", got, err)
	}
	done := make(chan error)
	go func() {
		_, err := get()
		done <- err
	}()
	<-stalls
	s.Stop()
	if err := <-done; err == nil {
		t.Error("an answer that never came")
	}
	if n := s.Count(Get, "d/a.bin"); n < 2 {
		t.Errorf("%d requests were counted", n)
	}
}
