// libjpeg's decompressor without its entropy decoder: IDCT, upsampling, colour, crop and skip are the library's own, so
// that pixels are equal by construction. Two of its objects, which jpegint.h declares, are replaced for it:
//   - inputctl->start_input_pass sets up one interleaved scan of all components and leaves the entropy decoder alone;
//   - coef->decompress_data takes a row of MCUs from the source, and transforms the columns of the crop.
// jpegint.h is private: only versions that have been read are used, and the package tries the whole at start.

#include "sjpixels.h"
#include "shoaljpeg.h"

#include <stdlib.h>
#include <string.h>

#include <jerror.h>

#if defined(LIBJPEG_TURBO_VERSION_NUMBER) && defined(__has_include)
#if LIBJPEG_TURBO_VERSION_NUMBER >= 2000000 && LIBJPEG_TURBO_VERSION_NUMBER < 2002000 && __has_include(<jpegint.h>)
#define KNOWN 1
#include <jpegint.h>
#endif
#endif

#ifdef KNOWN

#if JPEG_LIB_VERSION >= 70
#define SCALED(c) ((c)->DCT_h_scaled_size)
#else
#define SCALED(c) ((c)->DCT_scaled_size)
#endif

// A band of a component, and which one it is.
typedef struct {
	sj_buf mem;
	int16_t *blocks;
	uint8_t *last;
	int at; // -1: none
} held;

struct sj_pixels {
	struct jpeg_d_coef_controller coef; // first: libjpeg's pointer to it is ours
	sj_recoded *from;
	held band[4];
};

int sj_pixels_can(void) { return 1; }

sj_pixels *sj_pixels_new(void) { return calloc(1, sizeof(sj_pixels)); }

void sj_pixels_free(sj_pixels *p) {
	if (!p) return;
	for (int c = 0; c < 4; c++) free(p->band[c].mem.p);
	free(p);
}

size_t sj_pixels_bytes(const sj_pixels *p) {
	size_t n = 0;
	if (!p) return 0;
	for (int c = 0; c < 4; c++) n += p->band[c].mem.cap;
	return n + sizeof *p;
}

static int hold(held *h, size_t blocks) {
	h->at = -1;
	if (!sj_reserve(&h->mem, blocks * (64 * sizeof(int16_t) + 1) + 64)) return 0;
	h->blocks = sj_aligned(h->mem.p); // libjpeg's vector code wants 16
	h->last = (uint8_t *)(h->blocks + 64 * blocks);
	return 1;
}

// start_input_pass does what libjpeg's does for the first scan, for one scan of everything.
static void start_input_pass(j_decompress_ptr d) {
	d->comps_in_scan = d->num_components;
	d->MCUs_per_row = (d->image_width +
		(JDIMENSION)(d->max_h_samp_factor * DCTSIZE) - 1) / (JDIMENSION)(d->max_h_samp_factor * DCTSIZE);
	for (int c = 0; c < d->num_components; c++) d->cur_comp_info[c] = &d->comp_info[c];
}

void sj_pixels_ready(sj_pixels *p, j_decompress_ptr d, sj_recoded *from) {
	int ok = d->num_components == from->j.comps &&
		from->bands * from->band_mcu_rows >= (int)d->total_iMCU_rows;
	p->from = from;
	for (int c = 0; ok && c < from->j.comps; c++) {
		jpeg_component_info *i = &d->comp_info[c];
		ok = from->j.comp[c].blocks_w >= (int)i->width_in_blocks &&
			from->j.comp[c].blocks_h >= (int)i->height_in_blocks && from->j.comp[c].v == i->v_samp_factor;
		if (i->quant_tbl_no < 0 || i->quant_tbl_no >= NUM_QUANT_TBLS || !d->quant_tbl_ptrs[i->quant_tbl_no]) ERREXIT1(d,
			JERR_NO_QUANT_TABLE, i->quant_tbl_no);
		i->quant_table = d->quant_tbl_ptrs[i->quant_tbl_no]; // no later table can replace it
		if (ok && !hold(&p->band[c], (size_t)from->j.comp[c].blocks_w * (size_t)sj_rows(from, c))) ERREXIT1(d,
			JERR_OUT_OF_MEMORY, 0);
	}
	if (!ok) ERREXIT(d, JERR_BAD_MCU_SIZE);
	d->inputctl->start_input_pass = start_input_pass;
	d->inputctl->has_multiple_scans = FALSE; // or the library would hold all coefficients
}

