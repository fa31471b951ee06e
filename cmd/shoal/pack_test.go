package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/cache/shard"
	"github.com/shoalfs/shoal/lab/rig/hostile"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// In a folder of everybody's, files that another has made are no earlier run's.
func TestSpoolOfAnother(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("to give a folder away needs root")
	}
	t.Setenv("TMPDIR", t.TempDir())
	m, err := catalog.Build(func(yield func(objstore.Object, error) bool) {
		yield(objstore.Object{Key: "a.jpg", Size: 1, ETag: "e"}, nil)
	}, catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var dir string
	for range 2 { // the second goes on with the first's
		if dir, err = spoolFolder(os.TempDir(), m, "how"); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(dir, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	if _, err := spoolFolder(os.TempDir(), m, "how"); err == nil || !strings.Contains(err.Error(), "another user's") {
		t.Error(err)
	}
}

// Files that are recoded at a time take no more than a part of the memory, whatever their size.
func TestRecodingKeepsToItsMemory(t *testing.T) {
	m, err := catalog.Build(func(yield func(objstore.Object, error) bool) {
		for name, size := range []int64{1 << 20, 1 << 20, 9 << 20, 1 << 20, 1 << 20} {
			yield(objstore.Object{Key: strconv.Itoa(name), Size: size, ETag: "e"}, nil)
		}
	}, catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var now, files atomic.Int64
	err = recodeEach(t.Context(), m, m.Len(), 8<<20, func(_ context.Context, i int) (int64, error) {
		size := min(m.Size(i), 2<<20)
		if n := now.Add(size); n > 2<<20 {
			t.Errorf("%d bytes at a time", n)
		}
		time.Sleep(5 * time.Millisecond)
		now.Add(-size)
		files.Add(1)
		return 0, nil
	})
	if err != nil || files.Load() != int64(m.Len()) {
		t.Errorf("%d files, %v", files.Load(), err)
	}
}

// The memory that a pack demands is enough, also beside a near tier.
func TestPackDemandsEnoughMemory(t *testing.T) {
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("list-type") {
			_, _ = io.WriteString(w, hostile.Page("", hostile.Entry("train/0.jpg", "1", `"a"`)))
			return
		}
		http.Error(w, "<Error><Code>NoSuchKey</Code></Error>", http.StatusNotFound)
	}))
	defer store.Close()
	for name, value := range map[string]string{"AWS_ENDPOINT_URL": store.URL, "AWS_REGION": "us-east-1",
		"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"} {
		t.Setenv(name, value)
	}
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(-1))
	with := func(memory int64) string {
		o := shard.PackOptions{ShardSize: 1 << 20, Permute: engine.PackOrder(0), Memory: memory, Connections: 4}
		_, err := pack(t.Context(), "s3://photos/train", "file://"+t.TempDir()+"/set", stores.Options{},
			stores.Options{}, o, recoding{}, engine.NearTier{URL: "s3://tier/copies"})
		return fmt.Sprint(err) // in the end there is no such file
	}
	said := with(128 << 20)
	var least int64
	if _, err := fmt.Sscanf(said, "--memory is too little for 1 files (give at least %dMiB)", &least); err != nil {
		t.Fatalf("%s: %v", said, err)
	}
	if said := with(least << 20); strings.Contains(said, "--memory") {
		t.Errorf("with %d MiB: %s", least, said)
	}
}

// A pack fails when the first contact with its source has failed, and does not wait until the listing gives up.
func TestPackTellsOfASilentSource(t *testing.T) {
	env := map[string]string{"AWS_ENDPOINT_URL": "http://" + hostile.Listen(t, func(c net.Conn) {
		_, _ = io.Copy(io.Discard, c)
	}), "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
	from := stores.Options{Getenv: func(name string) string { return env[name] }}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := pack(ctx, "s3://photos/train", "file://"+t.TempDir()+"/set", from, stores.Options{},
		shard.PackOptions{Memory: debug.SetMemoryLimit(-1), Connections: 4}, recoding{}, engine.NearTier{})
	if err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), "AWS_ENDPOINT_URL") {
		t.Errorf("it says %v, %v", err, ctx.Err())
	}
}
