package s3_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// filled starts a server with a bucket of n objects of 1,000 bytes, object i of bytes i+1.
func filled(t *testing.T, n int, o s3server.Options) (*s3server.Server, *minio.Client, []objstore.Object) {
	t.Helper()
	o.Dir = t.TempDir()
	srv, err := s3server.Start(t.Context(), o)
	must(t, err)
	t.Cleanup(srv.Stop)
	client, err := s3server.Client(srv.URL, 4)
	must(t, err)
	must(t, client.MakeBucket(t.Context(), bucket, minio.MakeBucketOptions{}))
	if o.Versioning {
		must(t, client.EnableVersioning(t.Context(), bucket))
	}
	var objects []objstore.Object
	for i := range n {
		key := fmt.Sprintf("train/o %02d", i)
		info, err := client.PutObject(t.Context(), bucket, key,
			bytes.NewReader(bytes.Repeat([]byte{byte(i + 1)}, 1000)), 1000, minio.PutObjectOptions{})
		must(t, err)
		objects = append(objects, objstore.Object{Key: key, Size: 1000, ETag: info.ETag})
	}
	return srv, client, objects
}

// readAll reads a part of each object, eight at a time, and calls inTheMiddle when half are read.
func readAll(t *testing.T, r objstore.Reader, objects []objstore.Object, inTheMiddle func() error) {
	t.Helper()
	var wg sync.WaitGroup
	var half sync.Once
	for w := range 8 {
		wg.Go(func() {
			p := make([]byte, 100)
			for i := w; i < len(objects); i += 8 {
				if i >= len(objects)/2 && inTheMiddle != nil {
					half.Do(func() {
						if err := inTheMiddle(); err != nil {
							t.Error(err)
						}
					})
				}
				if err := r.ReadAt(t.Context(), objects[i], p, 300); err != nil || p[50] != byte(i+1) {
					t.Errorf("%s: %v", objects[i].Key, err)
				}
			}
		})
	}
	wg.Wait()
}

// TestAccountReplaced: the server's account is replaced by another in mid-epoch, signatures verified: no
// read fails.
func TestAccountReplaced(t *testing.T) {
	srv, _, objects := filled(t, 64, s3server.Options{Accounts: true})
	shared := filepath.Join(t.TempDir(), "credentials")
	account := func(id string) error {
		if err := srv.Admin(t.Context(), "create-user", "--access", id, "--secret", "secret of "+id, "--role",
			"admin"); err != nil {
			return err
		}
		return os.WriteFile(shared,
			[]byte("[default]\naws_access_key_id = "+id+"\naws_secret_access_key = secret of "+id+"\n"), 0o600)
	}
	must(t, account("first"))
	env := map[string]string{"AWS_ENDPOINT_URL": srv.URL, "AWS_REGION": s3server.Region,
		"AWS_SHARED_CREDENTIALS_FILE": shared}
	store, _, err := stores.Open(t.Context(), "s3://"+bucket+"/train", stores.Options{Getenv: func(name string) string {
		return env[name]
	}})
	must(t, err)
	defer store.(*s3.Store).Close()
	meter := objstore.NewMeter(store)
	stack := objstore.Retry(meter, objstore.RetryPolicy{})
	readAll(t, stack, objects, func() error {
		return errors.Join(account("second"), srv.Admin(t.Context(), "delete-user", "--access", "first"))
	})
	if meter.Stats().Errors["temporary failure"] == 0 {
		t.Error("no request was refused")
	}
	_, err = stack.Stat(t.Context(), objects[0].Key)
	must(t, err)
}

// TestVersionsOfTheServer: objects that are overwritten and deleted in a versioned bucket in mid-epoch are
// read as they were listed.
func TestVersionsOfTheServer(t *testing.T) {
	_, client, objects := filled(t, 64, s3server.Options{Versioning: true})
	store := open(t, client.EndpointURL().String())
	stack := objstore.Retry(store, objstore.RetryPolicy{})
	readAll(t, stack, objects, func() error {
		for i, o := range objects {
			_, err := client.PutObject(t.Context(), bucket, o.Key, strings.NewReader("overwritten"), 11,
				minio.PutObjectOptions{})
			if err == nil && i%2 == 0 {
				err = client.RemoveObject(t.Context(), bucket, o.Key, minio.RemoveObjectOptions{})
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	readAll(t, stack, objects, nil)
}
