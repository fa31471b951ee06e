package cluster

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	v3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
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

	due    time.Time // when etcd is asked next
	roll   roll
	events chan v3.WatchResponse // of the watches,
	unsee  context.CancelFunc    // which this ends,
	unlead context.CancelFunc    // and this the lead's
	next   time.Time             // when this node may make a batch, or become the lead
	rev    int64                 // when this node was last written,
	said   string                // and what etcd has of it

	mu   sync.Mutex
	drop map[string]string // locks to let go of: the key by the token
	last error             // what went wrong on the wire
	slow time.Duration     // how long the slowest exchange with etcd took of late
}

func (c *Cluster) key(kind, name string) string { return c.at.Root() + kind + name }

// open connects. A session has a client of its own, so that nothing of a connection that hung outlives it.
func (c *Cluster) open(ctx context.Context) (*session, error) {
	// the first one connects
	s := &session{c: c, drop: map[string]string{}, roll: roll{torn: true}, unsee: func() {}, unlead: func() {},
		slow: c.pace.answer}
	var err error
	if s.Client, err = c.at.dial(ctx, c.o.TLS, c.pace, s.note); err != nil {
		return nil, s.why(err)
	}
	s.ctx, s.lose = context.WithCancelCause(ctx)
	s.ttl = c.pace.lease
	s.end = time.AfterFunc(s.ttl, func() { s.lose(fmt.Errorf("%w: %w", ErrLost, ErrAway)) }) // as nothing was heard
	return s, nil
}

// note is what each exchange goes through: the client puts the deadline's error in place of what the connection said.
func (s *session) note(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, call grpc.UnaryInvoker,
	opts ...grpc.CallOption) error {
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
	c.session.Store(s)
	defer c.session.Store(nil)
	for {
		err := s.turn()
		if err != nil && s.ctx.Err() == nil {
			err = s.turn() // the client asks servers in turn, and this one may be the only one that hangs
		}
		wait := c.pace.beat
		switch {
		case s.ctx.Err() != nil:
			return context.Cause(s.ctx)
		case err != nil: // etcd may have lost what it had
			s.due, s.roll.asked, s.roll.news = time.Time{}, 0, nil
			c.failed(s.why(err))
		default:
			c.well()
			wait = time.Until(s.due)
			if v, ok := s.roll.view(c.o.Self); ok {
				if due := c.heard(v); !due.IsZero() {
					wait = min(wait, time.Until(due))
				}
			}
			if s.roll.busy() {
				wait = min(wait, time.Until(s.next))
			}
		}
		if !c.pause(s.ctx, wait) {
			return context.Cause(s.ctx)
		}
		s.hear()
	}
}

// asking bounds an exchange with etcd: rule 5.
func (s *session) asking(ctx context.Context) (context.Context, context.CancelFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return context.WithTimeout(ctx, min(max(s.c.pace.answer/2, 4*s.slow), 2*s.c.pace.answer))
}

// register puts the node under a new lease: rule 10.
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
	s.roll.me = fmt.Sprintf("%x", s.lease)
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

// put writes the node, unless etcd has it so, if it was last written at rev.
func (s *session) put(rev int64) (ok bool, err error) {
	s.c.mu.Lock()
	text, err := json.Marshal(s.c.self)
	s.c.mu.Unlock()
	value := string(text)
	if err != nil || value == s.said {
		return true, err
	}
	ctx, cancel := s.asking(s.ctx)
	defer cancel()
	key := s.c.key("nodes/", s.c.o.Self.ID)
	answer, err := s.Txn(ctx).If(v3.Compare(v3.ModRevision(key), "=", rev)).
		Then(v3.OpPut(key, value, v3.WithLease(s.lease))).Commit()
	if ok = err == nil && answer.Succeeded; ok {
		s.said, s.rev, s.roll.asked = value, answer.Header.Revision, 0
	}
	return ok, err
}

// turn asks etcd when it is time, and says what there is to say.
func (s *session) turn() error {
	if !time.Now().Before(s.due) {
		if err := s.ask(); err != nil {
			return err
		}
	}
	s.unlock()
	if s.c.o.Self.ID == "" {
		return nil
	}
	if ok, err := s.put(s.rev); err != nil {
		return err
	} else if !ok { // somebody else has written it: look again
		s.due = time.Time{}
		return nil
	}
	if !s.roll.busy() || time.Now().Before(s.next) {
		return nil
	}
	if s.roll.news == nil {
		return s.bid()
	}
	return s.tell()
}

