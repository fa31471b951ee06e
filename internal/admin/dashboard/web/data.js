// The daemon's counters over time. Points come from GET /api/history: the counters' values, one point a second.

export const keep = 15 * 60; // seconds

export class History {
  points = [];

  add(points) {
    for (const p of points) {
      if (this.points.length && p.t <= this.last.t) continue;
      this.points.push(p);
    }
    const first = this.points.findIndex(p => p.t > this.last.t - keep - 5);
    if (first > 0) this.points.splice(0, first);
  }

  get last() { return this.points[this.points.length - 1]; }

  // buckets splits the last range seconds into at most this many buckets, oldest first. Each has the points at its
  // ends, a and b; a is null if the daemon was restarted or did not count in between.
  buckets(range, most) {
    const p = this.points;
    if (p.length < 2) return [];
    const size = Math.max(range <= 60 ? 2 : 3, Math.ceil(range / most));
    // The edges are fixed in time, so that the picture scrolls and does not flicker.
    const end = this.last.t, out = [];
    let i = p.findIndex(q => q.t >= end - range);
    let from = i;
    for (; i < p.length; i++) {
      if (i === from) continue;
      const edge = Math.floor(p[i].t / size) !== Math.floor(p[i - 1].t / size);
      if (!edge && i !== p.length - 1) continue;
      if (!edge && p[i].t - p[from].t < size / 2 && out.length) break; // too short to be a rate
      const a = p[from], b = p[i];
      const broken = b.t - a.t > size + 5 || b.reads < a.reads || b.get_requests < a.get_requests;
      out.push({ t: b.t, a: broken ? null : a, b });
      from = i;
    }
    return out;
  }
}

// rate of a counter per second in a bucket; null if it is unknown.
export const rate = name => ({ a, b }) => a && (b[name] - a[name]) / (b.t - a.t);

// level of a gauge at a bucket's end.
export const level = name => ({ a, b }) => a && b[name];

// share of the reads that one area served.
export const share = name => ({ a, b }) => {
  if (!a || b.reads === a.reads) return null;
  return (b[name] - a[name]) / (b.reads - a.reads);
};

export async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(5000), cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}
