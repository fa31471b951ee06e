package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// s3Endpoint is a daemon that serves only S3.
type s3Endpoint struct {
	url, admin string
	env        []string // of its clients
}

// startS3 serves a source to who signs with a key that the origin does not know, or to anybody on this machine.
func startS3(t *testing.T, env []string, source string, signed bool, flags ...string) s3Endpoint {
	t.Helper()
	addr, admin := freePort(t), freePort(t)
	ep := s3Endpoint{url: "http://" + addr, admin: admin}
	ours := slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "AWS_") })
	ep.env = append(ours, "AWS_ENDPOINT_URL="+ep.url, "AWS_REGION="+s3server.Region,
		"AWS_DEFAULT_REGION="+s3server.Region,
		"AWS_ACCESS_KEY_ID=trainer", "AWS_SECRET_ACCESS_KEY=not-a-secret", "AWS_EC2_METADATA_DISABLED=true",
		"HOME="+t.TempDir())
	args := []string{"s3", source, "--listen", addr, "--admin", admin, "--cache-dir", t.TempDir()}
	if signed {
		keys := filepath.Join(t.TempDir(), "keys")
		write(t, keys, []byte("trainer not-a-secret\n"))
		args = append(args, "--s3-keys", keys)
	} else {
		args = append(args, "--s3-anonymous")
	}
	cmd := exec.Command(shoalBin, append(args, flags...)...)
	cmd.Env = append(os.Environ(), env...)
	p, err := subproc.Start("shoal s3", cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Stop(10 * time.Second) })
	within(t, patience, "the S3 endpoint serves", func() bool {
		resp, err := http.Get("http://" + admin + "/readyz") //nolint:noctx // of this machine
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return ep
}

type s3Stats struct {
	stats
	S3 struct{ Requests, Errors, Forwarded int64 }
}

func (ep s3Endpoint) stats(t *testing.T) (s s3Stats) {
	t.Helper()
	body, _, _ := bytes.Cut(fetchAll(t, "http://"+ep.admin+"/stats"), []byte("\nmap[")) // the headers
	if err := json.Unmarshal(body, &s); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return s
}

// client runs clients.py and decodes the last line that it prints.
func client(t *testing.T, env []string, into any, args ...string) {
	t.Helper()
	python := os.Getenv("SHOAL_CLIENTS")
	if s := strings.Join(args[:2], " "); strings.HasSuffix(s, " s3torchconnector") || strings.HasSuffix(s, " mds") ||
		strings.HasSuffix(s, " litdata") || args[0] == "job" {
		python += "-torch" // which has Debian's torch, and a numpy of its time
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(python, "bin/python"),
		append([]string{"clients.py"}, args...)...)
	var errs bytes.Buffer
	cmd.Env, cmd.Stderr = env, &errs
	out, err := cmd.Output()
	lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	if err == nil {
		err = json.Unmarshal(lines[len(lines)-1], into)
	}
	if err != nil {
		text := errs.String()
		t.Fatalf("%v: %v\n%s", args, err, text[max(0, len(text)-3000):])
	}
}

func needClients(t *testing.T) {
	t.Helper()
	if os.Getenv("SHOAL_CLIENTS") == "" {
		t.Skip("make conformance runs it")
	}
}

// hashes returns the digests of files, by key.
func hashes(t *testing.T, dir, prefix string, paths []string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, p := range paths {
		data, err := os.ReadFile(filepath.Join(dir, p))
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(data)
		all[prefix+p] = hex.EncodeToString(sum[:])
	}
	return all
}

// Clients of other makers read a dataset through the endpoint, whole, in ranges and by their listings, and nothing of
// it goes to the origin but the cache's own requests. What they write they read again at once. It prints a table,
// lab/bench/results/s3-clients.md.
func TestS3Clients(t *testing.T) {
	needClients(t)
	dir, paths := tree(t, 3, 12, 20<<10)
	rng := rand.NewChaCha8([32]byte{1})
	for p, n := range map[string]int{"large.bin": 18<<20 + 77, "odd/a b+c&d=e%20,;ü.bin": 1000, "odd/a-b/1": 10,
		"odd/a/1": 10, "odd/a0": 10, "empty": 0} {
		data := make([]byte, n)
		_, _ = rng.Read(data)
		write(t, filepath.Join(dir, p), data)
		paths = append(paths, p)
	}
	clients := []string{"boto3", "presigned", "awscli", "s3fs", "pyarrow", "rclone", "s3torchconnector"}
	for _, c := range clients {
		p := "held/" + c + ".bin"
		write(t, filepath.Join(dir, p), []byte("first"))
		paths = append(paths, p)
	}
	source := bucket(t, dir)
	name := bucketName(t)
	want := hashes(t, dir, "train/", paths)
	ep := startS3(t, s3server.Env(server.URL), source, true)
	// AWS's C library asks for part 1 of an empty object, twice here, since a range of it is refused. Parts are the
	// origin's.
	parts := map[string]int64{"s3torchconnector": 2}
	type row struct{ requests, forwarded, wrote, sent int64 }
	rows := map[string]*row{}
	for _, c := range clients {
		t.Run("read/"+c, func(t *testing.T) {
			before := ep.stats(t).S3
			var got map[string]string
			client(t, ep.env, &got, "read", c, name)
			after := ep.stats(t).S3
			if !maps.Equal(got, want) {
				t.Errorf("%d objects, the origin has %d, or their bytes differ", len(got), len(want))
			}
			rows[c] = &row{requests: after.Requests - before.Requests, forwarded: after.Forwarded - before.Forwarded}
			if most := parts[c] + int64(len(want)); rows[c].forwarded > most { // one HEAD of each object may
				t.Errorf("%d requests went to the origin, more than %d", rows[c].forwarded, most)
			}
		})
	}
	t.Run("read/unsigned", func(t *testing.T) {
		open := startS3(t, s3server.Env(server.URL), source, false)
		for _, c := range []string{"unsigned", "boto3"} {
			var got map[string]string
			client(t, open.env, &got, "read", c, name)
			if s := open.stats(t).S3; !maps.Equal(got, want) || s.Forwarded > int64(len(want)) {
				t.Errorf("%s: %d objects of %d, %d requests went to the origin", c, len(got), len(want), s.Forwarded)
			}
		}
	})
	origin, err := s3server.Client(server.URL, 4)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range clients {
		t.Run("write/"+c, func(t *testing.T) {
			before := ep.stats(t).S3
			var wrote map[string]string
			client(t, ep.env, &wrote, "write", c, name)
			after := ep.stats(t).S3
			if rows[c] != nil {
				rows[c].wrote, rows[c].sent = after.Requests-before.Requests, after.Forwarded-before.Forwarded
			}
			for key, sum := range wrote {
				h := sha256.New()
				if o, err := origin.GetObject(t.Context(), name, key, minio.GetObjectOptions{}); err != nil {
					t.Error(err)
				} else if _, err := io.Copy(h, o); err != nil || hex.EncodeToString(h.Sum(nil)) != sum {
					t.Errorf("the origin has other bytes in %s: %v", key, err)
				}
			}
		})
	}
	t.Run("write/minio-go", func(t *testing.T) {
		c := minioClient(t, ep)
		const key, text = "train/class00/img0000.jpg", "written"
		put := func(o minio.PutObjectOptions) error {
			_, err := c.PutObject(t.Context(), name, key, strings.NewReader(text), int64(len(text)), o)
			return err
		}
		if err := put(minio.PutObjectOptions{DisableContentSha256: true}); err != nil {
			t.Error(err)
		}
		if err := put(minio.PutObjectOptions{}); err != nil { // signed in chunks, over http
			t.Fatal(err)
		}
		o, err := c.GetObject(t.Context(), name, key, minio.GetObjectOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(o); err != nil || string(got) != text {
			t.Errorf("%d bytes, %v", len(got), err)
		}
		if err := c.RemoveObject(t.Context(), name, key, minio.RemoveObjectOptions{}); err != nil {
			t.Error(err)
		}
		if _, err := c.StatObject(t.Context(), name, key, minio.StatObjectOptions{}); minio.ToErrorResponse(
			err).StatusCode != http.StatusNotFound {
			t.Error(err)
		}
	})
	t.Run("read/after writes", func(t *testing.T) { // what nobody wrote is still answered here
		before := ep.stats(t).S3.Forwarded
		c := minioClient(t, ep)
		for _, p := range paths {
			if strings.HasPrefix(p, "held/") || p == "class00/img0000.jpg" {
				continue
			}
			o, err := c.GetObject(t.Context(), name, "train/"+p, minio.GetObjectOptions{})
			if err != nil {
				t.Fatal(err)
			}
			h := sha256.New()
			if _, err := io.Copy(h, o); err != nil || hex.EncodeToString(h.Sum(nil)) != want["train/"+p] {
				t.Errorf("%s: %v, or other bytes", p, err)
			}
		}
		if now := ep.stats(t).S3.Forwarded; now != before {
			t.Errorf("%d reads went to the origin", now-before)
		}
	})
	t.Log("\n| client | requests that read | to the origin | requests that write and read back | to the origin |\n| " +
		"--- | ---: | ---: | ---: | ---: |")
	for _, c := range clients {
		if r := rows[c]; r != nil {
			t.Logf("| %s | %d | %d | %d | %d |", c, r.requests, r.forwarded, r.wrote, r.sent)
		}
	}
}

func minioClient(t *testing.T, ep s3Endpoint) *minio.Client {
	t.Helper()
	c, err := minio.New(strings.TrimPrefix(ep.url, "http://"),
		&minio.Options{Creds: credentials.NewStaticV4("trainer", "not-a-secret", ""), Region: s3server.Region})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Datasets of other formats have the values through the endpoint that they have where they were written.
func TestS3Formats(t *testing.T) {
	needClients(t)
	dir := t.TempDir()
	for _, format := range []string{"parquet", "lance", "mds", "litdata"} {
		client(t, os.Environ(), new(string), "make", format, dir)
	}
	name := bucketName(t)
	if _, err := server.Upload(t.Context(), dir, name, "", nil); err != nil {
		t.Fatal(err)
	}
	ep := startS3(t, s3server.Env(server.URL), "s3://"+name, true)
	// pyarrow asks whether the folder is an object. What is no key of the dataset is asked of the origin.
	asked := map[string]int64{"parquet": 1}
	for _, format := range []string{"parquet", "parquet by duckdb", "lance", "mds", "litdata"} {
		t.Run(format, func(t *testing.T) {
			folder, _, _ := strings.Cut(format, " ")
			var local, got string
			client(t, os.Environ(), &local, "data", format, filepath.Join(dir, folder))
			before := ep.stats(t).S3
			client(t, ep.env, &got, "data", format, "s3://"+name+"/"+folder)
			after := ep.stats(t).S3
			if got != local {
				t.Errorf("other values than where they were written")
			}
			t.Logf("| %s | %d | %d |", format, after.Requests-before.Requests, after.Forwarded-before.Forwarded)
			if n := after.Forwarded - before.Forwarded; n != asked[format] {
				t.Errorf("%d requests went to the origin", n)
			}
		})
	}
}

// A DataLoader that reads objects with boto3, in the order of DistributedSampler, finds them there: the endpoint
// fetches ahead of it as a mount does. Ranges count as their object's.
func TestS3Order(t *testing.T) {
	needClients(t)
	dir, paths := tree(t, 4, 100, 48<<10)
	_, env := far(t, proxy.Options{Latency: 30 * time.Millisecond})
	source := bucket(t, dir)
	want := hashes(t, dir, "train/", paths)
	slices.Sort(paths)
	for _, how := range []string{"whole", "ranged"} {
		for _, spec := range []string{"torch:seed=7", "list", "none"} {
			t.Run(how+"/"+spec, func(t *testing.T) {
				order := spec
				if spec == "list" { // as a written plan
					list := filepath.Join(t.TempDir(), "order.txt")
					write(t, list, []byte(strings.Join(torchOrder(t, "torch:seed=7", paths), "\n")+"\n"))
					order = "list:" + list
				}
				ep := startS3(t, env, source, true, "--order", order)
				lead := 0
				done := make(chan struct{})
				watched := make(chan struct{})
				go func() {
					defer close(watched)
					for {
						select {
						case <-done:
							return
						case <-time.After(100 * time.Millisecond):
							lead = max(lead, ep.stats(t).Lead)
						}
					}
				}()
				var got map[string]string
				start := time.Now()
				func() {
					defer func() { close(done); <-watched }()
					client(t, ep.env, &got, "job", how, bucketNameOf(source), "7")
				}()
				took := time.Since(start)
				if !maps.Equal(got, want) {
					t.Errorf("%d objects of %d, or other bytes", len(got), len(want))
				}
				s := ep.stats(t)
				reads := s.Hits.Ring + s.Hits.Keep + s.Joined + s.Misses
				t.Logf("| %s, %s | %.1f s | %d | %d | %d | %d | %d | %d |", how, spec, took.Seconds(), s.S3.Requests,
					s.Opens, s.Hits.Ring+s.Hits.Keep, s.Joined, s.Misses, lead)
				if s.S3.Forwarded != 0 {
					t.Errorf("%d requests went to the origin", s.S3.Forwarded)
				}
				if hits := s.Hits.Ring + s.Hits.Keep; spec != "none" &&
					(hits*10 < reads*9 || lead < 8 || s.Order.Position != len(paths)) {
					t.Errorf("%d of %d reads found their bytes, lead %d, order %+v", hits, reads, lead, s.Order)
				}
				if s.Opens != int64(len(paths)) {
					t.Errorf("%d opens of %d objects", s.Opens, len(paths))
				}
			})
		}
	}
}

func bucketNameOf(source string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(source, "s3://"), "/")
	return name
}
