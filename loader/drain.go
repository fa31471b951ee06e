package loader

import "context"

// Drain refuses new sessions and lets those that are open end: each gets the batches that it has granted credits
// for, whole, and then the error that the server is stopping. It returns when none is left or ctx ends, and
// how many sessions there were and how many of them are still there, which [Server.Close] then cuts off.
// It is called once.
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
	s.health.Shutdown() // not before: who is told that no session is taken finds it so
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
