// Region decode with libjpeg-turbo, then the resize of Pillow 9.4 or 13, bit for bit.
//
// Rules for this code:
//   - Fancy upsampling looks one chroma sample to each side, so the outermost pixels of a decoded region differ from
//     those of a full decode. The region therefore has a margin of 2 pixels, which is thrown away.
//   - jpeg_crop_scanline re-chooses the upsampler when a component gets narrower than its filter: regions and pictures
//     below MIN_REGION columns are not cropped.
//   - Block smoothing (progressive files whose last scans are missing) looks further than the margin: such files are
//     decoded whole.
//   - A decompress object keeps quantisation and Huffman tables between pictures: it is made anew for each, or a file
//     without tables would decode with those of its predecessor.
//   - Coefficients are computed in double without contraction (gcc: -std=c11; clang: the pragma): a fused
//     multiply-add would change last bits.

#include "shoaljpeg.h"
#include "sjown.h"
#include "sjpixels.h"
#include "sjrecode.h"
#include "sjscan.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jerror.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#ifdef SJ_X86
#include <immintrin.h>
#elif defined(SJ_NEON)
#include <arm_neon.h>
#endif

enum {
	MARGIN = 2,
	MIN_REGION = 64,
	BATCH = 8,  // source rows that pass from libjpeg to the horizontal pass together: they stay in L1
	SLACK = 64, // bytes behind every row buffer, for vector loads and stores that overhang
	STRIP = 16, // rows of planes that pass together
	BITS = 22,  // fraction bits of a coefficient (Pillow: 32 - 8 - 2)
	SPLIT = 11, // a coefficient is hi << SPLIT | lo, so that both halves fit pmaddwd's int16
	SLIDES = (SLACK - 16) / 2, // most pairs of taps whose windows end within the slack
	BLOCKS = 4  // most blocks of 4 taps that go by VNNI
};

// The taps of one axis: output i reads n[i] source samples from first[i] on.
// hilo holds, for each pair of taps, the high halves of both and the low halves of both.
typedef struct {
	int out, taps; // taps is even: odd counts are padded with a zero
	int identity;
	int32_t *first, *n;
	int32_t *k;    // out x taps
	int16_t *hilo; // out x taps x 2
	int lo, hi;    // source samples that any output reads: [lo, hi)
	sj_buf mem;
	// For horizontal_vnni: 4 outputs share a window of 16 source samples for each 4 taps. at says where it begins;
	// lanes holds, for each output, the places of the taps in the window, and the digits of their coefficients.
	int blocks; // of 4 taps; 0: not for this axis
	int32_t *at;
	int sliding; // the pairs' windows of 16 samples move on by a pair each: what 4 outputs read does not fit into one
	uint32_t (*lanes)[4][4];
	// For horizontal_planes: 16 outputs share a window of 64 samples of one channel; with AVX2, 4 share one of 16, and
	// go by pairs of taps: their places, the high halves of their coefficients, the low halves. With NEON they go by
	// taps: their places, their coefficients.
	uint32_t (*spread)[4][16];
	uint32_t (*pairs)[3][8];
	uint32_t (*single)[2][4];
	sj_buf wide;
} axis;

struct sj_scratch {
	sj_request req;
	struct jpeg_decompress_struct d;
	struct jpeg_compress_struct c;
	struct jpeg_error_mgr err;
	struct jpeg_source_mgr src;
	struct jpeg_progress_mgr progress;
	jmp_buf jmp;
	int code;
	char msg[JMSG_LENGTH_MAX];
	axis x, y;
	int base_x, base_y; // where the axes' samples begin in the decoded picture
	int src_w, src_h;   // of the decoded picture
	int denom;          // it is decoded at 1/denom
	int vertical_first;
	int planes; // rows between the passes are three planes
	uint8_t *plain; // where rows go at once, as planes; NULL: through the passes
	sj_buf rows, mid, line, out;
	struct jpeg_destination_mgr dest;
	size_t written;
	sj_pixels *pixels;
	sj_own *own;
	sj_recoded recoded;
};

static int simd;

int sj_set_simd(int most) {
#ifdef SJ_X86
	simd = __builtin_cpu_supports("avx2") ? 1 : 0;
	if (simd && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi") &&
		__builtin_cpu_supports("avx512vnni")) simd = 2;
#elif defined(SJ_NEON)
	simd = 1; // every CPU of the kind has it
#endif
	if (simd > most) simd = most;
	return simd;
}

int sj_simd(void) { return simd; }

// What is freed is to go back to the kernel: large buffers at once, and from few arenas the rest. glibc's own rule
// lets each thread have an arena, and keep what it once used.
#ifdef __GLIBC__
__attribute__((constructor)) static void few_arenas(void) {
	mallopt(M_ARENA_MAX, 4);
	mallopt(M_MMAP_THRESHOLD, 1 << 20);
	mallopt(M_TRIM_THRESHOLD, 4 << 20);
}

int sj_trim(void) { return malloc_trim(0); }
#else
int sj_trim(void) { return 0; }
#endif

int sj_reserve(sj_buf *b, size_t n) {
	if (n <= b->cap) return 1;
	free(b->p);
	b->cap = 0;
	n += n < SJ_GROWTH * 4 ? n / 4 : SJ_GROWTH;
	b->p = malloc(n);
	if (b->p) b->cap = n;
	return b->p != NULL;
}

sj_scratch *sj_new(void) { return calloc(1, sizeof(sj_scratch)); }

void sj_free(sj_scratch *s) {
	if (!s) return;
	free(s->x.mem.p);
	free(s->x.wide.p);
	free(s->y.mem.p);
	free(s->rows.p);
	free(s->mid.p);
	free(s->line.p);
	free(s->out.p);
	sj_pixels_free(s->pixels);
	sj_own_free(s->own);
	sj_recoded_free(&s->recoded);
	free(s);
}

sj_request *sj_req(sj_scratch *s) { return &s->req; }

size_t sj_bytes(const sj_scratch *s) {
	return sizeof *s + s->x.mem.cap + s->x.wide.cap + s->y.mem.cap + s->rows.cap + s->mid.cap + s->line.cap +
		s->out.cap + sj_pixels_bytes(s->pixels) + sj_own_bytes(s->own) + sj_recoded_bytes(&s->recoded);
}

const char *sj_message(const sj_scratch *s) { return s->msg; }

// ---------------------------------------------------------------------------------------------------------- resize

static double triangle(double x) {
	if (x < 0) x = -x;
	return x < 1 ? 1 - x : 0;
}

// Keys's cubic with a = -0.5, evaluated in Pillow's order.
static double cubic(double x) {
	if (x < 0) x = -x;
	if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
	if (x < 2) return (((x - 5) * x + 8) * x - 4) * -0.5;
	return 0;
}

// span is what one axis is resized from: [in0, in1) of `in` samples, which is all of them unless the picture was
// decoded at a fraction of its size.
typedef struct {
	int in;
	float in0, in1;
} span;

// axis_init computes the taps of outputs [from, to) of a resize of a span to `out`; reversed for a flip.
// The arithmetic follows Pillow's precompute_coeffs and normalize_coeffs_8bpc, or ImagingScaleAffine for the nearest
// sample, step by step: it decides the last bit.
static int axis_init(axis *a, int filter, span src, int out, int from, int to, int reverse) {
	int count = to - from, in = src.in, taps = 2;
	double scale = (double)(src.in1 - src.in0) / out;
	double fscale = scale < 1 ? 1 : scale;
	double support = filter == SJ_BICUBIC ? 2 * fscale : fscale;
	double inv = 1.0 / fscale;
	a->out = count;
	a->identity = in == out && src.in0 == 0 && src.in1 == (float)out;
	if (!a->identity && filter != SJ_NEAREST) taps = (int)ceil(support) * 2 + 1;
	taps += taps & 1;
	a->taps = taps;
	size_t cells = (size_t)count * (size_t)taps;
	// One block: taps as double (one row), first, n, k, hilo.
	size_t need = sizeof(double) * (size_t)taps + (size_t)count * 2 * sizeof(int32_t) +
		cells * (sizeof(int32_t) + 2 * sizeof(int16_t));
	if (!sj_reserve(&a->mem, need)) return 0;
	double *w = a->mem.p;
	a->first = (int32_t *)(w + taps);
	a->n = a->first + count;
	a->k = a->n + count;
	a->hilo = (int16_t *)(a->k + cells);
	a->lo = in;
	a->hi = 0;
	double at = src.in0 + scale * 0.5; // of the nearest sample: a running sum, as in Pillow
	if (filter == SJ_NEAREST) {
		for (int o = 0; o < from; o++) at += scale;
	}
	for (int j = 0; j < count; j++) {
		int o = from + j, i = reverse ? count - 1 - j : j;
		int xmin, n;
		int32_t *k = a->k + (size_t)i * taps;
		int16_t *hl = a->hilo + (size_t)i * taps * 2;
		if (a->identity || filter == SJ_NEAREST) {
			xmin = a->identity ? o : (int)at;
			if (xmin >= in) xmin = in - 1;
			n = 1;
			k[0] = 1 << BITS;
			at += scale;
		} else {
			double center = src.in0 + (o + 0.5) * scale, sum = 0;
			xmin = (int)(center - support + 0.5);
			if (xmin < 0) xmin = 0;
			int xmax = (int)(center + support + 0.5);
			if (xmax > in) xmax = in;
			n = xmax - xmin;
			for (int x = 0; x < n; x++) {
				double v = (x + xmin - center + 0.5) * inv;
				w[x] = filter == SJ_BICUBIC ? cubic(v) : triangle(v);
				sum += w[x];
			}
			for (int x = 0; x < n; x++) {
				double v = sum != 0 ? w[x] / sum : w[x];
				k[x] = (int32_t)((v < 0 ? -0.5 : 0.5) + v * (1 << BITS));
			}
		}
		for (int x = n; x < taps; x++) k[x] = 0;
		for (int x = 0; x < taps; x += 2) {
			hl[2 * x + 0] = (int16_t)(k[x] >> SPLIT);
			hl[2 * x + 1] = (int16_t)(k[x + 1] >> SPLIT);
			hl[2 * x + 2] = (int16_t)(k[x] & ((1 << SPLIT) - 1));
			hl[2 * x + 3] = (int16_t)(k[x + 1] & ((1 << SPLIT) - 1));
		}
		a->first[i] = xmin;
		a->n[i] = n;
		if (xmin < a->lo) a->lo = xmin;
		if (xmin + n > a->hi) a->hi = xmin + n;
	}
	return 1;
}

