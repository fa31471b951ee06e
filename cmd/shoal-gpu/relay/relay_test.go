package relay_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/shoalfs/shoal/cmd/shoal-gpu/relay"
	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/prefetch/order"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is for what must happen some time.
const patience = time.Minute

// pictures is a dataset in memory; every seventh sample is no picture.
type pictures struct{ files [][]byte }

func newPictures(t *testing.T, n int) *pictures {
	d := &pictures{}
	for i := range n {
		w, h := 40+i%7, 50-i%5
		rgb := make([]byte, w*h*3)
		for k := range rgb {
			rgb[k] = byte(k*(i+3) + k/w)
		}
		b, err := jpeg.Encode(nil, rgb, w, h, 90, jpeg.Sub420)
		if err != nil {
			t.Fatal(err)
		}
		if i%7 == 6 {
			b = []byte("not a picture")
		}
		d.files = append(d.files, b)
	}
	return d
}

func (d *pictures) Version() string                     { return strings.Repeat("ab", 32) }
func (d *pictures) Len() int                            { return len(d.files) }
func (d *pictures) Label(i int) int                     { return i % 3 }
func (d *pictures) Path(i int) string                   { return fmt.Sprintf("c%d/%d.jpg", i%3, i) }
func (d *pictures) Size(i int) int64                    { return int64(len(d.files[i])) }
func (d *pictures) Classes() []string                   { return []string{"a", "b", "c"} }
func (d *pictures) Groups() (order.Groups, string)      { return nil, "" }
func (d *pictures) Parts(string) (found, numbered bool) { return false, false }
func (d *pictures) Begin(_ string, seq order.Order, _, _ int, _ ...string) (loader.Stream, error) {
	return reading{d, seq}, nil
}

type reading struct {
	d   *pictures
	seq order.Order
}

func (r reading) Read(_ context.Context, pos int) ([]byte, func(), error) {
	return r.d.files[r.seq.At(pos)], func() {}, nil
}
func (r reading) Close() error { return nil }

// device works on the host, in buffers that can be mapped elsewhere.
type device struct {
	refuse  atomic.Bool // to make rings
	failAt  atomic.Int64
	starts  atomic.Int64
	open    atomic.Int64
	reading atomic.Int64 // slots: rings that have not ended
	busy    atomic.Bool  // with what trainers have recorded
	asked   atomic.Int64 // whether a buffer is free, while it was busy
}

func (d *device) Name() string { return "cuda:0" }
func (d *device) UUID() string { return "GPU-test" }

func (d *device) Open(slots []byte, slotBytes, buffers, bufferBytes int) (relay.Ring, error) {
	if d.refuse.Load() {
		return nil, fmt.Errorf("test: %w", gpuingest.ErrDeviceMemory)
	}
	r := &ring{d: d, slots: slots, slotBytes: slotBytes, bytes: bufferBytes, done: make([]chan error, buffers)}
	for i := range buffers {
		fd, err := unix.MemfdCreate("buffer", unix.MFD_CLOEXEC)
		if err != nil {
			return nil, err
		}
		if err := unix.Ftruncate(fd, int64(bufferBytes)); err != nil {
			return nil, err
		}
		r.fds, r.done[i] = append(r.fds, fd), make(chan error, 1)
	}
	d.open.Add(1)
	d.reading.Add(1)
	return r, nil
}

type ring struct {
	d         *device
	slots     []byte
	slotBytes int
	bytes     int // of a buffer
	fds       []int
	done      []chan error
	work      sync.WaitGroup
}

// Start works on another thread, as a device does, and leaves the slot to it until Wait.
func (r *ring) Start(slot, buffer int, j *gpuingest.Job) error {
	n := r.d.starts.Add(1)
	r.work.Go(func() {
		p := make([]byte, r.bytes)
		err := j.Do(r.slots[slot*r.slotBytes:][:r.slotBytes], p)
		if err == nil {
			_, err = unix.Pwrite(r.fds[buffer], p, 0)
		}
		if n == r.d.failAt.Load() {
			err = errors.New("the device has failed")
		}
		r.done[buffer] <- err
	})
	return nil
}

