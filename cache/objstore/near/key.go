package near

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"net/url"
	"path"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/cache/objstore"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// keyOf returns the key of a unit's copy, below the tier's prefix. Quotes keep the fields apart.
func keyOf(origin string, o objstore.Object, unit int64) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q %d %d", origin, o.Key, o.ETag, o.Size, unit))
	h := hex.EncodeToString(sum[:])
	return "v1/" + h[:2] + "/" + h
}

// note is what is stored beside a copy's bytes: one line of six words.
type note struct {
	size int64
	id   string   // the copy's key after the last slash: an engine that mixes up objects is found out
	sums []uint32 // CRC32C of each granule
	etag string   // of the object, for people, as its key is
	key  string   // cut if it is long
}

// S3 stores 2 KB of user metadata. 64 checksums take 344 bytes.
const (
	noteVersion = "1"
	longestKey  = 512
	longestNote = 2000
)

func noteOf(o objstore.Object, copyKey string, data []byte) note {
	n := note{size: int64(len(data)), id: path.Base(copyKey), etag: o.ETag, key: o.Key}
	for ; len(data) > 0; data = data[min(granuleSize, len(data)):] {
		n.sums = append(n.sums, crc32.Checksum(data[:min(granuleSize, len(data))], castagnoli))
	}
	return n
}

// String encodes the note.
func (n note) String() string {
	var sums []byte
	for _, s := range n.sums {
		sums = binary.BigEndian.AppendUint32(sums, s)
	}
	key := url.QueryEscape(n.key)
	if len(key) > longestKey {
		key = key[:longestKey-3] // and not a part of an escape
		if i := strings.LastIndexByte(key, '%'); i > len(key)-3 {
			key = key[:i]
		}
		key += "..."
	}
	return strings.Join([]string{noteVersion, strconv.FormatInt(n.size, 10), n.id,
		base64.StdEncoding.EncodeToString(sums), url.QueryEscape(n.etag), key}, " ")
}

// parseNote decodes what programs read of a note, which may be any text. The number of checksums fits its size.
func parseNote(text string) (n note, err error) {
	f := strings.Split(text, " ")
	if len(text) > longestNote || len(f) != 6 || f[0] != noteVersion {
		return n, errors.New("it has no note of this version")
	}
	if n.size, err = strconv.ParseInt(f[1], 10, 64); err != nil || n.size < 1 || n.size > unitSize {
		return n, fmt.Errorf("size %.20q in its note", f[1])
	}
	n.id = f[2]
	sums, err := base64.StdEncoding.Strict().DecodeString(f[3])
	if err != nil || int64(len(sums)) != (n.size+granuleSize-1)/granuleSize*4 {
		return n, errors.New("the checksums in its note")
	}
	for ; len(sums) > 0; sums = sums[4:] {
		n.sums = append(n.sums, binary.BigEndian.Uint32(sums))
	}
	return n, nil
}
