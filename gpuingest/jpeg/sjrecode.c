// Recoded JPEG: the container, its entropy stage, and the coder that makes it and takes it back. recode.go draws the
// format.
//
// Nothing in a container is believed: geometry comes from the frame header, counts from the lanes before, and a lane has
// at least a bit a symbol. Inner loops need no more than that: a load never passes the container's end (the verbatim
// part lies behind the lanes), and the lanes' output has slack.

#include "sjrecode.h"
#include "sjscan.h"

#include <stdlib.h>

enum {
	BITS = 12,    // of the longest code
	CHOICES = 4,  // tables of a kind
	SLACK = 64,   // bytes behind a lane's output that decoding and expansion may touch
	HEADER = 28,
	LEAST = 16,   // bytes of the shortest verbatim part
	TABLES = 2 * SJ_KINDS * CHOICES,
	TABLES_SIZE = 4 + TABLES * 128
};

static const uint8_t magic[8] = {0x8E, 'S', 'J', 'R', 'e', 'c', '\n', 1};
static const uint8_t tables_magic[4] = {'S', 'J', 'T', 1};

// The position in a block, by rows, of each place in zigzag order.
static const uint8_t natural[64] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
                                    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
                                    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

// The symbol of each kind that stands for an escape; -1: none. A mask byte that is there is never 0.
static const int escape_of[SJ_KINDS] = {0x80, -1, 0, 0, 0, 0, 0x80};

struct sj_tables {
	// Up to 3 symbols a look-up: they are in the low bytes, their bits in 24..29, their count in 30 and 31.
	uint32_t look[TABLES][1 << BITS];
	uint16_t code[TABLES][256]; // first bit lowest
	uint8_t len[TABLES][256];   // 0: has no code
};

typedef struct sj_part {
	uint32_t off[SJ_KINDS], len[SJ_KINDS]; // in the container
	uint8_t choice[SJ_KINDS];
	uint32_t escapes, escapes_end; // bytes in the container
	uint32_t values;               // the first escape of SJ_VALUE
	uint32_t blocks;
	uint8_t *lane[SJ_KINDS];
	uint32_t count[SJ_KINDS];
} sj_part;

static inline uint32_t get32(const uint8_t *p) { return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24; }
static inline int16_t get16(const uint8_t *p) { return (int16_t)(p[0] | p[1] << 8); }

static void put32(uint8_t *p, uint32_t v) {
	for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> 8 * i);
}

// ---------------------------------------------------------------------------------------------------------- tables

static int make_table(sj_tables *t, int i) {
	uint32_t count[BITS + 2] = {0}, next[BITS + 2];
	for (int s = 0; s < 256; s++) count[t->len[i][s]]++;
	uint32_t code = 0;
	count[0] = 0;
	for (int l = 1; l <= BITS; l++) {
		code = (code + count[l - 1]) << 1;
		next[l] = code;
	}
	if (code + count[BITS] != 1 << BITS) return 0; // every look-up finds a code
	uint16_t one[1 << BITS];
	for (int s = 0; s < 256; s++) {
		int l = t->len[i][s];
		if (!l) continue;
		uint32_t c = next[l]++, r = 0;
		for (int b = 0; b < l; b++) r |= (c >> b & 1) << (l - 1 - b);
		t->code[i][s] = (uint16_t)r;
		for (uint32_t at = r; at < 1 << BITS; at += 1u << l) one[at] = (uint16_t)(s | l << 8);
	}
	for (uint32_t at = 0; at < 1 << BITS; at++) {
		uint32_t e = 0, n = 0, used = 0;
		for (; n < 3; n++) {
			uint32_t o = one[at >> used];
			if (used + (o >> 8) > BITS) break;
			e |= (o & 255) << 8 * n;
			used += o >> 8;
		}
		t->look[i][at] = e | used << 24 | n << 30;
	}
	return 1;
}

sj_tables *sj_tables_parse(const uint8_t *p, size_t n) {
	if (n != TABLES_SIZE || memcmp(p, tables_magic, sizeof tables_magic) != 0) return NULL;
	sj_tables *t = malloc(sizeof *t);
	if (!t) return NULL;
	for (int i = 0; i < TABLES; i++) {
		const uint8_t *q = p + 4 + 128 * i;
		int ok = 1, escape = escape_of[i / CHOICES % SJ_KINDS];
		for (int s = 0; s < 256; s++) {
			t->len[i][s] = q[s / 2] >> 4 * (s & 1) & 15;
			ok &= t->len[i][s] <= BITS && (t->len[i][s] || escape >= 0);
		}
		if (!ok || (escape >= 0 && !t->len[i][escape]) || !make_table(t, i)) {
			free(t);
			return NULL;
		}
	}
	return t;
}

