// IDCT, upsampling and colour as libjpeg-turbo's vector code computes them, on several blocks and on all of a row at
// once. Planes of samples hold two bands of coefficients; a row of chroma lies a row of samples ahead at most.
//
// Samples outside of the picture repeat the last one inside, as in libjpeg: that makes the filter the same everywhere.

#include "sjown.h"
#include "shoaljpeg.h"

#include <stdlib.h>
#include <string.h>

#ifdef SJ_X86
#include <immintrin.h>
#elif defined(SJ_NEON)
#include <arm_neon.h>
#endif

#ifdef SJ_SIMD

// 8 even values and 8 odd ones, in order.
static const uint8_t merged[16] = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};

enum { EDGE = 64, BESIDE = 320 }; // bytes of a plane's row before its first sample, and at least behind its last

typedef struct {
	int blocks_w, band_blocks; // of the source
	int from, to;              // blocks of a row that are transformed
	int need0, need1;          // rows of samples that are looked at
	int w, h;                  // samples of the picture
	int ring;                  // rows that the plane holds
	size_t stride;
	int16_t quant[64];
} component;

struct sj_own {
	component c[3];
	sj_recoded *from;
	int half_w, half_h;     // chroma has half the columns, half the rows
	int x0, width, y, band; // first column, columns, next row, next band
	int ready;              // rows of luma that the bands so far give
	sj_buf mem;
	int16_t *blocks;
	uint8_t *last, *plane[3];
};

sj_own *sj_own_new(void) { return calloc(1, sizeof(sj_own)); }

void sj_own_free(sj_own *o) {
	if (!o) return;
	free(o->mem.p);
	free(o);
}

size_t sj_own_bytes(const sj_own *o) { return o ? sizeof *o + o->mem.cap : 0; }

// flat is the IDCT of a block without AC coefficients.
static void flat(int coef, int quant, uint8_t *out, size_t stride) {
	int v = ((int16_t)(uint16_t)((uint32_t)(coef * quant) << 2) + 16) >> 5;
	v = (v < -128 ? -128 : v > 127 ? 127 : v) + 128;
	for (int y = 0; y < 8; y++) memset(out + (size_t)y * stride, v, 8);
}

// wrap gives the first rows of n blocks what libjpeg-turbo makes of values beyond 13 bits where the other rows are
// empty.
static void wrap(const int16_t *blocks, int16_t *first, int n) {
	for (int b = 0; b < n; b++, blocks += 64, first += 8) {
		int any = 0;
		for (int i = 8; i < 64; i++) any |= blocks[i];
		for (int i = 0; !any && i < 8; i++) first[i] = (int16_t)((int16_t)(uint16_t)((uint32_t)first[i] << 2) >> 2);
	}
}

#ifdef SJ_X86

#define P V
#define LO(a, b) OP(unpacklo_epi16)(a, b)
#define HI(a, b) OP(unpackhi_epi16)(a, b)
#define SECOND_UP_13(pair) OP(srai_epi32)(pair, 3) // << 13; the first is 0
#define HALVES(a, b) OP(packs_epi32)(a, b)
#define PAIR(a, b) OP(set1_epi32)((int32_t)((uint32_t)(uint16_t)(int16_t)(b) << 16 | (uint16_t)(int16_t)(a)))
#define MUL(v, a, b) OP(madd_epi16)(v, PAIR(a, b))
#define MADD(sum, v, a, b) MADDV(sum, v, PAIR(a, b))

#define V __m256i
#define N 2
#define LOOP __attribute__((target("avx2")))
#define NAME(f) f##_avx2
#define OP(f) _mm256_##f
#define ZERO _mm256_setzero_si256()
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define STORE(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define BOTH(a, b) _mm256_and_si256(a, b)
#define IN_LANES(p) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p)))
#define ANY(v, bits) (!_mm256_testz_si256(v, _mm256_set1_epi16(bits)))
#define UP(p) _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(p)))
#define MADDV(sum, v, k) _mm256_add_epi32(sum, _mm256_madd_epi16(v, k))

LOOP static inline void rows_avx2(const int16_t *b, const int16_t *quant, V r[8]) {
	for (int i = 0; i < 4; i++) {
		V q = LOAD(quant + 16 * i), a = OP(mullo_epi16)(LOAD(b + 16 * i), q),
			c = OP(mullo_epi16)(LOAD(b + 64 + 16 * i), q);
		r[2 * i] = _mm256_permute2x128_si256(a, c, 0x20);
		r[2 * i + 1] = _mm256_permute2x128_si256(a, c, 0x31);
	}
}

LOOP static inline void two_rows_avx2(V v, uint8_t *out, size_t stride) {
	v = _mm256_permute4x64_epi64(v, 0xd8);
	_mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(v));
	_mm_storeu_si128((__m128i *)(out + stride), _mm256_extracti128_si256(v, 1));
}

