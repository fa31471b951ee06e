// Package dashboard is the web page of a daemon: it shows what `shoal top` shows, and more. The page is static and
// embedded. It loads nothing from elsewhere, and draws the data of /stats and /api.
package dashboard

import (
	"cmp"
	"embed"
	"io/fs"
	"net/http"
	"path"
)

//go:embed web
var web embed.FS

// policy lets the page load from and connect to its own origin only, run no inline script, and not be framed.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// types are those of the files. The machine's own tables may be wrong, and browsers may not guess.
var types = map[string]string{
	".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
	".svg": "image/svg+xml",
}

// Handler serves the page at / and its files beside it.
func Handler() http.Handler {
	dir, err := fs.Sub(web, "web")
	if err != nil {
		panic(err) // the folder is embedded
	}
	files := http.FileServerFS(dir)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-cache") // a newer daemon has a newer page
		h.Set("Content-Type", types[cmp.Or(path.Ext(r.URL.Path), ".html")])
		files.ServeHTTP(w, r)
	})
}
