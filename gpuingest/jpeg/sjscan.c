// JPEG's markers, and Huffman-coded scans in both directions.
//
// The reader copies a restart interval without its stuffed zeros, and pads the copy: so the inner loops need no bounds,
// and a look after each block suffices. Files that an encoder may write but that nobody does are refused: they stay as
// they are.

#include "sjscan.h"

#include <stdlib.h>

enum {
	PAD = 1024, // zeros behind a copied interval: more than a block can read
	LOOK = 10,  // bits of a look-up of the reader
	MOST_BLOCKS = 1 << 20
};

// ---------------------------------------------------------------------------------------------------------- markers

static int read_dht(sj_jpeg *j, const uint8_t *p, size_t n) {
	while (n >= 17) {
		int class = p[0] >> 4, slot = p[0] & 15;
		if (class > 1 || slot > 3) return 0;
		sj_huff *h = class ? &j->ac[slot] : &j->dc[slot];
		size_t count = 0;
		unsigned code = 0;
		h->bits[0] = 0;
		for (int l = 1; l <= 16; l++) {
			h->bits[l] = p[l];
			count += p[l];
			code = (code << 1) + p[l];
			if (code >= 1u << l) return 0; // as libjpeg: no code is all ones
		}
		if (count > 256 || 17 + count > n) return 0;
		memset(h->vals, 0, sizeof h->vals);
		memcpy(h->vals, p + 17, count);
		for (size_t i = 0; i < count && !class; i++) {
			if (h->vals[i] > 15) return 0; // libjpeg refuses such a table
		}
		h->there = 1;
		p += 17 + count;
		n -= 17 + count;
	}
	return n == 0;
}

static int read_dqt(sj_jpeg *j, const uint8_t *p, size_t n) {
	if (j->scans) return 0; // libjpeg would use the tables of each component's first scan
	while (n > 0) {
		size_t size = p[0] >> 4 ? 129 : 65;
		if (p[0] >> 4 > 1 || (p[0] & 15) > 3 || n < size) return 0;
		j->quant |= 1u << (p[0] & 15);
		p += size;
		n -= size;
	}
	return 1;
}

static int read_sof(sj_jpeg *j, const uint8_t *p, size_t n, int progressive) {
	if (j->comps || n < 6 || p[0] != 8) return 0;
	j->progressive = progressive;
	j->h = p[1] << 8 | p[2];
	j->w = p[3] << 8 | p[4];
	int comps = p[5];
	if (j->w == 0 || j->h == 0 || (comps != 1 && comps != 3) || n != 6 + 3 * (size_t)comps) return 0;
	j->hmax = j->vmax = 1;
	int per_mcu = 0;
	for (int c = 0; c < comps; c++) {
		const uint8_t *q = p + 6 + 3 * c;
		int h = q[1] >> 4, v = q[1] & 15;
		if (h == 0 || v == 0 || h > 4 || v > 4 || h == 3 || v == 3 || q[2] > 3) return 0;
		for (int k = 0; k < c; k++) {
			if (j->comp[k].id == q[0]) return 0;
		}
		if (comps == 1) h = v = 1; // a scan of one component goes by blocks, whatever its sampling
		j->comp[c].id = q[0];
		j->comp[c].h = h;
		j->comp[c].v = v;
		j->comp[c].tq = q[2];
		if (h > j->hmax) j->hmax = h;
		if (v > j->vmax) j->vmax = v;
		per_mcu += h * v;
	}
	if (per_mcu > 10) return 0;
	j->mcus_w = (j->w + 8 * j->hmax - 1) / (8 * j->hmax);
	j->mcus_h = (j->h + 8 * j->vmax - 1) / (8 * j->vmax);
	for (int c = 0; c < comps; c++) {
		int h = j->comp[c].h, v = j->comp[c].v;
		j->comp[c].blocks_w = j->mcus_w * h;
		j->comp[c].blocks_h = j->mcus_h * v;
		j->comp[c].real_w = (j->w * h + 8 * j->hmax - 1) / (8 * j->hmax);
		j->comp[c].real_h = (j->h * v + 8 * j->vmax - 1) / (8 * j->vmax);
		j->comp[c].first = j->blocks;
		j->blocks += (size_t)j->comp[c].blocks_w * (size_t)j->comp[c].blocks_h;
	}
	j->comps = comps;
	return j->blocks <= MOST_BLOCKS;
}

