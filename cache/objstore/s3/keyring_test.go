package s3

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
)

// testRing is a ring with a clock and a source of its own, whose fetches wait at the gate.
type testRing struct {
	*keyring
	clock   atomic.Int64
	fetches atomic.Int64
	gate    chan struct{}
	err     error
}

func newTestRing(t *testing.T, life time.Duration) *testRing {
	r := &testRing{gate: make(chan struct{})}
	r.clock.Store(time.Unix(1e9, 0).UnixNano())
	now := func() time.Time { return time.Unix(0, r.clock.Load()) }
	value := func() aws.Credentials {
		return aws.Credentials{AccessKeyID: fmt.Sprint("id", r.fetches.Load()), SecretAccessKey: "s", SessionToken: "t",
			CanExpire: true, Expires: now().Add(life)}
	}
	r.keyring = newKeyring("test", value(), nil, nil)
	t.Cleanup(r.stop)
	r.fetch = func(ctx context.Context) (aws.Credentials, error) {
		r.fetches.Add(1)
		<-r.gate
		return value(), r.err
	}
	r.now = now
	r.hold(value(), 1)
	return r
}

// settle waits for the fetch under way.
func (r *testRing) settle() {
	r.mu.Lock()
	over := r.flight
	r.mu.Unlock()
	if over != nil {
		<-over
	}
}

// TestKeysAreRenewedAhead: in the last fifth of their life beside the requests, at its end before them, by
// one fetch whatever asks.
func TestKeysAreRenewedAhead(t *testing.T) {
	r := newTestRing(t, time.Hour)
	id := func() string { return r.get(t.Context()).AccessKeyID }
	r.clock.Add(int64(49 * time.Minute))
	if got := id(); got != "id0" || r.fetches.Load() != 0 {
		t.Fatalf("early: %s after %d fetches", got, r.fetches.Load())
	}
	r.clock.Add(int64(2 * time.Minute)) // 9 minutes left
	for range 100 {
		if got := id(); got != "id0" {
			t.Fatalf("beside the fetch: %s", got)
		}
	}
	r.gate <- struct{}{}
	r.settle()
	if got := id(); got != "id1" || r.fetches.Load() != 1 {
		t.Fatalf("renewed: %s after %d fetches", got, r.fetches.Load())
	}

	r.clock.Add(int64(2 * time.Hour)) // nobody asked for long
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			if got := id(); got != "id2" {
				t.Errorf("after their end: %s", got)
			}
		})
	}
	r.gate <- struct{}{}
	wg.Wait()
	if n := r.fetches.Load(); n != 2 {
		t.Errorf("%d fetches", n)
	}
}

// TestKeysChangeMeanwhile: who has seen the old keys, over already, gets the ones that came before it could
// ask for them.
func TestKeysChangeMeanwhile(t *testing.T) {
	r := newTestRing(t, time.Hour)
	close(r.gate)
	now, inside := r.now, false
	r.now = func() time.Time {
		if !inside {
			inside = true
			if !r.refused(t.Context(), 1, reasonRefused) {
				t.Error("not renewed")
			}
		}
		return now()
	}
	r.clock.Add(int64(2 * time.Hour))
	if got := r.get(t.Context()).AccessKeyID; got != "id1" {
		t.Errorf("%s, which is over", got)
	}
}

// TestKeysThatCannotBeRenewed: the old ones are used on, the source is asked once a second, and a caller who
// gives up is let go.
func TestKeysThatCannotBeRenewed(t *testing.T) {
	r := newTestRing(t, time.Hour)
	r.err = errors.New("not now")
	close(r.gate)
	r.clock.Add(int64(2 * time.Hour))
	for range 3 {
		for range 10 {
			if got := r.get(t.Context()).AccessKeyID; got != "id0" {
				t.Fatalf("%s", got)
			}
			r.settle()
		}
		r.clock.Add(int64(fetchPause))
	}
	if n := r.fetches.Load(); n != 3 {
		t.Errorf("%d fetches in three seconds", n)
	}
	if r.refused(t.Context(), 1, reasonRefused) {
		t.Error("renewed")
	}
	r.gate = make(chan struct{})
	r.clock.Add(int64(time.Minute))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_ = r.get(ctx) // returns
	close(r.gate)
	r.settle()
}