// digits splits n coefficients into bytes from -128 to 127, that of coefficient t at bit 8 * t of each d.
static inline void digits(const int32_t *k, int n, uint32_t d[3]) {
	d[0] = d[1] = d[2] = 0;
	for (int t = 0; t < n; t++) {
		int32_t d0 = (int8_t)k[t], d1 = (int8_t)((k[t] - d0) >> 8);
		d[0] |= (uint32_t)(uint8_t)d0 << 8 * t;
		d[1] |= (uint32_t)(uint8_t)d1 << 8 * t;
		d[2] |= (uint32_t)(uint8_t)((((k[t] - d0) >> 8) - d1) >> 8) << 8 * t;
	}
}

// window tells where the samples begin that output i and the others of its n, a power of two, share.
static int window(const axis *a, int i, int n) {
	int first = i & -n, last = first + n <= a->out ? first + n - 1 : a->out - 1;
	return a->first[first] < a->first[last] ? a->first[first] : a->first[last]; // the last, if flipped
}

// most_taps is the largest n.
static int most_taps(const axis *a) {
	int most = 0;
	for (int i = 0; i < a->out; i++) {
		if (a->n[i] > most) most = a->n[i];
	}
	return most;
}

// lay takes memory for so many cells of so many bytes, and behind them for the places of windows. It is zero: outputs
// beyond the last have no taps.
static void *lay(axis *a, size_t cells, size_t each, size_t windows) {
	size_t bytes = cells * each + windows * sizeof *a->at;
	if (!sj_reserve(&a->wide, bytes)) return NULL;
	a->at = (int32_t *)((uint8_t *)a->wide.p + cells * each);
	return memset(a->wide.p, 0, bytes);
}

// widen lays out the taps of an axis for horizontal_vnni.
static int widen(axis *a) {
	int groups = (a->out + 15) / 16 * 4;
	a->blocks = 0;
	if (simd < 2 || a->identity) return 1;
	int blocks = (most_taps(a) + 3) / 4;
	if (blocks > BLOCKS) return 1;
	size_t cells = (size_t)groups * (size_t)blocks;
	if (!(a->lanes = lay(a, cells, sizeof *a->lanes, cells))) return 0;
	for (int i = 0; i < a->out; i++) {
		int from = window(a, i, 4);
		if (a->first[i] - from > 12) return 1; // 4 taps must fit behind it
		for (int b = 0; b < blocks; b++) {
			size_t cell = (size_t)(i / 4 * blocks + b);
			// A window begins within the row, so that it ends within its slack.
			int base = from + 4 * b < a->hi ? from + 4 * b : a->hi - 1, n = a->n[i] - 4 * b;
			a->at[cell] = 4 * (base - a->lo);
			uint32_t *lane = &a->lanes[cell][0][i & 3];
			lane[0] = 0x0c080400u + 0x04040404u * (uint32_t)(a->first[i] + 4 * b - base);
			uint32_t d[3];
			digits(a->k + (size_t)i * a->taps + 4 * b, n < 4 ? n : 4, d);
			for (int j = 0; j < 3; j++) lane[4 * (j + 1)] = d[j];
		}
	}
	a->blocks = blocks;
	return 1;
}

// spread_pairs is spread for AVX2.
static int spread_pairs(axis *a, int pairs) {
	size_t groups = ((size_t)a->out + 15) / 16;
	if (pairs > SLIDES) return 0;
	if (!(a->pairs = lay(a, 2 * groups * (size_t)pairs, sizeof *a->pairs, 4 * groups))) return -1;
	a->sliding = 0;
	for (int i = 0; i < a->out; i++) {
		int from = window(a, i, 4);
		if (a->first[i] + a->n[i] - from > 16) a->sliding = 1;
		if (a->first[i] - from > 14) return 0;
		a->at[i / 4] = from - a->lo;
		// Lanes are outputs 0 to 3 and 8 to 11 of 16, then the others, as the packs want them.
		int half = i / 4 & 1, lane = (i & 3) + (i & 8) / 2;
		const uint32_t *k = (const uint32_t *)(a->hilo + (size_t)i * a->taps * 2);
		for (int p = 0; p < pairs && 2 * p < a->taps; p++) {
			uint32_t(*c)[8] = a->pairs[(2 * (i / 16) + half) * pairs + p];
			uint32_t at = (uint32_t)(a->first[i] - from + 2 * p) & 15;
			c[0][lane] = 0x80008000u | at | ((at + 1) & 15) << 16;
			c[1][lane] = k[2 * p];
			c[2][lane] = k[2 * p + 1];
		}
	}
	a->blocks = pairs;
	return 1;
}

#ifdef SJ_NEON
// spread_single is spread for NEON.
static int spread_single(axis *a, int taps) {
	size_t groups = ((size_t)a->out + 15) / 16 * 4;
	if (taps > 16) return 0;
	if (!(a->single = lay(a, groups * (size_t)taps, sizeof *a->single, groups))) return -1;
	for (int i = 0; i < a->out; i++) {
		int from = window(a, i, 4);
		if (a->first[i] + a->n[i] - from > 16) return 0;
		a->at[i / 4] = from - a->lo;
		for (int t = 0; t < a->n[i]; t++) {
			uint32_t(*c)[4] = a->single[i / 4 * taps + t];
			c[0][i & 3] = 0x80808000u | (uint32_t)(a->first[i] - from + t);
			c[1][i & 3] = (uint32_t)a->k[(size_t)i * a->taps + t];
		}
	}
	a->blocks = taps;
	return 1;
}
#endif

// spread lays them out for horizontal_planes. It returns 0 where they do not fit, and -1 without memory.
static int spread(axis *a) {
	if (a->identity || !simd) return 0;
#ifdef SJ_NEON
	return spread_single(a, most_taps(a));
#endif
	if (simd == 1) return spread_pairs(a, (most_taps(a) + 1) / 2);
	int blocks = (most_taps(a) + 3) / 4;
	size_t groups = ((size_t)a->out + 15) / 16;
	if (blocks > BLOCKS) return 0;
	if (!(a->spread = lay(a, groups * (size_t)blocks, sizeof *a->spread, groups))) return -1;
	for (int i = 0; i < a->out; i++) {
		int from = window(a, i, 16);
		if (a->first[i] + a->n[i] - from > 64) return 0;
		a->at[i / 16] = from - a->lo;
		for (int b = 0; b < blocks; b++) {
			uint32_t *lane = &a->spread[i / 16 * blocks + b][0][i & 15], d[3];
			int n = a->n[i] - 4 * b;
			// of which 6 bits count
			lane[0] = 0x03020100u + 0x01010101u * (uint32_t)((a->first[i] - from + 4 * b) & 63);
			digits(a->k + (size_t)i * a->taps + 4 * b, n < 0 ? 0 : n < 4 ? n : 4, d);
			for (int j = 0; j < 3; j++) lane[16 * (j + 1)] = d[j];
		}
	}
	a->blocks = blocks;
	return 1;
}

static inline uint8_t clip8(int32_t v) {
	v >>= BITS;
	return (uint8_t)(v < 0 ? 0 : v > 255 ? 255 : v);
}

// Horizontal pass: rows of 4-byte pixels in, packed RGB out. in[i] points at source sample a->lo.
static void horizontal_c(const axis *a, const uint8_t *const *in, uint8_t *const *out, int rows) {
	for (int r = 0; r < rows; r++) {
		const uint8_t *p = in[r];
		uint8_t *q = out[r];
		for (int i = 0; i < a->out; i++, q += 3) {
			const uint8_t *s = p + 4 * (ptrdiff_t)(a->first[i] - a->lo);
			const int32_t *k = a->k + (size_t)i * a->taps;
			int32_t s0 = 1 << (BITS - 1), s1 = s0, s2 = s0;
			for (int x = 0; x < a->n[i]; x++, s += 4) {
				s0 += s[0] * k[x];
				s1 += s[1] * k[x];
				s2 += s[2] * k[x];
			}
			q[0] = clip8(s0);
			q[1] = clip8(s1);
			q[2] = clip8(s2);
		}
	}
}

