package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/s3api"
)

// s3Options are the flags of the S3 endpoint.
type s3Options struct {
	addr      string
	flag      string // that sets addr
	keys      string
	anonymous bool
}

func (o *s3Options) add(f *pflag.FlagSet, flag, usage string) {
	o.flag = flag
	f.StringVar(&o.addr, flag, o.addr, usage)
	f.StringVar(&o.keys, "s3-keys", "", "file of who may use the S3 endpoint: lines of an access key, a space and its secret")
	f.BoolVar(&o.anonymous, "s3-anonymous", false, "serve the S3 endpoint on loopback without signatures: every user of this machine can use it")
}

// endpoint is an S3 endpoint of an engine. nil is none.
type endpoint struct {
	listener net.Listener
	keys     s3api.Keys
	server   atomic.Pointer[s3api.Server] // once it serves
}

// listen checks the flags and opens the address, if there is one.
func (o *s3Options) listen(inv *invocation) (*endpoint, error) {
	switch {
	case o.addr == "" && (o.keys != "" || o.anonymous):
		return nil, cli.Usagef("--s3-keys and --s3-anonymous: give the endpoint's address, too: --%s 127.0.0.1:9000", o.flag)
	case o.addr == "":
		return nil, nil
	case o.keys != "" && o.anonymous:
		return nil, cli.Usagef("--s3-keys and --s3-anonymous: give one of them")
	case o.keys == "" && !o.anonymous:
		return nil, cli.Usagef("--%s %s: say who may use the S3 endpoint: --s3-keys FILE (lines of an access key, a space and its secret), or --s3-anonymous on loopback", o.flag, o.addr)
	}
	ep := &endpoint{}
	if o.keys != "" {
		path, err := inv.abs(o.keys)
		if err != nil {
			return nil, err
		}
		f, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("--s3-keys: %w", err)
		}
		defer f.Close()
		if ep.keys, err = s3api.ParseKeys(f); err != nil {
			return nil, fmt.Errorf("--s3-keys %s: %w", path, err)
		}
	}
	var err error
	ep.listener, err = s3api.Listen(o.addr, ep.keys != nil)
	return ep, err
}

// open opens a dataset, and before the long part the address of its endpoint, so that a wrong one is reported at once.
func (o *engineOptions) open(ctx context.Context, inv *invocation, h *engine.Host, cfg engine.Config) (*engine.Engine, *endpoint, error) {
	ep, err := o.s3.listen(inv)
	if err != nil {
		return nil, nil, err
	}
	e, err := openEngine(ctx, inv, h, cfg)
	if err != nil {
		ep.stop()
		return nil, nil, err
	}
	return e, ep, nil
}

// serve begins to serve e, and adds its address to those to announce.
func (ep *endpoint) serve(inv *invocation, e *engine.Engine, log *audit.Log, where []string) ([]string, error) {
	if ep == nil {
		return where, nil
	}
	src, err := objstore.ParseSource(e.Source())
	if err != nil {
		return nil, err
	}
	o := s3api.Options{Bucket: src.Bucket, Origin: e.Source(), Keys: ep.keys, Log: e.Logger()}
	var origin s3api.Origin
	if s, ok := e.Origin(); ok {
		origin, o.Origin = s, s.Endpoint()
	} else {
		o.Bucket = bucketOf(src.Dir)
	}
	if origin == nil && e.Members() {
		return nil, fmt.Errorf("%s: an S3 endpoint serves objects as they are, and a folder of shards or tables is read directly (serve the folder of the files instead)", e.Source())
	}
	server := s3api.New(e, origin, o)
	ep.server.Store(server)
	go func() {
		if err := server.Serve(ep.listener); err != nil {
			o.Log.Error("the S3 endpoint ended", "cause", err)
		}
	}()
	url := "http://" + ep.listener.Addr().String()
	log.Write(audit.Event{Event: "serve", Source: e.Source(), Listen: []string{url}, Dataset: e.Manifest().Version(), Peer: inv.who()})
	o.Log.Info("S3 endpoint", "url", url, "bucket", o.Bucket, "signed", ep.keys != nil)
	return append([]string{"S3 endpoint: " + url + ", bucket " + o.Bucket}, where...), nil
}