void sj_tables_free(sj_tables *t) { free(t); }

static int table_of(int comp, int kind, int choice) { return ((comp > 0) * SJ_KINDS + kind) * CHOICES + choice; }

// ---------------------------------------------------------------------------------------------------------- container

static size_t put_marker(uint8_t *o, int marker, const uint8_t *body, size_t n) {
	o[0] = 0xFF;
	o[1] = (uint8_t)marker;
	o[2] = (uint8_t)((n + 2) >> 8);
	o[3] = (uint8_t)(n + 2);
	memcpy(o + 4, body, n);
	return n + 4;
}

// make_head copies what pixels depend on. The markers have been walked already.
static int make_head(sj_recoded *r, const sj_jpeg *j) {
	const uint8_t *p = r->verbatim;
	uint8_t *o = r->head_buf, *end = o + sizeof r->head_buf - 64;
	*o++ = 0xFF;
	*o++ = 0xD8;
	for (size_t i = 2; i < j->head_end;) {
		while (p[i] == 0xFF) i++;
		int m = p[i++];
		size_t n = (size_t)(p[i] << 8 | p[i + 1]) - 2;
		const uint8_t *q = p + i + 2;
		int jfif = m == 0xE0 && n >= 14 && memcmp(q, "JFIF", 5) == 0, adobe = m == 0xEE && n >= 12 && memcmp(q, "Adobe", 5) == 0;
		if (jfif || adobe || m == 0xDB) {
			size_t most = jfif ? 14 : adobe ? 12 : n;
			if (o + most + 4 > end) return 0;
			o += put_marker(o, m, q, most);
			if (jfif) o[-1] = o[-2] = 0; // no thumbnail
		}
		i += 2 + n;
	}
	uint8_t sof[6 + 9] = {8, (uint8_t)(j->h >> 8), (uint8_t)j->h, (uint8_t)(j->w >> 8), (uint8_t)j->w, (uint8_t)j->comps};
	uint8_t sos[4 + 6] = {(uint8_t)j->comps};
	for (int c = 0; c < j->comps; c++) {
		sof[6 + 3 * c] = sos[1 + 2 * c] = (uint8_t)j->comp[c].id;
		sof[7 + 3 * c] = (uint8_t)(j->comp[c].h << 4 | j->comp[c].v);
		sof[8 + 3 * c] = (uint8_t)j->comp[c].tq;
	}
	sos[2 + 2 * j->comps] = 63;
	o += put_marker(o, 0xC0, sof, 6 + 3 * (size_t)j->comps);
	o += put_marker(o, 0xDA, sos, 4 + 2 * (size_t)j->comps);
	r->head = r->head_buf;
	r->head_n = (size_t)(o - r->head_buf);
	return 1;
}

static int get_varint(const uint8_t **p, const uint8_t *end, uint32_t *v) {
	*v = 0;
	for (int shift = 0; shift < 28 && *p < end; shift += 7) {
		uint8_t b = *(*p)++;
		*v |= (uint32_t)(b & 127) << shift;
		if (!(b & 128)) return 1;
	}
	return 0;
}

static int band_rows(const sj_recoded *r, int c, int band) {
	int left = r->comp[c].blocks_h - band * r->comp[c].band_rows;
	return left < r->comp[c].band_rows ? left : r->comp[c].band_rows;
}

static void set_geometry(sj_recoded *r, const sj_jpeg *j) {
	r->comps = j->comps;
	r->progressive = j->progressive;
	r->band_mcu_rows = j->vmax > 1 ? 2 : 4;
	r->bands = (j->mcus_h + r->band_mcu_rows - 1) / r->band_mcu_rows;
	for (int c = 0; c < r->comps; c++) {
		r->comp[c].blocks_w = j->comp[c].blocks_w;
		r->comp[c].blocks_h = j->comp[c].blocks_h;
		r->comp[c].band_rows = r->band_mcu_rows * j->comp[c].v;
	}
}