// Vertical pass: one output row of n bytes from taps rows `stride` apart.
static void vertical_c(const uint8_t *in, size_t stride, const int32_t *k, int taps, uint8_t *out, int from, int n) {
	enum { CHUNK = 64 }; // sums of a chunk stay in registers or L1, and the inner loops vectorise
	for (int x = from; x < n; x += CHUNK) {
		int32_t sum[CHUNK];
		int m = n - x < CHUNK ? n - x : CHUNK;
		for (int i = 0; i < m; i++) sum[i] = 1 << (BITS - 1);
		for (int t = 0; t < taps; t++) {
			const uint8_t *p = in + (size_t)t * stride + x;
			for (int i = 0; i < m; i++) sum[i] += p[i] * k[t];
		}
		for (int i = 0; i < m; i++) out[x + i] = clip8(sum[i]);
	}
}

#ifdef SJ_X86
// Exact in integers: k = hi << SPLIT | lo, and sums are linear, so two pmaddwd of halves equal one 32-bit multiply.

__attribute__((target("avx2"))) static inline __m256i join(const uint8_t *a, const uint8_t *b) {
	return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)a)),
		_mm_loadl_epi64((const __m128i *)b), 1);
}

__attribute__((target("avx2"))) static void horizontal_avx2(const axis *a, const uint8_t *const *in,
	uint8_t *const *out, int rows) {
	// Two 4-byte pixels become r0 r1 g0 g1 b0 b1 x0 x1 in 16 bits each.
	const __m256i spread = _mm256_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1, 0, -1, 4, -1, 1, -1,
		5, -1, 2, -1, 6, -1, 3, -1, 7, -1);
	const __m256i half = _mm256_set1_epi32(1 << (BITS - 1));
	for (int r = 0; r < rows; r += 4) {
		// Rows beyond the last repeat it: the same bytes are written twice.
		int r1 = r + 1 < rows ? r + 1 : r, r2 = r + 2 < rows ? r + 2 : r1, r3 = r + 3 < rows ? r + 3 : r2;
		const uint8_t *p0 = in[r], *p1 = in[r1], *p2 = in[r2], *p3 = in[r3];
		uint8_t *q0 = out[r], *q1 = out[r1], *q2 = out[r2], *q3 = out[r3];
		for (int i = 0; i < a->out; i++) {
			ptrdiff_t off = 4 * (ptrdiff_t)(a->first[i] - a->lo);
			const int32_t *k = (const int32_t *)(a->hilo + (size_t)i * a->taps * 2);
			__m256i h0 = _mm256_setzero_si256(), l0 = half, h1 = h0, l1 = half;
			for (int x = 0; x < a->n[i]; x += 2, off += 8, k += 2) {
				__m256i kh = _mm256_set1_epi32(k[0]), kl = _mm256_set1_epi32(k[1]);
				__m256i v0 = _mm256_shuffle_epi8(join(p0 + off, p1 + off), spread);
				__m256i v1 = _mm256_shuffle_epi8(join(p2 + off, p3 + off), spread);
				h0 = _mm256_add_epi32(h0, _mm256_madd_epi16(v0, kh));
				l0 = _mm256_add_epi32(l0, _mm256_madd_epi16(v0, kl));
				h1 = _mm256_add_epi32(h1, _mm256_madd_epi16(v1, kh));
				l1 = _mm256_add_epi32(l1, _mm256_madd_epi16(v1, kl));
			}
			h0 = _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(h0, SPLIT), l0), BITS);
			h1 = _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(h1, SPLIT), l1), BITS);
			__m256i v = _mm256_packs_epi32(h0, h1);
			v = _mm256_packus_epi16(v, v); // lanes: rows 0 2 | 1 3
			// Four bytes are stored for three: the next pixel, or the slack, takes the fourth.
			uint64_t e = (uint64_t)_mm256_extract_epi64(v, 0), o = (uint64_t)_mm256_extract_epi64(v, 2);
			uint32_t w0 = (uint32_t)e, w2 = (uint32_t)(e >> 32), w1 = (uint32_t)o, w3 = (uint32_t)(o >> 32);
			memcpy(q0 + 3 * i, &w0, 4);
			memcpy(q1 + 3 * i, &w1, 4);
			memcpy(q2 + 3 * i, &w2, 4);
			memcpy(q3 + 3 * i, &w3, 4);
		}
	}
}

// Exact in integers, too: k = (d2 << 16) + (d1 << 8) + d0, digits fit vpdpbusd's int8, and sums wrap.
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vbmi,avx512vnni")))

// total makes results of the sums of each digit. One shift is a shuffle, which has another port.
VNNI static inline __m512i total(__m512i s0, __m512i s1, __m512i s2) {
	const __m512i up = _mm512_set4_epi32(0x0e0d0c80, 0x0a090880, 0x06050480, 0x02010080);
	s1 = _mm512_add_epi32(s1, _mm512_shuffle_epi8(s2, up));
	return _mm512_srai_epi32(_mm512_add_epi32(s0, _mm512_slli_epi32(s1, 8)), BITS);
}

// blocks is a->blocks: as a constant of 1 it keeps the tables of 16 outputs in registers for all rows.
VNNI static inline __attribute__((always_inline)) void horizontal_blocks(const axis *a, const uint8_t *const *in,
	uint8_t *const *out, int rows, int blocks) {
	const __m512i half = _mm512_set1_epi32(1 << (BITS - 1));
	const __m512i channels = _mm512_set4_epi32(0x03030303, 0x02020202, 0x01010101, 0);
	const __m512i each = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
	// The packs leave output 4 * j + i in 4 bytes from 16 * i + 4 * j on, of which 3 count.
	const __m512i order = _mm512_setr_epi32(
		0x10020100, 0x21201211, 0x32313022, 0x14060504, 0x25241615, 0x36353426, 0x180a0908, 0x29281a19,
		0x3a39382a, 0x1c0e0d0c, 0x2d2c1e1d, 0x3e3d3c2e, 0, 0, 0, 0);
	for (int i = 0; i < a->out; i += 16) {
		const int32_t *at = a->at + i / 4 * blocks;
		__m512i k[4 * BLOCKS][4];
		for (int c = 0; c < 4 * blocks; c++) {
			for (int d = 0; d < 4; d++) {
				__m128i x = _mm_loadu_si128((const __m128i *)a->lanes[i / 4 * blocks + c][d]);
				k[c][d] = _mm512_permutexvar_epi32(each, _mm512_castsi128_si512(x));
			}
			k[c][0] = _mm512_add_epi8(k[c][0], channels);
		}
		for (int r = 0; r < rows; r++) {
			__m512i v[4];
			for (int j = 0; j < 4; j++) {
				__m512i s0 = half, s1 = _mm512_setzero_si512(), s2 = s1;
				for (int c = j * blocks; c < (j + 1) * blocks; c++) {
					__m512i x = _mm512_permutexvar_epi8(k[c][0], _mm512_loadu_si512(in[r] + at[c]));
					s0 = _mm512_dpbusd_epi32(s0, x, k[c][1]);
					s1 = _mm512_dpbusd_epi32(s1, x, k[c][2]);
					s2 = _mm512_dpbusd_epi32(s2, x, k[c][3]);
				}
				v[j] = total(s0, s1, s2);
			}
			__m512i v01 = _mm512_packs_epi32(v[0], v[1]), v23 = _mm512_packs_epi32(v[2], v[3]);
			// 64 bytes are stored for 48: the next outputs, or the slack, take the rest.
			_mm512_storeu_si512(out[r] + 3 * i, _mm512_permutexvar_epi8(order, _mm512_packus_epi16(v01, v23)));
		}
	}
}

VNNI static void horizontal_vnni(const axis *a, const uint8_t *const *in, uint8_t *const *out, int rows) {
	if (a->blocks == 1) horizontal_blocks(a, in, out, rows, 1);
	else horizontal_blocks(a, in, out, rows, a->blocks);
}

VNNI static inline __attribute__((always_inline)) void planes_blocks(const axis *a, const uint8_t *in, size_t stride,
	uint8_t *out, size_t out_stride, int rows, int blocks) {
	const __m512i half = _mm512_set1_epi32(1 << (BITS - 1)), zero = _mm512_setzero_si512();
	for (int i = 0; i < a->out; i += 16) {
		__m512i k[BLOCKS][4];
		for (int c = 0; c < blocks; c++) {
			for (int d = 0; d < 4; d++) k[c][d] = _mm512_loadu_si512(a->spread[i / 16 * blocks + c][d]);
		}
		const uint8_t *p = in + a->at[i / 16];
		uint8_t *q = out + i;
		for (int r = 0; r < rows; r++, p += stride, q += out_stride) {
			__m512i v = _mm512_loadu_si512(p), s0 = half, s1 = zero, s2 = zero;
			for (int c = 0; c < blocks; c++) {
				__m512i x = _mm512_permutexvar_epi8(k[c][0], v);
				s0 = _mm512_dpbusd_epi32(s0, x, k[c][1]);
				s1 = _mm512_dpbusd_epi32(s1, x, k[c][2]);
				s2 = _mm512_dpbusd_epi32(s2, x, k[c][3]);
			}
			_mm_storeu_si128((__m128i *)q, _mm512_cvtusepi32_epi8(_mm512_max_epi32(total(s0, s1, s2), zero)));
		}
	}
}

