package shard

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"hash/crc32"
	"path"
	"runtime"
	"sort"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sync/singleflight"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
)

// Coded members. A set may store some files in a shorter form, from which each comes back exactly. Its shards are shown
// (Set.Objects) as if all members were stored as they are, with offsets to match; a [Restorer] reads from such an
// object what is stored, and fills in the files. So everything above a store sees the files only, except for a cache
// that keeps them coded, too: it gets whole ones as they are ([Restorer.ReadCoded]).

// Coded says how a pack stores the files: its source has what is stored.
type Coded struct {
	Tables []byte
	Length func(file int) int64  // in the tar; that of the file, or less
	Sum    func(file int) uint32 // CRC32C of the file, where Length is less
}

const (
	codingJPEG = "jpeg"
	// codedTag begins the ETag of an object of Set.Objects with coded members; the size and the ETag of the tar follow.
	codedTag = "shoal-recoded:"
)

// Decoder restores coded files. Safe for concurrent use.
type Decoder interface {
	// Learn makes tables known to Decode, and returns what encodes by them.
	Learn(tables []byte) (encode func(dst, file []byte) ([]byte, bool), err error)
	Decode(dst, coded []byte) ([]byte, error)
}

// Objects returns the shards for a [Restorer].
func (s *Set) Objects() []objstore.Object {
	if s.summary == nil || s.summary.Coding == "" {
		return s.Shards
	}
	out := make([]objstore.Object, len(s.Shards))
	for i, o := range s.Shards {
		if o.ETag != "" {
			o.ETag = tagged(codedTag, o)
		}
		o.Size += s.Bytes // at least what the files would need
		out[i] = o
	}
	return out
}

// tagged returns the ETag of an object that is shown otherwise than it is stored.
func tagged(tag string, o objstore.Object) string {
	return tag + strconv.FormatInt(o.Size, 10) + ":" + o.ETag
}

// untagged returns what is stored. It fails without the tag.
func untagged(tag string, o objstore.Object) (objstore.Object, error) {
	text, ok := strings.CutPrefix(o.ETag, tag)
	size, etag, _ := strings.Cut(text, ":")
	n, err := strconv.ParseInt(size, 10, 64)
	if !ok {
		err = corrupt("the ETag %.80q does not begin with %s", o.ETag, tag)
	}
	o.Size, o.ETag = n, etag
	return o, err
}

// Restorer restores the coded members of [Set.Objects], and decodes what [Rows] shows decoded. All else it passes on.
type Restorer struct {
	objstore.Reader
	parquets
	decoder Decoder
	asIs    func() bool
	turn    chan struct{}
	loads   singleflight.Group // who waits for one gets its error, too: the store may be away for minutes

	mu      sync.Mutex
	shards  map[string]*codedShard // by ETag of the object, and key
	learned map[string]bool        // prefixes of sets
}

// NewRestorer returns a Restorer. decoder may be nil: then such sets cannot be read. asIs tells whether ReadCoded may
// return coded members as they are; nil: it may not. chunk is the layout's Chunk.
func NewRestorer(r objstore.Reader, decoder Decoder, asIs func() bool, chunk int64) *Restorer {
	return &Restorer{Reader: r, decoder: decoder, asIs: asIs, turn: make(chan struct{}, runtime.GOMAXPROCS(0)),
		parquets: parquets{decoding: make(chan struct{}, chunksAtOnce(chunk)), largest: chunk,
			room: chunksKept(max(chunk, 1))},
		shards: map[string]*codedShard{}, learned: map[string]bool{}}
}

// codedShard has the coded members of a shard, by offset.
type codedShard struct {
	tar   objstore.Object
	coded []codedMember
}

type codedMember struct {
	at, off      int64 // in the object, in the tar
	size, stored int32
	sum          uint32
}

const codedBytes = 32 // of a codedMember

// CodedBytes returns how much memory a [Restorer] takes for a layout, which may be nil. It knows all coded members in
// the end: a random order comes back to each shard soon.
func CodedBytes(l *catalog.Layout) (n int64) {
	if l == nil {
		return 0
	}
	if chunk := l.Chunk; chunk > 0 {
		return int64(chunksAtOnce(chunk))*3*chunk + chunksKept(chunk) // stored, a page of it, and decoded; kept
	}
	for i := range l.Shards() {
		if strings.HasPrefix(l.Shard(i).ETag, codedTag) {
			from, to := l.ShardRanks(i)
			n += int64(to-from) * codedBytes
		}
	}
	return n
}

