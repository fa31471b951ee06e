package admin

import (
	"net"
	"net/http"
	"strings"
)

// sameHost refuses requests over loopback whose Host header names another host. Otherwise a web page whose name was
// pointed at this machine (DNS rebinding) could read the counters, since the browser sees one origin.
func sameHost(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if at, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok && at.IP.IsLoopback() && !loopbackName(r.Host) {
			http.Error(w, "the admin address on loopback serves localhost only (a proxy in front of it must send Host: localhost)", http.StatusMisdirectedRequest)
			return
		}
		w.Header().Set("X-Content-Type-Options", "nosniff")
		next.ServeHTTP(w, r)
	})
}

// loopbackName reports whether a Host header names this machine and can name no other.
func loopbackName(host string) bool {
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	name = strings.ToLower(strings.TrimSuffix(strings.Trim(name, "[]"), "."))
	if name == "localhost" || strings.HasSuffix(name, ".localhost") {
		return true
	}
	ip := net.ParseIP(name)
	return ip != nil && ip.IsLoopback()
}
