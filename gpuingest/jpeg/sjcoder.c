// Recoded JPEG, making: files taken apart into lanes and put together again. recode.go draws the format.

#include "sjparts.h"

#include <stdlib.h>

static inline void put32(uint8_t *p, uint32_t v) {
	for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> 8 * i);
}

// The symbols of a part, before they are coded.
typedef struct {
	uint8_t *at[SJ_LANES];
	uint32_t n[SJ_LANES];
	int16_t *escapes[SJ_LANES]; // those of each lane
} symbols;

// A coder's buffers; the first five are those of its coefficients.
enum { DC, MASK, AT, VALUES, DENSE, CLEAN, SYMBOLS, ESCAPES, VERBATIM, CODED, OUT, BUFFERS };

struct sj_coder {
	sj_coefs c;
	sj_recoded split, r; // the file that is taken apart, of which only the bands are looked at, or put together
	sj_buf b[BUFFERS];
	symbols part;
	size_t verbatim_n, coded_n;
	const sj_buf *result;
	size_t result_n;
};

sj_coder *sj_coder_new(void) { return calloc(1, sizeof(sj_coder)); }

void sj_coder_free(sj_coder *c) {
	if (!c) return;
	for (int i = 0; i < BUFFERS; i++) free(c->b[i].p);
	sj_recoded_free(&c->r);
	free(c);
}

size_t sj_coder_bytes(const sj_coder *c) {
	size_t sum = sizeof *c + sj_recoded_bytes(&c->r);
	for (int i = 0; i < BUFFERS; i++) sum += c->b[i].cap;
	return sum;
}

const uint8_t *sj_coder_output(const sj_coder *c, size_t *n) {
	*n = c->result_n;
	return c->result->p;
}

// most_values bounds the AC coefficients of a file of n bytes: each has two bits at least, but for some in damaged or
// odd files, which are not recoded.
static size_t most_values(const sj_jpeg *j, size_t n) { return (4 * n < j->blocks * 63 ? 4 * n : j->blocks * 63) + 64; }

// room makes space for the coefficients of all blocks of a file of n bytes.
static int room(sj_coder *c, const sj_jpeg *j, size_t file) {
	size_t n = j->blocks, values = most_values(j, file);
	if (!sj_reserve(&c->b[DC], n * 2) || !sj_reserve(&c->b[MASK], n * 8) || !sj_reserve(&c->b[AT], n * 4) ||
		!sj_reserve(&c->b[VALUES], values * 2)) return 0;
	if (j->progressive && !sj_reserve(&c->b[DENSE], n * 128)) return 0;
	c->c = (sj_coefs){c->b[DC].p, c->b[MASK].p, c->b[AT].p, c->b[VALUES].p, 0, values,
		j->progressive ? c->b[DENSE].p : NULL};
	return 1;
}

// sparse makes the sparse form from the dense one.
static int sparse(sj_coefs *c, size_t blocks) {
	const int16_t *q = c->dense;
	for (size_t b = 0; b < blocks; b++, q += 64) {
		uint64_t m = 0;
		if (c->cap - c->used < 64) return SJ_KEEP;
		c->dc[b] = q[0];
		c->at[b] = (uint32_t)c->used;
		for (int k = 1; k < 64; k++) {
			if (!q[k]) continue;
			m |= (uint64_t)1 << k;
			c->values[c->used++] = q[k];
		}
		c->mask[b] = m;
	}
	return SJ_OK;
}

static void dense(sj_coefs *c, size_t blocks) {
	int16_t *q = c->dense;
	memset(q, 0, blocks * 128);
	for (size_t b = 0; b < blocks; b++, q += 64) {
		const int16_t *v = c->values + c->at[b];
		q[0] = c->dc[b];
		for (uint64_t m = c->mask[b]; m; m &= m - 1) q[__builtin_ctzll(m)] = *v++;
	}
}

// known tracks which bits of the coefficients a file's scans have given; every one must come, once.
typedef struct {
	int8_t left[3][64]; // bits still to come; -1: not begun
} known;

