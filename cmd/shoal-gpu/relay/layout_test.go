package relay

import (
	"bytes"
	"testing"

	"github.com/shoalfs/shoal/loader/feedpb"
)

// What trainers read in the host's memory is copied there, and no more: views may be hundreds of megabytes.
func TestHostCopiesAreSmall(t *testing.T) {
	var planes []*feedpb.Plane
	at := 0
	for _, p := range []struct {
		name string
		n    int
	}{{"data", 64}, {"view1", 128}, {"label", 16}, {"id", 16}, {"valid", 2}} {
		planes = append(planes, &feedpb.Plane{Name: p.name, Offset: uint64(at), Length: uint64(p.n)})
		at += p.n
	}
	l, err := lay(planes, 2, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	slot, host := bytes.Repeat([]byte{7}, at), make([]byte, l.total-l.small)
	l.host(host, slot)
	for _, p := range l.planes[1:] {
		got := host[int(p.GetOffset())-l.small:][:p.GetLength()]
		if want := bytes.Repeat([]byte{7}, len(got)); p.GetName() == "view1" && bytes.ContainsRune(got, 7) ||
			p.GetName() != "view1" && !bytes.Equal(got, want) {
			t.Errorf("%s: %v", p.GetName(), got)
		}
	}
}
