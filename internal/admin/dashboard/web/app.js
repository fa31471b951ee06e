// The page: query the daemon once a second and show the answers. It judges nothing itself; the daemon's verdict
// (GET /api/verdict) does.

import { band, CacheMap } from "./cachemap.js";
import { Chart, Cursor } from "./chart.js";
import { ask, History, level, rate, share } from "./data.js";
import { bytes, el, flags, number, percent, perSecond, plural, seconds, short, visible } from "./format.js";
import * as tables from "./tables.js";

const $ = id => document.getElementById(id);
const store = {
  get(name) { try { return localStorage.getItem(name); } catch { return null; } },
  set(name, value) { try { localStorage.setItem(name, value); } catch { /* forbidden: not stored */ } },
};

const history = new History(), cursor = new Cursor();
const state = { paused: false, range: Number(store.get("shoal-range")) || 300, lost: null, pid: 0, stats: null, verdict: null, recent: [] };

const round = v => bytes(v).replace(/\.0 /, " ");
const perSec = v => `${perSecond(v)}/s`, bytesPerSec = v => `${bytes(v)}/s`;
const charts = [
  new Chart($("c-lead"), "Lead over the trainer", cursor, { series: [
    { name: "samples ahead", color: "k-kept", value: level("lead_samples"), say: number, area: true, tick: short },
    { name: "at its pace", color: "k-flying", value: level("lead_seconds"), say: seconds, axis: "right", tick: v => `${short(v)} s` },
  ] }),
  new Chart($("c-delivered"), "Delivered to the trainer", cursor, { series: [
    { name: "samples", color: "k-kept", value: rate("samples"), say: perSec, area: true, tick: short },
    { name: "bytes read", color: "k-flying", value: rate("read_bytes"), say: bytesPerSec, axis: "right", tick: round, binary: true },
  ] }),
  new Chart($("c-stall"), "The trainer waits", cursor, { max: { left: 0.1 }, series: [
    { name: "of the time", color: "k-missed", value: level("stall_share"), say: percent, area: true, tick: v => `${short(100 * v)}%` },
  ] }),
  new Chart($("c-store"), "From the store", cursor, { series: [
    { name: "fetched", color: "k-kept", value: rate("get_bytes"), say: bytesPerSec, area: true, tick: round, binary: true },
    { name: "requests", color: "k-flying", value: rate("get_requests"), say: perSec, axis: "right", tick: short },
  ] }),
  new Chart($("c-hits"), "Reads were served by", cursor, { stacked: true, tick: percent, series: [
    { name: "the disk", color: "k-kept", value: share("keep"), say: percent },
    { name: "memory", color: "k-ring", value: share("ring"), say: percent },
    { name: "fetch under way", color: "k-flying", value: share("joined"), say: percent },
    { name: "new fetch", color: "k-missed", value: share("misses"), say: percent },
  ] }),
  new Chart($("c-memory"), "Memory", cursor, { series: [
    { name: "data", color: "k-kept", value: level("ledger_used"), say: bytes, area: true, tick: round, binary: true },
    { name: "process", color: "k-flying", value: level("rss"), say: bytes, tick: round, binary: true },
  ] }),
];
const map = new CacheMap($("map"));

function text(node, words) { if (node.textContent !== words) node.textContent = words; }

function showVerdict(v) {
  $("verdict").dataset.level = v.level;
  $("v-icon").setAttribute("href", `#i-${v.level}`);
  text($("v-title"), v.thing);
  text($("v-detail"), v.cause);
  $("v-remedy").hidden = !v.remedy;
  flags($("v-remedy"), v.remedy ?? "");
  const notes = v.notes ?? [];
  $("v-notes").hidden = !notes.length;
  const said = notes.map(n => `${n.thing}. ${n.cause}`).join("\n");
  if ($("v-notes").dataset.said !== said) {
    $("v-notes").dataset.said = said;
    $("v-notes").replaceChildren(...notes.map(n => el("li", { class: n.level }, el("b", {}, n.thing + ". "), `${n.cause} `, n.remedy ? el("span", {}, n.remedy) : null)));
  }
  const mark = { ok: "●", idle: "○", warn: "▲", fail: "■", lost: "✕" }[v.level] ?? "○";
  document.title = `${mark} ${v.thing} – Shoal`;
}

