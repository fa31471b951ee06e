package shard

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/killpoint"
	"github.com/shoalfs/shoal/internal/trace"
)

// PackOptions configure Pack. Zero values mean the defaults.
type PackOptions struct {
	// ShardSize is the target size of a shard. A larger sample gets its own shard. Default 64 MiB.
	ShardSize int64
	// Seed names the order. It is written into the set; Permute is expected to depend on it.
	Seed uint64
	// Permute returns the order of n samples, always the same. Required: shards by folder make batches of one class.
	Permute func(n int) Order
	// Connections is the number of files that are read at once. Default 64.
	Connections int
	// Memory bounds the buffers. Default 256 MiB, minimum 20 MiB. A file or sample of over 70 GB needs more, since an
	// upload has at most 10,000 parts; Pack's error says how much.
	Memory int64
	// Progress is called with the progress of the pack, about ten times a second, never concurrently.
	Progress func(Progress)
	Logger   *slog.Logger
	// Source is written into the set for people to read.
	Source string
	// Recoded says how the files were changed before, if they were: it is written into the set, too.
	Recoded string

	// Coded says which files are stored in another form; nil: none.
	Coded *Coded

	partSize int64 // for tests
}

// Progress is the progress of a pack.
type Progress struct {
	Files, TotalFiles   int
	Bytes, TotalBytes   int64 // of the files
	Shards, TotalShards int
	Resumed             int // of Shards: those from an earlier run
}

// Result describes a finished pack.
type Result struct {
	Files   int
	Bytes   int64 // sum of the files' sizes
	Shards  int
	Size    int64 // sum of the shards' sizes
	Resumed int   // shards from an earlier run
	// Complete says that the whole set existed already.
	Complete bool
	Escaped  Escaped
}

const (
	defaultShardSize = 64 << 20
	defaultMemory    = 256 << 20
	defaultConns     = 64

	// partSize: the minimum of S3 is 5 MiB. 8 MiB hold some 130 files of 63 KB, so the default memory has 32 parts in
	// flight: enough for 512 small GETs at once while other parts are uploaded and read back.
	partSize    = 8 << 20
	minPartSize = 5 << 20
	// maxParts is S3's limit of 10,000 with a margin.
	maxParts = 9000

	// Concurrent uploads, and shards being read back. Both move megabytes per request, so a few are enough: 4 x 8 MiB
	// in 100 ms are 335 MB/s.
	uploaders = 6
	verifiers = 4

	progressEvery = 100 * time.Millisecond
	abortTimeout  = 10 * time.Second
)