static int note(known *k, const sj_jpeg *j, const sj_scan *s) {
	for (int i = 0; i < s->n; i++) {
		for (int z = s->ss; z <= s->se; z++) {
			int8_t *left = &k->left[s->comp[i]][z];
			if (*left != (s->ah ? s->ah : -1) || (z > 0 && k->left[s->comp[i]][0] < 0 && j->progressive)) return 0;
			*left = (int8_t)s->al;
		}
	}
	return 1;
}

static int complete(const known *k, int comps) {
	for (int c = 0; c < comps; c++) {
		for (int z = 0; z < 64; z++) {
			if (k->left[c][z] != 0) return 0;
		}
	}
	return 1;
}

// take_apart reads a file into coefficients and what lies outside of its scans.
static int take_apart(sj_coder *c, const uint8_t *p, size_t n) {
	sj_jpeg *j = &c->split.j;
	memset(j, 0, sizeof *j);
	c->verbatim_n = 0;
	if (n < 4 || n > UINT32_MAX / 8) return SJ_KEEP;
	if (!sj_reserve(&c->b[VERBATIM], n)) return SJ_MEMORY;
	uint8_t *o = c->b[VERBATIM].p;
	known k;
	memset(&k, -1, sizeof k);
	sj_scan s;
	size_t at = 0, from = 0;
	int rc;
	while ((rc = sj_walk(j, p, n, &at, &s)) == SJ_WALK_SCAN) {
		if (j->scans == 1) {
			if (j->blocks > 8 * n) return SJ_KEEP;
			if (!room(c, j, n)) return SJ_MEMORY;
			if (c->c.dense) {
				memset(c->c.dense, 0, j->blocks * 128);
			} else {
				memset(c->c.dc, 0, j->blocks * 2);
				memset(c->c.mask, 0, j->blocks * 8);
				memset(c->c.at, 0, j->blocks * 4);
			}
		}
		if (j->scans > SJ_MAX_SCANS || !note(&k, j, &s)) return SJ_KEEP;
		memcpy(o + c->verbatim_n, p + from, at - from);
		c->verbatim_n += at - from;
		if (!sj_read_scan(j, &s, &c->c, p, n, &at, &c->b[CLEAN])) return SJ_KEEP;
		from = at;
	}
	if (rc != SJ_WALK_END || j->scans == 0 || !complete(&k, j->comps)) return SJ_KEEP;
	memcpy(o + c->verbatim_n, p + from, n - from);
	c->verbatim_n += n - from;
	return c->c.dense ? sparse(&c->c, j->blocks) : SJ_OK;
}

typedef struct {
	uint8_t *o[SJ_LANES];
	int16_t *escape[SJ_LANES];
} splitter;

static inline void split_symbol(splitter *s, int lane, int v) {
	if (v > 127 || v < -127) {
		*s->escape[lane]++ = (int16_t)v;
		v = -128;
	}
	*s->o[lane]++ = (uint8_t)v;
}

// narrow copies values as bytes, up to 15 more than there are, and tells whether one of them does not fit.
static inline int narrow(uint8_t *o, const int16_t *v, int n) {
	unsigned wide = 0;
	for (int i = 0; i < n; i += 16) {
		uint16_t w[16], any = 0;
		memcpy(w, v + i, sizeof w);
		for (int k = 0; k < 16; k++) o[i + k] = (uint8_t)w[k];
		for (int k = 0; k < 16; k++) any |= (uint16_t)((uint16_t)(w[k] + 127) > 254);
		wide |= any;
	}
	return (int)wide;
}

static inline void split_values(splitter *s, int lane, const int16_t *v, int n) {
	if (!narrow(s->o[lane], v, n)) {
		s->o[lane] += n;
		return;
	}
	for (int i = 0; i < n; i++) split_symbol(s, lane, v[i]);
}

static inline void split_block(splitter *s, uint64_t mask, const int16_t *v) {
	const uint64_t low7 = 0x7F7F7F7F7F7F7F7F;
	uint64_t there = ~(((mask & low7) + low7) | mask | low7); // 0x80 in each byte that is 0
	unsigned flag = 255 ^ (unsigned)((there >> 7) * 0x0102040810204080 >> 56);
	int rich = sj_rich(flag), low = __builtin_popcount(mask & 255);
	*s->o[1]++ = (uint8_t)flag;
	uint8_t **o = &s->o[SJ_MASKS + 4 * rich];
	for (int b = 0; b < 8; b++) {
		*o[b < 3 ? b : 3] = (uint8_t)(mask >> 8 * b);
		o[b < 3 ? b : 3] += flag >> b & 1;
	}
	split_values(s, SJ_VALUES + 2 * rich, v, low);
	split_values(s, SJ_VALUES + 2 * rich + 1, v + low, __builtin_popcountll(mask >> 8));
}

