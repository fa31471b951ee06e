package s3_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/lab/rig/memstore"
	"github.com/shoalfs/shoal/lab/rig/synced"
)

// keyedServer accepts only requests by the key that is valid now.
type keyedServer struct {
	S3Server
	valid   atomic.Pointer[string]
	code    string // what the others are answered
	status  int
	refused atomic.Int64
	served  atomic.Int64
	at      int64 // after so many answers …
	then    func()
	once    sync.Once
}

func newKeyed(t *testing.T, status int, code string) (*keyedServer, string) {
	k := &keyedServer{status: status, code: code}
	k.Bucket = "bucket"
	k.accept("first")
	k.Intercept = func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.Header.Get("Authorization"), "Credential="+*k.valid.Load()+"/") {
			k.refused.Add(1)
			if k.code == "" { // an answer without a body, as to HEAD
				w.WriteHeader(k.status)
				return true
			}
			WriteS3Error(w, k.status, k.code, "said of "+r.Header.Get("Authorization"))
			return true
		}
		if k.served.Add(1) >= k.at && k.at > 0 {
			k.once.Do(k.then)
		}
		return false
	}
	return k, k.Start(t)
}

func (k *keyedServer) accept(id string) { k.valid.Store(&id) }

func sharedFile(id string) string {
	return fmt.Sprintf(
		"[default]\naws_access_key_id = %s\naws_secret_access_key = hush-%s\naws_session_token = hush-token-%s\n",
		id, id, id)
}