// Pack writes the files of m, which it reads from src, as a shard set under prefix (empty or ending in "/") of dst.
//
// The layout of every shard is known before the first byte is read, so files are read directly into the parts to
// upload. Each shard is read back and compared before its index is written.
//
// Pack can be ended at any moment, even by kill -9, and called again: shards with an index stay, all others are
// rebuilt. Only one call at a time may write to a prefix. If the same set is complete already, that is no error.
// Unfinished uploads of a killed run are aborted if the store can list them.
func Pack(ctx context.Context, m *catalog.Manifest, src objstore.ReaderAt, dst objstore.Layer, prefix string,
	o PackOptions) (res Result, err error) {
	_, span := trace.Start(ctx, "dataset.pack") // its reads would make a span for each file
	defer func() {
		if err != nil {
			res, err = Result{}, fmt.Errorf("pack: %w", err)
		}
		span.Str("shoal.destination", prefix)
		span.Int("shoal.files", int64(res.Files))
		span.Int("shoal.bytes", res.Bytes)
		span.End(err)
	}()
	if err := o.setDefaults(); err != nil {
		return res, err
	}
	if prefix != "" && !strings.HasSuffix(prefix, "/") {
		return res, fmt.Errorf("prefix %q must be empty or end in a slash", prefix)
	}
	p, err := newPlan(m, o.Coded, o.ShardSize, o.Seed, o.Permute)
	if err != nil {
		return res, err
	}
	k := &packer{plan: p, src: src, dst: dst, prefix: prefix, o: o}
	if len(p.sizes) > maxShards {
		return res, fmt.Errorf("%d shards, more than %d (use a larger --shard-size)", len(p.sizes), maxShards)
	}
	for i, size := range p.sizes {
		if need := 4 * k.partLen(size); need > o.Memory && size > o.partSize {
			return res, fmt.Errorf("%s has %d bytes, and its upload needs %d bytes of memory (set --memory to that)",
				shardName(i), size, need)
		}
	}
	k.params = params{
		Format: markerFormat, Version: summaryVersion, Dataset: m.Version(), Seed: o.Seed, ShardSize: o.ShardSize,
		Plan: hex.EncodeToString(p.id[:]), Source: o.Source, Recoded: o.Recoded, Files: m.Len(), Bytes: m.Bytes(),
	}
	if o.Coded != nil {
		k.params.Version, k.params.Coding, k.params.Tables = codedSummary, codingJPEG,
			base64.StdEncoding.EncodeToString(o.Coded.Tables)
	}
	res = Result{Files: m.Len(), Bytes: m.Bytes(), Shards: len(p.sizes), Escaped: p.escaped}
	for _, n := range p.sizes {
		res.Size += n
	}
	res.Complete, err = k.begin(ctx)
	if err == nil && !res.Complete {
		err = k.run(ctx)
	}
	if err == nil && !res.Complete {
		err = k.finish(ctx)
	}
	res.Resumed = k.now.Resumed
	if err == nil {
		k.report(true, func(p *Progress) {})
	}
	return res, err
}

func (o *PackOptions) setDefaults() error {
	if o.Permute == nil {
		return errors.New("no order was given")
	}
	o.ShardSize = cmp.Or(o.ShardSize, defaultShardSize)
	if o.ShardSize < 0 {
		return fmt.Errorf("shard size %d (use 64MiB or so)", o.ShardSize)
	}
	o.Connections = cmp.Or(max(o.Connections, 0), defaultConns)
	o.Memory = cmp.Or(o.Memory, defaultMemory)
	if o.partSize == 0 {
		if o.Memory < 4*minPartSize {
			return fmt.Errorf("%d bytes of memory are too few (set --memory to %d or more)", o.Memory, 4*minPartSize)
		}
		// At least four parts fit.
		o.partSize = min(partSize, o.Memory/4)
	}
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	return nil
}

// packer is one call of Pack.
type packer struct {
	*plan
	src    objstore.ReaderAt
	dst    objstore.Layer
	prefix string
	o      PackOptions
	params params
	found  []foundShard // by shard, what the prefix holds
	done   []SummaryMember

	memory *semaphore.Weighted
	bufs   sync.Pool // of *[]byte, of o.partSize

	mu   sync.Mutex
	now  Progress
	told time.Time

	uploads sync.Map // of objstore.Upload: the unfinished ones

	open                           *semaphore.Weighted // one for each job
	fetching, uploading, verifying *semaphore.Weighted // at once
}

type foundShard struct {
	tar, index objstore.Object // Key "": not there
}

// report changes the progress and reports it.
func (k *packer) report(always bool, change func(p *Progress)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change(&k.now)
	if k.o.Progress == nil {
		return
	}
	if t := time.Now(); always || t.Sub(k.told) >= progressEvery {
		k.told = t
		k.o.Progress(k.now)
	}
}

// partLen returns the length of the parts of a shard.
func (k *packer) partLen(size int64) int64 {
	const mib = 1 << 20
	n := (size + maxParts - 1) / maxParts
	if n <= k.o.partSize {
		return k.o.partSize
	}
	return (n + mib - 1) &^ (mib - 1)
}

// readObject reads a small object as a whole, or returns nil if there is none.
func readObject(ctx context.Context, r objstore.Reader, key string, limit int64) ([]byte, error) {
	o, err := r.Stat(ctx, key)
	switch {
	case err == nil:
		return readWhole(ctx, r, o, limit)
	case objstore.KindOf(err) == objstore.KindNotFound:
		return nil, nil
	}
	return nil, err
}

