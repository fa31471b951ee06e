package cluster

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	v3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

// session is one connection to etcd with one lease. What is under the lease ends with it.
type session struct {
	*v3.Client
	c     *Cluster
	ctx   context.Context // ends before the lease does
	lose  context.CancelCauseFunc
	lease v3.LeaseID // 0 for those who look on

	ttl     time.Duration // without an answer for so long, the session ends
	renewed time.Time
	end     *time.Timer

	nodes   int64  // the list was read when there were so many,
	written string // and this was the last write
	rev     int64  // when this node was last written,
	said    string // and what this process wrote
	list    View

	mu   sync.Mutex
	drop map[string]string // locks to let go of: the key by the token
	last error             // what went wrong on the wire
	slow time.Duration     // how long the slowest exchange with etcd took of late
}

func (c *Cluster) key(kind, name string) string { return "/shoal/v1/" + c.at.Name + "/" + kind + name }

func (c *Cluster) current() *session {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.session
}

func (c *Cluster) use(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.session = s
}

// open connects. A session has a client of its own, so that nothing of a connection that hung outlives it.
func (c *Cluster) open(ctx context.Context) (*session, error) {
	s := &session{c: c, drop: map[string]string{}, nodes: -1, slow: c.pace.answer} // the first one connects
	// The client puts the deadline's error in place of what the connection said.
	noted := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		began := time.Now()
		err := call(ctx, method, req, reply, cc, opts...)
		s.mu.Lock()
		defer s.mu.Unlock()
		if err != nil {
			s.last = err
		} else {
			s.slow = max(time.Since(began), s.slow*3/4)
		}
		return err
	}
	dial := grpc.ConnectParams{MinConnectTimeout: 2 * c.pace.answer,
		Backoff: backoff.Config{BaseDelay: c.pace.beat / 4, Multiplier: 1.6, Jitter: 0.2, MaxDelay: c.pace.beat}}
	var err error
	s.Client, err = v3.New(v3.Config{Endpoints: c.at.endpoints(), Username: c.at.User, Password: c.at.Password, TLS: c.tls(),
		Context: ctx, DialTimeout: 2 * c.pace.answer, DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: c.pace.answer,
		Logger: zap.NewNop(), DialOptions: []grpc.DialOption{grpc.WithConnectParams(dial), grpc.WithChainUnaryInterceptor(noted)}})
	if err != nil {
		return nil, s.why(err)
	}
	s.ctx, s.lose = context.WithCancelCause(ctx)
	s.ttl = c.pace.lease
	s.end = time.AfterFunc(s.ttl, func() { s.lose(ErrLost) })
	return s, nil
}

// hold registers and stays until the lease is lost.
func (c *Cluster) hold(ctx context.Context) error {
	s, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	defer s.lose(ErrLost)
	defer s.end.Stop()
	defer s.leave(ctx)
	switch {
	case c.o.Self.ID != "":
		err = s.register()
	case c.o.Locks:
		err = s.grant()
	}
	if err != nil {
		return s.why(err)
	}
	c.use(s)
	defer c.use(nil)
	for {
		err := s.beat()
		if err != nil && s.ctx.Err() == nil {
			err = s.beat() // the client asks servers in turn, and this one may be the only one that hangs
		}
		switch {
		case s.ctx.Err() != nil:
			return context.Cause(s.ctx)
		case err != nil:
			c.failed(s.why(err))
		default:
			c.well()
			c.heard(s.list)
		}
		if !c.pause(s.ctx, c.pace.beat) {
			return context.Cause(s.ctx)
		}
	}
}

// asking bounds an exchange with etcd: rule 2.
func (s *session) asking(ctx context.Context) (context.Context, context.CancelFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return context.WithTimeout(ctx, min(max(s.c.pace.answer/2, 4*s.slow), 2*s.c.pace.answer))
}

// register puts the node under a new lease: rule 7.
func (s *session) register() error {
	c := s.c
	key := c.key("nodes/", c.o.Self.ID)
	ctx, cancel := s.asking(s.ctx)
	defer cancel()
	got, err := s.Get(ctx, key)
	if err != nil {
		return err
	}
	var rev, old int64
	if len(got.Kvs) > 0 {
		var r Node
		kv := got.Kvs[0]
		if err := json.Unmarshal(kv.Value, &r); err != nil || !c.mayFollow(r) {
			return ErrTaken
		}
		rev, old = kv.ModRevision, kv.Lease
	}
	if err := s.grant(); err != nil {
		return err
	}
	if ok, err := s.put(rev); err != nil {
		return err
	} else if !ok {
		return ErrLost
	}
	if old != 0 { // the locks of the process before
		ctx, cancel := s.asking(s.ctx)
		defer cancel()
		_, _ = s.Revoke(ctx, v3.LeaseID(old))
	}
	return nil
}

// mayFollow tells whether this process may take r's place: it wrote r itself, or it has just started where r was.
func (c *Cluster) mayFollow(r Node) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return r.Instance == c.self.Instance || !c.joined && r.Address == c.self.Address
}

// value is this node for etcd.
func (c *Cluster) value() (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	value, err := json.Marshal(c.self)
	return string(value), err
}

