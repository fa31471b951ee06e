//go:build cuda

package cuda

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"gorgonia.org/cu"

	"github.com/shoalfs/shoal/gpuingest"
)

// These tests run on whatever driver there is: a GPU's, or the one in software, under which software_test.go starts
// them, some with a script.

func open(t *testing.T) *Device {
	t.Helper()
	d, err := Open(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// memory is n bytes that can be page-locked.
func memory(t *testing.T, n int) []byte {
	t.Helper()
	p, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(p) })
	return p
}

const (
	slotCount   = 3
	bufferCount = 4
	slotBytes   = 1 << 16
	bufferBytes = 1 << 17
)

// setting is a ring on the device, and buffers on the host for batches from the same slots.
type setting struct {
	slots     []byte
	ring      *Ring
	reference [][]byte
	rng       *rand.Rand
}

func set(t *testing.T, d *Device) *setting {
	t.Helper()
	s := &setting{slots: memory(t, slotCount*slotBytes), rng: rand.New(rand.NewPCG(11, 12))}
	var err error
	if s.ring, err = d.NewRing(s.slots, slotBytes, bufferCount, bufferBytes); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.ring.Close(); err != nil {
			t.Error(err)
		}
	})
	for range bufferCount {
		s.reference = append(s.reference, make([]byte, s.ring.BufferBytes()))
	}
	return s
}

// fill puts random rows into a slot.
func (s *setting) fill(slot int, j *gpuingest.Job) {
	mem := s.slots[slot*slotBytes:][:slotBytes]
	for i := range mem {
		mem[i] = byte(s.rng.Uint32())
	}
	if f := j.Finish; f != nil {
		for i := range j.Rows {
			p := gpuingest.RowParams{X: uint16(s.rng.IntN(f.SourceWidth - f.Width + 1)),
				Y: uint16(s.rng.IntN(f.SourceHeight - f.Height + 1))}
			if s.rng.IntN(5) > 0 {
				p.Flags = gpuingest.Filled | gpuingest.Flip*uint32(s.rng.IntN(2))
			}
			p.Put(mem[j.Params+i*gpuingest.ParamBytes:])
		}
	}
}

// start starts a job on both.
func (s *setting) start(t *testing.T, slot, buffer int, j *gpuingest.Job) {
	t.Helper()
	if err := errors.Join(s.ring.Start(slot, buffer, j),
		j.Do(s.slots[slot*slotBytes:][:slotBytes], s.reference[buffer])); err != nil {
		t.Fatal(err)
	}
}

// read copies the beginning of a buffer, whose batch is complete.
func (r *Ring) read(buffer int, p []byte) error {
	return r.d.do(func() error {
		return fail("cuMemcpyDtoH",
			cu.MemcpyDtoH(unsafe.Pointer(&p[0]), r.region.at+cu.DevicePtr(buffer*r.bufferBytes), int64(len(p))))
	})
}

// compare waits for a buffer and compares what the job wrote there.
func (s *setting) compare(t *testing.T, buffer int, j *gpuingest.Job, what string) {
	t.Helper()
	got, want := make([]byte, bufferBytes), s.reference[buffer]
	if err := errors.Join(s.ring.Wait(buffer), s.ring.read(buffer, got)); err != nil {
		t.Fatal(err)
	}
	parts := slices.Clone(j.Copies)
	if j.Finish != nil {
		parts = append(parts, gpuingest.Copy{To: j.Target, Bytes: j.Rows * j.Finish.RowBytes()})
	}
	for _, c := range parts {
		if !bytes.Equal(got[c.To:][:c.Bytes], want[c.To:][:c.Bytes]) {
			t.Fatalf("%s: bytes %d to %d of the buffer differ from the host's", what, c.To, c.To+c.Bytes)
		}
	}
}

// job is work of the shape that the feed gives: rows, their parameters, then small planes.
func job(f *gpuingest.Finish, rows int) *gpuingest.Job {
	j := &gpuingest.Job{Rows: rows, Finish: f, Source: 4096}
	at := func(n int) int { return (n + 63) / 64 * 64 }
	from, to := 4096, 0
	if f != nil {
		j.Params = at(j.Source + rows*f.SourceBytes())
		from, to = at(j.Params+rows*gpuingest.ParamBytes), at(rows*f.RowBytes())
	}
	for _, n := range []int{8 * rows, 8 * rows, rows} {
		j.Copies = append(j.Copies, gpuingest.Copy{From: from, To: to, Bytes: n})
		from, to = at(from+n), at(to+n)
	}
	return j
}

