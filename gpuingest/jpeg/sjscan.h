// JPEG files as markers and scans: what sjrecode.c needs to take a file apart and to put it together again.
#ifndef SJSCAN_H
#define SJSCAN_H

#include <string.h>

#include "shoaljpeg.h"

// A Huffman table as DHT gives it.
typedef struct {
	int there;
	uint8_t bits[17], vals[256];
} sj_huff;

typedef struct {
	int w, h, comps, progressive;
	int restart; // MCUs between restart markers
	int mcus_w, mcus_h, hmax, vmax;
	struct {
		int id, h, v, tq;
		int blocks_w, blocks_h; // whole MCUs
		int real_w, real_h;     // blocks that a scan of this component alone has
		size_t first;           // number of its first block
	} comp[3];
	size_t blocks; // of all components
	sj_huff dc[4], ac[4];
	unsigned quant;  // bits: tables that were there at the first scan
	int scans;       // seen so far
	size_t head_end; // behind the first scan's header
} sj_jpeg;

typedef struct {
	int n, comp[3], dc[3], ac[3];
	int ss, se, ah, al;
} sj_scan;

// The coefficients of a file. Sparse, for baseline: of each block the DC, a mask of the AC coefficients in zigzag order
// that are not zero, and where its values begin. Dense, for progressive files: 64 a block in zigzag order.
typedef struct {
	int16_t *dc;
	uint64_t *mask;
	uint32_t *at;
	int16_t *values;
	size_t used, cap; // of values
	int16_t *dense;   // NULL: not used
} sj_coefs;

enum { SJ_WALK_BAD = -1, SJ_WALK_END = 0, SJ_WALK_SCAN = 1 };

// sj_walk reads markers from *i on, up to and with a scan's header or the end marker.
int sj_walk(sj_jpeg *j, const uint8_t *p, size_t n, size_t *i, sj_scan *s);

// sj_read_scan reads the entropy-coded data at *i, which must end at a marker. clean is for its own use. 1, or 0 for
// damage or lack of memory.
int sj_read_scan(const sj_jpeg *j, const sj_scan *s, sj_coefs *c, const uint8_t *p, size_t n, size_t *i, sj_buf *clean);

// sj_write_scan is the inverse. It writes from out on, not beyond end. NULL: what is there does not fit, the scan's
// tables cannot say it, or memory lacks.
uint8_t *sj_write_scan(const sj_jpeg *j, const sj_scan *s, const sj_coefs *c, uint8_t *out, const uint8_t *end,
	sj_buf *clean);

#endif
