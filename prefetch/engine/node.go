package engine

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/cache/peer"
)

// ClusterConfig says which cluster a host is a node of. The zero value is none.
type ClusterConfig struct {
	URL string `flag:"cluster"` // etcd://HOST:PORT[,…]/NAME
	// HOST:PORT at which other nodes reach this one; "": this machine's address towards etcd, port 7073
	Advertise string `flag:"advertise"`
	Zone      string `flag:"zone"`
	Program   string // version of Shoal
	// Cert, Key and CA are files of TLS; Insecure: without.
	Cert     string `flag:"cluster-cert"`
	Key      string `flag:"cluster-key"`
	CA       string `flag:"cluster-ca"`
	Insecure bool   `flag:"cluster-insecure"`
}

// Config returns the configuration of TLS; nil without.
func (c ClusterConfig) Config() (*tls.Config, error) {
	if c.Insecure {
		return nil, nil
	}
	return peer.TLS(c.Cert, c.Key, c.CA)
}

const (
	defaultPeerPort = "7073"
	nodeFile        = "node" // in the cache directory: this node's ID, so that a restart is the same node
)

// node is a host's part in a cluster. nil is none.
type node struct {
	cfg     ClusterConfig
	at      cluster.Address
	id      string
	cluster *cluster.Cluster
	client  *peer.Client
	server  *peer.Server
	// by Instance, the nodes that gave other bytes than the store: they may be well when they start again
	liars sync.Map
}

// join makes the host a node of the cluster in its configuration, if there is one.
func (h *Host) join() error {
	cfg := h.cfg.Cluster
	if cfg.URL == "" {
		return nil
	}
	at, err := cluster.Parse(cfg.URL)
	if err != nil {
		return err
	}
	config, err := cfg.Config()
	if err != nil {
		return err
	}
	n := &node{cfg: cfg, at: at}
	if n.id, err = nodeID(h.Path()); err != nil {
		return err
	}
	var l net.Listener
	if l, cfg.Advertise, err = at.Listen(cfg.Advertise, defaultPeerPort); err != nil {
		return err
	}
	self := cluster.Node{ID: n.id, Address: cfg.Advertise, Zone: cfg.Zone, Version: cfg.Program,
		Weight: cluster.WeightOf(h.cfg.Size)}
	n.client = peer.NewClient(peer.ClientConfig{TLS: config, Log: h.log})
	n.server = peer.NewServer(
		peer.ServerConfig{Self: n.id, Version: cfg.Program, Serving: serving{h}, Memory: h.Cache.Ledger().Limit() / 10,
			Info: h.nodeDatasets, TLS: config, Log: h.log})
	if n.cluster, err = cluster.Join(cluster.Options{URL: cfg.URL, Self: self, TLS: config, Log: h.log}); err != nil {
		return errors.Join(err, l.Close())
	}
	h.background.Go(func() {
		if err := n.server.Listen(l); err != nil {
			h.log.Error("other nodes are not served any more", "cause", err)
		}
	})
	h.node = n
	return nil
}

