package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/daemon"
	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/netns"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// fleetOptions says what to make.
type fleetOptions struct {
	// Shoal is the path of the binary.
	Shoal string
	// Dir keeps caches, logs and mount points.
	Dir string
	// Mounts has each daemon mount the dataset too.
	Mounts bool
	// Nodes is how many daemons there may be.
	Nodes int
	// Rate is that of each node's link, in bits a second each way; 0 is no limit.
	Rate int64
	// Store is the URL of the S3 server, on this host.
	Store string
	// Far is how far the store is from each node.
	Far proxy.Options
}

// fleet is several shoal daemons on one machine that are apart as on many: each has a network namespace with a link of
// its own, a cache directory, a feed and a mount, and a proxy that counts what it reads from the store. All have the
// same address of the store, as a dataset is the same only at the same address. One more namespace is there for etcd.
//
// Feeds are Unix sockets in a folder of the fleet's own, and mounts belong to the host, so consumers run on the host
// and a cut link does not cut them off. Nothing that a fleet starts outlives this process.
type fleet struct {
	Nodes []*fleetNode
	// Host is this host's address in the network, and Store the URL of the store, as the nodes see it.
	Host, Store string
	// EtcdNode is the machine of etcd, and Etcd what runs there after StartEtcd.
	EtcdNode *netns.Node
	Etcd     *etcd.Server

	net     *netns.Net
	door    *door
	sockets string // folder: the path of a socket has 107 bytes at most, and Dir may be deep
}

// fleetNode is a machine with at most one daemon.
type fleetNode struct {
	*netns.Node
	// Addr is the feed's; Mount is where the dataset is mounted.
	Addr, Mount string
	// Cache is the cache directory.
	Cache string
	// Number is the node's, from 0.
	Number int

	o     fleetOptions
	proxy *proxy.Proxy
	log   string

	mu   sync.Mutex
	proc *subproc.Proc
}

// makeFleet makes the network; no daemon runs yet.
func makeFleet(ctx context.Context, o fleetOptions) (_ *fleet, err error) {
	f := &fleet{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("fleet: %w", err), f.Close())
		}
	}()
	if f.net, err = netns.New(o.Nodes+1, o.Rate); err != nil {
		return nil, err
	}
	f.EtcdNode = f.net.Nodes[o.Nodes]
	l, err := net.Listen("tcp", net.JoinHostPort(f.net.Host, "0"))
	if err != nil {
		return nil, err
	}
	f.Host, f.Store = f.net.Host, "http://"+l.Addr().String()
	f.door = &door{Listener: l, nodes: map[string]*side{}}
	if f.sockets, err = os.MkdirTemp("", "shoal-fleet-"); err != nil {
		return nil, err
	}
	for i, m := range f.net.Nodes[:o.Nodes] {
		dir := filepath.Join(o.Dir, strconv.Itoa(i))
		n := &fleetNode{Node: m, o: o, Number: i, Addr: fmt.Sprintf("unix://%s/%d", f.sockets, i),
			Mount: filepath.Join(dir, "mnt"), Cache: filepath.Join(dir, "cache"), log: filepath.Join(dir, "log")}
		f.Nodes = append(f.Nodes, n)
		_ = unix.Unmount(n.Mount, unix.MNT_DETACH) // what a killed run has left
		if err := os.MkdirAll(n.Mount, 0o755); err != nil {
			return nil, err
		}
		if n.proxy, err = proxy.Serve(ctx, f.door.of(m.IP), o.Store, o.Far); err != nil {
			return nil, err
		}
	}
	go f.door.serve()
	return f, nil
}

// StartEtcd starts etcd, and returns the flags by which a daemon joins a cluster there.
func (f *fleet) StartEtcd(ctx context.Context) (flags []string, err error) {
	if f.Etcd, err = etcd.StartAt(ctx, f.EtcdNode.IP, f.EtcdNode.Command); err != nil {
		return nil, err
	}
	return []string{"--cluster", "etcd://" + f.Etcd.Addr + "/rig", "--advertise", "{ip}:7400",
		"--cluster-insecure"}, nil
}

