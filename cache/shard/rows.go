package shard

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"iter"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Index finds the samples that lie inside larger objects. [Set] is the one of tars, [Rows] that of all else. What it
// finds are files like others from there on, so nothing above it knows of formats.
type Index interface {
	// Objects returns what the samples lie in, by the number in Member.Shard.
	Objects() []objstore.Object
	// Members yields the samples by object and then by offset. It ends after the first error.
	Members(ctx context.Context) iter.Seq2[Member, error]
	// Bad returns the objects that are left out, by number, and why. It is complete after Members: members of a bad
	// object that were yielded before it was found out do not count.
	Bad() map[int]error
}

// badShards is what [Index.Bad] returns, and how it comes about.
type badShards struct {
	skip bool // OpenOptions.SkipBad
	bad  map[int]error
}

func (b *badShards) Bad() map[int]error { return b.bad }

// orSkip returns nil if shard i, which failed with err, is left out, and otherwise err for the caller.
func (b *badShards) orSkip(i int, err error) error {
	switch {
	case err == nil || !isBad(err):
		return err
	case !b.skip:
		return fmt.Errorf("%w; mount and serve leave the shard out with --bad-shards skip", err)
	}
	b.bad[i] = err
	return nil
}

// all returns an error if all n shards are bad.
func (b *badShards) all(n int) error {
	if len(b.bad) < n {
		return nil
	}
	return fmt.Errorf("all %d shards are bad, the first one since: %w", n, b.bad[0])
}

const (
	rowsThrough = 4 << 20 // bytes of a GET
	rowsObjects = 4       // objects that are read at once
	rowsBuffer  = 4096    // members that wait for their turn, for an object
)

// Rows finds the samples in the objects under a prefix: rows of .csv and .tsv, documents of .bin beside an .idx,
// samples of MDS, rows of .parquet.
type Rows struct {
	badShards
	r      objstore.Reader
	prefix string
	o      OpenOptions

	objects []objstore.Object
	finders []finder          // of each object
	stems   map[string]string // and the object's key
}

// finder finds an object's samples: their Path, Size and Off. It returns what all of a dataset must have in common.
type finder func(ctx context.Context, o objstore.Object, emit func(Member) bool) (kind string, err error)

// stem returns what the names of an object's samples begin with. It fails if those of another one do, too.
func (s *Rows) stem(key, suffix string) (stem string, err error) {
	dir, base := path.Split(strings.TrimPrefix(key, s.prefix))
	if strings.EqualFold(path.Ext(base), suffix) {
		base = base[:len(base)-len(suffix)]
	}
	stem = dir + strings.ReplaceAll(base, ".", "_")
	if other, ok := s.stems[stem]; ok {
		err = fmt.Errorf("%s: its samples have the names of those in %s: rename one of the two", key, other)
	}
	s.stems[stem] = key
	return stem, err
}

// add adds an object, which is bad if err is not nil.
func (s *Rows) add(o objstore.Object, f finder, err error) error {
	s.objects, s.finders = append(s.objects, o), append(s.finders, f)
	return s.orSkip(len(s.objects)-1, err)
}

// Objects implements [Index]. They are in the order of their keys, those of an MDS index in its order.
func (s *Rows) Objects() []objstore.Object { return s.objects }