// ask renews the lease, and asks etcd whether the list is still its own if anything was written: rules 1 and 5.
func (s *session) ask() error {
	c := s.c
	if s.lease != 0 {
		if rev, err := s.renew(); err != nil {
			return err
		} else if s.roll.stands(rev) {
			s.due = s.renewed.Add(s.ttl / 2)
			return nil
		}
	}
	ctx, cancel := s.asking(s.ctx)
	defer cancel()
	began, known, seen := time.Now(), s.roll.rev, max(s.roll.seen, s.rev)
	answer, err := s.Txn(ctx).Then(v3.OpGet(c.key("last", "")), v3.OpGet(c.key("written/", "lead")),
		v3.OpGet(c.key("versions/", ""), v3.WithLastRev()...), v3.OpGet(c.key("nodes/", c.o.Self.ID))).Commit()
	if err != nil {
		return err
	}
	if s.lease == 0 {
		s.prolong(began)
	} else if c.o.Self.ID != "" {
		if err := s.look(answer.Responses[3].GetResponseRange().Kvs); err != nil {
			s.lose(err)
			return err
		}
	}
	s.due = s.renewed.Add(s.ttl / 2)
	for _, kv := range answer.Responses[2].GetResponseRange().Kvs {
		c.published(kv)
	}
	s.hear() // what came before the answer
	rev, last, lead := answer.Header.Revision, valueOf(answer, 0), valueOf(answer, 1)
	if s.lease != 0 && rev < seen { // etcd was restored from a copy: rule 8
		s.lose(ErrLost)
		return ErrLost
	}
	s.roll.seen = max(s.roll.seen, rev)
	if s.roll.answer(known, rev, last, lead); s.roll.torn {
		return s.list(rev, last, lead)
	}
	return nil
}

// valueOf is what a transaction got by its i-th question.
func valueOf(answer *v3.TxnResponse, i int) string {
	if kvs := answer.Responses[i].GetResponseRange().Kvs; len(kvs) > 0 {
		return string(kvs[0].Value)
	}
	return ""
}

// list reads the list as the last batch left it, and follows it from there: rule 2.
func (s *session) list(rev int64, last, lead string) error {
	ctx, cancel := s.asking(s.ctx)
	defer cancel()
	nodes, told := s.c.key("nodes/", ""), toldBy(last)
	got, err := s.Get(ctx, nodes, v3.WithPrefix(), v3.WithRev(told))
	ahead := told == 0
	if errors.Is(err, rpctypes.ErrCompacted) {
		ahead = true
		got, err = s.Get(ctx, nodes, v3.WithPrefix())
	}
	if err != nil {
		return err
	}
	s.unsee()
	s.unlead()
	s.events = make(chan v3.WatchResponse, 64)
	s.roll.read(got.Kvs, ahead, rev, last, lead)
	s.unsee = s.see(rev, "written/", "versions/")
	s.wait()
	return nil
}

// see watches keys from after a revision, until end is called.
func (s *session) see(rev int64, kinds ...string) (end context.CancelFunc) {
	ctx, end := context.WithCancel(s.ctx)
	events := s.events
	for _, kind := range kinds {
		go func() {
			seen := s.Watch(ctx, s.c.key(kind, ""), v3.WithPrefix(), v3.WithRev(rev+1))
			for more := true; more; s.c.poke() {
				var r v3.WatchResponse
				if r, more = <-seen; ctx.Err() != nil {
					return
				}
				r.Canceled = !more // the revision has been compacted, or this user may not watch
				select {
				case events <- r:
				case <-ctx.Done():
					return
				}
			}
		}()
	}
	return end
}

// wait lets the nodes become the lead one after another, if there is none: rule 3.
func (s *session) wait() {
	if s.roll.lead != "" {
		return
	}
	i, _ := find(s.roll.nodes, s.c.o.Self.ID)
	s.next = time.Now().Add(time.Duration(i) * s.c.pace.beat / 20)
	if s.roll.last != "" && s.roll.ahead {
		s.next = s.next.Add(s.c.pace.beat)
	}
}

