package s3

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

type keySource func(ctx context.Context) (aws.Credentials, error)

// keyring holds the credentials of a store. It fetches new ones before they expire, and when the store refuses them:
// once for all refused requests, and without delaying others.
type keyring struct {
	name  string    // of the source, for the log
	fetch keySource // nil: they never change
	log   *slog.Logger
	now   func() time.Time
	ctx   context.Context    // of fetches: each serves more than its caller
	stop  context.CancelFunc // ends a running fetch

	cur      atomic.Pointer[heldKeys]
	accepted atomic.Bool // the store has accepted credentials once

	mu      sync.Mutex
	flight  chan struct{} // closed when the running fetch ends; nil without one
	pause   time.Time     // no fetch before
	doubts  time.Time     // no fetch for a doubt before this time
	quietAt time.Time     // no warning before
}

// reason is why new credentials are needed.
type reason string

const (
	reasonExpire  reason = "they are about to expire"
	reasonRefused reason = "the store refuses the old ones"
	// reasonDenied is a doubt: other credentials may be allowed access. If there are none, no warning is logged.
	reasonDenied reason = "the store denies access"
)

// heldKeys are credentials and when to fetch the next ones: from soon on in the background, from must on before a
// request. Both are zero for those that do not expire.
type heldKeys struct {
	value      aws.Credentials // without keys for anonymous requests
	before     aws.Credentials // those of the previous generation, which pending answers may contain
	generation uint64
	soon, must time.Time
}

const (
	// fetchTimeout bounds one fetch: STS answers within a second, a credential_process may start an
	// interpreter.
	fetchTimeout = time.Minute
	// fetchPause is the time between two fetches. It is short: a fetch is a file, an agent on this machine, or one
	// request to STS, and requests wait for it.
	fetchPause = time.Second
	// doubtPause is the time between two fetches for a doubt if the first brought new credentials: STS always has
	// some, and access that these are denied, too, stays denied.
	doubtPause = time.Minute
	// quiet is the time between two warnings.
	quiet = time.Minute
	// earlyShare of their life is left when credentials are renewed, at most earlyMost; requests wait for new ones
	// when a tenth of that is left.
	earlyShare = 0.2
	earlyMost  = 10 * time.Minute
	mustShare  = 0.1
)

// newKeyring returns a ring with fetched credentials. fetch is nil if they never change.
func newKeyring(name string, v aws.Credentials, fetch keySource, log *slog.Logger) *keyring {
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	k := &keyring{name: name, fetch: fetch, log: log, now: time.Now}
	k.ctx, k.stop = context.WithCancel(context.Background())
	k.hold(v, 1)
	return k
}

// fixedKeys returns a ring of credentials that never change.
func fixedKeys(v aws.Credentials) *keyring { return newKeyring("", v, nil, nil) }

func (k *keyring) hold(v aws.Credentials, generation uint64) {
	h := &heldKeys{value: v, generation: generation}
	if old := k.cur.Load(); old != nil {
		h.before = old.value
	}
	if v.CanExpire {
		early := min(time.Duration(earlyShare*float64(max(0, v.Expires.Sub(k.now())))), earlyMost)
		h.soon = v.Expires.Add(-early)
		h.must = v.Expires.Add(-time.Duration(mustShare * float64(early)))
	}
	k.cur.Store(h)
}

// generation counts the credentials so far. A refused request passes the generation in force when it began.
func (k *keyring) generation() uint64 { return k.cur.Load().generation }

// get returns credentials for a request. If no new ones are available it returns the old ones: the store decides, by
// its clock.
func (k *keyring) get(ctx context.Context) aws.Credentials {
	h := k.cur.Load()
	if k.fetch == nil || h.soon.IsZero() {
		return h.value
	}
	now := k.now()
	if now.Before(h.soon) {
		return h.value
	}
	over := k.begin(h.generation, reasonExpire)
	if !now.Before(h.must) {
		await(ctx, over)
	}
	return k.cur.Load().value // not h: a fetch may have replaced it
}

// refused handles the store's refusal of a request that began under a generation, and reports whether there are other
// credentials now. It waits for at most one fetch, shared by all refused requests.
func (k *keyring) refused(ctx context.Context, generation uint64, why reason) bool {
	if k.fetch != nil && k.generation() == generation {
		await(ctx, k.begin(generation, why))
	}
	return k.generation() != generation
}

// await returns at the end of a fetch, if there is one, or of ctx.
func await(ctx context.Context, over <-chan struct{}) {
	if over == nil {
		return
	}
	select {
	case <-over:
	case <-ctx.Done():
	}
}

func (k *keyring) accept() {
	if !k.accepted.Load() {
		k.accepted.Store(true)
	}
}

// begin starts a fetch, unless there are other credentials already, or joins the running one. It returns nil if it is
// too soon after the last fetch.
func (k *keyring) begin(generation uint64, why reason) (over <-chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.flight != nil:
		return k.flight
	case k.generation() != generation, k.now().Before(k.pause), why == reasonDenied && k.now().Before(k.doubts):
		return nil
	}
	k.flight = make(chan struct{})
	go k.renew(why)
	return k.flight
}

// renew is the running fetch.
func (k *keyring) renew(why reason) {
	ctx, cancel := context.WithTimeout(k.ctx, fetchTimeout)
	defer cancel()
	v, err := k.fetch(ctx)
	if err == nil && !v.HasKeys() {
		err = errors.New("none there")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	defer func() { close(k.flight); k.flight = nil }()
	h := k.cur.Load()
	old := h.value
	news := err == nil && (v.AccessKeyID != old.AccessKeyID || v.SecretAccessKey != old.SecretAccessKey ||
		v.SessionToken != old.SessionToken || v.CanExpire && v.Expires.After(old.Expires))
	now := k.now()
	k.pause = now.Add(fetchPause)
	if news {
		k.hold(v, h.generation+1)
		k.quietAt = time.Time{}
		if why == reasonDenied {
			k.doubts = now.Add(doubtPause)
		}
		attrs := []any{"from", k.name, "because", why}
		if v.CanExpire {
			attrs = append(attrs, "expire", v.Expires.UTC().Format(time.RFC3339))
		}
		k.log.Info("credentials renewed", attrs...)
		return
	}
	if now.Before(k.quietAt) || k.ctx.Err() != nil || why == reasonDenied && err == nil {
		return
	}
	k.quietAt = now.Add(quiet)
	if err == nil {
		err = errors.New("they are the same as before")
	}
	k.log.Warn("no new credentials", "from", k.name, "wanted_because", why, "cause", sourceError(err), "remedy",
		"renew them at their source; Shoal looks for them until then")
}

// chainLink lets minio-go use the credentials of a ring. minio-go asks for each request; the ring decides when to
// fetch.
type chainLink struct{ k *keyring }

func (l chainLink) RetrieveWithCredContext(cc *credentials.CredContext) (credentials.Value, error) {
	ctx := context.Background()
	if cc != nil && cc.Context != nil {
		ctx = cc.Context
	}
	keys := l.k.get(ctx)
	v := credentials.Value{AccessKeyID: keys.AccessKeyID, SecretAccessKey: keys.SecretAccessKey,
		SessionToken: keys.SessionToken, SignerType: credentials.SignatureV4}
	if !keys.HasKeys() {
		v.SignerType = credentials.SignatureAnonymous
	}
	return v, nil
}

func (l chainLink) Retrieve() (credentials.Value, error) { return l.RetrieveWithCredContext(nil) }

func (chainLink) IsExpired() bool { return true }
