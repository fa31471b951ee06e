package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	own := map[string]string{}
	if n.Profile != "" {
		own["AWS_PROFILE"] = n.Profile
		for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SECRET_KEY",
			"AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_NO_SIGN_REQUEST"} {
			own[name] = "" // it would come before the profile's
		}
	}
	return func(name string) string {
		if value, ok := own[name]; ok {
			return value
		}
		return origin(name)
	}
}

// Near is an open near tier. nil is none.
type Near struct {
	*near.Tier
	store *s3.Store
}

// NearOptions are what a tier has to fit.
type NearOptions struct {
	Source objstore.Source // with its endpoint
	Beside []string        // other sources and destinations, outside of which the tier has to lie, as it does of Source
	Store  objstore.StoreOptions
	Getenv func(name string) string // of the source; nil: os.Getenv
	Memory int64                    // for copies
	Log    *slog.Logger
}

// mostNearMemory is sixteen units: some 100 ms of reads at 1 GB/s.
const mostNearMemory = 64 << 20

// NearMemory is the tier's part of the memory for data.
func NearMemory(of int64) int64 { return min(max(of/16, near.LeastMemory), mostNearMemory) }

// ErrNear is wrapped by errors about what does not go with a near tier.
var ErrNear = errors.New("a near tier cannot be used here")

func (n NearTier) refuse(remedy, format string, args ...any) error {
	return &objstore.Error{Op: "open", Key: "--near " + n.URL, Kind: objstore.KindInvalid,
		Err: fmt.Errorf("%w: "+format, append([]any{ErrNear}, args...)...), Remedy: remedy}
}

// Open opens the tier. It sends no request: a tier that is away is no reason not to start.
func (n NearTier) Open(ctx context.Context, o NearOptions) (*Near, error) {
	if n.URL == "" {
		return nil, nil
	}
	if o.Source.Scheme != "s3" {
		return nil, n.refuse("leave out --near", "the source %s is no bucket", o.Source)
	}
	if !o.Store.CustomerKey.IsZero() {
		return nil, n.refuse("leave out --near, or encrypt the tier's disks and read the objects without SSE-C",
			"the objects are encrypted with a key of your own (SSE-C), and copies in the near tier would not be")
	}
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	base, at, err := stores.Open(ctx, n.URL,
		stores.Options{Logger: o.Log, Store: objstore.StoreOptions{CurrentOnly: true}, Endpoint: n.Endpoint,
			Fallback: o.Source.Endpoint, Setting: "--near-endpoint", Getenv: n.getenv(o.Getenv)})
	if err != nil {
		return nil, fmt.Errorf("--near: %w", err)
	}
	store, ok := base.(*s3.Store)
	if !ok || at.Shards != "" {
		return nil, n.refuse("give s3://BUCKET/PREFIX", "a near tier is a bucket, or a prefix in one")
	}
	for _, text := range append([]string{o.Source.String()}, o.Beside...) {
		of, err := objstore.ParseSource(text)
		if err == nil && of.Bucket == at.Bucket && o.Source.Endpoint == at.Endpoint &&
			strings.HasPrefix(at.Prefix, of.Prefix) {
			store.Close()
			return nil, n.refuse("give another bucket or prefix, or its --near-endpoint",
				"it lies in %s, whose copies it would hold", of)
		}
	}
	name := strings.TrimSuffix(at.String(), "/") + " at " + at.Endpoint
	o.Log.Info("near tier", "tier", name)
	return &Near{near.New(near.Config{Store: store, Prefix: at.Prefix, Name: name, Memory: o.Memory, Log: o.Log}),
		store}, nil
}

func (e *Engine) openNear(ctx context.Context) (err error) {
	n := e.cfg.Near
	if n.URL != "" && e.host.Key != nil {
		return n.refuse("leave out --near, or --encryption-key-file if the tier may hold plain copies",
			"the cache is encrypted, and copies in the near tier would not be")
	}
	ledger := e.cache.Ledger()
	memory := NearMemory(ledger.Limit())
	if e.near, err = n.Open(ctx,
		NearOptions{e.source, []string{e.cfg.Shards, e.cfg.Publish}, e.cfg.Store, e.cfg.Getenv, memory,
			e.log}); e.near != nil && ledger.Withhold(memory) {
		e.withheld = memory
	}
	return err
}

// Before returns the store of a source with the near tier in front of its reads.
func (n *Near) Before(below objstore.Layer, source objstore.Source) objstore.Layer {
	if n == nil || source.Scheme != "s3" {
		return below
	}
	return n.Over(below, source.Endpoint+"/"+source.Bucket)
}

// Close ends the tier's requests, after it has put what is queued.
func (n *Near) Close() {
	if n != nil {
		n.Tier.Close()
		n.store.Close()
	}
}