// read_directory finds every lane; it must all add up to the container's size.
static int read_directory(sj_recoded *r) {
	const uint8_t *p = r->src + HEADER, *end = r->verbatim;
	uint32_t escapes = 0;
	for (int i = 0; i < r->bands * r->comps; i++) {
		sj_part *q = &r->part[i];
		uint32_t n;
		if (end - p < 2) return 0;
		for (int k = 0; k < SJ_KINDS; k++) q->choice[k] = (p[0] | p[1] << 8) >> 2 * k & 3;
		if (p[1] >> 6) return 0;
		p += 2;
		for (int k = 0; k < SJ_KINDS; k++) {
			if (!get_varint(&p, end, &q->len[k])) return 0;
		}
		if (!get_varint(&p, end, &n)) return 0;
		q->escapes = escapes;
		escapes += 2 * n;
		q->escapes_end = escapes;
		if (escapes > r->n) return 0;
		q->blocks = (uint32_t)(r->comp[i % r->comps].blocks_w * band_rows(r, i % r->comps, i / r->comps));
		if (q->blocks > 8 * (uint64_t)q->len[SJ_FLAG]) return 0; // a bit a symbol, at least
	}
	size_t at = (size_t)(p - r->src), escapes_at = at;
	at += escapes;
	for (int i = 0; i < r->bands * r->comps; i++) {
		sj_part *q = &r->part[i];
		q->escapes += (uint32_t)escapes_at;
		q->escapes_end += (uint32_t)escapes_at;
		for (int k = 0; k < SJ_KINDS; k++) {
			if (at > r->n) return 0;
			q->off[k] = (uint32_t)at;
			at += q->len[k];
		}
	}
	return at == (size_t)(r->verbatim - r->src);
}

int sj_recoded_open(sj_recoded *r, const uint8_t *src, size_t n, const sj_tables *t) {
	r->from = r->to = 0;
	r->bands = r->comps = 0;
	if (n < HEADER + LEAST || n > UINT32_MAX / 2 || memcmp(src, magic, sizeof magic) != 0) return SJ_CORRUPT;
	r->src = src;
	r->n = n;
	r->t = t;
	r->size = get32(src + 16);
	r->verbatim_n = get32(src + 24);
	if (r->verbatim_n < LEAST || r->verbatim_n > n - HEADER) return SJ_CORRUPT;
	r->verbatim = src + n - r->verbatim_n;
	sj_jpeg j = {0};
	sj_scan s;
	size_t at = 0;
	if (sj_walk(&j, r->verbatim, r->verbatim_n, &at, &s) != SJ_WALK_SCAN || !make_head(r, &j)) return SJ_CORRUPT;
	if (j.blocks > 8 * n) return SJ_CORRUPT; // before memory is taken for the bands
	sj_recoded g = {0};
	set_geometry(&g, &j);
	size_t parts = (size_t)g.bands * (size_t)g.comps;
	if (parts > r->parts_cap) {
		free(r->part);
		r->parts_cap = 0;
		r->part = malloc(parts * sizeof *r->part);
		if (!r->part) return SJ_MEMORY;
		r->parts_cap = parts;
	}
	set_geometry(r, &j);
	if (read_directory(r)) return SJ_OK;
	r->bands = r->comps = 0;
	return SJ_CORRUPT;
}

void sj_recoded_free(sj_recoded *r) {
	free(r->part);
	free(r->lanes);
	memset(r, 0, sizeof *r);
}

size_t sj_recoded_bytes(const sj_recoded *r) { return sizeof *r + r->parts_cap * sizeof *r->part + r->lanes_cap; }

// ---------------------------------------------------------------------------------------------------------- entropy stage

// lane decodes n symbols of part q's kind k to out; up to 15 bytes more are written.
static void lane(const sj_recoded *r, const sj_part *q, int comp, int k, uint8_t *out, uint32_t n) {
	const uint32_t *look = r->t->look[table_of(comp, k, q->choice[k])];
	const uint8_t *last = r->src + r->n - 8; // the last place that 8 bytes can be loaded from
	uint8_t *end = out + n;
	uint64_t at = (uint64_t)q->off[k] * 8;
	while (out < end) {
		const uint8_t *p = r->src + (at >> 3);
		uint64_t v;
		memcpy(&v, p < last ? p : last, 8);
		v >>= at & 7;
		for (int i = 0; i < 4; i++) {
			uint32_t e = look[v & ((1 << BITS) - 1)];
			memcpy(out, &e, 4);
			e >>= 24;
			out += e >> 6;
			v >>= e & 63;
			at += e & 63;
		}
	}
}

