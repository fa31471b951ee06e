package crypt

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/shoalfs/shoal/internal/durable"
)

// FileName is the file of a cache directory that holds its key, encrypted by the user's.
const FileName = "ENCRYPTION"

var (
	// ErrWrongSecret is wrapped by errors about a secret that is not the one a cache was made with.
	ErrWrongSecret = errors.New("wrong encryption key")
	// ErrDamaged is wrapped by errors about a key file that no secret can open any more.
	ErrDamaged = errors.New("damaged")
	// ErrOpen is returned for bytes that this key did not seal, or that were changed since.
	ErrOpen = errors.New("not authentic: damaged, or sealed with another key")
)

// Key is the key of one cache directory: 32 random bytes, made with the directory. All keys for its content are
// derived from it. It prints as "***". Safe for concurrent use.
type Key struct {
	b      [secretLen]byte
	secret string // ID of the secret that it was opened with
}

// Format prevents every verb of package fmt from printing the bytes.
func (*Key) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, hidden) }

// SecretID returns the ID of the secret that the key was opened with.
func (k *Key) SecretID() string { return k.secret }

// Derive returns a key of 32 bytes for a purpose, a constant of the program, and a salt, which may be nil.
func (k *Key) Derive(purpose string, salt []byte) []byte {
	return derive(k.b[:], salt, "shoal cache v1: "+purpose, secretLen)
}

// AEAD returns AES-256-GCM with the key that Derive returns. The caller must never repeat a nonce.
func (k *Key) AEAD(purpose string, salt []byte) cipher.AEAD {
	return must(cipher.NewGCM(must(aes.NewCipher(k.Derive(purpose, salt)))))
}

// Sealer is AEAD for small values, bound to other data. It takes no nonces, but puts a random one in front of each
// value. It may seal at most 2^32.
func (k *Key) Sealer(purpose string, salt []byte) cipher.AEAD { return sealer(k.Derive(purpose, salt)) }

func sealer(key []byte) cipher.AEAD {
	return must(cipher.NewGCMWithRandomNonce(must(aes.NewCipher(key))))
}

// must is for what fails only with keys of other lengths.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// Random fills b from the system's random generator, which never fails.
func Random(b []byte) { _, _ = rand.Read(b) }

// envelope is the content of the key file, in JSON, so that a person can see what it is.
type envelope struct {
	Format int    `json:"format"`
	Cipher string `json:"cipher"`
	KeyID  string `json:"key_id"`      // of the secret
	Key    []byte `json:"wrapped_key"` // the cache's key, by a Sealer
	Sum    uint32 `json:"crc32c"`      // of KeyID and Key
}

const envelopeCipher = "AES-256-GCM"

func (e *envelope) sum() uint32 {
	return crc32.Checksum(append([]byte(e.KeyID), e.Key...), crc32.MakeTable(crc32.Castagnoli))
}

func wrapAEAD(s Secret) cipher.AEAD {
	return sealer(derive(s.b[:], nil, "shoal key wrap v1", secretLen))
}

// KeyOf returns the key with these 32 bytes: for tests and benchmarks, whose caches have no key file.
func KeyOf(b [32]byte) *Key { return &Key{b: b} }

// Exists reports whether a directory has a key file.
func Exists(dir string) (bool, error) {
	_, err := os.Lstat(filepath.Join(dir, FileName))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Create makes a key for a directory without one, and writes it there.
func Create(dir string, s Secret) (*Key, error) {
	k := new(Key)
	Random(k.b[:])
	return k, k.Rewrap(dir, s)
}

// Rewrap encrypts the directory's key with another secret. Data encrypted with the directory's key stays as it is.
// After a crash the old file or the new one is there.
func (k *Key) Rewrap(dir string, s Secret) error {
	e := envelope{Format: 1, Cipher: envelopeCipher, KeyID: s.ID()}
	e.Key = wrapAEAD(s).Seal(nil, nil, k.b[:], []byte(e.KeyID))
	e.Sum = e.sum()
	b, err := json.MarshalIndent(e, "", "  ")
	if err != nil {
		return err
	}
	err = durable.Write(filepath.Join(dir, FileName), "crypt.key", 0o600, slices.Values([][]byte{b, {'\n'}}))
	if err == nil {
		k.secret = e.KeyID
	}
	return err
}

// Open reads a directory's key. Its errors wrap ErrWrongSecret, ErrDamaged, or the system's error.
func Open(dir string, s Secret) (*Key, error) {
	path := filepath.Join(dir, FileName)
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var e envelope
	dec := json.NewDecoder(bytes.NewReader(b))
	if err := dec.Decode(&e); err != nil || e.Format == 1 && e.Sum != e.sum() {
		return nil, fmt.Errorf("%s is %w: without it nothing in the cache can be read (restore that file from a "+
			"backup, or remove the whole folder)", path, ErrDamaged)
	}
	if e.Format != 1 || e.Cipher != envelopeCipher {
		return nil, fmt.Errorf(
			"%s: format %d with %q was written by a newer version of shoal (use that version, or another --cache-dir)",
			path, e.Format, e.Cipher)
	}
	raw, err := wrapAEAD(s).Open(nil, nil, e.Key, []byte(e.KeyID))
	if err != nil || len(raw) != secretLen {
		if e.KeyID == s.ID() {
			return nil, fmt.Errorf("%s is %w (restore that file from a backup, or remove the whole folder)",
				path, ErrDamaged)
		}
		return nil, fmt.Errorf("%w for the cache in %s: it needs the key %s, but was given %s (give the key that it "+
			"was made with, or another --cache-dir)", ErrWrongSecret, dir, e.KeyID, s.ID())
	}
	return &Key{b: [secretLen]byte(raw), secret: s.ID()}, nil
}