static int read_sos(sj_jpeg *j, const uint8_t *p, size_t n, sj_scan *s) {
	if (!j->comps || n < 1) return 0;
	s->n = p[0];
	if (s->n < 1 || s->n > j->comps || n != 4 + 2 * (size_t)s->n) return 0;
	s->ss = p[1 + 2 * s->n];
	s->se = p[2 + 2 * s->n];
	s->ah = p[3 + 2 * s->n] >> 4;
	s->al = p[3 + 2 * s->n] & 15;
	int dc = s->ss == 0, ac = s->se > 0; // which tables the scan uses
	if (j->progressive) {
		if (s->ss > s->se || s->se > 63 || s->al > 13 || (dc && ac) || (s->ss > 0 && s->n != 1)) return 0;
		if (s->ah && s->ah != s->al + 1) return 0;
		if (dc && s->ah) dc = 0;
	} else if (s->ss != 0 || s->se != 63 || s->ah || s->al) {
		return 0;
	}
	for (int i = 0; i < s->n; i++) {
		int c = 0;
		while (c < j->comps && j->comp[c].id != p[1 + 2 * i]) c++;
		if (c == j->comps || (i > 0 && c <= s->comp[i - 1])) return 0;
		s->comp[i] = c;
		s->dc[i] = p[2 + 2 * i] >> 4;
		s->ac[i] = p[2 + 2 * i] & 15;
		if (s->dc[i] > 3 || s->ac[i] > 3 || (dc && !j->dc[s->dc[i]].there) || (ac && !j->ac[s->ac[i]].there)) return 0;
		if (!(j->quant >> j->comp[c].tq & 1)) return 0;
	}
	return 1;
}

int sj_walk(sj_jpeg *j, const uint8_t *p, size_t n, size_t *at, sj_scan *s) {
	size_t i = *at;
	if (i == 0 && (n < 2 || p[0] != 0xFF || p[1] != 0xD8)) return SJ_WALK_BAD;
	for (;;) {
		if (i + 2 > n || p[i] != 0xFF) return SJ_WALK_BAD;
		while (i < n && p[i] == 0xFF) i++;
		if (i == n) return SJ_WALK_BAD;
		int m = p[i++];
		if (m == 0xD8 && i == 2) continue;
		if (m == 0xD9) {
			*at = i;
			return SJ_WALK_END;
		}
		if (m < 0xC0 || m == 0xD8 || (m >= 0xD0 && m <= 0xD7) || i + 2 > n) return SJ_WALK_BAD;
		size_t len = (size_t)p[i] << 8 | p[i + 1];
		if (len < 2 || i + len > n) return SJ_WALK_BAD;
		const uint8_t *q = p + i + 2;
		size_t have = len - 2;
		i += len;
		int ok = 1;
		switch (m) {
		case 0xC0:
		case 0xC1: ok = read_sof(j, q, have, 0); break;
		case 0xC2: ok = read_sof(j, q, have, 1); break;
		case 0xC4: ok = read_dht(j, q, have); break;
		case 0xDB: ok = read_dqt(j, q, have); break;
		case 0xDD:
			ok = have == 2;
			if (ok) j->restart = q[0] << 8 | q[1];
			break;
		case 0xDA:
			if (!read_sos(j, q, have, s)) return SJ_WALK_BAD;
			if (j->scans++ == 0) j->head_end = i;
			*at = i;
			return SJ_WALK_SCAN;
		default: ok = (m >= 0xE0 && m <= 0xEF) || m == 0xFE;
		}
		if (!ok) return SJ_WALK_BAD;
	}
}

// ---------------------------------------------------------------------------------------------------------- reading

// A look-up of LOOK bits: the code's length (0: longer than LOOK), its symbol, and, where they fit, the value that
// follows: then len counts its bits too, and size is 0xFF.
typedef struct {
	int16_t value;
	uint8_t symbol, len;
} look;

