package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// storeOptions are the flags of the object store (docs/s3.md).
type storeOptions struct {
	rare rareStore
	near engine.NearTier // of verbs that read through the cache
}

// customerKeyVariable holds the SSE-C key of the objects, in base64 or hexadecimal digits.
const customerKeyVariable = "SHOAL_SSE_C_KEY"

func (o *storeOptions) add(c *cobra.Command) {
	f := c.Flags()
	f.Var(&o.rare, "store", "what few stores need, with commas between: requester-pays; links-outside (follow links "+
		"out of a file:// source);\nweak-etag (accept objects without an ETag, by size and time);\ngets-per-hour=N, "+
		"the most GETs and HEADs in any hour: readers wait at it, and prefetching before "+
		"it;\nget=0.0004/1000,list=0.005/1000,gb=0.09,currency=USD: prices, for reports")
}

// rareStore is the value of --store.
type rareStore struct {
	text    string
	options objstore.StoreOptions
}

func (r *rareStore) String() string { return r.text }
func (r *rareStore) Type() string   { return "string" }
func (r *rareStore) Set(text string) (err error) {
	var o objstore.StoreOptions
	var prices []string
	text = strings.TrimPrefix(r.text+","+text, ",") // given again, it adds
	for word := range strings.SplitSeq(text, ",") {
		switch key, value, _ := strings.Cut(word, "="); {
		case word == "requester-pays":
			o.RequesterPays = true
		case word == "links-outside":
			o.LinksOutside = true
		case word == "weak-etag":
			o.WeakETag = true
		case key == "gets-per-hour":
			if o.GetsPerHour, err = strconv.ParseInt(value, 10, 64); err != nil ||
				o.GetsPerHour < objstore.LeastBudget {
				return fmt.Errorf("%q: give a number of at least %d", word, objstore.LeastBudget)
			}
		default:
			prices = append(prices, word)
		}
	}
	if o.Prices, err = objstore.ParsePrices(strings.Join(prices, ",")); err != nil {
		return fmt.Errorf("%w, or give requester-pays, links-outside, weak-etag or gets-per-hour=N", err)
	}
	*r = rareStore{text, o}
	return nil
}

// addNear adds the flags of the near tier (docs/near.md).
func (o *storeOptions) addNear(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&o.near.URL, "near", "",
		"s3://BUCKET/PREFIX of an S3 engine near the GPUs, shared by all nodes: read first, and filled with what "+
			"SOURCE is read for (docs/near.md)")
	f.StringVar(&o.near.Endpoint, "near-endpoint", "", "URL of the --near engine (default: SOURCE's endpoint)")
	f.StringVar(&o.near.Profile, "near-profile", "",
		"profile with the credentials of the --near engine (default: SOURCE's credentials)")
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

func (o *storeOptions) options(inv *invocation) (all objstore.StoreOptions, err error) {
	all = o.rare.options
	all.CustomerKey, _, err = keyOf(inv, "", customerKeyVariable, objstore.ParseCustomerKey)
	return all, err
}

func printCost(row func(name, format string, args ...any), c engine.Cost) {
	row("requests", "%s", c)
	if b := c.Budget; b != nil {
		row("budget", "%s GETs an hour, %s free now; %d reads waiting, %d prefetches; readers waited %.1f s in %s waits",
			human.Number(b.PerHour), human.Number(b.Left), b.WaitingDemand, b.WaitingPrefetch, b.WaitSeconds,
			human.Number(b.Waits))
	}
}
