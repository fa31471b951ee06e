// Each function follows Pillow's arithmetic step by step, types included: it decides the last bit. Compiled without
// contraction (-std=c11), since a fused multiply-add would change last bits.

#include "kernels.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#include <immintrin.h>
#endif

static int simd_on;

int sp_set_simd(int on) {
#ifdef HAVE_X86
	simd_on = on && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
	(void)on;
#endif
	return simd_on;
}

// FAST defines the function name by its inline body name_body, compiled twice on x86-64: the compiler vectorises the
// same arithmetic for AVX2 where the CPU has it. (AVX2 alone fuses nothing.)
#define INLINE static inline __attribute__((always_inline))
#ifdef HAVE_X86
#define FAST(name, params, args)                                                             \
	__attribute__((target("avx2"))) static void name##_avx2 params { name##_body args; }      \
	void name params {                                                                       \
		if (simd_on) name##_avx2 args;                                \
		else name##_body args;                                                               \
	}
#else
#define FAST(name, params, args) \
	void name params { name##_body args; }
#endif

// A chunk of pixels as three planes, for loops that are to be vectorised.
enum { CHUNK = 64 };
typedef struct {
	int32_t r[CHUNK], g[CHUNK], b[CHUNK];
} chunk;

INLINE void split(chunk *c, const uint8_t *p, int n) {
	for (int i = 0; i < n; i++) {
		c->r[i] = p[3 * i];
		c->g[i] = p[3 * i + 1];
		c->b[i] = p[3 * i + 2];
	}
}

INLINE void join(uint8_t *p, const chunk *c, int n) {
	for (int i = 0; i < n; i++) {
		p[3 * i] = (uint8_t)c->r[i];
		p[3 * i + 1] = (uint8_t)c->g[i];
		p[3 * i + 2] = (uint8_t)c->b[i];
	}
}

static inline uint8_t luma(const uint8_t *p) {
	return (uint8_t)((p[0] * 19595u + p[1] * 38470u + p[2] * 7471u + 0x8000u) >> 16);
}

// A blend truncates. Between 0 and 1 it cannot leave the range, beyond it is clipped; clipping serves both.
INLINE int blend(int a, int b, float alpha) {
	float v = (float)a + alpha * (float)(b - a);
	v = v < 0 ? 0 : v;
	v = v > 255 ? 255 : v;
	return (int)v;
}

void sp_lookup(uint8_t *p, size_t pixels, const uint8_t *t) {
	for (size_t i = 0; i < pixels; i++, p += 3) {
		p[0] = t[p[0]];
		p[1] = t[256 + p[1]];
		p[2] = t[512 + p[2]];
	}
}

void sp_histogram(const uint8_t *p, size_t pixels, uint32_t *counts) {
	memset(counts, 0, 768 * sizeof *counts);
	for (size_t i = 0; i < pixels; i++, p += 3) {
		counts[p[0]]++;
		counts[256 + p[1]]++;
		counts[512 + p[2]]++;
	}
}

uint64_t sp_luma_sum(const uint8_t *p, size_t pixels) {
	uint64_t sum = 0;
	for (size_t i = 0; i < pixels; i++, p += 3) sum += luma(p);
	return sum;
}

void sp_grey(uint8_t *p, size_t pixels) {
	for (size_t i = 0; i < pixels; i++, p += 3) p[0] = p[1] = p[2] = luma(p);
}

INLINE void sp_saturate_body(uint8_t *p, size_t pixels, float alpha) {
	chunk c = {0};
	for (size_t at = 0; at < pixels; at += CHUNK, p += 3 * CHUNK) {
		int n = pixels - at < CHUNK ? (int)(pixels - at) : CHUNK;
		split(&c, p, n);
		for (int i = 0; i < CHUNK; i++) {
			int l = (c.r[i] * 19595 + c.g[i] * 38470 + c.b[i] * 7471 + 0x8000) >> 16;
			c.r[i] = blend(l, c.r[i], alpha);
			c.g[i] = blend(l, c.g[i], alpha);
			c.b[i] = blend(l, c.b[i], alpha);
		}
		join(p, &c, n);
	}
}
FAST(sp_saturate, (uint8_t *p, size_t pixels, float alpha), (p, pixels, alpha))

static inline int clip(int v) { return v < 0 ? 0 : v > 255 ? 255 : v; }

// round_half_away is round() for the non-negative values at hand, without the call.
static inline int round_half_away(double v) {
	int i = (int)v;
	return i + (v - i >= 0.5);
}

void sp_hue(uint8_t *p, size_t pixels, uint8_t shift) {
	// A sector and its fraction follow from the hue alone.
	uint8_t sector[256];
	float fraction[256];
	for (int h = 0; h < 256; h++) {
		int i = (int)floor((float)h * 6.0 / 255.0);
		fraction[h] = (float)((float)h * 6.0 / 255.0 - (float)i);
		sector[h] = (uint8_t)(i % 6);
	}
	for (size_t n = 0; n < pixels; n++, p += 3) {
		int r = p[0], g = p[1], b = p[2];
		int max = r > g ? r : g, min = r < g ? r : g;
		if (b > max) max = b;
		if (b < min) min = b;
		uint8_t hue = 0, sat = 0;
		if (max != min) {
			float cr = (float)(max - min), s = cr / (float)max, h;
			float rc = (float)(max - r) / cr, gc = (float)(max - g) / cr, bc = (float)(max - b) / cr;
			if (r == max) {
				h = bc - gc;
			} else if (g == max) {
				h = (float)(2.0 + rc - bc);
			} else {
				h = (float)(4.0 + gc - rc);
			}
			double turn = h / 6.0 + 1.0; // fmod(turn, 1), exactly: turn lies in [0, 2)
			h = (float)(turn >= 1.0 ? turn - 1.0 : turn);
			hue = (uint8_t)clip((int)(h * 255.0));
			sat = (uint8_t)clip((int)(s * 255.0));
		}
		hue = (uint8_t)(hue + shift);
		if (sat == 0) {
			p[0] = p[1] = p[2] = (uint8_t)max;
			continue;
		}
		float f = fraction[hue], fs = (float)((float)sat / 255.0), v = (float)max;
		uint8_t a = (uint8_t)clip(round_half_away(v * (1.0 - fs)));
		uint8_t q = (uint8_t)clip(round_half_away(v * (1.0 - fs * f)));
		uint8_t t = (uint8_t)clip(round_half_away(v * (1.0 - fs * (1.0 - f))));
		uint8_t m = (uint8_t)max;
		switch (sector[hue]) {
		case 0: p[0] = m; p[1] = t; p[2] = a; break;
		case 1: p[0] = q; p[1] = m; p[2] = a; break;
		case 2: p[0] = a; p[1] = m; p[2] = t; break;
		case 3: p[0] = a; p[1] = q; p[2] = m; break;
		case 4: p[0] = t; p[1] = a; p[2] = m; break;
		case 5: p[0] = m; p[1] = a; p[2] = q; break;
		}
	}
}

INLINE void sp_sharpen_body(uint8_t *restrict dst, const uint8_t *restrict src, int w, int h, float alpha,
	uint8_t *restrict row) {
	const float k1 = 1.0f / 13, k5 = 5.0f / 13; // ImageFilter.SMOOTH
	size_t n = (size_t)w * 3;
	for (int y = 0; y < h; y++) {
		const uint8_t *p = src + (size_t)y * n;
		memcpy(row, p, n); // the outermost pixels stay as they are
		if (y > 0 && y < h - 1) {
			const uint8_t *above = p - n, *below = p + n;
			for (size_t i = 3; i + 3 < n; i++) {
				float v = 0.5f;
				v += (float)below[i - 3] * k1 + (float)below[i] * k1 + (float)below[i + 3] * k1;
				v += (float)p[i - 3] * k1 + (float)p[i] * k5 + (float)p[i + 3] * k1;
				v += (float)above[i - 3] * k1 + (float)above[i] * k1 + (float)above[i + 3] * k1;
				row[i] = (uint8_t)(int)(v > 255 ? 255 : v);
			}
		}
		uint8_t *o = dst + (size_t)y * n;
		for (size_t i = 0; i < n; i++) o[i] = (uint8_t)blend(row[i], p[i], alpha);
	}
}
FAST(sp_sharpen, (uint8_t *dst, const uint8_t *src, int w, int h, float alpha, uint8_t *row),
	(dst, src, w, h, alpha, row))

// fits tells whether a corner of the result lies where 16.16 fixed point can say it.
static int fits(const double *m, int x, int y) {
	return fabs(x * m[0] + y * m[1] + m[2]) < 32768 && fabs(x * m[3] + y * m[4] + m[5]) < 32768;
}

static void nearest(uint8_t *dst, int dw, int dh, const uint8_t *src, int sw, int sh, const double *m) {
	if (m[1] == 0 && m[3] == 0) { // each axis for itself, in running sums
		double yo = m[5] + m[4] * 0.5;
		for (int y = 0; y < dh; y++, yo += m[4]) {
			if (!(yo >= 0 && yo < sh)) continue;
			double xo = m[2] + m[0] * 0.5;
			uint8_t *o = dst + (size_t)y * dw * 3;
			for (int x = 0; x < dw; x++, xo += m[0], o += 3) {
				if (xo >= 0 && xo < sw) memcpy(o, src + ((size_t)(int)yo * sw + (int)xo) * 3, 3);
			}
		}
		return;
	}
	if (fits(m, 0, 0) && fits(m, dw, dh) && fits(m, 0, dh) && fits(m, dw, 0)) {
#define FIX(v) ((int64_t)floor((v) * 65536.0 + 0.5))
		int64_t a0 = FIX(m[0]), a1 = FIX(m[1]), a3 = FIX(m[3]), a4 = FIX(m[4]);
		int64_t a2 = FIX(m[2] + m[0] * 0.5 + m[1] * 0.5), a5 = FIX(m[5] + m[3] * 0.5 + m[4] * 0.5);
#undef FIX
		for (int y = 0; y < dh; y++, a2 += a1, a5 += a4) {
			int64_t xx = a2, yy = a5;
			uint8_t *o = dst + (size_t)y * dw * 3;
			for (int x = 0; x < dw; x++, xx += a0, yy += a3, o += 3) {
				int64_t xi = xx >> 16, yi = yy >> 16;
				if (xi >= 0 && xi < sw && yi >= 0 && yi < sh) memcpy(o, src + ((size_t)yi * sw + xi) * 3, 3);
			}
		}
		return;
	}
	double xo = m[2] + m[1] * 0.5 + m[0] * 0.5, yo = m[5] + m[4] * 0.5 + m[3] * 0.5;
	for (int y = 0; y < dh; y++, xo += m[1], yo += m[4]) {
		double xx = xo, yy = yo;
		uint8_t *o = dst + (size_t)y * dw * 3;
		for (int x = 0; x < dw; x++, xx += m[0], yy += m[3], o += 3) {
			if (!(xx >= 0 && xx < sw && yy >= 0 && yy < sh)) continue;
			memcpy(o, src + ((size_t)(int)yy * sw + (int)xx) * 3, 3);
		}
	}
}

static inline int within(int v, int n) { return v < 0 ? 0 : v < n ? v : n - 1; }

static double cubic(double v1, double v2, double v3, double v4, double d) {
	double p1 = v2, p2 = -v1 + v3, p3 = 2 * (v1 - v2) + v3 - v4, p4 = -v1 + v2 - v3 + v4;
	return p1 + d * (p2 + d * (p3 + d * p4));
}

static inline uint8_t byte(double v) { return v <= 0 ? 0 : v >= 255 ? 255 : (uint8_t)v; }

// near holds the samples about a point: columns[1] and rows[1] are left of and above it. What lies outside repeats the
// nearest column, or the row before.
typedef struct {
	int columns[4];
	const uint8_t *rows[4];
	double dx, dy;
} near;

// locate finds the samples about where m leads from pixel (x, y) of the result; 0 if that is outside.
INLINE int locate(near *s, int x, int y, const uint8_t *src, int sw, int sh, const double *m) {
	double cx = x + 0.5, cy = y + 0.5;
	double xin = m[0] * cx + m[1] * cy + m[2], yin = m[3] * cx + m[4] * cy + m[5];
	if (!(xin >= 0 && xin < sw && yin >= 0 && yin < sh)) return 0;
	xin -= 0.5;
	yin -= 0.5;
	int x0 = (int)xin - (xin < 0), y0 = (int)yin - (yin < 0); // floor of numbers from -0.5 on
	s->dx = xin - x0;
	s->dy = yin - y0;
	for (int i = 0; i < 4; i++) {
		int r = y0 - 1 + i;
		s->columns[i] = within(x0 - 1 + i, sw) * 3;
		s->rows[i] = src + (size_t)within(r, sh) * 3 * (size_t)sw;
	}
	return 1;
}

static void smooth(uint8_t *dst, int dw, int dh, const uint8_t *src, int sw, int sh, const double *m, int filter) {
	near s;
	for (int y = 0; y < dh; y++) {
		for (int x = 0; x < dw; x++, dst += 3) {
			if (!locate(&s, x, y, src, sw, sh, m)) continue;
			for (int c = 0; c < 3; c++) {
				double v[4];
				if (filter == SP_BILINEAR) {
					for (int i = 1; i < 3; i++) {
						const uint8_t *p = s.rows[i] + c;
						v[i] = p[s.columns[1]] + (p[s.columns[2]] - p[s.columns[1]]) * s.dx;
					}
					dst[c] = (uint8_t)(v[1] + (v[2] - v[1]) * s.dy);
					continue;
				}
				for (int i = 0; i < 4; i++) {
					const uint8_t *p = s.rows[i] + c;
					v[i] = cubic(p[s.columns[0]], p[s.columns[1]], p[s.columns[2]], p[s.columns[3]], s.dx);
				}
				dst[c] = byte(cubic(v[0], v[1], v[2], v[3], s.dy));
			}
		}
	}
}

#ifdef HAVE_X86
// The same with the three channels side by side in doubles.

__attribute__((target("avx2"))) static inline __m256d pixel(const uint8_t *p, const uint8_t *last) {
	uint32_t v = 0;
	if (p == last) {
		memcpy(&v, p, 3);
	} else {
		memcpy(&v, p, 4); // the fourth lane is idle
	}
	return _mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_cvtsi32_si128((int)v)));
}