// unescape puts escaped symbols into a mask lane, and moves to the escapes of the next one.
static void unescape(const sj_recoded *r, sj_part *q, uint8_t *p, uint32_t n) {
	uint8_t *end = p + n;
	while (q->values < q->escapes_end && (p = memchr(p, 0, (size_t)(end - p)))) {
		*p++ = r->src[q->values];
		q->values += 2;
	}
}

// lanes_of decodes the lanes of one part, from o on, and returns where their output ends; NULL: too few bits.
static uint8_t *lanes_of(const sj_recoded *r, sj_part *q, int comp, uint8_t *o) {
	uint32_t values = 0;
	memset(q->count, 0, sizeof q->count);
	q->count[SJ_DC] = q->count[SJ_FLAG] = q->blocks;
	q->values = q->escapes;
	for (int k = 0; k < SJ_KINDS; k++) {
		uint32_t n = q->count[k];
		if (n > 8 * (uint64_t)q->len[k]) return NULL;
		q->lane[k] = o;
		lane(r, q, comp, k, o, n);
		if (k == SJ_DC) {
			for (uint32_t i = 0; i < n; i++) {
				if (o[i] == 0x80 && q->values < q->escapes_end) q->values += 2;
			}
		} else if (k == SJ_FLAG) {
			for (uint32_t i = 0; i < n; i++) {
				for (int b = 0; b < 3; b++) q->count[SJ_MASK0 + b] += o[i] >> b & 1;
				q->count[SJ_MASK3] += (uint32_t)__builtin_popcount(o[i] >> 3);
			}
		} else if (k < SJ_VALUE) {
			unescape(r, q, o, n);
			for (uint32_t i = 0; i < n; i++) values += (uint32_t)__builtin_popcount(o[i]);
			q->count[SJ_VALUE] = values;
		}
		o += n + SLACK;
	}
	return o;
}

int sj_recoded_lanes(sj_recoded *r, int from, int to) {
	r->from = r->to = 0;
	if (from < 0 || to > r->bands || from >= to) return SJ_CORRUPT;
	size_t blocks = 0, most = 0;
	for (int i = from * r->comps; i < to * r->comps; i++) blocks += r->part[i].blocks;
	most = blocks * (1 + 1 + 8 + 64) + (size_t)(to - from) * (size_t)r->comps * SJ_KINDS * SLACK;
	if (most > r->lanes_cap) {
		free(r->lanes);
		r->lanes_cap = 0;
		r->lanes = malloc(most);
		if (!r->lanes) return SJ_MEMORY;
		r->lanes_cap = most;
	}
	uint8_t *o = r->lanes;
	for (int i = from * r->comps; i < to * r->comps; i++) {
		if (!(o = lanes_of(r, &r->part[i], i % r->comps, o))) return SJ_CORRUPT;
	}
	r->from = from;
	r->to = to;
	return SJ_OK;
}

// ---------------------------------------------------------------------------------------------------------- expansion

// A part's streams while it is expanded.
typedef struct {
	const uint8_t *dc, *flag, *mask[4], *value;
	const uint8_t *dc_escape, *value_escape, *dc_end, *value_end;
} streams;

static streams begin(const sj_recoded *r, const sj_part *q) {
	return (streams){q->lane[SJ_DC], q->lane[SJ_FLAG], {q->lane[SJ_MASK0], q->lane[SJ_MASK1], q->lane[SJ_MASK2], q->lane[SJ_MASK3]}, q->lane[SJ_VALUE],
	                 r->src + q->escapes, r->src + q->values, r->src + q->values, r->src + q->escapes_end};
}

static inline int next_dc(streams *s) {
	int v = (int8_t)*s->dc++;
	if (v != -128 || s->dc_escape == s->dc_end) return v;
	v = get16(s->dc_escape);
	s->dc_escape += 2;
	return v;
}

static inline int next_value(streams *s) {
	int v = (int8_t)*s->value++;
	if (v != -128 || s->value_escape == s->value_end) return v;
	v = get16(s->value_escape);
	s->value_escape += 2;
	return v;
}

static inline uint64_t next_mask(streams *s) {
	uint64_t m = 0;
	unsigned f = *s->flag++;
	for (int b = 0; f; b++, f >>= 1) {
		if (f & 1) m |= (uint64_t)*s->mask[b < 3 ? b : 3]++ << 8 * b;
	}
	return m;
}

