package loader

import (
	"context"
	"errors"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// peerOf returns the caller of an RPC, with the fingerprint of its token if the server checks tokens.
func peerOf(ctx context.Context, tokens bool) *audit.Peer {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	who := audit.Of(p.Addr)
	if sent := metadata.ValueFromIncomingContext(ctx, "authorization"); tokens && len(sent) == 1 {
		if _, token, ok := strings.Cut(sent[0], " "); ok {
			who.Token = audit.Fingerprint(strings.TrimSpace(token))
		}
	}
	return who
}

func (open *session) event(name string) audit.Event {
	sp := open.spec
	return audit.Event{Event: name, Dataset: open.ds.Version(), Order: sp.orderName, Session: sp.session,
		Client: sp.client, Rank: new(sp.rank), World: sp.world, Batch: sp.batch, Epoch: new(sp.start.Epoch),
		Transform: sp.transformName(), Peer: open.peer}
}

// auditRefused records a session that was refused.
func (s *Server) auditRefused(ctx context.Context, o *feedpb.Open, err error) {
	s.o.Audit.Write(audit.Event{Event: "feed_open", Outcome: "refused", Cause: err.Error(), Order: o.GetOrder(),
		Session: o.GetSession(), Client: o.GetClient(), Rank: new(int(o.GetRank())), World: int(o.GetWorld()),
		Peer: peerOf(ctx, s.o.Tokens != nil)})
}

// auditEnded records how a session ended.
func (s *Server) auditEnded(open *session, err error) {
	e := open.event("feed_end")
	e.Samples, e.Seconds = open.count.samples.Load(), time.Since(open.opened).Seconds()
	if err != nil && Code(err) != codes.Canceled {
		e.Cause = err.Error()
		if e.Outcome = "failed"; errors.Is(err, errFenced) || errors.Is(err, errStopping) {
			e.Outcome = ""
		}
	}
	s.o.Audit.Write(e)
}
