package objstore

import (
	"bytes"
	"crypto/md5" //nolint:gosec // S3 wants the key's MD5, to find a key that was garbled on the way; nothing is secured by it.
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"

	miniosigner "github.com/minio/minio-go/v7/pkg/signer"
)

// CustomerKey is a key of the user's with which the store encrypts and decrypts objects (SSE-C). The store
// keeps none: each request carries it. It prints as "***". The zero value is no key.
//
// https://docs.aws.amazon.com/AmazonS3/latest/userguide/ServerSideEncryptionCustomerKeys.html
type CustomerKey struct {
	key [customerKeySize]byte
	set bool
}

const customerKeySize = 32 // AES-256

// IsZero reports whether there is no key.
func (k CustomerKey) IsZero() bool { return !k.set }

// String implements [fmt.Stringer], without the key.
func (k CustomerKey) String() string {
	if !k.set {
		return ""
	}
	return "***"
}

// Format implements [fmt.Formatter], without the key, whatever the verb.
func (k CustomerKey) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, k.String()) }

// LogValue implements [slog.LogValuer], without the key.
func (k CustomerKey) LogValue() slog.Value { return slog.StringValue(k.String()) }

// ParseCustomerKey reads a key: 32 bytes as they are, in base64, or in hexadecimal digits. Its errors do not
// quote the text.
func ParseCustomerKey(text []byte) (CustomerKey, error) {
	k := CustomerKey{set: true}
	trimmed := bytes.TrimSpace(text)
	switch {
	case len(text) == customerKeySize:
		copy(k.key[:], text)
		return k, nil
	case len(trimmed) == hex.EncodedLen(customerKeySize):
		if _, err := hex.Decode(k.key[:], trimmed); err == nil {
			return k, nil
		}
	case len(trimmed) == base64.StdEncoding.EncodedLen(customerKeySize):
		var b [customerKeySize + 1]byte // what ends in "=" decodes to 32 bytes, what does not to 33
		if n, err := base64.StdEncoding.Decode(b[:], trimmed); err == nil && n == customerKeySize {
			copy(k.key[:], b[:n])
			return k, nil
		}
	}
	return CustomerKey{}, errors.New("a key for SSE-C is 32 bytes as they are, in base64 (44 characters), or in hexadecimal digits (64); " +
		"make one with `openssl rand 32`")
}

// ReadCustomerKey reads a key from a file.
func ReadCustomerKey(path string) (CustomerKey, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return CustomerKey{}, err
	}
	k, err := ParseCustomerKey(text)
	if err != nil {
		err = fmt.Errorf("%s: %w", path, err)
	}
	return k, err
}

// checkCustomerKey refuses to send the key over plain HTTP, as S3 refuses to take it, unless it does not
// leave this machine.
func checkCustomerKey(k CustomerKey, host string, secure bool) error {
	if !k.set || secure {
		return nil
	}
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = strings.Trim(host, "[]")
	}
	if addr, err := netip.ParseAddr(name); err == nil && addr.IsLoopback() || name == "localhost" {
		return nil
	}
	return errors.New("with SSE-C each request carries the key, and over http:// anybody on the way could read it")
}

// The headers of SSE-C and of who pays.
const (
	headerPayer     = "X-Amz-Request-Payer"
	headerAlgorithm = "X-Amz-Server-Side-Encryption-Customer-Algorithm"
	headerKey       = "X-Amz-Server-Side-Encryption-Customer-Key"
	headerKeyMD5    = "X-Amz-Server-Side-Encryption-Customer-Key-Md5"
	payerRequester  = "requester"
	algorithmAES    = "AES256"
)

// header is one of a request's.
type header struct{ name, value string }

// headers returns what the key adds to a request, in the order of their names.
func (k CustomerKey) headers() []header {
	if !k.set {
		return nil
	}
	sum := md5.Sum(k.key[:]) //nolint:gosec // see the import
	return []header{
		{headerAlgorithm, algorithmAES},
		{headerKey, base64.StdEncoding.EncodeToString(k.key[:])},
		{headerKeyMD5, base64.StdEncoding.EncodeToString(sum[:])},
	}
}

// extraHeaders adds to minio-go's requests what it has no words for in all of them: who pays, and the
// customer's key, also where the connection is not encrypted. S3 wants them signed, so they are signed again.
type extraHeaders struct {
	next http.RoundTripper
	sse  []header
	pays bool
	keys *keyring
}

// RoundTrip implements [http.RoundTripper].
func (h extraHeaders) RoundTrip(r *http.Request) (*http.Response, error) {
	sse := len(h.sse) > 0 && takesKey(r)
	if !sse && !h.pays {
		return h.next.RoundTrip(r)
	}
	r = r.Clone(r.Context())
	if h.pays {
		r.Header.Set(headerPayer, payerRequester)
	}
	if sse {
		for _, e := range h.sse {
			r.Header.Set(e.name, e.value)
		}
	}
	// Credential=ID/DAY/REGION/s3/aws4_request; what is anonymous has none.
	_, scope, _ := strings.Cut(r.Header.Get("Authorization"), "Credential=")
	if parts := strings.SplitN(scope, "/", 4); len(parts) == 4 {
		v := h.keys.held().value
		r.Header.Del("X-Amz-Security-Token")
		r = miniosigner.SignV4(*r, v.AccessKeyID, v.SecretAccessKey, v.SessionToken, parts[2])
	}
	return h.next.RoundTrip(r)
}

// takesKey reports whether a request, whose path begins with the bucket, reads or writes an object's bytes
// or its description. S3 knows no key in listings and deletions.
func takesKey(r *http.Request) bool {
	_, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	return key != "" && r.Method != http.MethodDelete
}
