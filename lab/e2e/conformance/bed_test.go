package conformance

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// bed is what a check works with: a bucket with a tree in it, and the binary.
type bed struct {
	*testing.T
	client *minio.Client
	env    []string
	shoal  string
	dir    string
	bucket string
	tree   map[string][]byte // what the bucket holds under train/, by path
	lost   []string          // names that the store does not keep as they are
	url    string
}

// names are those that a server may stumble over.
var names = []string{
	"a b.jpg", "a+b.jpg", "a&b=c.jpg", "50%.jpg", "%41.jpg", "späße ☃.jpg", "(1)[2]{3}.jpg", "q?x#y.jpg", "o'clock.jpg",
	`say "hi".jpg`,
	"a;b:c@d,e!f$g*h.jpg", "~tilde.jpg", "<tag>.jpg", "back\\slash.jpg", ".hidden", "noext", "x.tar.gz",
	"deep/er/and/deeper/leaf.jpg",
}

// bed makes a bucket of a check's own and a tree in it: small files, files of several MB, an empty one, odd names.
func (r *running) bed(t *testing.T, shoal, dir, check string) *bed {
	t.Helper()
	b := &bed{
		T: t, client: r.client, url: r.url, shoal: shoal, dir: filepath.Join(dir, check), bucket: "check-" + check,
		tree: make(map[string][]byte),
		// without the settings of who runs this
		env: append(os.Environ(), append(s3server.Env(r.url), "SHOAL_SETTLED=1")...),
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(b.dir, 0o755))
	must(b.client.MakeBucket(t.Context(), b.bucket, minio.MakeBucketOptions{Region: s3server.Region}))
	rng := rand.NewChaCha8([32]byte{'s', 'h', 'o', 'a', 'l'})
	file := func(path string, size int) error {
		data := make([]byte, size)
		_, _ = rng.Read(data) // never fails
		return b.put(path, data)
	}
	for i := range 60 {
		must(file(fmt.Sprintf("class%d/img%03d.jpg", i%3, i), 500+997*i))
	}
	for i := range 4 {
		must(file(fmt.Sprintf("large/%d.bin", i), 5<<20+i))
	}
	must(file("class0/empty.jpg", 0))
	for i, name := range names {
		if err := file("odd/"+name, 100+i); err != nil {
			b.lost = append(b.lost, name)
			delete(b.tree, "odd/"+name)
		}
	}
	must(b.reconcile())
	return b
}

// put stores a file of the tree.
func (b *bed) put(path string, data []byte) error {
	b.tree[path] = data
	_, err := b.client.PutObject(b.Context(), b.bucket, "train/"+path, bytes.NewReader(data), int64(len(data)),
		s3server.PutOptions())
	if err != nil {
		return fmt.Errorf("put %s: %w", path, err)
	}
	return nil
}

func (b *bed) remove(path string) error {
	delete(b.tree, path)
	return b.client.RemoveObject(b.Context(), b.bucket, "train/"+path, minio.RemoveObjectOptions{})
}

// reconcile takes odd names out that the store's own listing does not give back: it is asked through another client's
// code path, so what is missing there cannot be expected of Shoal.
func (b *bed) reconcile() error {
	objects, err := s3server.Objects(b.Context(), b.client, b.bucket, "train")
	if err != nil {
		return fmt.Errorf("list: %w", err)
	}
	listed := func(path string) bool { _, ok := objects["train/"+path]; return ok }
	for _, name := range names {
		if path := "odd/" + name; b.tree[path] != nil && !listed(path) {
			b.lost = append(b.lost, name)
			if err := b.remove(path); err != nil {
				return err
			}
		}
	}
	for path := range b.tree {
		if !listed(path) {
			return fmt.Errorf("the store's listing lacks %s", path)
		}
	}
	return nil
}

// verb runs a verb to its end.
func (b *bed) verb(args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(b.shoal, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = b.env, &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("shoal %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// mount mounts source until the check's end.
func (b *bed) mount(source, name string, flags ...string) (mnt string, err error) {
	mnt = filepath.Join(b.dir, name)
	if err := os.MkdirAll(mnt, 0o755); err != nil {
		return "", err
	}
	args := []string{"mount", source, mnt, "--daemon", "--cache-dir", mnt + "-cache", "--kernel-cache", "off",
		"--order", "none"}
	if _, err := b.verb(append(args, flags...)...); err != nil {
		return "", err
	}
	b.Cleanup(func() {
		if _, err := b.verb("umount", mnt); err != nil {
			b.Error(err)
		}
	})
	return mnt, nil
}

func (b *bed) source() string { return "s3://" + b.bucket + "/train" }

// compare walks a mount and compares names and bytes with the tree.
func (b *bed) compare(mnt string) error {
	seen := 0
	err := filepath.WalkDir(mnt, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			if d != nil && d.Name() == ".shoal" {
				return filepath.SkipDir
			}
			return err
		}
		rel, err := filepath.Rel(mnt, p)
		if err != nil {
			return err
		}
		want, ok := b.tree[rel]
		if !ok {
			return fmt.Errorf("the mount shows %q, which was not stored", rel)
		}
		got, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		if !bytes.Equal(got, want) {
			return fmt.Errorf("%q: %d bytes that are not the %d stored", rel, len(got), len(want))
		}
		seen++
		return nil
	})
	if err == nil && seen != len(b.tree) {
		err = fmt.Errorf("the mount shows %d files of %d", seen, len(b.tree))
	}
	return err
}

// staleAtOnce wants ESTALE of a file that changed, without the minutes of a store that fails.
func staleAtOnce(path string) error {
	start := time.Now()
	data, err := os.ReadFile(path)
	switch took := time.Since(start); {
	case err == nil:
		return fmt.Errorf("%s changed in the store, and %d bytes were read", path, len(data))
	case !errors.Is(err, syscall.ESTALE):
		return fmt.Errorf("%w, want ESTALE", err)
	case took > atOnce:
		return fmt.Errorf("%s: ESTALE only after %v", path, took)
	}
	return nil
}

// atOnce is far above what an answer takes, and far below what retries do.
const atOnce = 20 * time.Second

// version returns the dataset version of a mount.
func (b *bed) version(mnt string) (string, error) {
	text, err := b.verb("stat", mnt, "--json")
	var s struct{ Dataset string }
	if err == nil {
		err = json.Unmarshal([]byte(text), &s)
	}
	return s.Dataset, err
}

var etagElement = regexp.MustCompile(`<ETag>[^<]*</ETag>`)

// withoutETags puts a proxy before the store that takes the ETags out of its answers, as gateways to other kinds of
// storage have none.
func (b *bed) withoutETags() error {
	to, err := url.Parse(b.url)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	p := &http.Server{Handler: &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			r.Out.Host = r.In.Host // it is signed
		},
		ModifyResponse: func(r *http.Response) error {
			r.Header.Del("ETag")
			if !r.Request.URL.Query().Has("list-type") && !r.Request.URL.Query().Has("versions") {
				return nil
			}
			var body bytes.Buffer
			if _, err := body.ReadFrom(r.Body); err != nil {
				return err
			}
			_ = r.Body.Close()
			text := etagElement.ReplaceAll(body.Bytes(), nil)
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
			r.Header.Set("Content-Length", fmt.Sprint(len(text)))
			return nil
		},
	}}
	go func() { _ = p.Serve(l) }() // until it is closed
	b.Cleanup(func() { _ = p.Close() })
	b.env = append(b.env, s3server.Env("http://"+l.Addr().String())...)
	return nil
}
