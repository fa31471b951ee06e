// Package peer reads from the caches of other nodes, and serves them.
//
// # Rules
//
//   - A connection is HTTP/1.1 until both ends have agreed on the protocol: GET /shoal/peer/v1/read with an Upgrade.
//     From then on it carries one request at a time: a list of pieces of one dataset version. The answer has one frame
//     a piece, in any order: its bytes with a CRC32C a granule (64 KiB), or why there are none. Besides it has wait
//     frames, every [waitEvery], while the owner fetches, or opens the dataset: a slow store is no slow peer. They say
//     whether the store has brought the owner anything since the last one. With each answer an owner sends its [Terms],
//     if it has the version open. So who asks knows what to ask that owner for, and nobody else has to.
//   - A request may say which coded form the asker can decode ([cache.Codec]). Then all its pieces are whole files, and
//     one that the owner keeps in that form comes so, shorter than the piece.
//   - The asker checks piece, length and checksums. Whatever is wrong, the store is asked: a reader gets the right
//     bytes, or the store's error. When [Client.Read] has returned, nothing is written to a piece any more.
//   - A read that hears nothing for [silence] (connecting, or between two bytes) goes to the store if somebody waits
//     for it. Any such read has the peer pinged, once at a time: a connection of its own, up to the answer to its
//     upgrade. Until the ping has ended the peer is asked as before. If the ping fails, too, the peer is away, and who
//     waits for it goes to the store.
//   - A ping may take [silence], or four times what nine of ten answers take if that is longer, at most [fetching]; and
//     up to four times that when timers of this process ring late. What a timer is late is no silence of the peer's,
//     and a ping whose timer was late is sent again.
//   - A peer that is away is not asked for a second, then one request tries, and each further failure doubles the
//     pause, up to a minute ([objstore.Circuit]). One that refuses connections, breaks the protocol or sends a wrong
//     checksum is away at once.
//   - A read that somebody waits for gives a peer up after [patience], or [fetching] if the peer says that it fetches,
//     which begins anew whenever the peer says that its store brings bytes, up to [longest]: asking the store too would
//     only take bytes from its line, which then brings everybody's later. That holds even if it was a prefetch when it
//     began; others are given up after [longest], or three silences. If that happens [mostLate] times without an answer
//     between, answers to pings apart, the peer is away.
//   - A request is tried once; again only if a connection that had been idle was closed. At most
//     [peerPlaces] are under way to one peer, and [allPlaces] to all, and as many prefetches. Who gets no place in time
//     asks the store.
//   - A client makes a connection when a request needs one, and of all peers together keeps two a place idle, one a
//     peer at least. A server that has too many closes the one that has been idle longest. If all are busy it says so,
//     which is no failure.
//   - The server answers at most [serverPlaces] requests at once, and says no at once to the rest. What it serves it
//     has, or gets from the store, or from a former owner or another zone that holds it: no peer fetches for another's
//     request.
//   - The pieces that it is about to send have a bounded amount of memory. If there is none, or none in the cache, the
//     request waits until the asker's reader needs the piece, at least for [fetching], which begins anew whenever its
//     store brings bytes: a refusal would cost a fetch from the store. It holds no memory meanwhile, and sends wait
//     frames. So nodes that are short of memory and ask each other go on at the latest then, and usually as soon as a
//     piece was sent.
//   - Nodes trust each other by certificates of one authority, which is the cluster's own ([TLS]).
package peer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
	"time"
)

// Protocol is the version of what nodes say to each other. Nodes of different versions do not.
const Protocol = 4

const (
	basePath    = "/shoal/peer/v1/"
	upgradeTo   = "shoal-peer/4"
	nodeHeader  = "Shoal-Node"
	granuleSize = 64 << 10
	extentSize  = 4 << 20 // a piece is not larger

	mostPieces = 1024 // of a request
	mostBytes  = 16 << 20
	mostETag   = 255
	headSize   = 68 // of a request, without its length
	pieceSize  = 33 // and a piece's, without its ETag
	frameSize  = 12
	mostWaits  = 2 * int(longest/waitEvery)

	waitEvery = 250 * time.Millisecond
	silence   = time.Second
	patience  = 1250 * time.Millisecond
	fetching  = 3 * time.Second
	longest   = 30 * time.Second
	mostLate  = 8
)