__attribute__((target("avx2"))) static inline __m256i both(const uint8_t *a, const uint8_t *b) {
	return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a)),
		_mm_loadu_si128((const __m128i *)b), 1);
}

__attribute__((target("avx2"))) static inline __attribute__((always_inline)) void planes_pairs(const axis *a,
	const uint8_t *in, size_t stride, uint8_t *out, size_t out_stride, int rows, int pairs, int sliding) {
	const __m256i half = _mm256_set1_epi32(1 << (BITS - 1));
	for (int i = 0; i < a->out; i += 16) {
		const int32_t *at = a->at + i / 4;
		const uint8_t *p = in;
		uint8_t *q = out + i;
		for (int r = 0; r < rows; r++, p += stride, q += out_stride) {
			__m256i v[2];
			for (int h = 0; h < 2; h++) {
				uint32_t(*k)[3][8] = a->pairs + (2 * (i / 16) + h) * pairs;
				__m256i w = both(p + at[h], p + at[h + 2]), high = _mm256_setzero_si256(), low = half;
				for (int c = 0; c < pairs; c++) {
					if (sliding && c > 0) w = both(p + at[h] + 2 * c, p + at[h + 2] + 2 * c);
					__m256i x = _mm256_shuffle_epi8(w, _mm256_loadu_si256((const __m256i *)k[sliding ? 0 : c][0]));
					high = _mm256_add_epi32(high, _mm256_madd_epi16(x, _mm256_loadu_si256((const __m256i *)k[c][1])));
					low = _mm256_add_epi32(low, _mm256_madd_epi16(x, _mm256_loadu_si256((const __m256i *)k[c][2])));
				}
				v[h] = _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(high, SPLIT), low), BITS);
			}
			__m256i b = _mm256_packs_epi32(v[0], v[1]);
			b = _mm256_permute4x64_epi64(_mm256_packus_epi16(b, b), 0x08);
			_mm_storeu_si128((__m128i *)q, _mm256_castsi256_si128(b));
		}
	}
}

VNNI static void planes_vnni(const axis *a, const uint8_t *in, size_t stride, uint8_t *out, size_t out_stride,
	int rows) {
	if (a->blocks == 1) planes_blocks(a, in, stride, out, out_stride, rows, 1);
	else if (a->blocks == 2) planes_blocks(a, in, stride, out, out_stride, rows, 2);
	else planes_blocks(a, in, stride, out, out_stride, rows, a->blocks);
}

__attribute__((target("avx2"))) static void planes_avx2_rows(const axis *a, const uint8_t *in, size_t stride,
	uint8_t *out, size_t out_stride, int rows) {
	if (a->sliding) planes_pairs(a, in, stride, out, out_stride, rows, a->blocks, 1);
	else if (a->blocks == 2) planes_pairs(a, in, stride, out, out_stride, rows, 2, 0);
	else if (a->blocks == 3) planes_pairs(a, in, stride, out, out_stride, rows, 3, 0);
	else if (a->blocks == 4) planes_pairs(a, in, stride, out, out_stride, rows, 4, 0);
	else planes_pairs(a, in, stride, out, out_stride, rows, a->blocks, 0);
}

// horizontal_planes takes rows of one channel, a byte a sample; in points at sample a->lo. Up to 15 bytes more are
// written.
static void horizontal_planes(const axis *a, const uint8_t *in, size_t stride, uint8_t *out, size_t out_stride,
	int rows) {
	if (simd > 1) planes_vnni(a, in, stride, out, out_stride, rows);
	else planes_avx2_rows(a, in, stride, out, out_stride, rows);
}

__attribute__((target("avx2"))) static int vertical_avx2(const uint8_t *in, size_t stride, const int16_t *hilo,
	int taps, uint8_t *out, int n) {
	const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << (BITS - 1));
	int x = 0;
	for (; x + 32 <= n; x += 32) {
		__m256i h0 = zero, h1 = zero, h2 = zero, h3 = zero, l0 = half, l1 = half, l2 = half, l3 = half;
		const int32_t *k = (const int32_t *)hilo;
		const uint8_t *p = in + x;
		for (int t = 0; t < taps; t += 2, p += 2 * stride, k += 2) {
			__m256i kh = _mm256_set1_epi32(k[0]), kl = _mm256_set1_epi32(k[1]);
			__m256i a = _mm256_loadu_si256((const __m256i *)p);
			// An odd last tap has no second row: its coefficient is 0, its row must not be touched.
			__m256i b = t + 1 < taps ? _mm256_loadu_si256((const __m256i *)(p + stride)) : zero;
			__m256i lo = _mm256_unpacklo_epi8(a, b), hi = _mm256_unpackhi_epi8(a, b);
			__m256i v0 = _mm256_unpacklo_epi8(lo, zero), v1 = _mm256_unpackhi_epi8(lo, zero);
			__m256i v2 = _mm256_unpacklo_epi8(hi, zero), v3 = _mm256_unpackhi_epi8(hi, zero);
			h0 = _mm256_add_epi32(h0, _mm256_madd_epi16(v0, kh));
			l0 = _mm256_add_epi32(l0, _mm256_madd_epi16(v0, kl));
			h1 = _mm256_add_epi32(h1, _mm256_madd_epi16(v1, kh));
			l1 = _mm256_add_epi32(l1, _mm256_madd_epi16(v1, kl));
			h2 = _mm256_add_epi32(h2, _mm256_madd_epi16(v2, kh));
			l2 = _mm256_add_epi32(l2, _mm256_madd_epi16(v2, kl));
			h3 = _mm256_add_epi32(h3, _mm256_madd_epi16(v3, kh));
			l3 = _mm256_add_epi32(l3, _mm256_madd_epi16(v3, kl));
		}
		h0 = _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(h0, SPLIT), l0), BITS);
		h1 = _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(h1, SPLIT), l1), BITS);
		h2 = _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(h2, SPLIT), l2), BITS);
		h3 = _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(h3, SPLIT), l3), BITS);
		_mm256_storeu_si256((__m256i *)(out + x),
			_mm256_packus_epi16(_mm256_packs_epi32(h0, h1), _mm256_packs_epi32(h2, h3)));
	}
	return x;
}

VNNI static void vertical_vnni(const uint8_t *in, size_t stride, const int32_t *k, int taps, uint8_t *out, int n) {
	uint32_t d[BLOCKS][3];
	for (int t = 0; t < taps; t += 4) digits(k + t, taps - t < 4 ? taps - t : 4, d[t / 4]);
	for (int x = 0; x < n; x += 64) {
		__m512i s0[4], s1[4], s2[4];
		for (int j = 0; j < 4; j++) {
			s0[j] = _mm512_set1_epi32(1 << (BITS - 1));
			s1[j] = s2[j] = _mm512_setzero_si512();
		}
		for (int t = 0; t < taps; t += 4) {
			// Taps beyond the last have coefficients of 0, and rows that must not be touched.
			const uint8_t *p = in + (size_t)t * stride + x;
			int m = taps - t < 4 ? taps - t : 4;
			__m512i k0 = _mm512_set1_epi32((int32_t)d[t / 4][0]), k1 = _mm512_set1_epi32((int32_t)d[t / 4][1]),
				k2 = _mm512_set1_epi32((int32_t)d[t / 4][2]);
			__m512i r0 = _mm512_loadu_si512(p), r1 = m > 1 ? _mm512_loadu_si512(p + stride) : r0;
			__m512i r2 = m > 2 ? _mm512_loadu_si512(p + 2 * stride) : r0,
				r3 = m > 3 ? _mm512_loadu_si512(p + 3 * stride) : r0;
			__m512i a = _mm512_unpacklo_epi8(r0, r1), b = _mm512_unpackhi_epi8(r0, r1);
			__m512i c = _mm512_unpacklo_epi8(r2, r3), e = _mm512_unpackhi_epi8(r2, r3);
			__m512i v[4] = {_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c), _mm512_unpacklo_epi16(b, e),
				_mm512_unpackhi_epi16(b, e)};
			for (int j = 0; j < 4; j++) {
				s0[j] = _mm512_dpbusd_epi32(s0[j], v[j], k0);
				s1[j] = _mm512_dpbusd_epi32(s1[j], v[j], k1);
				s2[j] = _mm512_dpbusd_epi32(s2[j], v[j], k2);
			}
		}
		for (int j = 0; j < 4; j++) s0[j] = total(s0[j], s1[j], s2[j]);
		__m512i v = _mm512_packus_epi16(_mm512_packs_epi32(s0[0], s0[1]), _mm512_packs_epi32(s0[2], s0[3]));
		_mm512_mask_storeu_epi8(out + x, n - x < 64 ? (1ull << (n - x)) - 1 : ~0ull, v);
	}
}

