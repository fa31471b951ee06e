package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/minio/minio-go/v7/pkg/signer"

	"github.com/shoalfs/shoal/lab/rig/cputime"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

const s3Key, s3Secret = "trainer", "not-a-secret"

// s3Keys writes a key file.
func s3Keys(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	write(t, path, []byte("# who\n"+s3Key+" "+s3Secret+"\n"))
	return path
}

// s3Client reads an S3 endpoint.
func s3Client(t testing.TB, addr string) *minio.Client {
	t.Helper()
	c, err := minio.New(addr, &minio.Options{Creds: credentials.NewStaticV4(s3Key, s3Secret, ""), Region: "us-east-1"})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func get(t testing.TB, c *minio.Client, bucket, key string) []byte {
	t.Helper()
	o, err := c.GetObject(t.Context(), bucket, key, minio.GetObjectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	data, err := io.ReadAll(o)
	if err != nil {
		t.Fatalf("%s: %v", key, err)
	}
	return data
}

// Verbs that share a cache directory share an S3 endpoint: two datasets of two buckets at one address. An order makes
// it read ahead. The daemon is found by its cache directory, and stops.
func TestS3Endpoint(t *testing.T) {
	dir, paths := tree(t, 4, 50, 20<<10)
	one, other := bucket(t, dir), bucketName(t)+"-2"
	upload(t, dir, other)
	two := "s3://" + other + "/train"
	cache, keys, addr := t.TempDir(), s3Keys(t), freePort(t)
	env := s3server.Env(server.URL)
	flags := []string{"--cache-dir", cache, "--s3-keys", keys, "--daemon"}
	mustShoal(t, env, append([]string{"s3", one, "--listen", addr, "--order", "sequential"}, flags...)...)
	mustShoal(t, env, append([]string{"mount", two, t.TempDir(), "--s3", addr}, flags...)...)
	if _, errs, code := shoal(t, env, "s3", one, "--listen", addr, "--cache-dir", cache,
		"--s3-keys", s3Keys(t)); code != 1 || !strings.Contains(errs, "with other settings") {
		t.Errorf("another key file at the same address: exit %d, %s", code, errs)
	}
	c := s3Client(t, addr)
	if buckets, err := c.ListBuckets(t.Context()); err != nil || len(buckets) != 2 {
		t.Errorf("%v, %v", buckets, err)
	}
	for _, url := range []string{one, two} {
		name, prefix, _ := strings.Cut(strings.TrimPrefix(url, "s3://"), "/")
		for _, p := range paths {
			if want := content(t, filepath.Join(dir, p)); !bytes.Equal(get(t, c, name, prefix+"/"+p), want) {
				t.Fatalf("%s/%s has other bytes", url, p)
			}
		}
	}
	var s struct {
		stats
		Users int
		S3    struct{ Requests, Forwarded int64 }
	}
	if err := json.Unmarshal([]byte(mustShoal(t, nil, "stat", cache, "--json")), &s); err != nil {
		t.Fatal(err)
	}
	if s.Users != 2 || s.Opens != int64(len(paths)) || s.S3.Requests < 2*int64(len(paths)) || s.S3.Forwarded != 0 ||
		s.Misses > s.Reads/4 {
		t.Errorf("%+v", s)
	}
	name := strings.TrimSuffix(strings.TrimPrefix(one, "s3://"), "/train")
	if _, err := c.PutObject(t.Context(), name, "train/"+paths[0], strings.NewReader("new"), 3,
		minio.PutObjectOptions{}); err != nil {
		t.Fatal(err)
	}
	if out := mustShoal(t, nil, "refresh", cache); !strings.Contains(out, " -> ") ||
		!strings.Contains(out, "unchanged") {
		t.Errorf("refresh: %s", out)
	}
	if got := get(t, c, name, "train/"+paths[0]); string(got) != "new" {
		t.Errorf("%d bytes after the refresh", len(got))
	}
	if err := json.Unmarshal([]byte(mustShoal(t, nil, "stat", cache, "--json")), &s); err != nil ||
		s.S3.Forwarded != 1 {
		t.Errorf("%d requests to the origin, want the PUT (%v)", s.S3.Forwarded, err)
	}
	if _, errs, code := shoal(t, nil, "stop", cache); code != 1 || !strings.Contains(errs, "--all") {
		t.Errorf("stop: exit %d, %s", code, errs)
	}
	mustShoal(t, nil, "stop", cache, "--all")
	if _, err := net.DialTimeout("tcp", addr, time.Second); err == nil {
		t.Error("somebody still listens")
	}
}

// An empty bucket is served, whatever the order; so is one that is emptied, and the next daemon starts on it.
func TestS3EmptyBucket(t *testing.T) {
	if err := store(t).MakeBucket(t.Context(), bucketName(t), minio.MakeBucketOptions{}); err != nil {
		t.Fatal(err)
	}
	cache, addr, keys, env := t.TempDir(), freePort(t), s3Keys(t), s3server.Env(server.URL)
	serve := func(order string) {
		mustShoal(t, env, "s3", "s3://"+bucketName(t), "--listen", addr, "--cache-dir", cache, "--s3-keys", keys,
			"--order", order, "--samples", "*", "--daemon")
	}
	c := s3Client(t, addr)
	listed := func(want ...string) {
		t.Helper()
		var got []string
		for o := range c.ListObjects(t.Context(), bucketName(t), minio.ListObjectsOptions{Recursive: true}) {
			if o.Err != nil {
				t.Fatal(o.Err)
			}
			got = append(got, o.Key)
		}
		if !slices.Equal(got, want) {
			t.Errorf("listed: %q, want %q", got, want)
		}
	}
	for _, order := range []string{"sequential", "auto"} {
		serve(order)
		listed()
		if _, err := c.PutObject(t.Context(), bucketName(t), "a", strings.NewReader("text"), 4,
			minio.PutObjectOptions{}); err != nil {
			t.Fatal(err)
		}
		listed("a")
		mustShoal(t, nil, "refresh", cache)
		listed("a")
		if got := string(get(t, c, bucketName(t), "a")); got != "text" {
			t.Errorf("%q", got)
		}
		if err := c.RemoveObject(t.Context(), bucketName(t), "a", minio.RemoveObjectOptions{}); err != nil {
			t.Fatal(err)
		}
		mustShoal(t, nil, "refresh", cache)
		listed()
		mustShoal(t, nil, "stop", cache)
	}
	if _, errs, code := shoal(t, env, "mount", "s3://"+bucketName(t), t.TempDir(), "--cache-dir", cache); code != 1 ||
		!strings.Contains(errs, "check bucket and prefix") {
		t.Errorf("mount: exit %d, %s", code, errs)
	}
}

// BenchmarkS3Endpoint reads 2,000 files of 63 KB, warm, over eight connections with signed requests that were made
// before, from the endpoint and from the origin, and as a feed of raw samples. cpu-us/file is what the server works.
func BenchmarkS3Endpoint(b *testing.B) {
	dir, paths := tree(b, 10, 200, 63<<10)
	url, keys, addr := bucket(b, dir), s3Keys(b), freePort(b)
	feedAddr := "unix://" + filepath.Join(b.TempDir(), "feed.sock")
	cache := b.TempDir()
	env := s3server.Env(server.URL)
	d := inForeground(b, env, "serve", url, "--s3", addr, "--listen", feedAddr, "--cache-dir", cache, "--s3-keys", keys)
	d.says(b, "S3 endpoint")
	name, prefix, _ := strings.Cut(strings.TrimPrefix(url, "s3://"), "/")
	run := func(b *testing.B, pid int, read func()) {
		read()
		before, err := cputime.Process(pid)
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			read()
		}
		after, err := cputime.Process(pid)
		if err != nil {
			b.Fatal(err)
		}
		files := float64(b.N * len(paths))
		b.ReportMetric(1e6*(after-before)/files, "cpu-us/file")
		b.ReportMetric(files/b.Elapsed().Seconds(), "files/s")
	}
	gets := func(host, access, secret string) (all [][]byte) {
		for _, p := range paths {
			req, err := http.NewRequestWithContext(context.Background(), http.MethodGet,
				"http://"+host+"/"+name+"/"+prefix+"/"+p, nil)
			if err != nil {
				b.Fatal(err)
			}
			req.Header.Set("X-Amz-Content-Sha256", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
			var text bytes.Buffer
			if err := signer.SignV4(*req, access, secret, "", "us-east-1").Write(&text); err != nil {
				b.Fatal(err)
			}
			all = append(all, text.Bytes())
		}
		return all
	}
	ask := func(b *testing.B, host string, requests [][]byte) {
		var all sync.WaitGroup
		const conns = 8
		for k := range conns {
			all.Go(func() {
				conn, err := net.Dial("tcp", host)
				if err != nil {
					b.Error(err)
					return
				}
				defer conn.Close()
				in := bufio.NewReaderSize(conn, 128<<10)
				for i := k; i < len(requests); i += conns {
					_, err := conn.Write(requests[i])
					var resp *http.Response
					if err == nil {
						resp, err = http.ReadResponse(in, nil)
					}
					var n int64
					if err == nil {
						n, err = io.Copy(io.Discard, resp.Body)
					}
					if err != nil || resp.StatusCode != http.StatusOK || n != resp.ContentLength {
						b.Errorf("%d bytes, %v", n, err)
						return
					}
				}
			})
		}
		all.Wait()
	}
	b.Run("endpoint", func(b *testing.B) {
		requests := gets(addr, s3Key, s3Secret)
		run(b, d.cmd.Process.Pid, func() { ask(b, addr, requests) })
	})
	b.Run("origin", func(b *testing.B) {
		host := strings.TrimPrefix(server.URL, "http://")
		requests := gets(host, s3server.AccessKey, s3server.SecretKey)
		run(b, server.Pid(), func() { ask(b, host, requests) })
	})
	b.Run("feed", func(b *testing.B) {
		run(b, d.cmd.Process.Pid, func() {
			if r := feed(b, feedAddr, "--transform", "raw"); r.Samples != len(paths) {
				b.Fatal(fmt.Sprint(r))
			}
		})
	})
}
