// Package handover passes memory from a feed's server to its clients: on a separate connection to the feed's unix
// socket, a client names a key and gets descriptors (docs/protocol.md, "The handover"). `shoal serve` hands over its
// slots, shoal-gpu the buffers of a device.
package handover

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const Version = 1 // of requests and replies

const Timeout = 10 * time.Second // of a connection, to identify itself and to send its request

const (
	magic      = "SHOALFD1"
	maxRequest = 4096    // bytes of JSON
	maxReply   = 1 << 20 // bytes of JSON
	maxFiles   = 16      // the most descriptors that a client accepts
)

// Request is the client's request.
type Request struct {
	V      int    `json:"v"`
	Key    string `json:"key"`
	Frames bool   `json:"frames,omitempty"` // send the stream's messages on this connection
}

// ReadRequest reads a client's request. It reads no more than the request, and little of a hostile one.
func ReadRequest(r io.Reader) (q Request, err error) {
	head := make([]byte, len(magic)+4)
	if _, err := io.ReadFull(r, head); err != nil {
		return Request{}, fmt.Errorf("read the beginning: %w", err)
	}
	if string(head[:len(magic)]) != magic {
		return Request{}, fmt.Errorf("the request begins with %q, not with %s", head[:len(magic)], magic)
	}
	if err := readJSON(r, head[len(magic):], maxRequest, &q); err != nil {
		return Request{}, fmt.Errorf("a request %w", err)
	}
	if q.V != Version {
		return Request{}, fmt.Errorf("handover version %d: this server supports version %d", q.V, Version)
	}
	return q, nil
}

// readJSON reads a text of the length that came before it.
func readJSON(r io.Reader, length []byte, most uint32, into any) error {
	n := binary.LittleEndian.Uint32(length)
	if n > most {
		return fmt.Errorf("of %d bytes: the limit is %d", n, most)
	}
	text := make([]byte, n)
	if _, err := io.ReadFull(r, text); err != nil {
		return fmt.Errorf("of %d bytes: %w", n, err)
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("that is not JSON: %w", err)
	}
	return nil
}

// WriteReply sends a reply as JSON; files are sent with its first byte.
func WriteReply(c *net.UnixConn, reply any, files ...int) error {
	text, err := json.Marshal(reply)
	if err != nil {
		return err
	}
	if err := c.SetWriteDeadline(time.Now().Add(Timeout)); err != nil {
		return err
	}
	var rights []byte
	if len(files) > 0 {
		rights = unix.UnixRights(files...)
	}
	message := append(binary.LittleEndian.AppendUint32(nil, uint32(len(text))), text...)
	n, _, err := c.WriteMsgUnix(message, rights, nil)
	if err != nil {
		return fmt.Errorf("send a reply: %w", os.NewSyscallError("sendmsg", err))
	}
	if n < len(message) { // else the reader may have gone by now
		_, err = c.Write(message[n:])
	}
	return err
}

// Target is gRPC's form of a feed's address, and whether that is one of tls://.
func Target(addr string) (target string, tls bool, err error) {
	scheme, rest, _ := strings.Cut(addr, "://")
	switch {
	case scheme == "tcp" || scheme == "tls":
		return "dns:///" + rest, scheme == "tls", nil
	case scheme == "unix" && strings.HasPrefix(rest, "/"): // it may have %, # and ?
		return (&url.URL{Scheme: scheme, Path: rest}).String(), false, nil
	}
	return "", false, fmt.Errorf("feed address %q: must be unix:///PATH, tcp://HOST:PORT or tls://HOST:PORT", addr)
}

