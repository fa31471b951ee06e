package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/cache/objstore/stores"
)

// Source is the object store to check. Its checks run one after the other; those that need the result of a failed one
// are skipped.
type Source struct {
	Text      string
	Getenv    func(name string) string // the AWS environment; nil: the process's own
	WeakETag  bool
	Anonymous bool
	// Forecast predicts the cost of an epoch from the measurements; nil: no forecast.
	Forecast func(ctx context.Context, f Facts) Result
	// LedgerFor returns the bytes that a daemon's memory leaves for samples beside the metadata of this many files;
	// nil: unknown.
	LedgerFor func(memory int64, files int) int64

	quick  bool
	memory int64
	resolv *net.Resolver

	store    objstore.Store
	s3       *s3.Store // nil for a folder
	where    objstore.Source
	facts    Facts
	objects  []objstore.Object // some of them
	reached  bool              // something answers at the endpoint
	admitted bool              // the bucket can be listed
	got      bool              // an object could be read
	signed   bool
	ahead
}

// ahead is what the store's answers say about this machine's clock.
type ahead struct {
	hasDate bool
	skew    time.Duration // how far this machine's clock is ahead of the store's
	within  time.Duration // uncertainty of skew
}

// Facts are the measurements of a source.
type Facts struct {
	Source      string
	Objects     int
	Bytes       int64
	Sizes       []int64 // of the objects that were listed, in key order
	Whole       bool    // all were listed
	Shards      bool    // they are tar shards
	Latency     time.Duration
	Sigma       float64 // of the latency's lognormal distribution, by its quartiles
	Bandwidth   float64 // bytes a second at the best number of connections
	Connections int     // worthwhile number of connections
	Requests    int64   // GETs sent by the checks
	Fetched     int64   // bytes fetched by them
}

// checks returns the source's checks.
func (s *Source) checks() []Check {
	if s.Getenv == nil {
		s.Getenv = os.Getenv
	}
	if s.resolv == nil {
		s.resolv = net.DefaultResolver
	}
	check := func(name string, takes time.Duration, skips func() string, run func(ctx context.Context) Result) Check {
		return Check{"source", name, takes, func(ctx context.Context) Result {
			if why := skips(); why != "" {
				return skipped("%s", why)
			}
			return run(ctx)
		}}
	}
	// The results of earlier checks that a check needs.
	answer := func() string { return s.needs(s.reached) }
	list := func() string { return s.needs(s.reached, s.admitted) }
	object := func() string { return s.needs(s.reached, s.admitted, s.got) }
	return []Check{
		check("name", 2*time.Second, func() string { return "" }, s.open), // it may request a role's credentials
		check("proxy", 0, s.remote, s.proxy),
		check("dns", 0, s.remote, s.dns),
		check("tcp", 0, s.remote, s.tcp),
		check("tls", 2*time.Second, s.remote, s.tls),
		check("endpoint", 2*time.Second, s.remote, s.endpoint),
		check("clock", 0, s.remote, s.clock),
		check("credentials", time.Second, s.remote, s.credentials),
		check("bucket", 2*time.Second, answer, s.bucket),
		check("listing", s.listWindow(), list, s.listing),
		check("get", 2*time.Second, list, s.get),
		check("range", 2*time.Second, s.remote, s.ranges),
		check("if-match", 2*time.Second, s.remote, s.ifMatch),
		check("latency", s.latencyWindow(), object, s.latency),
		check("bandwidth", 10*s.rungWindow(), object, s.bandwidth),
		check("memory", 0, list, s.fits),
		check("epoch", 2*time.Second, object, s.epoch),
	}
}

