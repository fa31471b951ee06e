package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	humanize "github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/engine"
	"github.com/shoalfs/shoal/prefetch/order"
)

// size is a flag value in bytes, written 512MiB, 20GiB, 1.5GB.
type size int64

func (s *size) String() string { return humanize.IBytes(uint64(*s)) }
func (s *size) Type() string   { return "size" }
func (s *size) Set(text string) error {
	n, err := humanize.ParseBytes(text)
	if err != nil || n > 1<<60 {
		return fmt.Errorf("%q is not a size (write 512MiB, 20GiB or 1.5GB)", text)
	}
	*s = size(n)
	return nil
}

// engineOptions are the flags that every verb with a dataset takes.
type engineOptions struct {
	cacheDir    string
	cacheSize   size
	memory      size
	order       string
	epoch       int
	samples     string
	refresh     bool
	weakETag    bool
	connections int
	daemon      bool
	admin       string
	logLevel    string
}

func (o *engineOptions) add(c *cobra.Command) {
	o.cacheSize, o.memory = 20<<30, 2<<30
	f := c.Flags()
	f.StringVar(&o.cacheDir, "cache-dir", "", "folder for the cache, owned by this daemon (default: one a source under the user's cache folder)")
	f.Var(&o.cacheSize, "cache-size", "most bytes on disk under --cache-dir")
	f.Var(&o.memory, "memory", "most memory of the daemon, metadata and staged samples together")
	f.StringVar(&o.order, "order", "auto", "order in which a reader of the mount will open the samples:\ntorch:seed=S[,epoch=E,world=W,rank=R or A-B,drop_last=0|1], torch-loader:seed=S,\nuniform:seed=S, sequential, plan, auto, none")
	f.IntVar(&o.epoch, "epoch", -1, "epoch that the order begins with (default: the order's own, else 0)")
	f.StringVar(&o.samples, "samples", "images", "which files are numbered: images, * or a glob on the name")
	f.BoolVar(&o.refresh, "refresh", false, "list the source again instead of taking the catalog's version")
	f.BoolVar(&o.weakETag, "weak-etag", false, "accept objects that are listed without an ETag (then size and time stand for it)")
	f.IntVar(&o.connections, "connections", 512, "most requests in flight to the object store")
	f.BoolVar(&o.daemon, "daemon", false, "go to the background once ready; log to CACHE-DIR/shoal.log")
	f.StringVar(&o.admin, "admin", "", "address for /stats, /healthz and /debug/pprof, such as 127.0.0.1:7071 (default: none)")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
}

// config checks the flags.
func (o *engineOptions) config(source string) (engine.Config, error) {
	if _, err := objstore.ParseSource(source); err != nil {
		return engine.Config{}, usageError{err}
	}
	spec, err := order.Parse(o.order)
	if err != nil {
		return engine.Config{}, usagef("--order: %w", err)
	}
	if o.epoch >= 0 {
		if spec, err = spec.With("epoch", strconv.Itoa(o.epoch)); err != nil {
			return engine.Config{}, usagef("--epoch: %w", err)
		}
	}
	if err := spec.Check(); err != nil {
		return engine.Config{}, usagef("--order: %w", err)
	}
	if err := engine.CheckSamples(o.samples); err != nil {
		return engine.Config{}, usagef("--samples: %w", err)
	}
	if o.connections < 1 || o.connections > 512 {
		return engine.Config{}, usagef("--connections %d: give a number from 1 to 512", o.connections)
	}
	if err := o.resolveCacheDir(source); err != nil {
		return engine.Config{}, err
	}
	logger, err := o.logger()
	if err != nil {
		return engine.Config{}, err
	}
	return engine.Config{
		Source: source, CacheDir: o.cacheDir, CacheSize: int64(o.cacheSize), Memory: int64(o.memory), Order: spec,
		Samples: o.samples, Connections: o.connections, Refresh: o.refresh, WeakETag: o.weakETag, Logger: logger,
	}, nil
}

func (o *engineOptions) logger() (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.logLevel)); err != nil {
		return nil, usagef("--log-level %q: give debug, info, warn or error", o.logLevel)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})), nil
}

// resolveCacheDir gives every source a default folder of its own, since one daemon owns a folder.
func (o *engineOptions) resolveCacheDir(source string) error {
	if o.cacheDir == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			base = "/var/cache"
		}
		sum := sha256.Sum256([]byte(os.Getenv("AWS_ENDPOINT_URL_S3") + os.Getenv("AWS_ENDPOINT_URL") + " " + source))
		o.cacheDir = filepath.Join(base, "shoal", hex.EncodeToString(sum[:6]))
	}
	dir, err := filepath.Abs(o.cacheDir)
	o.cacheDir = dir
	return err
}

// openEngine opens the dataset and tells how a long listing goes on.
func openEngine(ctx context.Context, cfg engine.Config) (*engine.Engine, error) {
	var listed atomic.Int64
	cfg.Progress = func(n int) { listed.Store(int64(n)) }
	done := make(chan struct{})
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		t := time.NewTicker(time.Second)
		defer t.Stop()
		for {
			select {
			case <-done:
				return
			case <-t.C:
				if n := listed.Load(); n > 0 {
					notice("listing %s: %s objects", cfg.Source, humanize.Comma(n))
				}
			}
		}
	}()
	e, err := engine.Open(ctx, cfg)
	close(done)
	<-stopped
	return e, err
}