typedef struct {
	look look[1 << LOOK];
	uint8_t valued[1 << LOOK]; // the look-up has the value, too
	int32_t most[18];          // the largest code of each length, left-aligned to 16 bits, plus one
	int32_t offset[17];
	const uint8_t *vals;
} decoder;

static int extend(unsigned v, int size) { return size && v < 1u << (size - 1) ? (int)v - (1 << size) + 1 : (int)v; }

// The symbol's low four bits are the size of the value that follows it.
static void make_decoder(decoder *d, const sj_huff *h) {
	memset(d->look, 0, sizeof d->look);
	memset(d->valued, 0, sizeof d->valued);
	d->vals = h->vals;
	int32_t code = 0, k = 0;
	for (int l = 1; l <= 16; l++) {
		d->offset[l] = k - code;
		for (int i = 0; i < h->bits[l]; i++, code++, k++) {
			if (l > LOOK) continue;
			int size = h->vals[k] & 15, free_bits = LOOK - l;
			for (int f = 0; f < 1 << free_bits; f++) {
				int at = code << free_bits | f;
				look *e = &d->look[at];
				e->symbol = h->vals[k];
				e->len = (uint8_t)l;
				if (size > 0 && size <= free_bits) {
					e->value = (int16_t)extend((unsigned)(f >> (free_bits - size)), size);
					e->len = (uint8_t)(l + size);
					d->valued[at] = 1;
				}
			}
		}
		d->most[l] = code << (16 - l);
		code <<= 1;
	}
	d->most[17] = INT32_MAX;
}

typedef struct {
	uint64_t buf; // bits, from the top
	int n;        // how many are valid
	const uint8_t *p, *begin, *end;
} bits;

static inline uint64_t big64(const uint8_t *p) {
	uint64_t v;
	memcpy(&v, p, 8);
	return __builtin_bswap64(v);
}

static inline void refill(bits *b) {
	b->buf |= big64(b->p) >> b->n;
	b->p += (63 - b->n) >> 3;
	b->n |= 56;
}

static inline void drop(bits *b, int n) {
	b->buf <<= n;
	b->n -= n;
}

static inline unsigned take(bits *b, int n) { // n from 1 to 16; 16 bits must be there
	unsigned v = (unsigned)(b->buf >> (64 - n));
	drop(b, n);
	return v;
}

static int overrun(const bits *b) { return (b->p - b->begin) * 8 - b->n > (b->end - b->begin) * 8; }

static int slow_symbol(bits *b, const decoder *d) {
	int32_t v = (int32_t)(b->buf >> 48);
	int l = LOOK + 1;
	while (v >= d->most[l]) l++;
	if (l > 16) return -1;
	drop(b, l);
	return d->vals[((v >> (16 - l)) + d->offset[l]) & 255];
}

// symbol reads a code, and the value behind it: the symbol's low four bits are its size. 32 bits must be there.
static inline int symbol(bits *b, const decoder *d, int *value) {
	unsigned at = (unsigned)(b->buf >> (64 - LOOK));
	const look *e = &d->look[at];
	int s = e->symbol;
	if (d->valued[at]) {
		drop(b, e->len);
		*value = e->value;
		return s;
	}
	if (e->len) {
		drop(b, e->len);
	} else if ((s = slow_symbol(b, d)) < 0) {
		return -1;
	}
	*value = 0;
	int size = s & 15;
	if (size) *value = extend(take(b, size), size);
	return s;
}

// code reads a code alone.
static int code(bits *b, const decoder *d) {
	unsigned at = (unsigned)(b->buf >> (64 - LOOK));
	const look *e = &d->look[at];
	if (!e->len) return slow_symbol(b, d);
	drop(b, d->valued[at] ? e->len - (e->symbol & 15) : e->len);
	return e->symbol;
}

// interval copies the data up to the next marker without stuffed zeros, and starts b on it.
static int interval(bits *b, const uint8_t *p, size_t n, size_t *at, uint8_t *to) {
	size_t i = *at;
	uint8_t *o = to;
	for (;;) {
		const uint8_t *f = i < n ? memchr(p + i, 0xFF, n - i) : NULL;
		if (!f || f + 1 == p + n) return 0;
		size_t m = (size_t)(f - (p + i));
		memcpy(o, p + i, m);
		o += m;
		i += m;
		if (p[i + 1] != 0) break;
		*o++ = 0xFF;
		i += 2;
	}
	*at = i;
	memset(o, 0, PAD);
	*b = (bits){0, 0, to, to, o};
	return 1;
}

