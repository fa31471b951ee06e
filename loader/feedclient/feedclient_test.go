package feedclient

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/loader/internal/wire"
)

// A server that says where rows lie is not believed.
func TestRowsOutsideTheData(t *testing.T) {
	for _, c := range []struct {
		offsets []uint64
		ok      bool
	}{{[]uint64{0, 3, 4}, true}, {[]uint64{0, 5, 4}, false}, {[]uint64{0, 3, 5}, false}, {[]uint64{3, 1, 4}, false},
		{[]uint64{0, 3, 1 << 63}, false}} {
		b := &Batch{Header: &feedpb.BatchHeader{Rows: 2}, buf: make([]byte, 4)}
		plane := func(name string, content []byte, from uint64) {
			b.buf = append(b.buf, content...)
			b.Header.Planes = append(b.Header.Planes,
				&feedpb.Plane{Name: name, Offset: from, Length: uint64(len(b.buf)) - from})
		}
		plane("data", nil, 0)
		plane("label", make([]byte, 16), 4)
		plane("id", make([]byte, 16), 20)
		plane("valid", []byte{1, 1}, 36)
		var off []byte
		for _, at := range c.offsets {
			off = binary.LittleEndian.AppendUint64(off, at)
		}
		plane("offsets", off, 38)
		if err := b.cut(); (err == nil) != c.ok {
			t.Errorf("offsets %v: %v", c.offsets, err)
		} else if c.ok && (len(b.Row(0)) != 3 || len(b.Row(1)) != 1) {
			t.Errorf("rows of %d and %d bytes", len(b.Row(0)), len(b.Row(1)))
		}
	}
}

// A caller who comes long after the stream's end gets what was sent before it.
func TestLateCaller(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	here, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	there, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	to := wire.NewFrameWriter(there)
	if err := to.SendMsg(&feedpb.ServerMessage{
		Kind: &feedpb.ServerMessage_Batch{Batch: &feedpb.BatchHeader{Index: 7}}}); err != nil {
		t.Fatal(err)
	}
	if err := to.End(); err != nil {
		t.Fatal(err)
	}
	s := &Stream{frames: true, over: make(chan error, 1), last: endPatience,
		memory: &mapping{conn: here, in: wire.NewFrameReader(here, wire.MaxServerFrame)}}
	s.over <- io.EOF
	if err := here.SetReadDeadline(time.Unix(1, 0)); err != nil { // it is long past
		t.Fatal(err)
	}
	var in wire.Incoming
	if err := s.recv(&in); err != nil || in.Message.GetBatch().GetIndex() != 7 {
		t.Errorf("got %v, %v", &in.Message, err)
	}
	if err := s.recv(&in); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
}
