package main

import (
	"context"
	"io"
	"net"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/cache/shard"
	"github.com/shoalfs/shoal/lab/rig/hostile"
	"github.com/shoalfs/shoal/prefetch/engine"
)

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