func readWhole(ctx context.Context, r objstore.Reader, o objstore.Object, limit int64) ([]byte, error) {
	if o.Size > limit {
		return nil, fmt.Errorf("%s: %d bytes: %w", o.Key, o.Size, errTooLong)
	}
	data := make([]byte, o.Size)
	return data, r.ReadAt(ctx, o, data, 0)
}

// begin checks the prefix and marks it as ours. It returns true if the set is complete.
func (k *packer) begin(ctx context.Context) (complete bool, err error) {
	data, err := readObject(ctx, k.dst, k.prefix+SummaryName, maxSummary)
	if err != nil {
		return false, err
	}
	if data != nil {
		return true, k.already(ctx, data)
	}
	data, err = readObject(ctx, k.dst, k.prefix+MarkerName, maxSummary)
	if err != nil {
		return false, err
	}
	marked := data != nil
	if marked {
		err = k.sameMarker(data)
	}
	if err == nil {
		err = k.find(ctx, marked)
	}
	if err == nil && !marked {
		err = k.mark(ctx)
	}
	if err != nil {
		return false, err
	}
	n, err := objstore.AbortUploads(ctx, k.dst, k.prefix+"shard-")
	switch objstore.KindOf(err) {
	case objstore.KindInvalid, objstore.KindDenied:
		k.o.Logger.Warn("cannot tell whether an earlier run left unfinished uploads", "cause", err,
			"remedy", "their parts may cost storage: have a lifecycle rule of the bucket abort them")
		err = nil
	}
	if err != nil {
		return false, fmt.Errorf("end the uploads of an earlier run: %w", err)
	}
	if n > 0 {
		k.o.Logger.Info("unfinished uploads of an earlier run were aborted", "uploads", n)
	}
	killpoint.Pass("shard.pack.aborted")
	return false, k.resume(ctx)
}

// mark says which set the prefix is for.
func (k *packer) mark(ctx context.Context) error {
	data, err := encodeJSON(k.params)
	if err != nil {
		return err
	}
	killpoint.Pass("shard.pack.begin")
	if _, err = k.dst.PutNew(ctx, k.prefix+MarkerName, data); objstore.KindOf(err) == objstore.KindExists {
		// A retried request that had succeeded, or another process that starts the same pack.
		if data, err = readObject(ctx, k.dst, k.prefix+MarkerName, maxSummary); err == nil {
			err = k.sameMarker(data)
		}
	}
	if err == nil {
		killpoint.Pass("shard.pack.marker")
	}
	return err
}

// already checks the manifest of a complete set.
func (k *packer) already(ctx context.Context, data []byte) error {
	s, err := ParseSummary(data)
	if err != nil {
		return fmt.Errorf("%s%s: %w (remove the set, or pack into another prefix)", k.prefix, SummaryName, err)
	}
	if d := difference(s.params, k.params); d != "" {
		return fmt.Errorf("%s%s: there is another complete set already: %s (pack into another prefix, or "+
			"remove that set first)", k.prefix, SummaryName, d)
	}
	k.report(true, func(p *Progress) {
		n := len(s.Shards)
		*p = Progress{s.Files, s.Files, s.Bytes, s.Bytes, n, n, n}
	})
	// An earlier run may have been killed between its last two steps.
	return k.dst.Delete(ctx, k.prefix+MarkerName, "")
}

// sameMarker returns an error unless an earlier run packed the same.
func (k *packer) sameMarker(data []byte) error {
	old, err := parseMarker(data)
	if err != nil {
		return fmt.Errorf("%s%s: %w (remove everything under the prefix, or pack into another one)",
			k.prefix, MarkerName, err)
	}
	if d := difference(old, k.params); d != "" {
		return fmt.Errorf("%s%s: an unfinished pack has other parameters: %s (use those, or remove everything "+
			"under the prefix, or pack into another one)", k.prefix, MarkerName, d)
	}
	return nil
}

