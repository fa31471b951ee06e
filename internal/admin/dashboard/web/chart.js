// A chart over time: figures as lines or areas, drawn as SVG. All charts share one cursor, moved by the mouse or the arrow
// keys: the figures above each chart are those at the cursor.

import { clock, el } from "./format.js";

const svgNS = "http://www.w3.org/2000/svg";
const height = 128, top = 8, bottom = 20;

const node = (tag, attributes) => {
  const n = document.createElementNS(svgNS, tag);
  for (const [name, value] of Object.entries(attributes)) n.setAttribute(name, value);
  return n;
};

// Cursor is the time at which all charts are read; null: now.
export class Cursor extends EventTarget {
  time = null;
  set(time) {
    if (time === this.time) return;
    this.time = time;
    this.dispatchEvent(new Event("move"));
  }
}

// nice returns the end of an axis that holds max: 1, 2, 2.5 or 5 times a power of ten (of two, for bytes).
function nice(max, binary) {
  if (!(max > 0) || binary && max < 1000) return binary ? 1024 : 1; // fractions of a byte would be shown as bytes
  const base = binary ? 1024 ** Math.max(0, Math.floor(Math.log(max) / Math.log(1024))) : 1;
  const power = 10 ** Math.floor(Math.log10(max / base));
  const times = [1, 2, 2.5, 4, 5, 8, 10].find(m => m * power * base >= max * 1.02) ?? 20;
  return times * power * base;
}

// Chart draws into a figure. series: {name, color (a class), value(bucket), say(value), axis: "left" or "right", area,
// binary (bytes)}. With stacked, the series are parts of a whole, stacked. max, if given, is the smallest end of the axis.
export class Chart {
  #buckets = [];
  #range = 300;

  constructor(figure, title, cursor, { series, stacked = false, max = {}, tick }) {
    Object.assign(this, { figure, cursor, series, stacked, max, tick, title });
    this.caption = el("figcaption", {}, el("h2", {}, title));
    this.when = el("span", { class: "when" });
    this.caption.append(this.when);
    this.values = series.map(s => {
      const value = el("b");
      const item = el("li", { class: s.color }, value, el("span", {}, s.name));
      return { value, item };
    });
    const legend = el("ul", { class: "values" + (stacked ? " many" : "") }, ...this.values.map(v => v.item));
    this.svg = node("svg", {
      role: "slider", tabindex: "0", "aria-label": `${title}: time`, "aria-valuemin": "0", height: String(height),
    });
    figure.append(this.caption, legend, this.svg);
    new ResizeObserver(() => this.draw()).observe(this.svg);
    this.svg.addEventListener("pointermove", e => this.#point(e));
    this.svg.addEventListener("pointerleave", () => cursor.set(null));
    this.svg.addEventListener("keydown", e => this.#key(e));
    this.svg.addEventListener("blur", () => cursor.set(null));
    cursor.addEventListener("move", () => this.#read());
  }

  show(buckets, range) {
    this.#buckets = buckets;
    this.#range = range;
    this.draw();
  }

  get #end() { return this.#buckets.at(-1)?.t ?? 0; }

  #x(t, width) { return width * (1 - (this.#end - t) / this.#range); }

  #point(e) {
    const box = this.svg.getBoundingClientRect();
    const t = this.#end - this.#range * (1 - (e.clientX - box.left) / box.width);
    let best = null;
    for (const b of this.#buckets) if (best === null || Math.abs(b.t - t) < Math.abs(best - t)) best = b.t;
    this.cursor.set(best);
  }

  #key(e) {
    const b = this.#buckets;
    if (!b.length) return;
    const at = this.#index();
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: 0, End: b.length - 1 }[e.key];
    if (e.key === "Escape") this.cursor.set(null);
    else if (to === undefined) return;
    else this.cursor.set(b[Math.min(b.length - 1, Math.max(0, to))].t);
    e.preventDefault();
  }

  // The bucket shown: the one at the cursor, else the last one.
  #index() {
    const t = this.cursor.time;
    if (t === null) return this.#buckets.length - 1;
    let best = this.#buckets.length - 1;
    this.#buckets.forEach((b, i) => { if (Math.abs(b.t - t) < Math.abs(this.#buckets[best].t - t)) best = i; });
    return best;
  }