func (r *ring) Wait(buffer int) error { return <-r.done[buffer] }
func (r *ring) BufferBytes() int      { return r.bytes }

func (r *ring) Free(int) (bool, error) {
	if r.d.busy.Load() {
		r.d.asked.Add(1)
		return false, nil
	}
	return true, nil
}

func (r *ring) Export() (fds []int, ready, free [][]byte, err error) {
	for i, fd := range r.fds {
		own, err := unix.Dup(fd)
		if err != nil {
			return nil, nil, nil, err
		}
		fds, ready, free = append(fds, own), append(ready, []byte{byte(i), 1}), append(free, []byte{byte(i), 2})
	}
	return fds, ready, free, nil
}

func (r *ring) End() error {
	r.work.Wait()
	r.d.reading.Add(-1)
	return nil
}

func (r *ring) Close() error {
	for _, fd := range r.fds {
		_ = unix.Close(fd)
	}
	r.d.open.Add(-1)
	return nil
}

// house is a server, a relay before it, and a client of each.
type house struct {
	server        *loader.Server
	relay         *relay.Server
	device        *device
	feed, gpu     feedpb.FeedClient
	feedAt, gpuAt string
}

func start(t *testing.T, samples int) *house {
	t.Helper()
	return startOn(t, samples, "unix://"+filepath.Join(t.TempDir(), "feed"))
}

// startOn is start with a server that listens there.
func startOn(t *testing.T, samples int, feedAt string) *house {
	t.Helper()
	h := &house{device: &device{}}
	ds := newPictures(t, samples)
	h.server = loader.NewServer(func() loader.Dataset { return ds }, loader.Options{
		Compile: func(_ context.Context, spec string, _ loader.Dataset) (loader.Transform, error) {
			return gpuingest.New(spec)
		}})
	h.feedAt, h.gpuAt = feedAt, "unix://"+filepath.Join(t.TempDir(), "gpu")
	var err error
	if h.relay, err = relay.New(
		relay.Options{Feed: h.feedAt, Device: h.device,
			Log: slog.New(slog.NewTextHandler(t.Output(), nil))}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	run := func(addr string, serve func(net.Listener) error) feedpb.FeedClient {
		l, err := loader.Listen(addr, loader.ListenOptions{})
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			if err := serve(l); err != nil {
				t.Error(err)
			}
		})
		conn, err := grpc.NewClient(strings.Replace(addr, "tcp://", "dns:///", 1),
			grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return feedpb.NewFeedClient(conn)
	}
	t.Cleanup(func() {
		h.server.Close()
		if err := h.relay.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
		if n := h.device.open.Load(); n != 0 {
			t.Errorf("%d rings are open when all is closed", n)
		}
	})
	h.feed = run(h.feedAt, func(l net.Listener) error { return h.server.Serve(l) })
	h.gpu = run(h.gpuAt, h.relay.Serve)
	return h
}

// settle waits until nothing of any session is left on the device.
func (h *house) settle(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		s := h.relay.Stats()
		if s.Sessions == 0 && s.Passed == 0 && s.Buffers == 0 && s.Bytes == 0 && s.Held == 0 &&
			h.device.open.Load() == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left on the device: %+v, %d rings", s, h.device.open.Load())
		}
	}
}

// trainer is one stream and what it has mapped.
type trainer struct {
	t       *testing.T
	stream  feedpb.Feed_StreamClient
	cancel  context.CancelFunc
	opened  *feedpb.Opened
	conn    net.Conn
	buffers [][]byte
	host    []byte
	reply   struct {
		Slots               int
		SlotBytes           int `json:"slot_bytes"`
		HostBytes           int `json:"host_bytes"`
		Device, UUID, Error string
		Events              []struct{ Ready, Free string }
	}
}

func dial(t *testing.T, feed feedpb.FeedClient, o *feedpb.Open) (*trainer, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	tr := &trainer{t: t, cancel: cancel}
	var err error
	if tr.stream, err = feed.Stream(ctx); err != nil {
		return nil, err
	}
	if err := tr.stream.Send(&feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Open{Open: o}}); err != nil &&
		!errors.Is(err, io.EOF) {
		return nil, err
	}
	m, err := tr.stream.Recv()
	if err != nil {
		return nil, err
	}
	tr.opened = m.GetOpened()
	return tr, nil
}

