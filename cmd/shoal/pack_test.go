package main

import (
	"context"
	"io"
	"net"
	"os"
	"runtime/debug"
	"strings"
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
