package doctor

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// local reports whether an endpoint is on this machine or in a private network.
func local(endpoint string) bool {
	u, err := url.Parse(endpoint)
	if err != nil {
		return false
	}
	ip := net.ParseIP(u.Hostname())
	return u.Hostname() == "localhost" || ip != nil && (ip.IsLoopback() || ip.IsPrivate()) || ip == nil && !strings.Contains(u.Hostname(), ".")
}

// remote returns why a check of the network does not apply; "" if it applies.
func (s *Source) remote() string {
	switch {
	case s.store == nil:
		return "the source could not be opened"
	case s.s3 == nil:
		return "the source is a folder of this machine"
	}
	return ""
}

// viaProxy returns the proxy's address, "" for none.
func (s *Source) viaProxy() string {
	p, err := s.s3.Proxy()
	if err != nil || p == nil {
		return ""
	}
	return p.Host // the URL may hold a password
}

func (s *Source) proxy(context.Context) Result {
	p := s.viaProxy()
	if p == "" {
		return ok("requests go directly to the store")
	}
	return ok("requests go through the proxy %s", p).because(Warn, "a proxy for web pages is often the bottleneck", "NO_PROXY="+hostOf(s.where.Endpoint)+", if the store can be reached without")
}

func hostOf(endpoint string) string {
	u, err := url.Parse(endpoint)
	if err != nil {
		return ""
	}
	return u.Hostname()
}

// address is the address to connect to: the endpoint, or its proxy.
func (s *Source) address() (host, port string) {
	if p := s.viaProxy(); p != "" {
		if host, port, err := net.SplitHostPort(p); err == nil {
			return host, port
		}
		return p, "80"
	}
	u, err := url.Parse(s.where.Endpoint)
	if err != nil {
		return "", ""
	}
	return u.Hostname(), cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
}

func (s *Source) dns(ctx context.Context) Result {
	host, _ := s.address()
	if net.ParseIP(host) != nil {
		return skipped("%s is an address", host)
	}
	began := time.Now()
	found, err := s.resolv.LookupHost(ctx, host)
	took := time.Since(began)
	if err != nil {
		var e *net.DNSError
		why := err.Error()
		if errors.As(err, &e) {
			why = e.Err
		}
		return ok("%s: %s", host, why).because(Fail, "the store cannot be found", "check AWS_ENDPOINT_URL, /etc/resolv.conf, and in Kubernetes dnsPolicy")
	}
	r := ok("%s is %s (%d addresses, %s)", host, found[0], len(found), short(took)).with("seconds", took.Seconds())
	if took > 200*time.Millisecond {
		return r.because(Warn, "each new connection waits for this", "a caching resolver on this machine (in Kubernetes: NodeLocal DNSCache, ndots: 1)")
	}
	return r
}

func (s *Source) tcp(ctx context.Context) Result {
	host, port := s.address()
	at := net.JoinHostPort(host, port)
	began := time.Now()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", at)
	took := time.Since(began)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err
		}
		return ok("%s: %s", at, cause(err)).because(Fail, "no connection is possible", "check AWS_ENDPOINT_URL (now "+s.where.Endpoint+"), firewall, security group and network policy")
	}
	defer conn.Close()
	return ok("%s connects in %s", conn.RemoteAddr(), short(took)).with("seconds", took.Seconds())
}

// soonExpires is the time before a certificate's end from which it causes a warning.
const soonExpires = 14 * 24 * time.Hour

