package shard

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"github.com/shoalfs/shoal/cache/catalog"
)

const (
	noExt     = "noext"
	maxBase   = 255
	maxSample = 256 // files of one stem: a real sample has a handful of fields
)

// mode says which dots of a base name separate stem and extension.
type mode uint8

const (
	modePlain mode = iota // the first one, as WebDataset reads it
	modeSplit             // the last one
	modeWhole             // none
)

// Escaped counts the files whose name in the tar is not their path, by reason; a file can have several.
type Escaped struct {
	Files       int `json:"files"`        // all of them, each once
	Dotfiles    int `json:"dotfiles"`     // leading dot
	NoExtension int `json:"no_extension"` // no extension, or an empty one
	SameStem    int `json:"same_stem"`    // would have merged with another file of its folder
	Percent     int `json:"percent"`      // has %2E or %25 in its name
	Long        int `json:"long"`         // over 255 bytes when escaped
}

// leadingDots returns how many dots name begins with.
func leadingDots(name string) int { return len(name) - len(strings.TrimLeft(name, ".")) }

// lastExt returns what follows the last dot, "" if there is none past the leading ones.
func lastExt(name string) string {
	if i := strings.LastIndexByte(name, '.'); i >= leadingDots(name) {
		return name[i+1:]
	}
	return ""
}

// tarName is a base name in the tar: stem, ".", ext.
type tarName struct{ stem, ext string }

func (t tarName) String() string { return t.stem + "." + t.ext }

func (t tarName) compare(u tarName) int {
	return cmp.Or(strings.Compare(t.stem, u.stem), strings.Compare(t.ext, u.ext))
}

// escape returns a file's name in the tar; the package comment has the rules. It counts in e, unless nil.
func escape(name string, m mode, e *Escaped) tarName {
	lead := leadingDots(name)
	var stem, ext string
	last := lastExt(name)
	bare := last == "" || last == noExt || m == modeWhole
	switch {
	case bare:
		stem, ext = name, noExt
	case m == modeSplit:
		stem, ext = name[:len(name)-len(last)-1], last
	default:
		stem, ext, _ = catalog.Cut(name)
	}
	t := tarName{escapeText(stem, true), escapeText(ext, false)}
	long := len(t.stem)+1+len(t.ext) > maxBase
	if long {
		if len(t.ext) > maxBase-len("%2e")-32-1 {
			stem, t.ext = name, noExt
		}
		sum := sha256.Sum256([]byte(stem))
		t.stem = "%2e" + hex.EncodeToString(sum[:16])
	}
	if e != nil && (bare || len(t.stem)+1+len(t.ext) != len(name) || t.String() != name) {
		e.Files++
		count := func(n *int, is bool) {
			if is {
				*n++
			}
		}
		count(&e.Dotfiles, lead > 0)
		count(&e.NoExtension, last == "" || last == noExt)
		count(&e.SameStem, m != modePlain && strings.IndexByte(stem[lead:], '.') >= 0)
		count(&e.Percent, escapeText(name, false) != name)
		count(&e.Long, long)
	}
	return t
}

func isEscape(s string) bool {
	return strings.HasPrefix(s, "%2E") || strings.HasPrefix(s, "%2e") || strings.HasPrefix(s, "%25")
}

// escapeText writes "%" as "%25" if it would read as an escape, and with dots set also dots as "%2E". It is
// reversible, so no two texts become the same.
func escapeText(s string, dots bool) string {
	if strings.IndexByte(s, '%') < 0 && (!dots || strings.IndexByte(s, '.') < 0) {
		return s
	}
	var b strings.Builder
	for i := range len(s) {
		switch {
		case s[i] == '.' && dots:
			b.WriteString("%2E")
		case s[i] == '%' && isEscape(s[i:]):
			b.WriteString("%25")
		default:
			b.WriteByte(s[i])
		}
	}
	return b.String()
}