// Packed RGB to three planes, 16 pixels at a time. Returns the pixels done.
__attribute__((target("avx2"))) static int planes_simd(const uint8_t *rgb, int n, uint8_t *r, uint8_t *g, uint8_t *b) {
	const __m128i m0 = _mm_setr_epi8(0, 3, 6, 9, 12, 15, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
	const __m128i m1 = _mm_setr_epi8(-1, -1, -1, -1, -1, -1, 2, 5, 8, 11, 14, -1, -1, -1, -1, -1);
	const __m128i m2 = _mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 1, 4, 7, 10, 13);
	const __m128i n0 = _mm_setr_epi8(1, 4, 7, 10, 13, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
	const __m128i n1 = _mm_setr_epi8(-1, -1, -1, -1, -1, 0, 3, 6, 9, 12, 15, -1, -1, -1, -1, -1);
	const __m128i n2 = _mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 2, 5, 8, 11, 14);
	const __m128i o0 = _mm_setr_epi8(2, 5, 8, 11, 14, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
	const __m128i o1 = _mm_setr_epi8(-1, -1, -1, -1, -1, 1, 4, 7, 10, 13, -1, -1, -1, -1, -1, -1);
	const __m128i o2 = _mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 3, 6, 9, 12, 15);
	int x = 0;
	for (; x + 16 <= n; x += 16, rgb += 48) {
		__m128i a = _mm_loadu_si128((const __m128i *)rgb), c = _mm_loadu_si128((const __m128i *)(rgb + 16)),
			e = _mm_loadu_si128((const __m128i *)(rgb + 32));
		_mm_storeu_si128((__m128i *)(r + x),
			_mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(a, m0), _mm_shuffle_epi8(c, m1)), _mm_shuffle_epi8(e, m2)));
		_mm_storeu_si128((__m128i *)(g + x),
			_mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(a, n0), _mm_shuffle_epi8(c, n1)), _mm_shuffle_epi8(e, n2)));
		_mm_storeu_si128((__m128i *)(b + x),
			_mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(a, o0), _mm_shuffle_epi8(c, o1)), _mm_shuffle_epi8(e, o2)));
	}
	return x;
}
#elif defined(SJ_NEON)

// clip8x16 is clip8 of 16 sums.
static inline uint8x16_t clip8x16(const int32x4_t s[4]) {
	int16x8_t a = vqmovn_high_s32(vqmovn_s32(s[0] >> BITS), s[1] >> BITS),
		b = vqmovn_high_s32(vqmovn_s32(s[2] >> BITS), s[3] >> BITS);
	return vqmovun_high_s16(vqmovun_s16(a), b);
}

// horizontal_planes takes rows of one channel, a byte a sample; in points at sample a->lo. Up to 15 bytes more are
// written.
static void horizontal_planes(const axis *a, const uint8_t *in, size_t stride, uint8_t *out, size_t out_stride,
	int rows) {
	for (int i = 0; i < a->out; i += 16) {
		const uint8_t *p = in;
		uint8_t *q = out + i;
		for (int r = 0; r < rows; r++, p += stride, q += out_stride) {
			int32x4_t s[4];
			for (int j = 0; j < 4; j++) {
				uint32_t(*k)[2][4] = a->single + (i / 4 + j) * a->blocks;
				uint8x16_t v = vld1q_u8(p + a->at[i / 4 + j]);
				s[j] = vdupq_n_s32(1 << (BITS - 1));
				for (int t = 0; t < a->blocks; t++) {
					int32x4_t x = vreinterpretq_s32_u8(vqtbl1q_u8(v, vreinterpretq_u8_u32(vld1q_u32(k[t][0]))));
					s[j] = vmlaq_s32(s[j], x, vreinterpretq_s32_u32(vld1q_u32(k[t][1])));
				}
			}
			vst1q_u8(q, clip8x16(s));
		}
	}
}

static void horizontal_neon(const axis *a, const uint8_t *const *in, uint8_t *const *out, int rows) {
	enum { ROWS = 4 }; // whose sums do not wait for each other
	for (int r = 0; r < rows; r += ROWS) {
		const uint8_t *p[ROWS];
		uint8_t *q[ROWS];
		for (int j = 0; j < ROWS; j++) { // rows beyond the last repeat it: the same bytes are written twice
			p[j] = in[r + j < rows ? r + j : rows - 1];
			q[j] = out[r + j < rows ? r + j : rows - 1];
		}
		for (int i = 0; i < a->out; i++) {
			ptrdiff_t off = 4 * (ptrdiff_t)(a->first[i] - a->lo);
			const int32_t *k = a->k + (size_t)i * a->taps;
			int32x4_t s[ROWS];
			for (int j = 0; j < ROWS; j++) s[j] = vdupq_n_s32(1 << (BITS - 1));
			for (int x = 0; x < a->n[i]; x += 2, off += 8, k += 2) {
				for (int j = 0; j < ROWS; j++) {
					int16x8_t v = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p[j] + off)));
					s[j] = vmlaq_n_s32(s[j], vmovl_s16(vget_low_s16(v)), k[0]);
					s[j] = vmlaq_n_s32(s[j], vmovl_high_s16(v), k[1]);
				}
			}
			uint32_t w[ROWS];
			vst1q_u8((uint8_t *)w, clip8x16(s));
			// Four bytes are stored for three: the next pixel, or the slack, takes the fourth.
			for (int j = 0; j < ROWS; j++) memcpy(q[j] + 3 * i, &w[j], 4);
		}
	}
}

static int vertical_neon(const uint8_t *in, size_t stride, const int32_t *k, int taps, uint8_t *out, int n) {
	int x = 0;
	for (; x + 16 <= n; x += 16) {
		int32x4_t s[4];
		for (int j = 0; j < 4; j++) s[j] = vdupq_n_s32(1 << (BITS - 1));
		for (int t = 0; t < taps; t++) {
			uint8x16_t v = vld1q_u8(in + (size_t)t * stride + x);
			int16x8_t lo = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(v))),
				hi = vreinterpretq_s16_u16(vmovl_high_u8(v));
			s[0] = vmlaq_n_s32(s[0], vmovl_s16(vget_low_s16(lo)), k[t]);
			s[1] = vmlaq_n_s32(s[1], vmovl_high_s16(lo), k[t]);
			s[2] = vmlaq_n_s32(s[2], vmovl_s16(vget_low_s16(hi)), k[t]);
			s[3] = vmlaq_n_s32(s[3], vmovl_high_s16(hi), k[t]);
		}
		vst1q_u8(out + x, clip8x16(s));
	}
	return x;
}

// Packed RGB to three planes, 16 pixels at a time. Returns the pixels done.
static int planes_simd(const uint8_t *rgb, int n, uint8_t *r, uint8_t *g, uint8_t *b) {
	int x = 0;
	for (; x + 16 <= n; x += 16, rgb += 48) {
		uint8x16x3_t v = vld3q_u8(rgb);
		vst1q_u8(r + x, v.val[0]);
		vst1q_u8(g + x, v.val[1]);
		vst1q_u8(b + x, v.val[2]);
	}
	return x;
}
#endif

static void horizontal(const axis *a, const uint8_t *const *in, uint8_t *const *out, int rows) {
	if (a->identity) { // perhaps flipped: first[] then falls
		ptrdiff_t step = a->out > 1 && a->first[1] < a->first[0] ? -4 : 4;
		for (int r = 0; r < rows; r++) {
			const uint8_t *s = in[r] + 4 * (ptrdiff_t)(a->first[0] - a->lo);
			uint8_t *q = out[r];
			for (int i = 0; i < a->out; i++, s += step, q += 3) memcpy(q, s, 4); // the fourth byte is overwritten next
		}
		return;
	}
#ifdef SJ_X86
	if (a->blocks) horizontal_vnni(a, in, out, rows);
	else if (simd) horizontal_avx2(a, in, out, rows);
	else
#elif defined(SJ_NEON)
	if (simd) horizontal_neon(a, in, out, rows);
	else
#endif
		horizontal_c(a, in, out, rows);
}

static void vertical(const axis *a, int i, const uint8_t *mid, size_t stride, uint8_t *out, int n) {
	const uint8_t *p = mid + (size_t)(a->first[i] - a->lo) * stride;
	int done = 0;
	if (a->identity) {
		memcpy(out, p, (size_t)n);
		return;
	}
#ifdef SJ_X86
	if (simd == 2 && a->n[i] <= 4 * BLOCKS) {
		vertical_vnni(p, stride, a->k + (size_t)i * a->taps, a->n[i], out, n);
		return;
	}
	if (simd) done = vertical_avx2(p, stride, a->hilo + (size_t)i * a->taps * 2, a->n[i], out, n);
#elif defined(SJ_NEON)
	if (simd) done = vertical_neon(p, stride, a->k + (size_t)i * a->taps, a->n[i], out, n);
#endif
	vertical_c(p, stride, a->k + (size_t)i * a->taps, a->n[i], out, done, n);
}

