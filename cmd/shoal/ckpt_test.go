package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore/stores"
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
