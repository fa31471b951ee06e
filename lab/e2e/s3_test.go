package e2e

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// otherServer starts a server of the test's own with a bucket "data" that holds dir.
func otherServer(t *testing.T, o s3server.Options, dir string) (*s3server.Server, *minio.Client) {
	t.Helper()
	o.Dir = t.TempDir()
	srv, err := s3server.Start(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Stop)
	client, err := s3server.Client(srv.URL, 8)
	if err == nil {
		err = client.MakeBucket(context.Background(), "data", minio.MakeBucketOptions{})
	}
	if err == nil && o.Versioning {
		err = client.EnableVersioning(context.Background(), "data")
	}
	if err == nil {
		_, err = srv.Upload(context.Background(), dir, "data", "train", nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	return srv, client
}

// storeLog returns the warnings of a mount that hold a word.
func storeLog(t *testing.T, mnt, word string) (n int) {
	t.Helper()
	for _, e := range readStats(t, mnt).Errors {
		if strings.Contains(e.Text, word) {
			n++
		}
	}
	return n
}

// TestCredentialsReplaced: the account of the shared credentials file is replaced in mid-epoch, and its
// predecessor deleted: the trainer notices nothing.
func TestCredentialsReplaced(t *testing.T) {
	dir, paths := tree(t, 4, 50, 16<<10)
	srv, _ := otherServer(t, s3server.Options{Accounts: true}, dir)
	shared := filepath.Join(t.TempDir(), "credentials")
	account := func(id string) {
		t.Helper()
		if err := srv.Admin(context.Background(), "create-user", "--access", id, "--secret", "hush-"+id, "--role",
			"admin"); err != nil {
			t.Fatal(err)
		}
		write(t, shared+".new", []byte(fmt.Sprintf(
			"[default]\naws_access_key_id = %s\naws_secret_access_key = hush-%s\n", id, id)))
		if err := os.Rename(shared+".new", shared); err != nil {
			t.Fatal(err)
		}
	}
	account("first")
	env := []string{"AWS_ENDPOINT_URL=" + srv.URL, "AWS_REGION=" + s3server.Region,
		"AWS_SHARED_CREDENTIALS_FILE=" + shared, "AWS_ACCESS_KEY_ID=", "AWS_SECRET_ACCESS_KEY="}
	mnt := mount(t, env, "s3://data/train", "--order", "none", "--kernel-cache", "off")
	readAll(t, mnt, dir, paths[:100])
	account("second")
	if err := srv.Admin(context.Background(), "delete-user", "--access", "first"); err != nil {
		t.Fatal(err)
	}
	readAll(t, mnt, dir, paths)
	raw := mustShoal(t, nil, "stat", mnt, "--json")
	var s struct {
		Errors map[string]int64 `json:"store_errors"`
	}
	if err := json.Unmarshal([]byte(raw), &s); err != nil {
		t.Fatal(err)
	}
	if s.Errors["access denied"] != 0 || s.Errors["temporary failure"] == 0 {
		t.Errorf("errors of the store: %v", s.Errors)
	}
	if strings.Contains(raw, "hush") {
		t.Errorf("a secret is in the stats: %s", raw)
	}
	if n := storeLog(t, mnt, "no new credentials"); n != 0 {
		t.Errorf("%d warnings", n)
	}
}

// TestVersionedBucket: objects that are overwritten and deleted in mid-epoch are read as they were listed,
// and a refresh takes the new ones.
func TestVersionedBucket(t *testing.T) {
	dir, paths := tree(t, 2, 20, 8<<10)
	srv, client := otherServer(t, s3server.Options{Versioning: true}, dir)
	mnt := mount(t, s3server.Env(srv.URL), "s3://data/train", "--order", "none", "--kernel-cache", "off")
	readAll(t, mnt, dir, paths[:5])
	for i, p := range paths {
		_, err := client.PutObject(context.Background(), "data", "train/"+p, strings.NewReader("new"), 3,
			minio.PutObjectOptions{})
		if err == nil && i%3 == 0 {
			err = client.RemoveObject(context.Background(), "data", "train/"+p, minio.RemoveObjectOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	readAll(t, mnt, dir, paths)
	if storeLog(t, mnt, "overwritten or deleted") == 0 {
		t.Errorf("the stats do not say so: %+v", readStats(t, mnt).Errors)
	}
	mustShoal(t, s3server.Env(srv.URL), "refresh", mnt)
	if b, err := os.ReadFile(filepath.Join(mnt, paths[1])); err != nil || string(b) != "new" {
		t.Errorf("after the refresh: %.20q, %v", b, err)
	}
}

// TestBudgetAndCost: the store sees no more GETs and HEADs than gets-per-hour of --store, readers wait and are told,
// and what is reported is what the store has seen.
func TestBudgetAndCost(t *testing.T) {
	long(t)
	const prices = "get=0.0004/1000,head=1,list=5,put=0,gb=0.09,currency=EUR"
	dir, paths := tree(t, 2, 12, 8<<10) // the last four wait 12 s, which no machine's slowness makes up for
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	before, start := p.Stats(), time.Now()
	cache := t.TempDir()
	key := bytes.Repeat([]byte("hush"), 8)
	// The server verifies the signatures over the headers of SSE-C and requester-pays, and leaves them unread.
	mnt := mount(t, append(slices.Clip(env), "SHOAL_SSE_C_KEY="+base64.StdEncoding.EncodeToString(key)), source,
		"--cache-dir", cache, "--order", "none", "--kernel-cache", "off",
		"--store", "requester-pays,gets-per-hour=1200,"+prices) // 20, and some 20 a minute
	readAll(t, mnt, dir, paths[:10])
	slow := time.Since(start) > 3*time.Second // tokens come in meanwhile, and nobody need wait
	readAll(t, mnt, dir, paths)
	sent, took := p.Stats().Sub(before), time.Since(start)
	if most := 20 + 1180.0/3600*took.Seconds(); float64(sent.Gets+sent.Heads) > most+1 {
		t.Errorf("%d GETs and %d HEADs in %v: more than %.0f", sent.Gets, sent.Heads, took, most)
	}
	if sent.Gets < int64(len(paths)) {
		t.Errorf("%d GETs for %d files", sent.Gets, len(paths))
	}
	var s struct {
		Cost struct {
			Get, Head, List int64
			Received        int64 `json:"received_bytes"`
			Amount          float64
			Budget          *struct {
				PerHour int64 `json:"gets_per_hour"`
				Waits   int64
			}
		}
	}
	if err := json.Unmarshal([]byte(mustShoal(t, nil, "stat", mnt, "--json")), &s); err != nil {
		t.Fatal(err)
	}
	c := s.Cost
	hedged := readStats(t, mnt).Hedges.Sent > 0 // and one of two given up, wherever it was
	if c.Head != sent.Heads || c.List != sent.Lists || !hedged && (c.Get != sent.Gets || c.Received != sent.GetBytes) {
		t.Errorf("the stats say %+v, the store had %+v", c, sent)
	}
	if want := 0.0000004*float64(c.Get) + float64(c.Head) + 5*float64(c.List) + 0.09e-9*float64(c.Received); c.Amount-
		want > 1e-9 || want-c.Amount > 1e-9 {
		t.Errorf("%v EUR, want %v", c.Amount, want)
	}
	if c.Budget == nil || c.Budget.PerHour != 1200 || c.Budget.Waits == 0 && !slow {
		t.Errorf("budget %+v", c.Budget)
	}
	text := mustShoal(t, env, "stat", mnt)
	if !strings.Contains(text, " EUR") || !strings.Contains(text, "1,200 GETs an hour") ||
		storeLog(t, mnt, "budget of GETs is spent") == 0 && !slow {
		t.Errorf("shoal stat:\n%s", text)
	}
	raw := mustShoal(t, nil, "stat", mnt, "--json")
	umount(t, mnt)
	within(t, patience, "the daemon says what it cost", func() bool {
		log, err := os.ReadFile(filepath.Join(cache, "shoal.log"))
		for _, secret := range []string{string(key), base64.StdEncoding.EncodeToString(key)} {
			if strings.Contains(raw+string(log), secret) {
				t.Errorf("the key is in the stats or the log")
			}
		}
		return err == nil && strings.Contains(string(log), "requests to the object store") &&
			strings.Contains(string(log), " EUR")
	})
	out := mustShoal(t, env, "warm", source, "--cache-dir", t.TempDir(), "--store", prices)
	if !strings.Contains(out, " GETs") || !strings.Contains(out, " EUR") {
		t.Errorf("shoal warm:\n%s", out)
	}
	out = mustShoal(t, env, "pack", source, t.TempDir(), "--store", prices)
	// pack hedges nothing
	if !strings.Contains(out, fmt.Sprintf("%d GETs", len(paths))) || !strings.Contains(out, " EUR") {
		t.Errorf("shoal pack:\n%s", out)
	}
	for _, args := range [][]string{{"--store", "gets-per-hour=7"}, {"--store", "fetch=1"}, {"--store", "requester"}} {
		if _, errs, code := shoal(t, env,
			append([]string{"warm", source, "--cache-dir", t.TempDir()}, args...)...); code != 2 ||
			!strings.Contains(errs, args[0]) {
			t.Errorf("%v: exit %d, %s", args, code, errs)
		}
	}
	if _, errs, code := shoal(t, append(slices.Clip(env), "SHOAL_SSE_C_KEY=short"), "warm", source,
		"--cache-dir", t.TempDir()); code != 1 || !strings.Contains(errs, "SHOAL_SSE_C_KEY") {
		t.Errorf("no key: exit %d, %s", code, errs)
	}
}

// TestWeakETag: files that were put into a gateway's folder have no ETag in S3. With --store weak-etag they are mounted
// and packed, and a change is seen.
func TestWeakETag(t *testing.T) {
	dir, paths := tree(t, 2, 10, 8<<10)
	root := t.TempDir()
	srv, err := s3server.Start(context.Background(), s3server.Options{Dir: root})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Stop)
	client, err := s3server.Client(srv.URL, 8)
	if err == nil {
		err = client.MakeBucket(context.Background(), "data", minio.MakeBucketOptions{})
	}
	if err == nil {
		err = os.CopyFS(filepath.Join(root, "data", "data", "train"), os.DirFS(dir))
	}
	if err != nil {
		t.Fatal(err)
	}
	env, source, dest := s3server.Env(srv.URL), "s3://data/train", "s3://data/packed"
	if _, errs, code := shoal(t, env, "warm", source, "--cache-dir", t.TempDir()); code != 1 ||
		!strings.Contains(errs, "--store weak-etag") {
		t.Errorf("without --store weak-etag: exit %d, %s", code, errs)
	}
	mnt := mount(t, env, source, "--store", "weak-etag", "--order", "none", "--kernel-cache", "off")
	readAll(t, mnt, dir, paths[2:])
	mustShoal(t, env, "pack", source, dest, "--store", "weak-etag")
	packed := mount(t, env, dest)
	sameTree(t, packed, dir, paths)
	if a, b := readStats(t, mnt).Dataset, readStats(t, packed).Dataset; a != b {
		t.Errorf("version %s, packed %s", a, b)
	}
	// Another size, and as many bytes at another time.
	stored := func(i int) string { return filepath.Join(root, "data", "data", "train", paths[i]) }
	write(t, stored(0), []byte("another version"))
	if err := os.Chtimes(stored(1), time.Time{}, time.Now().Add(-time.Hour)); err != nil {
		t.Fatal(err)
	}
	for _, p := range paths[:2] {
		if _, err := os.ReadFile(filepath.Join(mnt, p)); !errors.Is(err, syscall.ESTALE) {
			t.Errorf("%s: %v, want ESTALE", p, err)
		}
	}
}

// TestStoreIgnoresVersions: a store that answers ?versions by listing objects, as if that were not there: what changed
// is ESTALE, and nothing is tried again.
func TestStoreIgnoresVersions(t *testing.T) {
	dir, paths := tree(t, 1, 4, 8<<10)
	source := bucket(t, dir)
	to, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int64
	forward := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(to)
		r.Out.Host = r.In.Host // it is signed
	}}
	p := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !r.URL.Query().Has("versions") {
			forward.ServeHTTP(w, r)
			return
		}
		asked.Add(1)
		fmt.Fprint(w, `<ListBucketResult><Name>b</Name><IsTruncated>true</IsTruncated><Contents><Key>a</Key><Size>1</Size></Contents></ListBucketResult>`)
	}))
	t.Cleanup(p.Close)
	mnt := mount(t, s3server.Env(p.URL), source, "--order", "none", "--kernel-cache", "off")
	write(t, filepath.Join(dir, paths[0]), []byte("another version"))
	if err := os.Remove(filepath.Join(dir, paths[1])); err != nil {
		t.Fatal(err)
	}
	upload(t, dir, bucketName(t))
	for _, p := range paths[:2] {
		if _, err := os.ReadFile(filepath.Join(mnt, p)); !errors.Is(err, syscall.ESTALE) {
			t.Errorf("%s: %v, want ESTALE", p, err)
		}
	}
	readAll(t, mnt, dir, paths[2:])
	var s struct {
		Errors map[string]int64 `json:"store_errors"`
	}
	decode(t, mustShoal(t, nil, "stat", mnt, "--json"), &s)
	if s.Errors["temporary failure"] != 0 || asked.Load() != 1 {
		t.Errorf("errors of the store: %v; asked %d times for versions", s.Errors, asked.Load())
	}
}
