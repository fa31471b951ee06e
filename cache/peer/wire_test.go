package peer

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"testing"
	"time"
)

// Nodes of one protocol understand each other, whatever their version: this never changes.
func TestWireFormat(t *testing.T) {
	r := Request{Dataset: [16]byte{1, 15: 2}, Version: [32]byte{3, 31: 4}, Held: true, Form: [8]byte{7, 7: 8},
		number: 0x01020304, due: 1500 * time.Millisecond}
	b := appendRequest(nil, r,
		[]Piece{{File: 7, Path: [16]byte{5, 15: 6}, ETag: "ab", Off: 1 << 33, P: make([]byte, 65537)}})
	const wantRequest = "67000000" + "0100" + "0100" + "dc050000" + "04030201" +
		"01000000000000000000000000000002" + "0300000000000000000000000000000000000000000000000000000000000004" +
		"0700000000000008" +
		"07000000" + "05000000000000000000000000000006" + "0000000002000000" + "01000100" + "02" + "6162"
	if got := hex.EncodeToString(b); got != wantRequest {
		t.Errorf("request\n%s\n%s", got, wantRequest)
	}
	f := appendSums(appendFrame(nil, frame{kind: frameData, piece: 258, n: 65537, request: 9}), make([]byte, 65537))
	const wantFrame = "0200" + "0201" + "01000100" + "09000000"
	if got := hex.EncodeToString(f[:frameSize]); got != wantFrame || len(f) != frameSize+8 {
		t.Errorf("frame\n%s\n%s", got, wantFrame)
	}
	if !checkSums(f[frameSize:], make([]byte, 65537)) {
		t.Error("checksums")
	}
	for reason, name := range map[Reason]string{
		1: "busy", 2: "version", 3: "etag", 4: "memory", 5: "error", 6: "not_held", 7: "reason 7"} {
		if reason.String() != name {
			t.Errorf("%d is %s", reason, reason)
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add(appendRequest(nil, Request{Held: true, number: 5}, want(100, 1, 2, 3))[4:])
	f.Add(appendRequest(nil, Request{due: time.Hour, Form: form}, want(extentSize, 1))[4:])
	f.Fuzz(func(t *testing.T, b []byte) {
		r, pieces, err := parseRequest(b, nil)
		if err != nil {
			return
		}
		total := 0
		var back []Piece
		for _, p := range pieces {
			if total += p.n; p.n < 1 || p.n > extentSize || p.off < 0 || p.file < 0 || total > mostBytes {
				t.Errorf("%+v", p)
			}
			back = append(back, Piece{File: p.file, Path: p.path, ETag: p.etag, Off: p.off, P: noise[:p.n]})
		}
		if len(pieces) == 0 || len(pieces) > mostPieces {
			t.Errorf("%d pieces", len(pieces))
		}
		again, pieces2, err := parseRequest(appendRequest(nil, r, back)[4:], nil)
		if err != nil || again != r || !reflect.DeepEqual(pieces, pieces2) {
			t.Errorf("%+v %+v, %v", again, pieces2, err)
		}
		if n, err := requestLength(appendRequest(nil, r, back)); err != nil || n != len(b) {
			t.Errorf("%d, %v", n, err)
		}
	})
}

func FuzzParseFrame(f *testing.F) {
	pieces := want(100, 1, 2, 3)
	for _, x := range []frame{{kind: frameWait, request: 3}, {kind: frameData, piece: 2, n: 100, request: 3},
		{kind: frameNo, reason: NotHeld, piece: 1, request: 3}, {kind: frameCoded, piece: 1, n: 99, request: 3},
		{kind: frameTerms, n: 1 << 31, request: 3}} {
		f.Add(appendFrame(nil, x))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < frameSize {
			return
		}
		x, err := parseFrame(b, Request{number: 3}, pieces)
		coded, errCoded := parseFrame(b, Request{number: 3, Form: form}, pieces)
		if err == nil && (errCoded != nil || x != coded) ||
			errCoded == nil && (err != nil) != (coded.kind == frameCoded) ||
			coded.kind == frameCoded && errCoded == nil &&
				(coded.n < 1 || coded.n >= 100 || coded.piece >= len(pieces)) {
			t.Errorf("%+v %v, %+v %v", x, err, coded, errCoded)
		}
		if err != nil {
			return
		}
		if x.piece >= len(pieces) || x.kind == frameData && x.n != 100 ||
			!bytes.Equal(appendFrame(nil, x), b[:frameSize]) {
			t.Errorf("%+v", x)
		}
	})
}