__attribute__((target("avx2"))) static inline __m256d cubics(__m256d v1, __m256d v2, __m256d v3, __m256d v4,
	__m256d d) {
	__m256d diff = _mm256_sub_pd(v1, v2), p2 = _mm256_sub_pd(v3, v1);
	__m256d p3 = _mm256_sub_pd(_mm256_add_pd(_mm256_add_pd(diff, diff), v3), v4);
	__m256d p4 = _mm256_add_pd(_mm256_sub_pd(_mm256_sub_pd(v2, v1), v3), v4);
	return _mm256_add_pd(v2,
		_mm256_mul_pd(d, _mm256_add_pd(p2, _mm256_mul_pd(d, _mm256_add_pd(p3, _mm256_mul_pd(d, p4))))));
}

__attribute__((target("avx2"))) static inline __m256d lines(__m256d a, __m256d b, __m256d d) {
	return _mm256_add_pd(a, _mm256_mul_pd(_mm256_sub_pd(b, a), d));
}

__attribute__((target("avx2"))) static void smooth_avx2(uint8_t *dst, int dw, int dh, const uint8_t *src, int sw,
	int sh, const double *m, int filter) {
	const uint8_t *last = src + ((size_t)sw * sh - 1) * 3;
	near s;
	for (int y = 0; y < dh; y++) {
		for (int x = 0; x < dw; x++, dst += 3) {
			if (!locate(&s, x, y, src, sw, sh, m)) continue;
			__m256d dx = _mm256_set1_pd(s.dx), dy = _mm256_set1_pd(s.dy), v[4];
			if (filter == SP_BILINEAR) {
				for (int i = 1; i < 3; i++) v[i] = lines(pixel(s.rows[i] + s.columns[1], last),
					pixel(s.rows[i] + s.columns[2], last), dx);
				v[0] = lines(v[1], v[2], dy);
			} else {
				for (int i = 0; i < 4; i++) {
					const uint8_t *p = s.rows[i];
					v[i] = cubics(pixel(p + s.columns[0], last), pixel(p + s.columns[1], last),
						pixel(p + s.columns[2], last), pixel(p + s.columns[3], last), dx);
				}
				v[0] = cubics(v[0], v[1], v[2], v[3], dy);
			}
			__m128i n = _mm256_cvttpd_epi32(v[0]);
			n = _mm_packus_epi32(n, n);
			int out = _mm_cvtsi128_si32(_mm_packus_epi16(n, n));
			memcpy(dst, &out, 3);
		}
	}
}
#endif