func finish(spec string) *gpuingest.Finish {
	h, err := gpuingest.Split(spec)
	if err != nil {
		panic(err)
	}
	return h.Finish()
}

// TestEqualsHost holds the device to the host device, byte for byte.
func TestEqualsHost(t *testing.T) {
	s := set(t, open(t))
	for _, dtype := range []string{"uint8", "fp16", "bf16", "fp32",
		"fp16|Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))", "fp32|Normalize((0.5,), (0.25,))"} {
		for _, layout := range []string{"nchw", "nhwc"} {
			for _, size := range []struct{ h, w, sh, sw int }{{16, 16, 16, 16}, {7, 9, 7, 9}, {12, 20, 17, 23},
				{1, 1, 1, 1}, {5, 3, 6, 7}} {
				dt, norm, _ := strings.Cut(dtype, "|")
				f := finish(strings.TrimSuffix(
					fmt.Sprintf("CenterCrop((%d, %d))|%s|%s|%s", size.h, size.w, dt, layout, norm), "|"))
				f.SourceHeight, f.SourceWidth = size.sh, size.sw
				for _, rows := range []int{1, 6, 0} {
					j := job(f, rows)
					slot, buffer := s.rng.IntN(slotCount), s.rng.IntN(bufferCount)
					s.fill(slot, j)
					s.start(t, slot, buffer, j)
					s.compare(t, buffer, j, fmt.Sprintf("%s %s %+v, %d rows", dtype, layout, size, rows))
				}
			}
		}
	}
	j := job(nil, 100)
	s.fill(1, j)
	s.start(t, 1, 2, j)
	s.compare(t, 2, j, "planes that are only copied")
}

// TestReplay runs every (slot, buffer) again and again by its graph: it must take what lies in the slot then.
func TestReplay(t *testing.T) {
	s := set(t, open(t))
	j := job(finish("CenterCrop((13, 24))|fp16|nchw"), 9)
	j.Again = true
	for round := range 3 {
		for slot := range slotCount {
			for buffer := range bufferCount {
				s.fill(slot, j)
				s.start(t, slot, buffer, j)
				s.compare(t, buffer, j, fmt.Sprintf("round %d, slot %d, buffer %d", round, slot, buffer))
			}
		}
	}
	if n := len(s.ring.graphs); n != slotCount*bufferCount {
		t.Errorf("%d graphs for %d slots and %d buffers", n, slotCount, bufferCount)
	}
}

// TestInFlight has a batch under way in every buffer at once, while another goroutine waits for them.
func TestInFlight(t *testing.T) {
	s := set(t, open(t))
	j := job(finish("CenterCrop(16)|fp32|nhwc"), 8)
	j.Again = true
	for slot := range slotCount {
		s.fill(slot, j)
	}
	type started struct{ slot, buffer int }
	under := make(chan started, bufferCount)
	freed := make(chan int, bufferCount)
	var wg sync.WaitGroup
	wg.Go(func() {
		for u := range under {
			s.compare(t, u.buffer, j, fmt.Sprintf("slot %d in buffer %d", u.slot, u.buffer))
			freed <- u.buffer
		}
	})
	for b := range bufferCount {
		freed <- b
	}
	for i := range 40 {
		b := <-freed
		s.start(t, i%slotCount, b, j)
		under <- started{i % slotCount, b}
	}
	close(under)
	wg.Wait()
}

// TestExport: each buffer and event can be handed over, and all of it is other memory.
func TestExport(t *testing.T) {
	s := set(t, open(t))
	fds, ready, free, err := s.ring.Export()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, fd := range fds {
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
	}
	for _, h := range slices.Concat(ready, free) {
		if len(h) != 64 || seen[string(h)] {
			t.Errorf("handle %x: %d bytes, seen before: %v", h, len(h), seen[string(h)])
		}
		seen[string(h)] = true
	}
	if len(fds) != bufferCount || len(seen) != 2*bufferCount {
		t.Errorf("%d descriptors and %d handles of %d buffers", len(fds), len(seen), bufferCount)
	}
}

