package gpuingest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/internal/oracle"
)

const makeSound = `
import struct, subprocess, wave
rng = np.random.default_rng(q["seed"])
bits, ch, count = q["bits"], q["channels"], q["frames"]
t = np.arange(count)[:, None]
x = np.clip(np.sin(t * 0.01 * (1 + np.arange(ch))[None, :]) * 0.9 + rng.normal(0, 0.05, (count, ch)), -1, 1 - 2.0 ** (1 - min(bits, 24)))
if q["as"] == "float":
    y = x.astype("<f%d" % (bits // 8))
    body = y.tobytes()
    fmt = struct.pack("<HHIIHH", 3, ch, q["rate"], q["rate"] * ch * bits // 8, ch * bits // 8, bits)
    if q["seed"] % 2:
        fmt = struct.pack("<HHIIHH", 0xfffe, ch, q["rate"], q["rate"] * ch * bits // 8, ch * bits // 8, bits) + struct.pack("<HHIH", 22, bits, 0, 3) + b"\x00" * 14
    file = b"RIFF" + struct.pack("<I", 36 + len(body)) + b"WAVELIST" + struct.pack("<I", 3) + b"abc\x00fmt " + struct.pack("<I", len(fmt)) + fmt + b"data" + struct.pack("<I", len(body)) + body
    z = y.astype("f4")
else:
    v = np.round(x * 2.0 ** (bits - 1)).astype("i8")
    v = np.clip(v, -2 ** (bits - 1), 2 ** (bits - 1) - 1)
    if bits == 8:
        body = (v + 128).astype("u1").tobytes()
    else:
        body = v.astype("<i4" if bits > 16 else "<i2")
        body = body.view("u1").reshape(-1, 4)[:, :3].tobytes() if bits == 24 else body.tobytes()
    f = io.BytesIO()
    with wave.open(f, "wb") as w:
        w.setnchannels(ch); w.setsampwidth(bits // 8); w.setframerate(q["rate"]); w.writeframes(body)
    file = f.getvalue()
    if q["as"] == "flac":
        file = subprocess.run(["flac", "--totally-silent", "--channel-map=none", "-", "-c"] + q["options"], input=file, stdout=subprocess.PIPE, check=True).stdout
    z = (v / 2.0 ** (bits - 1)).astype("f4")
answer["file"] = len(file)
out = file + np.ascontiguousarray(z.T).tobytes()
`

// sound returns a file and what numpy has of it: channels x frames.
func sound(t testing.TB, seed int, as string, bits, channels, frames, rate int) (file []byte, want [][]float32) {
	t.Helper()
	options := []string{fmt.Sprintf("-%d", seed%9)}
	a, b := python(t, makeSound, oracle.Q{"seed": seed, "as": as, "bits": bits, "channels": channels, "frames": frames,
		"rate": rate, "options": options}, nil)
	n := int(a["file"].(float64))
	file, b = b[:n], b[n:]
	want = make([][]float32, channels)
	for c := range want {
		for range frames {
			want[c], b = append(want[c], math.Float32frombits(binary.LittleEndian.Uint32(b))), b[4:]
		}
	}
	return file, want
}

func floats(b []byte) (list []float32) {
	for ; len(b) > 0; b = b[4:] {
		list = append(list, math.Float32frombits(native.Uint32(b)))
	}
	return list
}