void sp_affine(uint8_t *dst, int dw, int dh, const uint8_t *src, int sw, int sh, const double *m, int filter) {
	if (filter == SP_NEAREST) nearest(dst, dw, dh, src, sw, sh, m);
#ifdef HAVE_X86
	else if (simd_on) smooth_avx2(dst, dw, dh, src, sw, sh, m, filter);
#endif
	else smooth(dst, dw, dh, src, sw, sh, m, filter);
}

static inline int reflect(int i, int n) {
	if (i < 0) i = -i;
	return i < n ? i : 2 * (n - 1) - i;
}

INLINE void sp_blur_body(uint8_t *restrict dst, const uint8_t *restrict src, int w, int h, const float *kx, int nx,
	const float *ky, int ny, float *restrict tmp, float *restrict line) {
	size_t n = (size_t)w * 3;
	int rx = nx / 2, ry = ny / 2;
	for (int y = 0; y < h; y++) {
		const uint8_t *p = src + (size_t)y * n;
		for (int x = -rx; x < w + rx; x++) {
			for (int c = 0; c < 3; c++) line[3 * (x + rx) + c] = p[3 * reflect(x, w) + c];
		}
		float *o = tmp + (size_t)y * n;
		memset(o, 0, n * sizeof *o);
		for (int k = 0; k < nx; k++) {
			const float *l = line + 3 * k;
			float f = kx[k];
			for (size_t i = 0; i < n; i++) o[i] += l[i] * f;
		}
	}
	for (int y = 0; y < h; y++) {
		memset(line, 0, n * sizeof *line);
		for (int k = 0; k < ny; k++) {
			const float *l = tmp + (size_t)reflect(y + k - ry, h) * n;
			float f = ky[k];
			for (size_t i = 0; i < n; i++) line[i] += l[i] * f;
		}
		uint8_t *o = dst + (size_t)y * n;
		for (size_t i = 0; i < n; i++) {
			float v = rintf(line[i]); // halves to even, as torch.round
			o[i] = (uint8_t)(int)(v > 255 ? 255 : v);
		}
	}
}
FAST(sp_blur, (uint8_t *dst, const uint8_t *src, int w, int h, const float *kx, int nx, const float *ky, int ny,
	float *tmp, float *line),
     (dst, src, w, h, kx, nx, ky, ny, tmp, line))

