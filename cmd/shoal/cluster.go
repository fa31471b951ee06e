package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/cache/peer"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/prefetch/engine"
)

func clusterCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "cluster",
		Short: "Show the nodes of a cluster, drain one, or predict a change",
		Long: "The nodes of a cluster are the daemons that were started with the same --cluster (docs/cluster.md). " +
			"These verbs ask etcd and the nodes.",
		RunE: cli.RunVerbs,
	}
	c.AddCommand(clusterListCommand(), clusterDrainCommand(), clusterPlanCommand())
	return c
}

// onlooker is a connection to a cluster that is no node of it.
type onlooker struct {
	*cluster.Cluster
	client *peer.Client
}

// looking runs a verb with an onlooker of the cluster.
func (o *clusterOptions) looking(verb func(c *cobra.Command, args []string, l *onlooker) error) func(
	c *cobra.Command, args []string) error {
	return func(c *cobra.Command, args []string) error {
		l, err := o.lookOn(c.Context(), invocationOf(c.Context()), false)
		if err != nil {
			return err
		}
		defer l.close()
		return verb(c, args, l)
	}
}

func (o *clusterOptions) lookOn(ctx context.Context, inv *invocation, locks bool) (*onlooker, error) {
	if o.URL == "" {
		return nil, cli.Usagef("give the cluster: --cluster etcd://HOST:PORT/NAME")
	}
	if err := o.check(inv, ""); err != nil {
		return nil, err
	}
	config, err := o.Config()
	if err != nil {
		return nil, err
	}
	c, err := cluster.Join(cluster.Options{URL: o.URL, Locks: locks, TLS: config})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := c.Quiet(ctx); err != nil {
		_ = c.Close()
		return nil, err
	}
	return &onlooker{c, peer.NewClient(peer.ClientConfig{TLS: config, Log: slog.New(slog.DiscardHandler)})}, nil
}

func (l *onlooker) close() {
	l.client.Close()
	_ = l.Close()
}

// seenNode is a node as etcd lists it, and what it says of itself.
type seenNode struct {
	cluster.Node
	Share    float64              `json:"share"` // by weight, of a dataset that all nodes have open
	Datasets []engine.NodeDataset `json:"datasets"`
	Problem  string               `json:"problem,omitempty"`
}

func (l *onlooker) nodes(ctx context.Context) []seenNode {
	view := l.View()
	nodes, shares := make([]seenNode, len(view.Nodes)), cluster.Shares(view.Nodes)
	var wg sync.WaitGroup
	for i, n := range view.Nodes {
		nodes[i].Node, nodes[i].Share = n, shares[n.ID]
		wg.Go(func() {
			var said struct{ Datasets []engine.NodeDataset }
			raw, err := l.client.Info(ctx, peer.Node{ID: n.ID, Address: n.Address})
			if err == nil {
				err = json.Unmarshal(raw, &said)
			}
			nodes[i].Datasets = said.Datasets
			if err != nil {
				nodes[i].Problem = "does not answer: " + err.Error()
			}
		})
	}
	wg.Wait()
	return nodes
}

var errNoNodes = errors.New("the cluster has no nodes: they are the daemons that were started with the same --cluster")

// find returns the node with this ID, beginning of an ID, or address.
func find(nodes []cluster.Node, name string) (cluster.Node, error) {
	if len(nodes) == 0 {
		return cluster.Node{}, errNoNodes
	}
	found := slices.DeleteFunc(slices.Clone(nodes), func(n cluster.Node) bool {
		return !strings.HasPrefix(n.ID, name) && n.Address != name
	})
	if len(found) != 1 || name == "" {
		return cluster.Node{}, fmt.Errorf("%q names %s of the cluster instead of one (shoal cluster ls shows them)",
			name, human.Count(len(found), "node"))
	}
	return found[0], nil
}

