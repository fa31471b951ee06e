package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/logs"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/order"
)

// connections is a number of requests in flight: -1 is auto, and 0 auto that nobody has asked for.
type connections int

// mostConnections fits into a process's usual limit of 1,024 open files, beside the cache's files.
const mostConnections = 512

func (c *connections) String() string {
	if *c <= 0 {
		return "auto"
	}
	return strconv.Itoa(int(*c))
}
func (c *connections) Type() string { return "number" }
func (c *connections) Set(text string) error {
	if text == "auto" {
		*c = -1
		return nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > mostConnections {
		return fmt.Errorf("give a number from 1 to %d, or auto", mostConnections)
	}
	*c = connections(n)
	return nil
}

func (c *connections) most() int {
	if *c <= 0 {
		return mostConnections
	}
	return int(*c)
}

// choice is a flag value that is one of several words.
type choice struct {
	to *string
	of []string
}

// addChoice adds a flag for one of some words: the default is the first or, if that is yes, which needs no value, no.
func addChoice(f *pflag.FlagSet, to *string, name, usage string, of ...string) {
	alone := ""
	if *to = of[0]; *to == yes {
		*to, alone = no, yes
	}
	f.Var(choice{to, of}, name, usage)
	f.Lookup(name).NoOptDefVal = alone
}

// no and yes are the words of flags that may be more than switched on.
const no, yes = "false", "true"

func (c choice) String() string { return *c.to }
func (c choice) Type() string {
	if c.of[0] == yes {
		return "bool" // may be given without a value
	}
	return "string"
}
func (c choice) Set(text string) error {
	if on, err := strconv.ParseBool(text); err == nil && c.of[0] == yes {
		text = strconv.FormatBool(on)
	}
	if !slices.Contains(c.of, text) {
		return fmt.Errorf("%q: give %s", text, english.WordSeries(c.of, "or"))
	}
	*c.to = text
	return nil
}

// engineOptions are the flags of every verb with a dataset.
type engineOptions struct {
	data        engine.Config // what the flags give in its form
	store       storeOptions
	folder      string // of a source that is a tree of files there, else ""
	cacheDir    string
	resetOld    bool
	cacheSize   amount
	memory      amount
	order       string
	badShards   string
	connections connections
	daemon      string // no, yes or supervised
	admin       string
	cryptOptions
	log logOptions
	auditOptions
	s3      s3Options
	cluster clusterOptions
}

const supervised = "supervised"

var daemonRecodes = []string{"auto", "on", "off"} // words of a daemon's --recode

// add adds the flags of a daemon.
func (o *engineOptions) add(c *cobra.Command) {
	o.addData(c)
	f := c.Flags()
	f.StringVar(&o.order, "order", "auto",
		"order in which a reader of the mount will open the samples:\ntorch:seed=S[,epoch=E,world=W,rank=R or "+
			"A-B,drop_last=0|1],\ntorch-loader:seed=S[,from=manual_seed|generator|stateful,persistent=1], "+
			"uniform:seed=S,\nwindowed:seed=S,window=W (packed sources), "+
			"mixture:seed=S,weights=GLOB:W+GLOB:W,\nbuckets:seed=S,batch=B, sequential, list:PATH, plan, auto, none "+
			"(docs/orders.md)")
	addChoice(f, &o.data.Recode, "recode", "keep JPEG files on disk in a form that is smaller and faster to decode, "+
		"made in idle CPU time: auto (once a feed decodes them), on, off (docs/recode.md)", daemonRecodes...)
	addChoice(f, &o.daemon, "daemon", "go to the background once ready; log to CACHE-DIR/shoal.log. "+
		"--daemon=supervised: and restart at once if it dies", yes, no, supervised)
	f.StringVar(&o.admin, "admin", "", "address for the dashboard, /stats, /metrics, /healthz and /readyz, such as "+
		"127.0.0.1:7071; without a host, loopback (default: none)")
}

// addHost adds the flags of a cache directory.
func (o *engineOptions) addHost(c *cobra.Command) {
	o.cacheSize.bytes, o.memory.bytes, o.order = 20<<30, 2<<30, "auto"
	f := c.Flags()
	f.StringVar(&o.cacheDir, "cache-dir", "",
		"folder for the cache, owned by this daemon (default: one per source in the user's cache folder)")
	f.BoolVar(&o.resetOld, "reset-old-cache", false,
		"empty a --cache-dir in an old format that this version does not read")
	f.Var(&o.cacheSize, "cache-size",
		"maximum disk usage of --cache-dir: a size, a share such as 80% of the free space, or auto (80%)")
	f.Var(&o.memory, "memory", "maximum memory of the daemon: a size, a share such as 50% of the container's limit, "+
		"or auto (80%; without a limit, 25% of the machine)")
	o.cryptOptions.add(f)
	o.log.add(c)
	o.auditOptions.add(f)
	o.cluster.addNode(c)
}

// addData adds the flags of every verb that reads a dataset through the cache.
func (o *engineOptions) addData(c *cobra.Command) {
	o.addHost(c)
	f := c.Flags()
	f.StringVar(&o.data.Shards, "shards", "",
		"read SOURCE from this shard set (shoal pack) if it holds the same version")
	addChoice(f, &o.badShards, "bad-shards",
		"damaged or missing shards: error, or skip (leave out their samples, with a warning)", "error", "skip")
	f.StringVar(&o.data.Samples, "samples", "images", "which files are numbered: images, *, extensions after the "+
		"first dot such as .jpg,.png, or a glob on the name; rows: the contents of objects: rows of .csv and .tsv, "+
		"documents of .bin and .idx, pictures of MDS and Parquet; rows:COLUMN: a column of those (docs/records.md)")
	f.Var(&o.connections, "connections",
		"requests in flight to the object store: up to 512, or auto (adapts to the highest throughput)")
	o.store.add(c)
	addNear(c, &o.data.Near)
}

// check checks the flags as far as possible without I/O.
func (o *engineOptions) check(source string) error {
	for _, text := range []string{source, o.data.Shards, o.data.Publish} {
		if _, err := objstore.ParseSource(text); err != nil && (text != "" || text == source) {
			return cli.Usage(err)
		}
	}
	if daemon.DrainTime() <= 0 {
		return cli.Usagef("%s=%s: give a duration such as 30s or 2m", daemon.DrainEnv, os.Getenv(daemon.DrainEnv))
	}
	if err := checkNear(o.data.Near); err != nil {
		return err
	}
	if err := engine.CheckSamples(o.data.Samples); err != nil {
		return cli.Usagef("--samples: %w", err)
	}
	return nil
}

func (o *engineOptions) spec(inv *invocation) (order.Spec, error) {
	spec, err := order.Parse(o.order)
	if err == nil {
		spec, err = inv.order(spec)
	}
	if err == nil {
		err = spec.Check()
	}
	if err != nil {
		err = cli.Usagef("--order: %w", err)
	}
	return spec, err
}

// config checks the flags, and reads the files that they name.
func (o *engineOptions) config(inv *invocation, source string) (c engine.Config, h engine.HostConfig, err error) {
	if err := o.check(source); err != nil {
		return c, h, err
	}
	c = o.data
	if c.Order, err = o.spec(inv); err != nil {
		return c, h, err
	}
	if err := o.resolveCacheDir(inv, source); err != nil {
		return c, h, err
	}
	if h, err = o.host(inv); err != nil {
		return c, h, err
	}
	c.Source, c.Logger = source, h.Logger
	for _, text := range []*string{&c.Source, &c.Shards, &c.Publish} {
		if *text, err = inv.source(*text); err != nil {
			return c, h, err
		}
	}
	if src, err := objstore.ParseSource(c.Source); err == nil && src.Scheme == "file" && src.Shards == "" {
		o.folder = src.Dir
		if err := o.cacheOutside(src.Dir, "the source", "would be listed with it"); err != nil {
			return c, h, err
		}
	}
	c.Store, err = o.store.options(inv)
	c.SkipBadShards = o.badShards == "skip"
	c.Connections, c.AdaptConnections, c.ConnectionsGiven, c.Getenv = o.connections.most(), o.connections <= 0,
		o.connections != 0, inv.environ
	c.Past, c.Scope = pastVersions, inv.environ(scopeEnv)
	return c, h, err
}

// host checks the flags of the cache directory, and reads the files that they name.
func (o *engineOptions) host(inv *invocation) (h engine.HostConfig, err error) {
	if h.Secret, err = o.secret(inv); err != nil {
		return h, err
	}
	if h.Audit, err = o.auditConfig(inv); err != nil {
		return h, err
	}
	if h.Logger, err = o.log.logger(inv); err != nil {
		return h, err
	}
	if h.Size, h.Memory, err = o.limits(inv); err != nil {
		return h, err
	}
	clear := ""
	switch {
	case h.Secret != nil:
		clear = "the cache is encrypted"
	case inv.environ(customerKeyVariable) != "":
		clear = "the objects are encrypted (SSE-C)"
	}
	err = o.cluster.check(inv, clear)
	h.Cluster, h.Log.Level, h.Coder = o.cluster.ClusterConfig, o.log.level, jpegCoder{}
	h.Cluster.Program = version
	h.Held = func() []string { return strings.Split(strings.Join(pastVersions(""), "/"), "/") } // the files of each
	h.Path, h.ResetOld, h.Searcher = o.cacheDir, o.resetOld, []string{"/proc/self/exe", searchVerb}
	return h, err
}

// cacheBase is the parent of the default cache directories.
func cacheBase() string {
	base, err := os.UserCacheDir()
	if err != nil {
		base = "/var/cache"
	}
	return filepath.Join(base, "shoal")
}

// resolveCacheDir gives every source a default folder of its own.
func (o *engineOptions) resolveCacheDir(inv *invocation, source string) error {
	if o.cacheDir == "" {
		sum := sha256.Sum256([]byte(inv.environ("AWS_ENDPOINT_URL_S3") + inv.environ("AWS_ENDPOINT_URL") +
			" " + source))
		o.cacheDir = filepath.Join(cacheBase(), hex.EncodeToString(sum[:6]))
	}
	_, err := inv.absAll(&o.cacheDir)
	return err
}

// openEngine opens a dataset and shows the progress of a long listing.
func openEngine(ctx context.Context, inv *invocation, h *engine.Host, cfg engine.Config) (*engine.Engine, error) {
	inv.logLimits(cfg.Logger)
	var listed atomic.Int64
	cfg.Progress = func(n int) { listed.Store(int64(n)) }
	telling, stop := context.WithCancel(ctx)
	var stopped sync.WaitGroup
	stopped.Go(func() {
		begun, told, silent := time.Now(), int64(0), 0
		for range pause.Every(telling, time.Second) {
			n := listed.Load()
			if silent++; n > told {
				told, silent = n, 0
				inv.Notice("listing %s: %s", cfg.Source, human.Count(n, "object"))
			} else if silent == 10 {
				silent = 0
				inv.Notice("opening %s: %.0f s so far, %s listed",
					cfg.Source, time.Since(begun).Seconds(), human.Count(n, "object"))
			}
		}
	})
	e, err := h.Open(ctx, cfg)
	stop()
	stopped.Wait()
	return e, wrongUse(err)
}

// cacheOutside fails if the cache directory is inside a folder where it must not be.
func (o *engineOptions) cacheOutside(folder, what, why string) error {
	if within(o.cacheDir, folder) {
		return cli.Usagef("the cache directory %s lies in %s %s and %s (give a --cache-dir outside of it)",
			o.cacheDir, what, folder, why)
	}
	return nil
}

// within reports whether a path is dir, or lies below it.
func within(path, dir string) bool { return inside(objstore.RealPath(path), objstore.RealPath(dir)) }

// inside is within, by the names alone.
func inside(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && rel != ".." && !strings.HasPrefix(rel, "../")
}

// limiter is shared by all loggers of the process, including those of attached verbs.
var limiter = logs.NewLimiter()

type logOptions struct{ level string }

func (o *logOptions) add(c *cobra.Command) {
	c.Flags().StringVar(&o.level, "log-level", "info", logs.Help)
}

// warnings is the log of a verb that is no daemon.
func warnings() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// logger returns the logger. In a process of its own it becomes slog's and the log package's default.
func (o *logOptions) logger(inv *invocation) (*slog.Logger, error) {
	level, asJSON, err := logs.Parse(o.level)
	if err != nil {
		return nil, cli.Usagef("--log-level: %w", err)
	}
	log := slog.New(daemon.Warner{Handler: limiter.New(os.Stderr, asJSON, level).Handler(), Voice: inv.Voice})
	if !inv.attached() {
		daemon.Outlive()
		slog.SetDefault(log)
		daemon.JSON.Store(asJSON)
	}
	return log, nil
}

// storeOptions is the flag of the object store (docs/s3.md), and its value.
type storeOptions struct {
	text  string
	value objstore.StoreOptions
}

// customerKeyVariable holds the SSE-C key of the objects, in base64 or hexadecimal digits.
const customerKeyVariable = "SHOAL_SSE_C_KEY"

func (o *storeOptions) add(c *cobra.Command) {
	c.Flags().Var(o, "store", "settings that few stores need, separated by commas: requester-pays; links-outside "+
		"(follow links out of a file:// source);\nweak-etag (accept objects without an ETag, by size and "+
		"time);\ngets-per-hour=N, the most GETs and HEADs in any hour: readers wait at the limit, prefetching before "+
		"it;\nget=0.0004/1000,list=0.005/1000,gb=0.09,currency=USD: prices, for reports")
}

func (o *storeOptions) String() string { return o.text }
func (o *storeOptions) Type() string   { return "string" }
func (o *storeOptions) Set(text string) (err error) {
	var v objstore.StoreOptions
	var prices []string
	text = strings.TrimPrefix(o.text+","+text, ",") // given again, it adds
	for word := range strings.SplitSeq(text, ",") {
		switch key, value, _ := strings.Cut(word, "="); {
		case word == "requester-pays":
			v.RequesterPays = true
		case word == "links-outside":
			v.LinksOutside = true
		case word == "weak-etag":
			v.WeakETag = true
		case key == "gets-per-hour":
			if v.GetsPerHour, err = strconv.ParseInt(value, 10, 64); err != nil ||
				v.GetsPerHour < objstore.LeastBudget {
				return fmt.Errorf("%q: give a number of at least %d", word, objstore.LeastBudget)
			}
		default:
			prices = append(prices, word)
		}
	}
	if v.Prices, err = objstore.ParsePrices(strings.Join(prices, ",")); err != nil {
		return fmt.Errorf("%w, or give requester-pays, links-outside, weak-etag or gets-per-hour=N", err)
	}
	*o = storeOptions{text, v}
	return nil
}

// addNear adds the flags of the near tier (docs/near.md).
func addNear(c *cobra.Command, near *engine.NearTier) {
	f := c.Flags()
	f.StringVar(&near.URL, "near", "", "s3://BUCKET/PREFIX of an S3 engine near the GPUs, shared by all nodes: read "+
		"first, and filled with what is read from SOURCE (docs/near.md)")
	f.StringVar(&near.Endpoint, "near-endpoint", "", "URL of the --near engine (default: SOURCE's endpoint)")
	f.StringVar(&near.Profile, "near-profile", "",
		"profile with the credentials of the --near engine (default: SOURCE's credentials)")
}

func checkNear(near engine.NearTier) error {
	at, err := objstore.ParseSource(near.URL)
	switch {
	case near == engine.NearTier{}:
	case near.URL == "":
		return cli.Usagef("--near-endpoint, --near-profile: give --near s3://BUCKET/PREFIX, too")
	case err != nil:
		return cli.Usagef("--near: %w", err)
	case at.Scheme != "s3" || at.Shards != "":
		return cli.Usagef("--near %s: give s3://BUCKET/PREFIX", at)
	}
	return nil
}

func (o *storeOptions) options(inv *invocation) (all objstore.StoreOptions, err error) {
	all = o.value
	all.CustomerKey, _, err = keyOf(inv, "", "", customerKeyVariable, objstore.ParseCustomerKey)
	return all, err
}

func printCost(row func(name, format string, args ...any), c engine.Cost) {
	row("requests", "%s", c)
	if b := c.Budget; b != nil {
		row("budget",
			"%s GETs an hour, %s free now; %d reads waiting, %d prefetches; readers waited %.1f s in %s waits",
			human.Number(b.PerHour), human.Number(b.Left), b.WaitingDemand, b.WaitingPrefetch, b.WaitSeconds,
			human.Number(b.Waits))
	}
}