// first_block is the number of a band's first block of a component.
static size_t first_block(const sj_recoded *r, int comp, int band) {
	return r->j.comp[comp].first + (size_t)(band * sj_rows(r, comp)) * (size_t)r->j.comp[comp].blocks_w;
}

static void split_comp(sj_coder *c, int comp, int band, splitter *s) {
	const sj_recoded *g = &c->split;
	int w = g->j.comp[comp].blocks_w, rows = sj_band_rows(g, comp, band);
	size_t b = first_block(g, comp, band);
	for (int y = 0; y < rows; y++) {
		for (int x = 0; x < w; x++, b++) {
			const int16_t *dc = c->c.dc + b;
			split_symbol(s, 0, (int16_t)(*dc - sj_predict(dc, x, y, 1, w)));
			split_block(s, c->c.mask[b], c->c.values + c->c.at[b]);
		}
	}
}

// The most symbols of a block in each lane.
static const uint8_t most[SJ_LANES] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 8, 24, 8, 56};

enum { MOST = 1 + 1 + 4 + 8 + 32 + 64, SPARE = 32 }; // of all lanes; bytes that may be overwritten behind one

// most_blocks is how many blocks a part can have.
static size_t most_blocks(const sj_recoded *g) {
	size_t n[2] = {0, 0};
	for (int i = 0; i < g->j.comps; i++) n[i > 0] += (size_t)g->j.comp[i].blocks_w * (size_t)sj_rows(g, i);
	return n[0] > n[1] ? n[0] : n[1];
}

// split_part makes the symbols of part i, in the place of those of the one before.
static const symbols *split_part(sj_coder *c, int part) {
	const sj_recoded *g = &c->split;
	int group = part % g->groups, band = part / g->groups, to = group ? g->j.comps : 1;
	size_t blocks = 0;
	for (int i = group; i < to; i++) blocks += (size_t)(g->j.comp[i].blocks_w * sj_band_rows(g, i, band));
	symbols *q = &c->part;
	splitter s;
	uint8_t *symbols = c->b[SYMBOLS].p;
	int16_t *escapes = c->b[ESCAPES].p;
	for (int k = 0; k < SJ_LANES; k++) {
		s.o[k] = q->at[k] = symbols;
		s.escape[k] = q->escapes[k] = escapes;
		symbols += blocks * most[k] + SPARE;
		escapes += blocks * most[k];
	}
	for (int i = group; i < to; i++) split_comp(c, i, band, &s);
	for (int k = 0; k < SJ_LANES; k++) q->n[k] = (uint32_t)(s.o[k] - q->at[k]);
	return q;
}

int sj_split(sj_coder *c, const uint8_t *src, size_t n) {
	int rc = take_apart(c, src, n);
	if (rc != SJ_OK) return rc;
	sj_set_geometry(&c->split);
	size_t blocks = most_blocks(&c->split);
	return sj_reserve(&c->b[SYMBOLS], blocks * MOST + SJ_LANES * SPARE) &&
		sj_reserve(&c->b[ESCAPES], blocks * MOST * 2) ? SJ_OK : SJ_MEMORY;
}

int sj_lane_count(const sj_coder *c) { return c->split.bands * c->split.groups * SJ_LANES; }

const uint8_t *sj_lane(sj_coder *c, int i, int *kind, size_t *n) {
	int lane = i % SJ_LANES;
	if (lane == 0) split_part(c, i / SJ_LANES);
	*kind = sj_kind(lane);
	*n = c->part.n[lane];
	return c->part.at[lane];
}