// OpenRows lists the objects, and reads the indexes of MDS. It ignores other objects.
func OpenRows(ctx context.Context, r objstore.Reader, src objstore.Source, o OpenOptions) (*Rows, error) {
	s := &Rows{r: r, prefix: src.Prefix, o: o, badShards: badShards{o.SkipBad, map[int]error{}},
		stems: map[string]string{}}
	there := map[string]objstore.Object{} // by key: .bin and .mds
	var tables, indexes, mds, parquets []objstore.Object
	shards := false
	for o, err := range r.List(ctx, src.Prefix, "") {
		if err != nil {
			return nil, err
		}
		switch ext := strings.ToLower(path.Ext(o.Key)); {
		case ext == ".csv" || ext == ".tsv":
			tables = append(tables, o)
		case ext == ".idx":
			indexes = append(indexes, o)
		case path.Base(o.Key) == mdsIndexName:
			mds = append(mds, o)
		case ext == parquetSuffix:
			o.ETag, o.Size = tagged(parquetTag, o), 1<<62 // larger than any that has as many chunks as can be
			parquets = append(parquets, o)
		case ext == ".bin" || strings.Contains(path.Base(o.Key), mdsSuffix):
			shards = shards || ext != ".bin"
			there[o.Key] = o
		}
	}
	if !shards {
		mds = nil // another index.json
	}
	named := slices.Concat(tables, indexes, mds, parquets)
	var open func(o objstore.Object) error
	switch len(named) {
	case 0:
		return nil, fmt.Errorf("%s contains no .csv and .tsv, no .idx beside a .bin, no %s beside .mds, and no %s "+
			"(give --samples as for files to read it file by file)", src, mdsIndexName, parquetSuffix)
	case len(tables):
		open = func(o objstore.Object) error { return s.add(o, s.rows, nil) }
	case len(indexes):
		open = func(o objstore.Object) error { return s.openDocuments(o, there) }
	case len(mds):
		open = func(o objstore.Object) error { return s.openMDS(ctx, o, there) }
	case len(parquets):
		open = s.addParquet
	default:
		return nil, fmt.Errorf("%s contains %s and %s: name a prefix with one kind of samples",
			src, named[0].Key, named[len(named)-1].Key)
	}
	for _, o := range named {
		if err := open(o); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// found is a sample, or why there are no more.
type found struct {
	m   Member
	err error
}

// Members implements [Index]. Tables are read once, in parallel ranges; of the others what their indexes do not say.
func (s *Rows) Members(ctx context.Context) iter.Seq2[Member, error] {
	return func(yield func(Member, error) bool) {
		kinds := make([]string, len(s.objects))
		missing := maps.Clone(s.bad) // for the goroutines below
		first, some := -1, false     // that is not bad; and whether there was a sample
		done := inTurn(ctx, len(s.objects), rowsObjects, rowsBuffer,
			func(ctx context.Context, i int, put func(found) bool) {
				o, err := s.objects[i], missing[i]
				etag := o.ETag
				if stored, err := untagged(parquetTag, o); err == nil {
					etag = stored.ETag
				}
				if err == nil {
					if kinds[i], err = s.finders[i](ctx, o, func(m Member) bool {
						m.Shard, m.ModTime, m.ETag = i, o.ModTime, etag+"+"+strconv.FormatInt(m.Off, 10)
						return put(found{m: m})
					}); err != nil {
						err = fmt.Errorf("%s: %w", o.Key, err)
					}
				}
				if err != nil {
					put(found{err: err})
				}
			}, func(i int, from <-chan found) (more bool) {
				var err error
				for f := range from {
					if err = f.err; err == nil && !yield(f.m, nil) {
						return false
					}
					some = some || err == nil
				}
				if ctx.Err() != nil {
					yield(Member{}, context.Cause(ctx))
					return false
				}
				switch {
				case err == nil && first < 0:
					first = i
				case err == nil && kinds[i] != kinds[first]:
					err = fmt.Errorf("%s has %.300s, %s has %.300s: all objects of a dataset must have the same",
						s.objects[i].Key, kinds[i], s.objects[first].Key, kinds[first])
				}
				if err = s.orSkip(i, err); err != nil {
					yield(Member{}, err)
				}
				return err == nil
			})
		err := s.all(len(s.objects))
		if err == nil && !some {
			err = fmt.Errorf("there is no sample in %s, nor in any other object: all rows are null, or there are none",
				s.objects[0].Key)
		}
		if done && err != nil {
			yield(Member{}, err)
		}
	}
}

// inTurn has find look through count objects, n at once, and take read what it puts, one object after the other: up to
// room wait for their turn. It ends with the last object, or, and returns false, when take wants no more; then put
// returns false.
func inTurn[T any](ctx context.Context, count, n, room int,
	find func(ctx context.Context, i int, put func(T) bool), take func(i int, from <-chan T) (more bool)) bool {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	queues := make([]chan T, min(n, count))
	begin := func(i int) {
		queue := make(chan T, room)
		queues[i%n] = queue
		wg.Go(func() {
			defer close(queue)
			find(ctx, i, func(v T) bool {
				select {
				case queue <- v:
					return true
				case <-ctx.Done():
					return false
				}
			})
		})
	}
	for i := range queues {
		begin(i)
	}
	for i := range count {
		if !take(i, queues[i%n]) {
			return false
		}
		if i+n < count {
			begin(i + n)
		}
	}
	return true
}

// from returns a reader of an object from an offset on, which reads ahead. The caller closes the second.
func (s *Rows) from(ctx context.Context, o objstore.Object, off int64) (*bufio.Reader, *ahead) {
	a := newAhead(ctx, s.r, o)
	a.pos, a.through = off, readWindow
	return bufio.NewReaderSize(a, 64<<10), a
}

// number reads an unsigned little-endian integer of n bytes, 4 or 8.
func number(r io.Reader, n int) (uint64, error) {
	var b [8]byte
	_, err := io.ReadFull(r, b[:n])
	return binary.LittleEndian.Uint64(b[:]), err
}
