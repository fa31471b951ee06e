package prefetch

// Fair shares one server (the connections to a store) among flows in proportion to their weights, by start-time fair
// queueing: P. Goyal, H. M. Vin and H. Cheng, "Start-Time Fair Queueing: A Scheduling Algorithm for Integrated Services
// Packet Switching Networks", SIGCOMM 1996. Among the flows with a request, the one with the smallest tag is next.
//
// An idle flow gains and loses nothing: its tag moves up to the others' when it comes back. While two flows both have
// requests, their service in bytes per unit of weight differs by at most the largest request of each, divided by its
// weight (the paper's theorem 1): so no flow starves, whatever the weights.
//
// The zero value is ready to use. It is not safe for concurrent use.
type Fair struct {
	now float64 // virtual time: the start tag of the last request that was served
}

// Flow is one of the sharing flows.
type Flow struct {
	Weight float64 // more than 0
	Served int64   // bytes of all its requests
	finish float64 // tag at which its last request ends
}

// Tag returns the start tag of the flow's next request.
func (f *Fair) Tag(w *Flow) float64 { return max(f.now, w.finish) }

// Serve accounts for a request of the flow.
func (f *Fair) Serve(w *Flow, bytes int64) {
	start := f.Tag(w)
	f.now = start
	w.finish = start + float64(bytes)/w.Weight
	w.Served += bytes
}
