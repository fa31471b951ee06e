package catalog

// Received reads a manifest and its layout that another node has sent; without a layout, layout is nil. It trusts
// nothing: it also recomputes the versions, so that whoever knows these has what was listed. prefix and skipped are the
// sender's.
func Received(manifest, layout []byte, prefix string, skipped Skipped) (*Manifest, *Layout, error) {
	m, err := parse(manifest)
	if err == nil {
		err = m.Verify()
	}
	if err != nil {
		return nil, nil, err
	}
	m.prefix, m.skipped = prefix, skipped
	if layout == nil {
		return m, nil, nil
	}
	l, err := parseLayout(layout, m)
	if err == nil {
		err = l.Verify()
	}
	return m, l, err
}