typedef struct {
	const sj_jpeg *j;
	const sj_scan *s;
	decoder dc[3], ac[3];
	int last[3];
	unsigned run; // blocks that have ended already
} reader;

static int read_block(reader *r, bits *b, int i, sj_coefs *c, size_t block) {
	int v;
	refill(b);
	if (symbol(b, &r->dc[i], &v) < 0) return 0;
	v += r->last[i];
	if (v != (int16_t)v) return 0;
	r->last[i] = v;
	c->dc[block] = (int16_t)v;
	c->at[block] = (uint32_t)c->used;
	if (c->cap - c->used < 64) return 0;
	int16_t *o = c->values + c->used;
	uint64_t mask = 0;
	const decoder *d = &r->ac[i];
	for (int k = 1; k < 64; k++) {
		if (b->n < 32) refill(b);
		int s = symbol(b, d, &v);
		if (s & 15) { // -1, too: then k goes beyond the end
			k += s >> 4;
			if (s < 0 || k > 63) return 0;
			mask |= (uint64_t)1 << k;
			*o++ = (int16_t)v;
		} else if (s == 0xF0) {
			k += 15;
		} else if (s == 0) {
			break;
		} else {
			return 0;
		}
	}
	c->mask[block] = mask;
	c->used = (size_t)(o - c->values);
	return !overrun(b);
}

static int first_dc(reader *r, bits *b, int i, int16_t *q) {
	int v;
	if (symbol(b, &r->dc[i], &v) < 0) return 0;
	v += r->last[i];
	r->last[i] = v;
	if (v != (int16_t)v) return 0;
	v *= 1 << r->s->al;
	q[0] = (int16_t)v;
	return v == q[0];
}

static int first_ac(reader *r, bits *b, int16_t *q) {
	if (r->run) {
		r->run--;
		return 1;
	}
	for (int k = r->s->ss; k <= r->s->se; k++) {
		refill(b);
		int s = code(b, &r->ac[0]);
		if (s < 0) return 0;
		int size = s & 15;
		if (size) {
			k += s >> 4;
			int v = extend(take(b, size), size) * (1 << r->s->al);
			if (k > r->s->se || v != (int16_t)v) return 0;
			q[k] = (int16_t)v;
		} else if (s == 0xF0) {
			k += 15;
		} else {
			s >>= 4;
			r->run = 1u << s;
			if (s) r->run += take(b, s);
			r->run--;
			break;
		}
	}
	return 1;
}

static inline void correct(bits *b, int16_t *q, int bit) {
	refill(b);
	if (take(b, 1) && !(*q & bit)) *q = (int16_t)(*q + (*q >= 0 ? bit : -bit));
}

static int refine_ac(reader *r, bits *b, int16_t *q) {
	int k = r->s->ss, se = r->s->se, bit = 1 << r->s->al;
	for (; !r->run && k <= se; k++) {
		refill(b);
		int s = code(b, &r->ac[0]), zeros = s >> 4, v = 0;
		if (s < 0 || (s & 15) > 1) return 0;
		if (s & 15) {
			v = take(b, 1) ? bit : -bit;
		} else if (zeros != 15) {
			r->run = 1u << zeros;
			if (zeros) r->run += take(b, zeros);
			break;
		}
		for (; k <= se; k++) {
			if (q[k]) {
				correct(b, &q[k], bit);
			} else if (--zeros < 0) {
				break;
			}
		}
		if (v && k > se) return 0;
		if (v) q[k] = (int16_t)v;
	}
	if (r->run) {
		for (; k <= se; k++) {
			if (q[k]) correct(b, &q[k], bit);
		}
		r->run--;
	}
	return 1;
}