// difference describes how an existing set differs from the wanted one; "" if it does not.
func difference(there, wanted params) string {
	var d []string
	add := func(what string, a, b any) {
		if a != b {
			d = append(d, fmt.Sprintf("it has %s %v, this one %v", what, a, b))
		}
	}
	add("dataset version", there.Dataset, wanted.Dataset)
	add("seed", there.Seed, wanted.Seed)
	add("shard size", there.ShardSize, wanted.ShardSize)
	if len(d) == 0 {
		add("plan", there.Plan, wanted.Plan)
	}
	return strings.Join(d, "; ")
}

// find lists the shards under the prefix.
func (k *packer) find(ctx context.Context, marked bool) error {
	k.found = make([]foundShard, len(k.sizes))
	for o, err := range k.dst.List(ctx, k.prefix+"shard-", "") {
		if err != nil {
			return err
		}
		name := o.Key[len(k.prefix):]
		base, isIndex := strings.CutSuffix(name, indexSuffix)
		i := shardNumber(base)
		if i < 0 {
			continue
		}
		if !marked {
			return fmt.Errorf("%s exists already, and no %s says which set it belongs to (pack into another "+
				"prefix, or remove it)", o.Key, MarkerName)
		}
		switch {
		case i >= len(k.found):
			return fmt.Errorf("%s exists already, but this set has %d shards (pack into another prefix, or remove it)",
				o.Key, len(k.found))
		case isIndex:
			k.found[i].index = o
		default:
			k.found[i].tar = o
		}
	}
	return nil
}

// shardNumber returns the number of the shard with that name, -1 if there is none.
func shardNumber(name string) int {
	var i int
	if n, err := fmt.Sscanf(name, "shard-%d.tar", &i); n != 1 || err != nil || i < 0 || shardName(i) != name {
		return -1
	}
	return i
}

// resume takes over complete shards.
func (k *packer) resume(ctx context.Context) error {
	k.done = make([]SummaryMember, len(k.sizes))
	k.now = Progress{TotalFiles: k.m.Len(), TotalBytes: k.m.Bytes(), TotalShards: len(k.sizes)}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(k.o.Connections)
	for i, f := range k.found {
		if f.tar.Key == "" || f.index.Key == "" || f.tar.Size != k.sizes[i] {
			continue
		}
		g.Go(func() error {
			data, err := readWhole(gctx, k.dst, f.index, maxIndex)
			if err != nil && !errors.Is(err, errTooLong) {
				return err
			}
			ix, err := parseIndex(data)
			if err != nil || ix.dataset != k.m.VersionHash() || ix.plan != k.id || ix.shard != i ||
				ix.size != f.tar.Size || ix.etag != f.tar.ETag {
				k.o.Logger.Warn("shard is packed again: its index does not match", "shard", f.tar.Key, "err", err)
				return nil
			}
			k.done[i] = SummaryMember{Name: shardName(i), Size: ix.size, Members: ix.len(), ETag: ix.etag}
			k.report(false, func(p *Progress) {
				p.Files += ix.len()
				p.Bytes += ix.bytes
				p.Shards++
				p.Resumed++
			})
			return nil
		})
	}
	return g.Wait()
}

// job is a shard being built.
type job struct {
	shard   int
	key     string
	entries []entry
	size    int64
	partLen int64
	left    atomic.Int64 // parts that are not uploaded yet
	sums    [][]*uint32  // of each part, CRC32C of its pieces in their order

	begin  sync.Once
	upload objstore.Upload
	err    error // of begin
}

