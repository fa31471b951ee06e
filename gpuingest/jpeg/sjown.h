// Pixels of the usual kind of picture (YCbCr of 4:2:0, 4:2:2 or 4:4:4, at full size) without libjpeg.
#ifndef SJOWN_H
#define SJOWN_H

#include "sjpixels.h"

typedef struct sj_own sj_own;

sj_own *sj_own_new(void);
void sj_own_free(sj_own *o);
size_t sj_own_bytes(const sj_own *o);

// sj_own_usual tells whether the picture of the header read into d is one.
int sj_own_usual(j_decompress_ptr d, sj_recoded *from);
// sj_own_open prepares the pixels [x0, x1) x [y0, y1) of such a picture. SJ_OK, SJ_CORRUPT or SJ_MEMORY.
int sj_own_open(sj_own *o, j_decompress_ptr d, sj_recoded *from, int x0, int x1, int y0, int y1);
// sj_own_rows makes the next n rows, from the even column at or before x0 on: 4 bytes a pixel, or, where plane is not
// 0, red, green and blue plane bytes apart. It overwrites up to SJ_OWN_SLACK bytes behind each. SJ_OK, SJ_CORRUPT or
// SJ_MEMORY.
int sj_own_rows(sj_own *o, uint8_t *const *rows, int n, size_t plane);

enum { SJ_OWN_SLACK = 256 };

#endif
