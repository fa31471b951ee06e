package gpuingest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"sync"

	"github.com/mewkiz/flac"
)

// audioIngest is the Ingest of sound: WAV and FLAC become fp32 of channels x samples in [-1, 1], cut or padded to one
// length. The field "length" is the number of samples that belong to the recording.
type audioIngest struct {
	canonical
	rate     int
	channels int
	samples  int
	crop     string // start, center, random, or "" where longer recordings are bad
	pad      bool   // shorter ones are padded with silence, otherwise bad
	resample bool

	mu      sync.Mutex
	filters map[int]*resampler // by the recording's rate
}

const (
	maxRate     = 768_000
	maxChannels = 64
	maxFrames   = 1 << 28 // of a FLAC: 90 minutes at 48 kHz, since everything before a crop is decoded
)

var audioParams = []param{{"seconds", ""}, {"rate", ""}, {"channels", "1"}, {"crop", "'random'"}, {"pad", "True"},
	{"resample", "False"}}

// compileAudio reads audio(seconds, rate, channels=1, crop='random', pad=True, resample=False).
func compileAudio(p *parser, calls []call) (Ingest, error) {
	a, err := p.single(calls, audioParams)
	if err != nil {
		return nil, err
	}
	t := &audioIngest{filters: map[int]*resampler{}, rate: a.integer("rate", 1, maxRate),
		channels: a.integer("channels", 1, maxChannels)}
	v := a.val["seconds"]
	n := math.RoundToEven(v.num * float64(t.rate))
	if !v.number() || n < 1 || n*4*float64(t.channels) > maxOut {
		a.bad(v, "seconds times rate is a number of samples, at least 1, in at most %d bytes", maxOut)
	}
	a.val["seconds"] = float(v.num)
	t.samples, t.crop = int(n), a.crop("random", "center", "start")
	t.pad, t.resample = a.truth("pad"), a.truth("resample")
	t.canonical = canonical(a.String())
	return t, a.err
}

func (t *audioIngest) Fields() []Field {
	return []Field{
		{Name: "data", DType: "fp32", Shape: []int{t.channels, t.samples}, Bytes: 4 * t.channels * t.samples},
		{Name: "length", DType: "int32", Shape: []int{}, Bytes: 4},
	}
}

// recording is a file of sound. A frame is one sample of each channel.
type recording struct {
	rate, channels int
	frames         int
	// read adds frames from..from+n to add, in order: k counts from 0.
	read func(from, n int, add func(k, channel int, v float32)) error
}

func openRecording(b []byte) (recording, error) {
	switch {
	case len(b) >= 12 && (string(b[:4]) == "RIFF" || string(b[:4]) == "RF64") && string(b[8:12]) == "WAVE":
		return openWAV(b)
	case bytes.HasPrefix(b, []byte("fLaC")):
		return openFLAC(b)
	}
	return recording{}, badArray("neither WAV nor FLAC but %s: convert it, or use the transform raw", format(b))
}

