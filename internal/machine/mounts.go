package machine

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Mount is a line of /proc/self/mountinfo.
type Mount struct {
	Device string // MAJOR:MINOR
	Root   string // the mounted folder of the file system
	Point  string
	Type   string
	Source string
	Super  string // options of the file system
	Shared bool   // with other namespaces
}

// Mounts reads the mounts, in the order in which they were made: of two at one place the later one is on top. root is
// the prefix of /proc.
func Mounts(root string) ([]Mount, error) {
	b, err := os.ReadFile(filepath.Join(root, "proc/self/mountinfo"))
	return parseMounts(string(b)), err
}

// Top returns what is mounted at a path, the topmost, or nil.
func Top(mounts []Mount, path string) *Mount {
	for i, m := range slices.Backward(mounts) {
		if m.Point == path {
			return &mounts[i]
		}
	}
	return nil
}

// parseMounts parses lines as described in proc(5):
//
//	36 35 98:0 /root /point rw,noatime shared:1 master:2 - ext4 /dev/root rw
func parseMounts(text string) (list []Mount) {
	for line := range strings.Lines(text) {
		left, right, _ := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if len(l) < 6 || len(r) < 2 {
			continue
		}
		m := Mount{Device: l[2], Root: unescape(l[3]), Point: unescape(l[4]), Type: r[0], Source: unescape(r[1]),
			Super: strings.Join(r[2:], " ")}
		for _, o := range l[6:] {
			m.Shared = m.Shared || strings.HasPrefix(o, "shared:")
		}
		list = append(list, m)
	}
	return list
}

// unescape decodes the kernel's \040 for a space, and the like.
func unescape(text string) string {
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] == '\\' && i+3 < len(text) {
			if n, err := strconv.ParseUint(text[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(text[i])
	}
	return b.String()
}
