// Recoded JPEG, reading: tables, container, entropy stage, expansion. recode.go draws the format.
//
// Nothing in a container is believed: geometry comes from the frame header, counts from the lanes before, and a lane
// has at least a bit a symbol. Inner loops need no more than that: a load never passes the container's end (the
// verbatim part lies behind the lanes), and the lanes' output has slack.

#include "sjparts.h"

#include <stdlib.h>

#ifdef SJ_X86
#include <immintrin.h>
#elif defined(SJ_NEON)
#include <arm_neon.h>
#endif

enum {
	BITS = SJ_CODE_BITS,
	LEAST = 16, // bytes of the shortest verbatim part
	TABLES_SIZE = SJ_TABLES * 128
};

const uint8_t sj_magic[8] = {0x8E, 'S', 'J', 'R', 'e', 'c', '\n', 1};

const uint8_t sj_natural[64] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
                                41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
                                30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

// The tables of T.81, K.3, as most encoders write them.
const uint8_t sj_dht[SJ_DHT] = {
	255, 196, 0, 31, 0, 0, 1, 5, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2,
	3, 4, 5, 6, 7, 8, 9, 10, 11, 255, 196, 0, 181, 16, 0, 2, 1, 3, 3, 2, 4, 3, 5, 5,
	4, 4, 0, 0, 1, 125, 1, 2, 3, 0, 4, 17, 5, 18, 33, 49, 65, 6, 19, 81, 97, 7, 34, 113,
	20, 50, 129, 145, 161, 8, 35, 66, 177, 193, 21, 82, 209, 240, 36, 51, 98, 114, 130, 9, 10, 22, 23, 24,
	25, 26, 37, 38, 39, 40, 41, 42, 52, 53, 54, 55, 56, 57, 58, 67, 68, 69, 70, 71, 72, 73, 74, 83,
	84, 85, 86, 87, 88, 89, 90, 99, 100, 101, 102, 103, 104, 105, 106, 115, 116, 117, 118, 119, 120, 121, 122, 131,
	132, 133, 134, 135, 136, 137, 138, 146, 147, 148, 149, 150, 151, 152, 153, 154, 162, 163, 164, 165, 166, 167, 168, 169,
	170, 178, 179, 180, 181, 182, 183, 184, 185, 186, 194, 195, 196, 197, 198, 199, 200, 201, 202, 210, 211, 212, 213, 214,
	215, 216, 217, 218, 225, 226, 227, 228, 229, 230, 231, 232, 233, 234, 241, 242, 243, 244, 245, 246, 247, 248, 249, 250,
	255, 196, 0, 31, 1, 0, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 2,
	3, 4, 5, 6, 7, 8, 9, 10, 11, 255, 196, 0, 181, 17, 0, 2, 1, 2, 4, 4, 3, 4, 7, 5,
	4, 4, 0, 1, 2, 119, 0, 1, 2, 3, 17, 4, 5, 33, 49, 6, 18, 65, 81, 7, 97, 113, 19, 34,
	50, 129, 8, 20, 66, 145, 161, 177, 193, 9, 35, 51, 82, 240, 21, 98, 114, 209, 10, 22, 36, 52, 225, 37,
	241, 23, 24, 25, 26, 38, 39, 40, 41, 42, 53, 54, 55, 56, 57, 58, 67, 68, 69, 70, 71, 72, 73, 74,
	83, 84, 85, 86, 87, 88, 89, 90, 99, 100, 101, 102, 103, 104, 105, 106, 115, 116, 117, 118, 119, 120, 121, 122,
	130, 131, 132, 133, 134, 135, 136, 137, 138, 146, 147, 148, 149, 150, 151, 152, 153, 154, 162, 163, 164, 165, 166, 167,
	168, 169, 170, 178, 179, 180, 181, 182, 183, 184, 185, 186, 194, 195, 196, 197, 198, 199, 200, 201, 202, 210, 211, 212,
	213, 214, 215, 216, 217, 218, 226, 227, 228, 229, 230, 231, 232, 233, 234, 242, 243, 244, 245, 246, 247, 248, 249, 250,
};

// ---------------------------------------------------------------------------------------------------------- tables

