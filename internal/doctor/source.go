package doctor

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/internal/findings"
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
	for o, err := range p.store.List(ctx, p.where.Prefix, "") {
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

// latency measures small GETs, four at a time over open connections.
func (p *patient) latency(ctx context.Context) error {
	l := &p.facts.Latency
	_, *l = p.climb(ctx, 4, 4<<10, 3*p.window)
	slices.Sort(l.Took)
	// The quartiles of a normal distribution are 1.349 sigma apart.
	l.Sigma = math.Log(float64(max(l.At(0.75), 1))/float64(max(l.At(0.25), 1))) / 1.349
	return nil
}

// bandwidth doubles the connections until it no longer pays.
func (p *patient) bandwidth(ctx context.Context) error {
	most := 512
	if p.Quick {
		most = 64
	}
	climb := func(connections int, size int64) findings.Rung {
		rung, _ := p.climb(ctx, connections, size, p.window)
		return rung
	}
	p.facts.Ladder, p.facts.Rising = ascend(most, p.window, climb)
	return nil
}

const (
	pays         = 1.1 // the gain that justifies doubling the connections
	smallestGet  = 64 << 10
	largestGet   = 4 << 20   // cache.ExtentSize
	largestTotal = 512 << 20 // bytes of memory for all GETs of a rung
)

// ascend doubles the connections, and chooses the size of a GET, until two rungs in a row did not pay. rising says that
// only most stopped it.
func ascend(most int, window time.Duration, climb func(connections int, size int64) findings.Rung) (
	ladder []findings.Rung, rising bool) {
	size, idle, best := int64(largestGet), 0, 0.0
	for c := 1; c <= most && idle < 2; c *= 2 {
		size = max(min(size, largestTotal/int64(2*c)), smallestGet)
		g := climb(c, size)
		if g.Gets == 0 {
			return ladder, false
		}
		// For large objects, a size at which several GETs of each connection fit a rung.
		size = min(size, int64(g.Bytes/float64(c)*window.Seconds()/4))
		ladder = append(ladder, g)
		if idle++; g.Bytes >= best*pays {
			idle = 0
		}
		best = max(best, g.Bytes)
	}
	return ladder, idle == 0
}

// climb reads with this many connections for one window, after each has answered once. It reads from within objects: a
// store that ignores Range is found out.
func (p *patient) climb(ctx context.Context, connections int, size int64, window time.Duration) (findings.Rung,
	findings.Latency) {
	ctx, cancel := context.WithTimeout(ctx, 4*window+2*time.Second)
	defer cancel()
	var warm, wg sync.WaitGroup
	warm.Add(connections)
	var mu sync.Mutex
	var l findings.Latency
	var got int64
	began := sync.OnceValue(time.Now) // when all were warm
	for range connections {
		wg.Go(func() {
			into := make([]byte, size)
			for n := 0; n == 0 || ctx.Err() == nil && time.Since(began()) < window; n++ {
				t := time.Now()
				read, err := p.get(ctx, into)
				mu.Lock()
				p.facts.Requests++
				switch {
				case err == nil:
					p.facts.Fetched += read
					if n > 0 {
						got, l.Took = got+read, append(l.Took, time.Since(t))
					}
				case ctx.Err() == nil:
					l.Failed, l.Err = l.Failed+1, err
				}
				mu.Unlock()
				if n == 0 {
					warm.Done()
					warm.Wait()
				}
			}
		})
	}
	wg.Wait()
	took := max(time.Since(began()).Seconds(), 1e-6)
	return findings.Rung{Connections: connections, Bytes: float64(got) / took, Gets: float64(len(l.Took)) / took}, l
}

func (p *patient) get(ctx context.Context, into []byte) (n int64, err error) {
	first := rand.IntN(len(p.objects))
	for i := range p.objects {
		if o := p.objects[(first+i)%len(p.objects)]; o.Size > 0 {
			n = min(o.Size, int64(len(into)))
			return n, p.store.ReadAt(ctx, o, into[:n], rand.Int64N(o.Size-n+1))
		}
	}
	return 0, findings.Skip("all objects are empty")
}
