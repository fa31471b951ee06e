// Recoded JPEG in C: tables, container, entropy stage and expansion for the pixel path, recoding and restoring. The
// format is drawn in recode.go.
#ifndef SJRECODE_H
#define SJRECODE_H

#include "sjscan.h"

// Of sj_recode: keep the original, since it cannot be recoded, or since that would be no smaller.
enum { SJ_KEEP = 7, SJ_LARGER = 8 };

// The kinds of lanes: what they hold, and which tables they choose from. LOW are the values that belong to MASK0, HIGH
// those of the other masks.
enum { SJ_DC, SJ_FLAG, SJ_MASK0, SJ_MASK1, SJ_MASK2, SJ_MASK3, SJ_LOW, SJ_HIGH, SJ_KINDS };

typedef struct sj_tables sj_tables;
// Of the lengths of all codes, 4 bits each: what Tables.Bytes holds, unpacked.
sj_tables *sj_tables_parse(const uint8_t *p, size_t n); // NULL: not valid, or no memory
void sj_tables_free(sj_tables *t);

struct sj_part; // the lanes of one band: of its first component, or of the others together

// A recoded file that is being read. Zero it once, open it as often as you like (its buffers are kept), free it at the
// end. Not to be copied while open; src and the tables must outlive the use.
typedef struct {
	// What jpeg_read_header needs and no more: SOI, JFIF and Adobe markers, quantisation tables, and a baseline frame
	// and scan header, also for a progressive original (all its coefficients are here). A grey picture's sampling is
	// written as 1x1.
	uint8_t head[768];
	size_t head_n;
	sj_jpeg j; // the original up to its first scan
	// MCU rows of a band: 2 where an MCU is 16 rows high or more, else 4; the last may have fewer
	int bands, band_mcu_rows;
	// private from here on
	const uint8_t *src;
	size_t n;
	const sj_tables *t;
	const uint8_t *verbatim;
	size_t verbatim_n;
	uint32_t size;
	int groups;           // of components: the first, and the others
	int from, to;         // bands whose lanes are there
	struct sj_part *part; // in parts
	sj_buf parts, lanes, queue;
	sj_buf whole; // the verbatim part, if tables have been left out of it
} sj_recoded;

// sj_rows is how many rows of blocks a band has; the last has what is left of blocks_h.
static inline int sj_rows(const sj_recoded *r, int comp) { return r->band_mcu_rows * r->j.comp[comp].v; }

// Checks every bound. SJ_OK, SJ_CORRUPT or SJ_MEMORY.
int sj_recoded_open(sj_recoded *r, const uint8_t *src, size_t n, const sj_tables *t);
// The entropy stage for bands [from, to) of all components: many at once are faster, since lanes of several bands run
// side by side. SJ_OK, SJ_CORRUPT or SJ_MEMORY.
int sj_recoded_lanes(sj_recoded *r, int from, int to);
// Expands one band of one component, which sj_recoded_lanes must have been given before: int16[64] a block in natural
// order (as libjpeg's JBLOCK; 64-byte aligned is fastest, any is right), sj_rows x blocks_w blocks (fewer rows in the
// last band). last[] is 0 for a block without AC coefficients, else 1 + the largest zigzag position that is not zero.
// SJ_OK, or SJ_CORRUPT for a band whose lanes are not there.
int sj_recoded_band(const sj_recoded *r, int comp, int band, int16_t *blocks, uint8_t *last);
size_t sj_recoded_bytes(const sj_recoded *r); // memory held
size_t sj_lanes_need(size_t blocks, size_t parts); // the most that opening and sj_recoded_lanes take
void sj_recoded_free(sj_recoded *r);

// A coder holds the buffers of one sj_recode, sj_restore or sj_split at a time, and its result until the next.
typedef struct sj_coder sj_coder;
sj_coder *sj_coder_new(void);
void sj_coder_free(sj_coder *c);
size_t sj_coder_bytes(const sj_coder *c);

// The most that a new coder takes for sj_recode or sj_split, and for sj_restore; 0 for what they refuse by its header.
size_t sj_recode_needs(const uint8_t *src, size_t n);
size_t sj_restore_needs(const uint8_t *rec, size_t n, const sj_tables *t);

// sj_recode makes the recoded form, restores it and compares. SJ_OK, SJ_KEEP, SJ_LARGER (the result is there
// nevertheless) or SJ_MEMORY.
int sj_recode(sj_coder *c, const sj_tables *t, const uint8_t *id, uint32_t crc, const uint8_t *src, size_t n);
// sj_restore makes the original. SJ_OK, SJ_CORRUPT or SJ_MEMORY.
int sj_restore(sj_coder *c, const sj_tables *t, const uint8_t *rec, size_t n);
const uint8_t *sj_coder_output(const sj_coder *c, size_t *n);

// sj_split makes the lanes of a file, for training. SJ_OK, SJ_KEEP or SJ_MEMORY.
int sj_split(sj_coder *c, const uint8_t *src, size_t n);
int sj_lane_count(const sj_coder *c);
const uint8_t *sj_lane(sj_coder *c, int i, int *kind, size_t *n); // n symbols of one kind; by rising i, once each

#endif