static int make_table(sj_tables *t, int i, const uint8_t *len) {
	uint32_t count[BITS + 1] = {0}, next[BITS + 1], code = 0;
	for (int s = 0; s < 256; s++) count[len[s]]++;
	count[0] = 0;
	for (int l = 1; l <= BITS; l++) {
		code = (code + count[l - 1]) << 1;
		next[l] = code;
	}
	if (code + count[BITS] != 1 << BITS) return 0; // every look-up finds a code
	uint16_t one[1 << BITS];
	int escape = sj_escape(i / SJ_CHOICES);
	uint32_t escaped = escape < 0 ? 0 : len[escape] + 16u;
	for (int s = 0; s < 256; s++) {
		uint32_t l = len[s], r = 0;
		t->cost[i / SJ_CHOICES][s][i % SJ_CHOICES] = (uint16_t)((l && s != escape) ? l : escaped);
		t->code[i][s] = 0;
		if (!l) continue;
		uint32_t c = next[l]++;
		for (uint32_t b = 0; b < l; b++) r |= (c >> b & 1) << (l - 1 - b);
		if (s == escape) {
			t->escape[i] = r | l << 16;
		} else {
			t->code[i][s] = r | l << 16;
		}
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
	if (n != TABLES_SIZE) return NULL;
	sj_tables *t = aligned_alloc(64, (sizeof *t + 63) & ~(size_t)63);
	if (!t) return NULL;
	for (int i = 0; i < SJ_TABLES; i++) {
		int ok = 1, escape = sj_escape(i / SJ_CHOICES);
		uint8_t len[256];
		for (int s = 0; s < 256; s++) {
			len[s] = p[128 * i + s / 2] >> 4 * (s & 1) & 15;
			ok &= len[s] <= BITS && (len[s] || escape >= 0);
		}
		if (!ok || (escape >= 0 && !len[escape]) || !make_table(t, i, len)) {
			free(t);
			return NULL;
		}
	}
	for (int m = 0; m < 256; m++) {
		uint8_t at[8], n = 0;
		for (int b = 0; b < 8; b++) at[b] = m >> b & 1 ? n++ : 0x80;
		memcpy(&t->places[m], at, 8);
		t->ones[m] = n;
	}
	return t;
}

void sj_tables_free(sj_tables *t) { free(t); }

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
static int make_head(sj_recoded *r) {
	const sj_jpeg *j = &r->j;
	const uint8_t *p = r->verbatim;
	uint8_t *o = r->head, *end = o + sizeof r->head - 64;
	*o++ = 0xFF;
	*o++ = 0xD8;
	for (size_t i = 2; i < j->head_end;) {
		while (p[i] == 0xFF) i++;
		int m = p[i++];
		size_t n = (size_t)(p[i] << 8 | p[i + 1]) - 2;
		const uint8_t *q = p + i + 2;
		int jfif = m == 0xE0 && n >= 14 && memcmp(q, "JFIF", 5) == 0,
			adobe = m == 0xEE && n >= 12 && memcmp(q, "Adobe", 5) == 0;
		if (jfif || adobe || m == 0xDB) {
			size_t most = jfif ? 14 : adobe ? 12 : n;
			if (o + most + 4 > end) return 0;
			o += put_marker(o, m, q, most);
			if (jfif) o[-1] = o[-2] = 0; // no thumbnail
		}
		i += 2 + n;
	}
	uint8_t sof[6 + 9] = {8, (uint8_t)(j->h >> 8), (uint8_t)j->h, (uint8_t)(j->w >> 8), (uint8_t)j->w,
		(uint8_t)j->comps};
	uint8_t sos[4 + 6] = {(uint8_t)j->comps};
	for (int c = 0; c < j->comps; c++) {
		sof[6 + 3 * c] = sos[1 + 2 * c] = (uint8_t)j->comp[c].id;
		sof[7 + 3 * c] = (uint8_t)(j->comp[c].h << 4 | j->comp[c].v);
		sof[8 + 3 * c] = (uint8_t)j->comp[c].tq;
	}
	sos[2 + 2 * j->comps] = 63;
	o += put_marker(o, 0xC0, sof, 6 + 3 * (size_t)j->comps);
	o += put_marker(o, 0xDA, sos, 4 + 2 * (size_t)j->comps);
	r->head_n = (size_t)(o - r->head);
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

int sj_band_rows(const sj_recoded *r, int c, int band) {
	int rows = sj_rows(r, c), left = r->j.comp[c].blocks_h - band * rows;
	return left < rows ? left : rows;
}

void sj_set_geometry(sj_recoded *r) {
	r->groups = r->j.comps > 1 ? 2 : 1;
	r->band_mcu_rows = r->j.vmax > 1 ? 2 : 4;
	r->bands = (r->j.mcus_h + r->band_mcu_rows - 1) / r->band_mcu_rows;
}

// read_directory finds every lane; it must all add up to the container's size.
static int read_directory(sj_recoded *r, size_t verbatim) {
	const uint8_t *p = r->src + SJ_HEADER, *end = r->src + verbatim;
	uint64_t escapes = 0;
	for (int i = 0; i < r->bands * r->groups; i++) {
		sj_part *q = &r->part[i];
		uint32_t n;
		for (int k = 0; k < SJ_LANES; k++) {
			if (!get_varint(&p, end, &n)) return 0;
			q->choice[k] = n & 7;
			q->len[k] = n >> 3;
		}
		if (!get_varint(&p, end, &n)) return 0;
		q->escapes = (uint32_t)escapes;
		escapes += 2 * (uint64_t)n;
		q->escapes_end = (uint32_t)escapes;
		if (escapes > r->n) return 0;
		for (int c = 0; c < 2; c++) {
			int comp = i % r->groups + c, there = comp < r->j.comps && (c == 0 || comp > 1);
			q->blocks[c] = there ? (uint32_t)(r->j.comp[comp].blocks_w * sj_band_rows(r, comp, i / r->groups)) : 0;
		}
		if (q->blocks[0] + q->blocks[1] > 8 * (uint64_t)q->len[1]) return 0; // a bit a symbol, at least
	}
	size_t at = (size_t)(p - r->src), first = at;
	at += escapes;
	for (int i = 0; i < r->bands * r->groups; i++) {
		sj_part *q = &r->part[i];
		q->escapes += (uint32_t)first;
		q->escapes_end += (uint32_t)first;
		for (int k = 0; k < SJ_LANES; k++) {
			if (at > r->n) return 0;
			q->off[k] = (uint32_t)at;
			at += q->len[k];
		}
	}
	return at == verbatim;
}

// fill_in puts the standard tables back into the verbatim part.
static int fill_in(sj_recoded *r) {
	size_t at = (size_t)r->src[28] | (size_t)r->src[29] << 8, n = (size_t)r->src[30] | (size_t)r->src[31] << 8;
	if (n == 0) return SJ_OK;
	if (n > SJ_DHT || at > r->verbatim_n) return SJ_CORRUPT;
	if (!sj_reserve(&r->whole, r->verbatim_n + n)) return SJ_MEMORY;
	uint8_t *o = r->whole.p;
	memcpy(o, r->verbatim, at);
	memcpy(o + at, sj_dht, n);
	memcpy(o + at + n, r->verbatim + at, r->verbatim_n - at);
	r->verbatim = o;
	r->verbatim_n += n;
	return SJ_OK;
}

static int open_container(sj_recoded *r) {
	size_t n = r->n;
	if (n < SJ_HEADER + LEAST || n > UINT32_MAX / 8 ||
		memcmp(r->src, sj_magic, sizeof sj_magic) != 0) return SJ_CORRUPT;
	r->size = sj_get32(r->src + 16);
	r->verbatim_n = sj_get32(r->src + 24);
	if (r->verbatim_n < LEAST || r->verbatim_n > n - SJ_HEADER) return SJ_CORRUPT;
	r->verbatim = r->src + n - r->verbatim_n;
	size_t verbatim = n - r->verbatim_n;
	int rc = fill_in(r);
	if (rc != SJ_OK) return rc;
	memset(&r->j, 0, sizeof r->j);
	sj_scan s;
	size_t at = 0;
	if (sj_walk(&r->j, r->verbatim, r->verbatim_n, &at, &s) != SJ_WALK_SCAN || !make_head(r)) return SJ_CORRUPT;
	if (r->j.blocks > 8 * n) return SJ_CORRUPT; // before memory is taken for the bands
	sj_set_geometry(r);
	if (!sj_reserve(&r->parts, (size_t)(r->bands * r->groups) * sizeof *r->part)) return SJ_MEMORY;
	r->part = r->parts.p;
	return read_directory(r, verbatim) ? SJ_OK : SJ_CORRUPT;
}

int sj_recoded_open(sj_recoded *r, const uint8_t *src, size_t n, const sj_tables *t) {
	r->from = r->to = 0;
	r->src = src;
	r->n = n;
	r->t = t;
	int rc = open_container(r);
	if (rc != SJ_OK) r->bands = 0;
	return rc;
}

void sj_recoded_free(sj_recoded *r) {
	free(r->parts.p);
	free(r->lanes.p);
	free(r->queue.p);
	free(r->whole.p);
	memset(r, 0, sizeof *r);
}

size_t sj_recoded_bytes(const sj_recoded *r) {
	return sizeof *r + r->parts.cap + r->lanes.cap + r->queue.cap + r->whole.cap;
}

// ---------------------------------------------------------------------------------------------------------- entropy stage

// A lane that is being decoded.
typedef struct {
	const uint32_t *look;
	uint8_t *out, *end;
	uint64_t at; // bits from the container's begin
} run;

enum {
	WIDTH = 4,       // lanes side by side
	FETCH_FROM = 100 // symbols of a lane for which its table is worth fetching
};

// Four bytes anywhere. Written as volatile: gcc would keep each store's value and address, to store again behind the
// loop.
typedef uint32_t loose __attribute__((aligned(1), may_alias));

// group decodes four look-ups, which give at most 12 symbols.
static inline __attribute__((always_inline)) void group(run *l, const uint8_t *src, uint64_t last) {
	uint64_t v, at = l->at >> 3, used = 0;
	memcpy(&v, src + (at < last ? at : last), 8);
	v >>= l->at & 7;
#pragma GCC unroll 4
	for (int i = 0; i < 4; i++) {
		uint32_t e = l->look[v & ((1 << BITS) - 1)];
		*(volatile loose *)(l->out + (used >> 6)) = e; // the fourth byte is overwritten, or slack
		e >>= 24;
		v >>= e & 63;
		used += e; // the bits sum up to 48 at most, so the counts stay apart
	}
	l->out += used >> 6;
	l->at += used & 63;
}

// groups decodes lanes until one of them is done. Each group gives a lane 12 symbols at most, so that many can be
// decoded without a look at the ends.
static inline __attribute__((always_inline)) void groups(run *l, int width, const uint8_t *src, uint64_t last) {
	for (;;) {
		ptrdiff_t n = PTRDIFF_MAX;
		for (int i = 0; i < width; i++) {
			if (l[i].end - l[i].out < n) n = l[i].end - l[i].out;
		}
		if (n <= 0) return;
		for (n = (n + 11) / 12; n > 0; n--) {
#pragma GCC unroll 4
			for (int i = 0; i < width; i++) group(&l[i], src, last);
		}
	}
}

// fetch has lane i's table on its way to the first cache, unless the lane before has the same. A picture uses some 25
// tables of 16 KiB, each for a short time: without this, one look-up in three waits for the second cache or the third.
static inline __attribute__((always_inline)) void fetch(const run *q, size_t i, size_t n) {
	if (i >= n || q[i].end - q[i].out < FETCH_FROM || (i > 0 && q[i].look == q[i - 1].look)) return;
	for (int at = 0; at < 1 << BITS; at += 16) __builtin_prefetch(q[i].look + at);
}

// decode runs all lanes of a queue.
static inline __attribute__((always_inline)) void decode_body(const sj_recoded *r, run *q, size_t n) {
	uint64_t last = r->n - 8; // the last place that 8 bytes can be loaded from
	run l[WIDTH];
	size_t next = 0;
	int width = 0;
	for (size_t i = 0; i < WIDTH; i++) fetch(q, i, n);
	for (;;) {
		for (int i = 0; i < width; i++) {
			if (l[i].out >= l[i].end) l[i--] = l[--width];
		}
		for (; width < WIDTH && next < n; next++) {
			fetch(q, next + WIDTH, n);
			if (q[next].out < q[next].end) l[width++] = q[next];
		}
		switch (width) {
		case 0: return;
		case 1: groups(l, 1, r->src, last); break;
		case 2: groups(l, 2, r->src, last); break;
		case 3: groups(l, 3, r->src, last); break;
		default: groups(l, WIDTH, r->src, last);
		}
	}
}

// count_masks counts the mask bytes of each lane from n flags.
static inline __attribute__((always_inline)) void count_masks_body(uint32_t *n, const uint8_t *flag, uint32_t blocks) {
	const uint64_t each = 0x0101010101010101;
	n += SJ_MASKS;
	for (uint32_t i = 0; i < blocks; i += 8) {
		uint64_t v = 0;
		if (blocks - i >= 8) {
			memcpy(&v, flag + i, 8);
		} else {
			memcpy(&v, flag + i, blocks - i);
		}
		uint64_t rich = ((v >> 4 & 0x0F * each) + 0x7F * each) >> 7 & each; // as sj_rich says
		for (int b = 0; b < 8; b++) {
			uint64_t bit = v >> b & each;
			n[4 + (b < 3 ? b : 3)] += (uint32_t)__builtin_popcountll(bit & rich);
			if (b < 4) n[b] += (uint32_t)__builtin_popcountll(bit & ~rich);
		}
	}
}

static inline __attribute__((always_inline)) uint32_t ones_body(const uint8_t *p, uint32_t n) {
	uint32_t sum = 0;
	uint64_t v;
	for (; n >= 8; n -= 8, p += 8) {
		memcpy(&v, p, 8);
		sum += (uint32_t)__builtin_popcountll(v);
	}
	v = 0;
	memcpy(&v, p, n);
	return sum + (uint32_t)__builtin_popcountll(v);
}

// The same source for a CPU that has shifts by any register and counts bits, and for one that may not.
typedef struct {
	void (*decode)(const sj_recoded *r, run *q, size_t n);
	void (*count_masks)(uint32_t *n, const uint8_t *flag, uint32_t blocks);
	uint32_t (*ones)(const uint8_t *p, uint32_t n);
} loops;

#define LOOPS(name, target)                                                                                           \
	target static void decode_##name(const sj_recoded *r, run *q, size_t n) { decode_body(r, q, n); }                  \
	target static void count_masks_##name(uint32_t *n, const uint8_t *f, uint32_t b) { count_masks_body(n, f, b); }    \
	target static uint32_t ones_##name(const uint8_t *p, uint32_t n) { return ones_body(p, n); }                       \
	static const loops loops_##name = {decode_##name, count_masks_##name, ones_##name};

LOOPS(plain, )
#ifdef SJ_X86
LOOPS(bmi2, __attribute__((target("bmi,bmi2,popcnt"))))
#endif

static const loops *best_loops(void) {
#ifdef SJ_X86
	if (sj_simd() && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt")) return &loops_bmi2;
#endif
	return &loops_plain;
}

// take gives lanes [k0, k1) of all parts their place, and decodes them. It returns where their output ends; NULL: too
// few bits.
static uint8_t *take(sj_recoded *r, int from, int to, int k0, int k1, uint8_t *o) {
	uint32_t at[SJ_TABLES + 1] = {0};
	run *q = r->queue.p;
	for (int k = k0; k < k1; k++) {
		for (int i = from; i < to; i++) at[sj_kind(k) * SJ_CHOICES + r->part[i].choice[k] + 1]++;
	}
	for (int t = 1; t <= SJ_TABLES; t++) at[t] += at[t - 1];
	for (int i = from; i < to; i++) { // by tables: those of all kinds do not fit the first cache
		sj_part *p = &r->part[i];
		for (int k = k0; k < k1; k++) {
			uint32_t n = p->n[0][k] + p->n[1][k];
			int t = sj_kind(k) * SJ_CHOICES + p->choice[k];
			if (n > 8 * (uint64_t)p->len[k]) return NULL;
			p->lane[k] = o;
			q[at[t]++] = (run){r->t->look[t], o, o + n, (uint64_t)p->off[k] * 8};
			o += n + SJ_SLACK;
		}
	}
	best_loops()->decode(r, q, (size_t)((to - from) * (k1 - k0)));
	return o;
}

static uint32_t count_escapes(const uint8_t *p, uint32_t n) {
	uint32_t sum = 0;
	for (uint32_t i = 0; i < n; i++) sum += p[i] == 0x80;
	return sum;
}

// find_escapes notes where the escapes of lane k begin, from *at on, and where they end.
static void find_escapes(sj_part *q, int k, uint32_t *at) {
	const uint8_t *p = q->lane[k];
	for (int c = 0; c < 2; c++) {
		q->escape[c][k] = *at;
		if (*at < q->escapes_end) *at += 2 * count_escapes(p, q->n[c][k]);
		p += q->n[c][k];
	}
}

// unescape puts escaped masks into their lane.
static void unescape(const sj_recoded *r, const sj_part *q, int k, uint32_t *at) {
	uint8_t *p = q->lane[k], *end = p + q->n[0][k] + q->n[1][k];
	for (; *at < q->escapes_end && (p = memchr(p, 0, (size_t)(end - p))); *at += 2) *p++ = r->src[*at];
}

static int lanes_of(sj_recoded *r, int from, int to) {
	const loops *l = best_loops();
	uint8_t *o = r->lanes.p;
	for (int i = from; i < to; i++) {
		sj_part *q = &r->part[i];
		memset(q->n, 0, sizeof q->n);
		for (int c = 0; c < 2; c++) q->n[c][0] = q->n[c][1] = q->blocks[c];
	}
	if (!(o = take(r, from, to, 0, SJ_MASKS, o))) return 0;
	for (int i = from; i < to; i++) {
		sj_part *q = &r->part[i];
		l->count_masks(q->n[0], q->lane[1], q->blocks[0]);
		if (q->blocks[1]) l->count_masks(q->n[1], q->lane[1] + q->blocks[0], q->blocks[1]);
	}
	if (!(o = take(r, from, to, SJ_MASKS, SJ_VALUES, o))) return 0;
	for (int i = from; i < to; i++) {
		sj_part *q = &r->part[i];
		uint32_t at = q->escapes;
		find_escapes(q, 0, &at);
		for (int k = SJ_MASKS; k < SJ_VALUES; k++) {
			unescape(r, q, k, &at);
			int v = SJ_VALUES + 2 * (k >= SJ_MASKS + 4) + ((k - SJ_MASKS) % 4 > 0);
			q->n[0][v] += l->ones(q->lane[k], q->n[0][k]);
			q->n[1][v] += l->ones(q->lane[k] + q->n[0][k], q->n[1][k]);
		}
		q->escape[0][1] = at; // of the values
	}
	if (!(o = take(r, from, to, SJ_VALUES, SJ_LANES, o))) return 0;
	for (int i = from; i < to; i++) {
		sj_part *q = &r->part[i];
		uint32_t at = q->escape[0][1];
		for (int k = SJ_VALUES; k < SJ_LANES; k++) find_escapes(q, k, &at);
	}
	return 1;
}

enum { PER_BLOCK = 1 + 1 + 8 + 64, AT_ONCE = 8 }; // symbols at most; lanes of a part

size_t sj_lanes_need(size_t blocks, size_t parts) {
	return blocks * PER_BLOCK + parts * (SJ_LANES * SJ_SLACK + AT_ONCE * sizeof(run) + sizeof(sj_part));
}

int sj_recoded_lanes(sj_recoded *r, int from, int to) {
	r->from = r->to = 0;
	if (from < 0 || to > r->bands || from >= to) return SJ_CORRUPT;
	size_t blocks = 0, parts = (size_t)((to - from) * r->groups);
	for (int i = from * r->groups; i < to * r->groups; i++) blocks += r->part[i].blocks[0] + r->part[i].blocks[1];
	if (!sj_reserve(&r->lanes, blocks * PER_BLOCK + parts * SJ_LANES * SJ_SLACK) ||
		!sj_reserve(&r->queue, parts * AT_ONCE * sizeof(run))) return SJ_MEMORY;
	if (!lanes_of(r, from * r->groups, to * r->groups)) return SJ_CORRUPT;
	r->from = from;
	r->to = to;
	return SJ_OK;
}

// ---------------------------------------------------------------------------------------------------------- expansion

sj_streams sj_begin(const sj_recoded *r, int comp, int band) {
	const sj_part *q = &r->part[band * r->groups + (comp > 0)];
	int second = comp > 1;
	sj_streams s;
	for (int k = 0; k < SJ_LANES; k++) {
		s.lane[k] = q->lane[k] + (second ? q->n[0][k] : 0);
		s.escape[k] = r->src + q->escape[second][k];
	}
	s.escapes_end = r->src + q->escapes_end;
	return s;
}

static void expand_plain(sj_streams *s, int w, int rows, int16_t *blocks, uint8_t *last) {
	int rich;
	memset(blocks, 0, (size_t)w * (size_t)rows * 128);
	for (int y = 0; y < rows; y++) {
		for (int x = 0; x < w; x++, blocks += 64) {
			uint64_t m = sj_next_mask(s, &rich);
			*last++ = m ? (uint8_t)(64 - __builtin_clzll(m)) : 0;
			for (; m; m &= m - 1) {
				int k = __builtin_ctzll(m);
				blocks[sj_natural[k]] = (int16_t)sj_next(s, SJ_VALUES + 2 * rich + (k > 7));
			}
			blocks[0] = (int16_t)(sj_predict(blocks, x, y, 64, 64 * (ptrdiff_t)w) + sj_next(s, 0));
		}
	}
}

#ifdef SJ_SIMD

// The streams of plain or rich blocks, as vector loops use them.
typedef struct {
	const uint8_t *mask[4], *low, *high;
} fast_set;

typedef struct {
	fast_set set[2];
	const uint8_t *dc, *flag, *dc_escape, *escape[2][2], *escapes_end;
	int escapes; // of values
} fast;

// fast_mask is sj_next_mask; high are the mask's last five bytes, in place.
static inline __attribute__((always_inline)) uint64_t fast_mask(fast_set *s, unsigned f, uint64_t high) {
	uint64_t m = (*s->mask[0] & -(uint64_t)(f & 1)) | (*s->mask[1] & -(uint64_t)(f >> 1 & 1)) << 8 |
		(*s->mask[2] & -(uint64_t)(f >> 2 & 1)) << 16;
	s->mask[0] += f & 1;
	s->mask[1] += f >> 1 & 1;
	s->mask[2] += f >> 2 & 1;
	s->mask[3] += __builtin_popcount(f >> 3);
	return m | high;
}

// fast_dc puts a block's DC into place. The prediction's neighbours stay in registers.
typedef struct {
	int left, between;
} near;

static inline __attribute__((always_inline)) void fast_dc(fast *s, near *n, int x, int y, ptrdiff_t above,
	int16_t *block) {
	int d = (int8_t)*s->dc++, p, t = 0;
	if (d == -128 && s->dc_escape < s->escapes_end) {
		d = sj_get16(s->dc_escape);
		s->dc_escape += 2;
	}
	if (y > 0) t = block[-above];
	if (y == 0) {
		p = x ? n->left : 0;
	} else if (x == 0) {
		p = t;
	} else {
		int l = n->left, g = l + t - n->between, lo = l < t ? l : t, hi = l < t ? t : l;
		g = g < lo ? lo : g;
		p = g > hi ? hi : g;
	}
	n->between = t;
	n->left = block[0] = (int16_t)(p + d);
}

static fast fast_begin(const sj_streams *s) {
	fast f = {.dc = s->lane[0], .flag = s->lane[1], .dc_escape = s->escape[0], .escapes_end = s->escapes_end};
	f.escapes = s->escape[SJ_VALUES] < f.escapes_end;
	for (int i = 0; i < 2; i++) {
		for (int b = 0; b < 4; b++) f.set[i].mask[b] = s->lane[SJ_MASKS + 4 * i + b];
		f.set[i].low = s->lane[SJ_VALUES + 2 * i];
		f.set[i].high = s->lane[SJ_VALUES + 2 * i + 1];
		for (int h = 0; h < 2; h++) f.escape[i][h] = s->escape[SJ_VALUES + 2 * i + h];
	}
	return f;
}

// fix puts the escaped values of a block into place; at has a bit for each, in zigzag order.
static void fix(fast *s, int rich, uint64_t at, int16_t *block) {
	for (; at; at &= at - 1) {
		int k = __builtin_ctzll(at);
		const uint8_t **e = &s->escape[rich][k > 7];
		if (*e >= s->escapes_end) continue;
		block[sj_natural[k]] = sj_get16(*e);
		*e += 2;
	}
}

// The place in zigzag order of each position by rows.
static const uint8_t zigzag[64] __attribute__((aligned(64))) = {
    0,  1,  5,  6,  14, 15, 27, 28, 2,  4,  7,  13, 16, 26, 29, 42, 3,  8,  12, 17, 25, 30, 41, 43, 9,  11, 18, 24, 31, 40, 44, 53,
    10, 19, 23, 32, 39, 45, 52, 54, 20, 22, 33, 38, 46, 51, 55, 60, 21, 34, 37, 47, 50, 56, 59, 61, 35, 36, 48, 49, 57, 58, 62, 63};

#endif

#ifdef SJ_X86

static const uint64_t spread[32] = {
#define B(n, f) ((f) >> (n) & 1 ? (uint64_t)0xFF << (24 + 8 * (n)) : 0)
#define S(f) B(0, f) | B(1, f) | B(2, f) | B(3, f) | B(4, f)
#define S8(f) S(f), S(f + 1), S(f + 2), S(f + 3), S(f + 4), S(f + 5), S(f + 6), S(f + 7)
    S8(0), S8(8), S8(16), S8(24)};
#undef S8
#undef S
#undef B

static inline uint64_t load64(const uint8_t *p) {
	uint64_t v;
	memcpy(&v, p, 8);
	return v;
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,bmi,bmi2,lzcnt,popcnt"))) static void expand_vbmi2(sj_streams *st, int w, int rows, int16_t *blocks, uint8_t *last) {
	const __m512i order = _mm512_load_si512(zigzag), escape = _mm512_set1_epi8(-128);
	fast s = fast_begin(st);
	for (int y = 0; y < rows; y++) {
		near n = {0, 0};
		for (int x = 0; x < w; x++, blocks += 64) {
			unsigned f = *s.flag++;
			int rich = sj_rich(f);
			fast_set *set = &s.set[rich];
			uint64_t m = fast_mask(set, f, _pdep_u64(load64(set->mask[3]), spread[f >> 3]));
			__m512i v = _mm512_maskz_expand_epi8(m & 255,
				_mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)set->low)));
			v = _mm512_or_si512(v, _mm512_maskz_expand_epi8(m & ~(uint64_t)255, _mm512_loadu_si512(set->high)));
			set->low += __builtin_popcountll(m & 255);
			set->high += __builtin_popcountll(m >> 8);
			__m512i o = _mm512_permutexvar_epi8(order, v);
			_mm512_storeu_si512(blocks, _mm512_cvtepi8_epi16(_mm512_castsi512_si256(o)));
			_mm512_storeu_si512(blocks + 32, _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(o, 1)));
			if (s.escapes) fix(&s, rich, _mm512_cmpeq_epi8_mask(v, escape), blocks);
			*last++ = (uint8_t)(64 - _lzcnt_u64(m));
			fast_dc(&s, &n, x, y, 64 * (ptrdiff_t)w, blocks);
		}
	}
}