// Reason is why a peer did not give a piece.
type Reason uint8

// The reasons. They are part of the protocol.
const (
	Busy    Reason = 1 + iota // too many requests, or a fetch that no peer may wait for
	Version                   // of the dataset, or the dataset itself, is another
	ETag                      // or path
	Memory
	Failed // the owner's fetch
	NotHeld
	numReasons
)

func (r Reason) String() string {
	if r == 0 || r >= numReasons {
		return fmt.Sprintf("reason %d", uint8(r))
	}
	return [...]string{"busy", "version", "etag", "memory", "error", "not_held"}[r-1]
}

// Terms are what an owner does with the units that it owns of a version.
type Terms struct {
	Below uint64 // the threshold of what it keeps (prefetch.Admits): 32 bits, and 32 that are all 0, or all 1 as these
	Gives bool   // it fetches for others also what it does not keep
}

// Request says what all pieces have in common.
type Request struct {
	Dataset [16]byte
	Version [32]byte
	Held    bool    // only what the peer has
	Form    [8]byte // of coded pieces that the asker can decode; zero: none

	number uint32        // of the request on its connection, which its frames repeat
	due    time.Duration // from now until a reader needs them; 0: it waits
}

// Piece is what is asked for: a piece of one extent of a file.
type Piece struct {
	File int      // its number in the version
	Path [16]byte // hash of its path
	ETag string
	Off  int64
	P    []byte // where the bytes go

	Filled bool // P has the right bytes
	Coded  int  // so many at its beginning, which are the file's coded form; 0: all
	no     Reason
}

// asked is a piece as the server sees it.
type asked struct {
	file int
	path [16]byte
	etag string
	off  int64
	n    int
}

var errProtocol = errors.New("not the protocol")

// A request: its length without this field (4), flags (1: held; 2), how many pieces (2), due in ms (4), the request's
// number (4), dataset (16), version (32), form (8); and of each piece the file (4), the path's hash (16), the offset
// (8), the length (4), the ETag's length (1) and the ETag. All numbers are little-endian.

func appendRequest(b []byte, r Request, pieces []Piece) []byte {
	at := len(b)
	b = binary.LittleEndian.AppendUint32(b, 0)
	var flags uint16
	if r.Held {
		flags = 1
	}
	b = binary.LittleEndian.AppendUint16(b, flags)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(pieces)))
	b = binary.LittleEndian.AppendUint32(b, uint32(min(max(r.due, 0), longest).Milliseconds()))
	b = binary.LittleEndian.AppendUint32(b, r.number)
	b = append(b, r.Dataset[:]...)
	b = append(b, r.Version[:]...)
	b = append(b, r.Form[:]...)
	for _, p := range pieces {
		b = binary.LittleEndian.AppendUint32(b, uint32(p.File))
		b = append(b, p.Path[:]...)
		b = binary.LittleEndian.AppendUint64(b, uint64(p.Off))
		b = binary.LittleEndian.AppendUint32(b, uint32(len(p.P)))
		b = append(append(b, uint8(len(p.ETag))), p.ETag...)
	}
	binary.LittleEndian.PutUint32(b[at:], uint32(len(b)-at-4))
	return b
}

// requestLength returns how much follows a request's first 4 bytes.
func requestLength(b []byte) (int, error) {
	n := binary.LittleEndian.Uint32(b)
	if n < headSize+pieceSize || n > headSize+mostPieces*(pieceSize+mostETag) {
		return 0, fmt.Errorf("%w: a request of %d bytes", errProtocol, n)
	}
	return int(n), nil
}

