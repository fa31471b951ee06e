package demo

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The report of a cluster, from made-up figures.
func TestClusterReport(t *testing.T) {
	r := &clusterReport{Options: Options{Photos: 4096, Latency: 30 * time.Millisecond}, Bytes: 100e6, Cores: 2, Began: time.Now(), Took: time.Minute}
	for i, title := range []string{"no cluster, first epoch", "cluster, a node is killed"} {
		a := &act{Title: title, Detail: "Words.", Seconds: 2, Right: 3, Course: []int64{5e6, 20e6, 25e6}}
		for n := range clusterNodes {
			a.Rows = append(a.Rows, Origin{Store: 10e6, Peers: int64(i) * 15e6, Own: 5e6, Given: int64(i) * 15e6, Dead: i == 1 && n == 3})
		}
		r.Acts = append(r.Acts, a)
	}
	page := filepath.Join(t.TempDir(), "cluster.html")
	if err := render(page, "cluster.html.tmpl", r); err != nil {
		t.Fatal(err)
	}
	html, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	r.print(&text)
	for _, c := range []struct{ in, want string }{
		{string(html), "<svg"}, {string(html), "prefers-color-scheme: dark"}, {string(html), "3 of 3 nodes"}, {string(html), "4 †"}, {string(html), "<td>0.40</td>"},
		{text.String(), "node 4, killed"}, {text.String(), "0.40"}, {text.String(), "60 MB"},
	} {
		if !strings.Contains(c.in, c.want) {
			t.Errorf("it lacks %q:\n%s", c.want, c.in)
		}
	}
	for _, bad := range []string{"http://", "https://", "NaN", "ZgotmplZ", "<no value>", "Inf"} {
		if bytes.Contains(html, []byte(bad)) {
			t.Errorf("the report contains %q", bad)
		}
	}
}
