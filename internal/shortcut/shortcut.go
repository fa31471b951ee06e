// Package shortcut lets programs on the same machine read the files of a mount round FUSE: a program asks where files lie in the
// segments of the cache, gets the segments' descriptors, reads by itself, and tells afterwards what it has opened. It asks
// for many files at once and tells of many at once, so that a file costs it no round trip. What has no place (not on
// disk, not verified yet, encrypted, kept in another form, of several extents) it reads from the mount.
//
// The connection is one to the socket of the cache directory, which only its owner can open. It begins with the line of JSON
// {"shortcut":KEY}; the key is in the mount's .shoal/stats. All integers are little endian.
//
//	from the client   u8 type, u32 n, n bytes:
//	  'A' where are    the path of a file, relative to the mount point
//	  'S' segment      u32 number, u64 salt
//	  'O' opened       u32 numbers of files, in the order in which they were opened
//	from the server   u32 n, u8 type, n bytes:
//	  'H' hello        u64 generation: the versions of the dataset since the mount began
//	  'P' places       the answer to A: the file and those near it. u32 count, for each u32 number of the file,
//	                   u32 number of the segment, u64 its salt (0: no place), u64 offset, u32 length; the paths, each ended by a zero.
//	                   count is 0 if there is no such file
//	  'F' descriptor   the answer to S: u8 1 with a descriptor, or 0 if the segment was dropped
//	  'I' invalid      u64 generation: forget all places. It is sent before the refresh that changes the files returns
//
// A place stays right until then: bytes of a record never change, a salt is never used again, and a dropped segment stays readable
// by its descriptors. A client closes those of files that have no name any more, since they hold the disk's space.
package shortcut

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/segment"
)

const (
	maxMessage = 64 << 10 // from a client
	near       = 256      // files in an answer; a power of two
	maxChecks  = 32 << 20 // bytes that are verified for an answer: a few milliseconds
)

// patience is how long a client may take to receive a message. Tests have less.
var patience = 5 * time.Second

// Volume is the dataset behind a mount. All versions that Manifest has returned stay usable.
type Volume interface {
	Manifest() *catalog.Manifest
	Place(m *catalog.Manifest, file int, check bool) (segment.Place, bool)
	OpenSegment(m *catalog.Manifest, p segment.Place) (*os.File, error)
	Opened(m *catalog.Manifest, file int, process uint32)
	Released(m *catalog.Manifest, file int)
}

// Server serves one mount.
type Server struct {
	key    string
	volume Volume
	opens  func(process unix.Ucred) // called with each client's process

	mu         sync.Mutex
	generation uint64
	clients    map[*client]struct{} // nil once closed
	wg         sync.WaitGroup
}

// New returns a server for a mount of v. opens is called with the process of each client, before it can read.
func New(v Volume, opens func(process unix.Ucred)) *Server {
	return &Server{key: rand.Text(), volume: v, opens: opens, clients: map[*client]struct{}{}}
}

// Key names the mount in the first line of a connection. It is no secret.
func (s *Server) Key() string { return s.key }

// Moved tells the clients that there is another version. It returns when they can know.
func (s *Server) Moved() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.generation++
	for c := range s.clients {
		if c.send('I', binary.LittleEndian.AppendUint64(nil, s.generation)) != nil {
			_ = c.conn.Close() // which it notices as well
		}
	}
}

// Close ends all connections, and waits for them.
func (s *Server) Close() {
	s.mu.Lock()
	for c := range s.clients {
		_ = c.conn.Close()
	}
	s.clients = nil
	s.mu.Unlock()
	s.wg.Wait()
}

// Serve serves a connection until it ends. It does not close it.
func (s *Server) Serve(conn *net.UnixConn) error {
	process, err := peer(conn)
	if err != nil {
		return err
	}
	s.opens(process)
	c := &client{server: s, conn: conn, process: uint32(process.Pid), manifest: s.volume.Manifest()}
	s.mu.Lock()
	if s.clients == nil {
		s.mu.Unlock()
		return net.ErrClosed
	}
	s.clients[c] = struct{}{}
	s.wg.Add(1)
	err = c.send('H', binary.LittleEndian.AppendUint64(nil, s.generation))
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.clients, c)
		s.mu.Unlock()
		s.wg.Done()
	}()
	for err == nil {
		err = c.serve()
	}
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// peer returns the process at the other end, with the number 0 if it is in another pid namespace.
func peer(conn *net.UnixConn) (unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return unix.Ucred{}, err
	}
	var cred *unix.Ucred
	failed := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(failed, err); err != nil {
		return unix.Ucred{}, err
	}
	return *cred, nil
}