// pixels stores 32 pixels; a lane of r, g and b has 8 even ones and then 8 odd ones.
LOOP static inline void pixels_avx2(V r, V g, V b, uint8_t *out) {
	V rg = OP(unpacklo_epi8)(r, g), rg1 = OP(unpackhi_epi8)(r, g), bx = OP(unpacklo_epi8)(b, ZERO),
		bx1 = OP(unpackhi_epi8)(b, ZERO);
	V e = OP(unpacklo_epi16)(rg, bx), f = OP(unpackhi_epi16)(rg, bx), o = OP(unpacklo_epi16)(rg1, bx1),
		p = OP(unpackhi_epi16)(rg1, bx1);
	V a[4] = {OP(unpacklo_epi32)(e, o), OP(unpackhi_epi32)(e, o), OP(unpacklo_epi32)(f, p), OP(unpackhi_epi32)(f, p)};
	STORE(out, _mm256_permute2x128_si256(a[0], a[1], 0x20));
	STORE(out + 32, _mm256_permute2x128_si256(a[2], a[3], 0x20));
	STORE(out + 64, _mm256_permute2x128_si256(a[0], a[1], 0x31));
	STORE(out + 96, _mm256_permute2x128_si256(a[2], a[3], 0x31));
}

#include "sjown_simd.h"

#undef V
#undef N
#undef LOOP
#undef NAME
#undef OP
#undef ZERO
#undef LOAD
#undef STORE
#undef BOTH
#undef IN_LANES
#undef ANY
#undef UP
#undef MADDV

#define V __m512i
#define N 4
#define LOOP __attribute__((target("avx512bw,avx512vbmi,avx512vnni")))
#define NAME(f) f##_avx512
#define OP(f) _mm512_##f
#define ZERO _mm512_setzero_si512()
#define LOAD(p) _mm512_loadu_si512(p)
#define STORE(p, v) _mm512_storeu_si512(p, v)
#define BOTH(a, b) _mm512_and_si512(a, b)
#define IN_LANES(p) _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(p)))
#define ANY(v, bits) _mm512_test_epi16_mask(v, _mm512_set1_epi16(bits))
#define UP(p) _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(p)))
#define MADDV(sum, v, k) _mm512_dpwssd_epi32(sum, v, k)

LOOP static inline void rows_avx512(const int16_t *b, const int16_t *quant, V r[8]) {
	for (int i = 0; i < 2; i++) {
		V q = LOAD(quant + 32 * i), a[4];
		for (int k = 0; k < 4; k++) a[k] = OP(mullo_epi16)(LOAD(b + 64 * k + 32 * i), q);
		V ab = _mm512_shuffle_i64x2(a[0], a[1], 0x44), cd = _mm512_shuffle_i64x2(a[2], a[3], 0x44);
		V ab1 = _mm512_shuffle_i64x2(a[0], a[1], 0xee), cd1 = _mm512_shuffle_i64x2(a[2], a[3], 0xee);
		r[4 * i] = _mm512_shuffle_i64x2(ab, cd, 0x88);
		r[4 * i + 1] = _mm512_shuffle_i64x2(ab, cd, 0xdd);
		r[4 * i + 2] = _mm512_shuffle_i64x2(ab1, cd1, 0x88);
		r[4 * i + 3] = _mm512_shuffle_i64x2(ab1, cd1, 0xdd);
	}
}

LOOP static inline void two_rows_avx512(V v, uint8_t *out, size_t stride) {
	v = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), v);
	_mm256_storeu_si256((__m256i *)out, _mm512_castsi512_si256(v));
	_mm256_storeu_si256((__m256i *)(out + stride), _mm512_extracti64x4_epi64(v, 1));
}

