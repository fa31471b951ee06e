package main

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// clusterOptions are the flags of verbs that are nodes of a cluster (docs/cluster.md).
type clusterOptions struct{ engine.ClusterConfig }

// add adds the flags of every verb that asks a cluster.
func (o *clusterOptions) add(c *cobra.Command) {
	o.addEtcd(c, "etcd://HOST:PORT[,…]/NAME: share the cache with all daemons of this name (docs/cluster.md)")
	c.Flags().BoolVar(&o.Insecure, "cluster-insecure", false,
		"no encryption between nodes: everybody in this network can read what is cached")
}

// addEtcd adds the flags of every verb that asks etcd. use is --cluster's help.
func (o *clusterOptions) addEtcd(c *cobra.Command, use string) {
	f := c.Flags()
	f.StringVar(&o.URL, "cluster", "", use)
	f.StringVar(&o.Cert, "cluster-cert", "",
		"certificate of this node for other nodes and etcd, PEM; whoever has one from --cluster-ca can read all that "+
			"is cached")
	f.StringVar(&o.Key, "cluster-key", "", "key of --cluster-cert, PEM")
	f.StringVar(&o.CA, "cluster-ca", "", "certificates that sign all nodes' and etcd's, PEM")
}

// etcd returns the address, without a name if there is no --cluster, and TLS's configuration, for verbs that ask no
// node.
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
	f.StringVar(&o.Advertise, "advertise", "",
		"HOST:PORT where the cluster's other nodes reach this one (default: this machine's address towards etcd, "+
			"port 7073)")
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

// only waits until no other node of the cluster does what name says. Without a cluster, or if etcd is away, it does not
// wait.
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
	slow := time.AfterFunc(time.Second, func() { inv.Notice("another node of the cluster is at it: waiting") })
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