static int read_progressive(reader *r, bits *b, int i, int16_t *q) {
	refill(b);
	int ok = 1;
	if (r->s->ss == 0) {
		if (r->s->ah == 0) {
			ok = first_dc(r, b, i, q);
		} else if (take(b, 1)) {
			q[0] = (int16_t)(q[0] | 1 << r->s->al);
		}
	} else if (r->s->ah == 0) {
		ok = first_ac(r, b, q);
	} else {
		ok = refine_ac(r, b, q);
	}
	return ok && !overrun(b);
}

// shape is how many units (MCUs, or blocks of a scan of one component) a scan has.
static void shape(const sj_jpeg *j, const sj_scan *s, int *w, int *h) {
	*w = s->n == 1 ? j->comp[s->comp[0]].real_w : j->mcus_w;
	*h = s->n == 1 ? j->comp[s->comp[0]].real_h : j->mcus_h;
}

// EACH runs body for each block of unit (x, y): i is the component's place in the scan, block the block's number.
#define EACH(j, s, x, y, body)                                                                                       \
	for (int i = 0; i < (s)->n; i++) {                                                                               \
		const int c_ = (s)->comp[i], h_ = (s)->n == 1 ? 1 : (j)->comp[c_].h, v_ = (s)->n == 1 ? 1 : (j)->comp[c_].v; \
		size_t block_ = (j)->comp[c_].first + (size_t)(y) * (size_t)v_ * (size_t)(j)->comp[c_].blocks_w + (size_t)((x) * h_); \
		for (int dy_ = 0; dy_ < v_; dy_++, block_ += (size_t)(j)->comp[c_].blocks_w) {                               \
			for (int dx_ = 0; dx_ < h_; dx_++) {                                                                     \
				size_t block = block_ + (size_t)dx_;                                                                 \
				body                                                                                                 \
			}                                                                                                        \
		}                                                                                                            \
	}

static int read_units(reader *r, sj_coefs *c, const uint8_t *p, size_t n, size_t *at, sj_buf *clean) {
	const sj_jpeg *j = r->j;
	int w, h, left = 0, next = 0;
	shape(j, r->s, &w, &h);
	bits b = {0};
	if (!sj_reserve(clean, n - *at + PAD)) return 0;
	for (int y = 0; y < h; y++) {
		for (int x = 0; x < w; x++) {
			if (left == 0) {
				if (x + y > 0) {
					if (*at + 2 > n || r->run || p[*at + 1] != 0xD0 + next) return 0;
					*at += 2;
					next = (next + 1) & 7;
				}
				if (!interval(&b, p, n, at, clean->p)) return 0;
				left = j->restart ? j->restart : w * h;
				memset(r->last, 0, sizeof r->last);
			}
			left--;
			EACH(j, r->s, x, y, {
				if (!(c->dense ? read_progressive(r, &b, i, c->dense + block * 64) : read_block(r, &b, i, c,
					block))) return 0;
			})
		}
	}
	return !r->run && *at + 1 < n && !(p[*at + 1] >= 0xD0 && p[*at + 1] <= 0xD7);
}

int sj_read_scan(const sj_jpeg *j, const sj_scan *s, sj_coefs *c, const uint8_t *p, size_t n, size_t *at,
	sj_buf *clean) {
	reader *r = malloc(sizeof *r);
	if (!r) return 0;
	r->j = j;
	r->s = s;
	r->run = 0;
	for (int i = 0; i < s->n; i++) {
		if (s->ss == 0) make_decoder(&r->dc[i], &j->dc[s->dc[i]]);
		if (s->se > 0) make_decoder(&r->ac[i], &j->ac[s->ac[i]]);
	}
	int ok = read_units(r, c, p, n, at, clean);
	free(r);
	return ok;
}

// ---------------------------------------------------------------------------------------------------------- writing

// Bits are written without stuffed zeros first, which needs no branches; an interval is stuffed when it is whole.
typedef struct {
	uint64_t buf; // bits, from the top
	unsigned n;   // how many: less than 8 between puts
	uint8_t *p, *begin;
	uint8_t *end; // the last place for a block to begin at
	uint8_t *out;
	const uint8_t *out_end;
} sink;

static inline void put(sink *o, unsigned v, unsigned n) { // n from 0 to 32; v has no other bits
	o->buf |= (uint64_t)v << 1 << (63 - o->n - n);
	o->n += n;
	uint64_t big = __builtin_bswap64(o->buf);
	memcpy(o->p, &big, 8);
	o->p += o->n >> 3;
	o->buf <<= o->n & ~7u;
	o->n &= 7;
}

