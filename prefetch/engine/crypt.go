package engine

// FitsDir is the folder for values computed once per version of a dataset.
func (d *Dataset) FitsDir() string { return d.e.host.FitsDir() }

// SealFit encodes a value computed from a dataset's content for the file name in FitsDir.
func (d *Dataset) SealFit(name string, b []byte) []byte {
	if k := d.e.host.Key; k != nil {
		return k.Sealer("fits", nil).Seal(nil, nil, b, []byte(name))
	}
	return b
}

// OpenFit is the reverse of SealFit.
func (d *Dataset) OpenFit(name string, b []byte) ([]byte, error) {
	if k := d.e.host.Key; k != nil {
		return k.Sealer("fits", nil).Open(nil, nil, b, []byte(name))
	}
	return b, nil
}
