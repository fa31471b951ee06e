package cluster

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	v3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

// Address is where a cluster is: an etcd, and a name in it.
type Address struct {
	Servers        []string // HOST:PORT
	Name           string
	TLS            bool
	User, Password string
}

var nameOf = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`)

// Parse reads etcd://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]…]/NAME, or etcds:// for TLS. Its errors have no password.
func Parse(s string) (Address, error) {
	var a Address
	scheme, rest, ok := strings.Cut(s, "://")
	if a.TLS = scheme == "etcds"; !ok || scheme != "etcd" && !a.TLS {
		return a, bad("it must begin with etcd://, or etcds:// for TLS")
	}
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		user, password, _ := strings.Cut(rest[:at], ":")
		var err, err2 error
		a.User, err = url.PathUnescape(user)
		a.Password, err2 = url.PathUnescape(password)
		if err != nil || err2 != nil {
			return a, bad(
				"the user or the password has a %% that is not followed by two hex digits (write %%25 for a %%)")
		}
		if a.User == "" || a.Password == "" {
			return a, bad("before the @ there must be USER:PASSWORD")
		}
		rest = rest[at+1:]
	}
	servers, name, _ := strings.Cut(rest, "/")
	for server := range strings.SplitSeq(servers, ",") {
		host, port, err := net.SplitHostPort(server)
		if err != nil {
			host, port = strings.Trim(server, "[]"), "2379"
		}
		n, err := strconv.Atoi(port)
		_, noIP := netip.ParseAddr(host)
		if host == "" || strings.ContainsAny(host, " []/?#") || strings.Contains(host, ":") && noIP != nil ||
			err != nil || n < 1 || n > 65535 {
			return a, bad("%q is no HOST:PORT", server)
		}
		a.Servers = append(a.Servers, net.JoinHostPort(host, port))
	}
	if a.Name = name; !nameOf.MatchString(name) {
		return a, bad("%q is no name of a cluster: after the servers there must be / and at most 63 letters, digits, "+
			"dots, dashes and underscores", name)
	}
	return a, nil
}

func bad(format string, args ...any) error {
	return fmt.Errorf("the address of a cluster is etcd://HOST:PORT[,HOST:PORT…]/NAME: "+format, args...)
}

// String is the address without the password.
func (a Address) String() string {
	scheme, user := "etcd://", ""
	if a.TLS {
		scheme = "etcds://"
	}
	if a.User != "" {
		user = url.PathEscape(a.User) + "@"
	}
	return scheme + user + strings.Join(a.Servers, ",") + "/" + a.Name
}

// Root begins all keys of the cluster.
func (a Address) Root() string { return "/shoal/v1/" + a.Name + "/" }

// Dial connects to the etcd there, with its own patience, for what no [Cluster] does. config is for etcds://; nil: the
// system's authorities. why puts what the connection said in place of a deadline.
func (a Address) Dial(ctx context.Context, config *tls.Config) (client *v3.Client, why func(error) error, err error) {
	s := &session{}
	client, err = a.dial(ctx, config, usual, s.note)
	return client, s.why, err
}

func (a Address) dial(ctx context.Context, config *tls.Config, p pace, note grpc.UnaryClientInterceptor) (
	*v3.Client, error) {
	if config = cmp.Or(config, &tls.Config{MinVersion: tls.VersionTLS12}).Clone(); !a.TLS {
		config = nil
	}
	params := grpc.ConnectParams{MinConnectTimeout: 2 * p.answer,
		Backoff: backoff.Config{BaseDelay: p.beat / 4, Multiplier: 1.6, Jitter: 0.2, MaxDelay: p.beat}}
	return v3.New(v3.Config{Endpoints: a.Endpoints(), Username: a.User, Password: a.Password, TLS: config,
		Context: ctx, DialTimeout: 2 * p.answer, DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: p.answer,
		Logger: zap.NewNop(), DialOptions: []grpc.DialOption{grpc.WithConnectParams(params),
			grpc.WithChainUnaryInterceptor(note)}})
}

// Endpoints are the servers as etcd's client names them.
func (a Address) Endpoints() []string {
	scheme := "http://"
	if a.TLS {
		scheme = "https://"
	}
	out := make([]string, len(a.Servers))
	for i, s := range a.Servers {
		out[i] = scheme + s
	}
	return out
}

// Listen listens where other nodes reach this one: at an advertised HOST:PORT, or at the address from which this
// machine reaches etcd, and a port; at the port alone if the address is not one of this machine's interfaces. at is
// HOST:PORT for the others.
func (a Address) Listen(advertised, port string) (l net.Listener, at string, err error) {
	if advertised == "" {
		c, err := net.Dial("udp", a.Servers[0]) // sends nothing
		if err != nil {
			return nil, "", fmt.Errorf(
				"--cluster: no way to etcd at %s: %w (give --advertise HOST:PORT, and check the address)",
				a.Servers[0], err)
		}
		host, _, _ := net.SplitHostPort(c.LocalAddr().String())
		advertised = net.JoinHostPort(host, port)
		c.Close()
	}
	host, port, _ := net.SplitHostPort(advertised)
	l, err = net.Listen("tcp", advertised)
	if errors.Is(err, syscall.EADDRNOTAVAIL) {
		l, err = net.Listen("tcp", ":"+port)
	}
	if err != nil {
		return nil, "", fmt.Errorf("--advertise %s: %w (give a free HOST:PORT that the other nodes reach)",
			advertised, err)
	}
	_, port, _ = net.SplitHostPort(l.Addr().String())
	return l, net.JoinHostPort(host, port), nil
}