// TestAudioEqualsNumpy compares WAV and FLAC (by the flac tool) with the numbers that they were made of, bit for bit.
func TestAudioEqualsNumpy(t *testing.T) {
	seed := 0
	for _, as := range []string{"wav", "flac", "float"} {
		for _, bits := range map[string][]int{"wav": {8, 16, 24, 32}, "flac": {8, 16, 24}, "float": {32, 64}}[as] {
			for _, channels := range []int{1, 2, 5} {
				seed++
				file, want := sound(t, seed, as, bits, channels, 12_345, 16_000)
				for _, crop := range []string{"start", "center", "random"} {
					in := newIngest(t, fmt.Sprintf("audio(0.25, 16000, %d, %q)", channels, crop))
					row, err := makeRow(in, file, Draw{Sample: uint64(seed)})
					if err != nil {
						t.Fatalf("%s of %d bits: %v", as, bits, err)
					}
					from := map[string]int{"start": 0, "center": (12_345 - 4000) / 2}[crop]
					if crop == "random" {
						rand := Draw{Sample: uint64(seed)}.Rand(0)
						from = rand.IntN(12_345 - 4000 + 1)
					}
					got := floats(row.Fields[0])
					for c := range channels {
						for k := range 4000 {
							if got[4000*c+k] != want[c][from+k] {
								t.Fatalf("%s of %d bits, crop %s: channel %d, sample %d is %v, numpy has %v",
									as, bits, crop, c, k, got[4000*c+k], want[c][from+k])
							}
						}
					}
				}
				if channels == 2 { // their mean, filled up
					row, err := makeRow(newIngest(t, "audio(1.0, 16000)"), file, Draw{})
					got := floats(row.Fields[0])
					if err != nil || native.Uint32(row.Fields[1]) != 12_345 ||
						got[77] != float32((float64(want[0][77])+float64(want[1][77]))/2) || got[12_345] != 0 ||
						got[15_999] != 0 {
						t.Errorf("%s of %d bits as mono: %v", as, bits, err)
					}
				}
				if channels == 1 {
					row, err := makeRow(newIngest(t, "audio(0.25, 16000, channels=2, crop='start')"), file, Draw{})
					if err != nil || !bytes.Equal(row.Fields[0][:16_000], row.Fields[0][16_000:]) {
						t.Errorf("mono as stereo: %v", err)
					}
				}
			}
		}
	}
}

// wavOf is a mono file of 32-bit floats.
func wavOf(rate, n int, f func(t float64) float64) []byte {
	le := binary.LittleEndian
	b := []byte("RIFF\x00\x00\x00\x00WAVEfmt \x10\x00\x00\x00\x03\x00\x01\x00")
	b = le.AppendUint32(b, uint32(rate))
	b = le.AppendUint32(b, uint32(4*rate))
	b = append(b, "\x04\x00\x20\x00data"...)
	b = le.AppendUint32(b, uint32(4*n))
	for i := range n {
		b = le.AppendUint32(b, math.Float32bits(float32(f(float64(i)/float64(rate)))))
	}
	return b
}

