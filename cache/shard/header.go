package shard

import (
	"strconv"
	"strings"
)

const (
	blockSize  = 512
	endLen     = 2 * blockSize // the two zero blocks that end a tar
	ustarName  = 100
	ustarPath  = 155
	ustarOctal = 1<<33 - 1 // largest number in 11 octal digits
)

// pad returns n rounded up to whole blocks.
func pad(n int64) int64 { return (n + blockSize - 1) &^ (blockSize - 1) }

// splitUstar splits a name into the two fields of ustar. ok is false if it does not fit.
func splitUstar(name string) (prefix, base string, ok bool) {
	for i := range len(name) {
		if name[i] >= 0x80 {
			return "", "", false
		}
	}
	if len(name) <= ustarName {
		return "", name, true
	}
	// The longest prefix that fits leaves the shortest rest.
	i := strings.LastIndexByte(name[:min(len(name), ustarPath+1)], '/')
	if i <= 0 || len(name)-i-1 > ustarName || i+1 == len(name) {
		return "", "", false
	}
	return name[:i], name[i+1:], true
}

// headerLen returns the number of bytes before the member's content.
func headerLen(name string, size int64) int64 {
	_, _, fits := splitUstar(name)
	if fits && size <= ustarOctal {
		return blockSize
	}
	n := 0
	if !fits {
		n += paxLen("path", len(name))
	}
	if size > ustarOctal {
		n += paxLen("size", len(strconv.FormatInt(size, 10)))
	}
	return 2*blockSize + pad(int64(n))
}

// paxLen returns the length of the record "LEN KEY=VALUE\n", where LEN counts itself.
func paxLen(key string, value int) int {
	n := len(key) + value + 3
	total := n + len(strconv.Itoa(n))
	if len(strconv.Itoa(total)) > len(strconv.Itoa(n)) {
		total++
	}
	return total
}

func appendPax(dst []byte, key, value string) []byte {
	dst = strconv.AppendInt(dst, int64(paxLen(key, len(value))), 10)
	dst = append(append(append(dst, ' '), key...), '=')
	return append(append(dst, value...), '\n')
}

// appendHeader appends the bytes before a member's content. mtime is in seconds.
func appendHeader(dst []byte, name string, size, mtime int64) []byte {
	prefix, base, fits := splitUstar(name)
	if !fits || size > ustarOctal {
		var pax []byte
		if !fits {
			pax = appendPax(pax, "path", name)
			prefix, base = "", asciiName(name)
		}
		if size > ustarOctal {
			pax = appendPax(pax, "size", strconv.FormatInt(size, 10))
		}
		dst = appendBlock(dst, "", asciiName("PaxHeaders.0/"+name[strings.LastIndexByte(name, '/')+1:]), 'x', int64(len(pax)), mtime)
		dst = append(dst, pax...)
		dst = append(dst, make([]byte, pad(int64(len(pax)))-int64(len(pax)))...)
	}
	if size > ustarOctal {
		size = 0 // readers take it from the PAX header
	}
	return appendBlock(dst, prefix, base, '0', size, mtime)
}

// asciiName is the name for readers without PAX support.
func asciiName(name string) string {
	var b strings.Builder
	for i := 0; i < len(name) && b.Len() < ustarName; i++ {
		if c := name[i]; c < 0x80 {
			b.WriteByte(c)
		} else {
			b.WriteByte('_')
		}
	}
	// A slash at the end would make it a folder.
	return strings.TrimRight(b.String(), "/")
}

// appendBlock appends one ustar header block.
func appendBlock(dst []byte, prefix, base string, typeflag byte, size, mtime int64) []byte {
	at := len(dst)
	dst = append(dst, make([]byte, blockSize)...)
	h := dst[at:]
	copy(h[0:100], base)
	copy(h[100:], "0000644\x00")
	copy(h[108:], "0000000\x00")
	copy(h[116:], "0000000\x00")
	octal(h[124:136], size)
	if mtime < 0 || mtime > ustarOctal {
		mtime = 0
	}
	octal(h[136:148], mtime)
	h[156] = typeflag
	copy(h[257:], "ustar\x0000")
	copy(h[329:], "0000000\x00")
	copy(h[337:], "0000000\x00")
	copy(h[345:500], prefix)
	sum := int64(8 * ' ')
	for _, c := range h {
		sum += int64(c)
	}
	octal(h[148:155], sum)
	h[155] = ' '
	return dst
}

// octal fills b with v, zero-padded, and a NUL.
func octal(b []byte, v int64) {
	for i := len(b) - 2; i >= 0; i-- {
		b[i] = '0' + byte(v&7)
		v >>= 3
	}
	b[len(b)-1] = 0
}
