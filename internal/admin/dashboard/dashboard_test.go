package dashboard

import (
	"net/http"
	"net/http/httptest"
	"path"
	"regexp"
	"strings"
	"testing"
)

// The page is whole and small: whatever it names is there, and nothing is elsewhere.
func TestFilesAreWhole(t *testing.T) {
	files, total := map[string][]byte{}, 0
	entries, err := web.ReadDir("web")
	if err != nil || len(entries) == 0 {
		t.Fatal(entries, err)
	}
	for _, e := range entries {
		if files["/"+e.Name()], err = web.ReadFile("web/" + e.Name()); err != nil {
			t.Fatal(err)
		}
		if types[path.Ext(e.Name())] == "" {
			t.Errorf("%s has no type", e.Name())
		}
	}
	refs := regexp.MustCompile(`(?:href|src)="([^"#]+)"|from "\./([^"]+)"`)
	for url, body := range files {
		total += len(body)
		for _, m := range refs.FindAllStringSubmatch(string(body), -1) {
			name := m[1] + m[2]
			switch {
			case strings.HasPrefix(name, "/"): // an address of the daemon's
			case files["/"+name] == nil:
				t.Errorf("%s names %s, which is not there", url, name)
			}
		}
		if i := strings.Index(string(body), "://"); i >= 0 && url != "/icon.svg" &&
			!strings.Contains(string(body[max(0, i-20):i+20]), "www.w3.org") {
			t.Errorf("%s loads from elsewhere: %.60s", url, body[max(0, i-20):])
		}
		for _, bad := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
			"new Function", " style=", " onclick="} {
			if strings.Contains(string(body), bad) {
				t.Errorf("%s has %q: text of the daemon's must never be markup, and the policy forbids the rest",
					url, bad)
			}
		}
	}
	t.Logf("%d bytes in %d files", total, len(files))
	if total > 200_000 {
		t.Errorf("%d bytes, more than 200,000", total)
	}
}

func TestHandler(t *testing.T) {
	h := Handler()
	ask := func(path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w
	}
	for path, mime := range map[string]string{"/": "text/html; charset=utf-8",
		"/app.js": "text/javascript; charset=utf-8", "/style.css": "text/css; charset=utf-8",
		"/icon.svg": "image/svg+xml"} {
		w := ask(path)
		if w.Code != 200 || w.Body.Len() == 0 || w.Header().Get("Content-Type") != mime ||
			w.Header().Get("X-Frame-Options") != "DENY" || w.Header().Get("Content-Security-Policy") != policy {
			t.Errorf("%s: %d %v", path, w.Code, w.Header())
		}
	}
	for _, path := range []string{"/web/app.js", "/../dashboard.go", "/app.js/", "/app.html", "/nothing"} {
		if w := ask(path); w.Code == http.StatusOK || strings.Contains(w.Header().Get("Content-Type"), "script") {
			t.Errorf("%s: %d %v", path, w.Code, w.Header())
		}
	}
}