// run builds all missing shards.
//
// One goroutine lays out parts and begins to fetch the pieces between their headers. A part that has all of them is
// uploaded, and with the last part of a shard the shard is completed. The first goroutine takes memory, and it is given
// back without waiting for later stages, so it always becomes free.
func (k *packer) run(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	k.memory = semaphore.NewWeighted(max(k.o.Memory, 4*k.o.partSize))
	k.fetching = semaphore.NewWeighted(int64(k.o.Connections))
	k.uploading = semaphore.NewWeighted(uploaders)
	k.verifying = semaphore.NewWeighted(verifiers)
	// Shards in flight: as many as fit in memory, and some whose last part is uploaded already. A shard's table takes
	// 56 bytes per member.
	k.open = semaphore.NewWeighted(k.o.Memory/max(1, min(k.o.ShardSize, k.o.Memory)) + 2*verifiers)
	g.Go(func() error { return k.feed(gctx, g) })
	err := g.Wait()
	if err != nil {
		k.abort(context.WithoutCancel(ctx))
	}
	return err
}

// abort ends the pending uploads, so that nothing is left that costs money. The next run ends those that it misses.
func (k *packer) abort(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, abortTimeout)
	defer cancel()
	for u := range k.uploads.Range {
		if err := u.(objstore.Upload).Abort(ctx); err != nil {
			k.o.Logger.Warn("an upload was not aborted; the next run aborts it", "err", err)
		}
	}
}

// feed lays out one shard after the other, part by part. g uploads the parts.
func (k *packer) feed(ctx context.Context, g *errgroup.Group) error {
	for i, size := range k.sizes {
		if k.done[i].Name != "" {
			continue
		}
		if err := k.open.Acquire(ctx, 1); err != nil {
			return err
		}
		j := &job{shard: i, key: k.prefix + shardName(i), entries: k.layout(i), size: size, partLen: k.partLen(size)}
		parts := int((size + j.partLen - 1) / j.partLen)
		j.left.Store(int64(parts))
		j.sums = make([][]*uint32, parts)
		for n := range parts {
			buf, err := k.take(ctx, j.partLen)
			if err != nil {
				return err
			}
			buf = buf[:min(j.partLen, size-int64(n)*j.partLen)]
			fetches := k.fill(ctx, j, n, buf)
			g.Go(func() error {
				if err := fetches.Wait(); err != nil {
					return err
				}
				return k.uploadPart(ctx, j, n, buf)
			})
		}
	}
	return nil
}

// fill writes the headers of part n, and begins to fetch the pieces between them.
func (k *packer) fill(ctx context.Context, j *job, n int, buf []byte) (fetches *errgroup.Group) {
	from := int64(n) * j.partLen
	fetches, ctx = errgroup.WithContext(ctx)
	err := k.visit(j.entries, from, from+int64(len(buf)), func(at int64, b []byte, n int64) error {
		dst := buf[at-from:][:n]
		clear(dst[copy(dst, b):])
		return nil
	}, func(at int64, e *entry, lo, hi int64) error {
		sum := new(uint32)
		j.sums[n] = append(j.sums[n], sum)
		if err := k.fetching.Acquire(ctx, 1); err != nil {
			return err
		}
		fetches.Go(func() error {
			defer k.fetching.Release(1)
			return k.fetch(ctx, e, lo, buf[at-from:][:hi-lo], sum)
		})
		return nil
	})
	if err != nil {
		fetches.Go(func() error { return err })
	}
	return fetches
}

// take reserves and returns a buffer of n bytes.
func (k *packer) take(ctx context.Context, n int64) ([]byte, error) {
	if err := k.memory.Acquire(ctx, n); err != nil {
		return nil, err
	}
	if n != k.o.partSize {
		return make([]byte, n), nil
	}
	if b, ok := k.bufs.Get().(*[]byte); ok {
		return *b, nil
	}
	return make([]byte, n), nil
}

func (k *packer) give(b []byte) {
	b = b[:cap(b)]
	if int64(len(b)) == k.o.partSize {
		k.bufs.Put(&b)
	}
	k.memory.Release(int64(len(b)))
}

