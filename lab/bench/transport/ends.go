package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/prefetch/order"
)

// samples is a dataset of nothing: what a batch holds is the transform's affair.
type samples int

func (samples) Version() string                { return strings.Repeat("0", 64) }
func (n samples) Len() int                     { return int(n) }
func (samples) Label(i int) int                { return i % 1000 }
func (samples) Path(i int) string              { return fmt.Sprint(i) }
func (samples) Size(int) int64                 { return 8 }
func (samples) Classes() []string              { return nil }
func (samples) Groups() (order.Groups, string) { return nil, "" }
func (stream) Close() error                    { return nil }
func (n samples) Begin(_ string, seq order.Order, _, _ int) (loader.Stream, error) {
	return stream{seq}, nil
}

type stream struct{ seq order.Order }

func (s stream) Read(_ context.Context, pos int) ([]byte, func(), error) {
	return binary.LittleEndian.AppendUint64(nil, uint64(s.seq.At(pos))), func() {}, nil
}

// picture makes rows that begin with the sample's number; with from, all of the row is written.
type picture struct{ from []byte }

func (p picture) Apply(_ context.Context, src loader.Sample, _ loader.Draw, row *loader.Row) error {
	copy(row.Fields[0], p.from)
	copy(row.Fields[0], src.Data)
	return nil
}
func (picture) Fields() []loader.Field {
	return []loader.Field{{Name: "data", DType: "uint8", Shape: []int{3, 224, 224}, Bytes: rowBytes}}
}
func (picture) Layout() string { return "nchw" }
func (picture) String() string { return "picture" }
func (picture) Hash() string   { return "picture" }

// serve is the server. It prints its addresses and ends with its standard input.
func serve(dir string, write bool) error {
	var p picture
	if write {
		p.from = make([]byte, rowBytes)
		for i := range p.from {
			p.from[i] = byte(i)
		}
	}
	server := loader.NewServer(func() loader.Dataset { return samples(1 << 20) }, loader.Options{
		Compile: func(context.Context, string, loader.Dataset) (loader.Transform, error) { return p, nil }})
	socket, err := loader.Listen("unix://"+filepath.Join(dir, "transport.sock"), loader.ListenOptions{})
	if err != nil {
		return err
	}
	tcp, err := loader.Listen("tcp://127.0.0.1:0", loader.ListenOptions{})
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode([]string{"unix://" + socket.Addr().String(), "tcp://" + tcp.Addr().String()}); err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // until the parent closes it, or dies
		server.Close()
	}()
	return server.Serve(socket, tcp)
}

// read is the reader of one arm. It prints its outcome.
func read(target string, batches int) error {
	if target == "ring" {
		ring, err := unix.Mmap(-1, 0, slots*batchBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return err
		}
		for i := range ring {
			ring[i] = byte(i)
		}
		k := 0
		return timed(batches, func() (int, error) {
			part := ring[k*batchBytes : (k+1)*batchBytes]
			k = (k + 1) % slots
			sum(part)
			return len(part), nil
		}, false)
	}
	addr, transport, _ := strings.Cut(target, ",")
	c, err := feedclient.Dial(addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if c.Transport, err = feedclient.ParseTransport(transport); err != nil {
		return err
	}
	s, err := c.Open(context.Background(), &feedpb.Open{Batch: batchRows, Transform: "picture", Credits: credits, Slots: slots})
	if err != nil {
		return err
	}
	defer s.Close()
	return timed(batches, func() (int, error) {
		b, err := s.Next()
		if err != nil {
			return 0, err
		}
		defer b.Release()
		if b.ID(0) != int64(binary.LittleEndian.Uint64(b.Row(0))) {
			return 0, fmt.Errorf("batch %d holds another's rows", b.Header.GetIndex())
		}
		sum(b.Bytes()[:batchBytes])
		return batchBytes, nil
	}, s.InSlots())
}

// timed calls next for batches, after some that are not counted.
func timed(batches int, next func() (int, error), inSlots bool) error {
	for range 2 * slots {
		if _, err := next(); err != nil {
			return err
		}
	}
	runtime.GC()
	o := outcome{InSlots: inSlots}
	start, used := time.Now(), cpu()
	for range batches {
		n, err := next()
		if err != nil {
			return err
		}
		o.Bytes += float64(n)
	}
	o.Seconds, o.CPU, o.Sum = time.Since(start).Seconds(), cpu()-used, total
	return json.NewEncoder(os.Stdout).Encode(o)
}

// cpu returns the seconds of processor time that this process has had.
func cpu() float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// total is of all that was read.
var total uint64

// sum reads every byte of b, whose length is a multiple of 64, as fast as a core does without vectors.
func sum(b []byte) {
	words := unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
	var s0, s1, s2, s3 uint64
	for len(words) >= 8 {
		s0 += words[0] + words[4]
		s1 += words[1] + words[5]
		s2 += words[2] + words[6]
		s3 += words[3] + words[7]
		words = words[8:]
	}
	total += s0 + s1 + s2 + s3
}
