package loader

import "context"

// Drain refuses new sessions and lets open ones finish: each gets the batches that it has granted credits for, and
// then the error that the server is stopping. Drain returns when no session is left or ctx ends, with the number of
// sessions that there were and of those still open, which [Server.Close] then ends. It is called once.
func (s *Server) Drain(ctx context.Context) (sessions, left int) {
	s.mu.Lock()
	s.stopping = true
	sessions = len(s.sessions)
	for open := range s.sessions {
		open.window.freeze()
	}
	var idle chan struct{}
	if sessions > 0 {
		idle = make(chan struct{})
		s.idle = idle
	}
	s.mu.Unlock()
	s.health.Shutdown() // last: once health says so, sessions really are refused
	if idle == nil {
		return 0, 0
	}
	select {
	case <-idle:
		return sessions, 0
	case <-ctx.Done():
		s.mu.Lock()
		defer s.mu.Unlock()
		return sessions, len(s.sessions)
	}
}