func (t *audioIngest) Make(src Sample, at Draw, row *Row) error {
	r, err := openRecording(src.Data)
	if err != nil {
		return err
	}
	if r.rate < 1 || r.rate > maxRate || r.channels < 1 || r.channels > maxChannels {
		return badArray("%d Hz, %d channels", r.rate, r.channels)
	}
	if r.channels != t.channels && t.channels != 1 && r.channels != 1 {
		return badArray("%d channels instead of %d (channels=1 uses their mean)", r.channels, t.channels)
	}
	var f *resampler
	have := r.frames
	if r.rate != t.rate {
		if !t.resample {
			return badArray("%d Hz instead of %d (resample=True converts)", r.rate, t.rate)
		}
		if f, err = t.filter(r.rate); err != nil {
			return err
		}
		have = f.length(r.frames)
	}
	if have > t.samples && t.crop == "" {
		return badArray("%d samples instead of %d (crop= cuts out a part)", have, t.samples)
	}
	if have < t.samples && !t.pad {
		return badArray("%d samples instead of %d (pad=True adds silence)", have, t.samples)
	}
	n, need := min(have, t.samples), min(have, t.samples) // samples of the row, frames of the recording
	if f != nil {
		need = min(r.frames, f.frames(n))
	}
	from := 0
	switch t.crop {
	case "center":
		from = (r.frames - need) / 2
	case "random":
		rand := at.Rand(0)
		from = rand.IntN(r.frames - need + 1)
	}
	clear(row.Fields[0])
	native.PutUint32(row.Fields[1], uint32(n))
	if n == 0 {
		return nil
	}
	if f == nil {
		return r.mix(from, n, t.channels, func(c, k int, v float32) {
			native.PutUint32(row.Fields[0][4*(c*t.samples+k):], math.Float32bits(v))
		})
	}
	// The filter needs samples on both sides of the crop, if there are any.
	first := max(0, from-f.reach)
	last := min(r.frames, from+need+f.reach)
	in := make([][]float32, t.channels)
	for c := range in {
		in[c] = make([]float32, last-first)
	}
	if err := r.mix(first, last-first, t.channels, func(c, k int, v float32) { in[c][k] = v }); err != nil {
		return err
	}
	for c := range in {
		for j := range n {
			v := f.at(in[c], from-first, j)
			native.PutUint32(row.Fields[0][4*(c*t.samples+j):], math.Float32bits(v))
		}
	}
	return nil
}

// mix reads n frames as this many channels: the mean of several channels as one, or copies of one channel.
func (r *recording) mix(from, n, channels int, put func(channel, k int, v float32)) error {
	switch r.channels {
	case channels:
		return r.read(from, n, func(k, c int, v float32) { put(c, k, v) })
	case 1:
		return r.read(from, n, func(k, _ int, v float32) {
			for c := range channels {
				put(c, k, v)
			}
		})
	}
	sum := 0.0
	return r.read(from, n, func(k, c int, v float32) {
		if c == 0 {
			sum = 0
		}
		if sum += float64(v); c == r.channels-1 {
			put(0, k, float32(sum/float64(r.channels)))
		}
	})
}

// openWAV reads RIFF/WAVE: integers of 8 (unsigned), 16, 24 and 32 bits, which are divided by 2^(bits-1), and floats
// of 32 and 64.
func openWAV(b []byte) (r recording, err error) {
	le := binary.LittleEndian
	var tag, bits, block int
	var data []byte
	large := int64(math.MaxUint32) // the size of the sound where RF64 has it
	for rest := b[12:]; data == nil; {
		if len(rest) < 8 {
			return r, badArray("WAV without sound: the file is cut short")
		}
		size := int64(le.Uint32(rest[4:]))
		body := rest[8:]
		switch string(rest[:4]) {
		case "fmt ":
			if size < 16 || int64(len(body)) < size {
				return r, badArray("WAV: a format of %d bytes", size)
			}
			tag, bits, block = int(le.Uint16(body)), int(le.Uint16(body[14:])), int(le.Uint16(body[12:]))
			r.channels, r.rate = int(le.Uint16(body[2:])), int(le.Uint32(body[4:]))
			if tag == 0xfffe && size >= 40 { // extensible: the format is the first word of the GUID
				tag = int(le.Uint16(body[24:]))
			}
		case "ds64":
			if size >= 16 && int64(len(body)) >= size {
				large = int64(min(le.Uint64(body[8:]), math.MaxInt64))
			}
		case "data":
			if block == 0 {
				return r, badArray("WAV: sound before its format")
			}
			if size == math.MaxUint32 {
				size = large
			}
			// A streamed file has a size of zero or of all ones: the rest of it is sound.
			streamed := size == 0 || size == math.MaxUint32
			if !streamed && size > int64(len(body)) {
				return r, badArray("WAV: only %d of %d bytes of sound: the file is cut short", len(body), size)
			}
			if data = body; !streamed {
				data = body[:size]
			}
			continue
		}
		skip := size + size&1
		if skip > int64(len(body)) {
			return r, badArray("WAV without sound: the file is cut short")
		}
		rest = body[skip:]
	}
	each := bits / 8
	value, ok := map[[2]int]func(p []byte) float32{
		{1, 8}:  func(p []byte) float32 { return (float32(p[0]) - 128) / 128 },
		{1, 16}: func(p []byte) float32 { return float32(int16(le.Uint16(p))) / (1 << 15) },
		{1, 24}: func(p []byte) float32 {
			return float32(int32(p[0])<<8|int32(p[1])<<16|int32(p[2])<<24) / (1 << 31)
		},
		{1, 32}: func(p []byte) float32 { return float32(int32(le.Uint32(p))) / (1 << 31) },
		{3, 32}: func(p []byte) float32 { return math.Float32frombits(le.Uint32(p)) },
		{3, 64}: func(p []byte) float32 { return float32(math.Float64frombits(le.Uint64(p))) },
	}[[2]int{tag, bits}]
	if !ok {
		return r, badArray("WAV of format %d with %d bits: supported are PCM of 8 to 32 and floats of 32 and 64 "+
			"bits; convert it, or use the transform raw", tag, bits)
	}
	if r.channels < 1 || block != each*r.channels {
		return r, badArray("WAV: frames of %d bytes for %d channels of %d", block, r.channels, each)
	}
	r.frames = len(data) / block
	r.read = func(from, n int, add func(k, c int, v float32)) error {
		at := data[from*block:]
		for k := range n {
			for c := range r.channels {
				add(k, c, value(at))
				at = at[each:]
			}
		}
		return nil
	}
	return r, nil
}

