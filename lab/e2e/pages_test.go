package e2e

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// A page on another site, in Chromium, beside an unsigned endpoint that may even write: it opens, embeds, fetches and
// posts. No script of an object runs, nothing is read, and nothing is written.
func TestPagesOfOthers(t *testing.T) {
	dir, _ := tree(t, 1, 4, 1<<10)
	_, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	page := []byte("<script>fetch('/done?script')</script><img src=/done?img>")
	put := func(key string) {
		if _, err := store(t).PutObject(t.Context(), bucketName(t), key, strings.NewReader(string(page)),
			int64(len(page)), minio.PutObjectOptions{ContentType: "text/html",
				DisableContentSha256: true}); err != nil {
			t.Fatal(err)
		}
	}
	put("train/class00/page.html") // in the dataset
	put("other/page.html")         // beside it: from the origin, which says that it is HTML
	ep := startS3(t, env, source, false, "--s3-anonymous=write", "--samples", "*")
	base := ep.url + "/" + bucketName(t)
	urls := []string{base + "/train/class00/page.html", base + "/other/page.html", base +
		"/train/class00/page.html?response-content-type=text/html"}
	var html strings.Builder
	html.WriteString("<!doctype html><title>evil</title><body>")
	for _, u := range urls {
		fmt.Fprintf(&html, `<iframe src="%[1]s"></iframe><img src="%[1]s"><object data="%[1]s"></object><embed src="%[1]s"><script src="%[1]s"></script>`, u)
	}
	fmt.Fprintf(&html, `<form id=f method=post action="%s/train/posted" enctype="text/plain"><input name=a value=b></form><iframe name=target></iframe>`, base)
	evil := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write([]byte(html.String()))
	}))
	defer evil.Close()
	before := ep.stats(t).S3.Requests
	b := openBrowser(t)
	b.open(evil.URL)
	b.eval(fmt.Sprintf(`(async () => {
		window.read = [];
		for (const u of %q.split(" ")) for (const mode of ["no-cors", "cors", "same-origin"]) {
			try { const r = await fetch(u, {mode}); if (r.type != "opaque" && (await r.text()).includes("script")) window.read.push(u + mode) } catch (e) {}
		}
		for (const method of ["PUT", "POST", "DELETE"]) try { await fetch(%q, {method, mode: method == "POST" ? "no-cors" : "cors", body: method == "DELETE" ? undefined : "x"}) } catch (e) {}
		const f = document.getElementById("f"); f.target = "target"; f.submit();
		navigator.sendBeacon(%q, "x");
		window.done = true; return true })()`, strings.Join(urls, " "), base+"/train/fetched", base+"/train/beacon"), nil)
	b.until("all was tried", `window.done === true`)
	var read []string
	b.eval(`window.read`, &read)
	if len(read) > 0 {
		t.Errorf("the page has read %v", read)
	}
	for _, u := range urls { // and what the user opens there does not run
		b.open(u)
		var text string
		b.eval(`document.contentType + " " + document.scripts.length`, &text)
		if strings.HasPrefix(text, "text/html") && !strings.HasSuffix(text, " 0") {
			t.Errorf("%s was opened as %q", u, text)
		}
	}
	s := ep.stats(t).S3
	if s.Requests < before+10 {
		t.Errorf("the browser has asked %d times only", s.Requests-before)
	}
	for o := range store(t).ListObjects(t.Context(), bucketName(t), minio.ListObjectsOptions{Recursive: true}) {
		if strings.Contains(o.Key, "posted") || strings.Contains(o.Key, "fetched") ||
			strings.Contains(o.Key, "beacon") {
			t.Errorf("%s was written", o.Key)
		}
	}
}