// take asks for the pool's descriptors and maps them.
func (tr *trainer) take(addr, key string) error {
	conn, err := net.Dial("unix", strings.TrimPrefix(addr, "unix://"))
	if err != nil {
		return err
	}
	tr.conn = conn
	tr.t.Cleanup(func() { _ = conn.Close() })
	text := fmt.Sprintf(`{"v":1,"key":%q}`, key)
	if _, err := conn.Write(
		append(binary.LittleEndian.AppendUint32([]byte("SHOALFD1"), uint32(len(text))), text...)); err != nil {
		return err
	}
	head, oob := make([]byte, 4), make([]byte, 4096)
	n, oobn, _, _, err := conn.(*net.UnixConn).ReadMsgUnix(head, oob)
	if err != nil {
		return err
	}
	if _, err := io.ReadFull(conn, head[n:]); err != nil {
		return err
	}
	body := make([]byte, binary.LittleEndian.Uint32(head))
	if _, err := io.ReadFull(conn, body); err != nil {
		return err
	}
	return tr.mapAll(body, oob[:oobn])
}

func (tr *trainer) mapAll(body, oob []byte) error {
	tr.reply.Error = ""
	if err := json.Unmarshal(body, &tr.reply); err != nil {
		return err
	}
	if tr.reply.Error != "" {
		return errors.New(tr.reply.Error)
	}
	messages, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return err
	}
	fds, err := syscall.ParseUnixRights(&messages[0])
	if err != nil {
		return err
	}
	for i, fd := range fds {
		size := tr.reply.SlotBytes
		if i == len(fds)-1 {
			size = tr.reply.Slots * tr.reply.HostBytes
		}
		mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ, unix.MAP_SHARED)
		_ = unix.Close(fd)
		if err != nil {
			return err
		}
		tr.t.Cleanup(func() { _ = unix.Munmap(mem) })
		if i == len(fds)-1 {
			tr.host = mem
		} else {
			tr.buffers = append(tr.buffers, mem)
		}
	}
	return nil
}

func (tr *trainer) send(m *feedpb.ClientMessage) {
	tr.t.Helper()
	if err := tr.stream.Send(m); err != nil && !errors.Is(err, io.EOF) {
		tr.t.Fatal(err)
	}
}

func (tr *trainer) credit(n uint32) {
	tr.t.Helper()
	tr.send(&feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Credit{Credit: &feedpb.Credit{N: n}}})
}

func (tr *trainer) release(slots ...uint32) {
	tr.t.Helper()
	tr.send(&feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Release{Release: &feedpb.Release{Slots: slots}}})
}

// event is one thing that came: a batch with its planes' bytes, or the end of an epoch.
type event struct {
	header *feedpb.BatchHeader
	planes map[string][]byte
	end    *feedpb.EpochEnd
}

// next receives one event. Of a batch in a buffer the planes for the host are compared with those on the device.
func (tr *trainer) next() (event, error) {
	m, err := tr.stream.Recv()
	if err != nil {
		return event{}, err
	}
	if end := m.GetEpochEnd(); end != nil {
		return event{end: end}, nil
	}
	h := m.GetBatch()
	e := event{header: h, planes: map[string][]byte{}}
	var buf []byte
	if h.GetSlot() == 0 {
		for uint64(len(buf)) < h.GetTotalBytes() {
			m, err := tr.stream.Recv()
			if err != nil {
				return event{}, err
			}
			buf = append(buf, m.GetChunk().GetData()...)
		}
	} else {
		buf = bytes.Clone(tr.buffers[h.GetSlot()-1][:h.GetTotalBytes()])
	}
	first := h.GetPlanes()[1].GetOffset()
	for _, p := range h.GetPlanes() {
		e.planes[p.GetName()] = buf[p.GetOffset():][:p.GetLength()]
		if h.GetSlot() != 0 && p.GetName() != "data" {
			at := uint64(h.GetSlot()-1)*uint64(tr.reply.HostBytes) + p.GetOffset() - first
			if !bytes.Equal(tr.host[at:][:p.GetLength()], e.planes[p.GetName()]) {
				tr.t.Errorf("batch %d: plane %s is not the same in host memory", h.GetIndex(), p.GetName())
			}
		}
	}
	return e, nil
}

