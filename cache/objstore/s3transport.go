package objstore

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"
)

// parseEndpoint splits an endpoint into host[:port] and whether it is https. Its errors do not
// repeat the text, which may hold a password.
func parseEndpoint(text string) (host string, secure bool, err error) {
	if text == "" {
		return "s3.amazonaws.com", true, nil
	}
	if !strings.Contains(text, "://") {
		text = "https://" + text
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return "", false, errors.New("the endpoint is not a URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return "", false, errors.New("the endpoint's scheme is neither http nor https")
	case u.User != nil:
		return "", false, errors.New("the endpoint holds a user name; credentials go into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
	case u.Host == "" || u.Hostname() == "":
		return "", false, errors.New("the endpoint names no host")
	case (u.Path != "" && u.Path != "/") || u.RawQuery != "" || u.Fragment != "":
		return "", false, errors.New("the endpoint has a path; the bucket is part of the source, s3://BUCKET/PREFIX")
	}
	host = strings.ToLower(u.Host)
	if u.Scheme == "http" {
		host = strings.TrimSuffix(host, ":80")
	} else {
		host = strings.TrimSuffix(host, ":443")
	}
	return host, u.Scheme == "https", nil
}

// listGuard refuses web pages as listings. minio-go takes any XML for an empty listing, and a wrong
// endpoint's "It works!" page, or a captive portal, would pass for an empty bucket.
type listGuard struct{ http.RoundTripper }

func (g listGuard) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := g.RoundTripper.RoundTrip(r)
	if err == nil && resp.StatusCode == http.StatusOK && strings.Contains(r.URL.RawQuery, "list-type=") {
		if t := resp.Header.Get("Content-Type"); strings.HasPrefix(t, "text/html") || strings.HasPrefix(t, "application/json") {
			resp.Body.Close()
			return nil, errNotXML
		}
	}
	return resp, err
}

var errNotXML = errors.New("the answer to a listing is a web page")

// newTransport returns a transport for hundreds of small requests at once.
func newTransport(cfg S3Config) (*http.Transport, error) {
	t := &http.Transport{
		Proxy: http.ProxyFromEnvironment,
		DialContext: (&net.Dialer{
			Timeout:   5 * time.Second, // a live store answers a SYN in milliseconds
			KeepAlive: 15 * time.Second,
		}).DialContext,
		TLSHandshakeTimeout: 10 * time.Second,
		// Stores answer slowly when they are loaded, but an answer that has not begun after 20 s
		// is better asked for again. Bodies that stall are ended by the retry policy.
		ResponseHeaderTimeout: 20 * time.Second,
		MaxIdleConns:          2 * cfg.MaxConns, // the endpoint, and a region's endpoint after a redirect
		MaxIdleConnsPerHost:   cfg.MaxConns,
		IdleConnTimeout:       90 * time.Second,
		// Objects are delivered as they are stored; gzip would also make their length unknown.
		DisableCompression: true,
		// One connection a request: HTTP/2 would put all on one, behind one flow-control window
		// and one lock.
		ForceAttemptHTTP2: false,
		TLSNextProto:      map[string]func(string, *tls.Conn) http.RoundTripper{},
		// A body passes through the read buffer only where a read is smaller than it; ReadAt
		// reads large slices past it. 16 KiB takes the headers and a small object in one read
		// and costs 16 MiB for 1,024 connections.
		ReadBufferSize:  16 << 10,
		WriteBufferSize: 4 << 10, // a request's head is 1 KiB
	}
	if cfg.CABundle != "" {
		pem, err := os.ReadFile(cfg.CABundle)
		if err != nil {
			return nil, err
		}
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no certificate", cfg.CABundle)
		}
		t.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return t, nil
}
