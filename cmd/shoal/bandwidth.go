package main

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/internal/cli"
)

// bandwidth is a flag value in bytes per second, written 10Gbit, 1GiB/s, 500MB/s or unlimited, which is 0.
type bandwidth float64

func (b *bandwidth) Type() string { return "rate" }

// String returns bits, the usual unit of links: 10Gbit. The result parses to the same bandwidth, to three digits.
func (b *bandwidth) String() string {
	if *b == 0 {
		return "unlimited"
	}
	bits, i := float64(*b)*8, 0
	for ; i < len(prefixes)-1 && bits >= 999.5; i++ {
		bits /= 1000
	}
	return fmt.Sprintf("%.3g%s", bits, strings.TrimSpace(prefixes[i:i+1]+"bit"))
}

// words is String for sentences: 10 Gbit/s.
func (b *bandwidth) words() string {
	s := b.String()
	if i := strings.IndexAny(s, "TGMkb"); i > 0 {
		return s[:i] + " " + s[i:] + "/s"
	}
	return s
}

// prefixes are those of bits, each a thousand times the one before.
const prefixes = " kMGT"

// inBits is a number, and a letter of prefixes or none.
var inBits = regexp.MustCompile(`^(.*?)\s*([tgmk]?)(?:bit|bits?/s|bps)$`)

// maxBandwidth is above any real link.
const maxBandwidth = 1 << 60

func (b *bandwidth) Set(text string) error {
	word := strings.ToLower(strings.TrimSpace(text))
	if word == "unlimited" {
		*b = 0
		return nil
	}
	var bytes float64
	var err error
	if bits := inBits.FindStringSubmatch(word); bits != nil {
		bytes, err = strconv.ParseFloat(bits[1], 64)
		bytes *= math.Pow(1000, float64(strings.Index(strings.ToLower(prefixes), bits[2]))) / 8
	} else if number, ok := strings.CutSuffix(word, "/s"); ok && strings.HasSuffix(number, "b") {
		var n int64
		n, err = cli.ParseSize(number, "")
		bytes = float64(n)
	} else {
		err = strconv.ErrSyntax
	}
	if err != nil {
		return fmt.Errorf("%q is not a bandwidth (write 10Gbit, 1GiB/s, 500MB/s or unlimited)", text)
	}
	if math.IsNaN(bytes) || bytes < 1 || bytes > maxBandwidth {
		return fmt.Errorf("bandwidth %q: give at least 1B/s, or unlimited", text)
	}
	*b = bandwidth(bytes)
	return nil
}
