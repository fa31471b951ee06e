package main

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"

	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// pprofEnv, if set, makes --admin serve profiles: for developers, and not for all who may see the dashboard. drainEnv is drainTime.
const pprofEnv, drainEnv = "SHOAL_PPROF", "SHOAL_DRAIN_TIMEOUT"

// startAdmin serves the admin address, if there is one, until the returned function is called. It returns the address for
// announce. at is the daemon's current phase.
func startAdmin(addr string, at *phase, log *slog.Logger, e *engine.Engine, stats func() admin.Snapshot) (where []string, stop func(), err error) {
	forget := remember(stats)
	if addr == "" {
		return nil, forget, nil
	}
	s, err := admin.Listen(addr, admin.Options{Version: version, Stats: stats, Ready: at.ready, CacheMap: e.CacheMap, Profiles: os.Getenv(pprofEnv) != "", Log: log})
	if err != nil {
		forget()
		return nil, nil, err
	}
	log.Info("dashboard", "url", "http://"+s.Addr())
	return []string{"dashboard: http://" + s.Addr()}, func() { forget(); _ = s.Close() }, nil // the only error: the listener is closed already
}

// snapshots are those of what this process serves, the oldest first.
var snapshots struct {
	sync.Mutex
	of []*func() admin.Snapshot
}

// remember adds a snapshot for ownStats, until forget is called.
func remember(stats func() admin.Snapshot) (forget func()) {
	snapshots.Lock()
	defer snapshots.Unlock()
	snapshots.of = append(snapshots.of, &stats)
	return func() {
		snapshots.Lock()
		defer snapshots.Unlock()
		snapshots.of = slices.DeleteFunc(snapshots.of, func(x *func() admin.Snapshot) bool { return x == &stats })
	}
}

// ownStats writes the JSON of what this process serves longest.
func ownStats(w io.Writer) error {
	snapshots.Lock()
	defer snapshots.Unlock()
	if len(snapshots.of) == 0 {
		return errors.New("the daemon serves nothing now")
	}
	return json.NewEncoder(w).Encode((*snapshots.of[0])())
}
