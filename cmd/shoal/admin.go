package main

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"slices"
	"sync"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// adminOptions are the flags of the admin address.
type adminOptions struct {
	addr  string
	pprof bool
}

func (o *adminOptions) add(c *cobra.Command) {
	c.Flags().StringVar(&o.addr, "admin", "", "address for the dashboard, /stats, /metrics, /healthz and /readyz, such as 127.0.0.1:7071; without a host, loopback (default: none)")
	c.Flags().BoolVar(&o.pprof, "pprof", false, "serve profiles of the daemon under /debug/pprof/ at --admin")
}

func (o *adminOptions) check() error {
	if o.pprof && o.addr == "" {
		return cli.Usagef("--pprof: give --admin too, which serves the profiles")
	}
	return nil
}

// startAdmin serves the admin address, if there is one, until the returned function is called. It returns the address for
// announce. at is the daemon's current phase.
func startAdmin(o adminOptions, at *phase, log *slog.Logger, e *engine.Engine, stats func() admin.Snapshot) (where []string, stop func(), err error) {
	forget := remember(stats)
	if o.addr == "" {
		return nil, forget, nil
	}
	s, err := admin.Listen(o.addr, admin.Options{Version: version, Stats: stats, Ready: at.ready, CacheMap: e.CacheMap, Profiles: o.pprof, Log: log})
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
