package cache

import (
	"bytes"
	"errors"
	"testing"
	"time"
)

// However a file is asked for, and however many ask, it is fetched once; whoever waits gets its bytes.
func TestOneFetch(t *testing.T) {
	f := newFixture(t, 70<<10)
	want := f.bytes[0]
	ways := map[string]func(v *Volume) ([]byte, error){
		"ReadAt": func(v *Volume) ([]byte, error) {
			p := make([]byte, len(want))
			n, err := v.ReadAt(t.Context(), 0, p, 0)
			return p[:n], err
		},
		"Sample": func(v *Volume) ([]byte, error) {
			data, release, err := v.Sample(t.Context(), 0)
			return copied(data, release, err)
		},
		"SampleCoded": func(v *Volume) ([]byte, error) {
			data, release, err := v.SampleCoded(t.Context(), 0)
			return copied(data, release, err)
		},
		"Serve": func(v *Volume) ([]byte, error) {
			data, release, err := v.Serve(t.Context(), 0, 0, len(want), time.Time{}, false)
			return copied(data, release, err)
		},
		"Prefetch": func(v *Volume) ([]byte, error) {
			v.Prefetch(nil, 0, 0, time.Time{}, nil)
			return want, nil
		},
		"PrefetchGroup": func(v *Volume) ([]byte, error) {
			v.PrefetchGroup(nil, []int{0}, time.Time{}, nil)
			return want, nil
		},
		"Gather": func(v *Volume) ([]byte, error) {
			v.Gather([]int{0}, time.Time{})
			return want, nil
		},
	}
	for first := range ways { // which way begins the flight
		t.Run(first, func(t *testing.T) {
			before := f.gate.reads.Load()
			c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
			defer closeCache(t, c)
			v := f.volume(c)
			opened := f.gate.close()
			results := make(chan error)
			ask := func(way string) {
				got, err := ways[way](v)
				if err == nil && !bytes.Equal(got, want) {
					err = errors.New(way + ": other bytes")
				}
				results <- err
			}
			go ask(first)
			eventually(t, "the flight is under way", func() bool { return f.gate.reads.Load() == before+1 })
			asked := 1
			for way := range ways {
				for range 3 {
					go ask(way)
					asked++
				}
			}
			opened()
			for range asked {
				if err := <-results; err != nil {
					t.Error(err)
				}
			}
			if n := f.gate.reads.Load() - before; n != 1 {
				t.Errorf("%d requests", n)
			}
		})
	}
}

func copied(data []byte, release func(), err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	defer release()
	return bytes.Clone(data), nil
}

// A reader who waits for the store shows while he does, not only once he has been served.
func TestAWaitCountsWhileItLasts(t *testing.T) {
	f := newFixture(t, 70<<10)
	c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
	v := f.volume(c)
	opened := f.gate.close()
	read := make(chan error)
	go func() {
		_, err := v.ReadAt(t.Context(), 0, make([]byte, 1), 0)
		read <- err
	}()
	eventually(t, "the wait counts", func() bool { return v.Stats().Stall > 0 && c.Stats().Stall > 0 })
	opened()
	if err := <-read; err != nil {
		t.Error(err)
	}
	before := v.Stats().Stall
	if err := v.Close(); err != nil {
		t.Error(err)
	}
	if after := c.Stats().Stall; after != before { // of a dataset that is gone
		t.Errorf("a wait of %v is one of %v after its end", before, after)
	}
	closeCache(t, c)
}
