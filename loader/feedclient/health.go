package feedclient

import (
	"context"
	"fmt"

	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/shoalfs/shoal/loader/feedpb"
)

// Healthy returns nil if the server takes new sessions. No token is needed.
func (c *Client) Healthy(ctx context.Context) error {
	r, err := grpc_health_v1.NewHealthClient(c.conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: feedpb.Feed_ServiceDesc.ServiceName})
	if err != nil {
		return c.explain(err)
	}
	if s := r.GetStatus(); s != grpc_health_v1.HealthCheckResponse_SERVING {
		return fmt.Errorf("feed %s: the server accepts no new sessions (%s): it is shutting down", c.addr, s)
	}
	return nil
}