// before returns how many coded members end at or before an offset in the object.
func (t *codedShard) before(at int64) int {
	return sort.Search(len(t.coded), func(i int) bool { return t.coded[i].at+int64(t.coded[i].size) > at })
}

// stored returns where an offset in the object lies in the tar. Inside a coded member, it is that of the member's
// begin, or end; exact is false.
func (t *codedShard) stored(at int64, end bool) (off int64, exact bool) {
	i := t.before(at)
	if i < len(t.coded) && t.coded[i].at < at {
		c := t.coded[i]
		if end {
			return c.off + int64(c.stored), false
		}
		return c.off, false
	}
	if i == 0 {
		return at, true
	}
	c := t.coded[i-1]
	return at - (c.at + int64(c.size)) + c.off + int64(c.stored), true
}

// ReadAt implements objstore.Reader.
func (r *Restorer) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	return objstore.ReadAt(ctx, r, o, p, off)
}

// ReadSpans implements [objstore.SpanReader]: one request reads what is stored to the spans' ends, to restore it there.
func (r *Restorer) ReadSpans(ctx context.Context, o objstore.Object, spans []objstore.Span) error {
	return r.ReadCoded(ctx, o, spans, make([]*int, len(spans)))
}

// ReadCoded implements [objstore.CodedReader]. A member that comes coded has been restored, too, to check it: a set has
// checksums of its files only.
func (r *Restorer) ReadCoded(ctx context.Context, o objstore.Object, spans []objstore.Span, coded []*int) error {
	switch {
	case strings.HasPrefix(o.ETag, parquetTag):
		return r.readChunks(ctx, o, spans)
	case !strings.HasPrefix(o.ETag, codedTag):
		return objstore.ReadSpans(ctx, r.Reader, o, spans)
	}
	if err := objstore.CheckSpans(o, spans); err != nil {
		return err
	}
	t, err := known(ctx, r, r.shards, o.ETag+" "+o.Key, func(ctx context.Context) (*codedShard, error) {
		return r.load(ctx, o)
	})
	if err != nil {
		return err
	}
	below := make([]objstore.Span, len(spans))
	for i, s := range spans {
		lo, first := t.stored(s.Off, false)
		hi, last := t.stored(s.Off+int64(len(s.P)), true)
		switch {
		case first && last:
			below[i] = objstore.Span{Off: lo, P: s.P[int64(len(s.P))-(hi-lo):]}
		case len(spans) > 1: // two may need the same member
			for i, s := range spans {
				if err := r.ReadCoded(ctx, o, []objstore.Span{s}, coded[i:i+1]); err != nil {
					return err
				}
			}
			return nil
		default:
			below[i] = objstore.Span{Off: lo, P: make([]byte, hi-lo)}
		}
	}
	if err := objstore.ReadSpans(ctx, r.Reader, t.tar, below); err != nil {
		return err
	}
	asIs := r.asIs != nil && r.asIs()
	for i, s := range spans {
		var length *int
		if asIs {
			length = coded[i]
		}
		if err := r.fill(t, s, below[i], length); err != nil {
			return err
		}
	}
	return nil
}

// fill restores a span from what is stored, which may be the end of the span's own bytes: nothing is written over what
// is still to be read, since no member grows by being stored. If coded is not nil, and the span is one coded member,
// that stays as it is.
func (r *Restorer) fill(t *codedShard, s, from objstore.Span, coded *int) error {
	at, end := s.Off, s.Off+int64(len(s.P))
	plain := func(to int64) {
		if to > at {
			off, _ := t.stored(at, false)
			copy(s.P[at-s.Off:to-s.Off], from.P[off-from.Off:])
			at = to
		}
	}
	for i := t.before(at); i < len(t.coded) && t.coded[i].at < end; i++ {
		c := t.coded[i]
		plain(c.at)
		file, err := r.restore(c, from.P[c.off-from.Off:][:c.stored])
		var known *objstore.Error
		if errors.As(err, &known) {
			known.Key = t.tar.Key
			return known
		}
		if err != nil {
			return &objstore.Error{
				Op: "restore", Key: t.tar.Key, Kind: objstore.KindInvalid,
				Err:    fmt.Errorf("the recoded member at %d: %w", c.off, err),
				Remedy: "restore the shard from a copy, or pack the source again into another place",
			}
		}
		if coded != nil && s.Off == c.at && len(s.P) == len(file) {
			*coded = copy(s.P, from.P)
			return nil
		}
		n := copy(s.P[at-s.Off:], file[at-c.at:])
		at += int64(n)
	}
	plain(end)
	return nil
}