// store writes pixels [x, win_w) of a row in the layout and type of the request. Channel c of pixel i is
// p[step * i + next * c].
static inline __attribute__((always_inline)) void store(const sj_request *q, const uint8_t *p, size_t step,
	size_t next, size_t x, int y, const uint8_t *table, uint8_t *dst) {
	size_t w = (size_t)q->win_w, plane = w * (size_t)q->win_h, at = (size_t)y * w;
#define VALUE p[step * i + next * c]
#define LOOKUP(T) STORE(T, ((const T *)table)[256 * c + VALUE])
#define STORE(T, value)                                                                             \
	do {                                                                                            \
		T *o = (T *)dst;                                                                            \
		if (q->planar) {                                                                            \
			for (size_t c = 0; c < 3; c++)                                                          \
				for (size_t i = x; i < w; i++) o[plane * c + at + i] = value;                       \
		} else {                                                                                    \
			for (size_t i = x; i < w; i++)                                                          \
				for (size_t c = 0; c < 3; c++) o[3 * (at + i) + c] = value;                         \
		}                                                                                           \
	} while (0)
	if (!table) STORE(uint8_t, VALUE);
	else if (q->elem == 1) LOOKUP(uint8_t);
	else if (q->elem == 2) LOOKUP(uint16_t);
	else LOOKUP(uint32_t);
#undef STORE
#undef LOOKUP
#undef VALUE
}

// store_row writes a row of packed RGB.
static void store_row(const sj_request *q, const uint8_t *rgb, int y, const uint8_t *table, uint8_t *dst) {
	size_t w = (size_t)q->win_w, x = 0;
	if (!table && !q->planar) {
		memcpy(dst + (size_t)y * w * 3, rgb, w * 3);
		return;
	}
#ifdef SJ_SIMD
	uint8_t *r = dst + (size_t)y * w, *g = r + w * (size_t)q->win_h, *b = g + w * (size_t)q->win_h;
	if (simd && !table) x = (size_t)planes_simd(rgb, q->win_w, r, g, b);
#endif
	store(q, rgb, 3, 1, x, y, table, dst);
}

// A visible part: the window's intersection with the resized picture, in the resized picture's coordinates.
typedef struct {
	int x0, x1, y0, y1;
} part;

static int clamp(int v, int most) { return v < 0 ? 0 : v > most ? most : v; }

static part visible(const sj_request *q) {
	return (part){clamp(q->win_x, q->out_w), clamp(q->win_x + q->win_w, q->out_w), clamp(q->win_y, q->out_h),
		clamp(q->win_y + q->win_h, q->out_h)};
}

// mid holds what lies between the passes: the rows that the horizontal pass has made, packed RGB or three planes, or,
// where the vertical pass comes first, the source's rows as they are, 4 bytes a pixel.
static size_t mid_plane(const sj_scratch *s) { return ((size_t)s->x.out + 15) / 16 * 16; }

static size_t mid_stride(const sj_scratch *s) {
	if (s->planes) return 3 * mid_plane(s) + SLACK;
	return (s->vertical_first ? (size_t)(s->x.hi - s->x.lo) * 4 : (size_t)s->x.out * 3) + SLACK;
}

static int plan(sj_scratch *s) {
	const sj_request *q = &s->req;
	part v = visible(q);
	span x = {q->box_w, 0, (float)q->box_w}, y = {q->box_h, 0, (float)q->box_h};
	if (v.x0 == v.x1 || v.y0 == v.y1) { // nothing but padding
		v.x0 = v.y0 = 0;
		v.x1 = v.y1 = 1;
	}
	s->base_x = q->box_x;
	s->base_y = q->box_y;
	s->src_w = q->img_w;
	s->src_h = q->img_h;
	s->denom = 1;
	if (q->dct && q->filter != SJ_NEAREST) {
		while (s->denom < 8 && q->box_w >= 2 * s->denom * q->out_w &&
			q->box_h >= 2 * s->denom * q->out_h) s->denom *= 2;
	}
	if (s->denom > 1) { // the box becomes a part of the smaller picture, perhaps at fractions of pixels
		float d = (float)s->denom;
		s->base_x = s->base_y = 0;
		s->src_w = (q->img_w + s->denom - 1) / s->denom;
		s->src_h = (q->img_h + s->denom - 1) / s->denom;
		x = (span){s->src_w, (float)q->box_x / d, (float)(q->box_x + q->box_w) / d};
		y = (span){s->src_h, (float)q->box_y / d, (float)(q->box_y + q->box_h) / d};
	}
	if (!axis_init(&s->x, q->filter, x, q->out_w, v.x0, v.x1, q->flip)) return 0;
	if (!axis_init(&s->y, q->filter, y, q->out_h, v.y0, v.y1, 0)) return 0;
	// Pillow 13 compares how many rows and columns go, not the ratios.
	int rows = y.in - q->out_h, columns = x.in - q->out_w;
	s->planes = 0;
	s->vertical_first = q->vertical_first && !s->x.identity && !s->y.identity && rows > 0 && rows > 2 * columns;
	return 1;
}

// layout chooses what lies between the passes, and takes memory for it. planes: the first pass may work on planes.
static int layout(sj_scratch *s, int planes) {
	const sj_request *q = &s->req;
	if (s->plain) return 1;
	if (planes && (q->planar || q->planes) && !s->vertical_first && (s->planes = spread(&s->x)) < 0) return 0;
	if (!s->planes && !widen(&s->x)) return 0;
	size_t line = (size_t)q->win_w * 3 + SLACK;
	if (s->vertical_first || s->planes) line += mid_stride(s);
	return sj_reserve(&s->mid, mid_stride(s) * (size_t)(s->y.hi - s->y.lo) + SLACK) && sj_reserve(&s->line, line);
}

// push takes rows [row, row+n) of the rows needed through the first pass, if that is the horizontal one.
static void push(sj_scratch *s, const uint8_t *const *in, int row, int n) {
	uint8_t *out[BATCH];
	for (int i = 0; s->plain && i < n; i++) store_row(&s->req, in[i], row + i, NULL, s->plain);
	if (s->plain) return;
	for (int i = 0; i < n; i++) {
		out[i] = (uint8_t *)s->mid.p + mid_stride(s) * (size_t)(row + i);
		if (s->vertical_first) memcpy(out[i], in[i], mid_stride(s) - SLACK);
	}
	if (!s->vertical_first) horizontal(&s->x, in, out, n);
}

// second makes row i of the visible part, packed RGB; up to SLACK bytes behind it are overwritten.
static void second(sj_scratch *s, int i, uint8_t *out) {
	if (!s->vertical_first) {
		vertical(&s->y, i, s->mid.p, mid_stride(s), out, s->planes ? 3 * (int)mid_plane(s) : s->x.out * 3);
		return;
	}
	uint8_t *row = (uint8_t *)s->line.p + (size_t)s->req.win_w * 3 + SLACK;
	const uint8_t *in[1] = {row};
	vertical(&s->y, i, s->mid.p, mid_stride(s), row, (int)(mid_stride(s) - SLACK));
	horizontal(&s->x, in, &out, 1);
}

// finish runs the second pass and stores.
static void finish(sj_scratch *s, const uint8_t *table, uint8_t *dst) {
	const sj_request *q = &s->req;
	if (s->plain) return;
	part v = visible(q);
	size_t w = (size_t)q->win_w;
	uint8_t *line = s->line.p;
	int pad_left = q->flip ? q->win_x + q->win_w - v.x1 : v.x0 - q->win_x;
	int empty = v.x0 == v.x1 || v.y0 == v.y1;
	// dst has no slack
	int direct = !table && !q->planar && !s->planes && v.x1 - v.x0 == q->win_w && !s->vertical_first;
	memset(line, 0, w * 3);
	for (int y = 0; y < q->win_h; y++) {
		int at = q->win_y + y; // row of the resized picture
		int to = q->turn ? q->win_h - 1 - y : y;
		if (empty || at < v.y0 || at >= v.y1) {
			memset(line, 0, w * 3);
		} else if (direct) {
			second(s, at - v.y0, dst + (size_t)to * w * 3);
			continue;
		} else if (s->planes) {
			uint8_t *row = line + w * 3 + SLACK;
			second(s, at - v.y0, row);
			for (size_t c = 0; c < 3; c++) memcpy(line + c * w + pad_left, row + c * mid_plane(s), (size_t)s->x.out);
		} else {
			second(s, at - v.y0, line + 3 * pad_left);
			// the overhang
			if (s->vertical_first) memset(line + 3 * (pad_left + s->x.out), 0,
				3 * (size_t)(q->win_w - pad_left - s->x.out));
		}
		if (s->planes) store(q, line, 1, w, 0, to, table, dst);
		else store_row(q, line, to, table, dst);
	}
}