INLINE void sp_mix_body(uint8_t *restrict a, const uint8_t *restrict b, size_t n, uint32_t ka) {
	uint32_t kb = 65536 - ka;
	for (size_t i = 0; i < n; i++) a[i] = (uint8_t)((a[i] * ka + b[i] * kb + 32768) >> 16);
}
FAST(sp_mix, (uint8_t *a, const uint8_t *b, size_t n, uint32_t ka), (a, b, n, ka))

void sp_mix_f32(float *restrict a, const float *restrict b, size_t n, float wa) {
	float wb = 1 - wa;
	for (size_t i = 0; i < n; i++) a[i] = a[i] * wa + b[i] * wb;
}

static inline float widen_bf16(uint16_t v) {
	uint32_t u = (uint32_t)v << 16;
	float f;
	memcpy(&f, &u, 4);
	return f;
}

void sp_mix_bf16(uint16_t *restrict a, const uint16_t *restrict b, size_t n, float wa) {
	float wb = 1 - wa;
	for (size_t i = 0; i < n; i++) {
		float f = widen_bf16(a[i]) * wa + widen_bf16(b[i]) * wb;
		uint32_t u;
		memcpy(&u, &f, 4);
		a[i] = (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16); // halves to even; values are finite
	}
}

static float widen_f16(uint16_t v) {
	int exp = v >> 10 & 31, frac = v & 1023;
	float f = exp == 31 ? (frac ? NAN : INFINITY) : exp ? ldexpf((float)(1024 + frac), exp - 25) :
		ldexpf((float)frac, -24);
	return v & 0x8000 ? -f : f;
}

