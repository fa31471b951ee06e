package ckpt

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/objstore"
)

// carryTo carries a folder to another one while then runs. It returns the error of the end.
func carryTo(t *testing.T, cfg Config, then func(*Client)) error {
	t.Helper()
	cfg.Last, cfg.Log, cfg.Drain = isLast, slog.New(slog.DiscardHandler), time.Millisecond
	c, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- c.Run(ctx, func() { close(ready) }) }()
	<-ready
	client, _, err := Find(cfg.Dir)
	if err != nil {
		t.Fatal(err)
	}
	then(client)
	stop()
	return errors.Join(<-ended, c.Close())
}

// toFolder is a destination that is a folder.
func toFolder(t *testing.T) (objstore.Layer, string) {
	t.Helper()
	dest := t.TempDir()
	store, err := objstore.NewDir(dest)
	if err != nil {
		t.Fatal(err)
	}
	return objstore.Retry(store, objstore.RetryPolicy{}), dest
}

func isWhole(t *testing.T, c *Client, path string) {
	t.Helper()
	until(t, path+" is there", func() bool {
		w, err := c.Wait(t.Context(), path, 1, true)
		if err != nil {
			t.Fatal(err)
		}
		return w.Whole
	})
}

// A new file with the inode, the size and the Mtime of one that has gone, as tar and cp -p make them, is not a rename of that.
func TestInodeOfAnother(t *testing.T) {
	store, dest := toFolder(t)
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	saved := time.Unix(1_000_000, 0)
	at := func(p string) string { return filepath.Join(dir, p) }
	inode := func(p string) uint64 {
		var st unix.Stat_t
		must(unix.Stat(at(p), &st))
		return st.Ino
	}
	err := carryTo(t, Config{Dir: dir, Store: store}, func(c *Client) {
		must(os.WriteFile(at("a"), []byte("old"), 0o600))
		must(os.Chtimes(at("a"), saved, saved))
		isWhole(t, c, "a")
		was := inode("a")
		must(os.Remove(at("a")))
		for n := 0; ; n++ {
			name := strings.Repeat("x", 1+n) + ".tmp"
			must(os.WriteFile(at(name), []byte("new"), 0o600))
			if inode(name) == was {
				must(os.Chtimes(at(name), saved, saved))
				must(os.Rename(at(name), at("b")))
				break
			} else if n == 200 {
				t.Skip("this file system gives no inode twice")
			}
		}
		isWhole(t, c, "b")
	})
	if b, rerr := os.ReadFile(filepath.Join(dest, "b")); err != nil || rerr != nil || string(b) != "new" {
		t.Errorf("%q, %v, %v", b, err, rerr)
	}
}