// TestKeysRotate: credentials that are replaced in the middle of an epoch, wherever they come from and
// however the store says so, cost no read, no pause, one fetch and one line of the log.
func TestKeysRotate(t *testing.T) {
	dir := t.TempDir()
	agent := &awsServices{id: "first"}
	services := agent.start(t)
	shared := filepath.Join(dir, "credentials")
	token := filepath.Join(dir, "token")
	must(t, os.WriteFile(token, []byte("hush-web"), 0o600))
	for _, c := range []struct {
		name   string
		status int
		code   string
		env    map[string]string
		call   string // counted by the services; "" for a file
	}{
		{"file, ExpiredToken", 400, "ExpiredToken", map[string]string{"AWS_SHARED_CREDENTIALS_FILE": shared}, ""},
		{"file, InvalidAccessKeyId", 403,
			"InvalidAccessKeyId", map[string]string{"AWS_SHARED_CREDENTIALS_FILE": shared}, ""},
		{"file, AccessDenied", 403, "AccessDenied", map[string]string{"AWS_SHARED_CREDENTIALS_FILE": shared}, ""},
		{"file, nothing but 403", 403, "", map[string]string{"AWS_SHARED_CREDENTIALS_FILE": shared}, ""},
		{"file, nothing but 400", 400, "", map[string]string{"AWS_SHARED_CREDENTIALS_FILE": shared}, ""},
		{"web identity", 400, "ExpiredToken", map[string]string{"AWS_WEB_IDENTITY_TOKEN_FILE": token,
			"AWS_ROLE_ARN": "arn", "AWS_ENDPOINT_URL_STS": services}, "AssumeRoleWithWebIdentity"},
		{"Pod Identity", 400, "ExpiredToken", map[string]string{"AWS_CONTAINER_CREDENTIALS_FULL_URI": services +
			"/v1/credentials", "AWS_CONTAINER_AUTHORIZATION_TOKEN": "hush-agent"}, "container"},
		{"instance", 403, "InvalidAccessKeyId", map[string]string{"AWS_EC2_METADATA_SERVICE_ENDPOINT": services},
			"instance"},
	} {
		t.Run(c.name, func(t *testing.T) {
			must(t, os.WriteFile(shared, []byte(sharedFile("first")), 0o600))
			agent.set("first")
			before := agent.count(c.call)
			srv, endpoint := newKeyed(t, c.status, c.code)
			const objects, readers, rounds = 32, 16, 8
			var list []objstore.Object
			for i := range objects {
				key := fmt.Sprintf("o%02d", i)
				list = append(list, objstore.Object{Key: key, Size: 1000,
					ETag: srv.Put(key, bytes.Repeat([]byte{byte(i)}, 1000))})
			}
			srv.at = objects * rounds / 2 // in mid-epoch, with the readers' requests in flight
			srv.then = func() {
				if err := os.WriteFile(shared+".new", []byte(sharedFile("second")), 0o600); err != nil {
					t.Error(err)
				}
				if err := os.Rename(shared+".new", shared); err != nil {
					t.Error(err)
				}
				agent.set("second")
				srv.accept("second")
			}
			c.env["AWS_ENDPOINT_URL_S3"] = endpoint
			var log synced.Buffer
			store, _, err := stores.Open(t.Context(), "s3://bucket/", stores.Options{
				Getenv: func(name string) string { return c.env[name] },
				Logger: slog.New(slog.NewTextHandler(&log, nil)),
			})
			must(t, err)
			defer store.(*s3.Store).Close()
			var pauses atomic.Int64
			stack := objstore.Retry(objstore.Limit(objstore.NewMeter(store), readers), objstore.RetryPolicy{
				Sleep: func(context.Context, time.Duration) error { pauses.Add(1); return nil },
			})
			must(t, store.Check(t.Context()))
			var wg sync.WaitGroup
			for r := range readers {
				wg.Go(func() {
					p := make([]byte, 500)
					for i := range objects * rounds / readers {
						n := (r + i*readers) % objects
						o := list[n]
						if err := stack.ReadAt(t.Context(), o, p, 250); err != nil || p[0] != byte(n) {
							t.Errorf("%s: %v", o.Key, err)
						}
					}
				})
			}
			wg.Wait()
			if srv.refused.Load() == 0 {
				t.Error("no request was refused")
			}
			if n := pauses.Load(); n > 0 {
				t.Errorf("%d pauses", n)
			}
			if c.call != "" && agent.count(c.call)-before != 2 {
				t.Errorf("%d fetches, want one at start and one more", agent.count(c.call)-before)
			}
			if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "credentials renewed") ||
				strings.Contains(text, "hush") || strings.Contains(text, "first") || strings.Contains(text, "second") {
				t.Errorf("the log says %q", text)
			}
			// All other operations find the new ones too; HEAD and listings of a store with the old ones.
			_, err = stack.Stat(t.Context(), "o01")
			must(t, err)
			if got := memstore.Collect(t, stack.List(t.Context(), "", "")); len(got) != objects {
				t.Errorf("%d objects listed", len(got))
			}
		})
	}
}

// TestKeysRotateElsewhere: a listing, a HEAD, an upload and a deletion find the new credentials as well.
func TestKeysRotateElsewhere(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(ctx context.Context, r *objstore.Retrier) error
	}{
		{"list", func(ctx context.Context, r *objstore.Retrier) error {
			for _, err := range r.List(ctx, "", "") {
				return err
			}
			return nil
		}},
		{"stat", func(ctx context.Context, r *objstore.Retrier) error { _, err := r.Stat(ctx, "k"); return err }},
		{"put", func(ctx context.Context, r *objstore.Retrier) error {
			_, err := r.PutNew(ctx, "new", []byte("x"))
			return err
		}},
		{"delete", func(ctx context.Context, r *objstore.Retrier) error { return r.Delete(ctx, "k", "") }},
		{"upload", func(ctx context.Context, r *objstore.Retrier) error {
			u, err := r.Upload(ctx, "up", 6<<20, 6<<20)
			if err == nil {
				err = u.Part(ctx, 0, make([]byte, 6<<20))
			}
			if err == nil {
				_, err = u.Complete(ctx)
			}
			return err
		}},
		{"abort", func(ctx context.Context, r *objstore.Retrier) error {
			_, err := objstore.AbortUploads(ctx, r, "")
			return err
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			shared := filepath.Join(t.TempDir(), "credentials")
			must(t, os.WriteFile(shared, []byte(sharedFile("first")), 0o600))
			srv, endpoint := newKeyed(t, 400, "ExpiredToken")
			srv.Put("k", []byte("x"))
			env := map[string]string{"AWS_ENDPOINT_URL": endpoint, "AWS_SHARED_CREDENTIALS_FILE": shared}
			store, _, err := stores.Open(t.Context(), "s3://bucket/", stores.Options{Getenv: func(name string) string {
				return env[name]
			}})
			must(t, err)
			defer store.(*s3.Store).Close()
			must(t, os.WriteFile(shared, []byte(sharedFile("second")), 0o600))
			srv.accept("second")
			r := objstore.Retry(store, objstore.RetryPolicy{Sleep: func(context.Context, time.Duration) error {
				t.Error("a pause")
				return nil
			}})
			must(t, c.do(t.Context(), r))
			if srv.refused.Load() == 0 {
				t.Error("nothing was refused")
			}
		})
	}
}

