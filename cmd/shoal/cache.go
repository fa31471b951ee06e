package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"text/tabwriter"
	"time"

	humanize "github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/settings"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/order"
)

type cacheFlags struct {
	dir   string
	crypt cryptOptions
	audit auditOptions
}

func cacheCommand() *cobra.Command {
	var cache cacheFlags
	c := &cobra.Command{
		Use:   "cache",
		Short: "Show and change what a cache directory holds",
		Long: `Lists and manages the datasets in a cache directory. It works while a daemon uses the directory, and without one.
The directory is the first argument, or --cache-dir. SOURCE is the source as it was mounted, or the first digits
of the id that ls shows.`,
		RunE: cli.RunVerbs,
	}
	cache.crypt.add(c.PersistentFlags())
	cache.audit.add(c.PersistentFlags())
	c.PersistentFlags().StringVar(&cache.dir, "cache-dir", "", "the cache directory, instead of the first argument")
	c.AddCommand(cacheLsCommand(&cache), cacheQuotaCommand(&cache), cacheRekeyCommand(&cache),
		cache.verb("rm", "Delete the cached data of a dataset that is not open", "", removeCached),
		cache.verb("pin", "Keep a dataset's cached data while it is not open, even when others need space",
			"", pinCached(true)),
		cache.verb("unpin", "Allow a dataset's cached data to be removed when others need space", "", pinCached(false)),
		cache.verb("verify", "Compare a dataset's cached data with the store, and drop what differs", `Compares a dataset's cached data with the store: with the ETag where it is the object's MD5, otherwise with the
object's bytes, which are fetched for that. What differs is dropped, and fetched again when it is read; the exit code is
then 1. shoal fsck checks the files of the cache themselves.`, verifyCached))
	return c
}

// dirAnd splits the arguments of a verb into the cache directory and n others.
func dirAnd(c *cobra.Command, dir *string, args []string, n int) (string, []string, error) {
	if len(args) > n && args[0] == "" { // a variable that is not set
		return "", nil, cli.Usagef("the CACHE-DIR is empty: give a folder %s", cli.SeeHelp(c))
	}
	// An argument overrides a standing setting.
	if *dir != "" && (given(c, "cache-dir") || len(args) != n+1) {
		args = append([]string{*dir}, args...)
	}
	if len(args) != n+1 {
		return "", nil, cli.ArgumentsError(c, args)
	}
	return args[0], args[1:], nil
}

// defaultDirs returns the cache directories of mounts without --cache-dir.
func defaultDirs() ([]string, error) {
	found, err := fs.Glob(os.DirFS(cacheBase()), "*/FORMAT")
	for i := range found {
		found[i] = filepath.Join(cacheBase(), filepath.Dir(found[i]))
	}
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("there is no cache directory under %s (name one: shoal cache ls CACHE-DIR)", cacheBase())
	}
	return found, err
}

// withCache runs do with the host of an existing cache directory.
func withCache(c *cobra.Command, cache *cacheFlags, dir string, do func(h *engine.Host, out io.Writer) error) error {
	inv := invocationOf(c.Context())
	dir, err := inv.abs(dir)
	if err != nil {
		return err
	}
	if err := cachedir.Is(dir); err != nil {
		return err
	}
	cfg := engine.HostConfig{Options: cachedir.Options{Path: dir, Size: 1 << 60, Memory: 256 << 20, Logger: warnings()}}
	if cfg.Secret, err = cache.crypt.secret(inv); err != nil {
		return err
	}
	if cfg.Audit, err = cache.audit.auditConfig(inv); err != nil {
		return err
	}
	return withHost(c, cfg, func(_ context.Context, h *engine.Host, out io.Writer) error { return do(h, out) })
}

// ids are the first digits of a dataset's id.
var ids = regexp.MustCompile(`^[0-9a-f]{4,32}$`)

// change changes what a cache directory keeps of a dataset, and records that in the audit log.
func (cache *cacheFlags) change(c *cobra.Command, dir, source string, e audit.Event,
	do func(ctx context.Context, h *engine.Host, d cachedir.Info, out io.Writer) error) error {
	inv := invocationOf(c.Context())
	if !ids.MatchString(source) { // a relative path is in the user's folder, not in the daemon's
		var err error
		if source, err = inv.source(source); err != nil {
			return err
		}
	}
	return withCache(c, cache, dir, func(h *engine.Host, out io.Writer) error {
		d, err := h.Find(source)
		if err != nil {
			return err
		}
		err = cachedir.WithRemedy(do(c.Context(), h, d, out), dir)
		e.Source, e.Peer = d.Source, inv.who()
		h.Audit().Write(outcome(e, err))
		return err
	})
}