// choose returns the table of a kind in which n symbols take fewest bits.
static int choose(const sj_tables *t, int kind, const uint8_t *p, uint32_t n) {
	uint64_t bits[SJ_CHOICES] = {0};
	while (n > 0) {
		uint32_t some = n < 2048 ? n : 2048; // 28 bits at most each: the sums fit 16 bits
		sj_costs a = {0}, b = {0};
		uint32_t i = 0;
		for (; i + 2 <= some; i += 2) {
			a += t->cost[kind][p[i]];
			b += t->cost[kind][p[i + 1]];
		}
		if (i < some) a += t->cost[kind][p[i]];
		for (int k = 0; k < SJ_CHOICES; k++) bits[k] += (uint64_t)a[k] + b[k];
		p += some;
		n -= some;
	}
	int best = 0;
	for (int k = 1; k < SJ_CHOICES; k++) {
		if (bits[k] < bits[best]) best = k;
	}
	return kind * SJ_CHOICES + best;
}

typedef struct {
	uint8_t *dir, *escape, *lane;
} container;

static void put_escape(container *o, int v) {
	*o->escape++ = (uint8_t)v;
	*o->escape++ = (uint8_t)((unsigned)v >> 8);
}

// encode_lane codes n symbols; those without a code become escapes. given has the values of those that are escapes
// already.
static void encode_lane(const sj_tables *t, int table, const uint8_t *p, uint32_t n, const int16_t *given,
	container *o) {
	const uint32_t *code = t->code[table];
	int escape = sj_escape(table / SJ_CHOICES);
	uint64_t acc = 0;
	unsigned have = 0;
	uint8_t *out = o->lane;
	for (uint32_t i = 0; i < n;) {
		uint32_t to = i + 4 < n ? i + 4 : n; // 48 bits, and 7 that are left
		for (; i < to; i++) {
			uint32_t e = code[p[i]];
			if (!e) {
				put_escape(o, p[i] == escape ? *given++ : escape ? (int8_t)p[i] : p[i]);
				e = t->escape[table];
			}
			acc |= (uint64_t)(e & 0xFFFF) << have;
			have += e >> 16;
		}
		put32(out, (uint32_t)acc);
		put32(out + 4, (uint32_t)(acc >> 32));
		out += have >> 3;
		acc >>= have & ~7u;
		have &= 7;
	}
	if (have) *out++ = (uint8_t)acc;
	o->lane = out;
}

static void put_varint(uint8_t **o, uint32_t v) {
	for (; v > 127; v >>= 7) *(*o)++ = (uint8_t)(v | 128);
	*(*o)++ = (uint8_t)v;
}

// put_verbatim leaves the standard tables out: 2 bytes say where they were, and 2 how many bytes.
static uint8_t *put_verbatim(const sj_coder *c, uint8_t *header, uint8_t *o) {
	const uint8_t *p = c->b[VERBATIM].p;
	size_t n = c->verbatim_n, at = 0, out = 0;
	for (at = 0; at + SJ_DHT / 2 <= n && at <= UINT16_MAX; at++) {
		const uint8_t *f = memchr(p + at, sj_dht[1], n - at); // rarer than 0xFF
		if (!f) break;
		at = (size_t)(f - p);
		if (at == 0 || at - 1 + SJ_DHT / 2 > n || memcmp(f - 1, sj_dht, SJ_DHT / 2) != 0) continue;
		at--;
		out = at + SJ_DHT <= n && memcmp(p + at, sj_dht, SJ_DHT) == 0 ? SJ_DHT : SJ_DHT / 2;
		break;
	}
	if (!out || at > UINT16_MAX) at = out = 0;
	put32(header, (uint32_t)(n - out));
	put32(header + 4, (uint32_t)(at | out << 16));
	memcpy(o, p, at);
	memcpy(o + at, p + at + out, n - at - out);
	return o + n - out;
}

// most_coded is the space for the lanes of a file of n bytes, and for their escapes: what takes more is not worth it.
static size_t most_coded(size_t n) { return 2 * n + (64 << 10); }

static size_t most_directory(const sj_recoded *g) {
	return SJ_HEADER + (size_t)(g->bands * g->groups) * 5 * (SJ_LANES + 1); }