const spec = "RandomResizedCrop(24)|RandomHorizontalFlip()|fp16|nchw|Normalize((0.485, 0.456, 0.406), (0.229, 0.224, " +
	"0.225))"

func request(name string, more func(*feedpb.Open)) *feedpb.Open {
	o := &feedpb.Open{Session: name, Batch: 5, Transform: spec, Seed: 9, Epochs: 2, Tail: "pad", Bad: "skip:50%",
		Credits: 2}
	if more != nil {
		more(o)
	}
	return o
}

// drain takes a stream to its end, giving every batch back late: the last two are kept.
func (tr *trainer) drain() (list []event) {
	tr.t.Helper()
	var kept []uint32
	for {
		e, err := tr.next()
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			tr.t.Fatal(err)
		}
		list = append(list, e)
		if e.header == nil {
			continue
		}
		if s := e.header.GetSlot(); s != 0 {
			if kept = append(kept, s); len(kept) > 2 {
				tr.release(kept[0])
				kept = kept[1:]
			}
		}
		tr.credit(1)
	}
}

// The stream by way of the device is the server's own: bytes, shapes, ids, bad samples, states and the ends of epochs.
func TestStreamIsTheServers(t *testing.T) {
	h := start(t, 33)
	for name, more := range map[string]func(*feedpb.Open){
		"pad":     nil,
		"uneven":  func(o *feedpb.Open) { o.Tail = "uneven" },
		"fp32":    func(o *feedpb.Open) { o.Transform = "Resize(30)|CenterCrop((20, 28))|fp32|nhwc" },
		"uint8":   func(o *feedpb.Open) { o.Transform = "RandomHorizontalFlip()|CenterCrop(20)" },
		"one row": func(o *feedpb.Open) { o.Batch = 1; o.Epochs = 1 },
	} {
		t.Run(name, func(t *testing.T) {
			want, err := dial(t, h.feed, request("want "+name, more))
			if err != nil {
				t.Fatal(err)
			}
			got, err := dial(t, h.gpu, request("got "+name, func(o *feedpb.Open) {
				if more != nil {
					more(o)
				}
				o.Device, o.Slots = "cuda:0", 4
			}))
			if err != nil {
				t.Fatal(err)
			}
			p := got.opened.GetPool()
			if p.GetDevice() != "cuda:0" || p.GetSlots() != 4 {
				t.Fatalf("pool %v", p)
			}
			if err := got.take(h.gpuAt, p.GetKey()); err != nil {
				t.Fatal(err)
			}
			if len(got.buffers) != 4 || len(got.reply.Events) != 4 || got.reply.UUID != "GPU-test" {
				t.Fatalf("%d buffers, %+v", len(got.buffers), got.reply)
			}
			a, b := want.opened, got.opened
			if a.GetState() != b.GetState() || a.GetTransform() != b.GetTransform() ||
				a.GetTransformHash() != b.GetTransformHash() ||
				a.GetLayout() != b.GetLayout() || fmt.Sprint(a.GetPlanes()) != fmt.Sprint(b.GetPlanes()) {
				t.Errorf("opened:\n%v\nthe server's:\n%v", b, a)
			}
			expect, have := want.drain(), got.drain()
			if len(expect) != len(have) {
				t.Fatalf("%d batches and ends of epochs, the server's are %d", len(have), len(expect))
			}
			for i, e := range expect {
				g := have[i]
				if e.end.GetState() != g.end.GetState() || e.end.GetBatches() != g.end.GetBatches() ||
					(e.end == nil) != (g.end == nil) {
					t.Fatalf("%d: end of epoch %v, the server's %v", i, g.end, e.end)
				}
				if e.end != nil {
					continue
				}
				if e.header.GetState() != g.header.GetState() || e.header.GetIndex() != g.header.GetIndex() ||
					e.header.GetValid() != g.header.GetValid() ||
					fmt.Sprint(e.header.GetBad()) != fmt.Sprint(g.header.GetBad()) ||
					fmt.Sprint(e.header.GetPlanes()) != fmt.Sprint(g.header.GetPlanes()) || g.header.GetSlot() == 0 {
					t.Fatalf("%d: header\n%v\nthe server's\n%v", i, g.header, e.header)
				}
				for name, plane := range e.planes {
					if !bytes.Equal(plane, g.planes[name]) {
						t.Fatalf("%d: plane %s differs", i, name)
					}
				}
			}
		})
	}
	h.settle(t)
	if s := h.relay.Stats(); s.Fallen != 0 || s.Batches == 0 {
		t.Errorf("%+v", s)
	}
}