// cacheEntry is a line of `cache ls --json`.
type cacheEntry struct {
	CacheDir string    `json:"cache_dir"`
	ID       string    `json:"id"`
	Source   string    `json:"source"`
	Version  string    `json:"version"`
	Files    int       `json:"files"`
	Bytes    int64     `json:"bytes"`
	Disk     int64     `json:"disk_bytes"`
	Quota    int64     `json:"quota"` // 0: none
	Pinned   bool      `json:"pinned"`
	Open     bool      `json:"open"`
	Users    int       `json:"users"` // mounts and feeds
	LastUsed time.Time `json:"last_used"`
}

func cacheLsCommand(cache *cacheFlags) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "ls [CACHE-DIR]",
		Short: "List the datasets in a cache directory, or in the default ones",
		Example: `  shoal cache ls /nvme/shoal
  shoal cache ls`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			dirs, err := defaultDirs()
			if len(args) > 0 || cache.dir != "" {
				dirs = make([]string, 1)
				dirs[0], _, err = dirAnd(c, &cache.dir, args, 0)
			} else if inv := invocationOf(c.Context()); inv.attached() { // each daemon is asked for its own
				dirs, err = []string{inv.host.Path()}, nil
			}
			if err != nil {
				return err
			}
			out, all, text := c.OutOrStdout(), []cacheEntry{}, new(bytes.Buffer)
			for _, d := range dirs {
				if asJSON {
					c.SetOut(text)
				} else if len(dirs) > 1 {
					fmt.Fprintln(out, d)
				}
				err = errors.Join(err, withCache(c, cache, d, func(h *engine.Host, out io.Writer) error {
					return listCache(h, out, asJSON)
				}))
			}
			for d, some := json.NewDecoder(text), all; d.Decode(&some) == nil; some = nil {
				all = append(all, some...)
			}
			if asJSON && (err == nil || len(all) > 0) {
				err = errors.Join(err, settings.WriteJSON(out, all))
			}
			return err
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func listCache(h *engine.Host, out io.Writer, asJSON bool) error {
	all, err := h.Datasets()
	if err != nil {
		return err
	}
	entries := []cacheEntry{}
	for _, d := range all {
		entries = append(entries, cacheEntry{h.Path(), hex.EncodeToString(d.ID[:]), d.Source, d.Version, d.Files,
			d.Bytes, d.DiskBytes, d.Quota, d.Pinned, d.Open, d.Users, d.LastUsed})
	}
	if asJSON {
		return settings.WriteJSON(out, entries)
	}
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "ID\tSOURCE\tFILES\tSIZE\tON DISK\tQUOTA\tSTATE\tLAST USED")
	for i, e := range entries {
		var state []string
		quota, used := "-", "now"
		if e.Open {
			state = append(state, "open")
		} else {
			used = humanize.Time(e.LastUsed)
		}
		if e.Pinned {
			state = append(state, "pinned")
		}
		if e.Quota > 0 {
			quota = human.Bytes(e.Quota)
		}
		fmt.Fprintf(w, "%.8s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", e.ID, all[i].Plain(), human.Number(e.Files),
			human.Bytes(e.Bytes), human.Bytes(e.Disk), quota, strings.Join(state, ","), used)
	}
	return w.Flush()
}

// verb is a verb that shows or changes what the directory keeps of a dataset.
func (cache *cacheFlags) verb(name, short, long string,
	do func(ctx context.Context, h *engine.Host, d cachedir.Info, out io.Writer) error) *cobra.Command {
	return &cobra.Command{
		Use:     name + " CACHE-DIR SOURCE",
		Short:   short,
		Long:    long,
		Example: "  shoal cache " + name + " /nvme/shoal s3://photos/train",
		Args:    cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			cacheDir, args, err := dirAnd(c, &cache.dir, args, 1)
			if err != nil {
				return err
			}
			return cache.change(c, cacheDir, args[0], audit.Event{Event: "cache_" + name}, do)
		},
	}
}

func removeCached(_ context.Context, h *engine.Host, d cachedir.Info, out io.Writer) error {
	err := h.Remove(d.ID)
	if err == nil {
		fmt.Fprintf(out, "removed %s of %s\n", human.Bytes(d.DiskBytes), titles.ReplaceAllString(d.Source, "$1$3"))
	}
	return err
}

func pinCached(pinned bool) func(context.Context, *engine.Host, cachedir.Info, io.Writer) error {
	return func(_ context.Context, h *engine.Host, d cachedir.Info, _ io.Writer) error {
		return h.Catalog.SetPinned(d.ID, pinned)
	}
}

func cacheQuotaCommand(cache *cacheFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "quota CACHE-DIR SOURCE SIZE|none",
		Short: "Limit the disk usage of a dataset",
		Example: `  shoal cache quota /nvme/shoal s3://photos/train 100GiB
  shoal cache quota /nvme/shoal s3://photos/train none`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			cacheDir, args, err := dirAnd(c, &cache.dir, args, 2)
			if err != nil {
				return err
			}
			var n cli.Size
			if args[1] != "none" {
				if err := n.Set(args[1]); err != nil {
					return cli.Usage(err)
				}
				if n < 16<<20 {
					return cli.Usagef("a quota of %s is too little to keep anything; give at least 16MiB, or none",
						n.String())
				}
			}
			return cache.change(c, cacheDir, args[0], audit.Event{Event: "cache_quota", Quota: int64(n)},
				func(_ context.Context, h *engine.Host, d cachedir.Info, _ io.Writer) error {
					return h.SetQuota(d.ID, int64(n))
				})
		},
	}
}

