package doctor

import (
	"context"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/internal/findings"
)

// Source is the object store to check.
type Source struct {
	Text   string
	Getenv func(name string) string // the AWS environment
	Store  objstore.StoreOptions
	// Data returns the bytes that a daemon's memory leaves for samples beside the metadata of this many files.
	Data func(files int) int64

	quick   bool
	window  time.Duration // of a rung of connections; others are multiples of it
	facts   findings.Store
	store   objstore.Store
	where   objstore.Source
	objects []objstore.Object // some of them
}

// steps gathers a source's facts.
func (s *Source) steps() map[string]step {
	return map[string]step{
		"source/bucket":    {4 * time.Second, s.open}, // it may request a role's credentials
		"source/listing":   {4 * s.window, s.list},
		"source/latency":   {3 * s.window, s.latency},
		"source/bandwidth": {10 * s.window, s.bandwidth}, "source/epoch": {10 * time.Second,
			func(context.Context) error { return nil }},
	}
}

// open parses the name and the configuration, and asks the store for the bucket.
func (s *Source) open(ctx context.Context) (err error) {
	// Links that lead out of a folder are checked by a mount, not here.
	o := stores.Options{Getenv: s.Getenv, Store: s.Store}
	o.Store.LinksOutside = true
	if s.store, s.where, err = stores.Open(ctx, s.Text, o); err != nil {
		return err
	}
	s.facts.Source = s.where.String()
	if _, remote := s.store.(*s3.Store); remote {
		s.facts.Endpoint = s.where.Endpoint
	}
	return s.store.Check(ctx)
}

const (
	listMost  = 200_000
	keepsMost = 20_000 // objects to read from
)

// list lists for a limited time. Its rate is that of one listing; a mount lists prefixes in parallel.
func (s *Source) list(ctx context.Context) error {
	began, f := time.Now(), &s.facts
	shards := map[string]bool{}
	for _, k := range s.where.ShardKeys() {
		shards[k] = true
	}
	f.Whole = true
	tars := 0
	for o, err := range s.store.List(ctx, s.where.Prefix) {
		if err != nil {
			return err
		}
		if strings.HasSuffix(o.Key, "/") || len(shards) > 0 && !shards[o.Key] { // a folder, or not selected
			continue
		}
		f.Objects++
		f.Bytes += o.Size
		f.Sizes = append(f.Sizes, o.Size)
		if strings.HasSuffix(o.Key, ".tar") {
			tars++
		}
		// Reservoir sampling: each listed object has the same chance to be read.
		if len(s.objects) < keepsMost {
			s.objects = append(s.objects, o)
		} else if i := rand.IntN(f.Objects); i < keepsMost {
			s.objects[i] = o
		}
		if f.Objects == listMost || time.Since(began) > 4*s.window {
			f.Whole = false
			break
		}
	}
	f.Took, f.Data = time.Since(began), s.Data(f.Objects)
	f.Shards = s.where.Shards != "" || tars > 0 && tars*2 >= f.Objects-tars
	return nil
}

// sample returns one of the objects that are not empty.
func (s *Source) sample() (objstore.Object, error) {
	first := rand.IntN(len(s.objects))
	for i := range s.objects {
		if o := s.objects[(first+i)%len(s.objects)]; o.Size > 0 {
			return o, nil
		}
	}
	return objstore.Object{}, findings.Skip("all objects are empty")
}