// parseRequest reads what follows a request's length. The pieces are appended to list.
func parseRequest(b []byte, list []asked) (r Request, pieces []asked, err error) {
	if len(b) < headSize {
		return r, nil, fmt.Errorf("%w: a short request", errProtocol)
	}
	flags, count := binary.LittleEndian.Uint16(b), int(binary.LittleEndian.Uint16(b[2:]))
	if flags > 1 || count == 0 || count > mostPieces {
		return r, nil, fmt.Errorf("%w: flags %d, %d pieces", errProtocol, flags, count)
	}
	r.Held, r.due = flags == 1, min(time.Duration(binary.LittleEndian.Uint32(b[4:]))*time.Millisecond, longest)
	r.number, r.Dataset, r.Version, r.Form = binary.LittleEndian.Uint32(b[8:]), [16]byte(b[12:]), [32]byte(b[28:]),
		[8]byte(b[60:])
	b = b[headSize:]
	total := 0
	for range count {
		if len(b) < pieceSize || len(b) < pieceSize+int(b[pieceSize-1]) {
			return r, nil, fmt.Errorf("%w: a short piece", errProtocol)
		}
		off, n := binary.LittleEndian.Uint64(b[20:]), binary.LittleEndian.Uint32(b[28:])
		end := pieceSize + int(b[pieceSize-1])
		if total += int(n); n == 0 || n > extentSize || off > 1<<62 || total > mostBytes {
			return r, nil, fmt.Errorf("%w: %d bytes at %d", errProtocol, n, off)
		}
		list = append(list, asked{
			file: int(binary.LittleEndian.Uint32(b)), path: [16]byte(b[4:]), off: int64(off), n: int(n),
			etag: string(b[pieceSize:end]),
		})
		b = b[end:]
	}
	if len(b) > 0 {
		return r, nil, fmt.Errorf("%w: %d bytes behind a request", errProtocol, len(b))
	}
	return r, list, nil
}

// The kinds of frames.
const (
	// nothing yet; the length is 1 if the store has brought bytes since the last one, of this piece or others
	frameWait = 1 + iota
	frameData // followed by the checksums (4 each), and the bytes
	frameNo
	frameCoded // as frameData, of a coded form
	frameTerms // the length is the upper half of Terms.Below, the piece's number 1 if it gives
)

// frame is an answer's unit: kind (1), reason (1), the piece's number (2), the length (4), the request's number (4).
type frame struct {
	kind    uint8
	reason  Reason
	piece   int
	n       int
	request uint32
}

func (t Terms) frame() frame {
	f := frame{kind: frameTerms, n: int(t.Below >> 32)}
	if t.Gives {
		f.piece = 1
	}
	return f
}

func (f frame) terms() *Terms {
	return &Terms{Below: uint64(f.n)<<32 | uint64(f.n/math.MaxUint32*math.MaxUint32), Gives: f.piece == 1}
}

func appendFrame(b []byte, f frame) []byte {
	b = append(b, f.kind, uint8(f.reason))
	b = binary.LittleEndian.AppendUint16(b, uint16(f.piece))
	b = binary.LittleEndian.AppendUint32(b, uint32(f.n))
	return binary.LittleEndian.AppendUint32(b, f.request)
}

// parseFrame reads the first frameSize bytes of a frame of an answer to a request of pieces.
func parseFrame(b []byte, r Request, pieces []Piece) (frame, error) {
	f := frame{b[0], Reason(b[1]), int(binary.LittleEndian.Uint16(b[2:])), int(binary.LittleEndian.Uint32(b[4:])),
		binary.LittleEndian.Uint32(b[8:])}
	ok := false
	switch f.kind {
	case frameWait:
		ok = f.reason == 0 && f.piece == 0 && f.n <= 1
	case frameData:
		ok = f.reason == 0 && f.piece < len(pieces) && f.n == len(pieces[f.piece].P)
	case frameTerms:
		ok = f.reason == 0 && f.piece <= 1
	case frameNo:
		ok = f.reason > 0 && f.reason < numReasons && f.piece < len(pieces) && f.n == 0
	case frameCoded:
		ok = f.reason == 0 && f.piece < len(pieces) && f.n > 0 && f.n < len(pieces[f.piece].P) && r.Form != [8]byte{}
	}
	if !ok || f.request != r.number {
		return f, fmt.Errorf("%w: frame %x", errProtocol, b[:frameSize])
	}
	return f, nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func sumsOf(n int) int { return (n + granuleSize - 1) / granuleSize }

// appendSums appends the checksum of each granule of data.
func appendSums(b, data []byte) []byte {
	for granule := range slices.Chunk(data, granuleSize) {
		b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(granule, castagnoli))
	}
	return b
}

func checkSums(sums, data []byte) bool {
	for granule := range slices.Chunk(data, granuleSize) {
		if binary.LittleEndian.Uint32(sums) != crc32.Checksum(granule, castagnoli) {
			return false
		}
		sums = sums[4:]
	}
	return true
}