int sj_resample(sj_scratch *s, const uint8_t *rgb, const uint8_t *table, uint8_t *dst) {
	sj_request *q = &s->req;
	s->msg[0] = 0;
	q->dct = 0;
	s->plain = NULL;
	if (!plan(s) || !layout(s, q->planes)) return SJ_MEMORY;
	int w = s->x.hi - s->x.lo, rows = s->y.hi - s->y.lo;
	size_t plane = (size_t)q->img_w * (size_t)q->img_h, at = (size_t)(s->base_y + s->y.lo) * (size_t)q->img_w +
		(size_t)(s->base_x + s->x.lo);
#ifdef SJ_SIMD
	for (int y = 0; s->planes && y < rows; y += STRIP) {
		for (int c = 0; c < 3; c++) {
			uint8_t *out = (uint8_t *)s->mid.p + mid_stride(s) * (size_t)y + mid_plane(s) * (size_t)c;
			horizontal_planes(&s->x, rgb + at + plane * (size_t)c + (size_t)y * (size_t)q->img_w, (size_t)q->img_w, out,
				mid_stride(s), rows - y < STRIP ? rows - y : STRIP);
		}
	}
#endif
	size_t stride = (size_t)w * 4 + SLACK;
	if (!sj_reserve(&s->rows, stride * BATCH)) return SJ_MEMORY;
	memset(s->rows.p, 0, stride * BATCH);
	for (int y = 0; !s->planes && y < rows; y += BATCH) {
		const uint8_t *in[BATCH];
		int n = rows - y < BATCH ? rows - y : BATCH;
		for (int i = 0; i < n; i++) {
			size_t from = at + (size_t)(y + i) * (size_t)q->img_w, step = q->planes ? 1 : 3,
				next = q->planes ? plane : 1;
			const uint8_t *p = rgb + from * step;
			uint8_t *o = (uint8_t *)s->rows.p + stride * i;
			in[i] = o;
			for (int x = 0; x < w; x++, p += step, o += 4) {
				o[0] = p[0];
				o[1] = p[next];
				o[2] = p[2 * next];
			}
		}
		push(s, in, y, n);
	}
	finish(s, table, dst);
	return SJ_OK;
}

// ---------------------------------------------------------------------------------------------------------- libjpeg

static void fail(j_common_ptr c, int code) {
	sj_scratch *s = c->client_data;
	s->code = code;
	if (code == SJ_CORRUPT) (*c->err->format_message)(c, s->msg);
	longjmp(s->jmp, 1);
}

static void on_error(j_common_ptr c) {
	int code = c->err->msg_code;
	fail(c, code == JERR_OUT_OF_MEMORY || code == JERR_NO_BACKING_STORE ? SJ_MEMORY : SJ_CORRUPT);
}

// Warnings (extraneous bytes, a damaged scan) are tolerated, as Pillow tolerates them.
static void on_message(j_common_ptr c) { (void)c; }

static void on_progress(j_common_ptr c) {
	if (((j_decompress_ptr)c)->input_scan_number > SJ_MAX_SCANS) fail(c, SJ_SCANS);
}

static void src_nothing(j_decompress_ptr d) { (void)d; }

static boolean src_fill(j_decompress_ptr d) {
	fail((j_common_ptr)d, SJ_TRUNCATED);
	return FALSE;
}

static void src_skip(j_decompress_ptr d, long n) {
	if (n <= 0) return;
	if ((size_t)n > d->src->bytes_in_buffer) fail((j_common_ptr)d, SJ_TRUNCATED);
	d->src->next_input_byte += n;
	d->src->bytes_in_buffer -= (size_t)n;
}

static struct jpeg_error_mgr *errors(sj_scratch *s) {
	jpeg_std_error(&s->err);
	s->err.error_exit = on_error;
	s->err.output_message = on_message;
	s->code = SJ_OK;
	s->msg[0] = 0;
	return &s->err;
}

// has_end looks for the end-of-image marker behind the first scan's header, from the end: a crop would hide a
// truncation. Bytes after the marker are tolerated.
static int has_end(const uint8_t *p, size_t n) {
	for (size_t i = n; i >= 2; i--) {
		if (p[i - 1] == 0xD9 && p[i - 2] == 0xFF) return 1;
	}
	return 0;
}

// settled tells whether nothing can go wrong behind the rows read so far: the rest is entropy-coded data up to the end
// marker.
static int settled(j_decompress_ptr d) {
	if (jpeg_input_complete(d)) return 1; // a file of several scans: read to its end
	if (d->unread_marker) return d->unread_marker == JPEG_EOI;
	const uint8_t *p = d->src->next_input_byte, *end = p + d->src->bytes_in_buffer;
	while (p < end && (p = memchr(p, 0xFF, (size_t)(end - p)))) {
		while (p < end && *p == 0xFF) p++;
		if (p == end) return 0;
		if (*p == JPEG_EOI) return 1;
		if (*p != 0 && !(*p >= JPEG_RST0 && *p <= JPEG_RST0 + 7)) return 0;
		p++;
	}
	return 0;
}

// smoothed tells whether libjpeg will blur block edges: some AC coefficient of a progressive file is not fully known.
static int smoothed(j_decompress_ptr d) {
	if (!d->progressive_mode || !d->coef_bits) return 0;
	for (int c = 0; c < d->num_components; c++) {
		for (int i = 0; i < 10; i++) {
			if (d->coef_bits[c][i] != 0) return 1;
		}
	}
	return 0;
}

// cmyk_rgb converts Adobe's inverted CMYK to RGB as Pillow's convert("RGB") does, in place.
static void cmyk_rgb(uint8_t *p, int n) {
	for (int i = 0; i < n; i++, p += 4) {
		int k = p[3]; // inverted: 255 - K
		for (int c = 0; c < 3; c++) {
			int t = (255 - p[c]) * k + 128;
			p[c] = (uint8_t)(k - (((t >> 8) + t) >> 8));
		}
	}
}

static void open_source(sj_scratch *s, const uint8_t *src, size_t n) {
	j_decompress_ptr d = &s->d;
	jpeg_create_decompress(d);
	s->src.next_input_byte = src;
	s->src.bytes_in_buffer = n;
	s->src.init_source = src_nothing;
	s->src.fill_input_buffer = src_fill;
	s->src.skip_input_data = src_skip;
	s->src.resync_to_restart = jpeg_resync_to_restart;
	s->src.term_source = src_nothing;
	d->src = &s->src;
	s->progress.progress_monitor = on_progress;
	d->progress = &s->progress;
	jpeg_read_header(d, TRUE);
}

// own_rows takes the usual picture's rows from coefficients.
static int own_rows(sj_scratch *s, sj_recoded *from) {
	int x0 = s->base_x + s->x.lo, x1 = s->base_x + s->x.hi, y0 = s->base_y + s->y.lo, y1 = s->base_y + s->y.hi;
	int code = sj_own_open(s->own, &s->d, from, x0, x1, y0, y1);
	size_t width = (size_t)(x1 - x0 + 1), stride = width * 4 + SJ_OWN_SLACK, plane = 0;
	if (code != SJ_OK) return code;
	if (!layout(s, 1)) return SJ_MEMORY;
	if (s->planes) {
		plane = width + SJ_OWN_SLACK;
		stride = 3 * plane;
	}
	if (!sj_reserve(&s->rows, stride * BATCH)) return SJ_MEMORY;
	uint8_t *rows[BATCH];
	const uint8_t *in[BATCH];
	for (int i = 0; i < BATCH; i++) {
		rows[i] = (uint8_t *)s->rows.p + stride * i;
		in[i] = rows[i] + 4 * (x0 & 1);
	}
	for (int y = y0; y < y1; y += BATCH) {
		int n = y1 - y < BATCH ? y1 - y : BATCH;
		if ((code = sj_own_rows(s->own, rows, n, plane)) != SJ_OK) return code;
		if (!s->planes) push(s, in, y - y0, n);
#ifdef SJ_SIMD
		for (int c = 0; plane && c < 3; c++) {
			uint8_t *out = (uint8_t *)s->mid.p + mid_stride(s) * (size_t)(y - y0) + mid_plane(s) * (size_t)c;
			horizontal_planes(&s->x, rows[0] + plane * (size_t)c + (x0 & 1), stride, out, mid_stride(s), n);
		}
#endif
	}
	return SJ_OK;
}