func cacheRekeyCommand(cache *cacheFlags) *cobra.Command {
	var newFile string
	c := &cobra.Command{
		Use:   "rekey CACHE-DIR --new-encryption-key-file FILE",
		Short: "Change the key of an encrypted cache directory",
		Long: `Makes the key in FILE the key of CACHE-DIR; the old key no longer opens it. This takes a moment, whatever the size
of the cache: the data is encrypted with the directory's own key, and only that key is encrypted again. Anyone who
had both the old key and a copy of CACHE-DIR/ENCRYPTION can still read the cached data. In that case remove the
directory and fill a new one.`,
		Example: "  shoal cache rekey /nvme/shoal --encryption-key-file old.key --new-encryption-key-file new.key",
		Args:    cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			cacheDir, _, err := dirAnd(c, &cache.dir, args, 0)
			if err != nil {
				return err
			}
			if newFile == "" {
				return cli.Usagef("give the new key: --new-encryption-key-file FILE")
			}
			inv := invocationOf(c.Context())
			s, _, err := keyOf(inv, "new-encryption-key-file", newFile, "", crypt.ParseSecret)
			if err != nil {
				return err
			}
			return withCache(c, cache, cacheDir, func(h *engine.Host, out io.Writer) error {
				err := h.Rekey(s)
				h.Audit().Write(outcome(audit.Event{Event: "cache_rekey", KeyID: s.ID(), Peer: inv.who()}, err))
				if err != nil {
					return err
				}
				fmt.Fprintf(out, "the key of %s is now %s\n", cacheDir, s.ID())
				return nil
			})
		},
	}
	c.Flags().StringVar(&newFile, "new-encryption-key-file", "",
		"file with the new key: 32 raw bytes, or hex or base64")
	return c
}

var none, _ = order.Parse("none")

// titles are what the catalog calls datasets: a source in a bucket, its endpoint, or another source, and what else
// engine.Config says: that it is rows, of which columns, and a scope.
var titles = regexp.MustCompile(
	`(?s)^(?:(s3://.*)\?endpoint=(\S*)|(\S*))( as csv(?: of (.*?))?)?(?: for ([0-9a-f]{16}))?$`)

func verifyCached(ctx context.Context, h *engine.Host, d cachedir.Info, out io.Writer) (err error) {
	defer func() {
		if err != nil && strings.Contains(err.Error(), "--store") { // of which this verb has none
			err = fmt.Errorf("%w; for that mount it with --store, and run this again meanwhile", err)
		}
	}()
	inv := invocationOf(ctx)
	e, ok := h.Use(d.ID)
	if !ok {
		title := titles.FindStringSubmatch(d.Source)
		if title == nil {
			return fmt.Errorf("%q was cached by a newer version: mount it with that, and run this again", d.Source)
		}
		endpoint, _ := url.QueryUnescape(title[2])
		cfg := engine.Config{Source: title[1] + title[3], Order: none, Samples: "*", Scope: title[6]}
		cfg.Getenv = func(name string) string {
			return cmp.Or(map[string]string{"AWS_ENDPOINT_URL_S3": endpoint}[name], inv.environ(name))
		}
		if title[5] != "" {
			cfg.Samples = engine.Rows + ":" + title[5] + ","
		} else if title[4] != "" {
			cfg.Samples = engine.Rows
		}
		if cfg.Store, err = new(storeOptions).options(inv); err != nil { // the key of objects under SSE-C
			return err
		}
		if e, err = openEngine(ctx, inv, h, cfg); err != nil {
			return err
		}
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	bar := inv.Step("verifying")
	r, err := e.Verify(ctx, func(done, total int) { bar.Set(done, total, "") })
	bar.Done(human.Count(r.Extents, "extent"))
	if err == nil && r.Unknown > 0 {
		err = fmt.Errorf("%s: %d of %s could not be compared: the store has other objects by now, or none (shoal "+
			"refresh follows it)", e.Source(), r.Unknown, human.Count(r.Extents, "extent"))
	}
	if r.Dropped > 0 {
		err = errors.Join(err, fmt.Errorf(
			"%s: %d of %s had other bytes than the store, and were dropped: they are fetched again when they are read",
			e.Source(), r.Dropped, human.Count(r.Extents, "extent")))
	}
	if err == nil {
		fmt.Fprintf(out, "%s of %s are as in the store; %s compared byte by byte\n", human.Count(r.Extents, "extent"),
			e.Source(), human.Number(r.Asked))
	}
	return err
}