// Without memory that is shared with the server, the relay gathers batches in slots of its own.
func TestStreamOfAServerElsewhere(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := "tcp://" + l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	h := startOn(t, 33, at)
	big := func(o *feedpb.Open) { o.Transform = "Resize((400, 500))|uint8|nhwc" } // several chunks
	want, err := dial(t, h.feed, request("want", big))
	if err != nil {
		t.Fatal(err)
	}
	got, err := dial(t, h.gpu, request("got", func(o *feedpb.Open) {
		big(o)
		o.Device, o.Slots = "cuda:0", 4
	}))
	if err != nil {
		t.Fatal(err)
	}
	if err := got.take(h.gpuAt, got.opened.GetPool().GetKey()); err != nil {
		t.Fatal(err)
	}
	expect, have := want.drain(), got.drain()
	if len(expect) != len(have) {
		t.Fatalf("%d batches and ends of epochs, the server's are %d", len(have), len(expect))
	}
	for i, e := range expect {
		if e.header.GetState() != have[i].header.GetState() {
			t.Errorf("%d: state differs", i)
		}
		for name, plane := range e.planes {
			if !bytes.Equal(plane, have[i].planes[name]) {
				t.Errorf("%d: plane %s differs", i, name)
			}
		}
	}
	_ = got.conn.Close()
	h.settle(t)
}

// A trainer that leaves, in whichever way, gives everything back.
func TestTrainerLeaves(t *testing.T) {
	h := start(t, 70)
	for name, leave := range map[string]func(tr *trainer){
		"stream": func(tr *trainer) { // it may use the batches that it has
			tr.cancel()
			for h.relay.Stats().Sessions > 0 {
				time.Sleep(time.Millisecond)
			}
			time.Sleep(20 * time.Millisecond)
			if h.device.open.Load() != 1 || h.relay.Stats().Bytes == 0 {
				t.Error("the memory that a trainer uses is gone with its stream")
			}
			if h.device.reading.Load() != 0 {
				t.Error("the server's slots stay page-locked for a trainer that has batches of a stream that ended")
			}
			_ = tr.conn.Close()
		},
		"handover":  func(tr *trainer) { _ = tr.conn.Close() },
		"unclaimed": nil,
	} {
		o := request(name, func(o *feedpb.Open) { o.Device, o.Slots, o.Epochs = "cuda:0", 3, 0 })
		tr, err := dial(t, h.gpu, o)
		if err != nil {
			t.Fatal(err)
		}
		if leave == nil {
			tr.cancel()
			h.settle(t)
			if err := tr.take(h.gpuAt, tr.opened.GetPool().GetKey()); err == nil {
				t.Error("memory of a session that has ended is handed over")
			}
			continue
		}
		if err := tr.take(h.gpuAt, tr.opened.GetPool().GetKey()); err != nil {
			t.Fatal(err)
		}
		if _, err := tr.next(); err != nil {
			t.Fatal(err)
		}
		leave(tr)
		h.settle(t)
	}
}