// encode writes the container.
static int encode(sj_coder *c, const sj_tables *t, const uint8_t *id, uint32_t crc, size_t size) {
	const sj_recoded *g = &c->split;
	size_t dir = most_directory(g), some = most_coded(size);
	if (!sj_reserve(&c->b[CODED], dir + 2 * some + c->verbatim_n)) return SJ_MEMORY;
	uint8_t *p = c->b[CODED].p;
	container o = {p + SJ_HEADER, p + dir, p + dir + some};
	memcpy(p, sj_magic, 8);
	memcpy(p + 8, id, 8);
	put32(p + 16, (uint32_t)size);
	put32(p + 20, crc);
	for (int i = 0; i < g->bands * g->groups; i++) {
		const symbols *q = split_part(c, i);
		const uint8_t *escape = o.escape;
		for (int k = 0; k < SJ_LANES; k++) {
			if (o.escape + 2 * (size_t)q->n[k] > p + dir + some ||
				o.lane + 3 * (size_t)q->n[k] / 2 + 8 > p + dir + 2 * some) return SJ_KEEP;
			const uint8_t *from = o.lane;
			int table = choose(t, sj_kind(k), q->at[k], q->n[k]);
			encode_lane(t, table, q->at[k], q->n[k], q->escapes[k], &o);
			put_varint(&o.dir, (uint32_t)(o.lane - from) << 3 | (uint32_t)(table % SJ_CHOICES));
		}
		put_varint(&o.dir, (uint32_t)(o.escape - escape) / 2);
	}
	uint8_t *to = o.dir;
	size_t n = (size_t)(o.escape - (p + dir));
	memmove(to, p + dir, n);
	to += n;
	n = (size_t)(o.lane - (p + dir + some));
	memmove(to, p + dir + some, n);
	c->coded_n = (size_t)(put_verbatim(c, p + 24, to + n) - p);
	return SJ_OK;
}

// widen copies values from a lane, up to 15 more than there are. escapes: there may be some.
static inline void widen(sj_streams *s, int lane, int16_t *o, int n, int escapes) {
	const uint8_t *p = s->lane[lane];
	if (escapes && memchr(p, 0x80, (size_t)n)) {
		for (int i = 0; i < n; i++) o[i] = (int16_t)sj_next(s, lane);
		return;
	}
	for (int i = 0; i < n; i += 16) {
		int8_t b[16];
		memcpy(b, p + i, sizeof b);
		for (int k = 0; k < 16; k++) o[i + k] = b[k];
	}
	s->lane[lane] += n;
}

static int gather_comp(sj_coder *c, int band, int comp) {
	const sj_recoded *r = &c->r;
	int w = r->j.comp[comp].blocks_w, rows = sj_band_rows(r, comp, band), rich;
	size_t b = first_block(r, comp, band);
	sj_streams s = sj_begin(r, comp, band);
	int escapes = s.escape[SJ_VALUES] < s.escapes_end;
	int16_t *v = c->c.values + c->c.used;
	for (int y = 0; y < rows; y++) {
		for (int x = 0; x < w; x++, b++) {
			uint64_t m = sj_next_mask(&s, &rich);
			if (m & 1) return SJ_CORRUPT;
			int16_t *dc = c->c.dc + b;
			*dc = (int16_t)(sj_predict(dc, x, y, 1, w) + sj_next(&s, 0));
			c->c.mask[b] = m;
			c->c.at[b] = (uint32_t)(v - c->c.values);
			int low = __builtin_popcount(m & 255), high = __builtin_popcountll(m >> 8);
			widen(&s, SJ_VALUES + 2 * rich, v, low, escapes);
			widen(&s, SJ_VALUES + 2 * rich + 1, v + low, high, escapes);
			v += low + high;
		}
	}
	c->c.used = (size_t)(v - c->c.values);
	return SJ_OK;
}

// gather makes the coefficients from all lanes.
static int gather(sj_coder *c) {
	const sj_recoded *r = &c->r;
	size_t values = 0;
	for (int i = 0; i < r->bands * r->groups; i++) {
		for (int k = SJ_VALUES; k < SJ_LANES; k++) values += r->part[i].n[0][k] + r->part[i].n[1][k];
	}
	if (!room(c, &r->j, r->size) || values + 64 > c->c.cap) return SJ_MEMORY;
	for (int band = 0; band < r->bands; band++) {
		for (int comp = 0; comp < r->j.comps; comp++) {
			int rc = gather_comp(c, band, comp);
			if (rc != SJ_OK) return rc;
		}
	}
	if (c->c.dense) dense(&c->c, r->j.blocks);
	return SJ_OK;
}

