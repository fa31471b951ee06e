package engine

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/near"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/cache/objstore/stores"
)

// NearTier names a store near the readers. The zero value is none.
type NearTier struct {
	URL      string // s3://bucket/prefix
	Endpoint string // "": the origin's
	Profile  string // of the shared credentials; "": the origin's credentials
}

// String returns the tier for a message.
func (n NearTier) String() string { return strings.TrimSuffix(n.URL+" at "+n.Endpoint, " at ") }

// getenv is the environment of the tier's store.
func (n NearTier) getenv(origin func(string) string) func(string) string {
	return func(name string) string {
		switch name {
		case "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL":
			if n.Endpoint != "" {
				return n.Endpoint
			}
		case "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS":
			if n.Endpoint != "" {
				return ""
			}
		case "AWS_PROFILE":
			if n.Profile != "" {
				return n.Profile
			}
		case "AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SECRET_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN",
			"AWS_REGION", "AWS_DEFAULT_REGION", "AWS_NO_SIGN_REQUEST":
			if n.Profile != "" { // they would come before the profile's
				return ""
			}
		}
		return origin(name)
	}
}

// nearTier is the dataset's near tier.
type nearTier struct {
	*near.Tier
	store    *s3.Store
	withheld int64 // of the ledger
}

// mostNearMemory is sixteen units: some 100 ms of reads at 1 GB/s.
const mostNearMemory = 64 << 20

// openNear opens the near tier of Config.Near. It sends no request: a tier that is away is no reason not to start.
func (e *Engine) openNear(ctx context.Context) error {
	n := e.cfg.Near
	if n.URL == "" {
		return nil
	}
	refuse := func(remedy, format string, args ...any) error {
		return &objstore.Error{Op: "open", Key: "--near " + n.URL, Kind: objstore.KindInvalid, Err: fmt.Errorf(format, args...), Remedy: remedy}
	}
	if e.source.Scheme != "s3" {
		return refuse("leave out --near", "the source %s is no bucket", e.source)
	}
	if e.host.Key != nil {
		return refuse("leave out --near, or --encryption-key-file if the tier may hold plain copies", "the cache is encrypted, and copies in the near tier would not be")
	}
	if !e.cfg.Store.CustomerKey.IsZero() {
		return refuse("leave out --near, or encrypt the tier's disks and read the objects without SSE-C", "the objects are encrypted with a key of your own (SSE-C), and copies in the near tier would not be")
	}
	getenv := e.cfg.Getenv
	if getenv == nil {
		getenv = os.Getenv
	}
	base, at, err := stores.Open(ctx, n.URL, stores.Options{S3: s3.Config{Logger: e.log}, Store: objstore.StoreOptions{CurrentOnly: true}, Getenv: n.getenv(getenv)})
	if err != nil {
		return fmt.Errorf("--near: %w", err)
	}
	store, ok := base.(*s3.Store)
	if !ok || at.Shards != "" {
		return refuse("give s3://BUCKET/PREFIX", "a near tier is a bucket, or a prefix in one")
	}
	e.near = nearTier{store: store}
	for _, text := range []string{e.cfg.Source, e.cfg.Shards, e.cfg.Publish} {
		of, err := objstore.ParseSource(text)
		if err == nil && of.Bucket == at.Bucket && e.source.Endpoint == at.Endpoint && strings.HasPrefix(at.Prefix, of.Prefix) {
			return refuse("give another bucket or prefix, or its --near-endpoint", "it lies in %s, whose copies it would hold", of)
		}
	}
	ledger := e.cache.Ledger()
	memory := min(max(ledger.Limit()/16, near.LeastMemory), mostNearMemory)
	if ledger.Withhold(memory) {
		e.near.withheld = memory
	} else {
		memory = near.LeastMemory
	}
	name := strings.TrimSuffix(at.String(), "/") + " at " + at.Endpoint
	e.near.Tier = near.New(near.Config{Store: store, Prefix: at.Prefix, Name: name, Memory: memory, Log: e.log})
	e.log.Info("near tier", "tier", name)
	return nil
}

// over returns the store of a source with the near tier in front of its reads.
func (n *nearTier) over(below objstore.Layer, source objstore.Source) objstore.Reader {
	if n.Tier == nil || source.Scheme != "s3" {
		return below
	}
	return n.Over(below, source.Endpoint+"/"+source.Bucket)
}

// close ends the tier's requests, and returns its memory.
func (n *nearTier) close(e *Engine) {
	if n.Tier != nil {
		n.Close()
	}
	if n.store != nil {
		n.store.Close()
	}
	e.cache.Ledger().Withhold(-n.withheld)
}

// stats returns the tier's counts; nil without one.
func (n *nearTier) stats() *near.Stats {
	if n.Tier == nil {
		return nil
	}
	s := n.Stats()
	return &s
}
