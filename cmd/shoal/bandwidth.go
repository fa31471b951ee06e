package main

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	humanize "github.com/dustin/go-humanize"
)

// bandwidth is a flag value in bytes per second, written 10Gbit, 1GiB/s, 500MB/s or unlimited, which is 0.
type bandwidth float64

func (b *bandwidth) Type() string { return "rate" }

// String returns bits, the usual unit of links: 10Gbit. The result parses to the same bandwidth, to three digits.
func (b *bandwidth) String() string {
	if *b == 0 {
		return "unlimited"
	}
	bits := float64(*b) * 8
	for _, u := range bitUnits {
		if bits >= u.factor*0.9995 {
			return fmt.Sprintf("%.3g%s", bits/u.factor, u.name)
		}
	}
	return fmt.Sprintf("%.3gbit", bits)
}

// words is String for sentences: 10 Gbit/s.
func (b *bandwidth) words() string {
	s := b.String()
	if i := strings.IndexAny(s, "TGMkb"); i > 0 {
		return s[:i] + " " + s[i:] + "/s"
	}
	return s
}

type bitUnit struct {
	name   string
	factor float64
}

// bitUnits are decimal, the largest first.
var bitUnits = []bitUnit{{"Tbit", 1e12}, {"Gbit", 1e9}, {"Mbit", 1e6}, {"kbit", 1e3}, {"bit", 1}}

// inBits is a number, and a letter of bitUnits or none.
var inBits = regexp.MustCompile(`^(.*?)\s*([tgmk]?)(?:bit|bits?/s|bps)$`)

// maxBandwidth is above any real link.
const maxBandwidth = 1 << 60

func (b *bandwidth) Set(text string) error {
	wrong := fmt.Errorf("%q is not a bandwidth (write 10Gbit, 1GiB/s, 500MB/s or unlimited)", text)
	word := strings.ToLower(strings.TrimSpace(text))
	if word == "unlimited" {
		*b = 0
		return nil
	}
	var bytes float64
	if bits := inBits.FindStringSubmatch(word); bits != nil {
		i := slices.IndexFunc(bitUnits, func(u bitUnit) bool { return strings.ToLower(u.name) == bits[2]+"bit" })
		n, err := strconv.ParseFloat(bits[1], 64)
		if err != nil {
			return wrong
		}
		bytes = n * bitUnits[i].factor / 8
	} else {
		number, ok := strings.CutSuffix(word, "/s")
		if !ok || !strings.HasSuffix(number, "b") {
			return wrong
		}
		n, err := humanize.ParseBytes(number)
		if err != nil {
			return wrong
		}
		bytes = float64(n)
	}
	if math.IsNaN(bytes) || bytes < 1 || bytes > maxBandwidth {
		return fmt.Errorf("bandwidth %q: give at least 1B/s, or unlimited", text)
	}
	*b = bandwidth(bytes)
	return nil
}
