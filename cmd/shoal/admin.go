package main

import (
	"log/slog"
	"os"

	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// pprofEnv, if set, makes --admin serve profiles: for developers, and not for all who may see the dashboard.
const pprofEnv = "SHOAL_PPROF"

// startAdmin serves the admin address, if there is one, until the returned function is called. It returns the address for
// announce. at is the state of what the daemon serves.
func startAdmin(addr string, at *daemon.Life, log *slog.Logger, e *engine.Engine, stats func() admin.Snapshot) (where []string, stop func(), err error) {
	if addr == "" {
		return nil, func() {}, nil
	}
	s, err := admin.Listen(addr, admin.Options{Version: version, Stats: stats, Ready: at.Err, CacheMap: e.CacheMap, Profiles: os.Getenv(pprofEnv) != "", Log: log})
	if err != nil {
		return nil, nil, err
	}
	log.Info("dashboard", "url", "http://"+s.Addr())
	return []string{"dashboard: http://" + s.Addr()}, s.Close, nil
}
