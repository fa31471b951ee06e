package engine

import (
	"bytes"
	"cmp"
	"context"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/shard"
	"github.com/shoalfs/shoal/internal/pause"
)

// Recoding (docs/recode.md) goes on in the background, at the pace of searches for seeds (searchPace) and at ordinary
// priority: readers go first. The catalog has the tables, twice, before the first record that needs them is written. Of
// the nodes of a cluster one learns them, by rendezvous hashing. A node asks the others for recoded files only while it
// would recode them itself.

// Coder is a codec that learns from files of a dataset. Safe for concurrent use.
type Coder interface {
	shard.Decoder
	// Train makes tables from some files. It fails if it knows the form of none.
	Train(files [][]byte) (tables []byte, err error)
	// Form names the tables by which a file was encoded, as Name does.
	Form(coded []byte) [8]byte
	Name(tables []byte) [8]byte
}

const (
	recodeEvery  = 2 * time.Second // looks for what is to be recoded
	longestRest  = 2 * time.Second
	trainedFrom  = 64 // kept files
	trainAgainAt = 4  // times as many, if there was nothing to learn from those
	mostTables   = 16 // of a dataset in the catalog: the host's codec learns 256 of all datasets
	trainRounds  = 15 // looks, which is half a minute, for which a node waits for the tables of another
)

// encoder is the newest of the dataset's tables.
type encoder struct {
	encode func(dst, file []byte) ([]byte, bool)
	tables []byte
	form   [8]byte
}

// recoding is the dataset's part of the host's codec: it is cache.Codec.
type recoding struct {
	Coder                           // nil: none
	mode     atomic.Pointer[string] // Config.Recode of those users who say one; nil before
	encode   atomic.Pointer[encoder]
	mu       sync.Mutex
	tables   [][]byte     // guarded by mu
	known    sync.Map     // their forms, and those of older ones
	asFiles  atomic.Int64 // bytes read lately in their original form
	decoded  atomic.Int64 // bytes that feeds decoded lately
	triedAt  int          // kept files when training failed
	rounds   int          // looks for tables
	plain    atomic.Bool  // restored files are to be kept so
	underWay atomic.Bool
}

func (r *recoding) Encode(dst, file []byte) ([]byte, bool) {
	if e := r.encode.Load(); e != nil {
		return e.encode(dst, file)
	}
	return dst, false
}

func (r *recoding) Form(coded []byte) [8]byte {
	form := r.Coder.Form(coded)
	if _, ok := r.known.Load(form); !ok {
		return [8]byte{}
	}
	return form
}

// use makes learned tables those by which files are encoded.
func (r *recoding) use(encode func(dst, file []byte) ([]byte, bool), tables []byte) {
	e := &encoder{encode, tables, r.Name(tables)}
	r.known.Store(e.form, nil)
	r.encode.Store(e)
}

// join reports whether a user of the dataset may say mode. The first one decides; auto, the default, agrees with all.
func (r *recoding) join(mode string) bool {
	return mode == "" || r.mode.CompareAndSwap(nil, &mode) || mode == "auto" || *r.mode.Load() == mode
}

// learn makes the tables in the catalog known.
func (e *Engine) learn() {
	r := &e.recoding
	r.join(e.cfg.Recode)
	if r.Coder = e.host.cfg.Coder; r.Coder == nil {
		return
	}
	r.tables = e.catalog.Coding(e.dataset)
	for _, t := range r.tables {
		encode, err := r.Learn(t)
		if err != nil {
			e.log.Warn("tables of recoded files cannot be used; those files are fetched again", "cause", err)
			continue
		}
		r.use(encode, t)
	}
}

// CountRead notes that a feed has read so many bytes of samples, and whether it decoded them.
func (d *Dataset) CountRead(n int, decoded bool) {
	if decoded {
		d.e.recoding.decoded.Add(int64(n))
	} else {
		d.e.recoding.asFiles.Add(int64(n))
	}
}

// judge looks at what was read lately, which is some epochs of so many bytes.
func (r *recoding) judge(epoch int64) {
	files, decoded := r.asFiles.Load(), r.decoded.Load()
	for ; files+decoded > 4*max(epoch, 1); files, decoded = files/2, decoded/2 {
		r.asFiles.Add(files/2 - files)
		r.decoded.Add(decoded/2 - decoded)
	}
	r.plain.Store(files > decoded+epoch && *cmp.Or(r.mode.Load(), new(string)) != "on") // not for one cp -r
}

// restoreCosts is what restoring a file costs, in what decoding its recoded form saves (ADR 50).
const restoreCosts = 3

// KeepRestored implements cache.Codec. Between its bound and that of recodes all stays as it is.
func (r *recoding) KeepRestored() bool { return r.plain.Load() }

