// Package admin is a daemon's HTTP server for operators and their tools, on an address of its own: counters, health,
// profiles. It only reads; nothing here changes what the daemon does.
//
//	GET /               the dashboard (docs/dashboard.md)
//	GET /stats          the counters as JSON (docs/stats.md)
//	GET /metrics        the counters for Prometheus (docs/metrics.md)
//	GET /api/verdict    whether the GPU waits, and for what, in words
//	GET /api/cachemap   which part of the dataset is where
//	GET /api/history    the counters of the last 15 minutes, one point a second
//	GET /healthz        200 while the process answers
//	GET /readyz         200 while the daemon serves, else 503 and the cause
//	GET /debug/pprof/   profiles of the process, if asked for
package admin

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strconv"
	"sync"

	"github.com/shoalfs/shoal/internal/admin/dashboard"
	"github.com/shoalfs/shoal/internal/findings"
	"github.com/shoalfs/shoal/internal/prom"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/s3api"
)

// Snapshot is the state that a daemon reports for one dataset.
type Snapshot struct {
	findings.Snapshot
	S3 *s3api.Stats `json:"s3,omitempty"` // nil without an S3 endpoint

	Shortcut string `json:"shortcut_v2,omitempty"` // key for reads round the mount, in the mount's own stats
}

// Options are a server's settings.
type Options struct {
	Version  string                          // of shoal
	Stats    func() Snapshot                 // within microseconds: it is called for each request
	Ready    func() error                    // why the daemon does not serve, or nil; within a second
	CacheMap func(cells int) engine.CacheMap // of at most that many cells, within milliseconds
	Profiles bool                            // of the process: they contain file names, and taking one costs time
	Log      *slog.Logger
}

type server struct {
	o    Options
	past history
}

// Listen serves at addr, HOST:PORT, until stop is called, which ends requests in progress, and waits for them. Without
// a host, or with a port alone, it listens on loopback. It returns the actual address.
func Listen(addr string, o Options) (at net.Addr, stop func(), err error) {
	s := &server{o: o}
	at, end, err := prom.Serve(local(addr), s.routes(), o.Log)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var keeping sync.WaitGroup
	keeping.Go(func() { s.past.keep(ctx, o.Stats) })
	return at, func() { end(); cancel(); keeping.Wait() }, nil
}

func local(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if _, e := net.LookupPort("tcp", addr); err != nil && e == nil { // a port alone
		port, err = addr, nil
	}
	if err == nil && host == "" {
		return net.JoinHostPort("127.0.0.1", port)
	}
	return addr
}

func (s *server) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /stats", s.stats)
	mux.Handle("GET /api/history", &s.past)
	prom.Handle(mux, Collector(s.o.Version, s.o.Stats))
	mux.HandleFunc("GET /api/verdict", s.past.verdict)
	mux.HandleFunc("GET /api/cachemap", s.cacheMap)
	mux.Handle("GET /", dashboard.Handler())
	mux.HandleFunc("GET /readyz", s.ready)
	if s.o.Profiles {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	} else {
		mux.HandleFunc("GET /debug/pprof/", func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "there are no profiles: start the daemon with SHOAL_PPROF=1", http.StatusNotFound)
		})
	}
	return sameHost(mux)
}

func (s *server) stats(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	_ = e.Encode(s.o.Stats()) // the client may be gone
}

func (s *server) ready(w http.ResponseWriter, _ *http.Request) {
	if err := s.o.Ready(); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	_, _ = io.WriteString(w, "ready\n")
}

// cacheMap answers GET /api/cachemap?cells=N: engine.CacheMap as JSON.
func (s *server) cacheMap(w http.ResponseWriter, r *http.Request) {
	cells := engine.MaxMapCells
	if text := r.URL.Query().Get("cells"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > engine.MaxMapCells {
			http.Error(w, "cells="+strconv.Quote(text)+": give a number from 1 to "+strconv.Itoa(engine.MaxMapCells),
				http.StatusBadRequest)
			return
		}
		cells = n
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.o.CacheMap(cells)) // the client may be gone
}

// sameHost refuses requests over loopback whose Host header names another host. Otherwise a web page whose name was
// pointed at this machine (DNS rebinding) could read the counters, since the browser sees one origin.
func sameHost(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if at, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok && at.IP.IsLoopback() &&
			!s3api.LoopbackName(r.Host) {
			http.Error(w, "the admin address on loopback serves localhost only (a proxy in front of it must send "+
				"Host: localhost)", http.StatusMisdirectedRequest)
			return
		}
		w.Header().Set("X-Content-Type-Options", "nosniff")
		next.ServeHTTP(w, r)
	})
}