// explain converts a store's error to a result.
func explain(err error) Result {
	var e *objstore.Error
	if !errors.As(err, &e) {
		if errors.Is(err, context.DeadlineExceeded) {
			return Result{Status: Fail, Measured: "no answer in time", Meaning: "the store is down, unreachable, or very slow"}
		}
		return Result{Status: Fail, Measured: err.Error()}
	}
	return Result{Status: Fail, Measured: oneLine(e.Err.Error()), Meaning: e.Kind.String(), Remedy: e.Remedy}
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// open parses the name and the configuration.
func (s *Source) open(ctx context.Context) Result {
	// Links that lead out of a folder are checked by a mount, not here.
	store, where, err := stores.Open(ctx, s.Text, stores.Options{Getenv: s.Getenv, Store: objstore.StoreOptions{WeakETag: s.WeakETag, LinksOutside: true}, S3: s3.Config{Anonymous: s.Anonymous}})
	if err != nil {
		return explain(err)
	}
	s.store, s.where = store, where
	s.facts.Source = where.String()
	s.s3, _ = store.(*s3.Store)
	if s.s3 == nil {
		s.reached = true
		return ok("%s, a folder of this machine", where)
	}
	r := ok("%s at %s, region %s", where, where.Endpoint, cmp.Or(s.Getenv("AWS_REGION"), s.Getenv("AWS_DEFAULT_REGION"), "not set"))
	if strings.HasPrefix(where.Endpoint, "http://") && !local(where.Endpoint) {
		return r.because(Warn, "samples and signatures travel unencrypted", "AWS_ENDPOINT_URL=https://...")
	}
	return r
}

func (s *Source) credentials(ctx context.Context) Result {
	id := s.s3.Identity(ctx)
	if id.Anonymous {
		return ok("none: requests are not signed")
	}
	s.signed = true
	r := ok("from %s", credentialSource(s.Getenv, id))
	if id.Temporary {
		r.Measured += ", temporary"
	}
	if id.Expires.IsZero() {
		return r
	}
	left := time.Until(id.Expires)
	r.Measured += fmt.Sprintf(", until %s", id.Expires.UTC().Format(time.RFC3339))
	r = r.with("seconds_left", left.Seconds())
	switch {
	case left <= 0:
		return r.because(Fail, "they have expired", "get new ones (aws sso login, or the role's service)")
	case left < 10*time.Minute:
		return r.because(OK, "they are renewed automatically before they expire", "")
	}
	return r
}

// credentialSource names the source of credentials, in the order of lookup.
func credentialSource(getenv func(string) string, id s3.Identity) string {
	profile := cmp.Or(getenv("AWS_PROFILE"), "default")
	switch {
	case getenv("AWS_ACCESS_KEY_ID") != "" || getenv("AWS_ACCESS_KEY") != "":
		return "the environment (AWS_ACCESS_KEY_ID)"
	case id.Expires.IsZero():
		return "the profile " + profile + " of the shared files"
	case getenv("AWS_WEB_IDENTITY_TOKEN_FILE") != "":
		return "a web identity (AWS_WEB_IDENTITY_TOKEN_FILE), or the profile " + profile
	case getenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") != "" || getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI") != "":
		return "the container's role, or the profile " + profile
	}
	return "the profile " + profile + ", or the instance's role"
}

// needs returns why a check cannot run.
func (s *Source) needs(what ...bool) string {
	if s.store == nil {
		return "the source could not be opened"
	}
	words := []string{"the endpoint does not answer", "the bucket cannot be listed", "no object could be read"}
	for i, have := range what {
		if !have {
			return words[i]
		}
	}
	return ""
}

func (s *Source) bucket(ctx context.Context) Result {
	if err := s.store.Check(ctx); err != nil {
		return explain(err)
	}
	s.admitted = true
	if s.s3 == nil {
		return ok("%s can be read", s.where.Dir)
	}
	return ok("%s exists, and can be listed", s.where.Bucket)
}

const (
	listMost  = 200_000
	keepsMost = 20_000 // objects to read from
)

func (s *Source) listWindow() time.Duration {
	if s.quick {
		return time.Second
	}
	return 3 * time.Second
}

