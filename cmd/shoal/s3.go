package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/s3api"
)

type s3Options struct {
	addr      string
	flag      string // that sets addr
	keys      string
	anonymous string // no, yes or write
	readOnly  bool
	limits    s3api.Limits
	tls       *loader.TLSFiles
}

const alsoS3 = "also serve an S3 endpoint at this address: HOST:PORT or https://HOST:PORT (docs/s3-endpoint.md)"

// add adds the flags. files are those of a verb that has them anyway; otherwise nil.
func (o *s3Options) add(f *pflag.FlagSet, flag, usage string, files *loader.TLSFiles) {
	o.flag, o.tls = flag, files
	f.StringVar(&o.addr, flag, o.addr, usage)
	f.StringVar(&o.keys, "s3-keys", "",
		"file with the keys of the S3 endpoint: lines of an access key, a space and its secret")
	addChoice(f, &o.anonymous, "s3-anonymous",
		"serve the S3 endpoint on loopback without signatures, for reading: every user of this machine can use "+
			"it;\n--s3-anonymous=write: and write, with this daemon's credentials", yes, no, "write")
	f.BoolVar(&o.readOnly, "s3-read-only", false, "refuse all writes to the bucket through the S3 endpoint")
	if files == nil {
		o.tls = &loader.TLSFiles{}
		f.StringVar(&o.tls.Cert, "tls-cert", "",
			"certificate for an https:// address of the S3 endpoint, PEM, with intermediates; reloaded when it changes")
		f.StringVar(&o.tls.Key, "tls-key", "", "key of --tls-cert, PEM")
	}
}

// s3Connections is how many connections to an endpoint there are at most, for all workers of a machine; beyond, the one
// that has been idle for longest makes room. The variable sets another number.
const s3Connections, s3ConnectionsEnv = 1024, "SHOAL_S3_CONNECTIONS"

// endpoint is a dataset's part of an S3 endpoint. nil is none.
type endpoint struct {
	*sharedEndpoint
	remove func(context.Context) // takes the dataset out; nil until it is served
	ended  sync.Once
}

// sharedEndpoint is an S3 endpoint of this process, which may serve several datasets.
type sharedEndpoint struct {
	options  s3Options
	listener net.Listener
	server   *s3api.Server
	serve    sync.Once
	users    int
}

// endpoints are those of this process by address: its verbs may share a cache directory, and an endpoint too.
var endpoints struct {
	sync.Mutex
	at map[string]*sharedEndpoint
}

// listen checks the flags and opens the address, if there is one that no other verb has opened.
func (o *s3Options) listen(inv *invocation, log *slog.Logger) (_ *endpoint, err error) {
	switch {
	case o.addr == "":
		return nil, nil
	case o.anonymous == "write" && o.readOnly:
		return nil, cli.Usagef("--s3-anonymous=write and --s3-read-only: give one of them")
	case o.keys != "" && o.anonymous != no:
		return nil, cli.Usagef("--s3-keys and --s3-anonymous: give one of them")
	case o.keys == "" && o.anonymous == no:
		return nil, cli.Usagef("--%s %s: say who may use the S3 endpoint: --s3-keys FILE (lines of an access key, a "+
			"space and its secret), or --s3-anonymous on loopback", o.flag, o.addr)
	}
	o.limits = s3api.Limits{ReadOnly: o.readOnly || o.anonymous == yes, Connections: s3Connections}
	if text := inv.environ(s3ConnectionsEnv); text != "" {
		if o.limits.Connections, err = strconv.Atoi(text); err != nil || o.limits.Connections < 1 {
			return nil, cli.Usagef("%s=%s: give a number of at least 1", s3ConnectionsEnv, text)
		}
	}
	if _, err := inv.absAll(&o.keys, &o.tls.Cert, &o.tls.Key); err != nil {
		return nil, err
	}
	endpoints.Lock()
	defer endpoints.Unlock()
	if shared := endpoints.at[o.addr]; shared != nil {
		if shared.options.keys != o.keys || *shared.options.tls != *o.tls || shared.options.limits != o.limits {
			return nil, fmt.Errorf("S3 endpoint %s: this daemon serves it already, with other settings: give the "+
				"same --s3-* flags, SHOAL_S3_CONNECTIONS, --tls-cert and --tls-key, or another address", o.addr)
		}
		shared.users++
		return &endpoint{sharedEndpoint: shared}, nil
	}
	shared, err := o.open(log)
	if err != nil {
		return nil, err
	}
	if endpoints.at == nil {
		endpoints.at = map[string]*sharedEndpoint{}
	}
	endpoints.at[o.addr] = shared
	return &endpoint{sharedEndpoint: shared}, nil
}