// Receive reads what WriteReply has sent. The caller closes the files, even if there is an error.
func Receive(c *net.UnixConn, reply any) (files []*os.File, err error) {
	head, oob := make([]byte, 4), make([]byte, unix.CmsgSpace(maxFiles*4))
	n, oobn, _, _, err := c.ReadMsgUnix(head, oob)
	if err != nil {
		return nil, err
	}
	messages, err := syscall.ParseSocketControlMessage(oob[:oobn])
	for i := range messages {
		list, e := syscall.ParseUnixRights(&messages[i])
		for _, fd := range list {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
		err = errors.Join(err, e)
	}
	switch {
	case err != nil:
		return files, err
	case n == 0:
		return files, io.ErrUnexpectedEOF
	}
	if _, err := io.ReadFull(c, head[n:]); err != nil {
		return files, err
	}
	if err := readJSON(c, head, maxReply, reply); err != nil {
		return files, fmt.Errorf("a reply %w", err)
	}
	return files, nil
}

const SlotHeader = 4096 // bytes before the batch in a slot of `shoal serve`

// SlotsReply is the reply of `shoal serve`, sent with the descriptor of its slots, or with an error.
type SlotsReply struct {
	V         int    `json:"v"`
	Slots     uint32 `json:"slots,omitempty"`
	SlotBytes uint64 `json:"slot_bytes,omitempty"`
	Frames    bool   `json:"frames,omitempty"` // the stream's messages come on this connection
	Error     string `json:"error,omitempty"`
}

// Memfd makes memory to hand over, and maps it. It is sealed against truncation: neither side can cause a fault in the
// other. Pages are allocated at their first use.
func Memfd(name string, size int64) (*os.File, []byte, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, nil, fmt.Errorf("create a memfd: %w", err)
	}
	file := os.NewFile(uintptr(fd), name)
	fail := func(what string, err error) (*os.File, []byte, error) {
		return nil, nil, errors.Join(fmt.Errorf("%s a memfd of %d bytes: %w", what, size, err), file.Close())
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		return fail("size", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|
		unix.F_SEAL_SEAL); err != nil {
		return fail("seal", err)
	}
	data, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fail("map", err)
	}
	return file, data, nil
}

// AskSlots makes the server at unix:///PATH hand over its slots, of which it has announced so many, and maps them.
// frames tells that the stream's messages come on the connection. The caller unmaps the memory, and then closes the
// connection, which must stay open while the memory is used.
func AskSlots(ctx context.Context, addr string, q Request, slots uint32, slotBytes uint64) (
	data []byte, frames bool, c net.Conn, err error) {
	var d net.Dialer
	if c, err = d.DialContext(ctx, "unix", strings.TrimPrefix(addr, "unix://")); err != nil {
		return nil, false, nil, err
	}
	r, files, err := ask(ctx, c.(*net.UnixConn), q)
	defer func() {
		for _, f := range files {
			_ = f.Close() // the mapping stays
		}
		if err != nil {
			c, err = nil, errors.Join(err, c.Close())
		}
	}()
	switch {
	case err != nil:
		return nil, false, c, err
	case r.Error != "":
		return nil, false, c, errors.New(r.Error)
	case len(files) != 1:
		return nil, false, c, fmt.Errorf("the server sent %d descriptors instead of 1", len(files))
	case r.Slots != slots || r.SlotBytes != slotBytes || r.SlotBytes <= SlotHeader || r.Slots == 0:
		return nil, false, c, fmt.Errorf("the server handed over %d slots of %d bytes, but announced %d of %d",
			r.Slots, r.SlotBytes, slots, slotBytes)
	}
	info, err := files[0].Stat()
	if err != nil {
		return nil, false, c, err
	}
	if want := int64(r.Slots) * int64(r.SlotBytes); want/int64(r.Slots) != int64(r.SlotBytes) || info.Size() != want {
		return nil, false, c, fmt.Errorf("the descriptor's file has %d bytes for %d slots of %d",
			info.Size(), r.Slots, r.SlotBytes)
	}
	if seals, err := unix.FcntlInt(files[0].Fd(), unix.F_GET_SEALS, 0); err != nil || seals&unix.F_SEAL_SHRINK == 0 {
		return nil, false, c, errors.New(
			"the descriptor's file is not sealed: its owner could truncate it while it is mapped here")
	}
	data, err = unix.Mmap(int(files[0].Fd()), 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, false, c, fmt.Errorf("map %d bytes: %w", info.Size(), err)
	}
	return data, r.Frames, c, nil
}

// ask sends a request. The caller closes the files, even if there is an error.
func ask(ctx context.Context, c *net.UnixConn, q Request) (r SlotsReply, files []*os.File, err error) {
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	if err := c.SetDeadline(time.Now().Add(Timeout)); err != nil {
		return r, nil, err
	}
	q.V = Version
	text, _ := json.Marshal(q) // of texts
	message := append(binary.LittleEndian.AppendUint32([]byte(magic), uint32(len(text))), text...)
	if _, err := c.Write(message); err != nil {
		return r, nil, err
	}
	if files, err = Receive(c, &r); err != nil {
		return r, files, err
	}
	return r, files, c.SetDeadline(time.Time{})
}