// end lets running requests end until ctx does.
func (ep *endpoint) end(ctx context.Context) {
	if ep == nil {
		return
	}
	if s := ep.server.Load(); s != nil {
		s.Close(ctx)
	}
	_ = ep.listener.Close() // closed already, if it was served
}

// stop ends at once.
func (ep *endpoint) stop() {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	ep.end(ctx)
}

// stats returns the counters; nil without an endpoint that serves.
func (ep *endpoint) stats() *s3api.Stats {
	if ep == nil || ep.server.Load() == nil {
		return nil
	}
	s := ep.server.Load().Stats()
	return &s
}

// bucketOf names the bucket of a folder: its base name in the characters of bucket names.
func bucketOf(dir string) string {
	name := strings.Map(func(r rune) rune {
		if 'a' <= r && r <= 'z' || '0' <= r && r <= '9' || r == '.' {
			return r
		}
		return '-'
	}, strings.ToLower(filepath.Base(dir)))
	if name = strings.Trim(name[:min(len(name), 63)], ".-"); len(name) < 3 {
		return strings.Trim("shoal-"+name, "-")
	}
	return name
}

func s3Command() *cobra.Command {
	eo := engineOptions{s3: s3Options{addr: "127.0.0.1:9000"}}
	var mo mountOptions
	c := &cobra.Command{
		Use:   "s3 SOURCE",
		Short: "Serve a dataset as an S3 endpoint: programs read the bucket through the cache",
		Long: `Serves SOURCE at an S3 endpoint, with the bucket and the keys of the origin: programs that read S3 read through
the cache by setting AWS_ENDPOINT_URL. What the dataset does not hold, and writes, go to the origin
with this daemon's credentials (docs/s3-endpoint.md). mount and serve have the same endpoint: --s3.`,
		Example: `  shoal s3 s3://photos/train --s3-anonymous
  shoal s3 s3://photos/train --listen 0.0.0.0:9000 --s3-keys keys.txt --daemon`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			inv := invocationOf(c.Context())
			cfg, host, err := eo.config(inv, args[0])
			if err == nil {
				err = mo.drain.check()
			}
			if err != nil {
				return err
			}
			return asDaemon(c, &eo, &mo, "", nil, func() error {
				return withHost(c, host, func(ctx context.Context, h *engine.Host, _ io.Writer) error {
					return runS3(ctx, inv, h, cfg, &eo, &mo)
				})
			})
		},
	}
	eo.add(c)
	mo.drain.add(c)
	c.Flags().BoolVar(&mo.supervise, "supervise", false, "start again at once if the daemon dies")
	eo.s3.add(c.Flags(), "listen", "address of the S3 endpoint, HOST:PORT")
	return c
}

// runS3 serves until the context ends.
func runS3(ctx context.Context, inv *invocation, h *engine.Host, cfg engine.Config, eo *engineOptions, mo *mountOptions) (err error) {
	e, ep, err := eo.open(ctx, inv, h, cfg)
	if err != nil {
		return err
	}
	defer func() { ep.stop(); err = joinClose(err, e) }()
	var at phase
	where, stopAdmin, err := startAdmin(eo.admin, &at, cfg.Logger, e, func() admin.Snapshot { return admin.Snapshot{Stats: e.Stats(), S3: ep.stats()} })
	if err != nil {
		return err
	}
	defer stopAdmin()
	if where, err = ep.serve(inv, e, h.Audit(), where); err != nil {
		return err
	}
	at.set(up)
	inv.announce(eo.cacheDir, where...)
	orphan := inv.ready()
	if orphan == nil {
		<-ctx.Done()
	}
	at.set(ending)
	d := mo.drain.begin(cfg.Logger)
	ep.end(d.ctx)
	return errors.Join(orphan, d.end(nil))
}