func clusterListCommand() *cobra.Command {
	var o clusterOptions
	var asJSON bool
	c := &cobra.Command{
		Use:   "ls",
		Short: "Show a cluster's nodes, what each holds, and where its bytes came from",
		Long: "Shows the nodes of a cluster and, for each open dataset, what each node has on disk and how many bytes " +
			"it has read since its start: from the bucket, from other nodes, and from its own disk.",
		Example: `  shoal cluster ls --cluster etcd://etcd:2379/photos --cluster-insecure
  shoal cluster ls --cluster etcd://etcd:2379/photos --cluster-cert node.crt --cluster-key node.key --cluster-ca ca.crt --json`,
		RunE: o.looking(func(c *cobra.Command, _ []string, l *onlooker) error {
			nodes := l.nodes(c.Context())
			if asJSON {
				return json.NewEncoder(c.OutOrStdout()).Encode(map[string]any{"version": 1, "revision": l.View().Rev,
					"nodes": nodes})
			}
			return printNodes(c.OutOrStdout(), nodes)
		}),
	}
	o.add(c)
	c.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	return c
}

func printNodes(out io.Writer, nodes []seenNode) error {
	if len(nodes) == 0 {
		_, err := fmt.Fprintln(out, errNoNodes)
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NODE\tADDRESS\tZONE\tCACHE\tSHARE\tSTATE")
	for _, n := range nodes {
		state := "ok"
		switch {
		case n.Problem != "":
			state = n.Problem
		case n.Draining:
			state = "draining"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%.1f%%\t%s\n",
			n.ID, n.Address, n.Zone, human.Bytes(int64(n.Weight)<<20), 100*n.Share, state)
	}
	for _, source := range sourcesOf(nodes) {
		fmt.Fprintf(w, "\n%s\n", source)
		fmt.Fprintln(w, "NODE\tVERSION\tON DISK\tFROM STORE\tFROM PEERS\tFROM DISK")
		versions := map[string]bool{}
		for _, n := range nodes {
			for _, d := range n.Datasets {
				if d.Source == source {
					versions[d.Version] = true
					fmt.Fprintf(w, "%s\t%.12s\t%s\t%s\t%s\t%s\n", n.ID, d.Version, human.Bytes(d.Disk),
						human.Bytes(d.StoreBytes), human.Bytes(d.PeerBytes), human.Bytes(d.DiskBytes))
				}
			}
		}
		if len(versions) > 1 {
			fmt.Fprintf(w, "the nodes have %d versions of this source, and share nothing of what differs (shoal "+
				"refresh on one of them moves all)\n", len(versions))
		}
	}
	return w.Flush()
}

func sourcesOf(nodes []seenNode) (sources []string) {
	for _, n := range nodes {
		for _, d := range n.Datasets {
			sources = append(sources, d.Source)
		}
	}
	slices.Sort(sources)
	return slices.Compact(sources)
}

func clusterDrainCommand() *cobra.Command {
	var o clusterOptions
	c := &cobra.Command{
		Use:   "drain NODE",
		Short: "Drain a node: it gives up what it owns, and hands over what it has",
		Long: `NODE is an ID from shoal cluster ls, the beginning of one, or an address. What the node owns gets new owners, which read
it from the node instead of the bucket. The node goes on serving its own readers until its daemon ends. A restarted
daemon is not drained.`,
		Example: "  shoal cluster drain 1f2e3d4c --cluster etcd://etcd:2379/photos --cluster-insecure",
		RunE: o.looking(func(c *cobra.Command, args []string, l *onlooker) error {
			n, err := find(l.View().Nodes, args[0])
			if err == nil {
				err = l.Drain(c.Context(), n.ID)
			}
			if err == nil {
				_, err = fmt.Fprintf(c.OutOrStdout(), "%s at %s owns nothing any more\n", n.ID, n.Address)
			}
			return err
		}),
	}
	o.add(c)
	return c
}

func clusterPlanCommand() *cobra.Command {
	var o clusterOptions
	var leave string
	var join cli.Size
	c := &cobra.Command{
		Use:   "plan",
		Short: "Predict what each node would hold, and what a change would move",
		Long: `Shows each node's share of the open datasets, how much of it fits its cache, and what each epoch reads from the bucket
because no cache holds it. With --leave and --join, as if that had happened. (shoal plan --nodes predicts the epochs of
a cluster that does not exist yet.)`,
		Example: `  shoal cluster plan --cluster etcd://etcd:2379/photos --cluster-insecure
  shoal cluster plan --join 400GiB --cluster etcd://etcd:2379/photos --cluster-insecure`,
		RunE: o.looking(func(c *cobra.Command, _ []string, l *onlooker) error {
			if leave != "" {
				n, err := find(l.View().Nodes, leave)
				if err != nil {
					return err
				}
				leave = n.ID
			}
			return planCluster(c.OutOrStdout(), l.nodes(c.Context()), leave, int64(join))
		}),
	}
	o.add(c)
	c.Flags().StringVar(&leave, "leave", "", "as if this node had left: its ID, the beginning of it, or its address")
	c.Flags().Var(&join, "join", "as if a node with a cache of this size had joined")
	return c
}

// planCluster prints each source's shares, as if leave had left and a node with a cache of join bytes had come.
func planCluster(out io.Writer, nodes []seenNode, leave string, join int64) error {
	if len(nodes) == 0 {
		return errNoNodes
	}
	weight := cluster.WeightOf(join)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, source := range sourcesOf(nodes) {
		var stay []seenNode
		var bytes, kept, before, after, gone float64
		for _, n := range nodes {
			i := slices.IndexFunc(n.Datasets, func(d engine.NodeDataset) bool { return d.Source == source })
			if i < 0 && n.Problem == "" || n.Draining { // it owns nothing of the source
				continue
			}
			if i >= 0 {
				bytes = max(bytes, float64(n.Datasets[i].Bytes))
			}
			before += float64(n.Weight)
			if n.ID == leave {
				gone = float64(n.Weight)
				continue
			}
			stay = append(stay, n)
		}
		if join > 0 {
			stay = append(stay, seenNode{Node: cluster.Node{ID: "the new node", Weight: weight}})
		}
		for _, n := range stay {
			after += float64(n.Weight)
		}
		fmt.Fprintf(w, "%s, %s\n", source, human.Bytes(int64(bytes)))
		if len(stay) == 0 {
			fmt.Fprintln(w, "no node would own it: each epoch of each node would read all of it from the bucket")
			continue
		}
		fmt.Fprintln(w, "NODE\tOWNS\tKEEPS")
		for _, n := range stay {
			owns := bytes * float64(n.Weight) / after
			keeps := min(owns, float64(n.Weight)*(1<<20))
			kept += keeps
			fmt.Fprintf(w, "%s\t%s\t%s\n", n.ID, human.Bytes(int64(owns)), human.Bytes(int64(keeps)))
		}
		if join > 0 {
			fmt.Fprintf(w, "%s move to the new node\n", human.Bytes(int64(bytes*float64(weight)/after)))
		}
		if gone > 0 {
			fmt.Fprintf(w, "%s of the node that leaves get new owners: from it if it is drained first, else from the "+
				"bucket\n", human.Bytes(int64(bytes*gone/before)))
		}
		fmt.Fprintf(w, "each epoch reads %s from the bucket\n", human.Bytes(int64(bytes-kept)))
	}
	return w.Flush()
}

// clusterOptions are the flags of verbs that are nodes of a cluster (docs/cluster.md).
type clusterOptions struct{ engine.ClusterConfig }

// add adds the flags of every verb that asks a cluster.
func (o *clusterOptions) add(c *cobra.Command) {
	o.addEtcd(c, "etcd://HOST:PORT[,…]/NAME: share the cache with all daemons of this name (docs/cluster.md)")
	c.Flags().BoolVar(&o.Insecure, "cluster-insecure", false,
		"no encryption between nodes: anyone in this network can read what is cached")
}

// addEtcd adds the flags of every verb that asks etcd. use is --cluster's help.
func (o *clusterOptions) addEtcd(c *cobra.Command, use string) {
	f := c.Flags()
	f.StringVar(&o.URL, "cluster", "", use)
	f.StringVar(&o.Cert, "cluster-cert", "", "certificate of this node for other nodes and etcd, PEM; anyone with one "+
		"from --cluster-ca can read all that is cached")
	f.StringVar(&o.Key, "cluster-key", "", "key of --cluster-cert, PEM")
	f.StringVar(&o.CA, "cluster-ca", "", "authority that signs the certificates of all nodes and etcd, PEM")
}

// etcd is for verbs that ask no node: the address, without a name if there is no --cluster, and TLS's configuration.
func (o *clusterOptions) etcd(inv *invocation) (at cluster.Address, config *tls.Config, err error) {
	if o.URL == "" {
		return at, nil, o.check(inv, "")
	}
	if at, err = cluster.Parse(o.URL); err != nil {
		return at, nil, cli.Usagef("--cluster: %w", err)
	}
	own := o.ClusterConfig
	own.Insecure = own.Cert+own.Key+own.CA == ""
	config, err = own.Config()
	return at, config, err
}

// addNode adds the flags of a node, too.
func (o *clusterOptions) addNode(c *cobra.Command) {
	o.add(c)
	f := c.Flags()
	f.StringVar(&o.Advertise, "advertise", "", "HOST:PORT where the cluster's other nodes reach this one (default: "+
		"this machine's address towards etcd, port 7073)")
	f.StringVar(&o.Zone, "zone", "", "this node's zone: its nodes own datasets together, and ask other zones last")
}

// check checks the flags. clear names what must not cross a network in clear, if there is any.
func (o *clusterOptions) check(inv *invocation, clear string) error {
	if o.URL == "" {
		if o.ClusterConfig != (engine.ClusterConfig{}) {
			return cli.Usagef(
				"--advertise, --zone and --cluster-…: give the cluster, too: --cluster etcd://HOST:PORT/NAME")
		}
		return nil
	}
	if _, err := cluster.Parse(o.URL); err != nil {
		return cli.Usagef("--cluster: %w", err)
	}
	files, err := inv.absAll(&o.Cert, &o.Key, &o.CA)
	switch {
	case err != nil:
		return err
	case o.Insecure && files > 0:
		return cli.Usagef("--cluster-insecure and --cluster-cert, --cluster-key, --cluster-ca: give one or the other")
	case !o.Insecure && files < 3:
		return cli.Usagef("--cluster: nodes know each other by certificates: give --cluster-cert, --cluster-key and " +
			"--cluster-ca (docs/cluster.md makes them), or --cluster-insecure in a network that you trust")
	case o.Insecure && clear != "":
		return cli.Usagef("--cluster-insecure: %s, and would cross the network in clear (give --cluster-cert, "+
			"--cluster-key and --cluster-ca)", clear)
	case o.Advertise != "":
		host, port, err := net.SplitHostPort(o.Advertise)
		if _, wrong := strconv.ParseUint(port, 10, 16); err != nil || wrong != nil || host == "" {
			return cli.Usagef("--advertise %q: give HOST:PORT", o.Advertise)
		}
		if ip, err := netip.ParseAddr(host); err == nil && ip.IsUnspecified() {
			return cli.Usagef("--advertise %q: other nodes cannot reach that: give an address of this machine",
				o.Advertise)
		}
	}
	return nil
}

// only waits until no other node does what name says: not without a cluster, or while etcd is away.
func (o *clusterOptions) only(ctx context.Context, inv *invocation, name string) (unlock func(), err error) {
	if o.URL == "" {
		return func() {}, o.check(inv, "")
	}
	l, err := o.lookOn(ctx, inv, true)
	if cli.IsUsage(err) || ctx.Err() != nil {
		return nil, err
	} else if err != nil {
		inv.Notice("not waiting for other nodes: %v", err)
		return func() {}, nil
	}
	slow := time.AfterFunc(time.Second, func() { inv.Notice("another node of the cluster is doing this: waiting") })
	_, release, err := l.Lock(ctx, name)
	slow.Stop()
	if errors.Is(err, cluster.ErrAway) {
		inv.Notice("no longer waiting for other nodes: %v", err)
		return l.close, nil
	} else if err != nil {
		l.close()
		return nil, err
	}
	return func() { release(); l.close() }, nil
}