// flush ends an interval: to a whole byte, with ones, and then out with zeros stuffed in.
static int flush(sink *o) {
	if (o->n) put(o, (1u << (8 - o->n)) - 1, 8 - o->n);
	const uint8_t *p = o->begin;
	while (p < o->p) {
		const uint8_t *f = memchr(p, 0xFF, (size_t)(o->p - p));
		size_t n = (size_t)((f ? f + 1 : o->p) - p);
		if (n + (f != NULL) > (size_t)(o->out_end - o->out)) return 0;
		memcpy(o->out, p, n);
		o->out += n;
		p += n;
		if (f) *o->out++ = 0;
	}
	o->p = o->begin;
	o->buf = 0;
	return 1;
}

typedef struct {
	uint32_t code[256]; // behind it, zeros for the value's bits
	uint8_t len[256];   // of both; 0: none
} coder;

// make_coder leaves room for the values' bits: the symbol's low four bits say how many.
static void make_coder(coder *d, const sj_huff *h) {
	memset(d->len, 0, sizeof d->len);
	unsigned code = 0, k = 0;
	for (int l = 1; l <= 16; l++, code <<= 1) {
		for (int i = 0; i < h->bits[l]; i++, code++, k++) {
			int s = h->vals[k];
			d->code[s] = code << (s & 15);
			d->len[s] = (uint8_t)(l + (s & 15));
		}
	}
}

typedef struct {
	const sj_jpeg *j;
	const sj_scan *s;
	coder dc[3], ac[3];
	int last[3];
	int bad; // a symbol without a code, or a value without a size
	sink o;
	// AC scans of progressive files: blocks that have ended since the last symbol, and their correction bits.
	unsigned run;
	int held;
	uint8_t hold[1024];
} writer;

static inline int width(unsigned v) { return v ? 32 - __builtin_clz(v) : 0; }

// put_symbol writes a symbol, and low behind it, in as many bits as the symbol says.
static inline void put_symbol(sink *o, int *bad, const coder *d, int s, unsigned low) {
	*bad |= d->len[s] == 0;
	put(o, d->code[s] | low, d->len[s]);
}

// put_value writes a symbol of a run and a size, and the value's bits.
static inline void put_value(sink *o, int *bad, const coder *d, int run, int v) {
	int sign = v >> 31, size = width((unsigned)((v ^ sign) - sign));
	*bad |= size > 15;
	put_symbol(o, bad, d, (run << 4 | size) & 255, (unsigned)(v + sign) & ((1u << size) - 1));
}

static void write_block(writer *w, int i, const sj_coefs *c, size_t block) {
	sink o = w->o;
	int v = c->dc[block], bad = 0;
	put_value(&o, &bad, &w->dc[i], 0, v - w->last[i]);
	w->last[i] = v;
	const int16_t *q = c->values + c->at[block];
	const coder *d = &w->ac[i];
	int k = 0;
	for (uint64_t mask = c->mask[block]; mask; mask &= mask - 1) {
		int to = __builtin_ctzll(mask), run = to - k - 1;
		for (; run > 15; run -= 16) put_symbol(&o, &bad, d, 0xF0, 0);
		put_value(&o, &bad, d, run, *q++);
		k = to;
	}
	if (k < 63) put_symbol(&o, &bad, d, 0, 0);
	w->bad |= bad;
	w->o = o;
}

static void put_hold(writer *w, const uint8_t *p, int n) {
	for (int i = 0; i < n; i++) put(&w->o, p[i], 1);
}

static void put_run(writer *w) {
	if (!w->run) return;
	int size = width(w->run) - 1;
	put_symbol(&w->o, &w->bad, &w->ac[0], size << 4, 0);
	put(&w->o, w->run & ((1u << size) - 1), (unsigned)size);
	w->run = 0;
	put_hold(w, w->hold, w->held);
	w->held = 0;
}