func (o *s3Options) open(log *slog.Logger) (_ *sharedEndpoint, err error) {
	var keys s3api.Keys
	if o.keys != "" {
		f, err := os.Open(o.keys)
		if err != nil {
			return nil, fmt.Errorf("--s3-keys: %w", err)
		}
		defer f.Close()
		if keys, err = s3api.ParseKeys(f); err != nil {
			return nil, fmt.Errorf("--s3-keys %s: %w", o.keys, err)
		}
	}
	addr, secure := strings.CutPrefix(o.addr, "https://")
	var config *tls.Config
	if secure {
		files := *o.tls
		files.Protocol = "http/1.1"
		if config, err = loader.ServerTLS(files, log); err != nil {
			return nil, wrongUse(fmt.Errorf("S3 endpoint %s: %w", o.addr, err))
		}
	}
	l, err := s3api.Listen(strings.TrimPrefix(addr, "http://"), keys != nil)
	if _, form := errors.AsType[*net.AddrError](err); form {
		return nil, cli.Usage(err)
	} else if err != nil {
		return nil, err
	}
	if secure {
		l = tls.NewListener(l, config)
	}
	return &sharedEndpoint{options: *o, listener: l, server: s3api.New(keys, o.limits, log), users: 1}, nil
}

// open opens a dataset, and before the long part the address of its endpoint, so that a wrong one is reported at once.
func (o *engineOptions) open(ctx context.Context, inv *invocation, h *engine.Host, cfg engine.Config) (
	*engine.Engine, *endpoint, error) {
	ep, err := o.s3.listen(inv, cfg.Logger)
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

// add begins to serve e, and adds the endpoint's address to those to announce.
func (ep *endpoint) add(inv *invocation, e *engine.Engine, events *audit.Log, where []string) ([]string, error) {
	if ep == nil {
		return where, nil
	}
	src, err := objstore.ParseSource(e.Source())
	if err != nil {
		return nil, err
	}
	set := s3api.Served{Dataset: e, Bucket: src.Bucket, Prefix: e.Manifest().Prefix(), Where: e.Source()}
	if s, ok := e.Origin(); ok {
		set.Origin, set.Where = s, s.Endpoint()
	} else {
		set.Bucket = bucketOf(src.Dir)
	}
	if set.Origin == nil && e.Members() {
		return nil, fmt.Errorf("%s: an S3 endpoint serves objects as they are, and a folder of shards or tables is "+
			"read directly (serve the folder of the files instead)", e.Source())
	}
	if ep.remove, err = ep.server.Add(set); err != nil {
		return nil, err
	}
	log := e.Logger()
	ep.serve.Do(func() {
		go func() {
			if err := ep.server.Serve(ep.listener); err != nil {
				log.Error("the S3 endpoint ended", "cause", err)
			}
		}()
	})
	url := "http://" + ep.listener.Addr().String()
	if strings.HasPrefix(ep.options.addr, "https://") {
		url = "https" + strings.TrimPrefix(url, "http")
	}
	events.Write(audit.Event{Event: "serve", Source: e.Source(), Listen: []string{url}, Dataset: e.Manifest().Version(),
		Peer: inv.who()})
	log.Info("S3 endpoint", "url", url, "bucket", set.Bucket, "signed", ep.options.keys != "")
	return append([]string{"S3 endpoint: " + url + ", bucket " + set.Bucket}, where...), nil
}

// end takes the dataset out, and ends the endpoint with its last one. Running requests may end until ctx does.
func (ep *endpoint) end(ctx context.Context) {
	if ep == nil {
		return
	}
	ep.ended.Do(func() {
		endpoints.Lock()
		ep.users--
		last := ep.users == 0
		if last {
			delete(endpoints.at, ep.options.addr)
		}
		endpoints.Unlock()
		if last {
			ep.server.Close(ctx)
			_ = ep.listener.Close() // closed already, if it was served
		}
		if ep.remove != nil {
			ep.remove(ctx)
		}
	})
}

func (ep *endpoint) stop() {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	ep.end(ctx)
}

func (ep *endpoint) stats() *s3api.Stats {
	if ep == nil {
		return nil
	}
	return new(ep.server.Stats())
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
	s := service{options: &eo}
	c := &cobra.Command{
		Use:   "s3 SOURCE",
		Short: "Serve a dataset as an S3 endpoint: programs read the bucket through the cache",
		Long: `Serves SOURCE at an S3 endpoint, with the bucket and the keys of the origin: programs that read S3 read through
the cache by setting AWS_ENDPOINT_URL. Writes, and requests for keys outside the dataset, go to the origin
with this daemon's credentials (docs/s3-endpoint.md). mount and serve have the same endpoint: --s3.`,
		Example: `  shoal s3 s3://photos/train --s3-anonymous
  shoal s3 s3://photos/train --listen 0.0.0.0:9000 --s3-keys keys.txt --daemon`,
		RunE: func(c *cobra.Command, args []string) error {
			return s.start(c, args[0], "")
		},
	}
	eo.add(c)
	eo.s3.add(c.Flags(), "listen", "address of the S3 endpoint: HOST:PORT or https://HOST:PORT", nil)
	return c
}