// recodes reports whether kept files are to be recoded now.
func (e *Engine) recodes() bool {
	r := &e.recoding
	if r.Coder == nil {
		return false
	}
	switch *cmp.Or(r.mode.Load(), new(string)) {
	case "on":
		return true
	case "auto":
		n := r.decoded.Load()
		return n > 0 && n >= restoreCosts*r.asFiles.Load()
	}
	return false
}

// recodeLoop recodes what is kept, for as long as the dataset is open.
func (e *Engine) recodeLoop(ctx context.Context) {
	pace := newSearchPace(false)
	go pace.follow(ctx)
	rest := func(worked time.Duration) { _ = pause.For(ctx, min(pace.pause(worked), longestRest)) }
	var recoder *cache.Recoder
	var of *view
	for range pause.Every(ctx, recodeEvery) {
		e.recoding.judge(e.Manifest().Bytes())
		for ctx.Err() == nil && e.recodes() {
			if v := e.cur.Load(); v != of {
				of, recoder = v, cache.NewRecoder(v.volume, pace.threads, rest)
			}
			if e.recoding.encode.Load() == nil && !e.train(ctx, of, recoder) {
				break
			}
			e.recoding.underWay.Store(true)
			if !recoder.Next(ctx) {
				break
			}
		}
		e.recoding.underWay.Store(false)
	}
}

// train makes the dataset's tables, or takes those of another node, and reports whether there are some now.
func (e *Engine) train(ctx context.Context, v *view, from *cache.Recoder) bool {
	r, first := &e.recoding, v.sharing.trainer()
	kept, all := v.volume.Kept()
	ready := kept >= min(trainedFrom, all) && (r.triedAt == 0 || kept >= trainAgainAt*r.triedAt)
	r.rounds++
	early := r.rounds <= trainRounds
	if first != "" && (ready || early) {
		tables, err := e.receive(ctx, first, e.codingName())
		if err == nil {
			err = e.encodeBy(tables)
		}
		if err == nil {
			e.log.Info("kept files are being recoded by the tables of another node", "tables", len(tables))
			return true
		}
		e.log.Debug("no tables from other nodes", "cause", err)
		ready = ready && (!early || first == e.host.node.id)
	}
	if !ready {
		return false
	}
	tables, err := r.Train(from.Some(ctx, trainedFrom))
	if err != nil {
		r.triedAt = max(kept, 1)
		e.log.Info("kept files are not recoded: none of some can be", "cause", err)
		return false
	}
	if err := e.encodeBy(tables); err != nil {
		r.triedAt = max(kept, 1)
		e.log.Warn("kept files are not recoded", "cause", err)
		return false
	}
	e.log.Info("kept files are being recoded", "tables", len(tables), "threads", runtime.GOMAXPROCS(0))
	return true
}

// encodeBy makes tables the dataset's, and keeps them.
func (e *Engine) encodeBy(tables []byte) error {
	r := &e.recoding
	encode, err := r.Learn(tables)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.ContainsFunc(r.tables, func(t []byte) bool { return bytes.Equal(t, tables) }) {
		all := append(slices.Clone(r.tables), tables)
		all = all[max(len(all)-mostTables, 0):] // what needs older ones is fetched again after a restart
		if err := e.catalog.SetCoding(e.dataset, all); err != nil {
			return err
		}
		r.tables = all
	}
	r.use(encode, tables)
	return nil
}

// restoring returns a store that restores the recoded files of shards. Their tables become the dataset's, so that the
// cache can keep such files as they come.
func (e *Engine) restoring(store objstore.Reader, chunk int64) *shard.Restorer {
	if e.recoding.Coder == nil {
		return shard.NewRestorer(store, nil, nil, chunk)
	}
	c := &setCoder{Coder: e.recoding.Coder, e: e}
	return shard.NewRestorer(store, c, func() bool { return c.known.Load() && !c.failed.Load() && e.recodes() },
		chunk)
}

type setCoder struct {
	Coder
	e             *Engine
	known, failed atomic.Bool // the catalog has the tables; not all of them
}

func (c *setCoder) Learn(tables []byte) (func(dst, file []byte) ([]byte, bool), error) {
	r := &c.e.recoding
	if *cmp.Or(r.mode.Load(), new(string)) != "off" {
		if err := c.e.encodeBy(tables); err != nil {
			c.failed.Store(true)
			c.e.log.Warn("recoded files of shards are kept as their originals", "cause", err)
		} else {
			c.known.Store(true)
		}
	}
	return c.Coder.Learn(tables)
}

// codingName is the name by which other nodes ask for the dataset's tables.
func (e *Engine) codingName() string { return "coding-" + e.datasetID() }
