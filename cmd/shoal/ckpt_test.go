package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/lab/rig/hostile"
)

// --store gets-per-hour holds for shoal ckpt as for other verbs.
func TestCkptBudget(t *testing.T) {
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !r.URL.Query().Has("list-type") {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		_, _ = io.WriteString(w, hostile.Page("", hostile.Entry("run/a", "1", `"a"`)))
	}))
	defer store.Close()
	for name, value := range map[string]string{"AWS_ENDPOINT_URL": store.URL, "AWS_REGION": "us-east-1",
		"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"} {
		t.Setenv(name, value)
	}
	var o ckptOptions
	if err := o.store.Set("gets-per-hour=60"); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	s, _, err := o.destination(t.Context(), &invocation{}, "s3://models/run", log, stores.Open)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	for range 2 { // one a minute
		_, err = s.Stat(ctx, "run/a")
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the second HEAD within a minute: %v", err)
	}
}

// Of DeepSpeed's steps, which only a latest beside them completes, the bucket can tell, and shoal ckpt latest says so.
func TestCkptLatestBesideSteps(t *testing.T) {
	dir := t.TempDir()
	home := filepath.Join(dir, folder.Home)
	if err := os.Mkdir(home, 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(home, folder.Socket))
	if err != nil {
		t.Fatal(err)
	}
	answer := make(chan string, 1)
	carrier := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"dir": "/run", "dest": "s3://b/run/", "checkpoints": [`+<-answer+"]}")
	})}
	go func() { _ = carrier.Serve(l) }()
	defer carrier.Close()
	for checkpoints, want := range map[string]string{
		"":                              "no folder in /run has a last name (see: shoal ckpt latest s3://b/run/)",
		`{"path": "1", "lacks": "1/a"}`: "no checkpoint of /run is complete in s3://b/run/ (see: shoal ckpt ls " + dir,
	} {
		answer <- checkpoints
		if _, err := shoal(t, "ckpt", "latest", dir); err == nil || !strings.Contains(err.Error(), want) {
			t.Error(err)
		}
	}
}
