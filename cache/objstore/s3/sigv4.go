package s3

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
)

// emptySHA256 is the SHA-256 of no bytes, a GET's payload.
const emptySHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

// signer signs GETs by AWS Signature Version 4. For each request minio-go derives the signing key again, five HMACs
// instead of one, and sorts header maps. Here the key is kept for its day and the headers are written in sorted
// order, so a signature costs two hashes.
//
// https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
type signer struct {
	region string
	pays   bool     // the requester
	sse    []header // of the customer's key
	key    atomic.Pointer[signingKey]
}

// signingKey is the key for all signatures of one day with one key pair.
type signingKey struct {
	id, secret, day string
	scope           string    // day/region/s3/aws4_request
	macs            sync.Pool // of hash.Hash, keyed
}

// amzTime and its first amzDay characters are the time formats in a signature.
const (
	amzTime = "20060102T150405Z"
	amzDay  = len("20060102")
)

// SigningKey derives the key of a day's signatures from a secret. day is written 20060102.
func SigningKey(secret, day, region string) []byte {
	key := []byte("AWS4" + secret)
	for _, part := range [...]string{day, region, "s3", "aws4_request"} {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(part))
		key = mac.Sum(nil)
	}
	return key
}

// keyFor returns the signing key of v for day.
func (s *signer) keyFor(v *aws.Credentials, day []byte) *signingKey {
	if k := s.key.Load(); k != nil && k.day == string(day) && k.id == v.AccessKeyID && k.secret == v.SecretAccessKey {
		return k
	}
	k := &signingKey{id: v.AccessKeyID, secret: v.SecretAccessKey, day: string(day)}
	k.scope = k.day + "/" + s.region + "/s3/aws4_request"
	key := SigningKey(k.secret, k.day, s.region)
	k.macs.New = func() any { return hmac.New(sha256.New, key) }
	s.key.Store(k)
	return k
}

// signedGet is a signed GET of an object. Like minio-go it signs all headers, so that If-Match and Range cannot be
// changed in transit either.
type signedGet struct {
	host    string
	path    []byte // percent-encoded, with the slash that it begins with
	query   string // percent-encoded, without the question mark
	etag    string // for If-Match, without quotes; empty: none
	rangeOf string // for Range; empty: none
}

// addHeader appends a header, whose name comes after those before it, as it is sent and as it is signed, and its name.
// The parts make its value.
func addHeader(sent, signed, names []byte, name, lower string, parts ...string) (_, _, _ []byte) {
	sent = append(append(sent, name...), ": "...)
	signed = append(append(signed, lower...), ':')
	for _, p := range parts {
		sent, signed = append(sent, p...), append(signed, p...)
	}
	return append(sent, "\r\n"...), append(signed, '\n'), append(append(names, lower...), ';')
}

// appendHeaders appends g's head, from the Host header to the empty line, to b. scratch is overwritten and returned
// for the next call. Without keys in v the request is anonymous.
func (s *signer) appendHeaders(b, scratch []byte, g *signedGet, v *aws.Credentials, now time.Time) (
	head, spare []byte) {
	var stamp [len(amzTime)]byte
	date := now.UTC().AppendFormat(stamp[:0], amzTime)
	anonymous := !v.HasKeys()
	// The canonical request: method, path, query, headers, their names, the payload's hash.
	c := append(scratch[:0], "GET\n"...)
	c = append(c, g.path...)
	c = append(c, '\n')
	c = append(c, g.query...)
	c = append(c, '\n')
	names := make([]byte, 0, 320)
	b, c, names = addHeader(b, c, names, "Host", "host", g.host)
	if g.etag != "" {
		b, c, names = addHeader(b, c, names, "If-Match", "if-match", `"`, g.etag, `"`)
	}
	if g.rangeOf != "" {
		b, c, names = addHeader(b, c, names, "Range", "range", g.rangeOf)
	}
	if !anonymous {
		b, c, names = addHeader(b, c, names, "X-Amz-Content-Sha256", "x-amz-content-sha256", emptySHA256)
		b, c, names = addHeader(b, c, names, "X-Amz-Date", "x-amz-date", string(date))
	}
	if s.pays {
		b, c, names = addHeader(b, c, names, headerPayer, "x-amz-request-payer", payerRequester)
	}
	if v.SessionToken != "" && !anonymous {
		b, c, names = addHeader(b, c, names, "X-Amz-Security-Token", "x-amz-security-token", v.SessionToken)
	}
	for _, e := range s.sse {
		b, c, names = addHeader(b, c, names, e.name, strings.ToLower(e.name), e.value)
	}
	if anonymous {
		return append(b, "\r\n"...), c
	}
	names = names[:len(names)-1]
	c = append(c, '\n')
	c = append(c, names...)
	c = append(c, "\n"+emptySHA256...)
	digest := sha256.Sum256(c)

	// The string to sign.
	k := s.keyFor(v, date[:amzDay])
	c = append(c[:0], "AWS4-HMAC-SHA256\n"...)
	c = append(c, date...)
	c = append(c, '\n')
	c = append(c, k.scope...)
	c = append(c, '\n')
	c = hex.AppendEncode(c, digest[:])
	mac := k.macs.Get().(hash.Hash)
	mac.Reset()
	mac.Write(c)
	sum := mac.Sum(c[:0])
	k.macs.Put(mac)

	b = append(b, "Authorization: AWS4-HMAC-SHA256 Credential="...)
	b = append(b, v.AccessKeyID...)
	b = append(b, '/')
	b = append(b, k.scope...)
	b = append(b, ", SignedHeaders="...)
	b = append(b, names...)
	b = append(b, ", Signature="...)
	b = hex.AppendEncode(b, sum)
	return append(b, "\r\n\r\n"...), c
}

// AppendPath appends s percent-encoded as S3 signs it: everything except A-Z a-z 0-9 - _ . ~ and the slash.
func AppendPath(b []byte, s string) []byte {
	const digits = "0123456789ABCDEF"
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_', c == '.',
			c == '~', c == '/':
			b = append(b, c)
		default:
			b = append(b, '%', digits[c>>4], digits[c&15])
		}
	}
	return b
}