// part8 gives the values of one byte of the mask their places.
__attribute__((target("avx2"), always_inline)) static inline __m128i part8(const sj_tables *t, const uint8_t **p,
	unsigned mask) {
	__m128i v = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)*p),
		_mm_loadl_epi64((const __m128i *)&t->places[mask]));
	*p += t->ones[mask];
	return v;
}

__attribute__((target("avx2"), always_inline)) static inline __m256i part16(const sj_tables *t, const uint8_t **a,
	const uint8_t **b, unsigned mask) {
	__m128i v = part8(t, a, mask & 255);
	return _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(v, part8(t, b, mask >> 8 & 255)));
}

__attribute__((target("avx2"), always_inline)) static inline void store32(int16_t *o, __m256i v) {
	_mm256_storeu_si256((__m256i *)o, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(v)));
	_mm256_storeu_si256((__m256i *)(o + 16), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(v, 1)));
}

__attribute__((target("avx2,popcnt,lzcnt"))) static void expand_avx2(const sj_tables *t, sj_streams *st, int w,
	int rows, int16_t *blocks, uint8_t *last) {
	// order[q][h]: what half h of the block takes from the q-th 16 places in zigzag order.
	__m256i order[4][2];
	uint8_t from[4][64];
	memset(from, 0x80, sizeof from);
	for (int k = 0; k < 64; k++) from[k / 16][sj_natural[k]] = k % 16;
	for (int q = 0; q < 4; q++) {
		for (int h = 0; h < 2; h++) order[q][h] = _mm256_loadu_si256((const __m256i *)(from[q] + 32 * h));
	}
	const __m256i escape = _mm256_set1_epi8(-128);
	fast s = fast_begin(st);
	for (int y = 0; y < rows; y++) {
		near n = {0, 0};
		for (int x = 0; x < w; x++, blocks += 64) {
			unsigned f = *s.flag++;
			int rich = sj_rich(f);
			fast_set *set = &s.set[rich];
			__m128i bytes = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)set->mask[3]),
				_mm_loadl_epi64((const __m128i *)&t->places[f & 0xF8]));
			uint64_t m = fast_mask(set, f, (uint64_t)_mm_cvtsi128_si64(bytes));
			__m256i a = part16(t, &set->low, &set->high, (unsigned)m),
				b = part16(t, &set->high, &set->high, (unsigned)(m >> 16));
			__m256i lo = _mm256_or_si256(_mm256_shuffle_epi8(a, order[0][0]), _mm256_shuffle_epi8(b, order[1][0]));
			__m256i hi = _mm256_or_si256(_mm256_shuffle_epi8(a, order[0][1]), _mm256_shuffle_epi8(b, order[1][1]));
			uint64_t escaped = 0;
			if (s.escapes) escaped =
				(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_permute2x128_si256(a, b, 0x20), escape));
			if (rich) {
				a = part16(t, &set->high, &set->high, (unsigned)(m >> 32));
				b = part16(t, &set->high, &set->high, (unsigned)(m >> 48));
				lo = _mm256_or_si256(lo,
					_mm256_or_si256(_mm256_shuffle_epi8(a, order[2][0]), _mm256_shuffle_epi8(b, order[3][0])));
				hi = _mm256_or_si256(hi,
					_mm256_or_si256(_mm256_shuffle_epi8(a, order[2][1]), _mm256_shuffle_epi8(b, order[3][1])));
				if (s.escapes) escaped |= (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_permute2x128_si256(a, b, 0x20), escape)) << 32;
			}
			store32(blocks, lo);
			store32(blocks + 32, hi);
			fix(&s, rich, escaped, blocks);
			*last++ = (uint8_t)(64 - _lzcnt_u64(m));
			fast_dc(&s, &n, x, y, 64 * (ptrdiff_t)w, blocks);
		}
	}
}

