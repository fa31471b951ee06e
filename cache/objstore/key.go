package objstore

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
)

// CustomerKey is the user's key with which the store encrypts and decrypts objects (SSE-C). The store does not keep
// it: each request carries it. It prints as "***". The zero value is no key.
//
// https://docs.aws.amazon.com/AmazonS3/latest/userguide/ServerSideEncryptionCustomerKeys.html
type CustomerKey struct {
	key [customerKeySize]byte
	set bool
}

const customerKeySize = 32 // AES-256

// IsZero reports whether there is no key.
func (k CustomerKey) IsZero() bool { return !k.set }

// Bytes returns the key.
func (k CustomerKey) Bytes() []byte { return k.key[:] }

// String implements [fmt.Stringer], without the key.
func (k CustomerKey) String() string {
	if !k.set {
		return ""
	}
	return "***"
}

// Format implements [fmt.Formatter] for every verb, without the key.
func (k CustomerKey) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, k.String()) }

// LogValue implements [slog.LogValuer], without the key.
func (k CustomerKey) LogValue() slog.Value { return slog.StringValue(k.String()) }

// ParseCustomerKey reads a key: 32 raw bytes, or base64, or hexadecimal digits. Its errors do not quote the text.
func ParseCustomerKey(text []byte) (CustomerKey, error) {
	key, trimmed := text, bytes.TrimSpace(text)
	var err error
	switch {
	case len(text) == customerKeySize:
	case len(trimmed) == hex.EncodedLen(customerKeySize):
		key, err = hex.AppendDecode(nil, trimmed)
	case len(trimmed) == base64.StdEncoding.EncodedLen(customerKeySize):
		key, err = base64.StdEncoding.AppendDecode(nil, trimmed)
	}
	if err == nil && len(key) == customerKeySize {
		return CustomerKey{key: [customerKeySize]byte(key), set: true}, nil
	}
	return CustomerKey{}, errors.New(
		"a key for SSE-C is 32 bytes as they are, in base64 (44 characters), or in hexadecimal digits (64); " +
			"make one with `openssl rand 32`")
}
