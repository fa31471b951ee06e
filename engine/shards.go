package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/shard"
)

// errOtherVersion: a shard set holds another version than the one that was listed.
var errOtherVersion = errors.New("the shard set holds another version of the dataset")

// shardStore is a shard set that stands in for the small objects of a source.
type shardStore struct {
	remote
	base   objstore.Reader
	source objstore.Source
}

func (e *Engine) openShards(ctx context.Context) (*shardStore, error) {
	base, source, err := objstore.Open(ctx, e.cfg.Shards, e.storeOptions())
	if err != nil {
		return nil, fmt.Errorf("--shards: %w", err)
	}
	return &shardStore{e.newRemote(base), base, source}, nil
}

// layout returns where the files of m lie in the set, or nil where the set is missing or holds another
// version: then the small objects are read.
func (s *shardStore) layout(ctx context.Context, e *Engine, m *catalog.Manifest) (*catalog.Layout, error) {
	is, err := shard.IsSet(ctx, s.store, s.source)
	if err != nil {
		return nil, fmt.Errorf("--shards: %w", err)
	}
	if !is {
		e.log.Warn("--shards holds no shard set; the source's own objects are read", "shards", s.source.String(), "remedy", "make one: shoal pack "+e.source.String()+" "+s.source.String())
		return nil, nil
	}
	_, layout, err := e.listPacked(ctx, s.store, s.source, m)
	if errors.Is(err, errOtherVersion) {
		e.log.Warn("--shards holds another version of the dataset; the source's own objects are read", "shards", s.source.String(), "remedy", "pack the source again, to another place")
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("--shards: %w", err)
	}
	return layout, nil
}
