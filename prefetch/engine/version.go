package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/cache/peer"
)

// One node of a cluster lists a source, the others take its list: so all have the same version, and the store one
// listing. Who lists holds a lock in etcd, which ends with its holder, and publishes what it found under the source's
// name, once it serves that. The list itself is a file by an immutable name, which any node that has it sends.
//
// Listings have numbers, and only go forward (docs/cluster.md): each node keeps the number of its version in its
// catalog.

// published is the version of a source that the nodes of a cluster read.
type published struct {
	Number   int64           `json:"number"`          // of the listing, from 1
	After    int64           `json:"after,omitempty"` // the number that the cluster had when it was begun; 0: not known
	Node     string          `json:"node"`            // that listed
	Version  string          `json:"version"`
	Manifest string          `json:"manifest"` // name of its file
	Layout   string          `json:"layout,omitempty"`
	Prefix   string          `json:"prefix"`
	Skipped  catalog.Skipped `json:"skipped"`
}

// sourceKey names the source in etcd, with the shards that replace it.
func (e *Engine) sourceKey() string { return fmt.Sprintf("%x", catalog.DatasetID(e.name)) }

// listShared returns the list of the source that the cluster has, and makes one if there is none or afresh is set.
// Without a cluster, or if etcd is away, it lists.
func (e *Engine) listShared(ctx context.Context, afresh bool) (*catalog.Manifest, *catalog.Layout, error) {
	n := e.host.node
	if n == nil {
		return e.list(ctx)
	}
	e.tell(false) // of a list that is not taken after all
	asked, err := e.clusterVersion(ctx)
	if err != nil {
		return e.listAlone(ctx, err)
	}
	held, unlock, err := e.host.node.cluster.Lock(ctx, "list/"+e.sourceKey())
	if err != nil {
		return e.listAlone(ctx, err)
	}
	defer func() {
		if e.untold == nil {
			unlock()
		}
	}()
	now, err := e.clusterVersion(ctx)
	if err != nil {
		return e.listAlone(ctx, err)
	}
	mine := e.catalog.Number(e.name)
	// What was begun after something newer than the call saw was begun after the call.
	if now.Number > 0 && now.Number >= mine && (!afresh || now.After > asked.Number) {
		m, layout, err := e.take(ctx, now)
		if err == nil || ctx.Err() != nil {
			return m, layout, err
		}
		e.log.Warn("no node of the cluster sends the list of the source; listing it again", "version", now.Version,
			"cause", err)
	}
	m, layout, err := e.list(ctx)
	if err != nil {
		return nil, nil, err
	}
	publish := e.publishVersion(held, max(now.Number, mine)+1, now.Number, m, layout)
	e.untold = func(served bool) {
		defer unlock()
		if served {
			publish()
			e.host.node.cluster.Look() // if that failed, versionLoop publishes it once etcd answers
		}
	}
	return m, layout, nil
}

// tell lets the others list again. If this node serves what it has listed, it publishes that first.
func (e *Engine) tell(served bool) {
	if tell := e.untold; tell != nil {
		e.untold = nil
		tell(served)
	}
}

// listAlone lists although the cluster cannot be asked, which hears of it as soon as it can.
func (e *Engine) listAlone(ctx context.Context, cause error) (*catalog.Manifest, *catalog.Layout, error) {
	if ctx.Err() != nil {
		return nil, nil, ctx.Err()
	}
	e.log.Warn("the cluster does not say which version it has; listing without it", "cause", cause)
	e.untold = func(bool) { e.host.node.cluster.Look() }
	return e.list(ctx)
}

// publishVersion gives what this node has listed its number, and returns what publishes it. If that fails, the others
// go on as they are.
func (e *Engine) publishVersion(ctx context.Context, number, after int64, m *catalog.Manifest, layout *catalog.Layout) (
	publish func()) {
	p := published{Number: number, After: after, Node: e.host.node.id, Version: m.Version(), Manifest: m.FileName(),
		Layout: layout.Version(), Prefix: m.Prefix(), Skipped: m.Skipped()}
	b, err := json.Marshal(p)
	err = errors.Join(err, e.catalog.SetNumber(e.name, number))
	return func() {
		if err == nil {
			err = e.host.node.cluster.Publish(ctx, e.sourceKey(), b)
		}
		if err != nil {
			e.log.Warn("the cluster was not told of the new version", "version", p.Version, "cause", err)
		}
	}
}

// sharedManifest returns the cluster's version in place of the catalog's. If the cluster has none, or an older one, or
// does not say, it stays at the catalog's, and the store is not asked: it may be away.
func (e *Engine) sharedManifest(ctx context.Context, m *catalog.Manifest, layout *catalog.Layout) (
	*catalog.Manifest, *catalog.Layout, error) {
	p, err := e.clusterVersion(ctx)
	theirs, packed := m, layout
	switch {
	case err == nil && e.astray(p, m):
		theirs, packed, err = e.listShared(ctx, true)
	case err == nil && p.Number > 0 && p.Number >= e.catalog.Number(e.name):
		theirs, packed, err = e.take(ctx, p)
	case err == nil: // the cluster is new, or was turned back, and this node was not
		e.untold = func(served bool) {
			if served {
				e.publishAgain(ctx, m, layout)
			}
		}
		return m, layout, nil
	}
	if err == nil {
		return theirs, packed, closeList(m, layout)
	}
	if ctx.Err() != nil {
		return nil, nil, ctx.Err()
	}
	e.log.Warn("cannot get the cluster's version of the source; starting with the one in the cache",
		"version", m.Version()[:12], "cause", err)
	return m, layout, nil
}