// listing lists for a limited time. Its rate is that of one listing; a mount lists prefixes in parallel.
func (s *Source) listing(ctx context.Context) Result {
	began, window := time.Now(), s.listWindow()
	shards := map[string]bool{}
	for _, k := range s.where.ShardKeys() {
		shards[k] = true
	}
	s.facts.Whole = true
	tars := 0
	for o, err := range s.store.List(ctx, s.where.Prefix) {
		if err != nil {
			r := explain(err)
			if strings.Contains(r.Measured, "ETag") {
				r.Remedy = "shoal mount --weak-etag, or upload the object again through the S3 API"
			}
			return r
		}
		if strings.HasSuffix(o.Key, "/") || len(shards) > 0 && !shards[o.Key] { // a folder, or not selected
			continue
		}
		s.facts.Objects++
		s.facts.Bytes += o.Size
		s.facts.Sizes = append(s.facts.Sizes, o.Size)
		if strings.HasSuffix(o.Key, ".tar") {
			tars++
		}
		// Reservoir sampling: each listed object has the same chance to be read.
		if len(s.objects) < keepsMost {
			s.objects = append(s.objects, o)
		} else if i := s.random(s.facts.Objects); i < keepsMost {
			s.objects[i] = o
		}
		if s.facts.Objects == listMost || time.Since(began) > window {
			s.facts.Whole = false
			break
		}
	}
	took := time.Since(began)
	s.facts.Shards = s.where.Shards != "" || tars > 0 && tars*2 >= s.facts.Objects-tars
	if s.facts.Objects == 0 {
		return ok("nothing at %s", s.where).because(Fail, "there is nothing to mount", "check the prefix and its case; list the bucket: aws s3 ls s3://"+s.where.Bucket+"/")
	}
	more := ""
	if !s.facts.Whole {
		more = "more than "
	}
	mean := s.facts.Bytes / int64(s.facts.Objects)
	perSecond := float64(s.facts.Objects) / max(took.Seconds(), 1e-6)
	r := ok("%s%s objects, %s, %s each; %s objects/s", more, humanize.Comma(int64(s.facts.Objects)), humanize.IBytes(uint64(s.facts.Bytes)), humanize.IBytes(uint64(mean)), count(perSecond)).
		with("objects", float64(s.facts.Objects)).with("bytes", float64(s.facts.Bytes)).with("objects_per_second", perSecond)
	if s.s3 != nil && mean < 256<<10 && s.facts.Objects >= 1000 && !s.facts.Shards {
		return r.because(OK, "many small objects: each costs a GET; packed into shards they cost a few large GETs", "shoal pack "+s.Text+" DEST, then shoal mount "+s.Text+" --shards DEST")
	}
	return r
}

func (s *Source) get(ctx context.Context) Result {
	o, found := s.sample(1)
	if !found {
		return skipped("there is no non-empty object")
	}
	p := make([]byte, min(o.Size, 64<<10))
	if err := s.read(ctx, o, p, 0); err != nil {
		r := explain(err)
		r.Measured = fmt.Sprintf("%q: %s", o.Key, r.Measured)
		return r
	}
	s.got = true
	return ok("read %s of %q; the store sends ETags", humanize.IBytes(uint64(len(p))), o.Key)
}

// probe requests an object directly, and reports why that fails.
func (s *Source) probe(ctx context.Context, header http.Header, least int64) (o objstore.Object, status int, answer http.Header, why string) {
	if why = s.needs(s.reached, s.admitted, s.got); why != "" {
		return o, 0, nil, why
	}
	o, found := s.sample(least)
	if !found {
		return o, 0, nil, fmt.Sprintf("there is no object of %d bytes or more", least)
	}
	status, answer, err := s.s3.Try(ctx, o.Key, header)
	s.facts.Requests++
	if err != nil {
		return o, 0, nil, "the request failed: " + oneLine(err.Error())
	}
	return o, status, answer, ""
}

func (s *Source) ranges(ctx context.Context) Result {
	o, status, answer, why := s.probe(ctx, http.Header{"Range": {"bytes=1-2"}}, 4)
	if why != "" {
		return skipped("%s", why)
	}
	want := fmt.Sprintf("bytes 1-2/%d", o.Size)
	switch {
	case status == http.StatusPartialContent && answer.Get("Content-Range") == want:
		return ok("honoured")
	case status == http.StatusOK:
		return ok("the whole object came instead of two bytes").because(Fail, "large files and shards cannot be read piece by piece", "use a store, and proxies in front of it, that serve Range requests")
	}
	return ok("HTTP %d, Content-Range %q", status, answer.Get("Content-Range")).because(Fail, "large files and shards cannot be read piece by piece", "use a store, and proxies in front of it, that serve Range requests")
}

func (s *Source) ifMatch(ctx context.Context) Result {
	_, status, _, why := s.probe(ctx, http.Header{"If-Match": {`"no object has this ETag"`}}, 1)
	if why != "" {
		return skipped("%s", why)
	}
	switch status {
	case http.StatusPreconditionFailed:
		return ok("honoured: another version is refused")
	case http.StatusOK:
		return ok("ignored: the object came although its ETag is another").because(Warn, "objects that change are noticed after their bytes have come instead of before; Shoal compares the ETag of each answer", "use a store, and proxies in front of it, that know If-Match")
	}
	return ok("HTTP %d where 412 is right", status).because(Warn, "what Shoal asks of this store is not what it knows", "use a store, and proxies in front of it, that know If-Match")
}