static uint16_t narrow_f16(float f) {
	uint32_t u;
	memcpy(&u, &f, 4);
	uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
	u &= 0x7fffffff;
	if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (u >> 13 & 0x3ff)); // NaN
	if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);                    // rounds to infinity
	if (u < 0x38800000) {                                                     // subnormal: fixed point of 2^-24
		float t;
		memcpy(&t, &u, 4);
		return (uint16_t)(sign | (uint16_t)rintf(t * 16777216.0f));
	}
	u += 0xfff + (u >> 13 & 1);
	return (uint16_t)(sign | (uint16_t)((u - 0x38000000) >> 13));
}

#ifdef HAVE_X86
__attribute__((target("avx,f16c"))) static size_t mix_f16c(uint16_t *a, const uint16_t *b, size_t n, float wa) {
	const __m256 x = _mm256_set1_ps(wa), y = _mm256_set1_ps(1 - wa);
	size_t i = 0;
	for (; i + 8 <= n; i += 8) {
		__m256 p = _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(a + i))), x);
		__m256 q = _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(b + i))), y);
		_mm_storeu_si128((__m128i *)(a + i), _mm256_cvtps_ph(_mm256_add_ps(p, q), _MM_FROUND_TO_NEAREST_INT));
	}
	return i;
}
#endif

void sp_mix_f16(uint16_t *a, const uint16_t *b, size_t n, float wa) {
	float wb = 1 - wa;
	size_t i = 0;
#ifdef HAVE_X86
	if (simd_on) i = mix_f16c(a, b, n, wa);
#endif
	for (; i < n; i++) a[i] = narrow_f16(widen_f16(a[i]) * wa + widen_f16(b[i]) * wb);
}