// put writes the node, unless etcd has it so, if it was last written at rev.
func (s *session) put(rev int64) (ok bool, err error) {
	value, err := s.c.value()
	if err != nil || value == s.said {
		return true, err
	}
	ctx, cancel := s.asking(s.ctx)
	defer cancel()
	key := s.c.key("nodes/", s.c.o.Self.ID)
	answer, err := s.Txn(ctx).If(v3.Compare(v3.ModRevision(key), "=", rev)).
		Then(v3.OpPut(key, value, v3.WithLease(s.lease)), s.c.wrote()).Commit()
	if ok = err == nil && answer.Succeeded; ok {
		s.said = value
	}
	return ok, err
}

// beat asks etcd what has changed, and renews the lease when it is time.
func (s *session) beat() error {
	c := s.c
	ctx, cancel := s.asking(s.ctx)
	defer cancel()
	began, nodes := time.Now(), c.key("nodes/", "")
	answer, err := s.Txn(ctx).Then(v3.OpGet(nodes, v3.WithPrefix(), v3.WithCountOnly()), v3.OpGet(c.key("written", "")),
		v3.OpGet(nodes+c.o.Self.ID)).Commit()
	if err != nil {
		return err
	}
	if s.lease == 0 {
		s.prolong(began)
	} else {
		if c.o.Self.ID != "" {
			if err := s.look(answer.Responses[2].GetResponseRange().Kvs); err != nil {
				s.lose(err)
				return err
			}
		}
		if err := s.renew(); err != nil {
			return err
		}
		s.unlock()
		if c.o.Self.ID != "" {
			if _, err := s.put(s.rev); err != nil { // or somebody else has written it: look again
				return err
			}
		}
	}
	var written string
	if kvs := answer.Responses[1].GetResponseRange().Kvs; len(kvs) > 0 {
		written = string(kvs[0].Value)
	}
	if n := answer.Responses[0].GetResponseRange().Count; n != s.nodes || written != s.written {
		ctx, cancel := s.asking(s.ctx)
		defer cancel()
		got, err := s.Get(ctx, nodes, v3.WithPrefix())
		if err != nil {
			return err
		}
		s.nodes, s.written = n, written
		s.list = View{Rev: got.Header.Revision, Nodes: c.read(got.Kvs)}
	}
	return nil
}

// grant gets the lease.
func (s *session) grant() error {
	ctx, cancel := s.asking(s.ctx)
	defer cancel()
	began := time.Now()
	grant, err := s.Grant(ctx, int64(s.c.pace.lease/time.Second))
	if err != nil {
		return err
	}
	s.lease, s.ttl = grant.ID, time.Duration(grant.TTL)*time.Second
	s.prolong(began)
	return nil
}

// wrote goes with each write to nodes/. A revision would not do: they come again when etcd has lost its data.
func (c *Cluster) wrote() v3.Op { return v3.OpPut(c.key("written", ""), rand.Text()) }

// look finds this process in etcd, and whether somebody has marked it.
func (s *session) look(kvs []*mvccpb.KeyValue) error {
	if len(kvs) == 0 {
		return ErrLost
	}
	var r Node
	if err := json.Unmarshal(kvs[0].Value, &r); err != nil || r.Instance != s.c.o.Self.Instance {
		return ErrTaken
	}
	s.rev = kvs[0].ModRevision
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.c.self.Draining = s.c.self.Draining || r.Draining
	return nil
}

// renew does so after a quarter of the lease.
func (s *session) renew() error {
	began := time.Now()
	if began.Sub(s.renewed) < s.ttl/4 {
		return nil
	}
	ctx, cancel := s.asking(s.ctx)
	defer cancel()
	if _, err := s.KeepAliveOnce(ctx, s.lease); err != nil {
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			s.lose(ErrLost)
		}
		return err
	}
	s.prolong(began)
	return nil
}

// prolong counts the lease from before etcd does, and ends it a fifth earlier: rule 5.
func (s *session) prolong(began time.Time) {
	s.renewed = began
	s.end.Reset(time.Until(began.Add(s.ttl * 4 / 5)))
}

// leave ends the lease for all to see if the process leaves. Otherwise it is taken over.
func (s *session) leave(ctx context.Context) {
	if s.lease != 0 && ctx.Err() != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.c.pace.answer)
		defer cancel()
		_, _ = s.Revoke(ctx, s.lease)
	}
}

// read makes nodes of what is in etcd. What is no node is left out, by all alike.
func (c *Cluster) read(kvs []*mvccpb.KeyValue) []Node {
	var out []Node
	for _, kv := range kvs {
		var n Node
		id := strings.TrimPrefix(string(kv.Key), c.key("nodes/", ""))
		if err := json.Unmarshal(kv.Value, &n); err == nil && n.ID == id && idOf.MatchString(id) && n.Weight > 0 {
			out = append(out, n)
		}
	}
	slices.SortFunc(out, func(a, b Node) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// unlock deletes the locks that were let go of.
func (s *session) unlock() {
	ctx, cancel := s.asking(s.ctx)
	defer cancel()
	s.mu.Lock()
	drop := maps.Clone(s.drop)
	s.mu.Unlock()
	for token, key := range drop {
		if _, err := s.Txn(ctx).If(v3.Compare(v3.Value(key), "=", token)).Then(v3.OpDelete(key)).Commit(); err != nil {
			return
		}
		s.mu.Lock()
		delete(s.drop, token)
		s.mu.Unlock()
	}
}
