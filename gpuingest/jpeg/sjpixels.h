// Pixels from coefficients that are there already: the entropy decoder's place in libjpeg is taken by a source of bands.
#ifndef SJPIXELS_H
#define SJPIXELS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

// Where the coefficients of a picture come from: bands of some MCU rows.
typedef struct {
	const uint8_t *head; // for jpeg_read_header
	size_t head_n;
	int comps, bands, band_mcu_rows;
	struct {
		int blocks_w, blocks_h, band_rows;
	} comp[4];
	// Says that bands [first, end) will be asked for. SJ_OK, SJ_CORRUPT or SJ_MEMORY.
	int (*lanes)(void *from, int first, int end);
	// Gives a band of a component: band_rows x blocks_w blocks of 64 coefficients in natural order, and for each 0 if it
	// has no AC coefficient. The same results.
	int (*band)(void *from, int comp, int band, int16_t *blocks, uint8_t *last);
	void *from;
} sj_source;

typedef struct sj_pixels sj_pixels;

sj_pixels *sj_pixels_new(void);
void sj_pixels_free(sj_pixels *p);
size_t sj_pixels_bytes(const sj_pixels *p);

// sj_pixels_can tells whether the library is one whose inside this file knows.
int sj_pixels_can(void);

// sj_pixels_ready comes between jpeg_read_header and jpeg_start_decompress, sj_pixels_start behind the latter. Both
// leave by d's error_exit. The source must stay until the picture has been read.
void sj_pixels_ready(sj_pixels *p, j_decompress_ptr d, const sj_source *from);
void sj_pixels_start(sj_pixels *p, j_decompress_ptr d);

#endif
