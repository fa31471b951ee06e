package s3

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

const (
	// schemeDoubt is how long the first request may remain unanswered before the port is tried with the other scheme:
	// a server that waits for a request does not answer a TLS handshake.
	schemeDoubt = time.Second
	schemeTime  = time.Second // of that try
)

// errScheme says that the endpoint's port does not speak its scheme.
func (s *Store) errScheme() error {
	if s.secure() {
		return errors.New("the server at this port speaks plain HTTP, not TLS")
	}
	return errors.New("the server at this port speaks TLS, not plain HTTP")
}

// otherScheme returns the endpoint with the other scheme, at the same port.
func (s *Store) otherScheme() string {
	if host, ok := strings.CutPrefix(s.endpoint, "https://"); ok {
		return "http://" + withPort(host, "443")
	}
	return "https://" + withPort(strings.TrimPrefix(s.endpoint, "http://"), "80")
}

// remedyScheme is the setting for it.
func (s *Store) remedyScheme() string { return "set AWS_ENDPOINT_URL=" + s.otherScheme() }

func (s *Store) secure() bool { return strings.HasPrefix(s.endpoint, "https://") }

// speaksOther reports whether the endpoint's port speaks HTTP although the endpoint says https, or TLS although it
// says http. It sends no data of the user.
func (s *Store) speaksOther(ctx context.Context) bool {
	if !s.direct {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, schemeTime)
	defer cancel()
	other := s.otherScheme()
	if !s.secure() {
		d := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}} //nolint:gosec // nothing is secured by it
		conn, err := d.DialContext(ctx, "tcp", strings.TrimPrefix(other, "https://"))
		if err == nil {
			conn.Close()
		}
		return err == nil
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, other, nil)
	if err != nil {
		return false
	}
	r.Header.Set("User-Agent", "shoal")
	resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(r)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusBadRequest {
		return true
	}
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10)) // TLS servers answer with the advice to use it
	text = bytes.ToUpper(text)
	return !bytes.Contains(text, []byte("HTTPS")) && !bytes.Contains(text, []byte("SSL"))
}

// probeEither is probe, which ends with [Store.errScheme] if the scheme is the reason for no answer.
func (s *Store) probeEither(ctx context.Context) error {
	pctx, cancel := context.WithCancel(ctx)
	defer cancel()
	other := make(chan bool, 1)
	look := time.AfterFunc(schemeDoubt, func() {
		yes := s.speaksOther(pctx)
		if yes {
			cancel()
		}
		other <- yes
	})
	err := s.probe(pctx)
	if err == nil {
		cancel() // the probe is no longer needed
	}
	mistaken := false
	if !look.Stop() {
		mistaken = <-other
	} else if kind := objstore.KindOf(err); kind == objstore.KindTransient || kind == objstore.KindInvalid {
		// many TLS servers answer 400
		mistaken = s.speaksOther(ctx)
	}
	if err != nil && mistaken {
		return &objstore.Error{Op: "check", Key: s.url(""), Kind: objstore.KindInvalid, Err: s.errScheme(),
			Remedy: s.remedy(s.remedyScheme())}
	}
	return err
}
