package catalog

// Raw returns the content of the manifest's file, for another node. It must not be changed, or used after Close.
func (m *Manifest) Raw() []byte { return m.data }

// Raw returns the content of the layout's file, as [Manifest.Raw] does.
func (l *Layout) Raw() []byte { return l.data }

// Received reads a manifest and its layout that another node has sent; without a layout, layout is nil. It trusts nothing:
// it also recomputes the versions, so that whoever knows these has what was listed. prefix and skipped are the sender's.
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
