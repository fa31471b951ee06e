package main

import (
	"log/slog"

	"github.com/shoalfs/shoal/admin"
	"github.com/shoalfs/shoal/engine"
)

// startAdmin serves the admin address, if there is one, until the function that it returns is called. at says where
// the daemon stands.
func startAdmin(addr string, at *phase, log *slog.Logger, e *engine.Engine, stats func() admin.Snapshot) (stop func(), err error) {
	if addr == "" {
		return func() {}, nil
	}
	s, err := admin.Listen(addr, admin.Options{Version: version, Stats: stats, Ready: at.ready, CacheMap: e.CacheMap, Log: log})
	if err != nil {
		return nil, err
	}
	log.Info("dashboard", "url", "http://"+s.Addr())
	return func() { _ = s.Close() }, nil // it says only that the listener is closed already
}
