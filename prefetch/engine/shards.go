package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/cache/shard"
)

// errBadShards: shards of a set are damaged or missing.
var errBadShards = errors.New("bad shards")

// errOtherVersion: a shard set has another version than the one listed.
var errOtherVersion = errors.New("the shard set holds another version of the dataset")

// shardStore is a shard set that replaces the small objects of a source.
type shardStore struct {
	remote
	source objstore.Source
	unused string // why the set is not read, and the remedy; "" if it is read, or unknown
}

func (e *Engine) openShards(ctx context.Context) (*shardStore, error) {
	base, source, err := stores.Open(ctx, e.cfg.Shards, e.storeOptions())
	if err != nil {
		return nil, fmt.Errorf("--shards: %w", err)
	}
	return &shardStore{remote: e.newRemote(base, source), source: source}, nil
}

// instead logs that the source's own objects are read, and why.
func (s *shardStore) instead(e *Engine, cause, remedy string) {
	s.unused = fmt.Sprintf("--shards %s %s (%s)", s.source, cause, remedy)
	e.log.Warn("reading the source's own objects: --shards "+s.source.String()+" "+cause, "remedy", remedy)
}

// layout returns the places of the files of m in the set, or nil if the set is missing or has another version: then
// the small objects are read.
func (s *shardStore) layout(ctx context.Context, e *Engine, m *catalog.Manifest) (*catalog.Layout, error) {
	s.unused = ""
	is, err := shard.IsSet(ctx, s.store, s.source)
	if err != nil {
		return nil, fmt.Errorf("--shards: %w", err)
	}
	if !is {
		s.instead(e, "holds no shard set", "make one: shoal pack "+e.source.String()+" "+s.source.String())
		return nil, nil
	}
	_, layout, err := e.listPacked(ctx, s.store, s.source, m)
	if errors.Is(err, errOtherVersion) {
		s.instead(e, fmt.Sprintf("holds another version of the dataset than %s, which is at %.12s",
			e.source, m.Version()), "pack the source again, to another place: shoal pack "+e.source.String()+" DEST")
		return nil, nil
	}
	if errors.Is(err, errBadShards) {
		s.instead(e, "has shards that are damaged or missing",
			"restore them, or pack the source again, to another place")
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("--shards: %w", err)
	}
	return layout, nil
}
