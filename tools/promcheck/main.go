// Command promcheck has Prometheus' own parser read the queries of deploy/grafana and the rules of deploy/prometheus.
// It is a module of its own because that parser brings most of Prometheus along.
package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: promcheck DASHBOARD.json ALERTS.yml")
		os.Exit(2)
	}
	n, err := check(os.Args[1], os.Args[2])
	if err != nil {
		fmt.Fprintln(os.Stderr, "promcheck:", err)
		os.Exit(1)
	}
	fmt.Printf("%d queries and rules parse\n", n)
}

func check(dashboard, rules string) (n int, err error) {
	b, err := os.ReadFile(dashboard)
	if err != nil {
		return 0, err
	}
	var d struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(b, &d); err != nil {
		return 0, fmt.Errorf("%s: %w", dashboard, err)
	}
	// What Grafana puts in for its variables.
	vars := strings.NewReplacer("$__rate_interval", "1m", "$job", ".*", "$instance", ".*")
	p := parser.NewParser(parser.Options{})
	for _, panel := range d.Panels {
		for _, t := range panel.Targets {
			if _, err := p.ParseExpr(vars.Replace(t.Expr)); err != nil {
				return n, fmt.Errorf("%s: panel %q: %s: %w", dashboard, panel.Title, t.Expr, err)
			}
			n++
		}
	}
	groups, errs := rulefmt.ParseFile(rules, false, model.UTF8Validation, p, slog.New(slog.DiscardHandler))
	if len(errs) > 0 {
		return n, fmt.Errorf("%s: %w", rules, errs[0])
	}
	for _, g := range groups.Groups {
		n += len(g.Rules)
	}
	return n, nil
}
