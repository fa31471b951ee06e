package trace

import (
	"bytes"
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestEventsSurvive(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		us := func(name string) time.Duration {
			return time.Duration(rapid.Int64Range(0, 1<<50).Draw(t, name)) * time.Microsecond
		}
		e := Event{
			At: us("at"), Process: rapid.Uint32().Draw(t, "process"),
			File: rapid.Int32Range(-1, math.MaxInt32).Draw(t, "file"),
			Kind: rapid.SampledFrom([]Kind{Open, Read, Close, Lookup, List}).Draw(t, "kind"),
		}
		if e.Kind == Read {
			e.Wait, e.Off = us("wait"), rapid.Int64Min(0).Draw(t, "off")
			e.Len, e.Area = rapid.Int32Min(0).Draw(t, "len"), Area(rapid.IntRange(1, int(Miss)).Draw(t, "area"))
		}
		line := e.Append(nil)
		got, err := parseEvent(line)
		if err != nil || got != e {
			t.Fatalf("%s became %+v, %v; want %+v", line, got, err, e)
		}
	})
}

func TestTraceTakesLines(t *testing.T) {
	var tr Trace
	text := AppendJSON(nil, Header{Version: 1, Source: "s3://b/p", Files: 3, Trees: []Tree{{"train", 0, 3}}})
	text = AppendJSON(text, File{File: 2, Sample: -1, Size: 10, Path: "a\"b\n.txt"})
	text = (&Event{At: time.Second, Kind: Open, Process: 9, File: 2}).Append(text)
	text = AppendJSON(text, Losses{4})
	text = append(text, "{\"stats\":{\"version\":1}}\n{\"footer\":{\"seconds\":2.5}}\n\n"...)
	for line := range bytes.Lines(text) {
		if err := tr.Add(line); err != nil {
			t.Fatal(err)
		}
	}
	if tr.Source != "s3://b/p" || tr.Trees[0].Folder != "train" || tr.Header.Files != 3 ||
		tr.Files[2].Path != "a\"b\n.txt" || tr.Files[2].Sample != -1 ||
		len(tr.Events) != 1 || tr.Lost != 4 || len(tr.Stats) != 1 || tr.Length != 2500*time.Millisecond {
		t.Errorf("%+v", tr)
	}
}

func TestTraceRefuses(t *testing.T) {
	header := string(AppendJSON(nil, Header{Version: 1}))
	for _, c := range []string{
		`[1,"o",2,3]`, `{"file":1}`, `no JSON`, `{"version":2}`,
		header + `[1,"x",2,3]`, header + `[1,"o",2]`, header + `[1,"r",2,3]`, header + `[1,"o",2,-2]`, header +
			`[-1,"o",2,3]`,
		header + `[1,"oc",2,3]`, header + `[1,"o",4294967296,3]`, header + `[1,"r",2,3,0,-1,0,"keep"]`, header + `{`,
	} {
		var tr Trace
		var err error
		for line := range bytes.Lines([]byte(c)) {
			if err == nil {
				err = tr.Add(line)
			}
		}
		if err == nil {
			t.Errorf("%s was taken", c)
		}
	}
}

func FuzzTrace(f *testing.F) {
	f.Add([]byte("{\"version\":1}\n[1,\"r\",2,3,0,1,0,\"keep\"]\n{\"file\":1,\"size\":2}\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		var tr Trace
		for line := range bytes.Lines(text) {
			if tr.Add(line) != nil {
				return
			}
		}
	})
}