LOOP static inline void pixels_avx512(V r, V g, V b, uint8_t *out) {
	V rg = OP(unpacklo_epi8)(r, g), rg1 = OP(unpackhi_epi8)(r, g), bx = OP(unpacklo_epi8)(b, ZERO),
		bx1 = OP(unpackhi_epi8)(b, ZERO);
	V e = OP(unpacklo_epi16)(rg, bx), f = OP(unpackhi_epi16)(rg, bx), o = OP(unpacklo_epi16)(rg1, bx1),
		p = OP(unpackhi_epi16)(rg1, bx1);
	V a = OP(unpacklo_epi32)(e, o), c = OP(unpackhi_epi32)(e, o), d = OP(unpacklo_epi32)(f, p),
		h = OP(unpackhi_epi32)(f, p);
	V ac = _mm512_shuffle_i64x2(a, c, 0x44), dh = _mm512_shuffle_i64x2(d, h, 0x44);
	V ac1 = _mm512_shuffle_i64x2(a, c, 0xee), dh1 = _mm512_shuffle_i64x2(d, h, 0xee);
	STORE(out, _mm512_shuffle_i64x2(ac, dh, 0x88));
	STORE(out + 64, _mm512_shuffle_i64x2(ac, dh, 0xdd));
	STORE(out + 128, _mm512_shuffle_i64x2(ac1, dh1, 0x88));
	STORE(out + 192, _mm512_shuffle_i64x2(ac1, dh1, 0xdd));
}

#include "sjown_simd.h"

#define BEST(f) (sj_simd() > 1 ? f##_avx512 : f##_avx2)

#else

#define V int16x8_t
#define P int16x4x2_t
#define N 1
#define LOOP
#define NAME(f) f##_neon
#define OP(f) neon_##f
#define ZERO vdupq_n_s16(0)
#define LOAD(p) vreinterpretq_s16_u8(vld1q_u8((const uint8_t *)(p)))
#define STORE(p, v) vst1q_u8((uint8_t *)(p), (uint8x16_t)(v))
#define BOTH(a, b) vandq_s16(a, b)
#define IN_LANES(p) LOAD(p)
#define ANY(v, bits) 0 // the other rows make no difference: see HALVES
#define UP(p) (V)vmovl_u8(vld1_u8(p))
#define LO(a, b) (P){{vget_low_s16(a), vget_low_s16(b)}}
#define HI(a, b) (P){{vget_high_s16(a), vget_high_s16(b)}}
#define SECOND_UP_13(pair) (V)vshll_n_s16((pair).val[1], 13)
#define MUL(v, a, b) (V)vmlal_n_s16(vmull_n_s16((v).val[0], a), (v).val[1], b)
#define MADD(sum, v, a, b) (V)vmlal_n_s16(vmlal_n_s16((int32x4_t)(sum), (v).val[0], a), (v).val[1], b)
#define HALVES(a, b) vuzp1q_s16(a, b) // libjpeg-turbo's NEON code does not saturate here

// The rest are SSE's operations, by its names.
#define SAME(name, T, f) \
	static inline V neon_##name(V a, V b) { return (V)f((T)a, (T)b); }
SAME(add_epi8, int8x16_t, vaddq_s8)
SAME(add_epi16, V, vaddq_s16)
SAME(add_epi32, int32x4_t, vaddq_s32)
SAME(sub_epi16, V, vsubq_s16)
SAME(sub_epi32, int32x4_t, vsubq_s32)
SAME(mullo_epi16, V, vmulq_s16)
SAME(mulhrs_epi16, V, vqrdmulhq_s16)
SAME(unpacklo_epi8, int8x16_t, vzip1q_s8)
SAME(unpackhi_epi8, int8x16_t, vzip2q_s8)
SAME(unpacklo_epi16, V, vzip1q_s16)
SAME(unpackhi_epi16, V, vzip2q_s16)
SAME(unpacklo_epi32, int32x4_t, vzip1q_s32)
SAME(unpackhi_epi32, int32x4_t, vzip2q_s32)
SAME(unpacklo_epi64, int64x2_t, vzip1q_s64)
SAME(unpackhi_epi64, int64x2_t, vzip2q_s64)
static inline V neon_set1_epi8(char v) { return (V)vdupq_n_s8((signed char)v); }
static inline V neon_set1_epi16(short v) { return vdupq_n_s16(v); }
static inline V neon_set1_epi32(int v) { return (V)vdupq_n_s32(v); }
static inline V neon_srai_epi16(V v, int n) { return v >> n; }
static inline V neon_srai_epi32(V v, int n) { return (V)((int32x4_t)v >> n); }
static inline V neon_srli_epi16(V v, int n) { return (V)((uint16x8_t)v >> n); }
static inline V neon_packs_epi16(V a, V b) { return (V)vqmovn_high_s16(vqmovn_s16(a), b); }
static inline V neon_packus_epi16(V a, V b) { return (V)vqmovun_high_s16(vqmovun_s16(a), b); }
static inline V neon_shuffle_epi8(V v, V at) { return (V)vqtbl1q_u8((uint8x16_t)v, (uint8x16_t)at); }