  #read() {
    const i = this.#index(), b = this.#buckets[i];
    const said = this.series.map((s, k) => {
      const value = b ? s.value(b) : null;
      const text = value === null || value === undefined ? "–" : s.say(value);
      this.values[k].value.textContent = text;
      return `${s.name} ${text}`;
    });
    const past = this.cursor.time !== null && b;
    this.when.textContent = past ? clock(b.t) : "";
    this.svg.setAttribute("aria-valuemax", String(Math.max(0, this.#buckets.length - 1)));
    this.svg.setAttribute("aria-valuenow", String(Math.max(0, i)));
    this.svg.setAttribute("aria-valuetext", (past ? clock(b.t) : "now") + ": " + said.join(", "));
    if (this.hair) {
      const x = past ? this.#x(b.t, this.width) : -9;
      this.hair.setAttribute("x1", x);
      this.hair.setAttribute("x2", x);
    }
  }

  draw() {
    const width = this.width = this.svg.clientWidth;
    if (!width) return;
    const plot = height - top - bottom, parts = [];
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const grid = node("g", { class: "grid" });
    for (const k of [0, 0.5, 1]) {
      const y = top + plot * (1 - k);
      grid.append(node("line", { x1: 0, x2: width, y1: y, y2: y, class: k ? "" : "base" }));
    }
    parts.push(grid);

    const ends = {};
    for (const axis of ["left", "right"]) {
      const of = this.series.filter(s => (s.axis ?? "left") === axis);
      if (!of.length) continue;
      let max = this.max[axis] ?? 0;
      if (this.stacked) max = 1;
      else for (const b of this.#buckets) for (const s of of) max = Math.max(max, s.value(b) ?? 0);
      ends[axis] = this.stacked ? 1 : nice(max, of[0].binary);
    }

    let floor = this.#buckets.map(() => 0);
    for (const s of this.series) {
      const end = ends[s.axis ?? "left"];
      const y = v => top + plot * (1 - Math.min(1, v / end));
      const above = this.stacked ? floor.slice() : null;
      let line = "", area = "", run = [];
      const flush = () => {
        if (run.length) {
          const path = run.map(([x, v], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y(v).toFixed(1)}`).join("");
          line += path;
          const back = run.slice().reverse().map(([x, , low]) => `L${x.toFixed(1)} ${y(low).toFixed(1)}`).join("");
          area += path + back + "Z";
        }
        run = [];
      };
      this.#buckets.forEach((b, i) => {
        const v = s.value(b);
        if (v === null || v === undefined) { flush(); return; }
        const low = this.stacked ? floor[i] : 0;
        if (this.stacked) above[i] = low + v;
        run.push([this.#x(b.t, width), low + v, low]);
      });
      flush();
      if (this.stacked) floor = above;
      if (s.area || this.stacked) parts.push(node("path", { d: area, class: `area ${s.color}` + (this.stacked ? " solid" : "") }));
      if (!this.stacked) parts.push(node("path", { d: line, class: `line ${s.color}` }));
    }

    const text = (x, y, anchor, content, kind) => {
      const t = node("text", { x, y, "text-anchor": anchor, class: kind ?? "" });
      t.textContent = content;
      parts.push(t);
    };
    for (const [axis, end] of Object.entries(ends)) {
      const s = this.series.find(s => (s.axis ?? "left") === axis);
      const tick = s.tick ?? this.tick ?? String;
      const two = Object.keys(ends).length > 1;
      for (const k of [1, 0.5]) {
        text(axis === "left" ? 2 : width - 2, top + plot * (1 - k) + 11, axis === "left" ? "start" : "end", tick(end * k), two ? s.color : "");
      }
    }
    const minutes = this.#range / 60;
    text(0, height - 4, "start", `−${minutes} min`);
    text(width / 2, height - 4, "middle", minutes >= 2 ? `−${minutes / 2} min` : `−${this.#range / 2} s`);
    text(width, height - 4, "end", "now");
    this.hair = node("line", { class: "hair", x1: -9, x2: -9, y1: top, y2: height - bottom });
    parts.push(this.hair);
    this.svg.replaceChildren(...parts);
    this.#read();
  }
}
