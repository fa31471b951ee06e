package main

import (
	"fmt"

	humanize "github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// storeOptions are the flags of the object store (docs/s3.md).
type storeOptions struct {
	keyFile       string
	requesterPays bool
	weakETag      bool
	versions      string
	getsPerHour   int64
	prices        string
	linksOutside  bool
	near          engine.NearTier // of verbs that read through the cache
}

// customerKeyVariable holds the key of --sse-c-key-file, in base64 or hexadecimal digits.
const customerKeyVariable = "SHOAL_SSE_C_KEY"

func (o *storeOptions) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&o.keyFile, "sse-c-key-file", "", "file with the SSE-C key of the objects: 32 raw bytes, or base64 or hex; or "+customerKeyVariable)
	f.Int64Var(&o.getsPerHour, "gets-per-hour", 0, "maximum GETs and HEADs in any hour; near the limit prefetching slows down, at the limit readers wait (default: no limit)")
	f.StringVar(&o.prices, "price", "", "what requests cost, for reports: get=0.0004/1000,list=0.005/1000,gb=0.09,currency=USD")
	addChoice(f, &o.versions, "object-versions", "auto: in a versioned bucket, objects overwritten in mid-epoch are still read as listed; off: that is an error", "auto", "off")
	f.BoolVar(&o.weakETag, "weak-etag", false, "accept objects listed without an ETag (size and time are used instead)")
	f.BoolVar(&o.linksOutside, "links-outside", false, "follow symbolic links that lead out of a file:// source")
	f.BoolVar(&o.requesterPays, "requester-pays", false, "pay for requests to a requester-pays bucket")
}

// addNear adds the flags of the near tier (docs/near.md).
func (o *storeOptions) addNear(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&o.near.URL, "near", "", "s3://BUCKET/PREFIX of an S3 engine near the GPUs, shared by all nodes: read first, and filled with what SOURCE is read for (docs/near.md)")
	f.StringVar(&o.near.Endpoint, "near-endpoint", "", "URL of the --near engine (default: SOURCE's endpoint)")
	f.StringVar(&o.near.Profile, "near-profile", "", "profile with the credentials of the --near engine (default: SOURCE's credentials)")
}

func (o *storeOptions) checkNear() error {
	at, err := objstore.ParseSource(o.near.URL)
	switch {
	case o.near == engine.NearTier{}:
	case o.near.URL == "":
		return cli.Usagef("--near-endpoint, --near-profile: give --near s3://BUCKET/PREFIX, too")
	case err != nil:
		return cli.Usagef("--near: %w", err)
	case at.Scheme != "s3" || at.Shards != "":
		return cli.Usagef("--near %s: give s3://BUCKET/PREFIX", at)
	}
	return nil
}

// options checks the flags and reads the key.
func (o *storeOptions) options(inv *invocation) (objstore.StoreOptions, error) {
	key, err := customerKey(inv, o.keyFile, customerKeyVariable)
	if err != nil {
		return objstore.StoreOptions{}, fmt.Errorf("--sse-c-key-file: %w", err)
	}
	if o.getsPerHour != 0 && o.getsPerHour < objstore.LeastBudget {
		return objstore.StoreOptions{}, cli.Usagef("--gets-per-hour %d: give at least %d", o.getsPerHour, objstore.LeastBudget)
	}
	prices, err := objstore.ParsePrices(o.prices)
	if err != nil {
		return objstore.StoreOptions{}, cli.Usagef("--price: %w", err)
	}
	return objstore.StoreOptions{
		CustomerKey: key, RequesterPays: o.requesterPays, CurrentOnly: o.versions == "off", WeakETag: o.weakETag, GetsPerHour: o.getsPerHour, Prices: prices,
		LinksOutside: o.linksOutside,
	}, nil
}

// printCost adds the rows about requests sent to the store.
func printCost(row func(name, format string, args ...any), c engine.Cost) {
	row("requests", "%s", c)
	if b := c.Budget; b != nil {
		row("budget", "%s GETs an hour, %s free now; %d reads waiting, %d prefetches; readers waited %.1f s in %s waits", humanize.Comma(b.PerHour),
			humanize.Comma(b.Left), b.WaitingDemand, b.WaitingPrefetch, b.WaitSeconds, humanize.Comma(b.Waits))
	}
}

// customerKey reads a key for SSE-C from a file or, if none is named, from a variable.
func customerKey(inv *invocation, file, variable string) (objstore.CustomerKey, error) {
	if file == "" {
		text := inv.environ(variable)
		if text == "" {
			return objstore.CustomerKey{}, nil
		}
		key, err := objstore.ParseCustomerKey([]byte(text))
		if err != nil {
			err = fmt.Errorf("%s: %w", variable, err)
		}
		return key, err
	}
	path, err := inv.abs(file)
	if err != nil {
		return objstore.CustomerKey{}, err
	}
	return objstore.ReadCustomerKey(path)
}
