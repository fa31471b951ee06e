// Package shortcut lets programs on the same machine read the files of a mount round FUSE: a program asks where files
// lie in the segments of the cache, reads there by itself, and tells afterwards what it has opened. It asks for many
// files at once and tells of many at once, so that a file costs it no round trip. What has no place (not on disk, not
// verified yet, encrypted, kept in another form, of several extents) it reads from the mount.
//
// # Rules
//
// A connection is for one version of the dataset. The server ends it before a refresh returns; it also ends with the
// mount and with the daemon, after anything odd, and at the first message after a record on disk was found to be
// damaged. What a client has learned from it holds only as long. So a client
//
//  1. finds the place of a file,
//  2. then looks whether the connection has ended (poll with POLLRDHUP, whatever waits to be received), and
//  3. if it has, forgets all that it knows, and reads the file from the mount.
//
// The bytes of a place are those of its version whenever they are read: bytes of a record never change, a segment is
// known by the salt in its header, which is never used again, and a dropped one stays readable by its descriptors. A
// client closes those of files that have no name any more, since they hold the disk's space.
//
// A client that was interrupted while it waits for an answer never asks on that connection again.
//
// # Protocol
//
// The connection is one to the socket of the cache directory, which only its owner can open. It begins with the line of
// JSON {"shortcut":KEY}; the key is in the mount's .shoal/stats as shortcut_v2. All integers are little endian.
//
//	from the client   u8 type, u32 n, n bytes:
//	  'A' where are    u32 number of the question; the path of a file, relative to the mount point
//	  'O' opened       u32 numbers of files, in the order in which they were opened
//	from the server   u32 n, u8 type, n bytes:
//	  'H' hello        u64 version of the dataset; the folder of the segments, whose files are 00000001.seg and so on
//	  'P' places       the answer to A: the file and those near it. u32 number of the question, u64 version, u32 count, for each u32
//	                   number of the file, u32 number of the segment, u64 its salt (0: no place), which the file has at offset 16,
//	                   u64 offset, u32 length; the paths, each ended by a zero. count is 0 if there is no such file
package shortcut

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/internal/audit"
)

const (
	maxMessage = 64 << 10 // from a client
	near       = 256      // files in an answer; a power of two
	maxChecks  = 32 << 20 // bytes that are verified for an answer: a few milliseconds
)

var patience = 5 * time.Second // with a client that receives a message; tests have less

// Volume is the dataset behind a mount. All versions that Manifest has returned stay usable.
type Volume interface {
	Manifest() *catalog.Manifest
	Place(m *catalog.Manifest, file int, check bool) (segment.Place, bool)
	SegmentDir(m *catalog.Manifest) string
	Damaged() int64 // how many records were found damaged so far
	Opened(m *catalog.Manifest, file int, process uint32)
	Released(m *catalog.Manifest, file int)
}

// Server serves one mount.
type Server struct {
	key    string
	volume Volume
	opens  func(process *audit.Peer) // called with each client's process
	write  func(conn *net.UnixConn, message []byte) (int, error)

	mu      sync.Mutex
	clients map[*client]struct{} // nil once closed
	wg      sync.WaitGroup
}

// New returns a server for a mount of v. opens is called with the process of each client, before it can read.
func New(v Volume, opens func(process *audit.Peer)) *Server {
	return &Server{key: rand.Text(), volume: v, opens: opens, write: (*net.UnixConn).Write,
		clients: map[*client]struct{}{}}
}

// Key names the mount in the first line of a connection. It is no secret.
func (s *Server) Key() string { return s.key }

// Moved ends the connections of the version before. When it returns, all clients can see that.
func (s *Server) Moved() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.clients {
		c.end()
	}
}

// Close ends all connections, and waits for them.
func (s *Server) Close() {
	s.mu.Lock()
	for c := range s.clients {
		c.end()
	}
	s.clients = nil
	s.mu.Unlock()
	s.wg.Wait()
}

// Serve serves a connection until it ends. It does not close it.
func (s *Server) Serve(conn *net.UnixConn) error {
	process := audit.Unix(conn)
	if process.UID == nil {
		return errors.New("the kernel does not say whose connection it is")
	}
	s.opens(process)
	c := &client{server: s, conn: conn, process: uint32(process.PID), damaged: s.volume.Damaged()}
	s.mu.Lock()
	if s.clients == nil {
		s.mu.Unlock()
		return net.ErrClosed
	}
	c.manifest = s.volume.Manifest() // if a refresh has already changed it, Moved comes later
	s.clients[c] = struct{}{}
	s.wg.Add(1)
	s.mu.Unlock()
	defer func() {
		c.end() // before Moved can miss it
		s.mu.Lock()
		delete(s.clients, c)
		s.mu.Unlock()
		s.wg.Done()
	}()
	var err error
	if c.version, err = strconv.ParseUint(c.manifest.Version()[:16], 16, 64); err == nil {
		err = c.send('H', append(binary.LittleEndian.AppendUint64(nil, c.version), s.volume.SegmentDir(c.manifest)...))
	}
	for err == nil {
		err = c.serve()
	}
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, unix.EPIPE) ||
		errors.Is(err, unix.ECONNRESET) {
		return nil
	}
	return err
}

type client struct {
	server   *Server
	conn     *net.UnixConn
	process  uint32
	manifest *catalog.Manifest // of its places
	version  uint64            // its first digits
	damaged  int64             // records when the connection began
	in, out  []byte
}

// end ends the connection. The client sees it when this returns, which Close does not promise while others use it.
func (c *client) end() {
	_ = c.conn.CloseWrite()
	_ = c.conn.CloseRead()
}

func (c *client) send(kind byte, body []byte) error {
	c.out = append(append(binary.LittleEndian.AppendUint32(c.out[:0], uint32(len(body))), kind), body...)
	_ = c.conn.SetWriteDeadline(time.Now().Add(patience))
	_, err := c.server.write(c.conn, c.out)
	return err
}

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
	case c.server.volume.Damaged() != c.damaged: // perhaps one that it knows the place of
		return io.EOF
	case head[0] == 'A' && n >= 4:
		return c.places(body[:4], string(body[4:]))
	case head[0] == 'O' && n%4 == 0:
		return c.opened(body)
	}
	return fmt.Errorf("an unknown message, %q of %d bytes", head[0], n)
}

// places answers A.
func (c *client) places(question []byte, path string) error {
	le, m := binary.LittleEndian, c.manifest
	body := le.AppendUint64(question[:4:4], c.version)
	node, ok := m.Find(path)
	if !ok || node.IsDir {
		return c.send('P', le.AppendUint32(body, 0))
	}
	first := node.Index &^ (near - 1)
	end := min(first+near, m.Len())
	body = le.AppendUint32(body, uint32(end-first))
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