// Close ends all daemons and removes the network. Caches and logs stay.
func (f *fleet) Close() error {
	var all error
	for _, n := range f.Nodes {
		n.Kill()
		if n.proxy != nil {
			n.proxy.Stop()
		}
	}
	if f.door != nil {
		_ = f.door.Close()
	}
	if f.Etcd != nil {
		f.Etcd.Close()
	}
	if f.net != nil {
		all = f.net.Close()
	}
	return errors.Join(all, os.RemoveAll(f.sockets))
}

// Each does do for all nodes at once.
func (f *fleet) Each(do func(n *fleetNode) error) error {
	errs := make([]error, len(f.Nodes))
	var wg sync.WaitGroup
	for i, n := range f.Nodes {
		wg.Go(func() { errs[i] = do(n) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Settled waits until all nodes that run know each other, and what each owns.
func (f *fleet) Settled(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, daemon.Patience, errors.New("the nodes do not know each other"))
	defer cancel()
	for {
		var runs, know atomic.Int64
		err := f.Each(func(n *fleetNode) error {
			if !n.Runs() {
				return nil
			}
			runs.Add(1)
			s, err := n.Stats(ctx)
			for _, other := range s.Cluster.Nodes {
				if other.Open {
					know.Add(1)
				}
			}
			return err
		})
		if err != nil {
			return err
		}
		wait, done := 100*time.Millisecond, know.Load() == runs.Load()*runs.Load()
		if done {
			wait = 3 * time.Second // until each has found out what it owns now
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(wait):
		}
		if done {
			return nil
		}
	}
}

// Serve starts the daemon, a feed of source, and returns when it is ready. flags are those of `shoal serve`; in them
// "{ip}" is the node's address, and "{i}" its number.
func (n *fleetNode) Serve(ctx context.Context, source string, flags ...string) error {
	_ = unix.Unmount(n.Mount, unix.MNT_DETACH) // of one that was killed
	args := []string{"serve", source, "--listen", n.Addr, "--cache-dir", n.Cache}
	at := daemon.Place{Socket: strings.TrimPrefix(n.Addr, "unix://"), Log: n.log}
	if n.o.Mounts {
		at.Mount = n.Mount
		args = append(args, "--mount", n.Mount, "--kernel-cache", "off")
	}
	of := strings.NewReplacer("{ip}", n.IP, "{i}", strconv.Itoa(n.Number))
	for _, f := range flags {
		args = append(args, of.Replace(f))
	}
	cmd := n.Command(n.o.Shoal, args...)
	cmd.Env = n.Env()
	d, err := daemon.Start(fmt.Sprintf("node %d", n.Number), cmd, at)
	if err != nil {
		return err
	}
	n.mu.Lock()
	n.proc = d.Proc
	n.mu.Unlock()
	return d.Ready(ctx)
}

// Env is the environment that leads to the store through the node's proxy, without the settings of whoever runs this.
func (n *fleetNode) Env() []string {
	return append(append(os.Environ(), "SHOAL_SETTLED=1"), s3server.Env(n.proxy.URL)...)
}

// Kill ends the daemon as a crash would, and takes away its mount.
func (n *fleetNode) Kill() {
	if p := n.process(); p != nil {
		_ = p.Signal(syscall.SIGKILL)
		<-p.Done()
	}
	_ = unix.Unmount(n.Mount, unix.MNT_DETACH)
}

// Stop ends the daemon as `shoal stop` does.
func (n *fleetNode) Stop() error {
	if p := n.process(); p != nil {
		p.Stop(daemon.Patience)
	}
	if err := unix.Unmount(n.Mount, unix.MNT_DETACH); err == nil {
		return fmt.Errorf("node %d has left its mount", n.Number)
	}
	return nil
}

// Signal sends the daemon a signal, such as SIGSTOP.
func (n *fleetNode) Signal(s syscall.Signal) error { return n.process().Signal(s) }

// Runs reports whether the daemon runs.
func (n *fleetNode) Runs() bool { p := n.process(); return p != nil && p.Failed() == nil }

func (n *fleetNode) process() *subproc.Proc {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.proc
}

// Store counts what the node has asked of the store, since the fleet was made.
func (n *fleetNode) Store() proxy.Stats { return n.proxy.Stats() }

// Far changes how far the store is from the node.
func (n *fleetNode) Far(o proxy.Options) error { return n.proxy.Set(o) }

// fleetStats are the daemon's own, as far as a fleet needs them.
type fleetStats struct {
	Dataset string // version
	Read    int64  `json:"read_bytes"`
	// Delivered are samples that consumers were given.
	Delivered int64 `json:"samples_delivered"`
	Reads     int64
	Hits      struct{ Keep, Ring int64 }
	Joined    int64
	Misses    int64
	Gets      int64 `json:"get_requests"`
	Got       int64 `json:"get_bytes"`
	Hedges    struct{ Sent int64 }
	Memory    struct {
		Used                   int64 `json:"ledger_used"`
		Ring, Batches, Waiting int64
	}
	InFlight int64 `json:"requests_in_flight"`
	Feed     struct {
		Open int `json:"open_sessions"`
	}
	Disk struct {
		Kept   int `json:"kept_extents"`
		Queued int
		Errors int64 // of operations, those that hung among them
	}
	Errors  []struct{ Text string }
	Cluster struct {
		State string
		Owned float64
		Peers int64                 `json:"peer_bytes"` // that others gave
		Disk  int64                 `json:"disk_bytes"` // from its own disk
		Given struct{ Bytes int64 } // to others
		Nodes []fleetPeer
	}
}

// fleetPeer is a node as another one sees it.
type fleetPeer struct {
	Address, Zone  string
	Draining, Open bool
	Owned          float64
	Asked          struct{ Late, Passed, Bytes int64 }
}

// Stats asks the daemon.
func (n *fleetNode) Stats(ctx context.Context) (s fleetStats, err error) {
	err = n.verb(ctx, &s, "stat", n.Addr, "--json")
	return s, err
}

// fleetFed is what a consumer was given; Digest is SHA-256 over (sample, length, bytes).
type fleetFed struct {
	Samples int
	Stalled float64 `json:"stall_seconds"`
	Digest  string
}

// verb runs a verb of shoal in the node and decodes its JSON.
func (n *fleetNode) verb(ctx context.Context, into any, args ...string) error {
	out, err := n.Shoal(ctx, args...)
	if err == nil {
		err = json.Unmarshal(out, into)
	}
	return err
}

// Shoal runs a verb of shoal in the node, and returns what it prints.
func (n *fleetNode) Shoal(ctx context.Context, args ...string) ([]byte, error) {
	p, out, err := n.Begin(args...)
	if err == nil {
		err = p.Wait(ctx)
	}
	return out.Bytes(), err
}

// Begin starts a verb of shoal in the node, which prints to out.
func (n *fleetNode) Begin(args ...string) (p *subproc.Proc, out *bytes.Buffer, err error) {
	out = new(bytes.Buffer)
	cmd := n.Command(n.o.Shoal, args...)
	cmd.Env, cmd.Stdout = n.Env(), out
	p, err = subproc.Start(fmt.Sprintf("node %d: shoal %s", n.Number, args[0]), cmd)
	return p, out, err
}

// door is the one address of the store: it hands each connection to the proxy of the node that it comes from.
type door struct {
	net.Listener
	nodes map[string]*side // by IP address; not changed once serve runs
}

// side is a node's side of the door, a listener.
type side struct {
	at    net.Addr
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (d *door) of(ip string) *side {
	s := &side{at: d.Addr(), conns: make(chan net.Conn), done: make(chan struct{})}
	d.nodes[ip] = s
	return s
}

func (d *door) serve() {
	for {
		c, err := d.Accept()
		if err != nil {
			return
		}
		ip, _, _ := net.SplitHostPort(c.RemoteAddr().String())
		s := d.nodes[ip]
		if s == nil {
			_ = c.Close() // not a node
			continue
		}
		select {
		case s.conns <- c:
		case <-s.done:
			_ = c.Close()
		}
	}
}

func (s *side) Accept() (net.Conn, error) {
	select {
	case c := <-s.conns:
		return c, nil
	case <-s.done:
		return nil, net.ErrClosed
	}
}

func (s *side) Close() error {
	s.once.Do(func() { close(s.done) })
	return nil
}

func (s *side) Addr() net.Addr { return s.at }
