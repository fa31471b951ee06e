package main

import (
	"math"
	"testing"
)

func TestBandwidth(t *testing.T) {
	for text, want := range map[string]float64{
		"10Gbit": 1.25e9, "10gbit/s": 1.25e9, "2.5 Gbps": 312.5e6, "800kbit": 1e5, "64bit": 8,
		"1GiB/s": 1 << 30, "500MB/s": 500e6, "1b/s": 1, "unlimited": 0, "Unlimited": 0,
	} {
		var b bandwidth
		if err := b.Set(text); err != nil || float64(b) != want {
			t.Errorf("%q is %g bytes a second (%v), want %g", text, float64(b), err, want)
		}
	}
	for _, text := range []string{"", "10", "10G", "10GB", "Gbit", "-1Gbit", "NaNbit", "InfTbit", "1e30Gbit", "0bit",
		"1 parsec/s", "/s", "B/s", "1,5GB/s"} {
		var b bandwidth
		if err := b.Set(text); err == nil {
			t.Errorf("%q is %g bytes a second", text, float64(b))
		}
	}
	for want, b := range map[string]bandwidth{"10Gbit": 1.25e9, "1Gbit": 124.99e6, "999Mbit": 124.9e6, "8bit": 1,
		"unlimited": 0} {
		if got := b.String(); got != want {
			t.Errorf("%g is printed %s, want %s", float64(b), got, want)
		}
	}
}

// What is accepted is a bandwidth, and what is printed of it is accepted and means the same, to three digits.
func FuzzBandwidth(f *testing.F) {
	for _, text := range []string{"10Gbit", "1GiB/s", "unlimited", "2.5 gbps", "1e3kbit", "0x10bit", "12 bits/s"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var b bandwidth
		if b.Set(text) != nil {
			return
		}
		if b != 0 && !(b >= 1 && b <= maxBandwidth) {
			t.Fatalf("%q is %g", text, float64(b))
		}
		var again bandwidth
		if err := again.Set(b.String()); err != nil {
			t.Fatalf("%q is printed %q: %v", text, b.String(), err)
		}
		if math.Abs(float64(again-b)) > 0.006*float64(b) {
			t.Fatalf("%q is %g, printed %q, which is %g", text, float64(b), b.String(), float64(again))
		}
	})
}