#elif defined(SJ_NEON)

// part8 gives the values of one byte of the mask their places.
static inline uint8x8_t part8(const sj_tables *t, const uint8_t **p, unsigned mask) {
	uint8x8_t v = vtbl1_u8(vld1_u8(*p), vcreate_u8(t->places[mask]));
	*p += t->ones[mask];
	return v;
}

static inline uint8x16_t part16(const sj_tables *t, const uint8_t **a, const uint8_t **b, unsigned mask) {
	uint8x8_t v = part8(t, a, mask & 255);
	return vcombine_u8(v, part8(t, b, mask >> 8 & 255));
}

static inline uint8x16x2_t part32(const sj_tables *t, const uint8_t **a, const uint8_t **b, uint32_t mask) {
	uint8x16x2_t v;
	v.val[0] = part16(t, a, b, mask);
	v.val[1] = part16(t, b, b, mask >> 16);
	return v;
}

// escapes32 has a bit for each value that stands for an escape.
static inline uint64_t escapes32(uint8x16x2_t v) {
	const uint8x16_t escape = vdupq_n_u8(0x80), bits = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
	uint8x16_t a = vandq_u8(vceqq_u8(v.val[0], escape), bits), b = vandq_u8(vceqq_u8(v.val[1], escape), bits);
	a = vpaddq_u8(a, b);
	a = vpaddq_u8(a, a);
	return vgetq_lane_u32(vreinterpretq_u32_u8(vpaddq_u8(a, a)), 0);
}