// nodeID returns the ID of a cache directory, which it makes if there is none.
func nodeID(dir string) (string, error) {
	path := filepath.Join(dir, nodeFile)
	b, err := os.ReadFile(path)
	if id := strings.TrimSpace(string(b)); err == nil && cluster.IsID(id) {
		return id, nil
	}
	var id [8]byte
	_, _ = rand.Read(id[:])
	text := hex.EncodeToString(id[:])
	if err := os.WriteFile(path, []byte(text+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("cache directory: %w", err)
	}
	return text, nil
}

// leave ends the host's part. Datasets must have been closed.
func (n *node) leave() {
	if n == nil {
		return
	}
	_ = n.cluster.Close()
	n.server.Close()
	n.client.Close()
}

// retain forgets nodes that have left, and closes the connections to them.
func (n *node) retain(view cluster.View) {
	nodes := make([]peer.Node, len(view.Nodes))
	for i, of := range view.Nodes {
		nodes[i].ID = of.ID
	}
	n.client.Retain(nodes)
}

// serving is peer.Serving: it gives peers what the host's datasets hold.
type serving struct{ h *Host }

func (s serving) Volume(dataset [16]byte, version [32]byte) (v peer.Volume, done func(), ok bool) {
	s.h.mu.Lock()
	e := s.h.open[dataset]
	s.h.mu.Unlock()
	if e == nil || e.cur.Load() == nil || !e.guests.enter() {
		return nil, nil, false
	}
	if v := e.find(func(v *view) bool { return v.manifest.VersionHash() == version }); v != nil {
		return guest{v.volume, v, &e.guests}, e.guests.leave, true
	}
	e.guests.leave()
	return nil, nil, false
}

func (s serving) Opening(dataset [16]byte) <-chan struct{} {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	if e := s.h.open[dataset]; e != nil && e.cur.Load() == nil {
		return e.opened
	}
	return nil
}

// File implements peer.Serving: manifests, layouts and tables of open datasets.
func (s serving) File(name string) (io.ReadCloser, int64, error) {
	for _, e := range s.h.engines() {
		if !e.guests.enter() {
			continue
		}
		if raw, of := e.rawFile(name); raw != nil {
			return leaving{bytes.NewReader(raw), of, &e.guests}, int64(len(raw)), nil
		}
		e.guests.leave()
	}
	return nil, 0, os.ErrNotExist
}

type leaving struct {
	io.Reader
	of any // what the bytes belong to
	g  *guests
}

func (l leaving) Close() error { l.g.leave(); return nil }

func (e *Engine) rawFile(name string) (raw []byte, of any) {
	if by := e.recoding.encode.Load(); by != nil && name == e.codingName() {
		return by.tables, nil
	}
	v := e.find(func(v *view) bool {
		return name != "" && (v.manifest.FileName() == name || v.layout.Version() == name)
	})
	switch {
	case v == nil:
		return nil, nil
	case v.manifest.FileName() == name:
		return v.manifest.Raw(), v
	}
	return v.layout.Raw(), v
}

// guest is a version of a dataset as peers read it, a peer.Volume.
type guest struct {
	*cache.Volume
	v *view
	g *guests
}

func (g guest) Terms() peer.Terms {
	return peer.Terms{Below: g.v.keeping.below.Load(), Gives: g.Gives()}
}

func (g guest) Received() int64 { return g.v.sharing.e.Cost().Received }

func (g guest) Check(file int, path [16]byte, etag string) bool {
	m := g.v.manifest
	return file >= 0 && file < m.Len() && m.PathHash(file) == path && m.ETag(file) == etag
}

// Serve implements peer.Volume. It ends when the dataset is closed.
func (g guest) Serve(ctx context.Context, file int, off int64, n int, due time.Time,
	held bool) ([]byte, func(), error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(g.g.ctx, cancel)()
	return g.Volume.Serve(ctx, file, off, n, due, held)
}

// guests are the requests of peers to a dataset, which is closed only when there are none.
type guests struct {
	ctx    context.Context // of their waits
	cancel context.CancelFunc
	inside sync.RWMutex // read-locked by each; locked for good by close
}

func (g *guests) enter() bool { return g.inside.TryRLock() }

func (g *guests) leave() { g.inside.RUnlock() }

// close lets no more in, and waits until those inside have left.
func (g *guests) close() {
	g.cancel()
	g.inside.Lock()
}

// forget says that this node does not have the dataset open any more.
func (n *node) forget(e *Engine) {
	if n != nil {
		n.cluster.Forget(e.datasetID())
	}
}

// Node returns this node's ID and weight; false outside of a cluster.
func (h *Host) Node() (id string, weight uint32, ok bool) {
	if h.node == nil {
		return "", 0, false
	}
	return h.node.id, cluster.WeightOf(h.cfg.Size), true
}