static void write_first_ac(writer *w, const int16_t *q) {
	int zeros = 0, al = w->s->al;
	for (int k = w->s->ss; k <= w->s->se; k++) {
		int v = q[k] >= 0 ? q[k] >> al : -(-q[k] >> al);
		if (!v) {
			zeros++;
			continue;
		}
		put_run(w);
		for (; zeros > 15; zeros -= 16) put_symbol(&w->o, &w->bad, &w->ac[0], 0xF0, 0);
		put_value(&w->o, &w->bad, &w->ac[0], zeros, v);
		zeros = 0;
	}
	if (zeros && ++w->run == 0x7FFF) put_run(w);
}

// As libjpeg's encoder does it, limits included.
static void write_refined_ac(writer *w, const int16_t *q) {
	int zeros = 0, al = w->s->al, ss = w->s->ss, se = w->s->se, last = 0, n = 0;
	for (int k = ss; k <= se; k++) {
		if (abs(q[k]) >> al == 1) last = k;
	}
	uint8_t *hold = w->hold + w->held;
	for (int k = ss; k <= se; k++) {
		int v = abs(q[k]) >> al;
		if (!v) {
			zeros++;
			continue;
		}
		for (; zeros > 15 && k <= last; zeros -= 16) {
			put_run(w);
			put_symbol(&w->o, &w->bad, &w->ac[0], 0xF0, 0);
			put_hold(w, hold, n);
			hold = w->hold;
			n = 0;
		}
		if (v > 1) {
			hold[n++] = v & 1;
			continue;
		}
		put_run(w);
		put_symbol(&w->o, &w->bad, &w->ac[0], zeros << 4 | 1, q[k] > 0);
		put_hold(w, hold, n);
		hold = w->hold;
		n = zeros = 0;
	}
	if (zeros || n) {
		w->run++;
		w->held += n;
		if (w->run == 0x7FFF || w->held > 1000 - 63) put_run(w);
	}
}

static void write_progressive(writer *w, int i, const int16_t *q) {
	int al = w->s->al;
	if (w->s->ss == 0) {
		if (w->s->ah) {
			put(&w->o, (unsigned)q[0] >> al & 1, 1);
			return;
		}
		int v = q[0] >> al;
		put_value(&w->o, &w->bad, &w->dc[i], 0, v - w->last[i]);
		w->last[i] = v;
	} else if (w->s->ah == 0) {
		write_first_ac(w, q);
	} else {
		write_refined_ac(w, q);
	}
}

static int write_units(writer *r, const sj_coefs *c) {
	const sj_jpeg *j = r->j;
	int w, h, next = 0;
	shape(j, r->s, &w, &h);
	int left = j->restart ? j->restart : w * h;
	for (int y = 0; y < h; y++) {
		for (int x = 0; x < w; x++) {
			if (left == 0) {
				put_run(r);
				if (!flush(&r->o) || r->o.out_end - r->o.out < 2) return 0;
				*r->o.out++ = 0xFF;
				*r->o.out++ = (uint8_t)(0xD0 + next);
				next = (next + 1) & 7;
				left = j->restart;
				memset(r->last, 0, sizeof r->last);
			}
			left--;
			EACH(j, r->s, x, y, {
				if (c->dense) {
					write_progressive(r, i, c->dense + block * 64);
				} else {
					write_block(r, i, c, block);
				}
				if (r->bad || r->o.p > r->o.end) return 0;
			})
		}
	}
	put_run(r);
	return !r->bad && flush(&r->o);
}

uint8_t *sj_write_scan(const sj_jpeg *j, const sj_scan *s, const sj_coefs *c, uint8_t *out, const uint8_t *end,
	sj_buf *clean) {
	size_t size = (size_t)(end - out);
	if (!sj_reserve(clean, size + 2 * PAD)) return NULL; // more than a block and a run can take
	writer w = {.j = j, .s = s, .o = {0, 0, clean->p, clean->p, (uint8_t *)clean->p + size, out, end}};
	for (int i = 0; i < s->n; i++) {
		if (s->ss == 0 && s->ah == 0) make_coder(&w.dc[i], &j->dc[s->dc[i]]);
		if (s->se > 0) make_coder(&w.ac[i], &j->ac[s->ac[i]]);
	}
	return write_units(&w, c) ? w.o.out : NULL;
}