// flat fills n x n samples from a DC coefficient, unless it is so large that the ways to round it differ.
static int flat(int dc, int n, JSAMPARRAY rows, JDIMENSION col) {
	if (dc < -2048 || dc > 2047) return 0;
	int v = ((4 * dc + 16) >> 5) + 128;
	v = v < 0 ? 0 : v > 255 ? 255 : v;
	for (int y = 0; y < n; y++) memset(rows[y] + col, v, (size_t)n);
	return 1;
}

static int decompress(j_decompress_ptr d, JSAMPIMAGE out) {
	sj_pixels *p = (sj_pixels *)d->coef;
	int row = (int)d->output_iMCU_row, last_row = row == (int)d->total_iMCU_rows - 1;
	int band = row / p->from->band_mcu_rows, within = row % p->from->band_mcu_rows;
	for (int c = 0; c < d->num_components; c++) {
		jpeg_component_info *i = &d->comp_info[c];
		held *h = &p->band[c];
		if (!i->component_needed) continue;
		if (h->at != band) {
			h->at = -1;
			int code = sj_recoded_band(p->from, c, band, h->blocks, h->last);
			if (code == SJ_MEMORY) ERREXIT1(d, JERR_OUT_OF_MEMORY, 0);
			if (code != SJ_OK) ERREXIT(d, JERR_BAD_LENGTH);
			h->at = band;
		}
		int v = i->v_samp_factor, rows = v, w = p->from->j.comp[c].blocks_w, n = SCALED(i);
		if (last_row && i->height_in_blocks % (JDIMENSION)v) rows = (int)(i->height_in_blocks % (JDIMENSION)v);
		int from = (int)d->master->first_MCU_col[c], to = (int)d->master->last_MCU_col[c];
		JSAMPARRAY at = out[c];
		for (int y = 0; y < rows; y++, at += n) {
			size_t b = (size_t)(within * v + y) * (size_t)w;
			for (int x = from; x <= to; x++) {
				int16_t *block = h->blocks + (b + (size_t)x) * 64;
				JDIMENSION col = (JDIMENSION)((x - from) * n);
				if (!h->last[b + (size_t)x] && flat(block[0] * i->quant_table->quantval[0], n, at, col)) continue;
				d->idct->inverse_DCT[c](d, i, block, at, col);
			}
		}
	}
	return ++d->output_iMCU_row < d->total_iMCU_rows ? JPEG_ROW_COMPLETED : JPEG_SCAN_COMPLETED;
}

void sj_pixels_start(sj_pixels *p, j_decompress_ptr d) {
	p->coef = *d->coef;
	p->coef.decompress_data = decompress;
	d->coef = &p->coef;
	d->inputctl->has_multiple_scans = TRUE; // so that jpeg_skip_scanlines counts rows, and reads none
}

#else

int sj_pixels_can(void) { return 0; }
sj_pixels *sj_pixels_new(void) { return NULL; }
void sj_pixels_free(sj_pixels *p) { (void)p; }
size_t sj_pixels_bytes(const sj_pixels *p) { (void)p; return 0; }
void sj_pixels_ready(sj_pixels *p, j_decompress_ptr d, sj_recoded *from) {
	(void)p; (void)from; ERREXIT(d, JERR_NOT_COMPILED); }
void sj_pixels_start(sj_pixels *p, j_decompress_ptr d) { (void)p; (void)d; }

#endif
