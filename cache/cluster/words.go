package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// why puts what the connection said in place of a deadline.
func (s *session) why(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if errors.Is(err, context.DeadlineExceeded) && s.last != nil {
		return fmt.Errorf("%w: %w", ErrAway, s.last)
	}
	return err
}

// Explain says what to do about an error of the etcd there.
func (a Address) Explain(err error) string {
	text := err.Error()
	if i := strings.LastIndex(text, "desc = "); i >= 0 { // gRPC wraps it two or three times
		text = strings.TrimPrefix(strings.Trim(text[i+len("desc = "):], `"`), "transport: ")
	}
	is := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(text, p) })
	}
	servers := strings.Join(a.Servers, ", ")
	switch {
	case errors.Is(err, ErrTaken):
		return "another process has this node's ID: waiting for its lease to end"
	case errors.Is(err, ErrLost) && !errors.Is(err, ErrAway):
		return "the lease in etcd has ended: registering again"
	case errors.Is(err, rpctypes.ErrAuthFailed):
		return "etcd refuses the user or the password of " + a.String()
	case errors.Is(err, rpctypes.ErrUserEmpty), errors.Is(err, rpctypes.ErrPermissionDenied) && a.User == "":
		// which is then the certificate's name
		return "etcd wants a user and a password: etcd://USER:PASSWORD@" + servers + "/" + a.Name
	case errors.Is(err, rpctypes.ErrPermissionDenied):
		return "etcd's user " + a.User +
			" has no rights here: etcdctl role grant-permission ROLE readwrite --prefix=true " + a.Root()
	case errors.Is(err, rpctypes.ErrNoSpace):
		return "etcd is full: compact and defragment it, then etcdctl alarm disarm"
	case is("certificate", "tls: "):
		return "etcd at " + servers + " and this node do not trust each other's certificates: " + text
	case is("server preface", "broken pipe", "connection reset") && !is("use of closed network connection"):
		// which this end closed, after its wait
		return "etcd at " + servers +
			" closes the connection: it may want TLS (etcds:// instead of etcd://) or a client certificate: " + text
	case is("connection refused", "no such host", "no route", "unreachable"):
		return "etcd at " + servers + " cannot be reached: see that it runs, and that this machine reaches it: " + text
	}
	return "etcd at " + servers +
		" does not answer: see that it runs and has a leader (etcdctl endpoint status): " + text
}
