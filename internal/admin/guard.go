package admin

import (
	"net"
	"net/http"

	"github.com/shoalfs/shoal/s3api"
)

// sameHost refuses requests over loopback whose Host header names another host. Otherwise a web page whose name was
// pointed at this machine (DNS rebinding) could read the counters, since the browser sees one origin.
func sameHost(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if at, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok && at.IP.IsLoopback() && !s3api.LoopbackName(r.Host) {
			http.Error(w, "the admin address on loopback serves localhost only (a proxy in front of it must send Host: localhost)", http.StatusMisdirectedRequest)
			return
		}
		w.Header().Set("X-Content-Type-Options", "nosniff")
		next.ServeHTTP(w, r)
	})
}
