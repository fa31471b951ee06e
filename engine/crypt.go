package engine

import "github.com/shoalfs/shoal/cache/crypt"

// FitsDir is the folder for what is computed once of a version of a dataset.
func (d *Dataset) FitsDir() string { return d.e.host.FitsDir() }

// SealFit makes of what was computed from a dataset's content what may lie in FitsDir under name.
func (d *Dataset) SealFit(name string, b []byte) []byte {
	if k := d.e.host.Key; k != nil {
		return crypt.Seal(k.AEAD("fits", nil), b, []byte(name))
	}
	return b
}

// OpenFit is the reverse of SealFit.
func (d *Dataset) OpenFit(name string, b []byte) ([]byte, error) {
	if k := d.e.host.Key; k != nil {
		return crypt.Unseal(k.AEAD("fits", nil), b, []byte(name))
	}
	return b, nil
}
