package handover

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// A request is a whole or an error, whatever comes, and little of it is read.
func FuzzHandover(f *testing.F) {
	request := func(text string) []byte {
		return append(binary.LittleEndian.AppendUint32([]byte(magic), uint32(len(text))), text...)
	}
	f.Add(request(`{"v":1,"key":"abc"}`))
	f.Add(request(`{"v":1,"key":"abc","frames":true}`))
	f.Add(request(`{"v":2,"key":"abc"}`))
	f.Add(request(`{"v":1,"key":`))
	f.Add(request(``))
	f.Add([]byte(magic + "\xff\xff\xff\xff{}"))
	f.Add([]byte("SHOALFD2\x00\x00\x00\x00"))
	f.Add([]byte("SH"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		q, err := ReadRequest(r)
		read := len(data) - r.Len()
		if read > len(magic)+4+maxRequest {
			t.Fatalf("%d bytes were read", read)
		}
		if err != nil {
			if q != (Request{}) {
				t.Fatalf("%+v beside %v", q, err)
			}
			return
		}
		if !bytes.HasPrefix(data, []byte(magic)) || int(binary.LittleEndian.Uint32(data[8:])) != read-12 {
			t.Fatalf("%q was taken for a request", data[:read])
		}
	})
}
