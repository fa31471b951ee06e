// Tables and meters: the current state.

import { ago, bytes, el, flags, number, percent, perSecond, plural, seconds, stream, visible } from "./format.js";

// table shows rows under headings; on narrow screens each row becomes a block. A column: {name, cell(row), kind}.
function table(box, caption, columns, rows, empty) {
  if (!rows.length) {
    box.replaceChildren(el("p", { class: "empty" }, empty));
    return;
  }
  const head = el("tr", {}, ...columns.map(c => el("th", { scope: "col", class: c.kind }, c.name)));
  const body = rows.map(row => el("tr", {}, ...columns.map((c, i) => {
    const cell = el(i ? "td" : "th", { class: c.kind, scope: i ? undefined : "row", "data-name": c.name });
    cell.append(c.cell(row));
    return cell;
  })));
  box.replaceChildren(el("table", {}, el("caption", { class: "sr" }, caption), el("thead", {}, head), el("tbody", {}, ...body)));
}

const bar = (part, text, label) => {
  const fill = el("i");
  fill.style.width = `${100 * Math.min(1, Math.max(0, part))}%`;
  return el("span", { class: "progress", role: "img", "aria-label": label }, fill, el("b", { "aria-hidden": "true" }, text));
};

export function streams(box, stats) {
  table(box, "Orders being followed", [
    { name: "order", cell: s => el("bdi", {}, s.name === "mount" ? `Mount: ${visible(stats.order.spec)}` : stream(s).whose) },
    { name: "epoch", kind: "n", cell: s => number(stream(s).epoch) },
    { name: "position", kind: "wide", cell: s => bar(s.position / Math.max(1, s.len), `${number(s.position)} of ${number(s.len)}`, `${percent(s.position / Math.max(1, s.len))} of the epoch read`) },
    { name: "ahead", kind: "n", cell: s => number(s.lead_samples) + (s.lead_seconds ? ` · ${seconds(s.lead_seconds)}` : "") },
    { name: "pace", kind: "n", cell: s => s.pace_samples_per_sec ? `${perSecond(s.pace_samples_per_sec)}/s` : "–" },
    { name: "in flight", kind: "n", cell: s => number(s.in_flight) },
    { name: "holds", kind: "n", cell: s => bytes(s.held_bytes) },
    { name: "share", kind: "n", cell: s => percent(s.share) },
    { name: "reader", cell: s => moves(s) },
  ], stats.streams, orderHint(stats));
}

const hints = {
  watching: "Shoal watches the trainer's opens; they match no known order yet.",
  searching: "Shoal is searching for the order behind the trainer's opens.",
  unknown: "The order was not found, and the search has ended: use shoal.hint(sampler) in the trainer, or write paths to .shoal/plan.",
};

function orderHint(stats) {
  return hints[stats.order.state]
    || "No order is known: nothing is fetched ahead. Pass it with --order or shoal.hint(sampler) in the trainer, or use the feed.";
}

function moves(s) {
  const e = s.events, said = [];
  const jumps = e.jumps + e.previous_epochs + e.found;
  if (e.restarts) said.push(`read again ${plural(e.restarts, "time")}`);
  if (jumps) said.push(plural(jumps, "move"));
  if (s.strays) said.push(`${number(s.strays)} not in the order`);
  if (s.failed_prefetches) said.push(plural(s.failed_prefetches, "failed prefetch").replace("hs", "hes"));
  return said.join(", ") || "follows the order";
}

// sessions shows the feed's sessions, with rates over the time between two snapshots.
export function sessions(box, now, before, dt) {
  const was = id => before?.session_list.find(b => b.session === id.session && b.rank === id.rank);
  const delta = (s, name) => {
    const b = was(s);
    return b && dt > 0 && s[name] >= b[name] ? (s[name] - b[name]) / dt : null;
  };
  const share = (s, ...names) => {
    const parts = names.map(n => delta(s, n));
    return parts.includes(null) ? "–" : percent(Math.min(1, parts.reduce((a, b) => a + b, 0)));
  };
  const per = (s, name, say) => { const r = delta(s, name); return r === null ? "–" : `${say(r)}/s`; };
  table(box, "Feed sessions", [
    { name: "session", cell: s => el("bdi", {}, visible(s.session || "?")) },
    { name: "client", cell: s => el("bdi", {}, visible(s.client || "–")) },
    { name: "rank", kind: "n", cell: s => `${s.rank} of ${s.world || 1}` },
    { name: "epoch", kind: "n", cell: s => number(s.epoch) },
    { name: "batch", kind: "n", cell: s => number(s.batch) },
    { name: "samples", kind: "n", cell: s => per(s, "samples", perSecond) },
    { name: "bytes", kind: "n", cell: s => per(s, "bytes", bytes) },
    { name: "stalled", kind: "n", cell: s => share(s, "stall_seconds") },
    { name: "trainer busy", kind: "n", cell: s => share(s, "credit_seconds", "slot_seconds") },
    { name: "decode cores", kind: "n", cell: s => { const d = delta(s, "decode_seconds"); return d === null ? "–" : d.toFixed(1); } },
    { name: "bad", kind: "n", cell: s => number(s.bad_samples) },
  ], now.session_list, "No session is open.");
}

