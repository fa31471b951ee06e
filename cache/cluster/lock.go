package cluster

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	v3 "go.etcd.io/etcd/client/v3"
)

// lock is a lock that is held: its key's value is the token.
type lock struct{ key, token string }

type lockOf struct{ *Cluster }

// Lock waits for a lock until ctx ends, or until etcd has been away for as long as a lease; then its error is ErrAway.
// held is ctx, and ends with the cause ErrLost when the lease may have ended; use it for all that the lock protects,
// Publish too. unlock returns at once.
func (c *Cluster) Lock(ctx context.Context, name string) (held context.Context, unlock func(), err error) {
	l := lock{c.key("locks/", name), c.o.Self.ID + " " + rand.Text()}
	for {
		s := c.session.Load()
		if s != nil && s.lease != 0 && s.try(ctx, l) {
			held, cancel := context.WithCancelCause(context.WithValue(ctx, lockOf{c}, l))
			stop := context.AfterFunc(s.ctx, func() { cancel(ErrLost) })
			return held, func() { stop(); cancel(context.Canceled); s.letGo(l) }, nil
		}
		if err := c.sleep(ctx, nil); err != nil {
			if s != nil {
				s.letGo(l) // an answer may have been lost, and the lock ours
			}
			return nil, nil, err
		}
		if is := c.State(); is.Phase != Joined && time.Since(is.Since) > c.pace.lease {
			return nil, nil, fmt.Errorf("%w: %s", ErrAway, is.Error)
		}
	}
}

// try takes the lock if it is free. It reads first: a transaction that may write costs etcd as much as one that does.
func (s *session) try(ctx context.Context, l lock) bool {
	ctx, cancel := s.within(ctx)
	defer cancel()
	got, err := s.Get(ctx, l.key)
	if err != nil || len(got.Kvs) > 0 {
		return err == nil && string(got.Kvs[0].Value) == l.token && got.Kvs[0].Lease == int64(s.lease)
	}
	answer, err := s.Txn(ctx).If(v3.Compare(v3.CreateRevision(l.key), "=", 0)).Then(
		v3.OpPut(l.key, l.token, v3.WithLease(s.lease))).Commit()
	return err == nil && answer.Succeeded
}

// letGo leaves the deletion to the next beat, so that it is tried until it succeeds or the lease ends.
func (s *session) letGo(l lock) {
	s.mu.Lock()
	s.drop[l.token] = l.key
	s.mu.Unlock()
	s.c.poke()
}

// within bounds a question of a caller, which also ends with the session.
func (s *session) within(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := s.asking(ctx)
	stop := context.AfterFunc(s.ctx, cancel)
	return ctx, func() { stop(); cancel() }
}

// ask does something with etcd, once.
func (c *Cluster) ask(ctx context.Context, what string, f func(context.Context, *session) error) error {
	err := ErrAway
	if s := c.session.Load(); s != nil {
		asking, cancel := s.within(ctx)
		defer cancel()
		if err = f(asking, s); err != nil && s.ctx.Err() != nil {
			err = ErrAway
		} else if err != nil {
			err = s.why(err)
		}
	}
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("cluster %s: %s: %w", c.at, what, err)
	}
	return nil
}

// Publish writes a value that all nodes can read. With a context from Lock it does so only while the lock is held;
// otherwise the error is ErrLost.
func (c *Cluster) Publish(ctx context.Context, key string, value []byte) error {
	return c.ask(ctx, "publish "+key, func(asking context.Context, s *session) error {
		var held []v3.Cmp
		if l, ok := ctx.Value(lockOf{c}).(lock); ok {
			held = append(held, v3.Compare(v3.Value(l.key), "=", l.token))
		}
		answer, err := s.Txn(asking).If(held...).Then(v3.OpPut(c.key("versions/", key), string(value))).Commit()
		if err == nil && !answer.Succeeded {
			return ErrLost
		}
		return err
	})
}

// Published is the last value of key, nil if there is none.
func (c *Cluster) Published(ctx context.Context, key string) (value []byte, err error) {
	err = c.ask(ctx, "read "+key, func(ctx context.Context, s *session) error {
		got, err := s.Get(ctx, c.key("versions/", key))
		if err == nil && len(got.Kvs) > 0 {
			value = got.Kvs[0].Value
		}
		return err
	})
	return value, err
}

// WatchPublished calls f with the value of key, when there is one, soon after a change of any, and after Look. It
// returns when ctx ends or the cluster is left. Of changes in quick succession it may leave some out, but never the
// last.
func (c *Cluster) WatchPublished(ctx context.Context, key string, f func(value []byte)) {
	for {
		c.mu.Lock()
		news := c.news
		c.mu.Unlock()
		value, err := c.Published(ctx, key)
		if err != nil {
			news = nil
		} else if value != nil {
			f(value)
		}
		if c.sleep(ctx, news) != nil {
			return
		}
	}
}

// Look has those who watch look again, as soon as etcd answers.
func (c *Cluster) Look() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.look()
}

func (c *Cluster) look() {
	close(c.news)
	c.news = make(chan struct{})
}

// sleep waits for news, or for a beat if news is nil, and fails when ctx ends or the cluster is left.
func (c *Cluster) sleep(ctx context.Context, news <-chan struct{}) error {
	var beat <-chan time.Time
	if news == nil {
		beat = time.After(c.pace.beat)
	}
	select {
	case <-beat:
	case <-news:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-c.done:
		return ErrLost
	}
	return nil
}

// Drain marks a node: it owns nothing any more, and still serves, until it leaves.
func (c *Cluster) Drain(ctx context.Context, id string) error {
	key := c.key("nodes/", id)
	return c.ask(ctx, "drain "+id, func(ctx context.Context, s *session) error {
		for {
			got, err := s.Get(ctx, key)
			if err != nil {
				return err
			}
			if len(got.Kvs) == 0 {
				return errors.New("there is no such node")
			}
			var r Node
			if err := json.Unmarshal(got.Kvs[0].Value, &r); err != nil || r.Draining {
				return err
			}
			r.Draining = true
			value, err := json.Marshal(r)
			if err != nil {
				return err
			}
			answer, err := s.Txn(ctx).If(v3.Compare(v3.ModRevision(key), "=", got.Kvs[0].ModRevision)).
				Then(v3.OpPut(key, string(value), v3.WithIgnoreLease())).Commit()
			if err != nil || answer.Succeeded {
				return err
			}
		}
	})
}
