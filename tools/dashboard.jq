# Makes of Grafana's dashboard a file of rules, for promtool: the queries, with values for Grafana's variables.
{groups: [{name: "dashboard", rules: [
	.panels[] | .title as $title | .targets[]? | {
		record: "query",
		labels: {panel: $title},
		expr: (.expr | gsub("\\$__rate_interval"; "1m") | gsub("\\$(job|instance)"; ".*"))
	}
]}]}