// A key is good for one handover, and nothing else is.
func TestHandoverRefused(t *testing.T) {
	h := start(t, 70)
	tr, err := dial(t, h.gpu, request("a", func(o *feedpb.Open) { o.Device, o.Slots, o.Epochs = "cuda:0", 3, 0 }))
	if err != nil {
		t.Fatal(err)
	}
	key := tr.opened.GetPool().GetKey()
	if err := tr.take(h.gpuAt, "guess"); err == nil || !strings.Contains(err.Error(), "key") {
		t.Errorf("a guessed key: %v", err)
	}
	if err := tr.take(h.gpuAt, key); err != nil {
		t.Fatal(err)
	}
	other := &trainer{t: t}
	if err := other.take(h.gpuAt, key); err == nil {
		t.Error("a key is good for two")
	}
	tr.cancel()
	_ = tr.conn.Close()
	h.settle(t)
}

// A trainer that holds every buffer gets no more, whatever its credits, and goes on when it releases one.
func TestBuffersAreNotRecycled(t *testing.T) {
	h := start(t, 70)
	tr, err := dial(t, h.gpu, request("a", func(o *feedpb.Open) {
		o.Device, o.Slots, o.Epochs, o.Credits = "cuda:0", 2, 0, 8
	}))
	if err != nil {
		t.Fatal(err)
	}
	if err := tr.take(h.gpuAt, tr.opened.GetPool().GetKey()); err != nil {
		t.Fatal(err)
	}
	first, err := tr.next()
	if err != nil {
		t.Fatal(err)
	}
	second, err := tr.next()
	if err != nil {
		t.Fatal(err)
	}
	if first.header.GetSlot() == second.header.GetSlot() {
		t.Fatal("two batches in one buffer")
	}
	if n := h.device.starts.Load(); n != 2 {
		t.Errorf("%d batches were started in 2 buffers that are held", n)
	}
	tr.release(second.header.GetSlot())
	third, err := tr.next()
	if err != nil || third.header.GetSlot() != second.header.GetSlot() {
		t.Fatalf("slot %d after the release of %d: %v", third.header.GetSlot(), second.header.GetSlot(), err)
	}
	if now := tr.buffers[first.header.GetSlot()-1][:first.header.GetTotalBytes()]; !bytes.Equal(
		now[:len(first.planes["data"])], first.planes["data"]) {
		t.Error("a buffer that was not released has changed")
	}
	tr.release(first.header.GetSlot(), first.header.GetSlot())
	for err == nil {
		_, err = tr.next()
	}
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("a slot released twice: %v", err)
	}
	_ = tr.conn.Close()
	h.settle(t)
}

// A buffer that was released waits for the trainer's work on it; the work of a trainer that was killed never ends, and
// holds nothing up.
func TestWorkOnAReleasedBuffer(t *testing.T) {
	h := start(t, 70)
	tr, err := dial(t, h.gpu, request("a", func(o *feedpb.Open) {
		o.Device, o.Slots, o.Epochs, o.Credits = "cuda:0", 2, 0, 8
	}))
	if err != nil {
		t.Fatal(err)
	}
	if err := tr.take(h.gpuAt, tr.opened.GetPool().GetKey()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := tr.next(); err != nil {
			t.Fatal(err)
		}
	}
	h.device.busy.Store(true)
	tr.release(1, 2)
	// about both, twice
	for deadline := time.Now().Add(patience); h.device.asked.Load() < 4; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the relay does not ask for the buffers again")
		}
	}
	if n := h.device.starts.Load(); n != 2 {
		t.Errorf("%d batches were started in 2 buffers that the trainer's work has", n)
	}
	h.device.busy.Store(false)
	b, err := tr.next()
	if err != nil {
		t.Fatal(err)
	}
	h.device.busy.Store(true)
	tr.release(b.header.GetSlot())
	_ = tr.conn.Close() // as the kernel does for who is killed
	h.settle(t)
}