// TestDeniedForGood: a source that always has new credentials is not asked again and again for what those
// are denied as well; what is refused by name is looked for once a second.
func TestDeniedForGood(t *testing.T) {
	r := newTestRing(t, time.Hour)
	close(r.gate)
	for range 100 {
		r.refused(t.Context(), r.generation(), reasonDenied)
	}
	if n := r.fetches.Load(); n != 1 {
		t.Errorf("%d fetches for what is denied", n)
	}
	r.clock.Add(int64(fetchPause))
	for range 100 {
		r.refused(t.Context(), r.generation(), reasonRefused)
	}
	if n := r.fetches.Load(); n != 2 {
		t.Errorf("%d fetches, one of them for what is refused", n)
	}
	r.clock.Add(int64(doubtPause))
	r.refused(t.Context(), r.generation(), reasonDenied)
	if n := r.fetches.Load(); n != 3 {
		t.Errorf("%d fetches after a minute", n)
	}
}

// elsewhere sends all requests to one server.
type elsewhere struct{ host string }

func (e elsewhere) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("X-Was-For", r.URL.Host)
	r.URL.Scheme, r.URL.Host = "http", e.host
	return http.DefaultTransport.RoundTrip(r)
}

// TestSSOPortal: a login of `aws sso login` is exchanged for the keys of the role.
func TestSSOPortal(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Was-For") != "portal.sso.eu-west-3.amazonaws.com" ||
			r.URL.Path != "/federation/credentials" ||
			r.Header.Get("X-Amz-Sso_bearer_token") != "token" || r.URL.Query().Get("role_name") != "reader" ||
			r.URL.Query().Get("account_id") != "1" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		fmt.Fprintf(w, `{"roleCredentials":{"accessKeyId":"id","secretAccessKey":"s","sessionToken":"t","expiration":%d}}`, time.Now().Add(time.Hour).UnixMilli())
	}))
	defer srv.Close()
	home := t.TempDir()
	t.Setenv("HOME", home)
	sum := sha1.Sum([]byte("corp"))
	write := func(path, text string) {
		t.Helper()
		path = filepath.Join(home, ".aws", path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700),
			os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write("config", "[profile dev]\nsso_session = corp\nsso_account_id = 1\nsso_role_name = reader\n[sso-session "+
		"corp]\nsso_region = eu-west-3\n")
	write("sso/cache/"+hex.EncodeToString(sum[:])+".json",
		fmt.Sprintf(`{"accessToken":"token","expiresAt":%q}`, time.Now().Add(time.Hour).UTC().Format(time.RFC3339)))
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"HOME": home, "AWS_PROFILE": "dev"}
	chain := &awsChain{getenv: func(name string) string {
		return env[name]
	}, client: &http.Client{Transport: elsewhere{u.Host}}}
	v, err := source(chain.ofProfile)(t.Context())
	if err != nil || v.AccessKeyID != "id" || v.SessionToken != "t" || time.Until(v.Expires) < 50*time.Minute {
		t.Errorf("%v until %v: %v", v.AccessKeyID, v.Expires, err)
	}
}

// TestContainerWithoutProxy: the agent of a container is of this machine, and its token is no proxy's business.
func TestContainerWithoutProxy(t *testing.T) {
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(w, `{"AccessKeyId":%q,"SecretAccessKey":"s","Token":"t","Expiration":%q}`,
			r.Header.Get("Authorization"), time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
	}))
	defer agent.Close()
	env := map[string]string{"AWS_CONTAINER_CREDENTIALS_FULL_URI": agent.URL,
		"AWS_CONTAINER_AUTHORIZATION_TOKEN": "agent"}
	proxied := &http.Transport{Proxy: func(*http.Request) (*url.URL, error) { return nil, errors.New("to a proxy") }}
	chain := &awsChain{getenv: func(name string) string { return env[name] },
		client: &http.Client{Transport: proxied, Timeout: 10 * time.Second},
		imds:   &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
	v, err := source(chain.container)(t.Context())
	if err != nil || v.AccessKeyID != "agent" {
		t.Errorf("%q, %v", v.AccessKeyID, err)
	}
}
