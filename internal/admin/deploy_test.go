package admin

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/collectors"
	"go.yaml.in/yaml/v3"
)

// The dashboard and the alerts ask for metrics that there are, with labels that they have. Whether their queries parse,
// Prometheus' own parser says: make promcheck.

// exported are the names of all series that a daemon exports, with their labels.
func exported(t *testing.T) map[string]map[string]bool {
	t.Helper()
	reg := registry(t, busy())
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	names := map[string]map[string]bool{}
	for _, f := range gather(t, reg) {
		labels := map[string]bool{"instance": true, "job": true, "le": true}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = true
			}
		}
		name := f.GetName()
		names[name] = labels
		if f.GetMetric()[0].GetHistogram() != nil {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				names[name+suffix] = labels
			}
		}
	}
	return names
}

var (
	metricName = regexp.MustCompile(`\b(?:shoal|go|process)_[a-z0-9_]+`)
	selector   = regexp.MustCompile(`([a-z_]+)\{([^}]*)\}`)
	matcher    = regexp.MustCompile(`([a-z_]+)\s*=~?\s*"([^"]*)"`)
)

// checkQuery tells what a query asks for that there is not.
func checkQuery(t *testing.T, names map[string]map[string]bool, where, query string) {
	t.Helper()
	found := metricName.FindAllString(query, -1)
	if len(found) == 0 {
		t.Errorf("%s: no metric in %s", where, query)
	}
	for _, name := range found {
		if names[name] == nil {
			t.Errorf("%s: there is no metric %s", where, name)
		}
	}
	for _, s := range selector.FindAllStringSubmatch(query, -1) {
		for _, m := range matcher.FindAllStringSubmatch(s[2], -1) {
			if !names[s[1]][m[1]] {
				t.Errorf("%s: %s has no label %s", where, s[1], m[1])
			}
		}
	}
	for _, m := range []string{"()", "[]", "{}"} {
		if strings.Count(query, m[:1]) != strings.Count(query, m[1:]) {
			t.Errorf("%s: unbalanced %s in %s", where, m, query)
		}
	}
}

func TestGrafanaDashboard(t *testing.T) {
	b, err := os.ReadFile("../../deploy/grafana/shoal.json")
	if err != nil {
		t.Fatal(err)
	}
	type source struct{ Type, UID string }
	var d struct {
		Title, UID    string
		SchemaVersion int
		Templating    struct {
			List []struct {
				Name, Type, Definition string
			}
		}
		Panels []struct {
			ID         int
			Type       string
			Title      string
			Datasource source
			GridPos    struct{ H, W, X, Y int }
			Targets    []struct {
				Datasource source
				Expr       string
			}
		}
	}
	if err := json.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	names := exported(t)
	if d.SchemaVersion < 36 || d.UID != "shoal" || len(d.Templating.List) == 0 ||
		d.Templating.List[0].Type != "datasource" {
		t.Errorf("schemaVersion %d, uid %q, variables %+v", d.SchemaVersion, d.UID, d.Templating.List)
	}
	for _, v := range d.Templating.List[1:] {
		checkQuery(t, names, "variable "+v.Name, v.Definition)
	}
	ids, asked := map[int]bool{}, map[string]bool{}
	var taken [1000][24]bool
	for _, p := range d.Panels {
		if ids[p.ID] {
			t.Errorf("two panels have id %d", p.ID)
		}
		ids[p.ID] = true
		for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
			for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
				if x >= 24 || taken[y][x] {
					t.Fatalf("panel %q lies over another one, or outside", p.Title)
				}
				taken[y][x] = true
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Datasource.UID != "${datasource}" || len(p.Targets) == 0 {
			t.Errorf("panel %q: datasource %+v, %d queries", p.Title, p.Datasource, len(p.Targets))
		}
		for _, target := range p.Targets {
			if target.Datasource.UID != "${datasource}" {
				t.Errorf("panel %q has a datasource of its own", p.Title)
			}
			checkQuery(t, names, "panel "+p.Title, target.Expr)
			for _, name := range metricName.FindAllString(target.Expr, -1) {
				asked[name] = true
			}
		}
	}
	for name := range names {
		if strings.HasPrefix(name, "shoal_store") && !strings.HasSuffix(name, "_sum") && !strings.HasSuffix(name,
			"_count") &&
			name != "shoal_store_get_duration_seconds" && !asked[name] {
			t.Errorf("no panel shows %s", name)
		}
	}
}

func TestAlerts(t *testing.T) {
	b, err := os.ReadFile("../../deploy/prometheus/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr, For string
				Labels           map[string]string
				Annotations      map[string]string
			}
		}
	}
	if err := yaml.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	names, seen := exported(t), map[string]bool{}
	for _, r := range d.Groups[0].Rules {
		checkQuery(t, names, r.Alert, r.Expr)
		if seen[r.Alert] || r.Labels["severity"] == "" || r.Annotations["summary"] == "" ||
			r.Annotations["description"] == "" {
			t.Errorf("%s: twice, or without severity, summary or description", r.Alert)
		}
		seen[r.Alert] = true
		for _, kinds := range regexp.MustCompile(`kind=~?"([^"]*)"`).FindAllStringSubmatch(r.Expr, -1) {
			for kind := range strings.SplitSeq(kinds[1], "|") {
				if !hasSeries(t, "shoal_store_errors_total", "kind", kind) {
					t.Errorf("%s: there is no kind of error %q", r.Alert, kind)
				}
			}
		}
	}
	if len(seen) < 8 {
		t.Errorf("only %d alerts", len(seen))
	}
}

// hasSeries reports whether a metric has a series with that label's value.
func hasSeries(t *testing.T, name, label, value string) bool {
	t.Helper()
	for _, f := range gather(t, registry(t, busy())) {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if f.GetName() == name && l.GetName() == label && l.GetValue() == value {
					return true
				}
			}
		}
	}
	return false
}
