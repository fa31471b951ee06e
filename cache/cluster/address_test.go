package cluster

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/certtest"
)

func TestParse(t *testing.T) {
	for in, want := range map[string]Address{
		"etcd://a:1/n":                 {Servers: []string{"a:1"}, Name: "n"},
		"etcd://a,b:2,[::1]:3,[::2]/n": {Servers: []string{"a:2379", "b:2", "[::1]:3", "[::2]:2379"}, Name: "n"},
		"etcds://u:p%40%2f:@a:1/n.1_-": {Servers: []string{"a:1"}, Name: "n.1_-", TLS: true,
			User: "u", Password: "p@/:"},
	} {
		if got, err := Parse(in); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v %v", in, got, err)
		}
	}
	for in, part := range map[string]string{
		"":                        "must begin with etcd://",
		"http://a:1/n":            "must begin with etcd://",
		"etcd://a:1":              "no name of a cluster",
		"etcd://a:1/":             "no name of a cluster",
		"etcd://a:1/a/b":          "no name of a cluster",
		"etcd:///n":               "no HOST:PORT",
		"etcd://a:x/n":            "no HOST:PORT",
		"etcd://a:1,,b:1/n":       "no HOST:PORT",
		"etcd://a:70000/n":        "no HOST:PORT",
		"etcd://a:1:b:2/n":        "no HOST:PORT",
		"etcd://secret@a:1/n":     "USER:PASSWORD",
		"etcd://:secret@a:1/n":    "USER:PASSWORD",
		"etcd://u:%secret@a:1/n":  "has a % that is not followed by two hex digits (write %25 for a %)",
		"etcd://u:secret@a:1/n/m": "no name",
	} {
		if _, err := Parse(in); err == nil || !strings.Contains(err.Error(), part) ||
			strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", in, err)
		}
	}
	if a, _ := Parse("etcds://u:secret@a:1,b/n"); a.String() != "etcds://u@a:1,b:2379/n" {
		t.Error(a)
	}
	for _, self := range []Node{{ID: "xyz"}, {ID: "0123456789ABCDEF", Address: "a:1", Weight: 1},
		{ID: "0123456789abcdef", Weight: 1}, {ID: "0123456789abcdef", Address: "a:1"}} {
		if _, err := Join(Options{URL: "etcd://a:1/n", Self: self}); err == nil {
			t.Error(self)
		}
	}
}

func TestUserAndRights(t *testing.T) {
	s := server(t, "--bcrypt-cost", "4")
	admin, _ := joinAs(t, Options{URL: where(s)})
	if err := admin.Quiet(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	ss, ctx := admin.session.Load(), t.Context()
	var errs [9]error
	_, errs[0] = ss.UserAdd(ctx, "root", "r")
	_, errs[1] = ss.RoleAdd(ctx, "root")
	_, errs[2] = ss.UserGrantRole(ctx, "root", "root")
	_, errs[3] = ss.UserAdd(ctx, "u", "p/@")
	_, errs[4] = ss.RoleAdd(ctx, "shoal")
	_, errs[5] = ss.UserGrantRole(ctx, "u", "shoal")
	_, errs[6] = ss.RoleGrantPermission(ctx, "shoal", "/shoal/v1/test/", "/shoal/v1/test0", 2)
	_, errs[7] = ss.AuthEnable(ctx)
	for i, err := range errs {
		if err != nil {
			t.Fatal(i, err)
		}
	}
	for at, part := range map[string]string{
		"etcd://" + s.Addr + "/test":            "wants a user and a password",
		"etcd://u:x@" + s.Addr + "/test":        "refuses the user or the password",
		"etcd://u:p%2F%40@" + s.Addr + "/other": "role grant-permission ROLE readwrite --prefix=true /shoal/v1/other/",
	} {
		c, _ := joinAs(t, Options{URL: at, Self: node(1)})
		if err := c.Quiet(within(t, 4*time.Second)); err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s: %v", at, err)
		}
	}
	c, _ := joinAs(t, Options{URL: "etcd://u:p%2F%40@" + s.Addr + "/test", Self: node(1)})
	if err := c.Quiet(within(t, patience)); err != nil {
		t.Error(err)
	}
	_, unlock, err := c.Lock(within(t, patience), "l")
	if err != nil {
		t.Fatal(err)
	}
	unlock()
}

func TestTLS(t *testing.T) {
	ca, other := certtest.New(t, "ours"), certtest.New(t, "another")
	cert, key := ca.Issue(t, "127.0.0.1", time.Hour)
	s := serverTLS(t, true, "--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca.File, "--client-cert-auth")
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	with := func(a *certtest.Authority, pairs ...tls.Certificate) *tls.Config {
		pem, err := os.ReadFile(a.File)
		if err != nil {
			t.Fatal(err)
		}
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(pem)
		return &tls.Config{RootCAs: pool, Certificates: pairs, MinVersion: tls.VersionTLS12}
	}
	at := "etcds://" + s.Addr + "/test"
	c, _ := joinAs(t, Options{URL: at, Self: node(1), TLS: with(ca, pair)})
	if err := c.Quiet(within(t, patience)); err != nil {
		t.Error(err)
	}
	for _, bad := range []*tls.Config{nil, with(other, pair), with(ca)} {
		c, _ := joinAs(t, Options{URL: at, Self: node(2), TLS: bad})
		refused(t, c, "certificate")
	}
	plain, _ := joinAs(t, Options{URL: strings.Replace(at, "etcds", "etcd", 1), Self: node(3)})
	refused(t, plain, "etcds://")
}

// refused waits until it is said why a process cannot join: a slow handshake is first said to get no answer.
func refused(t *testing.T, c *Cluster, why string) {
	t.Helper()
	eventually(t, "the cause has "+why, func() bool {
		err := c.Quiet(within(t, 100*time.Millisecond))
		return err != nil && strings.Contains(err.Error(), why)
	})
}
