package s3

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

// TestForwardedErrorHasItsTime: of an error whose text does not end, the client gets what has come.
func TestForwardedErrorHasItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(t.Context(),
			Config{Endpoint: "http://127.0.0.1:1", Bucket: "bucket", AccessKeyID: "id", SecretAccessKey: "key"})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		text, rest := io.Pipe()
		s.forwarder = forbidding{text}
		go func() { _, _ = rest.Write([]byte("<Error>")) }()
		start := time.Now()
		resp, err := s.Forward(t.Context(), Request{Method: http.MethodGet, Key: "k", Header: http.Header{}})
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		if took := time.Since(start); resp.StatusCode != http.StatusForbidden || string(got) != "<Error>" ||
			err != nil || took != pageTimeout {
			t.Errorf("HTTP %d: %q, %v, after %v", resp.StatusCode, got, err, took)
		}
	})
}

// forbidding is a transport that denies all, with this text.
type forbidding struct{ text io.ReadCloser }

func (f forbidding) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusForbidden, Header: http.Header{}, Body: f.text}, nil
}

// TestForwardedHeadersAreSigned: also those that the store adds, whoever signs how. Amazon refuses others.
func TestForwardedHeadersAreSigned(t *testing.T) {
	for _, chunks := range []bool{false, true} {
		s, err := New(t.Context(), Config{Endpoint: "http://127.0.0.1:1", Bucket: "bucket", AccessKeyID: "id",
			SecretAccessKey: "key", Store: objstore.StoreOptions{RequesterPays: true}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		var sent http.Header
		s.forwarder = extraHeaders{s, transportFunc(func(r *http.Request) (*http.Response, error) {
			sent = r.Header
			return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: http.NoBody}, nil
		})}
		body := make([]byte, 2*unasked)
		if _, err := s.Forward(t.Context(), Request{Method: http.MethodPut, Key: "k", Header: http.Header{},
			Body: bytes.NewReader(body), Length: int64(len(body)), Chunks: chunks}); err != nil {
			t.Fatal(err)
		}
		_, signed, _ := strings.Cut(sent.Get("Authorization"), "SignedHeaders=")
		signed, _, _ = strings.Cut(signed, ",")
		for name := range sent {
			if name = strings.ToLower(name); strings.HasPrefix(name, "x-amz-") &&
				!strings.Contains(";"+signed+";", ";"+name+";") {
				t.Errorf("chunks %t: %s is not one of %s", chunks, name, signed)
			}
		}
		if sent.Get(headerPayer) != payerRequester {
			t.Errorf("chunks %t: %v", chunks, sent)
		}
	}
}

type transportFunc func(*http.Request) (*http.Response, error)

func (f transportFunc) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