// A block's DC is stored as the difference to its left neighbour; the first of a row to the one above; the first of a
// band to 0.
int sj_recoded_band(const sj_recoded *r, int comp, int band, int16_t *blocks, uint8_t *last) {
	if (comp < 0 || comp >= r->comps || band < r->from || band >= r->to) return SJ_CORRUPT;
	streams s = begin(r, &r->part[band * r->comps + comp]);
	int w = r->comp[comp].blocks_w, rows = band_rows(r, comp, band);
	memset(blocks, 0, (size_t)w * (size_t)rows * 128);
	int16_t above = 0;
	for (int y = 0; y < rows; y++) {
		int16_t dc = above;
		for (int x = 0; x < w; x++, blocks += 64) {
			uint64_t m = next_mask(&s);
			*last++ = m ? (uint8_t)(64 - __builtin_clzll(m)) : 0;
			for (; m; m &= m - 1) blocks[natural[__builtin_ctzll(m)]] = (int16_t)next_value(&s);
			blocks[0] = dc = (int16_t)(dc + next_dc(&s));
			if (x == 0) above = dc;
		}
	}
	return SJ_OK;
}

// ---------------------------------------------------------------------------------------------------------- coder

// The symbols of a part, before they are coded.
typedef struct {
	uint32_t at[SJ_KINDS], n[SJ_KINDS];
	uint32_t escapes, escapes_end; // in int16
} split;

// A coder's buffers; the first five are those of its coefficients.
enum { DC, MASK, AT, VALUES, DENSE, CLEAN, SYMBOLS, ESCAPES, PARTS, VERBATIM, CODED, OUT, BUFFERS };