// fetch reads a piece of a file, from off on.
func (k *packer) fetch(ctx context.Context, e *entry, off int64, dst []byte, sum *uint32) error {
	o := k.m.Object(int(e.file))
	err := k.src.ReadAt(ctx, o, dst, off)
	switch objstore.KindOf(err) {
	case objstore.KindChanged, objstore.KindNotFound:
		err = fmt.Errorf("%s has changed since it was listed: %w (list the source again and pack the new version "+
			"into another prefix)", o.Key, err)
	}
	if err != nil {
		return err
	}
	*sum = crc32.Checksum(dst, castagnoli)
	k.report(false, func(s *Progress) {
		s.Bytes += int64(len(dst))
		if off+int64(len(dst)) == e.size {
			s.Files++
		}
	})
	return nil
}

// start begins the upload of a shard, at its first part.
func (k *packer) start(ctx context.Context, j *job) {
	old := k.found[j.shard]
	// The index first: an index must never be beside another tar.
	for _, o := range []objstore.Object{old.index, old.tar} {
		if o.Key == "" {
			continue
		}
		if j.err = k.dst.Delete(ctx, o.Key, ""); j.err != nil {
			return
		}
		killpoint.Pass("shard.pack.deleted")
	}
	if j.upload, j.err = k.dst.Upload(ctx, j.key, j.size, j.partLen); j.err != nil {
		return
	}
	k.uploads.Store(j.upload, nil)
	killpoint.Pass("shard.pack.upload")
}

// uploadPart uploads a part. The last one of a shard completes it.
func (k *packer) uploadPart(ctx context.Context, j *job, n int, buf []byte) error {
	if err := k.uploading.Acquire(ctx, 1); err != nil {
		return err
	}
	j.begin.Do(func() { k.start(ctx, j) })
	err := j.err
	if err == nil {
		err = j.upload.Part(ctx, n, buf)
	}
	k.uploading.Release(1)
	k.give(buf)
	if err != nil {
		return err
	}
	killpoint.Pass("shard.pack.part")
	if j.left.Add(-1) > 0 {
		return nil
	}
	if err := k.verifying.Acquire(ctx, 1); err != nil {
		return err
	}
	defer k.verifying.Release(1)
	defer k.open.Release(1)
	return k.complete(ctx, j)
}

// complete makes the shard visible, reads it back, and writes its index.
func (k *packer) complete(ctx context.Context, j *job) error {
	o, err := j.upload.Complete(ctx)
	if err != nil {
		return err
	}
	k.uploads.Delete(j.upload)
	killpoint.Pass("shard.pack.complete")
	if o.Size != j.size || o.ETag == "" {
		return fmt.Errorf("%s: %d bytes were uploaded, but the store has %d with ETag %q",
			j.key, j.size, o.Size, o.ETag)
	}
	if err := k.verify(ctx, j, o); err != nil {
		return err
	}
	killpoint.Pass("shard.pack.verified")
	data, err := k.index(j, o)
	if err != nil {
		return err
	}
	if err := k.putNew(ctx, j.key+indexSuffix, data); err != nil {
		return err
	}
	killpoint.Pass("shard.pack.index")
	k.done[j.shard] = SummaryMember{Name: shardName(j.shard), Size: j.size, Members: len(j.entries), ETag: o.ETag}
	empty := 0 // files without bytes, which are not fetched
	for i := range j.entries {
		if j.entries[i].size == 0 {
			empty++
		}
	}
	k.report(false, func(p *Progress) { p.Files += empty; p.Shards++ })
	return nil
}

