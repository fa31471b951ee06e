// The cache map: strips of cells, each with shares of the samples in colours, and the readers' positions.

import { el, number, percent, plural, stream } from "./format.js";

const kinds = ["read", "kept", "ring", "flying"];
const words = { read: "read", kept: "on disk", ring: "in memory", flying: "on its way" };

const decode = text => text ? Uint8Array.from(atob(text), c => c.charCodeAt(0)) : null;
const mean = cells => cells?.length ? cells.reduce((a, b) => a + b, 0) / cells.length / 100 : 0;

export class CacheMap {
  #rows = new Map();

  constructor(box) {
    this.box = box;
    this.last = null;
    new ResizeObserver(() => this.draw()).observe(box);
  }

  // cells is the number of cells to request.
  get cells() { return Math.max(50, Math.min(1000, Math.floor(this.box.clientWidth / 2))); }

  show(map) {
    this.last = map;
    this.draw();
  }

  draw() {
    if (!this.last || !this.box.clientWidth) return;
    const strips = this.last.orders.map((s, i) => ({ ...s, key: `order ${i}`, order: true }));
    strips.push({ ...this.last.dataset, key: "dataset", order: false });
    for (const [key, row] of this.#rows) {
      if (!strips.some(s => s.key === key)) { row.box.remove(); this.#rows.delete(key); }
    }
    for (const s of strips) this.#row(s);
  }

  #row(s) {
    let row = this.#rows.get(s.key);
    if (!row) {
      row = { name: el("h3"), facts: el("span", { class: "facts" }), canvas: el("canvas", { role: "img" }), mark: el("i", { class: "mark", "aria-hidden": "true" }) };
      row.box = el("div", { class: "strip" }, el("div", { class: "label" }, row.name, row.facts), el("div", { class: "cells" }, row.canvas, row.mark));
      this.#rows.set(s.key, row);
      const before = s.order ? this.#rows.get("dataset")?.box ?? null : null;
      this.box.insertBefore(row.box, before);
    }
    const parts = Object.fromEntries(kinds.map(k => [k, decode(s[k])]));
    const shares = Object.fromEntries(kinds.map(k => [k, mean(parts[k])]));
    row.name.textContent = s.order ? `${stream(s).whose}, epoch ${number(stream(s).epoch)}, in the order of reading` : "All samples, by number";
    row.facts.textContent = s.order ? `${number(s.position)} of ${number(s.len)} read` : plural(s.len, "sample");
    const said = kinds.filter(k => parts[k]).map(k => `${percent(shares[k])} ${words[k]}`).join(", ");
    row.canvas.setAttribute("aria-label", `${row.name.textContent}: ${said}` + (s.order ? `; the reader is at ${percent(s.position / Math.max(1, s.len))}` : ""));
    row.canvas.title = said;
    row.mark.hidden = !s.order || !s.len;
    if (s.order && s.len) row.mark.style.left = `${100 * Math.min(1, s.position / s.len)}%`;
    paint(row.canvas, s.cells, parts);
  }
}

function paint(canvas, cells, parts) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  const g = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const color = name => style.getPropertyValue(`--k-${name}`);
  g.fillStyle = color("missing");
  g.fillRect(0, 0, width, height);
  const colors = kinds.map(k => color(k));
  for (let c = 0; c < cells; c++) {
    const x = Math.round(c * width / cells), w = Math.round((c + 1) * width / cells) - x;
    let y = height;
    kinds.forEach((k, i) => {
      const part = parts[k]?.[c];
      if (!part) return;
      const h = part * height / 100;
      g.fillStyle = colors[i];
      g.fillRect(x, Math.floor(y - h), w, Math.ceil(h));
      y -= h;
    });
  }
}

// band paints the verdict of each moment as a thin line of colours.
export function band(canvas, points, range) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.width = Math.round(canvas.clientWidth * ratio);
  const height = canvas.height = Math.round(canvas.clientHeight * ratio);
  if (!width || !points.length) return;
  const g = canvas.getContext("2d"), style = getComputedStyle(canvas);
  const end = points.at(-1).t, x = t => width * (1 - (end - t) / range);
  points.forEach((p, i) => {
    const from = i ? x(points[i - 1].t) : x(p.t - 1);
    if (x(p.t) < 0 || (i && p.t - points[i - 1].t > 10)) return;
    g.fillStyle = style.getPropertyValue(`--${p.level || "idle"}`);
    g.fillRect(Math.floor(from), 0, Math.ceil(x(p.t) - from) + 1, height);
  });
}
