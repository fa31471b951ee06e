package findings

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

// good is a store 20 ms away that brings a gigabyte a second.
func good() *Site {
	s := &Site{Store: Store{Source: "s3://photos/train/", Endpoint: "https://s3", Cache: 1 << 30, Data: 1 << 30}}
	s.Objects, s.Bytes, s.Took, s.Whole = 4000, 4000*500_000, time.Second, true
	for range 4000 {
		s.Sizes = append(s.Sizes, 500_000)
	}
	for i := range 100 {
		s.Latency.Took = append(s.Latency.Took, 20*time.Millisecond+time.Duration(i)*100*time.Microsecond)
	}
	s.Latency.Sigma = 0.2
	s.Ladder = []Rung{{1, 20e6, 40}, {32, 900e6, 1800}, {64, 1e9, 2000}}
	return s
}

func TestStore(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(s *Site)
		code   string
		level  Level
		word   string
	}{
		{"bucket", nil, "source/bucket", OK, "s3://photos/train/ at https://s3"},
		{"folder", func(s *Site) { s.Endpoint = "" }, "source/bucket", OK, "a folder of this machine"},
		{"listing", nil, "source/listing", OK, "4,000 objects, 1.9 GiB, 488 KiB each; 4,000 objects/s"},
		{"small objects", func(s *Site) { s.Bytes = 4000 * 1000 }, "source/listing", OK,
			"shoal mount s3://photos/train/ MOUNTPOINT --shards DEST"},
		{"many", func(s *Site) { s.Whole = false }, "source/listing", OK, "more than"},
		{"nothing", func(s *Site) { s.Objects = 0 }, "source/listing", Fail, "prefix"},
		{"near", nil, "source/latency", OK, "p50 25 ms"},
		{"far", func(s *Site) { s.Latency.Took = []time.Duration{time.Second, time.Second, time.Second, time.Second} },
			"source/latency", Warn, "region"},
		{"late", func(s *Site) { s.Latency.Took[99] = 2 * time.Second }, "source/latency", Warn, "operator"},
		{"refuses", func(s *Site) { s.Latency.Failed = 5 }, "source/latency", Warn, "--connections"},
		{"does not answer", func(s *Site) {
			s.Latency.Took = nil
		}, "source/latency", Fail, "no GET was answered in time"},
		{"hardly answers", func(s *Site) {
			s.Latency.Took, s.Latency.Err = nil, errors.New("odd")
		}, "source/latency", Fail, "odd"},
		{"fast", nil, "source/bandwidth", OK,
			"1.0 GB/s, 2,000 GETs/s with 32 connections (1: 20 MB/s, 32: 900 MB/s, 64: 1.0 GB/s)"},
		{"slow", func(s *Site) { s.Ladder = []Rung{{1, 20e6, 40}} }, "source/bandwidth", Warn, "10% of them"},
		{"rising", func(s *Site) { s.Rising = true }, "source/bandwidth", OK, "still rises"},
		{"no rate", func(s *Site) { s.Ladder = nil }, "source/bandwidth", Fail, "network"},
		{"epoch", nil, "source/epoch", OK,
			"shoal plan s3://photos/train/ --latency 25ms --latency-sigma 0.20 --bandwidth 8000Mbit --connections 32 " +
				"--cache-size 1024MiB"},
		{"shards", func(s *Site) { s.Shards = true }, "source/epoch", OK, "indexes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := good()
			if c.change != nil {
				c.change(s)
			}
			said(t, c.code, s).is(t, c.level, c.word)
		})
	}
	// 32 connections bring 4,000 files, 25 ms away, in 3.1 s.
	if got := said(t, "source/epoch", good()).Values["cold_epoch_seconds"]; got < 3 || got > 4 {
		t.Errorf("a cold epoch takes %g s, want a little more than 3.1", got)
	}
}

func TestErrors(t *testing.T) {
	denied := &objstore.Error{Op: "check", Key: "b", Kind: objstore.KindDenied, Err: errors.New("AccessDenied:\n no"),
		Remedy: "check the keys"}
	OfError(fmt.Errorf("it: %w", denied)).is(t, Fail, "check b: AccessDenied: no|"+objstore.KindDenied.String()+
		"|check the keys")
	denied.Err = nil
	OfError(denied).is(t, Fail, "check b|"+objstore.KindDenied.String()+"|check the keys")
	OfError(Skip("nothing to do")).is(t, Skipped, "nothing to do")
	OfError(context.DeadlineExceeded).is(t, Fail, "no answer in time")
	OfError(errors.New("odd")).is(t, Fail, "odd|it cannot be used|dmesg")
	OfError(errors.New("odd (mend it now)")).is(t, Fail, "odd|it cannot be used|mend it now")
}

func TestPrint(t *testing.T) {
	long := strings.Repeat("word ", 40)
	list := []Finding{{Code: "a/b", Level: OK, Thing: long},
		{Code: "c", Level: Fail, Thing: "it", Cause: "why", Remedy: "one\ntwo"}}
	text := Text(list)
	for line := range strings.Lines(text) {
		if len(line) > 121 {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
	for _, want := range []string{"\n                           word", "fail    c                  it\n",
		"\n                           why\n", "-> one\n", "-> two\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if err := Failed(list); err == nil || err.Error() != "1 check failed, the first: c: it (one two)" {
		t.Error(err)
	}
	if Failed(list[:1]) != nil {
		t.Error("nothing failed")
	}
}