// openFLAC reads the header. Frames are decoded from the first to the last that is needed, since the start of a frame
// is known only after reading the one before it. Each frame's checksum is verified.
func openFLAC(b []byte) (r recording, err error) {
	defer caught(&err)
	s, err := flac.New(bytes.NewReader(b))
	if err != nil {
		return r, badArray("FLAC header: %w", err)
	}
	r.rate, r.channels = int(s.Info.SampleRate), int(s.Info.NChannels)
	if s.Info.NSamples == 0 || s.Info.NSamples > maxFrames {
		return r, badArray("FLAC of %d samples: 1 to %d are supported, and the header must have the number (flac "+
			"writes it if the output is seekable)", s.Info.NSamples, maxFrames)
	}
	r.frames = int(s.Info.NSamples)
	bits := s.Info.BitsPerSample
	if bits < 4 || bits > 32 {
		return r, badArray("FLAC of %d bits", bits)
	}
	scale := float32(math.Ldexp(1, 1-int(bits)))
	r.read = func(from, n int, add func(k, c int, v float32)) (err error) {
		defer caught(&err)
		for at := 0; at < from+n; {
			f, err := s.ParseNext()
			if errors.Is(err, io.EOF) {
				return badArray("FLAC ends after %d of %d samples: the file is cut short", at, r.frames)
			}
			if err != nil {
				return badArray("FLAC after sample %d: %w", at, err)
			}
			size := int(f.BlockSize)
			if len(f.Subframes) != r.channels || f.BitsPerSample != 0 && f.BitsPerSample != bits || size < 1 {
				return badArray("FLAC after sample %d: a frame of %d channels and %d bits", at, len(f.Subframes),
					f.BitsPerSample)
			}
			for _, sub := range f.Subframes {
				if len(sub.Samples) != size {
					return badArray("FLAC after sample %d: a channel of %d samples in a frame of %d", at,
						len(sub.Samples), size)
				}
			}
			for i := max(0, from-at); i < min(size, from+n-at); i++ {
				for c, sub := range f.Subframes {
					add(at+i-from, c, float32(sub.Samples[i])*scale)
				}
			}
			at += size
		}
		return nil
	}
	return r, nil
}

// caught turns a library's panic on hostile bytes into a bad sample.
func caught(err *error) {
	if r := recover(); r != nil {
		*err = badArray("FLAC: %v", r)
	}
}
