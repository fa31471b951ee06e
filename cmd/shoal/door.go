package main

import (
	"context"
	"encoding/json"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/internal/shortcut"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// door adapts the engine to the mount: it is fusefs.Volume and fusefs.Control.
type door struct {
	*engine.Engine
	snapshot func() admin.Snapshot // for the stats; includes the feed if one is served beside the mount
	shortcut *shortcut.Server
}

func (d *door) Get(name string) ([]byte, error) {
	if name != "stats" {
		return d.Engine.Get(name)
	}
	s := d.snapshot()
	s.Shortcut = d.shortcut.Key()
	b, err := json.MarshalIndent(s, "", "  ")
	return append(b, '\n'), err
}

// Release implements fusefs.Memory, with engine.Engine.Reserve: staged plans count in the ledger too.
func (d *door) Release(n int64) { d.Cache().Ledger().Release(n, cache.ForDemand) }

func (d *door) Record() (fusefs.Recording, error) { return d.Engine.Record() }

func (d *door) Refresh(ctx context.Context) error {
	_, err := d.Engine.Refresh(ctx)
	return err
}
