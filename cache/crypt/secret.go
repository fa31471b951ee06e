package crypt

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
)

// secretLen is the length of a secret and of every key here, in bytes: AES-256.
const secretLen = 32

// Secret is the user's key. It encrypts only the key of a cache ([Key]). It prints as "***".
type Secret struct{ b [secretLen]byte }

const hidden = "***"

// Format prevents every verb of package fmt from printing the bytes.
func (Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, hidden) }

// MarshalText keeps the bytes out of JSON, YAML and logs.
func (Secret) MarshalText() ([]byte, error) { return []byte(hidden), nil }

var errSecret = errors.New(
	"not a key: give 32 random bytes, as they are, in hex (64 digits) or in base64 (`head -c 32 /dev/urandom | " +
		"base64` makes one)")

// ParseSecret accepts 32 raw bytes, or hex or base64 with white space around them.
func ParseSecret(b []byte) (Secret, error) {
	if _, err := hex.DecodeString(string(b)); len(b) == secretLen && err != nil { // not half a key in hex
		return secretOf(b)
	}
	text := bytes.TrimSpace(b)
	if raw, err := hex.DecodeString(string(text)); err == nil && len(raw) == secretLen {
		return secretOf(raw)
	}
	unpadded := bytes.TrimRight(text, "=")
	for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		if raw, err := enc.DecodeString(string(unpadded)); err == nil && len(raw) == secretLen {
			return secretOf(raw)
		}
	}
	return Secret{}, errSecret
}

func secretOf(raw []byte) (Secret, error) {
	if bytes.Count(raw, raw[:1]) == len(raw) {
		return Secret{}, fmt.Errorf("%w; all its bytes are the same", errSecret)
	}
	return Secret{[secretLen]byte(raw)}, nil
}

// ID names the secret in 16 hex digits that reveal nothing else about it. Messages use it to say which key a cache
// needs and which one was given.
func (s Secret) ID() string {
	return hex.EncodeToString(derive(s.b[:], nil, "shoal encryption key id v1", 8))
}

// derive is HKDF-SHA256 (RFC 5869).
func derive(key, salt []byte, info string, n int) []byte {
	return must(hkdf.Key(sha256.New, key, salt, info, n))
}