// TestRefused: what lies outside slots or buffers never reaches the device.
func TestRefused(t *testing.T) {
	s := set(t, open(t))
	f := finish("CenterCrop(16)|uint8|nhwc")
	good := job(f, 4)
	s.fill(0, good)
	for name, start := range map[string]func() error{
		"slot":   func() error { return s.ring.Start(slotCount, 0, good) },
		"buffer": func() error { return s.ring.Start(0, bufferCount, good) },
		"rows":   func() error { return s.ring.Start(0, 0, job(f, 1000)) },
		"window": func() error {
			gpuingest.RowParams{X: 1, Flags: gpuingest.Filled}.Put(s.slots[good.Params:])
			return s.ring.Start(0, 0, good)
		},
	} {
		if err := start(); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// TestRingsGiveAllBack opens more rings one after another than the device has memory for at once.
func TestRingsGiveAllBack(t *testing.T) {
	d := open(t)
	mem := memory(t, slotCount*slotBytes)
	j := job(finish("CenterCrop(16)|fp16|nchw"), 8)
	j.Again = true
	for i := range 60 {
		r, err := d.NewRing(mem, slotBytes, bufferCount, bufferBytes)
		if err != nil {
			t.Fatalf("ring %d: %v", i, err)
		}
		for b := range bufferCount {
			if err := r.Start(b%slotCount, b, j); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.Close(); err != nil { // without Wait
			t.Fatalf("ring %d: %v", i, err)
		}
	}
}

// scripted skips tests that need the driver in software to behave in a certain way.
func scripted(t *testing.T, name string) string {
	v := os.Getenv(name)
	if v == "" {
		t.Skip("runs under the software driver with a script: see software_test.go")
	}
	return v
}

// TestOverlap: while the kernel of one batch runs (here it is held), the next batch is copied.
func TestOverlap(t *testing.T) {
	hold, trace := scripted(t, "SHOAL_TEST_HOLD"), os.Getenv("SHOAL_CUDA_TRACE")
	s := set(t, open(t))
	j := job(finish("CenterCrop(16)|fp16|nchw"), 8)
	for b := range lanes {
		s.fill(b, j)
		s.start(t, b, b, j)
	}
	// Two copies a batch: rows with parameters, and the small planes.
	for deadline := time.Now().Add(time.Minute); count(t, trace, "HtoD") < 2*lanes+1; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d copies are done while a kernel is held: want %d and the table's",
				count(t, trace, "HtoD"), 2*lanes)
		}
	}
	if n := count(t, trace, "shoal_finish_u16_nchw"); n != 0 {
		t.Fatalf("%d kernels ran while they were held", n)
	}
	if err := os.WriteFile(hold, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for b := range lanes {
		s.compare(t, b, j, fmt.Sprint("buffer ", b))
	}
}

// TestCloseCannotWait: what the device may be using stays, and the error is told. The driver in software ends the
// process where memory goes under queued work.
func TestCloseCannotWait(t *testing.T) {
	hold := scripted(t, "SHOAL_TEST_CLOSE")
	s := set(t, open(t))
	j := job(finish("CenterCrop(16)|fp16|nchw"), 8)
	s.fill(0, j)
	s.start(t, 0, 0, j)
	if err := s.ring.Close(); err == nil || !strings.Contains(err.Error(), "cuStreamSynchronize") {
		t.Errorf("Close: %v", err)
	}
	if err := os.WriteFile(hold, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.compare(t, 0, j, "after a failed Close")
}

// count counts operations in the driver's trace that are over.
func count(t *testing.T, trace, name string) (n int) {
	t.Helper()
	text, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var op struct{ Name string }
		if err := json.Unmarshal([]byte(line), &op); err == nil && op.Name == name {
			n++
		}
	}
	return n
}

// TestFault meets what the script prescribes, of the kind that SHOAL_TEST_FAULT names.
func TestFault(t *testing.T) {
	want := scripted(t, "SHOAL_TEST_FAULT")
	kinds := map[string]error{"driver": gpuingest.ErrNoDriver, "device": gpuingest.ErrNoDevice,
		"memory": gpuingest.ErrDeviceMemory}
	d, err := Open(0)
	mem := memory(t, slotCount*slotBytes)
	var r *Ring
	if err == nil {
		if r, err = d.NewRing(mem, slotBytes, bufferCount, bufferBytes); err != nil {
			// Nothing is held, and the device is as good as before.
			again, second := d.NewRing(mem, slotBytes, bufferCount, bufferBytes)
			if second != nil {
				t.Fatalf("%v, and then %v", err, second)
			}
			if err := again.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	if want == "launch" {
		if err != nil {
			t.Fatal(err)
		}
		j := job(finish("CenterCrop(16)|fp16|nchw"), 8)
		err = r.Start(0, 0, j)
		if err == nil {
			err = r.Wait(0)
		}
		if err == nil {
			t.Fatal("a kernel that failed is not noticed")
		}
		t.Log(err)
		if r.Close() == nil { // the context is lost: each call says so, and none hangs
			t.Error("a lost context closes without an error")
		}
		return
	}
	if !errors.Is(err, kinds[want]) {
		t.Fatalf("error %v, want one of %q", err, want)
	}
	t.Log(err)
	if d != nil {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}