// restore returns the file of a member.
func (r *Restorer) restore(c codedMember, stored []byte) ([]byte, error) {
	r.turn <- struct{}{}
	defer func() { <-r.turn }()
	file, err := r.decoder.Decode(make([]byte, 0, c.size), stored)
	if err != nil {
		return nil, err
	}
	if len(file) != int(c.size) || crc32.Checksum(file, castagnoli) != c.sum {
		return nil, errors.New("what comes back is not the file")
	}
	return file, nil
}

// known returns what of has under a name, or loads it.
func known[T any](ctx context.Context, r *Restorer, of map[string]T, name string,
	load func(ctx context.Context) (T, error)) (T, error) {
	return cached(ctx, r, name, func() (v T, ok bool) {
		v, ok = of[name]
		return v, ok
	}, func(v T) { of[name] = v }, load)
}

// cached returns what find finds, or loads and keeps it, once for all who want it. Loading goes on if they leave, for
// as long as a store is tried. find and keep are called under the lock.
func cached[T any](ctx context.Context, r *Restorer, name string, find func() (T, bool), keep func(T),
	load func(ctx context.Context) (T, error)) (v T, err error) {
	look := func() (T, bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		return find()
	}
	if v, ok := look(); ok || ctx.Err() != nil { // nothing is loaded for a reader that has left
		return v, ctx.Err()
	}
	loading := r.loads.DoChan(name, func() (any, error) {
		if v, ok := look(); ok { // it came meanwhile
			return v, nil
		}
		v, err := load(context.WithoutCancel(ctx))
		if err == nil {
			r.mu.Lock()
			defer r.mu.Unlock()
			keep(v)
		}
		return v, err
	})
	select {
	case l := <-loading:
		v, _ = l.Val.(T)
		return v, l.Err
	case <-ctx.Done():
		return v, ctx.Err()
	}
}

// load reads the index of an object.
func (r *Restorer) load(ctx context.Context, o objstore.Object) (*codedShard, error) {
	tar, err := untagged(codedTag, o)
	if err == nil {
		_, err = known(ctx, r, r.learned, path.Dir(o.Key), func(ctx context.Context) (bool, error) {
			return true, r.learn(ctx, path.Dir(o.Key))
		})
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o.Key, err)
	}
	data, err := readObject(ctx, r.Reader, o.Key+indexSuffix, maxIndex)
	if err != nil {
		return nil, err
	}
	ix, err := parseIndex(data)
	if err == nil && (!ix.coded || ix.size != tar.Size) {
		err = corrupt("it belongs to another tar than %s", o.Key)
	}
	if err != nil {
		return nil, fmt.Errorf("index %s: %w (restore it, or remove the set and pack again)", o.Key+indexSuffix, err)
	}
	t := &codedShard{tar: tar, coded: make([]codedMember, 0, ix.len())}
	growth := int64(0)
	ix.members(func(_ int, m indexMember) bool {
		if m.stored < m.size {
			t.coded = append(t.coded, codedMember{m.off + growth, m.off, int32(m.size), int32(m.stored), m.crc})
			growth += m.size - m.stored
		}
		return true
	})
	return t, nil
}

// learn makes the tables of the set in a folder known.
func (r *Restorer) learn(ctx context.Context, folder string) error {
	if r.decoder == nil {
		return errors.New(
			"it has recoded JPEGs, which this binary cannot restore (use one that was built with cgo)")
	}
	key := strings.TrimPrefix(folder+"/"+SummaryName, "./")
	data, err := readObject(ctx, r.Reader, key, maxSummary)
	if err != nil {
		return err
	}
	sum, err := ParseSummary(data)
	var tables []byte
	if err == nil {
		tables, err = base64.StdEncoding.DecodeString(sum.Tables)
	}
	if err == nil {
		_, err = r.decoder.Learn(tables)
	}
	if err != nil {
		return fmt.Errorf("the tables in %s: %w (restore it, or pack the source again into another place)", key, err)
	}
	return nil
}