static inline void rows_neon(const int16_t *b, const int16_t *quant, V r[8]) {
	for (int i = 0; i < 8; i++) r[i] = vmulq_s16(LOAD(b + 8 * i), LOAD(quant + 8 * i));
}

static inline void two_rows_neon(V v, uint8_t *out, size_t stride) {
	vst1_u8(out, vget_low_u8((uint8x16_t)v));
	vst1_u8(out + stride, vget_high_u8((uint8x16_t)v));
}

static inline void pixels_neon(V r, V g, V b, uint8_t *out) {
	const uint8x16_t order = vld1q_u8(merged);
	uint8x16x4_t v = {{vqtbl1q_u8((uint8x16_t)r, order), vqtbl1q_u8((uint8x16_t)g, order),
		vqtbl1q_u8((uint8x16_t)b, order), vdupq_n_u8(0)}};
	vst4q_u8(out, v);
}

#include "sjown_simd.h"

#define BEST(f) f##_neon

#endif

int sj_own_usual(j_decompress_ptr d, sj_recoded *from) {
	jpeg_component_info *c = d->comp_info;
	if (!sj_simd() || d->num_components != 3 || from->j.comps != 3 || d->jpeg_color_space != JCS_YCbCr) return 0;
	for (int i = 0; i < 3; i++) {
		if (i && (c[i].h_samp_factor != 1 || c[i].v_samp_factor != 1)) return 0;
		if (c[i].quant_tbl_no < 0 || c[i].quant_tbl_no >= NUM_QUANT_TBLS ||
			!d->quant_tbl_ptrs[c[i].quant_tbl_no]) return 0;
		if (c[i].width_in_blocks < 4 || from->j.comp[i].blocks_w < (int)c[i].width_in_blocks) return 0;
		if (from->j.comp[i].v != c[i].v_samp_factor ||
			from->j.comp[i].blocks_h < (int)c[i].height_in_blocks) return 0;
	}
	return (c->h_samp_factor == 1 || c->h_samp_factor == 2) &&
		(c->v_samp_factor == 1 || (c->v_samp_factor == 2 && c->h_samp_factor == 2));
}

int sj_own_open(sj_own *o, j_decompress_ptr d, sj_recoded *from, int x0, int x1, int y0, int y1) {
	o->from = from;
	o->half_w = d->comp_info->h_samp_factor - 1;
	o->half_h = d->comp_info->v_samp_factor - 1;
	o->x0 = x0 & ~1; // chroma goes in pairs
	o->width = x1 - o->x0;
	o->y = y0;
	size_t need = 0, at[3], blocks = 0;
	for (int i = 0; i < 3; i++) {
		component *c = &o->c[i];
		int hw = i ? o->half_w : 0, hh = i ? o->half_h : 0, wide = (int)d->comp_info[i].width_in_blocks;
		c->blocks_w = from->j.comp[i].blocks_w;
		c->band_blocks = sj_rows(from, i);
		c->w = ((int)d->image_width + hw) >> hw;
		c->h = ((int)d->image_height + hh) >> hh;
		c->need0 = (y0 >> hh) - hh;
		c->need1 = ((y1 - 1) >> hh) + hh + 1;
		if (c->need0 < 0) c->need0 = 0;
		if (c->need1 > c->h) c->need1 = c->h;
		c->from = (x0 >> hw) - hw < 0 ? 0 : ((x0 >> hw) - hw) / 8;
		c->to = ((x1 - 1) >> hw) + hw >= c->w ? wide : (((x1 - 1) >> hw) + hw) / 8 + 1;
		if (c->to < c->from + 4) c->to = c->from + 4; // whole vectors
		if (c->to > wide) c->to = wide;
		if (c->from > c->to - 4) c->from = c->to - 4;
		c->ring = 16 * c->band_blocks;
		c->stride = (size_t)(EDGE + (c->to - c->from) * 8 + BESIDE);
		for (int k = 0; k < 64; k++) c->quant[k] =
			(int16_t)d->quant_tbl_ptrs[d->comp_info[i].quant_tbl_no]->quantval[k];
		at[i] = need;
		need += (c->stride * (size_t)c->ring + 63) / 64 * 64;
		size_t b = (size_t)c->blocks_w * (size_t)c->band_blocks;
		if (b > blocks) blocks = b;
	}
	size_t had = o->mem.cap;
	if (!sj_reserve(&o->mem, need + blocks * 129 + 128)) return SJ_MEMORY;
	if (o->mem.cap != had) memset(o->mem.p, 0, o->mem.cap);
	uint8_t *mem = sj_aligned(o->mem.p);
	o->blocks = (int16_t *)(mem + need);
	o->last = (uint8_t *)(o->blocks + 64 * blocks);
	for (int i = 0; i < 3; i++) o->plane[i] = mem + at[i] + EDGE;
	o->band = o->c[0].need0 / (8 * o->c[0].band_blocks);
	int chroma = o->c[1].need0 / (8 * o->c[1].band_blocks);
	if (chroma < o->band) o->band = chroma;
	o->ready = o->band * 8 * o->c[0].band_blocks;
	int end = (o->c[0].need1 - 1) / (8 * o->c[0].band_blocks), end1 = (o->c[1].need1 - 1) / (8 * o->c[1].band_blocks);
	return sj_recoded_lanes(from, o->band, (end1 > end ? end1 : end) + 1);
}

