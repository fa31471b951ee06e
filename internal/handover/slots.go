package handover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// SlotHeader is the length of the header before the batch in a slot of `shoal serve`.
const SlotHeader = 4096

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

// AskSlots makes the server hand over its slots, of which it has announced so many, and maps them. frames tells that
// the stream's messages come on the connection. The caller unmaps the memory, and then closes the connection.
func AskSlots(ctx context.Context, addr string, q Request, slots uint32, slotBytes uint64) (
	data []byte, frames bool, c net.Conn, err error) {
	var r SlotsReply
	c, files, err := Ask(ctx, addr, q, &r)
	if err != nil {
		return nil, false, nil, err
	}
	defer func() {
		closeAll(files) // the mapping stays
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	var st unix.Stat_t
	switch {
	case r.Error != "":
		return nil, false, c, errors.New(r.Error)
	case len(files) != 1:
		return nil, false, c, fmt.Errorf("the server sent %d descriptors instead of 1", len(files))
	case r.Slots != slots || r.SlotBytes != slotBytes || r.SlotBytes <= SlotHeader || r.Slots == 0:
		return nil, false, c, fmt.Errorf("the server handed over %d slots of %d bytes, but announced %d of %d",
			r.Slots, r.SlotBytes, slots, slotBytes)
	}
	if err := unix.Fstat(files[0], &st); err != nil {
		return nil, false, c, err
	}
	if want := int64(r.Slots) * int64(r.SlotBytes); want/int64(r.Slots) != int64(r.SlotBytes) || st.Size != want {
		return nil, false, c, fmt.Errorf("the descriptor's file has %d bytes for %d slots of %d",
			st.Size, r.Slots, r.SlotBytes)
	}
	if seals, err := unix.FcntlInt(uintptr(files[0]), unix.F_GET_SEALS, 0); err != nil ||
		seals&unix.F_SEAL_SHRINK == 0 {
		return nil, false, c, errors.New(
			"the descriptor's file is not sealed: its owner could truncate it while it is mapped here")
	}
	if data, err = unix.Mmap(files[0], 0, int(st.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, false, c, fmt.Errorf("map %d bytes: %w", st.Size, err)
	}
	return data, r.Frames, c, nil
}
