package engine

import (
	"crypto/cipher"
	"fmt"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/crypt"
)

// ErrEncryption is wrapped by errors about a key that does not fit the cache directory, or is missing.
var ErrEncryption = catalog.ErrKey

// Encrypted reports whether what the host keeps on disk is encrypted.
func (h *Host) Encrypted() bool { return h.key != nil }

// Accepts compares what somebody asks for who shares the host with what the host does: its key, where one is
// given (to be let in is enough), and its audit log.
func (h *Host) Accepts(o HostConfig) error {
	if err := h.acceptsSecret(o.Secret); err != nil {
		return err
	}
	if has := h.audit.Path(); o.Audit.Path != "" && o.Audit.Path != has {
		if has == "" {
			has = "nowhere"
		}
		return fmt.Errorf("the daemon of %s writes its audit log to %s, and not to %s (give that one, none, or start the daemon with it)", h.cfg.CacheDir, has, o.Audit.Path)
	}
	return nil
}

func (h *Host) acceptsSecret(s *crypt.Secret) error {
	switch {
	case s == nil:
		return nil
	case h.key == nil:
		return fmt.Errorf("%w: the daemon of %s keeps its cache in clear (give no key, or another --cache-dir)", ErrEncryption, h.cfg.CacheDir)
	case h.key.SecretID() != s.ID():
		return fmt.Errorf("%w: %w: the daemon of %s has the key %s and was given %s (give that key, none, or another --cache-dir)",
			ErrEncryption, crypt.ErrWrongSecret, h.cfg.CacheDir, h.key.SecretID(), s.ID())
	}
	return nil
}

// Rekey makes another secret the one that the cache directory is opened by. The old one opens it no more; what
// is cached stays as it is, since what encrypts it is a key of the directory's own.
func (h *Host) Rekey(s crypt.Secret) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.key == nil {
		return fmt.Errorf("%w: the cache in %s is not encrypted (remove the folder and begin with --encryption-key-file)", ErrEncryption, h.cfg.CacheDir)
	}
	return h.key.Rewrap(h.cfg.CacheDir, s)
}

// fits is what the small files beside the segments are encrypted by.
func (h *Host) fits() cipher.AEAD { return h.key.AEAD("fits", nil) }

// SealFit makes of what was computed from a dataset's content what may lie in FitsDir under name.
func (d *Dataset) SealFit(name string, b []byte) []byte {
	if d.e.host.key == nil {
		return b
	}
	return crypt.Seal(d.e.host.fits(), b, []byte(name))
}

// OpenFit is the reverse of SealFit.
func (d *Dataset) OpenFit(name string, b []byte) ([]byte, error) {
	if d.e.host.key == nil {
		return b, nil
	}
	return crypt.Unseal(d.e.host.fits(), b, []byte(name))
}