// TestKeysRotateUnderForward: a request of somebody else that meets the end of the credentials is to be sent again, and
// then has the new ones. What is his own mistake he hears.
func TestKeysRotateUnderForward(t *testing.T) {
	for _, c := range []struct {
		status       int
		code, method string
		size         int
	}{
		{400, "ExpiredToken", http.MethodPut, 1}, {403, "InvalidAccessKeyId", http.MethodPut, 1 << 20},
		{403, "AccessDenied", http.MethodGet, 0}, {403, "", http.MethodHead, 0},
		{400, "", http.MethodHead, 0}, {400, "InvalidArgument", http.MethodPut, 1},
	} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			shared := filepath.Join(t.TempDir(), "credentials")
			must(t, os.WriteFile(shared, []byte(sharedFile("first")), 0o600))
			srv, endpoint := newKeyed(t, c.status, c.code)
			srv.Put("k", []byte("x"))
			env := map[string]string{"AWS_ENDPOINT_URL": endpoint, "AWS_SHARED_CREDENTIALS_FILE": shared}
			opened, _, err := stores.Open(t.Context(), "s3://bucket/", stores.Options{Getenv: func(name string) string {
				return env[name]
			}})
			must(t, err)
			store := opened.(*s3.Store)
			defer store.Close()
			forward := func() (status int, err error) {
				r := s3.Request{Method: c.method, Key: "k", Header: http.Header{}, Length: int64(c.size)}
				if c.size > 0 {
					r.Body = bytes.NewReader(make([]byte, c.size))
				}
				resp, err := store.Forward(t.Context(), r)
				if err != nil {
					return 0, err
				}
				return resp.StatusCode, resp.Body.Close()
			}
			must(t, os.WriteFile(shared, []byte(sharedFile("second")), 0o600))
			srv.accept("second")
			if c.code == "InvalidArgument" {
				if status, err := forward(); err != nil || status != c.status {
					t.Errorf("HTTP %d, %v", status, err)
				}
				return
			}
			if status, err := forward(); objstore.KindOf(err) != objstore.KindTransient {
				t.Errorf("at first: HTTP %d, %v", status, err)
			}
			if status, err := forward(); err != nil || status != http.StatusOK {
				t.Errorf("then: HTTP %d, %v", status, err)
			}
		})
	}
}