func (s *Source) tls(ctx context.Context) Result {
	if !strings.HasPrefix(s.where.Endpoint, "https://") {
		return skipped("the endpoint is plain http")
	}
	if s.viaProxy() != "" {
		return skipped("the handshake goes through a proxy; the endpoint's check shows the result")
	}
	host, port := s.address()
	cfg := s.s3.TLS()
	if cfg == nil {
		cfg = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	cfg.ServerName = host
	began := time.Now()
	conn, err := (&tls.Dialer{Config: cfg}).DialContext(ctx, "tcp", net.JoinHostPort(host, port))
	took := time.Since(began)
	var bad *tls.CertificateVerificationError
	switch {
	case errors.As(err, &bad) && len(bad.UnverifiedCertificates) > 0:
		return badCertificate(bad, host)
	case err != nil:
		return ok("handshake with %s: %s", host, oneLine(err.Error())).because(Fail, "no request can be sent", "check http:// or https:// in AWS_ENDPOINT_URL, and the server at the port: openssl s_client -connect "+net.JoinHostPort(host, port))
	}
	defer conn.Close()
	state := conn.(*tls.Conn).ConnectionState()
	cert := state.PeerCertificates[0]
	left := time.Until(cert.NotAfter)
	r := ok("%s, certificate of %s until %s, connection and handshake %s", tls.VersionName(state.Version), nameOf(cert), cert.NotAfter.UTC().Format(time.DateOnly), short(took)).
		with("seconds", took.Seconds()).with("certificate_days_left", left.Hours()/24)
	if left < soonExpires {
		return r.because(Warn, fmt.Sprintf("it expires in %.1f days; after that nothing can be read", left.Hours()/24), "have the store's certificate renewed")
	}
	return r
}

func nameOf(c *x509.Certificate) string {
	if len(c.DNSNames) > 0 {
		return c.DNSNames[0]
	}
	return c.Subject.CommonName
}

func badCertificate(bad *tls.CertificateVerificationError, host string) Result {
	cert := bad.UnverifiedCertificates[0]
	var invalid x509.CertificateInvalidError
	var authority x509.UnknownAuthorityError
	r := ok("certificate of %s, from %s to %s", nameOf(cert), cert.NotBefore.UTC().Format(time.DateOnly), cert.NotAfter.UTC().Format(time.DateOnly))
	switch {
	case errors.As(bad.Err, &invalid) && invalid.Reason == x509.Expired && time.Now().After(cert.NotAfter):
		return r.because(Fail, "it has expired: no request can be sent", "have the store's certificate renewed; if this machine's clock is wrong: timedatectl")
	case errors.As(bad.Err, &invalid) && invalid.Reason == x509.Expired:
		return r.because(Fail, "it is not valid yet: this machine's clock is behind, or the certificate is", "timedatectl")
	case errors.As(bad.Err, &authority):
		return r.because(Fail, "it is signed by an authority that this machine does not trust", "AWS_CA_BUNDLE=FILE, the authority's certificate in PEM")
	}
	return r.because(Fail, oneLine(bad.Err.Error()), "use the host name of the store's certificate in AWS_ENDPOINT_URL (now "+host+")")
}

func (s *Source) endpoint(ctx context.Context) Result {
	began := time.Now()
	status, header, err := s.s3.Knock(ctx)
	took := time.Since(began)
	if err != nil {
		return explain(err)
	}
	s.reached = true
	s.noteClock(header, began, took)
	server := header.Get("Server")
	switch {
	case server != "":
	case header.Get("X-Amz-Request-Id") != "":
		server = "an S3 server that does not report its name"
	default:
		server = "a server that does not report its name"
	}
	r := ok("%s answers (HTTP %d, %s)", oneLine(server), status, short(took)).with("seconds", took.Seconds())
	if status >= 500 {
		return r.because(Warn, "the server has errors", "ask its operator; Shoal retries each request for about 25 s")
	}
	if t := header.Get("Content-Type"); strings.HasPrefix(t, "text/html") && header.Get("X-Amz-Request-Id") == "" {
		return r.because(Warn, "it answers with a web page: it may be a console or a portal, not an S3 API", "check AWS_ENDPOINT_URL (now "+s.where.Endpoint+")")
	}
	return r
}

const (
	skewWarn = time.Minute
	skewFail = 15 * time.Minute // S3 refuses signatures beyond this
)

// noteClock stores the difference between the store's clock and ours, and its uncertainty: a slow answer may have been
// dated at any time in between.
func (s *Source) noteClock(header http.Header, began time.Time, took time.Duration) {
	date, err := http.ParseTime(header.Get("Date"))
	if err != nil {
		return
	}
	// The header has whole seconds, so on average it is half a second behind.
	s.skew = began.Add(took / 2).Sub(date.Add(500 * time.Millisecond))
	s.within = 2*time.Second + took/2
	s.hasDate = true
}

func (s *Source) clock(context.Context) Result {
	if !s.reached {
		return skipped("the endpoint does not answer")
	}
	if !s.hasDate {
		return skipped("the answer has no Date")
	}
	off := s.skew.Abs()
	if off < s.within {
		return ok("equal to the store's, within %.0f s", s.within.Seconds()).with("skew_seconds", s.skew.Seconds())
	}
	side := "ahead of"
	if s.skew < 0 {
		side = "behind"
	}
	r := ok("this machine is %s %s the store", off.Round(time.Second), side).with("skew_seconds", s.skew.Seconds())
	switch {
	case off > skewFail:
		return r.because(Fail, "the store refuses signatures that are more than 15 minutes off", "sudo timedatectl set-ntp true")
	case off > skewWarn:
		return r.because(Warn, "beyond 15 minutes the store refuses signatures", "sudo timedatectl set-ntp true")
	}
	return r
}
