// Figures in words. Everything reaches the page as text (textContent), never as markup.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const number = n => whole.format(n);

// short is for axes and tables: 950, 1.2k, 34k, 5.6M.
export function short(n) {
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(n) >= unit) return trim(n / unit) + letter;
  }
  return trim(n);
}

function trim(x) {
  const digits = Math.abs(x) >= 100 ? 0 : Math.abs(x) >= 10 ? (x % 1 ? 1 : 0) : 2;
  return String(Number(x.toFixed(Math.abs(x) < 10 ? Math.min(digits, 2) : digits)));
}

const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(n) {
  let u = 0;
  while (Math.abs(n) >= 1024 && u < units.length - 1) { n /= 1024; u++; }
  return `${u === 0 ? whole.format(n) : n.toFixed(n >= 100 ? 0 : 1)} ${units[u]}`;
}

export const perSecond = n => n >= 10 ? number(n) : n >= 0.05 ? n.toFixed(1) : "0";

export function percent(x) {
  const p = 100 * x;
  if (p > 0 && p < 1) return p.toFixed(1) + "%";
  if (p > 99 && p < 100) return Math.min(p, 99.9).toFixed(1) + "%";
  return Math.round(p) + "%";
}

// seconds formats a duration, with at most two units.
export function seconds(s) {
  if (s === 0) return "0 s";
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.round(s)} s`;
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const i = parts.findIndex(([size]) => s >= size);
  const [big, small] = [parts[i], parts[i + 1]];
  const n = Math.floor(s / big[0]), rest = Math.floor((s % big[0]) / (small?.[0] ?? 1));
  return rest > 0 && small ? `${n} ${big[1]} ${rest} ${small[1]}` : `${n} ${big[1]}`;
}

export const clock = t => new Date(t * 1000).toLocaleTimeString("en-GB");

export const ago = (iso, now) => {
  const s = now - Date.parse(iso) / 1000;
  return s < 2 ? "now" : s < 60 ? `${Math.floor(s)} s ago` : `${seconds(s)} ago`;
};

export const plural = (n, thing) => `${number(n)} ${thing}${n === 1 ? "" : "s"}`;

// visible shows control characters of keys as symbols: a key may contain anything.
export const visible = text => text.replace(/[\u0000-\u001f]/g, c => String.fromCharCode(0x2400 + c.charCodeAt(0)))
  .replace(/[\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, "\ufffd");

// stream describes the owner of a stream's order. A feed has a stream for each epoch, named after it.
export function stream(s) {
  const feed = /^feed\/(.*)\/rank(\d+)\/epoch(\d+)$/.exec(s.name);
  if (feed) return { whose: `Feed ${visible(feed[1])}, rank ${feed[2]}`, epoch: Number(feed[3]) };
  return { whose: s.name === "mount" ? "Mount" : s.name === "sequence" ? "Mount, in sequence" : `Plan ${visible(s.name)}`, epoch: s.epoch };
}

// flags sets a node's text, and keeps names of flags whole at line breaks.
export function flags(node, text) {
  if (node.textContent === text) return;
  node.replaceChildren(...text.split(/(\S*--[a-z]\S*)/).map((part, i) => i % 2 ? el("span", { class: "flag" }, part) : part));
}

// el makes an element: properties that begin with "data-", "aria-" or are named role, class, … are set as attributes.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(c => c !== undefined && c !== null));
  return node;
}
