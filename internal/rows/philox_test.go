package rows

import (
	"math"
	"testing"
)

// The known answers come with the authors' Random123 library (kat_vectors, philox4x32 10).
func TestPhiloxKnownAnswers(t *testing.T) {
	for _, c := range []struct {
		ctr  [4]uint32
		key  [2]uint32
		want [4]uint32
	}{
		{[4]uint32{}, [2]uint32{}, [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
		{
			[4]uint32{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
			[2]uint32{0xffffffff, 0xffffffff},
			[4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
		},
		{
			[4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
			[2]uint32{0xa4093822, 0x299f31d0},
			[4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1},
		},
	} {
		if got := philox(c.ctr, c.key); got != c.want {
			t.Errorf("philox(%x, %x) = %x, want %x", c.ctr, c.key, got, c.want)
		}
	}
}

// TestDrawPacking pins the packing: resumed runs depend on it.
func TestDrawPacking(t *testing.T) {
	d := Draw{Seed: 0x1122334455667788, Epoch: 0x99aabbcc, Sample: 0xabcd_12345678, Occurrence: 0x4321}
	r := d.Rand(7)
	for block := range uint32(3) {
		b := philox([4]uint32{0x12345678, 0xabcd4321, 0x99aabbcc, 7<<16 | block}, [2]uint32{0x55667788, 0x11223344})
		for i := range 2 {
			want := uint64(b[2*i+1])<<32 | uint64(b[2*i])
			if got := r.Uint64(); got != want {
				t.Errorf("block %d, number %d: %x, want %x", block, i, got, want)
			}
		}
	}
}

func TestDrawsDiffer(t *testing.T) {
	base := Draw{Seed: 1, Epoch: 2, Sample: 3, Occurrence: 4}
	seen := map[uint64]string{}
	add := func(name string, r Rand) {
		v := r.Uint64()
		if was, ok := seen[v]; ok {
			t.Errorf("%s draws the same as %s", name, was)
		}
		seen[v] = name
	}
	add("base", base.Rand(0))
	add("operation", base.Rand(1))
	for name, d := range map[string]Draw{
		"seed low": {2, 2, 3, 4}, "seed high": {1 | 1<<40, 2, 3, 4}, "epoch": {1, 3, 3, 4},
		"sample": {1, 2, 4, 4}, "sample high": {1, 2, 3 | 1<<40, 4}, "occurrence": {1, 2, 3, 5},
	} {
		add(name, d.Rand(0))
	}
}

// TestUniform checks moments, range and the absence of bias; the seeds are fixed, so it cannot flake.
func TestUniform(t *testing.T) {
	r := Draw{Seed: 42}.Rand(0)
	const n = 100_000
	var sum, square float64
	var hist [6]int
	for range n {
		f := r.Float64()
		if f < 0 || f >= 1 {
			t.Fatal(f)
		}
		sum += f
		square += f * f
		hist[r.IntN(len(hist))]++
	}
	if m := sum / n; math.Abs(m-0.5) > 0.004 {
		t.Errorf("mean %v", m)
	}
	if m := square / n; math.Abs(m-1.0/3) > 0.004 {
		t.Errorf("mean of squares %v", m)
	}
	var chi float64
	for _, c := range hist {
		d := float64(c) - n/6.0
		chi += d * d / (n / 6.0)
	}
	if chi > 20.5 { // 5 degrees of freedom, p = 0.001
		t.Errorf("chi squared %v, counts %v", chi, hist)
	}
	// With n just above 2^62 a quarter of all draws would be biased without rejection.
	low := 0
	const big = 3 << 61
	for range 10_000 {
		v := r.IntN(big)
		if v < 0 || v >= big {
			t.Fatal(v)
		}
		if v < big/3 {
			low++
		}
	}
	if low < 3150 || low > 3520 {
		t.Errorf("%d of 10,000 in the lowest third", low)
	}
	defer func() {
		if recover() == nil {
			t.Error("IntN(0) returned")
		}
	}()
	r.IntN(0)
}
