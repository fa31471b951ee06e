package s3api

import (
	"bufio"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache/objstore/s3"
)

const (
	algorithm = "AWS4-HMAC-SHA256"
	amzTime   = "20060102T150405Z"
	// window is how far a request's date may be off.
	window = 15 * time.Minute
	// maxExpiry is the longest life of a presigned request.
	maxExpiry = 7 * 24 * 60 * 60
	unsigned  = "UNSIGNED-PAYLOAD"
)

// Keys are secrets by access key.
type Keys map[string]*secret

type secret struct {
	text string
	last atomic.Pointer[signingKey]
}

// signingKey is a secret's for a day and a region. Deriving it takes longer than checking a signature with it.
type signingKey struct {
	day, region string
	key         []byte
}

func (s *secret) signingKey(day, region string) []byte {
	k := s.last.Load()
	if k == nil || k.day != day || k.region != region {
		k = &signingKey{day, region, s3.SigningKey(s.text, day, region)}
		s.last.Store(k)
	}
	return k.key
}

// ParseKeys reads lines of an access key and its secret. Empty lines and those that begin with # are left out.
func ParseKeys(r io.Reader) (Keys, error) {
	keys := Keys{}
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		f := strings.Fields(lines.Text())
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		if len(f) != 2 || strings.ContainsFunc(f[0], func(r rune) bool { return r > '~' }) { // or a byte order mark
			// without the text: it may be a secret
			return nil, fmt.Errorf("line %d: write an access key, a space and its secret", n)
		}
		if _, twice := keys[f[0]]; twice {
			return nil, fmt.Errorf("line %d: this access key has a secret already", n)
		}
		keys[f[0]] = &secret{text: f[1]}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("it has no key: write lines of an access key, a space and its secret")
	}
	return keys, nil
}

type signature struct {
	access    string
	scope     [4]string // day, region, s3, aws4_request
	headers   []string  // signed, lower case
	sum       []byte
	date      time.Time
	payload   string // as signed
	presigned bool
	expires   time.Duration // of a presigned one
}

// verify checks a request's signature against keys at the time now. A body in signed chunks is replaced with its
// content, which is checked as it is read.
func (keys Keys) verify(r *http.Request, query url.Values, now time.Time) error {
	s, err := parseSignature(r, query)
	if err != nil {
		return err
	}
	secret, known := keys[s.access]
	if !known {
		return errAccessKey
	}
	if err := s.inTime(now); err != nil {
		return err
	}
	if err := s.covers(r); err != nil {
		return err
	}
	digest := sha256.Sum256([]byte(s.canonical(r, query)))
	c := &chain{key: secret.signingKey(s.scope[0], s.scope[1]), date: s.date.Format(amzTime),
		scope: strings.Join(s.scope[:], "/"), last: hex.EncodeToString(s.sum)}
	mac := hmac.New(sha256.New, c.key)
	mac.Write([]byte(algorithm + "\n" + c.date + "\n" + c.scope + "\n" + hex.EncodeToString(digest[:])))
	if !hmac.Equal(mac.Sum(nil), s.sum) {
		return errSignature
	}
	return unchunk(r, c)
}