// hear takes what the watches have said.
func (s *session) hear() {
	for r := &s.roll; ; {
		select {
		case seen := <-s.events:
			was := r.torn
			r.seen = max(r.seen, seen.Header.GetRevision())
			r.asked, r.torn = 0, was || seen.Canceled
			for _, e := range seen.Events {
				switch kind, name, _ := strings.Cut(strings.TrimPrefix(string(e.Kv.Key), s.c.key("", "")), "/"); {
				case kind == "versions":
					s.c.published(e.Kv)
				case kind == "nodes":
					r.hear(e.Kv)
				case name == "nodes":
					r.take(e.Kv.Value, e.Kv.ModRevision)
				case name == "lead":
					r.lead = string(e.Kv.Value)
					s.wait()
				}
			}
			if r.torn && !was {
				s.due = time.Now().Add(s.c.pace.beat)
			}
		default:
			return
		}
	}
}

// is compares a key's value, "" if there is none.
func is(key, value string) v3.Cmp {
	if value == "" {
		return v3.Compare(v3.CreateRevision(key), "=", 0)
	}
	return v3.Compare(v3.Value(key), "=", value)
}

// bid makes this node the lead if there is none: rule 3.
func (s *session) bid() error {
	c, r, lead := s.c, &s.roll, s.c.key("written/", "lead")
	ctx, cancel := s.asking(s.ctx)
	defer cancel()
	then := []v3.Op{v3.OpGet(c.key("nodes/", ""), v3.WithPrefix())}
	if r.lead == "" {
		then = append(then, v3.OpPut(lead, r.me, v3.WithLease(s.lease)))
	}
	answer, err := s.Txn(ctx).If(is(lead, r.lead), is(c.key("last", ""), r.last)).Then(then...).Commit()
	if err != nil {
		return err
	}
	if !answer.Succeeded { // another is, as will be heard
		s.next = time.Now().Add(c.pace.beat)
		return nil
	}
	r.begin(answer.Header.Revision, answer.Responses[0].GetResponseRange().Kvs)
	s.unlead()
	s.unlead = s.see(answer.Header.Revision, "nodes/")
	return nil
}

// tell makes a batch of what is in none: rule 2.
func (s *session) tell() error {
	c, r := s.c, &s.roll
	ctx, cancel := s.asking(s.ctx)
	defer cancel()
	b, last := r.batch(rand.Text()), c.key("last", "")
	packed := b.pack()
	answer, err := s.Txn(ctx).If(is(c.key("written/", "lead"), r.me), is(last, r.last)).Then(v3.OpPut(last, b.Last),
		v3.OpPut(c.key("written/", "nodes"), packed), v3.OpPut(c.key("written", ""), b.Last)).Commit()
	if err != nil {
		return err
	}
	s.next = time.Now().Add(c.pace.beat / 4)
	if r.news = nil; answer.Succeeded {
		r.news = map[string]Node{}
		if r.take([]byte(packed), answer.Header.Revision); r.torn {
			s.due = s.next
		}
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

// look finds this process in etcd, and whether somebody has marked it.
func (s *session) look(kvs []*mvccpb.KeyValue) error {
	if len(kvs) == 0 {
		return ErrLost
	}
	var r Node
	if err := json.Unmarshal(kvs[0].Value, &r); err != nil || r.Instance != s.c.o.Self.Instance {
		return ErrTaken
	}
	s.rev, s.said = kvs[0].ModRevision, string(kvs[0].Value)
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.c.self.Draining = s.c.self.Draining || r.Draining
	return nil
}

// renew renews the lease, and returns etcd's revision then.
func (s *session) renew() (rev int64, err error) {
	ctx, cancel := s.asking(s.ctx)
	defer cancel()
	began := time.Now()
	answer, err := s.KeepAliveOnce(ctx, s.lease)
	if err != nil {
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			s.lose(ErrLost)
		}
		return 0, err
	}
	s.prolong(began)
	return answer.Revision, nil
}

// prolong counts the lease from before etcd does, and ends it a fifth earlier: rule 8.
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