// decode takes the picture from the JPEG src, or from coefficients.
static void decode(sj_scratch *s, const uint8_t *src, size_t n, sj_recoded *from, const uint8_t *table, uint8_t *dst) {
	j_decompress_ptr d = &s->d;
	const sj_request *q = &s->req;
	s->plain = NULL;
	if (from) open_source(s, from->head, from->head_n);
	else open_source(s, src, n);
	d->mem->max_memory_to_use = q->most;
	if ((int)d->image_width != q->img_w || (int)d->image_height != q->img_h) fail((j_common_ptr)d, SJ_SIZE);
	if (!from && !has_end(s->src.next_input_byte, s->src.bytes_in_buffer)) fail((j_common_ptr)d, SJ_TRUNCATED);
	switch (d->num_components) {
	case 1:
	case 3:
		if (!from && q->planar && !table && !q->flip && !q->turn && q->win_w == q->out_w && q->win_h == q->out_h &&
			!q->win_x && !q->win_y && s->x.identity && s->y.identity) s->plain = dst;
		d->out_color_space = s->plain ? JCS_EXT_RGB : JCS_EXT_RGBX;
		break;
	case 4: d->out_color_space = JCS_CMYK; break;
	default: fail((j_common_ptr)d, SJ_COLOR);
	}
	if (from && s->denom == 1 && sj_own_usual(d, from)) {
		int code = own_rows(s, from);
		if (code != SJ_OK) fail((j_common_ptr)d, code);
		finish(s, table, dst);
		return;
	}
	if (!layout(s, 0)) fail((j_common_ptr)d, SJ_MEMORY);
	d->dct_method = JDCT_ISLOW;
	d->do_fancy_upsampling = TRUE;
	d->scale_num = 1;
	d->scale_denom = (unsigned)s->denom;
	if (from) {
		int mcu = 8 * d->max_v_samp_factor / s->denom * from->band_mcu_rows, above = s->base_y + s->y.lo - 3;
		int end = (s->base_y + s->y.hi + d->max_v_samp_factor - 1) / mcu + 1;
		if (!sj_pixels_can()) fail((j_common_ptr)d, SJ_RESTORE);
		sj_pixels_ready(s->pixels, d, from);
		int code = sj_recoded_lanes(from, above < 0 ? 0 : above / mcu, end < from->bands ? end : from->bands);
		if (code != SJ_OK) fail((j_common_ptr)d, code);
	}
	jpeg_start_decompress(d);
	if (from) sj_pixels_start(s->pixels, d);
	if ((int)d->output_width != s->src_w || (int)d->output_height != s->src_h) fail((j_common_ptr)d, SJ_SIZE);

	// The region: what the resize reads, plus the margin.
	int x0 = s->base_x + s->x.lo, x1 = s->base_x + s->x.hi, y0 = s->base_y + s->y.lo, y1 = s->base_y + s->y.hi;
	int left = 0, width = s->src_w, whole = !from && smoothed(d);
	// Cropped and scaled, libjpeg takes chroma of 4x2 and 2x4 from memory that it has not written.
	if (!whole && s->src_w > MIN_REGION && (s->denom == 1 || d->max_h_samp_factor * d->max_v_samp_factor <= 4)) {
		int a = x0 - MARGIN, b = x1 + MARGIN;
		if (b - a < MIN_REGION) b = a + MIN_REGION;
		if (b > s->src_w) b = s->src_w;
		if (b - a < MIN_REGION) a = b - MIN_REGION;
		if (a < 0) a = 0;
		if (a >= 8 || b <= s->src_w - 8) {
			JDIMENSION off = (JDIMENSION)a, w = (JDIMENSION)(b - a);
			jpeg_crop_scanline(d, &off, &w);
			left = (int)off;
			width = (int)w;
		}
	}
	size_t stride = (size_t)width * 4 + SLACK;
	if (!sj_reserve(&s->rows, stride * BATCH)) fail((j_common_ptr)d, SJ_MEMORY);
	memset(s->rows.p, 0, stride * BATCH);
	uint8_t *rows[BATCH];
	const uint8_t *in[BATCH];
	for (int i = 0; i < BATCH; i++) {
		rows[i] = (uint8_t *)s->rows.p + stride * i;
		in[i] = rows[i] + (s->plain ? 3 : 4) * (ptrdiff_t)(x0 - left);
	}
	if (!whole && y0 > MARGIN) jpeg_skip_scanlines(d, (JDIMENSION)(y0 - MARGIN));
	while ((int)d->output_scanline < y0) {
		if (jpeg_read_scanlines(d, rows, 1) == 0) fail((j_common_ptr)d, SJ_TRUNCATED);
	}
	for (int y = y0; y < y1;) {
		int want = y1 - y < BATCH ? y1 - y : BATCH, got = 0;
		while (got < want) {
			int m = (int)jpeg_read_scanlines(d, rows + got, (JDIMENSION)(want - got));
			if (m <= 0) fail((j_common_ptr)d, SJ_TRUNCATED); // only a suspending source gives none
			got += m;
		}
		if (d->num_components == 4) {
			for (int i = 0; i < got; i++) cmyk_rgb(rows[i] + 4 * (ptrdiff_t)(x0 - left), x1 - x0);
		}
		push(s, in, y - y0, got);
		y += got;
	}
	finish(s, table, dst);
	if (!from && !settled(d)) { // a marker where none belongs: let libjpeg judge the rest, as Pillow does
		while (d->output_scanline < d->output_height) {
			if (jpeg_read_scanlines(d, rows, 1) == 0) fail((j_common_ptr)d, SJ_TRUNCATED);
		}
		jpeg_finish_decompress(d);
	}
}

static int run(sj_scratch *s, const uint8_t *src, size_t n, sj_recoded *from, const uint8_t *table, uint8_t *dst) {
	if (!plan(s)) return SJ_MEMORY;
	if (from && !s->pixels && !(s->pixels = sj_pixels_new())) return SJ_MEMORY;
	if (from && !s->own && !(s->own = sj_own_new())) return SJ_MEMORY;
	memset(&s->d, 0, sizeof s->d);
	s->d.err = errors(s);
	s->d.client_data = s; // jpeg_create_decompress keeps err and client_data
	if (!setjmp(s->jmp)) decode(s, src, n, from, table, dst);
	jpeg_destroy_decompress(&s->d);
	return s->code;
}

int sj_decode(sj_scratch *s, const uint8_t *src, size_t n, const uint8_t *table, uint8_t *dst) {
	return run(s, src, n, NULL, table, dst);
}

int sj_decode_recoded(sj_scratch *s, const sj_tables *t, const uint8_t *src, size_t n, const uint8_t *table,
	uint8_t *dst) {
	s->msg[0] = 0;
	int code = sj_recoded_open(&s->recoded, src, n, t);
	return code == SJ_OK ? run(s, NULL, 0, &s->recoded, table, dst) : code;
}

// The destination is the scratch's own growing buffer: jpeg_mem_dest leaves a dangling pointer behind when an error
// leaves by longjmp after it has grown.
static void dest_init(j_compress_ptr c) {
	sj_scratch *s = c->client_data;
	if (!sj_reserve(&s->out, 1 << 16)) fail((j_common_ptr)c, SJ_MEMORY);
	s->dest.next_output_byte = s->out.p;
	s->dest.free_in_buffer = s->out.cap;
}

static boolean dest_grow(j_compress_ptr c) {
	sj_scratch *s = c->client_data;
	size_t have = s->out.cap;
	void *p = realloc(s->out.p, have * 2);
	if (!p) fail((j_common_ptr)c, SJ_MEMORY);
	s->out.p = p;
	s->out.cap = have * 2;
	s->dest.next_output_byte = (JOCTET *)p + have;
	s->dest.free_in_buffer = have;
	return TRUE;
}

static void dest_term(j_compress_ptr c) {
	sj_scratch *s = c->client_data;
	s->written = s->out.cap - s->dest.free_in_buffer;
}

static void encode(sj_scratch *s, const sj_encoding *e, const uint8_t *pix) {
	j_compress_ptr c = &s->c;
	jpeg_create_compress(c);
	s->dest.init_destination = dest_init;
	s->dest.empty_output_buffer = dest_grow;
	s->dest.term_destination = dest_term;
	c->dest = &s->dest;
	c->image_width = (JDIMENSION)e->w;
	c->image_height = (JDIMENSION)e->h;
	c->input_components = e->components;
	c->in_color_space = e->components == 1 ? JCS_GRAYSCALE : e->components == 3 ? JCS_RGB : JCS_CMYK;
	jpeg_set_defaults(c);
	jpeg_set_quality(c, e->quality, TRUE);
	if (e->components == 4) jpeg_set_colorspace(c, e->ycck ? JCS_YCCK : JCS_CMYK);
	if (e->components != 1) {
		c->comp_info[0].h_samp_factor = e->h_samp;
		c->comp_info[0].v_samp_factor = e->v_samp;
	}
	if (e->components == 4 && e->ycck) {
		c->comp_info[3].h_samp_factor = e->h_samp;
		c->comp_info[3].v_samp_factor = e->v_samp;
	}
	c->dct_method = JDCT_ISLOW;
	c->optimize_coding = e->optimize;
	c->restart_in_rows = e->restart_rows;
	if (e->progressive) jpeg_simple_progression(c);
	jpeg_start_compress(c, TRUE);
	while (c->next_scanline < c->image_height) {
		JSAMPROW row = (JSAMPROW)(pix + (size_t)c->next_scanline * e->w * e->components);
		jpeg_write_scanlines(c, &row, 1);
	}
	jpeg_finish_compress(c);
}

int sj_encode(sj_scratch *s, const sj_encoding *e, const uint8_t *pix) {
	s->written = 0;
	memset(&s->c, 0, sizeof s->c);
	s->c.err = errors(s);
	s->c.client_data = s;
	if (!setjmp(s->jmp)) encode(s, e, pix);
	jpeg_destroy_compress(&s->c);
	return s->code;
}

const uint8_t *sj_output(const sj_scratch *s, size_t *n) {
	*n = s->written;
	return s->out.p;
}
