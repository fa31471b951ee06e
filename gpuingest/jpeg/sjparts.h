// What sjrecode.c (reading) and sjcoder.c (making) share of the container.
#ifndef SJPARTS_H
#define SJPARTS_H

#include "sjrecode.h"

enum {
	SJ_CODE_BITS = 12, // of the longest code
	SJ_CHOICES = 8,    // tables of a kind
	SJ_TABLES = SJ_KINDS * SJ_CHOICES,
	SJ_HEADER = 32,
	// The lanes of a part: DC and flags; then MASK0 to MASK3 of plain blocks, and of rich ones; then LOW and HIGH of
	// plain blocks, and of rich ones. A block is rich if its flag says so: see sj_rich.
	SJ_LANES = 14,
	SJ_MASKS = 2,   // the first lane of masks
	SJ_VALUES = 10, // the first lane of values
	SJ_SLACK = 64,  // bytes behind a lane that decoding and expansion may touch
	SJ_DHT = 432    // bytes of the standard Huffman tables as DHT segments; the first half are those of a grey picture
};

extern const uint8_t sj_magic[8], sj_dht[SJ_DHT];
extern const uint8_t sj_natural[64]; // the position in a block, by rows, of each place in zigzag order

static inline int sj_rich(unsigned flag) { return flag > 15; }

static inline int sj_kind(int lane) {
	if (lane < SJ_MASKS) return lane;
	return lane < SJ_VALUES ? SJ_MASK0 + ((lane - SJ_MASKS) & 3) : SJ_LOW + (lane & 1);
}

// The symbol of a kind that stands for an escape; -1: none. A mask byte that is there is never 0.
static inline int sj_escape(int kind) { return kind == SJ_FLAG ? -1 : kind >= SJ_MASK0 && kind <= SJ_MASK3 ? 0 : 0x80; }

static inline uint32_t sj_get32(const uint8_t *p) { return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
	(uint32_t)p[3] << 24; }
static inline int16_t sj_get16(const uint8_t *p) { return (int16_t)(p[0] | p[1] << 8); }

typedef uint16_t sj_costs __attribute__((vector_size(2 * SJ_CHOICES)));

struct sj_tables {
	// Up to 3 symbols a look-up: they are in the low bytes, their bits in 24..29, their count in 30 and 31.
	uint32_t look[SJ_TABLES][1 << SJ_CODE_BITS];
	uint32_t code[SJ_TABLES][256]; // first bit lowest; the length in the upper half. 0: has none, or is the escape
	uint32_t escape[SJ_TABLES];    // the same of the escape
	// How many bits a symbol takes in each table of a kind, its escape included.
	sj_costs cost[SJ_KINDS][256];
	// For each byte of a mask: which of the values that follow each other goes where (0x80: none), and how many there
	// are.
	uint64_t places[256];
	uint8_t ones[256];
};

// The lanes of one band: part band * groups + group; group 1 holds the second and the third component.
typedef struct sj_part {
	uint32_t off[SJ_LANES], len[SJ_LANES]; // in the container
	uint8_t choice[SJ_LANES];
	uint32_t escapes, escapes_end; // bytes in the container
	uint32_t blocks[2];            // of its components
	// After the entropy stage:
	uint8_t *lane[SJ_LANES];
	uint32_t n[2][SJ_LANES];      // symbols of each component: one follows the other
	uint32_t escape[2][SJ_LANES]; // where the escapes begin
} sj_part;

void sj_set_geometry(sj_recoded *r); // from j
int sj_band_rows(const sj_recoded *r, int comp, int band);

// A component's streams while it is expanded.
typedef struct {
	const uint8_t *lane[SJ_LANES], *escape[SJ_LANES], *escapes_end;
} sj_streams;

sj_streams sj_begin(const sj_recoded *r, int comp, int band);

static inline int sj_next(sj_streams *s, int lane) {
	int v = (int8_t)*s->lane[lane]++;
	if (v != -128 || s->escape[lane] >= s->escapes_end) return v;
	v = sj_get16(s->escape[lane]);
	s->escape[lane] += 2;
	return v;
}

// A DC is predicted from the blocks to the left and above, in the band: they are left and above int16 before it.
static inline int sj_predict(const int16_t *dc, int x, int y, ptrdiff_t left, ptrdiff_t above) {
	if (y == 0) return x ? dc[-left] : 0;
	int t = dc[-above];
	if (x == 0) return t;
	int l = dc[-left], g = l + t - dc[-above - left], lo = l < t ? l : t, hi = l < t ? t : l;
	return g < lo ? lo : g > hi ? hi : g;
}

static inline uint64_t sj_next_mask(sj_streams *s, int *rich) {
	unsigned f = *s->lane[1]++;
	const uint8_t **lane = &s->lane[SJ_MASKS + 4 * (*rich = sj_rich(f))];
	uint64_t m = 0;
	for (int b = 0; b < 8; b++) {
		unsigned there = f >> b & 1;
		const uint8_t **p = &lane[b < 3 ? b : 3];
		m |= (uint64_t)(**p & (0u - there)) << 8 * b;
		*p += there;
	}
	return m;
}

#endif