static uint8_t *sample(const sj_own *o, int i, int x, int y) {
	const component *c = &o->c[i];
	return o->plane[i] + (size_t)(y % c->ring) * c->stride + (ptrdiff_t)x - 8 * (ptrdiff_t)c->from;
}

// next transforms the next band.
static int next(sj_own *o) {
	for (int i = 0; i < 3; i++) {
		const component *c = &o->c[i];
		int y = o->band * 8 * c->band_blocks, end = y + 8 * c->band_blocks;
		const int16_t *b = o->blocks;
		const uint8_t *last = o->last;
		if (end <= c->need0 || y >= c->need1) continue;
		int code = sj_recoded_band(o->from, i, o->band, o->blocks, o->last);
		if (code != SJ_OK) return code;
		for (; y < end && y < c->need1; y += 8, b += 64 * c->blocks_w, last += c->blocks_w) {
			if (y + 8 <= c->need0) continue;
			uint8_t *out = sample(o, i, 8 * c->from, y);
			BEST(blocks)(b + 64 * c->from, last + c->from, c->quant, c->to - c->from, out, c->stride);
			for (int k = 0; i && k < 8; k++, out += c->stride) {
				if (c->from == 0) out[-1] = out[0];
				if (8 * c->to >= c->w) out[c->w - 8 * c->from] = out[c->w - 1 - 8 * c->from];
			}
		}
	}
	o->band++;
	o->ready += 8 * o->c[0].band_blocks;
	return SJ_OK;
}

int sj_own_rows(sj_own *o, uint8_t *const *rows, int n, size_t plane) {
	for (int i = 0; i < n; i++, o->y++) {
		int y = o->y, h = o->c[1].h, near = y >> o->half_h, far = near;
		if (o->half_h) far += y & 1 ? 1 : -1;
		far = far < 0 ? 0 : far >= h ? h - 1 : far;
		while (y >= o->ready || (far + 1) << o->half_h > o->ready) {
			int code = o->band < o->from->bands ? next(o) : SJ_CORRUPT;
			if (code != SJ_OK) return code;
		}
		const uint8_t *c[4];
		for (int k = 0; k < 4; k++) c[k] = sample(o, 1 + k / 2, o->x0 >> o->half_w, k % 2 ? far : near);
		BEST(line)(sample(o, 0, o->x0, y), c, o->half_w, o->half_h, o->width, rows[i], plane);
	}
	return SJ_OK;
}

#else

sj_own *sj_own_new(void) { return calloc(1, 1); }
void sj_own_free(sj_own *o) { free(o); }
size_t sj_own_bytes(const sj_own *o) { (void)o; return 0; }
int sj_own_usual(j_decompress_ptr d, sj_recoded *from) { (void)d; (void)from; return 0; }
int sj_own_open(sj_own *o, j_decompress_ptr d, sj_recoded *from, int x0, int x1, int y0, int y1) {
	(void)o; (void)d; (void)from; (void)x0; (void)x1; (void)y0; (void)y1;
	return SJ_CORRUPT;
}
int sj_own_rows(sj_own *o, uint8_t *const *rows, int n, size_t plane) {
	(void)o; (void)rows; (void)n; (void)plane; return SJ_CORRUPT; }

#endif