function showStats(s, verdict) {
  text($("source"), visible(s.source));
  $("source").title = visible(s.source);
  text($("facts"), `${number(s.samples)} samples · ${bytes(s.bytes)}${s.packed ? " · packed" : ""} · version ${s.dataset.slice(0, 8)}`);
  text($("process"), `process ${s.pid}, up ${seconds(Math.floor(s.uptime_seconds))}`);
  const now = history.last?.t ?? Date.now() / 1000;
  tables.streams($("streams"), s);
  tables.resources($("resources"), s);
  tables.slowest($("slowest"), s, now);
  tables.errors($("errors"), verdict.errors, now);
  $("s-cluster").hidden = !s.cluster;
  if (s.cluster) {
    const c = s.cluster;
    text($("cluster-facts"), `${visible(c.cluster)}, ${c.state}: ${plural(c.nodes.length, "node")}, this one owns ${percent(c.owned)}; ${bytes(s.get_bytes)} read from the store, ${bytes(c.peer_bytes)} from other nodes, ${bytes(c.disk_bytes)} from its own disk; ${bytes(c.given.bytes)} given to others` + (c.cause ? `; ${visible(c.cause)}` : ""));
    tables.nodes($("nodes"), c);
  }
  $("s-near").hidden = !s.near;
  if (s.near) {
    text($("near-facts"), `${visible(s.near.tier)}, ${s.near.state}: ${number(s.near.hits)} of ${plural(s.near.reads, "read")} answered, ${bytes(s.near.bytes)}; ${number(s.near.puts)} copies put, ${number(s.near.dropped)} dropped, ${number(s.near.damaged)} damaged, ${plural(s.near.errors, "error")}`);
  }
  $("s-s3").hidden = !s.s3;
  if (s.s3) {
    text($("s3-facts"), `${plural(s.s3.requests, "request")} at ${s.s3.listen}, ${plural(s.s3.connections, "connection")}: ${number(s.s3.forwarded)} to the origin, ${number(s.s3.errors)} refused or failed; ${bytes(s.s3.sent_bytes)} sent`);
  }
  $("s-sessions").hidden = !s.feed;
  if (s.feed) {
    const old = state.recent[0];
    tables.sessions($("sessions"), s.feed, old?.feed, old ? s.uptime_seconds - old.uptime_seconds : 0);
    text($("feed-facts"), `${plural(s.feed.sessions, "session")} so far, ${number(s.feed.failed)} failed, ${number(s.feed.fenced)} fenced; batches of ${bytes(s.feed.held_bytes)} in memory`);
  }
}

function showHistory() {
  const most = Math.max(60, Math.floor(($("c-lead").clientWidth || 400) / 3));
  const buckets = history.buckets(state.range, most);
  for (const c of charts) c.show(buckets, state.range);
  band($("v-band"), history.points, state.range);
}

function link(kind, words) {
  $("link").dataset.kind = kind;
  text($("link").querySelector("b"), words);
}

let turn = 0;

async function refresh() {
  const since = history.last ? `?since=${history.last.t}` : "";
  const [h, stats, verdict] = await Promise.all([ask(`/api/history${since}`), ask("/stats"), ask("/api/verdict")]);
  const another = state.stats && (stats.pid !== state.stats.pid || stats.uptime_seconds < state.stats.uptime_seconds);
  if (another) state.recent = [];
  history.add(h.points);
  Object.assign(state, { stats, verdict, lost: null });
  state.recent.push({ feed: stats.feed, uptime_seconds: stats.uptime_seconds });
  if (state.recent.length > 5) state.recent.shift();
  showVerdict(verdict);
  showStats(stats, verdict);
  showHistory();
  link("live", "live");
  document.body.classList.remove("lost");
  if (turn++ % 2 === 0 || another) map.show(await ask(`/api/cachemap?cells=${map.cells}`));
}

function lost(err) {
  state.lost ??= Date.now();
  const since = Math.round((Date.now() - state.lost) / 1000);
  link("lost", "no answer");
  document.body.classList.add("lost");
  showVerdict({
    level: "lost", thing: "The daemon does not answer",
    cause: since < 2 ? "Retrying …" : `For ${seconds(since)}; retrying. ` + (state.stats ? "Below are the last figures." : String(err.message)),
    remedy: state.stats ? "Check that it runs (shoal stat, kubectl get pods), and the end of its log; the page continues when it is back." : "",
  });
}

async function live() {
  for (let failures = 0; ;) {
    if (!state.paused && !document.hidden) {
      try {
        await refresh();
        failures = 0;
      } catch (err) {
        failures++;
        lost(err);
      }
    }
    await Promise.race([new Promise(done => setTimeout(done, Math.min(1000 * 2 ** Math.max(0, failures - 2), 5000))), woken()]);
  }
}

let wake = () => {};
const woken = () => new Promise(done => { wake = done; });

function setRange(range) {
  state.range = range;
  store.set("shoal-range", range);
  for (const b of document.querySelectorAll("[data-range]")) b.setAttribute("aria-pressed", String(Number(b.dataset.range) === range));
  showHistory();
}

function setPaused(paused) {
  state.paused = paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  link(paused ? "paused" : "live", paused ? "paused" : "live");
  if (!paused) wake();
}

function turnTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  store.set("shoal-theme", root.dataset.theme);
  repaint();
}

function repaint() { // canvases do not follow the style sheet by themselves
  map.draw();
  band($("v-band"), history.points, state.range);
}

function help() {
  const box = $("keys");
  if (box.open) box.close(); else box.showModal();
}

const to = node => { node.focus({ preventScroll: true }); node.scrollIntoView({ block: "center" }); };
$("errors").tabIndex = -1;

const keys = {
  "1": () => setRange(60), "2": () => setRange(300), "3": () => setRange(900),
  p: () => setPaused(!state.paused), t: turnTheme, "?": help,
  v: () => to($("verdict")), e: () => to($("errors")),
};

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || ($("keys").open && event.key !== "?")) return;
  const act = keys[event.key];
  if (act) { event.preventDefault(); act(); }
});
for (const b of document.querySelectorAll("[data-range]")) b.addEventListener("click", () => setRange(Number(b.dataset.range)));
$("pause").addEventListener("click", () => setPaused(!state.paused));
$("theme").addEventListener("click", turnTheme);
$("help").addEventListener("click", help);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
document.addEventListener("visibilitychange", () => { if (!document.hidden) wake(); });

setRange(state.range);
live();