// TestResample: tones below the lower rate's half come through as they are at the new rate, tones above it do not.
func TestResample(t *testing.T) {
	for _, rates := range [][2]int{{44_100, 16_000}, {8000, 16_000}, {48_000, 44_100}, {22_050, 16_000},
		{16_001, 16_000}} {
		low := float64(min(rates[0], rates[1]))
		for _, share := range []float64{0, 0.003, 0.1, 0.25, 0.4, 0.45, 0.56} {
			freq, n := share*low, rates[0]
			if share > 0.5 && freq > 0.49*float64(rates[0]) {
				continue // the file cannot hold it
			}
			tone := func(at float64) float64 { return 0.5 * math.Cos(2*math.Pi*freq*at+1) }
			in := newIngest(t, fmt.Sprintf("audio(1.0, %d, crop='start', resample=True)", rates[1]))
			row, err := makeRow(in, wavOf(rates[0], n, tone), Draw{})
			if err != nil {
				t.Fatal(err)
			}
			got := floats(row.Fields[0])
			if l := native.Uint32(row.Fields[1]); int(l) != rates[1] {
				t.Errorf("%v: %d samples", rates, l)
			}
			worst := 0.0
			for j := 200; j < len(got)-200; j++ {
				want := tone(float64(j) / float64(rates[1]))
				if share > 0.5 {
					want = 0
				}
				worst = max(worst, math.Abs(float64(got[j])-want))
			}
			if worst > 5e-4 && (worst > 2e-3 || share != 0.45) { // 0.45: the edge of the pass band
				t.Errorf("%v, %.0f Hz: off by %g", rates, freq, worst)
			}
		}
	}
	// A crop is the same as that part of the whole: the filter reaches beyond it.
	file := wavOf(44_100, 44_100, func(at float64) float64 {
		return 0.3*math.Sin(4000*at) + 0.2*math.Sin(17_000*at*at)
	})
	whole, err := makeRow(newIngest(t, "audio(1.0, 22050, crop='start', resample=True)"), file, Draw{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		at := Draw{Sample: uint64(i)}
		row, err := makeRow(newIngest(t, "audio(0.5, 22050, resample=True)"), file, at)
		if err != nil {
			t.Fatal(err)
		}
		rand := at.Rand(0)
		if from := rand.IntN(44_100 - 22_050 + 1); from%2 == 0 &&
			!bytes.Equal(row.Fields[0], whole.Fields[0][2*from:][:len(row.Fields[0])]) {
			t.Errorf("the crop from %d on differs from the whole", from)
		}
	}
}

// TestRF64: what follows the sound is no sound, though its size is elsewhere.
func TestRF64(t *testing.T) {
	const n = 100
	file := wavOf(8000, n, func(float64) float64 { return 1 })
	size := "ds64\x1c\x00\x00\x00" + strings.Repeat("\x00", 8) + "\x90\x01" + strings.Repeat("\x00", 18)
	file = slices.Concat([]byte("RF64\xff\xff\xff\xffWAVE"+size), file[12:40], []byte("\xff\xff\xff\xff"), file[44:],
		[]byte("LIST\x04\x00\x00\x00INFO"))
	row, err := makeRow(newIngest(t, "audio(1.0, 8000)"), file, Draw{})
	if err != nil || native.Uint32(row.Fields[1]) != n {
		t.Errorf("%d samples, %v", native.Uint32(row.Fields[1]), err)
	}
}

func TestAudioRefused(t *testing.T) {
	file := wavOf(8000, 100, func(float64) float64 { return 0 })
	mulaw := bytes.Clone(file)
	mulaw[20] = 7
	deep := bytes.Clone(file)
	deep[22] = 200
	for _, c := range []struct {
		spec, want string
		file       []byte
	}{
		{"audio(1.0, 16000)", "resample=True", file},
		{"audio(0.01, 8000, crop=None)", "crop= cuts out a part", file},
		{"audio(1.0, 8000, pad=False)", "pad=True", file},
		{"audio(1.0, 8000)", "cut short", file[:60]},
		{"audio(1.0, 8000)", "a format of", file[:30]},
		{"audio(1.0, 8000)", "use the transform raw", mulaw},
		{"audio(1.0, 8000)", "frames of 4 bytes", deep},
		{"audio(1.0, 8000)", "use the transform raw", []byte("ID3\x04 and so on, an MP3")},
		{"audio(1.0, 8000)", "FLAC header", []byte("fLaC\x00\x00")},
		{"audio(1.0)", "write audio(2.0, 16000)", nil},
		{"audio(0, 16000)", "seconds times rate", nil},
		{"audio(1e6, 16000)", "seconds times rate", nil},
		{"audio(1, 16000, 0)", "channels must be", nil},
		{"audio(1, 16000, crop='end')", "crop must be", nil},
		{"audio(1, 16000, pad=0)", "pad must be True or False", nil},
		{"audio(1, 16000)|fp32", "cannot be combined", nil},
	} {
		in, err := New(c.spec)
		if err == nil {
			_, err = makeRow(in, c.file, Draw{})
			if !errors.Is(err, ErrBadSample) {
				t.Errorf("%s: %v is no bad sample", c.spec, err)
			}
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.spec, err, c.want)
		}
	}
	flac, _ := sound(t, 3, "flac", 16, 2, 12_345, 16_000)
	in := newIngest(t, "audio(0.7, 16000)")
	if _, err := makeRow(in, flac[:len(flac)/2], Draw{}); !errors.Is(err, ErrBadSample) {
		t.Errorf("half a FLAC: %v", err)
	}
	damaged := bytes.Clone(flac)
	damaged[len(flac)*2/5] ^= 0x10
	if _, err := makeRow(in, damaged, Draw{}); !errors.Is(err, ErrBadSample) {
		t.Errorf("a damaged FLAC: %v", err)
	}
}

func FuzzAudio(f *testing.F) {
	f.Add(wavOf(8000, 50, math.Sin))
	small, _ := sound(f, 1, "flac", 16, 2, 400, 8000)
	f.Add(small)
	var all []Ingest
	for _, spec := range []string{"audio(0.01, 8000)", "audio(0.01, 8000, 2, crop='center', resample=True)"} {
		in, err := New(spec)
		if err != nil {
			f.Fatal(err)
		}
		all = append(all, in)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, in := range all {
			if _, err := makeRow(in, b, Draw{}); err != nil && !errors.Is(err, ErrBadSample) {
				t.Fatalf("%s: %v", in, err)
			}
		}
	})
}
