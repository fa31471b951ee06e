package doctor

import (
	"context"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/cache/objstore/stores"
)

// open parses the name and the configuration, and asks the store for the bucket.
func (p *patient) open(ctx context.Context) (err error) {
	o := p.Store
	o.Store.LinksOutside = true // a mount checks links that lead out of a folder
	if p.store, p.where, err = stores.Open(ctx, p.Source, o); err != nil {
		return err
	}
	p.facts.Source, p.facts.Cache = p.where.String(), p.CacheSize
	if _, remote := p.store.(*s3.Store); remote {
		p.facts.Endpoint = p.where.Endpoint
	}
	return p.store.Check(ctx)
}

const (
	listMost  = 200_000
	keepsMost = 20_000 // objects to read from
)

// list lists for a limited time. Its rate is that of one listing; a mount lists prefixes in parallel.
func (p *patient) list(ctx context.Context) error {
	began, f, tars := time.Now(), &p.facts, 0
	shards := map[string]bool{}
	for _, key := range p.where.ShardKeys() {
		shards[key] = true
	}
	f.Whole = true
	for o, err := range p.store.List(ctx, p.where.Prefix) {
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
		if len(p.objects) < keepsMost {
			p.objects = append(p.objects, o)
		} else if i := rand.IntN(f.Objects); i < keepsMost {
			p.objects[i] = o
		}
		if f.Objects == listMost || time.Since(began) > 4*p.window {
			f.Whole = false
			break
		}
	}
	f.Took, f.Data = time.Since(began), p.Data(f.Objects)
	f.Shards = p.where.Shards != "" || tars > 0 && tars*2 >= f.Objects-tars
	return nil
}
