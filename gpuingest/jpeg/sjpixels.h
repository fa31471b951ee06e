// Pixels from coefficients that are there already: the entropy decoder's place in libjpeg is taken by a recoded file.
#ifndef SJPIXELS_H
#define SJPIXELS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

#include "sjrecode.h"

typedef struct sj_pixels sj_pixels;

sj_pixels *sj_pixels_new(void);
void sj_pixels_free(sj_pixels *p);
size_t sj_pixels_bytes(const sj_pixels *p);

// sj_pixels_can tells whether the library is one whose inside this file knows.
int sj_pixels_can(void);

// sj_pixels_ready comes between jpeg_read_header and jpeg_start_decompress, sj_pixels_start behind the latter. Both
// leave by d's error_exit. The recoded file must stay open until the picture has been read.
void sj_pixels_ready(sj_pixels *p, j_decompress_ptr d, sj_recoded *from);
void sj_pixels_start(sj_pixels *p, j_decompress_ptr d);

#endif
