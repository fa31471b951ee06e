// The C half of package jpeg: region decode, Pillow's resize, flip, layout and type, in one call.
#ifndef SHOALJPEG_H
#define SHOALJPEG_H

#include <stddef.h>
#include <stdint.h>

// The vector loops of this build: those for x86-64, or NEON's.
#if defined(__x86_64__) && defined(__GNUC__)
#define SJ_X86 1
#elif defined(__aarch64__) && defined(__GNUC__)
#define SJ_NEON 1
#endif
#if defined(SJ_X86) || defined(SJ_NEON)
#define SJ_SIMD 1
#endif

// A growing buffer, zero at first. What was in it is lost when it grows.
typedef struct {
	void *p;
	size_t cap;
} sj_buf;
int sj_reserve(sj_buf *b, size_t n);
enum { SJ_GROWTH = 1 << 18 }; // the most that sj_reserve takes beyond n

// sj_aligned is the first address from p on for vectors: 63 bytes on at most.
static inline void *sj_aligned(void *p) { return (void *)(((uintptr_t)p + 63) & ~(uintptr_t)63); }

// Results of sj_decode, sj_resample and sj_encode; sj_message says more where libjpeg did.
enum {
	SJ_OK = 0,
	SJ_TRUNCATED = 1, // no end marker, or the data end before the picture does
	SJ_CORRUPT = 2,   // libjpeg gave up
	SJ_MEMORY = 3,    // malloc failed
	SJ_SIZE = 4,      // the header's size is not the one the request was made for
	SJ_SCANS = 5,     // more scans than SJ_MAX_SCANS
	SJ_COLOR = 6,     // neither 1, 3 nor 4 components
	SJ_RESTORE = 9    // of coefficients: only the original can be decoded
};

enum { SJ_MAX_SCANS = 500 };

enum { SJ_BILINEAR = 0, SJ_BICUBIC = 1, SJ_NEAREST = 2 };

// What to make of a picture. Crop (box), resize the crop to out_w x out_h, take the window
// (zero where it lies outside), flip, store.
typedef struct {
	int img_w, img_h;
	int box_x, box_y, box_w, box_h;
	int out_w, out_h;
	int win_x, win_y, win_w, win_h;
	int filter; // SJ_BILINEAR, SJ_BICUBIC, SJ_NEAREST
	int vertical_first; // Pillow 13's rule
	int dct;  // decode at 1/2, 1/4 or 1/8 where that is still as large as the output
	int flip; // left to right
	int turn; // top to bottom
	int planar; // 0: HWC, 1: CHW
	int planes; // what sj_resample reads: 0: packed RGB; 1: three planes, with slack behind them
	int elem;   // bytes of an element: 1 without table, else 1, 2 or 4
	long most;  // bytes for libjpeg; 0: no limit
} sj_request;

typedef struct sj_scratch sj_scratch;

// A scratch holds the buffers of one call at a time; they grow and are kept for the next call.
sj_scratch *sj_new(void);
void sj_free(sj_scratch *s);
sj_request *sj_req(sj_scratch *s);
size_t sj_bytes(const sj_scratch *s);
const char *sj_message(const sj_scratch *s);

// table is NULL or 3 x 256 elements. dst has win_w * win_h * 3 elements.
int sj_decode(sj_scratch *s, const uint8_t *src, size_t n, const uint8_t *table, uint8_t *dst);
// The same from a recoded file.
struct sj_tables;
int sj_decode_recoded(sj_scratch *s, const struct sj_tables *t, const uint8_t *src, size_t n, const uint8_t *table,
	uint8_t *dst);
// The same from a decoded picture of img_w x img_h.
int sj_resample(sj_scratch *s, const uint8_t *rgb, const uint8_t *table, uint8_t *dst);

typedef struct {
	int w, h;
	int components;     // 1 grey, 3 RGB stored as YCbCr, 4 CMYK
	int ycck;           // of 4 components: store YCCK
	int h_samp, v_samp; // of luma (and K of YCCK); chroma is 1 x 1
	int quality;
	int progressive;
	int optimize;
	int restart_rows; // MCU rows between restart markers, 0: none
} sj_encoding;

// The bytes stay in the scratch until its next sj_encode; sj_output gives them.
int sj_encode(sj_scratch *s, const sj_encoding *e, const uint8_t *pix);
const uint8_t *sj_output(const sj_scratch *s, size_t *n);

// Chooses the loops: 0 for the portable ones, 1 for AVX2 or NEON, 2 for AVX-512 with VBMI and VNNI, or the best that
// the CPU has, if that is less. Returns what is in force. Not safe beside running calls: the package chooses once at
// start, tests choose again.
int sj_set_simd(int most);
int sj_simd(void); // what is in force

int sj_trim(void); // gives free memory back to the kernel; whether there was some

#endif