// What the device cannot serve comes from the server as it is.
func TestFallsBack(t *testing.T) {
	h := start(t, 33)
	want, err := dial(t, h.feed, request("want", nil))
	if err != nil {
		t.Fatal(err)
	}
	expect := want.drain()
	h.device.refuse.Store(true)
	for name, more := range map[string]func(*feedpb.Open){
		"memory":  func(o *feedpb.Open) { o.Device, o.Slots = "cuda:0", 4 },
		"another": func(o *feedpb.Open) { o.Device, o.Slots = "cuda:3", 4 },
		"host":    func(*feedpb.Open) {},
	} {
		tr, err := dial(t, h.gpu, request(name, more))
		if err != nil {
			t.Fatal(err)
		}
		if tr.opened.GetPool() != nil {
			t.Fatalf("%s: a pool", name)
		}
		have := tr.drain()
		if len(have) != len(expect) {
			t.Fatalf("%s: %d, want %d", name, len(have), len(expect))
		}
		for i, e := range expect {
			if e.header.GetState() != have[i].header.GetState() ||
				!bytes.Equal(e.planes["data"], have[i].planes["data"]) {
				t.Fatalf("%s: batch %d differs from the server's", name, i)
			}
		}
	}
	if s := h.relay.Stats(); s.Fallen != 2 {
		t.Errorf("%d sessions fell back, want 2", s.Fallen)
	}
	h.device.refuse.Store(false)
	raw, err := dial(t, h.gpu, request("raw", func(o *feedpb.Open) {
		o.Device, o.Slots, o.Transform, o.Epochs = "cuda:0", 4, "raw", 1
	}))
	if err != nil {
		t.Fatal(err)
	}
	if n := len(raw.drain()); n != 8 {
		t.Errorf("%d batches and ends of raw samples, want 8", n)
	}
	h.settle(t)
}

// Errors reach the trainer with their code: the server's, after all batches before it, and the device's.
func TestErrors(t *testing.T) {
	h := start(t, 33)
	onDevice := func(more func(*feedpb.Open)) *feedpb.Open {
		return request("", func(o *feedpb.Open) { o.Device, o.Slots = "cuda:0", 4; more(o) })
	}
	if _, err := dial(t, h.gpu, onDevice(func(o *feedpb.Open) { o.Transform = "Rezise(3)" })); status.Code(err) !=
		codes.InvalidArgument || !strings.Contains(err.Error(), "Rezise") {
		t.Errorf("a wrong transform: %v", err)
	}
	run := func(o *feedpb.Open) (n int, err error) {
		tr, err := dial(t, h.gpu, o)
		if err != nil {
			t.Fatal(err)
		}
		if err := tr.take(h.gpuAt, tr.opened.GetPool().GetKey()); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = tr.conn.Close() }()
		for ; ; n++ {
			e, err := tr.next()
			if err != nil {
				return n, err
			}
			tr.release(e.header.GetSlot())
			tr.credit(1)
		}
	}
	// Sample 6 is the first bad one.
	if n, err := run(onDevice(func(o *feedpb.Open) { o.Bad, o.Order = "error", "sequential" })); n != 1 ||
		status.Code(err) != codes.DataLoss {
		t.Errorf("%d batches before %v, want 1 and data loss", n, err)
	}
	h.device.failAt.Store(h.device.starts.Load() + 3)
	if n, err := run(onDevice(func(*feedpb.Open) {})); n != 2 || status.Code(err) != codes.Unavailable ||
		!strings.Contains(err.Error(), "the device has failed") {
		t.Errorf("%d batches before %v, want 2 and the device's error", n, err)
	}
	h.settle(t)
	h.server.Close()
	if _, err := dial(t, h.gpu, onDevice(func(*feedpb.Open) {})); status.Code(err) != codes.Unavailable {
		t.Errorf("without a server: %v", err)
	}
}

func TestStatsAndInfo(t *testing.T) {
	h := start(t, 20)
	info, err := h.gpu.Info(context.Background(), &feedpb.InfoRequest{})
	if err != nil || info.GetSamples() != 20 {
		t.Fatalf("%v, %v", info, err)
	}
	stats, err := h.gpu.Stats(context.Background(), &feedpb.StatsRequest{})
	if err != nil || !strings.Contains(stats.GetJson(), `"gpu":{"device":"cuda:0"`) {
		t.Fatalf("%v, %v", stats, err)
	}
}