// parseSignature reads the Authorization header or the presigned query.
func parseSignature(r *http.Request, query url.Values) (s signature, err error) {
	auth := r.Header.Get("Authorization")
	switch {
	case auth == "" && !query.Has("X-Amz-Signature") && !query.Has("X-Amz-Algorithm"):
		return s, errUnsigned
	case auth == "":
		return parsePresigned(query)
	}
	s, err = parseAuthorization(auth)
	if err != nil {
		return s, err
	}
	date := r.Header.Get("X-Amz-Date")
	if s.date, err = time.Parse(amzTime, date); err != nil {
		if s.date, err = http.ParseTime(r.Header.Get("Date")); err != nil || date != "" {
			return s, denied("AWS authentication requires a valid Date or x-amz-date header")
		}
	}
	if s.payload = r.Header.Get("X-Amz-Content-Sha256"); s.payload == "" {
		return s, bad("InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
	}
	return s, s.checkDay()
}

func parseAuthorization(text string) (s signature, err error) {
	rest, ok := strings.CutPrefix(text, algorithm+" ")
	if !ok {
		return s, bad("InvalidRequest",
			"The authorization mechanism you have provided is not supported. Please use "+algorithm+".")
	}
	fields := map[string]string{}
	for part := range strings.SplitSeq(rest, ",") {
		name, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		if _, twice := fields[name]; !ok || twice {
			return s, badAuth("it has Credential, SignedHeaders and Signature, each once.")
		}
		fields[name] = value
	}
	return s, s.fill(fields["Credential"], fields["SignedHeaders"], fields["Signature"])
}

func parsePresigned(query url.Values) (s signature, err error) {
	malformed := func(text string) error { return bad("AuthorizationQueryParametersError", text) }
	for _, name := range []string{"X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Signature", "X-Amz-Date",
		"X-Amz-SignedHeaders", "X-Amz-Expires"} {
		if len(query[name]) != 1 {
			return s, malformed("Query-string authentication version 4 requires the X-Amz-Algorithm, " +
				"X-Amz-Credential, X-Amz-Signature, X-Amz-Date, X-Amz-SignedHeaders, and X-Amz-Expires parameters.")
		}
	}
	if query.Get("X-Amz-Algorithm") != algorithm {
		return s, malformed("X-Amz-Algorithm only supports " + algorithm)
	}
	if err := s.fill(query.Get("X-Amz-Credential"), query.Get("X-Amz-SignedHeaders"),
		query.Get("X-Amz-Signature")); err != nil {
		return s, malformed(err.(*apiError).message) //nolint:errorlint // fill has no other
	}
	if s.date, err = time.Parse(amzTime, query.Get("X-Amz-Date")); err != nil {
		return s, malformed("X-Amz-Date must be in the ISO8601 Long Format \"yyyyMMdd'T'HHmmss'Z'\"")
	}
	seconds, err := strconv.Atoi(query.Get("X-Amz-Expires"))
	if err != nil || seconds < 1 || seconds > maxExpiry {
		return s, malformed("X-Amz-Expires must be a number of seconds from 1 to 604800")
	}
	s.presigned, s.payload, s.expires = true, unsigned, time.Duration(seconds)*time.Second
	return s, s.checkDay()
}

// fill sets the parts that header and query have alike. Its errors are of type *apiError.
func (s *signature) fill(credential, headers, sum string) error {
	parts := strings.Split(credential, "/")
	n := len(parts)
	if n < 5 || parts[n-2] != "s3" || parts[n-1] != "aws4_request" {
		return badAuth("the Credential is ACCESS-KEY/YYYYMMDD/REGION/s3/aws4_request.")
	}
	s.access = strings.Join(parts[:n-4], "/") // an access key may contain slashes
	copy(s.scope[:], parts[n-4:])
	s.headers = strings.Split(headers, ";")
	if !slices.Contains(s.headers, "host") || !slices.IsSorted(s.headers) || headers != strings.ToLower(headers) {
		return badAuth("SignedHeaders are sorted names in lower case, and host is one of them.")
	}
	var err error
	if s.sum, err = hex.DecodeString(sum); err != nil || len(s.sum) != sha256.Size {
		return badAuth("the Signature is 64 hexadecimal digits.")
	}
	return nil
}

func (s *signature) checkDay() error {
	if s.scope[0] != s.date.UTC().Format("20060102") {
		return badAuth("the Credential's day is not the day of the request.")
	}
	return nil
}

func (s *signature) inTime(now time.Time) error {
	switch age := now.Sub(s.date); {
	case !s.presigned && (age > window || age < -window):
		return errSkewed
	case s.presigned && age < -window:
		return errNotYet
	case s.presigned && age > s.expires:
		return errExpired
	}
	return nil
}

// covers checks that no header that S3 acts on is left unsigned.
func (s *signature) covers(r *http.Request) error {
	for name := range r.Header {
		if name = strings.ToLower(name); strings.HasPrefix(name, "x-amz-") && !slices.Contains(s.headers, name) {
			return errUnsignedHeader
		}
	}
	return nil
}

func (s *signature) canonical(r *http.Request, query url.Values) string {
	var b strings.Builder
	b.WriteString(r.Method + "\n")
	b.Write(s3.AppendPath(nil, r.URL.Path))
	b.WriteString("\n" + canonicalQuery(query) + "\n")
	for _, name := range s.headers {
		b.WriteString(name + ":" + headerValue(r, name) + "\n")
	}
	b.WriteString("\n" + strings.Join(s.headers, ";") + "\n" + s.payload)
	return b.String()
}

// canonicalQuery is the query without the signature itself.
func canonicalQuery(query url.Values) string {
	signed := url.Values{}
	for name, values := range query {
		if name != "X-Amz-Signature" {
			signed[name] = slices.Sorted(slices.Values(values))
		}
	}
	return strings.ReplaceAll(signed.Encode(), "+", "%20") // a plus sign itself is %2B
}

// headerValue is a header as it is signed. net/http takes some out of the map.
func headerValue(r *http.Request, name string) string {
	switch name {
	case "host":
		return r.Host
	case "content-length":
		return strconv.FormatInt(r.ContentLength, 10)
	case "transfer-encoding":
		return strings.Join(r.TransferEncoding, ",")
	}
	values := slices.Clone(r.Header.Values(name))
	for i, v := range values {
		values[i] = strings.Join(strings.Fields(v), " ")
	}
	return strings.Join(values, ",")
}
