package accelerator

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestOver(t *testing.T) {
	// Steps of 1 s at 0 and 3 s of 4 s.
	e := Epoch{Seconds: 4, Compute: 2, Steps: []Step{{0, 0}, {3, 2}}}
	for n, want := range map[int][]float64{1: {0.5}, 2: {0.5, 0.5}, 4: {1, 0, 0, 1}, 8: {1, 1, 0, 0, 0, 0, 1, 1}} {
		for i, u := range e.Over(n) {
			if math.Abs(u-want[i]) > 1e-9 {
				t.Errorf("%d parts: %v", n, e.Over(n))
			}
		}
	}
	// The parts' mean is the utilisation, whatever the parts.
	synctest.Test(t, func(t *testing.T) {
		e, err := Job{1, 3, 7 * ms, 1, 1}.Run(t.Context(), 300, newSlow(every(5*ms)), nil)
		if err != nil {
			t.Fatal(err)
		}
		for n := 1; n < 200; n++ {
			sum := 0.0
			for _, u := range e.Over(n) {
				sum += u / float64(n)
			}
			if math.Abs(sum-e.Utilisation) > 1e-6 {
				t.Fatalf("%d parts: %v, want %v", n, sum, e.Utilisation)
			}
		}
	})
}

func TestPlotIsXML(t *testing.T) {
	var h Histogram
	for _, d := range []time.Duration{0, 0, 1, 5, 5, 900} {
		h.Add(d * ms)
	}
	e := Epoch{Seconds: 4, Compute: 2, Utilisation: 0.5, Steps: []Step{{0, 0}, {3, 2}}, Stalls: h}
	var b bytes.Buffer
	if err := Plot(&b, `a <b> & "c"`, "notes", []Epoch{e, e}); err != nil {
		t.Fatal(err)
	}
	counts := map[string]int{}
	title := ""
	dec := xml.NewDecoder(strings.NewReader(b.String()))
	for {
		tok, err := dec.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%v in %s", err, b.String())
		}
		switch tok := tok.(type) {
		case xml.StartElement:
			counts[tok.Name.Local]++
		case xml.CharData:
			if strings.Contains(string(tok), "<b>") {
				title = string(tok)
			}
		}
	}
	if counts["svg"] != 1 || counts["polyline"] != 2 || counts["rect"] < 3 || title != `a <b> & "c"` {
		t.Errorf("%v, title %q in %s", counts, title, b.String())
	}
}