static void expand_neon(const sj_tables *t, sj_streams *st, int w, int rows, int16_t *blocks, uint8_t *last) {
	uint8x16_t order[4], late[4]; // what each quarter of the block takes from the first and the last 32 places
	for (int i = 0; i < 4; i++) {
		order[i] = vld1q_u8(zigzag + 16 * i);
		late[i] = vsubq_u8(order[i], vdupq_n_u8(32));
	}
	fast s = fast_begin(st);
	for (int y = 0; y < rows; y++) {
		near n = {0, 0};
		for (int x = 0; x < w; x++, blocks += 64) {
			unsigned f = *s.flag++;
			int rich = sj_rich(f);
			fast_set *set = &s.set[rich];
			uint8x8_t bytes = vtbl1_u8(vld1_u8(set->mask[3]), vcreate_u8(t->places[f & 0xF8]));
			uint64_t m = fast_mask(set, f, vget_lane_u64(vreinterpret_u64_u8(bytes), 0)), escaped = 0;
			uint8x16x2_t v = part32(t, &set->low, &set->high, (uint32_t)m);
			uint8x16_t o[4];
			for (int i = 0; i < 4; i++) o[i] = vqtbl2q_u8(v, order[i]); // 0 for a place beyond
			if (s.escapes) escaped = escapes32(v);
			if (rich) {
				v = part32(t, &set->high, &set->high, (uint32_t)(m >> 32));
				for (int i = 0; i < 4; i++) o[i] = vqtbx2q_u8(o[i], v, late[i]);
				if (s.escapes) escaped |= escapes32(v) << 32;
			}
			for (int i = 0; i < 4; i++) {
				vst1q_s16(blocks + 16 * i, vmovl_s8(vreinterpret_s8_u8(vget_low_u8(o[i]))));
				vst1q_s16(blocks + 16 * i + 8, vmovl_high_s8(vreinterpretq_s8_u8(o[i])));
			}
			fix(&s, rich, escaped, blocks);
			*last++ = m ? (uint8_t)(64 - __builtin_clzll(m)) : 0;
			fast_dc(&s, &n, x, y, 64 * (ptrdiff_t)w, blocks);
		}
	}
}

#endif

int sj_recoded_band(const sj_recoded *r, int comp, int band, int16_t *blocks, uint8_t *last) {
	if (comp < 0 || comp >= r->j.comps || band < r->from || band >= r->to) return SJ_CORRUPT;
	sj_streams s = sj_begin(r, comp, band);
	int w = r->j.comp[comp].blocks_w, rows = sj_band_rows(r, comp, band);
#ifdef SJ_X86
	if (sj_simd() > 1 && __builtin_cpu_supports("avx512vbmi2")) expand_vbmi2(&s, w, rows, blocks, last);
	else if (sj_simd() && __builtin_cpu_supports("lzcnt")) expand_avx2(r->t, &s, w, rows, blocks, last);
	else
#elif defined(SJ_NEON)
	if (sj_simd()) expand_neon(r->t, &s, w, rows, blocks, last);
	else
#endif
		expand_plain(&s, w, rows, blocks, last);
	return SJ_OK;
}