// astray reports whether the cluster's version may not be taken for an older or newer one than m, this node's: both
// have been listed after one that etcd was turned back to, or that was the last before it went away.
func (e *Engine) astray(p published, m *catalog.Manifest) bool {
	known := p.Version == m.Version() || e.catalog.Had(e.name, p.Version)
	return !known && p.Number > 0 && p.Number <= e.catalog.Number(e.name)
}

// publishAgain publishes this node's version, unless the cluster has a newer one by now.
func (e *Engine) publishAgain(ctx context.Context, m *catalog.Manifest, layout *catalog.Layout) {
	held, unlock, err := e.host.node.cluster.Lock(ctx, "list/"+e.sourceKey())
	if err != nil {
		e.log.Warn("the version of the source could not be published again", "cause", err)
		return
	}
	defer unlock()
	mine := max(e.catalog.Number(e.name), 1)
	if now, err := e.clusterVersion(held); err == nil && now.Number < mine {
		e.publishVersion(held, mine, 0, m, layout)()
	}
}

// clusterVersion returns the cluster's version of the source; the zero value if there is none.
func (e *Engine) clusterVersion(ctx context.Context) (p published, err error) {
	b, err := e.host.node.cluster.Published(ctx, e.sourceKey())
	if err == nil && b != nil {
		err = json.Unmarshal(b, &p)
	}
	return p, err
}

// take makes a published version the catalog's current one. Its files come from this node's catalog or from a peer.
func (e *Engine) take(ctx context.Context, p published) (*catalog.Manifest, *catalog.Layout, error) {
	if m, layout, err := e.catalog.Manifest(e.name); err == nil {
		if has := layout.Version(); m.Version() == p.Version && m.FileName() == p.Manifest && has == p.Layout {
			return m, layout, e.catalog.SetNumber(e.name, p.Number)
		}
		if err := closeList(m, layout); err != nil {
			return nil, nil, err
		}
	}
	raw, err := e.receive(ctx, p.Node, p.Manifest)
	if err != nil {
		return nil, nil, err
	}
	var rawLayout []byte
	if p.Layout != "" {
		if rawLayout, err = e.receive(ctx, p.Node, p.Layout); err != nil {
			return nil, nil, err
		}
	}
	m, layout, err := catalog.Received(raw, rawLayout, p.Prefix, p.Skipped)
	if err != nil {
		return nil, nil, err
	}
	if m.Version() != p.Version || layout.Version() != p.Layout {
		return nil, nil, fmt.Errorf("node %s sent version %s instead of %s", p.Node, m.Version(), p.Version)
	}
	if err := e.catalog.SetManifest(e.name, m, layout, p.Number); err != nil {
		return nil, nil, err
	}
	e.collect()
	e.log.Info("took the list of the source from the cluster", "version", p.Version[:12], "files", m.Len(),
		"listed_by", p.Node)
	return e.catalog.Manifest(e.name)
}

// receive returns a file of a catalog: from the node that listed, else from any other.
func (e *Engine) receive(ctx context.Context, first, name string) ([]byte, error) {
	var errs []error
	for _, pass := range []bool{true, false} {
		for _, n := range e.host.node.cluster.View().Nodes {
			if n.ID == e.host.node.id || (n.ID == first) != pass {
				continue
			}
			b, err := e.receiveFrom(ctx, n, name)
			if err == nil {
				return b, nil
			}
			errs = append(errs, fmt.Errorf("node %s at %s: %w", n.ID, n.Address, err))
		}
	}
	return nil, cmp.Or(errors.Join(errs...), errors.New("no other node is there"))
}

func (e *Engine) receiveFrom(ctx context.Context, n cluster.Node, name string) ([]byte, error) {
	r, err := e.host.node.client.File(ctx, peer.Node{ID: n.ID, Address: n.Address}, name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// versionLoop moves to what other nodes publish, until ctx ends.
func (e *Engine) versionLoop(ctx context.Context) {
	e.host.node.cluster.WatchPublished(ctx, e.sourceKey(), func(value []byte) {
		var p published
		if err := json.Unmarshal(value, &p); err != nil {
			e.log.Error(
				"the cluster has a version that this one does not understand (run one version of Shoal on all nodes)",
				"cause", err)
			return
		}
		v := e.cur.Load()
		list := func(ctx context.Context) (*catalog.Manifest, *catalog.Layout, error) {
			if p.Number < e.catalog.Number(e.name) { // a refresh that this one waited for has brought a newer one
				return e.catalog.Manifest(e.name)
			}
			return e.take(ctx, p)
		}
		mine, astray := e.catalog.Number(e.name), e.astray(p, v.manifest)
		if astray {
			e.log.Warn("the cluster's etcd has a version of the source that is not known to be older or newer than "+
				"this node's; listing again",
				"theirs", p.Version, "number", p.Number, "ours", v.manifest.Version(), "our_number", mine)
			list = func(ctx context.Context) (*catalog.Manifest, *catalog.Layout, error) {
				return e.listShared(ctx, true)
			}
		} else if p.Number < mine {
			e.log.Warn("the cluster's etcd has an older version of the source than this node, as if it had been "+
				"restored; publishing this node's",
				"theirs", p.Version, "number", p.Number, "ours", v.manifest.Version(), "our_number", mine)
			select { // the catalog's number is that of the version in force only while nobody refreshes
			case e.refreshing <- struct{}{}:
				v = e.cur.Load()
				e.publishAgain(ctx, v.manifest, v.layout)
				<-e.refreshing
			case <-ctx.Done():
			}
			return
		}
		if p.Version == v.manifest.Version() && p.Layout == v.layout.Version() {
			return
		}
		if _, err := e.refresh(ctx, astray, list); err != nil && ctx.Err() == nil {
			e.log.Error("this node stays at its version of the source; it reads what the others do not have from the "+
				"store (shoal refresh tries again)", "cluster", p.Version, "cause", err)
		}
	})
}
