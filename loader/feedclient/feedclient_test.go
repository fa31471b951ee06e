package feedclient

import (
	"errors"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/loader/internal/wire"
)

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
	if err := to.SendMsg(&feedpb.ServerMessage{Kind: &feedpb.ServerMessage_Batch{Batch: &feedpb.BatchHeader{Index: 7}}}); err != nil {
		t.Fatal(err)
	}
	if err := to.End(); err != nil {
		t.Fatal(err)
	}
	s := &Stream{frames: true, over: make(chan error, 1), last: endPatience, memory: &mapping{conn: here, in: wire.NewFrameReader(here, wire.MaxServerFrame)}}
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
