package s3

import (
	"context"
	"crypto/tls"
	"errors"
	"net/http"
	"net/url"
	"time"
)

// Identity says which credentials a store is accessed with. It contains no secret.
type Identity struct {
	Anonymous bool
	Temporary bool      // there is a session token
	Expires   time.Time // zero: never, as far as is known
}

// Identity returns the current identity. Expired credentials are renewed first.
func (s *Store) Identity(ctx context.Context) Identity {
	v := s.keys.get(ctx)
	return Identity{
		Anonymous: v.AccessKeyID == "" || v.SignerType.IsAnonymous(), Temporary: v.SessionToken != "", Expires: v.Expiration,
	}
}

// TLS returns the configuration for verifying the store's certificate; nil is the system's.
func (s *Store) TLS() *tls.Config { return s.transport.TLSClientConfig.Clone() }

// Proxy returns the proxy that requests go through; nil for none.
func (s *Store) Proxy() (*url.URL, error) {
	u, err := url.Parse(s.endpoint)
	if err != nil {
		return nil, err
	}
	return s.transport.Proxy(&http.Request{URL: u})
}

// Knock sends an unsigned request to the endpoint and returns the answer's status and header: any answer identifies
// the server and its clock.
func (s *Store) Knock(ctx context.Context) (status int, header http.Header, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.endpoint+"/", http.NoBody)
	if err != nil {
		return 0, nil, err
	}
	return s.roundTrip(ctx, r)
}

// Try requests an object with additional header fields, returns any answer, and drops the body.
func (s *Store) Try(ctx context.Context, key string, header http.Header) (status int, answer http.Header, err error) {
	u := &url.URL{Path: "/" + s.bucket + "/" + key}
	if base, err := url.Parse(s.endpoint); err == nil {
		u.Scheme, u.Host = base.Scheme, base.Host
	}
	if !s.Identity(ctx).Anonymous {
		// The signature is in the query: then other header fields need not be signed.
		if u, err = s.core.PresignedGetObject(ctx, s.bucket, key, time.Minute, nil); err != nil {
			return 0, nil, s.fail(ctx, s.keys.generation(), "read", key, err)
		}
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), http.NoBody)
	if err != nil {
		return 0, nil, errors.New("the key does not form a valid URL")
	}
	for name, values := range header {
		r.Header[name] = values
	}
	return s.roundTrip(ctx, r)
}

// roundTrip returns an answer's status and header. Errors do not repeat the URL, which may be signed.
func (s *Store) roundTrip(ctx context.Context, r *http.Request) (status int, header http.Header, err error) {
	resp, err := s.transport.RoundTrip(r)
	if err != nil {
		return 0, nil, s.fail(ctx, s.keys.generation(), "check", s.url(""), err)
	}
	return resp.StatusCode, resp.Header, resp.Body.Close()
}