// put_together writes the file: what is outside of the scans as it was, and the scans from the coefficients.
static int put_together(sj_coder *c) {
	const sj_recoded *r = &c->r;
	if (r->size > 64 * (uint64_t)r->n || !sj_reserve(&c->b[OUT], r->size)) return SJ_CORRUPT;
	uint8_t *o = c->b[OUT].p, *end = o + r->size;
	sj_jpeg j = {0};
	sj_scan s;
	known k; // as when it was taken apart: scans that repeat each other would cost a pass each
	memset(&k, -1, sizeof k);
	size_t at = 0, from = 0;
	int rc;
	while ((rc = sj_walk(&j, r->verbatim, r->verbatim_n, &at, &s)) == SJ_WALK_SCAN) {
		if (j.scans > SJ_MAX_SCANS || !note(&k, &j, &s) || at - from > (size_t)(end - o)) return SJ_CORRUPT;
		memcpy(o, r->verbatim + from, at - from);
		if (!(o = sj_write_scan(&j, &s, &c->c, o + (at - from), end, &c->b[CLEAN]))) return SJ_CORRUPT;
		from = at;
	}
	if (rc != SJ_WALK_END || r->verbatim_n - from != (size_t)(end - o)) return SJ_CORRUPT;
	memcpy(o, r->verbatim + from, r->verbatim_n - from);
	c->result = &c->b[OUT];
	c->result_n = r->size;
	return SJ_OK;
}

int sj_restore(sj_coder *c, const sj_tables *t, const uint8_t *rec, size_t n) {
	int rc = sj_recoded_open(&c->r, rec, n, t);
	if (rc == SJ_OK) rc = sj_recoded_lanes(&c->r, 0, c->r.bands);
	if (rc == SJ_OK) rc = gather(c);
	return rc == SJ_OK ? put_together(c) : rc;
}

// grown adds what sj_reserve takes beyond the sum of the buffers, and what reading a scan does.
static size_t grown(size_t n) {
	size_t most = (BUFFERS + 4) * SJ_GROWTH; // sj_recoded has 4
	return n + (n / 4 < most ? n / 4 : most) + (128 << 10);
}

// restore_needs bounds what sj_restore takes for a file of so many bytes.
static size_t restore_needs(const sj_recoded *r, size_t file) {
	const sj_jpeg *j = &r->j;
	size_t coefs = j->blocks * (2 + 8 + 4 + (j->progressive ? 128 : 0)) + 2 * most_values(j, file);
	return coefs + sj_lanes_need(j->blocks, (size_t)(r->bands * r->groups)) + 2 * file;
}

size_t sj_recode_needs(const uint8_t *src, size_t n) {
	sj_scan s;
	sj_recoded g = {0};
	size_t at = 0;
	if (sj_walk(&g.j, src, n, &at, &s) != SJ_WALK_SCAN || g.j.blocks > 8 * n) return 0;
	sj_set_geometry(&g);
	return grown(restore_needs(&g, n) + most_blocks(&g) * MOST * 3 + most_directory(&g) + 2 * most_coded(n) + 3 * n);
}

size_t sj_restore_needs(const uint8_t *rec, size_t n, const sj_tables *t) {
	sj_recoded r = {0};
	size_t need = 0;
	if (sj_recoded_open(&r, rec, n, t) == SJ_OK && r.size <= 64 * (uint64_t)n) {
		need = grown(restore_needs(&r, r.size) + r.whole.cap);
	}
	sj_recoded_free(&r);
	return need;
}

int sj_recode(sj_coder *c, const sj_tables *t, const uint8_t *id, uint32_t crc, const uint8_t *src, size_t n) {
	int rc = sj_split(c, src, n);
	if (rc == SJ_OK) rc = encode(c, t, id, crc, n);
	if (rc != SJ_OK) return rc;
	rc = sj_restore(c, t, c->b[CODED].p, c->coded_n);
	if (rc == SJ_MEMORY) return rc;
	if (rc != SJ_OK || c->result_n != n || memcmp(c->b[OUT].p, src, n) != 0) return SJ_KEEP;
	c->result = &c->b[CODED];
	c->result_n = c->coded_n;
	return c->coded_n < n ? SJ_OK : SJ_LARGER;
}