struct sj_coder {
	sj_jpeg j;
	sj_coefs c;
	sj_recoded geometry, r;
	sj_buf b[BUFFERS];
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

// room makes space for the coefficients of all blocks; values is the most that there can be.
static int room(sj_coder *c, size_t values) {
	size_t n = c->j.blocks;
	if (values > n * 63) values = n * 63;
	values += 64;
	if (!sj_reserve(&c->b[DC], n * 2) || !sj_reserve(&c->b[MASK], n * 8) || !sj_reserve(&c->b[AT], n * 4) || !sj_reserve(&c->b[VALUES], values * 2)) return 0;
	if (c->j.progressive && !sj_reserve(&c->b[DENSE], n * 128)) return 0;
	c->c = (sj_coefs){c->b[DC].p, c->b[MASK].p, c->b[AT].p, c->b[VALUES].p, 0, values, c->j.progressive ? c->b[DENSE].p : NULL};
	return 1;
}

// sparse makes the sparse form from the dense one.
static void sparse(sj_coefs *c, size_t blocks) {
	const int16_t *q = c->dense;
	for (size_t b = 0; b < blocks; b++, q += 64) {
		uint64_t m = 0;
		c->dc[b] = q[0];
		c->at[b] = (uint32_t)c->used;
		for (int k = 1; k < 64; k++) {
			if (!q[k]) continue;
			m |= (uint64_t)1 << k;
			c->values[c->used++] = q[k];
		}
		c->mask[b] = m;
	}
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
	memset(&c->j, 0, sizeof c->j);
	c->verbatim_n = 0;
	if (n < 4 || n > UINT32_MAX / 8 || p[0] != 0xFF || p[1] != 0xD8) return SJ_KEEP;
	if (!sj_reserve(&c->b[VERBATIM], n)) return SJ_MEMORY;
	uint8_t *o = c->b[VERBATIM].p;
	known k;
	memset(&k, -1, sizeof k);
	sj_scan s;
	size_t at = 0, from = 0;
	int rc;
	while ((rc = sj_walk(&c->j, p, n, &at, &s)) == SJ_WALK_SCAN) {
		if (c->j.scans == 1) {
			if (c->j.blocks > 8 * n) return SJ_KEEP;
			if (!room(c, 4 * n)) return SJ_MEMORY;
			if (c->c.dense) {
				memset(c->c.dense, 0, c->j.blocks * 128);
			} else {
				memset(c->c.dc, 0, c->j.blocks * 2);
				memset(c->c.mask, 0, c->j.blocks * 8);
				memset(c->c.at, 0, c->j.blocks * 4);
			}
		}
		if (c->j.scans > SJ_MAX_SCANS || !note(&k, &c->j, &s)) return SJ_KEEP;
		memcpy(o + c->verbatim_n, p + from, at - from);
		c->verbatim_n += at - from;
		if (!sj_read_scan(&c->j, &s, &c->c, p, n, &at, &c->b[CLEAN])) return SJ_KEEP;
		from = at;
	}
	if (rc != SJ_WALK_END || c->j.scans == 0 || !complete(&k, c->j.comps)) return SJ_KEEP;
	memcpy(o + c->verbatim_n, p + from, n - from);
	c->verbatim_n += n - from;
	if (c->c.dense) {
		if (c->j.blocks * 63 > c->c.cap) { // refinement gives coefficients for less than two bits
			if (!sj_reserve(&c->b[VALUES], (c->j.blocks * 63 + 64) * 2)) return SJ_MEMORY;
			c->c.values = c->b[VALUES].p;
		}
		sparse(&c->c, c->j.blocks);
	}
	return SJ_OK;
}

typedef struct {
	uint8_t *o[SJ_KINDS];
	int16_t *escape;
} splitter;

static inline void split_dc(splitter *s, int v) {
	if (v > 127 || v < -127) {
		*s->escape++ = (int16_t)v;
		v = -128;
	}
	*s->o[SJ_DC]++ = (uint8_t)v;
}

static inline void split_block(splitter *s, uint64_t mask, const int16_t *v) {
	unsigned flag = 0;
	for (int b = 0; mask >> 8 * b; b++) {
		uint8_t byte = (uint8_t)(mask >> 8 * b);
		if (byte) {
			flag |= 1u << b;
			*s->o[b < 3 ? SJ_MASK0 + b : SJ_MASK3]++ = byte;
		}
		if (b == 7) break;
	}
	*s->o[SJ_FLAG]++ = (uint8_t)flag;
	uint8_t *o = s->o[SJ_VALUE];
	int n = __builtin_popcountll(mask);
	for (int i = 0; i < n; i++) {
		int wide = v[i] > 127 || v[i] < -127;
		if (wide) *s->escape++ = v[i];
		o[i] = wide ? 0x80 : (uint8_t)v[i];
	}
	s->o[SJ_VALUE] += n;
}

// split_part makes the symbols of one component of one band.
static void split_part(sj_coder *c, int comp, int band, split *q, uint8_t **symbols, int16_t **escapes) {
	const sj_recoded *g = &c->geometry;
	int w = g->comp[comp].blocks_w, rows = band_rows(g, comp, band);
	size_t block = c->j.comp[comp].first + (size_t)band * (size_t)g->comp[comp].band_rows * (size_t)w, blocks = (size_t)w * (size_t)rows;
	splitter s = {.escape = *escapes};
	uint8_t *o = *symbols;
	static const uint8_t most[SJ_KINDS] = {1, 1, 1, 1, 1, 5, 63};
	for (int k = 0; k < SJ_KINDS; k++) {
		s.o[k] = o;
		q->at[k] = (uint32_t)(o - (uint8_t *)c->b[SYMBOLS].p);
		o += blocks * most[k];
	}
	q->escapes = (uint32_t)(*escapes - (int16_t *)c->b[ESCAPES].p);
	int16_t above = 0;
	const int16_t *dc = c->c.dc + block;
	for (int y = 0; y < rows; y++) {
		int16_t left = above;
		above = *dc;
		for (int x = 0; x < w; x++, left = *dc++) split_dc(&s, (int16_t)(*dc - left));
	}
	for (size_t b = block; b < block + blocks; b++) split_block(&s, c->c.mask[b], c->c.values + c->c.at[b]);
	for (int k = 0; k < SJ_KINDS; k++) q->n[k] = (uint32_t)(s.o[k] - ((uint8_t *)c->b[SYMBOLS].p + q->at[k]));
	*symbols = s.o[SJ_VALUE];
	*escapes = s.escape;
}

static int split_all(sj_coder *c) {
	memset(&c->geometry, 0, sizeof c->geometry);
	set_geometry(&c->geometry, &c->j);
	size_t parts = (size_t)(c->geometry.bands * c->geometry.comps);
	if (!sj_reserve(&c->b[SYMBOLS], c->j.blocks * (1 + 1 + 8 + 63) + 64) || !sj_reserve(&c->b[ESCAPES], c->j.blocks * 64 * 2) ||
	    !sj_reserve(&c->b[PARTS], parts * sizeof(split))) {
		return SJ_MEMORY;
	}
	uint8_t *symbols = c->b[SYMBOLS].p;
	int16_t *escapes = c->b[ESCAPES].p;
	split *q = c->b[PARTS].p;
	for (int b = 0; b < c->geometry.bands; b++) {
		for (int i = 0; i < c->geometry.comps; i++) split_part(c, i, b, q++, &symbols, &escapes);
	}
	return SJ_OK;
}

int sj_split(sj_coder *c, const uint8_t *src, size_t n) {
	int rc = take_apart(c, src, n);
	return rc != SJ_OK ? rc : split_all(c);
}

int sj_lane_count(const sj_coder *c) { return c->geometry.bands * c->geometry.comps * SJ_KINDS; }

const uint8_t *sj_lane(const sj_coder *c, int i, int *kind, int *chroma, size_t *n) {
	const split *q = (const split *)c->b[PARTS].p + i / SJ_KINDS;
	*kind = i % SJ_KINDS;
	*chroma = i / SJ_KINDS % c->geometry.comps > 0;
	*n = q->n[*kind];
	return (const uint8_t *)c->b[SYMBOLS].p + q->at[*kind];
}

static void histogram(uint32_t *h, const uint8_t *p, uint32_t n) {
	memset(h, 0, 256 * sizeof *h);
	for (uint32_t i = 0; i < n; i++) h[p[i]]++;
}

// choose returns the table that takes fewest bits.
static int choose(const sj_tables *t, int comp, int kind, const uint32_t *h) {
	uint64_t least = UINT64_MAX;
	int best = 0;
	for (int i = 0; i < CHOICES; i++) {
		const uint8_t *len = t->len[table_of(comp, kind, i)];
		uint64_t bits = 0;
		unsigned escaped = escape_of[kind] < 0 ? 0 : len[escape_of[kind]] + 16u;
		for (int s = 0; s < 256; s++) bits += (uint64_t)h[s] * (len[s] ? len[s] : escaped);
		if (bits < least) {
			least = bits;
			best = i;
		}
	}
	return best;
}

typedef struct {
	uint8_t *dir, *escape, *lane;
} container;

// encode_lane codes n symbols; those without a code become escapes, and given has the values of those that are.
static void encode_lane(const sj_tables *t, int table, int kind, const uint8_t *p, uint32_t n, const int16_t **given, container *o) {
	const uint16_t *code = t->code[table];
	const uint8_t *len = t->len[table];
	int escape = escape_of[kind];
	uint64_t acc = 0;
	int have = 0;
	uint8_t *out = o->lane;
	for (uint32_t i = 0; i < n; i++) {
		int s = p[i];
		if (!len[s] || s == escape) {
			int16_t v = s != escape ? (kind == SJ_DC || kind == SJ_VALUE ? (int8_t)s : s) : *(*given)++;
			*o->escape++ = (uint8_t)v;
			*o->escape++ = (uint8_t)((uint16_t)v >> 8);
			s = escape;
		}
		acc |= (uint64_t)code[s] << have;
		have += len[s];
		if (have >= 32) {
			put32(out, (uint32_t)acc);
			out += 4;
			acc >>= 32;
			have -= 32;
		}
	}
	for (; have > 0; have -= 8, acc >>= 8) *out++ = (uint8_t)acc;
	o->lane = out;
}

static void put_varint(uint8_t **o, uint32_t v) {
	for (; v > 127; v >>= 7) *(*o)++ = (uint8_t)(v | 128);
	*(*o)++ = (uint8_t)v;
}

static size_t count_symbols(const sj_coder *c, size_t parts) {
	const split *q = c->b[PARTS].p;
	size_t n = 0;
	for (size_t i = 0; i < parts; i++) {
		for (int k = 0; k < SJ_KINDS; k++) n += q[i].n[k];
	}
	return n;
}

// encode writes the container.
static int encode(sj_coder *c, const sj_tables *t, const uint8_t *id, uint32_t crc, size_t size) {
	const sj_recoded *g = &c->geometry;
	size_t parts = (size_t)(g->bands * g->comps), symbols = count_symbols(c, parts);
	size_t dir = HEADER + parts * (2 + 5 * (SJ_KINDS + 1)), escapes = 2 * symbols, lanes = symbols * 3 / 2 + parts * SJ_KINDS * 8;
	if (!sj_reserve(&c->b[CODED], dir + escapes + lanes + c->verbatim_n)) return SJ_MEMORY;
	uint8_t *p = c->b[CODED].p;
	container o = {p + HEADER, p + dir, p + dir + escapes};
	memcpy(p, magic, 8);
	memcpy(p + 8, id, 8);
	put32(p + 16, (uint32_t)size);
	put32(p + 20, crc);
	put32(p + 24, (uint32_t)c->verbatim_n);
	for (size_t i = 0; i < parts; i++) {
		const split *q = (const split *)c->b[PARTS].p + i;
		const int16_t *given = (const int16_t *)c->b[ESCAPES].p + q->escapes;
		const uint8_t *escape = o.escape;
		uint8_t *choices = o.dir;
		unsigned all = 0;
		int comp = (int)(i % (size_t)g->comps);
		o.dir += 2;
		for (int k = 0; k < SJ_KINDS; k++) {
			uint32_t h[256];
			const uint8_t *s = (const uint8_t *)c->b[SYMBOLS].p + q->at[k], *from = o.lane;
			histogram(h, s, q->n[k]);
			int choice = choose(t, comp, k, h);
			all |= (unsigned)choice << 2 * k;
			encode_lane(t, table_of(comp, k, choice), k, s, q->n[k], &given, &o);
			put_varint(&o.dir, (uint32_t)(o.lane - from));
		}
		choices[0] = (uint8_t)all;
		choices[1] = (uint8_t)(all >> 8);
		put_varint(&o.dir, (uint32_t)(o.escape - escape) / 2);
	}
	uint8_t *to = o.dir;
	size_t n = (size_t)(o.escape - (p + dir));
	memmove(to, p + dir, n);
	to += n;
	n = (size_t)(o.lane - (p + dir + escapes));
	memmove(to, p + dir + escapes, n);
	to += n;
	memcpy(to, c->b[VERBATIM].p, c->verbatim_n);
	c->coded_n = (size_t)(to - p) + c->verbatim_n;
	return SJ_OK;
}

// gather makes the coefficients from all lanes.
static int gather(sj_coder *c) {
	const sj_recoded *r = &c->r;
	size_t values = 0;
	for (int i = 0; i < r->bands * r->comps; i++) values += r->part[i].count[SJ_VALUE];
	if (!room(c, values)) return SJ_MEMORY;
	for (int i = 0; i < r->bands * r->comps; i++) {
		int comp = i % r->comps, band = i / r->comps, w = r->comp[comp].blocks_w, rows = band_rows(r, comp, band);
		size_t b = c->j.comp[comp].first + (size_t)band * (size_t)r->comp[comp].band_rows * (size_t)w;
		streams s = begin(r, &r->part[i]);
		int16_t above = 0;
		for (int y = 0; y < rows; y++) {
			int16_t dc = above;
			for (int x = 0; x < w; x++, b++) {
				uint64_t m = next_mask(&s);
				if (m & 1) return SJ_CORRUPT;
				c->c.dc[b] = dc = (int16_t)(dc + next_dc(&s));
				if (x == 0) above = dc;
				c->c.mask[b] = m;
				c->c.at[b] = (uint32_t)c->c.used;
				for (int n = __builtin_popcountll(m); n > 0; n--) c->c.values[c->c.used++] = (int16_t)next_value(&s);
			}
		}
	}
	if (c->c.dense) dense(&c->c, c->j.blocks);
	return SJ_OK;
}

// put_together writes the file: what is outside of the scans as it was, and the scans from the coefficients.
static int put_together(sj_coder *c) {
	const sj_recoded *r = &c->r;
	if (r->size > 64 * (uint64_t)r->n || !sj_reserve(&c->b[OUT], r->size + SJ_SCAN_SLACK)) return SJ_CORRUPT;
	uint8_t *o = c->b[OUT].p, *end = o + r->size;
	sj_jpeg j = {0};
	sj_scan s;
	size_t at = 0, from = 0;
	int rc;
	while ((rc = sj_walk(&j, r->verbatim, r->verbatim_n, &at, &s)) == SJ_WALK_SCAN) {
		if (j.scans > SJ_MAX_SCANS || at - from > (size_t)(end - o)) return SJ_CORRUPT;
		memcpy(o, r->verbatim + from, at - from);
		if (!(o = sj_write_scan(&j, &s, &c->c, o + (at - from), end))) return SJ_CORRUPT;
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
	if (rc != SJ_OK) return rc;
	memset(&c->j, 0, sizeof c->j);
	sj_scan s;
	size_t at = 0;
	sj_walk(&c->j, c->r.verbatim, c->r.verbatim_n, &at, &s);
	rc = gather(c);
	return rc != SJ_OK ? rc : put_together(c);
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
