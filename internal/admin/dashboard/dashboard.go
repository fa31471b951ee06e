// Package dashboard is the web page of a daemon: it shows what `shoal top` shows, and more. The page is static and
// embedded. It loads nothing from elsewhere, and draws the data of /stats and /api.
package dashboard

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"net/http"
	"path"
)

//go:embed web
var web embed.FS

// policy lets the page load from and connect to its own origin only, run no inline script, and not be framed.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// Files returns the page's files by URL path; the page itself is "/".
func Files() map[string][]byte {
	files := map[string][]byte{}
	dir, err := fs.Sub(web, "web")
	if err != nil {
		panic(err) // the folder is embedded
	}
	entries, err := fs.ReadDir(dir, ".")
	if err != nil {
		panic(err)
	}
	for _, e := range entries {
		b, err := fs.ReadFile(dir, e.Name())
		if err != nil {
			panic(err)
		}
		url := "/" + e.Name()
		if e.Name() == "index.html" {
			url = "/"
		}
		files[url] = b
	}
	return files
}

// Handler serves the page at / and its files beside it.
func Handler() http.Handler {
	type file struct {
		body       []byte
		mime, etag string
	}
	files := map[string]file{}
	for url, body := range Files() {
		name := url
		if url == "/" {
			name = "index.html"
		}
		sum := sha256.Sum256(body)
		files[url] = file{body, mimeOf(path.Ext(name)), `"` + hex.EncodeToString(sum[:8]) + `"`}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f, ok := files[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-cache") // a newer daemon has a newer page
		h.Set("Content-Type", f.mime)
		h.Set("ETag", f.etag)
		if r.Header.Get("If-None-Match") == f.etag {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		_, _ = w.Write(f.body) // the client may be gone
	})
}

// mimeOf does not use the machine's own tables, which may be wrong.
func mimeOf(ext string) string {
	switch ext {
	case ".html":
		return "text/html; charset=utf-8"
	case ".js":
		return "text/javascript; charset=utf-8"
	case ".css":
		return "text/css; charset=utf-8"
	case ".svg":
		return "image/svg+xml"
	}
	return "application/octet-stream"
}