// verify reads the shard o back and compares it with the bytes read and the layout.
func (k *packer) verify(ctx context.Context, j *job, o objstore.Object) error {
	bad := func(e *entry, at int64, what string) error {
		name := "its end"
		if e != nil {
			name = k.m.Path(int(e.file))
		}
		return fmt.Errorf("%s does not read back as it was written: %s at offset %d (%s): the store or the "+
			"network alters bytes (check them, then pack again: this shard is rebuilt)", j.key, what, at, name)
	}
	buf, err := k.take(ctx, j.partLen)
	if err != nil {
		return err
	}
	defer k.give(buf)
	var sum uint32 // of the extent so far
	for n, sums := range j.sums {
		from := int64(n) * j.partLen
		to := min(from+j.partLen, j.size)
		if err := k.dst.ReadAt(ctx, o, buf[:to-from], from); err != nil {
			return fmt.Errorf("read back: %w", err)
		}
		err := k.visit(j.entries, from, to, func(at int64, b []byte, n int64) error {
			got := buf[at-from : at-from+n]
			if b != nil && !bytes.Equal(got, b) {
				return bad(nil, at, "header differs")
			}
			if rest := bytes.TrimLeft(got, "\x00"); b == nil && len(rest) > 0 {
				return bad(nil, at+n-int64(len(rest)), "padding differs")
			}
			return nil
		}, func(at int64, e *entry, lo, hi int64) error {
			b := buf[at-from:][:hi-lo]
			if got, want := crc32.Checksum(b, castagnoli), *sums[0]; got != want {
				return bad(e, at, fmt.Sprintf("checksum of %d bytes is %08x, want %08x", len(b), got, want))
			}
			sums = sums[1:]
			e.crc = crc32.Update(e.crc, castagnoli, b)
			for e.size > catalog.ExtentSize && len(b) > 0 {
				n := min(int64(len(b)), catalog.ExtentSize-lo%catalog.ExtentSize)
				sum, b = crc32.Update(sum, castagnoli, b[:n]), b[n:]
				if lo += n; lo == e.size || lo%catalog.ExtentSize == 0 {
					e.sums, sum = binary.LittleEndian.AppendUint32(e.sums, sum), 0
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// index returns the .sidx of a shard.
func (k *packer) index(j *job, o objstore.Object) ([]byte, error) {
	ix := &index{dataset: k.m.VersionHash(), plan: k.id, shard: j.shard, size: j.size, etag: o.ETag,
		coded: k.coded != nil}
	for i := range j.entries {
		e := &j.entries[i]
		f := int(e.file)
		m := indexMember{off: e.data, size: k.m.Size(f), stored: e.size, mtime: catalog.Nanos(k.m.ModTime(f)),
			crc: e.crc, sums: string(e.sums), path: k.m.Path(f), etag: k.m.ETag(f)}
		if m.stored < m.size {
			m.crc = k.coded.Sum(f)
		}
		if name := k.tarPath(f); name != m.path {
			m.tarName = name
		}
		if err := ix.append(m); err != nil {
			return nil, err
		}
	}
	return ix.encode()
}

// putNew stores data under key. If it exists already that is no error: a request whose answer was lost is retried.
func (k *packer) putNew(ctx context.Context, key string, data []byte) error {
	_, err := k.dst.PutNew(ctx, key, data)
	if objstore.KindOf(err) != objstore.KindExists {
		return err
	}
	if old, rerr := readObject(ctx, k.dst, key, int64(len(data))); rerr == nil && bytes.Equal(old, data) {
		return nil
	}
	return fmt.Errorf("%w: another process packs into this prefix (let one of them finish, then pack again)", err)
}

// finish writes the manifest of the set.
func (k *packer) finish(ctx context.Context) error {
	s := Summary{params: k.params, Escaped: k.escaped, Shards: k.done}
	s.Format = summaryFormat
	data, err := encodeJSON(s)
	if err != nil {
		return err
	}
	if _, err := ParseSummary(data); err != nil {
		return fmt.Errorf("a bug made an invalid manifest: %w", err)
	}
	// A try whose answer was lost may have begun an upload that nobody knows of. begin warns if they cannot be listed.
	_, _ = objstore.AbortUploads(ctx, k.dst, k.prefix+"shard-")
	if err := k.putNew(ctx, k.prefix+SummaryName, data); err != nil {
		return err
	}
	killpoint.Pass("shard.pack.manifest")
	if err := k.dst.Delete(ctx, k.prefix+MarkerName, ""); err != nil {
		return err
	}
	killpoint.Pass("shard.pack.end")
	return nil
}