// nodes shows a cluster as this node sees it: what it asked each other node for, and got.
export function nodes(box, cluster) {
  const of = (n, say) => n.asked ? say(n.asked) : "–";
  table(box, "Nodes of the cluster", [
    { name: "node", cell: n => el("bdi", {}, visible(n.address)) },
    { name: "zone", cell: n => el("bdi", {}, visible(n.zone || "–")) },
    { name: "cache", kind: "n", cell: n => bytes(n.weight * 2 ** 20) },
    { name: "owns", kind: "n", cell: n => percent(n.owned) },
    { name: "gave", kind: "n", cell: n => of(n, a => `${number(a.hits)} of ${number(a.asked)}`) },
    { name: "bytes", kind: "n", cell: n => of(n, a => bytes(a.bytes)) },
    { name: "half within", kind: "n", cell: n => of(n, a => seconds(a.latency_p50_seconds)) },
    { name: "other version", kind: "n", cell: n => of(n, a => number(a.no?.version ?? 0)) },
    { name: "state", cell: n => el("bdi", {}, n.id === cluster.node ? "this one" : visible(n.problem || "ok")) },
  ], cluster.nodes, "No node is known yet.");
}

export function slowest(box, stats, now) {
  table(box, "Slowest keys", [
    { name: "key", kind: "key", cell: s => { const k = el("bdi", {}, visible(s.key)); k.title = visible(s.key); return k; } },
    { name: "took", kind: "n", cell: s => seconds(s.seconds) + (s.failed ? ", failed" : "") },
    { name: "size", kind: "n", cell: s => bytes(s.bytes) },
    { name: "when", kind: "n", cell: s => ago(s.time, now) },
  ], stats.slowest.slice(0, 8), "No recent fetches.");
}

function remedy(e) {
  const node = el("bdi", { class: "remedy" });
  flags(node, visible(e.remedy));
  return node;
}

export function errors(box, list, now) {
  if (!list.length) {
    box.replaceChildren(el("p", { class: "empty" }, "None."));
    return;
  }
  box.replaceChildren(el("ul", { class: "errors" }, ...list.map(e => el("li", { class: e.level === "ERROR" ? "fail" : "warn" },
    el("b", { class: "tag" }, e.level === "ERROR" ? "error" : "warning"),
    el("div", {}, el("bdi", { class: "text" }, visible(e.text)), e.remedy ? remedy(e) : null),
    el("span", { class: "facts" }, (e.count > 1 ? `${number(e.count)} times, last ` : "") + ago(e.time, now))))));
}

export function resources(box, s) {
  const m = s.memory, d = s.disk;
  const rows = [
    ["Memory for data", m.ledger_used / Math.max(1, m.ledger_limit), `${bytes(m.ledger_used)} of ${bytes(m.ledger_limit)}`,
      `peak ${bytes(m.ledger_peak)}; the process uses ${bytes(m.rss)}, ${bytes(m.rss_anon)} of it without file pages`],
    ["Disk", d.used / Math.max(1, d.limit || d.budget), `${bytes(d.used)} of ${bytes(d.limit || d.budget)}`,
      d.out_of_use ? `out of use: ${d.reason || "unknown cause"}` : `${bytes(d.all_used)} by all datasets of ${visible(s.cache_dir)}`],
    ["Kept of the dataset", d.kept_extents / Math.max(1, d.extents), percent(d.kept_extents / Math.max(1, d.extents)),
      `${number(d.kept_extents)} of ${number(d.extents)} extents` + (d.corrupt ? `; ${number(d.corrupt)} corrupt` : "")],
    ["Connections", s.requests_in_flight / Math.max(1, s.connections), `${number(s.requests_in_flight)} of ${number(s.connections)}`,
      `half of the requests within ${seconds(s.get_latency_p50_seconds)}, 99% within ${seconds(s.get_latency_p99_seconds)}; ${plural(s.hedges.sent, "hedge")}, ${number(s.hedges.won)} came first`],
  ];
  box.replaceChildren(...rows.map(([name, part, value, facts]) => {
    const fill = el("i");
    fill.style.width = `${100 * Math.min(1, part)}%`;
    const meter = el("div", { class: "meter" + (part > 0.97 ? " full" : ""), role: "meter", "aria-valuemin": "0", "aria-valuemax": "100",
      "aria-valuenow": String(Math.round(100 * part)), "aria-valuetext": value, "aria-label": name }, fill);
    return el("div", {}, el("div", { class: "label" }, el("h3", {}, name), el("b", {}, value)), meter, el("p", { class: "facts" }, facts));
  }));
}