// TestKeysLate: new credentials that come after the old ones have ended are waited for, as a store that
// restarts is; if they never come the error says so, and when they do reads go on.
func TestKeysLate(t *testing.T) {
	shared := filepath.Join(t.TempDir(), "credentials")
	must(t, os.WriteFile(shared, []byte(sharedFile("first")), 0o600))
	srv, endpoint := newKeyed(t, 400, "ExpiredToken")
	o := objstore.Object{Key: "dir/k", Size: 4, ETag: srv.Put("dir/k", []byte("data"))}
	env := map[string]string{"AWS_ENDPOINT_URL": endpoint, "AWS_SHARED_CREDENTIALS_FILE": shared}
	var log synced.Buffer
	store, _, err := stores.Open(t.Context(), "s3://bucket/", stores.Options{
		Getenv: func(name string) string { return env[name] }, Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	must(t, err)
	defer store.(*s3.Store).Close()
	pauses := 0
	onPause := func() {}
	r := objstore.Retry(store, objstore.RetryPolicy{Tries: 1000, Rand: func() float64 {
		return 1
	}, Sleep: func(ctx context.Context, d time.Duration) error {
		if pauses++; pauses == 3 {
			onPause()
		}
		time.Sleep(min(d, 20*time.Millisecond)) // the ring fetches once a second
		return ctx.Err()
	}})
	p := make([]byte, 4)
	must(t, r.ReadAt(t.Context(), o, p, 0))

	srv.accept("second")
	onPause = func() { must(t, os.WriteFile(shared, []byte(sharedFile("second")), 0o600)) }
	must(t, r.ReadAt(t.Context(), o, p, 0))
	if pauses < 3 {
		t.Errorf("%d pauses", pauses)
	}

	srv.accept("third")
	few := objstore.Retry(store, objstore.RetryPolicy{Tries: 3, Sleep: func(context.Context, time.Duration) error {
		return nil
	}})
	err = few.ReadAt(t.Context(), o, p, 0)
	if objstore.KindOf(err) != objstore.KindTransient {
		t.Fatalf("without new ones: %v", err)
	}
	for _, want := range []string{"dir/k", "ExpiredToken", "gave up after 3 tries", "get new temporary credentials"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
	if text := err.Error() + log.String(); strings.Contains(text, "hush") || strings.Contains(text, "second") {
		t.Errorf("a key is in: %s", text)
	}
	// Once a rotation, however many requests ask. The source is asked a second after the last time.
	for deadline := time.Now().Add(time.Minute); strings.Count(log.String(), "no new credentials") < 2; time.Sleep(
		10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no warning: %s", log.String())
		}
		_ = few.ReadAt(t.Context(), o, p, 0)
	}
	if n := strings.Count(log.String(), "no new credentials"); n > 4 { // one a minute
		t.Errorf("%d warnings: %s", n, log.String())
	}
	must(t, os.WriteFile(shared, []byte(sharedFile("third")), 0o600))
	onPause, pauses = func() {}, 0
	must(t, r.ReadAt(t.Context(), o, p, 0))
}

// TestKeysWrongFromTheStart: keys that never worked are told at once, and those of the environment always.
func TestKeysWrongFromTheStart(t *testing.T) {
	shared := filepath.Join(t.TempDir(), "credentials")
	must(t, os.WriteFile(shared, []byte(sharedFile("wrong")), 0o600))
	srv, endpoint := newKeyed(t, 403, "InvalidAccessKeyId")
	o := objstore.Object{Key: "k", Size: 4, ETag: srv.Put("k", []byte("data"))}
	for name, env := range map[string]map[string]string{
		"file":        {"AWS_ENDPOINT_URL": endpoint, "AWS_SHARED_CREDENTIALS_FILE": shared},
		"environment": {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "first", "AWS_SECRET_ACCESS_KEY": "s"},
	} {
		t.Run(name, func(t *testing.T) {
			srv.accept("first")
			store, _, err := stores.Open(t.Context(), "s3://bucket/", stores.Options{Getenv: func(name string) string {
				return env[name]
			}})
			must(t, err)
			defer store.(*s3.Store).Close()
			if name == "environment" {
				must(t, store.Check(t.Context()))
			}
			srv.accept("other")
			r := objstore.Retry(store, objstore.RetryPolicy{Sleep: func(context.Context, time.Duration) error {
				t.Error("a pause")
				return nil
			}})
			if err := r.ReadAt(t.Context(), o, make([]byte, 4), 0); objstore.KindOf(err) != objstore.KindDenied {
				t.Errorf("error %v", err)
			}
		})
	}
}