// client is one connection.
type client struct {
	server   *Server
	conn     *net.UnixConn
	process  uint32
	manifest *catalog.Manifest // of the places that it has
	in, out  []byte

	writing sync.Mutex
}

// send sends a message, with a descriptor if there is one.
func (c *client) send(kind byte, body []byte, files ...int) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.out = append(append(binary.LittleEndian.AppendUint32(c.out[:0], uint32(len(body))), kind), body...)
	_ = c.conn.SetWriteDeadline(time.Now().Add(patience)) // a client that is stopped must not hold up a refresh
	var rights []byte
	if len(files) > 0 {
		rights = unix.UnixRights(files...)
	}
	n, _, err := c.conn.WriteMsgUnix(c.out, rights, nil)
	if err == nil && n < len(c.out) {
		_, err = c.conn.Write(c.out[n:])
	}
	return err
}

// serve answers one message.
func (c *client) serve() error {
	var head [5]byte
	if _, err := io.ReadFull(c.conn, head[:]); err != nil {
		return err
	}
	n := binary.LittleEndian.Uint32(head[1:])
	if n > maxMessage {
		return fmt.Errorf("a message of %d bytes", n)
	}
	if cap(c.in) < int(n) {
		c.in = make([]byte, n)
	}
	body := c.in[:n]
	if _, err := io.ReadFull(c.conn, body); err != nil {
		return err
	}
	switch {
	case head[0] == 'A':
		return c.places(string(body))
	case head[0] == 'S' && n == 12:
		return c.descriptor(segment.Place{Segment: binary.LittleEndian.Uint32(body), Salt: binary.LittleEndian.Uint64(body[4:])})
	case head[0] == 'O' && n%4 == 0:
		return c.opened(body)
	}
	return fmt.Errorf("an unknown message, %q of %d bytes", head[0], n)
}

// places answers A. The manifest is kept before the places are looked up: if it changes meanwhile, I follows.
func (c *client) places(path string) error {
	m := c.server.volume.Manifest()
	c.manifest = m
	node, ok := m.Find(path)
	if !ok || node.IsDir {
		return c.send('P', make([]byte, 4))
	}
	le := binary.LittleEndian
	first := node.Index &^ (near - 1)
	end := min(first+near, m.Len())
	body := le.AppendUint32(nil, uint32(end-first))
	checks := int64(maxChecks)
	for file := first; file < end; file++ {
		p, ok := c.server.volume.Place(m, file, false)
		if !ok && checks > 0 {
			if p, ok = c.server.volume.Place(m, file, true); ok {
				checks -= m.Size(file)
			}
		}
		body = le.AppendUint32(le.AppendUint32(body, uint32(file)), p.Segment)
		body = le.AppendUint64(le.AppendUint64(body, p.Salt), uint64(p.Off))
		body = le.AppendUint32(body, uint32(m.Size(file)))
	}
	for file := first; file < end; file++ {
		body = append(m.AppendPath(body, file), 0)
	}
	return c.send('P', body)
}

// descriptor answers S.
func (c *client) descriptor(p segment.Place) error {
	f, err := c.server.volume.OpenSegment(c.manifest, p)
	if err != nil {
		return c.send('F', []byte{0})
	}
	defer f.Close()
	return c.send('F', []byte{1}, int(f.Fd()))
}

// opened passes the positions of the reader on.
func (c *client) opened(body []byte) error {
	for ; len(body) > 0; body = body[4:] {
		file := int(binary.LittleEndian.Uint32(body))
		if file >= c.manifest.Len() {
			return fmt.Errorf("file %d of %d", file, c.manifest.Len())
		}
		c.server.volume.Opened(c.manifest, file, c.process)
		c.server.volume.Released(c.manifest, file)
	}
	return nil
}
