// The loops of package pillow, over packed RGB: 3 bytes a pixel, rows without gaps.
#ifndef SHOALPILLOW_H
#define SHOALPILLOW_H

#include <stddef.h>
#include <stdint.h>

enum { SP_BILINEAR = 0, SP_BICUBIC = 1, SP_NEAREST = 2 }; // as jpeg.Filter counts

// Chooses the loops: 1 for AVX2 where the CPU has it, 0 for the portable ones. Returns what is in force. Not safe
// beside running calls: the package chooses once at start, tests choose again.
int sp_set_simd(int on);

void sp_lookup(uint8_t *p, size_t pixels, const uint8_t *table /* 3 x 256 */);
void sp_histogram(const uint8_t *p, size_t pixels, uint32_t *counts /* 3 x 256 */);
uint64_t sp_luma_sum(const uint8_t *p, size_t pixels);
void sp_grey(uint8_t *p, size_t pixels);
// Blends from the grey picture (alpha 0) to p (alpha 1) and beyond.
void sp_saturate(uint8_t *p, size_t pixels, float alpha);
void sp_hue(uint8_t *p, size_t pixels, uint8_t shift);
// Blends from the smoothed picture to src. row has 3 * w bytes.
void sp_sharpen(uint8_t *dst, const uint8_t *src, int w, int h, float alpha, uint8_t *row);
// Where m leads out of src, dst is left as it is.
void sp_affine(uint8_t *dst, int dw, int dh, const uint8_t *src, int sw, int sh, const double *m, int filter);
// A separable blur of src with borders reflected; n is odd, n/2 less than each side. tmp has 3 * w * h floats.
void sp_blur(uint8_t *dst, const uint8_t *src, int w, int h, const float *kx, int nx, const float *ky, int ny,
	float *tmp, float *line);
// (a*ka + b*kb + 32768) >> 16 with ka + kb = 65536, into a.
void sp_mix(uint8_t *a, const uint8_t *b, size_t n, uint32_t ka);
// a*wa + b*(1-wa) in float32, into a; n counts elements.
void sp_mix_f32(float *a, const float *b, size_t n, float wa);
void sp_mix_f16(uint16_t *a, const uint16_t *b, size_t n, float wa);
void sp_mix_bf16(uint16_t *a, const uint16_t *b, size_t n, float wa);

#endif
