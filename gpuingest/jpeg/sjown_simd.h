// The vector loops of sjown.c, once for each width: V is a vector, P pairs of int16 for MADD and MUL, which sum up each
// pair's products, OP(f) an intrinsic, N the blocks that go together. Everything works within lanes of 16 bytes, so
// that the widths share the code.

// pass is one dimension of the IDCT over 8 rows of int16, a block a lane: jidctint's arithmetic, in the products and
// widths of libjpeg-turbo's vector code, so that even what overflows there does here.
LOOP static inline void NAME(pass)(V r[8], int round, int shift) {
	const V zero = ZERO, half = OP(set1_epi32)(round);
	V out[8][2];
#define HALF(h, LOHI)                                                                                       \
	do {                                                                                                    \
		P t26 = LOHI(r[2], r[6]), z = LOHI(z3, z4), t71 = LOHI(r[7], r[1]), t53 = LOHI(r[5], r[3]);         \
		V s = OP(add_epi32)(SECOND_UP_13(LOHI(zero, sum)), half);                                           \
		V d = OP(add_epi32)(SECOND_UP_13(LOHI(zero, dif)), half);                                           \
		V s10 = MADD(s, t26, 10703, 4433), s13 = MADD(s, t26, -10703, -4433);                               \
		V s11 = MADD(d, t26, 4433, -10704), s12 = MADD(d, t26, -4433, 10704);                               \
		V y3 = MUL(z, -6436, 9633), y4 = MUL(z, 9633, 6437);                                                \
		V o0 = MADD(y3, t71, -4927, -7373), o3 = MADD(y4, t71, -7373, 4926);                                \
		V o1 = MADD(y4, t53, -4176, -20995), o2 = MADD(y3, t53, -20995, 4177);                              \
		out[0][h] = OP(srai_epi32)(OP(add_epi32)(s10, o3), shift);                                          \
		out[7][h] = OP(srai_epi32)(OP(sub_epi32)(s10, o3), shift);                                          \
		out[1][h] = OP(srai_epi32)(OP(add_epi32)(s11, o2), shift);                                          \
		out[6][h] = OP(srai_epi32)(OP(sub_epi32)(s11, o2), shift);                                          \
		out[2][h] = OP(srai_epi32)(OP(add_epi32)(s12, o1), shift);                                          \
		out[5][h] = OP(srai_epi32)(OP(sub_epi32)(s12, o1), shift);                                          \
		out[3][h] = OP(srai_epi32)(OP(add_epi32)(s13, o0), shift);                                          \
		out[4][h] = OP(srai_epi32)(OP(sub_epi32)(s13, o0), shift);                                          \
	} while (0)
	V sum = OP(add_epi16)(r[0], r[4]), dif = OP(sub_epi16)(r[0], r[4]);
	V z3 = OP(add_epi16)(r[3], r[7]), z4 = OP(add_epi16)(r[1], r[5]);
	HALF(0, LO);
	HALF(1, HI);
#undef HALF
	for (int i = 0; i < 8; i++) r[i] = HALVES(out[i][0], out[i][1]);
}

LOOP static inline void NAME(transpose)(V r[8]) {
	V a[8], b[8];
	for (int i = 0; i < 4; i++) {
		a[2 * i] = OP(unpacklo_epi16)(r[2 * i], r[2 * i + 1]);
		a[2 * i + 1] = OP(unpackhi_epi16)(r[2 * i], r[2 * i + 1]);
	}
	for (int i = 0; i < 2; i++) { // a: 01 lo, 01 hi, 23 lo, 23 hi, ...
		b[i] = OP(unpacklo_epi32)(a[i], a[i + 2]);
		b[i + 2] = OP(unpackhi_epi32)(a[i], a[i + 2]);
		b[i + 4] = OP(unpacklo_epi32)(a[i + 4], a[i + 6]);
		b[i + 6] = OP(unpackhi_epi32)(a[i + 4], a[i + 6]);
	}
	for (int i = 0; i < 2; i++) { // b: columns 01, 45, 23, 67 of rows 0 to 3, and of rows 4 to 7
		r[4 * i] = OP(unpacklo_epi64)(b[i], b[i + 4]);
		r[4 * i + 1] = OP(unpackhi_epi64)(b[i], b[i + 4]);
		r[4 * i + 2] = OP(unpacklo_epi64)(b[i + 2], b[i + 6]);
		r[4 * i + 3] = OP(unpackhi_epi64)(b[i + 2], b[i + 6]);
	}
}

// idct transforms N blocks that lie side by side.
LOOP static inline void NAME(idct)(const int16_t *blocks, const int16_t *quant, uint8_t *out, size_t stride) {
	V r[8];
	NAME(rows)(blocks, quant, r);
	if (ANY(OP(add_epi16)(r[0], OP(set1_epi16)(8192)), (short)0xc000)) {
		int16_t first[N * 8];
		STORE(first, r[0]);
		wrap(blocks, first, N);
		r[0] = LOAD(first);
	}
	NAME(pass)(r, 1 << 10, 11);
	NAME(transpose)(r);
	NAME(pass)(r, 1 << 17, 18);
	const V mid = OP(set1_epi8)((char)128);
	V p[4];
	for (int i = 0; i < 4; i++) p[i] = OP(add_epi8)(OP(packs_epi16)(r[i], r[i + 4]), mid);
	V a = OP(unpacklo_epi8)(p[0], p[1]), b = OP(unpackhi_epi8)(p[0], p[1]);
	V c = OP(unpacklo_epi8)(p[2], p[3]), d = OP(unpackhi_epi8)(p[2], p[3]);
	V e = OP(unpacklo_epi16)(a, c), f = OP(unpackhi_epi16)(a, c), g = OP(unpacklo_epi16)(b, d),
		h = OP(unpackhi_epi16)(b, d);
	NAME(two_rows)(OP(unpacklo_epi32)(e, g), out, stride);
	NAME(two_rows)(OP(unpackhi_epi32)(e, g), out + 2 * stride, stride);
	NAME(two_rows)(OP(unpacklo_epi32)(f, h), out + 4 * stride, stride);
	NAME(two_rows)(OP(unpackhi_epi32)(f, h), out + 6 * stride, stride);
}

// blocks transforms a row of n >= N blocks.
LOOP static void NAME(blocks)(const int16_t *blocks, const uint8_t *last, const int16_t *quant, int n, uint8_t *out,
	size_t stride) {
	for (int x = 0; x < n; x += N) {
		if (x > n - N) x = n - N;
		uint32_t any = 0;
		for (int i = 0; i < N; i++) any |= last[x + i];
		if (any) NAME(idct)(blocks + 64 * x, quant, out + 8 * x, stride);
		else for (int i = 0; i < N; i++) flat(blocks[64 * (x + i)], quant[0], out + 8 * (x + i), stride);
	}
}

// wide gives 2 N * 4 chroma differences for even and odd pixels: a triangle filter over rows (near, far) and columns.
LOOP static inline void NAME(wide)(const uint8_t *near, const uint8_t *far, V even_bias, V odd_bias, V *even, V *odd) {
#define SUM(at) OP(add_epi16)(OP(mullo_epi16)(UP(near + (at)), OP(set1_epi16)(3)), UP(far + (at)))
	V s = SUM(0), t = OP(mullo_epi16)(s, OP(set1_epi16)(3));
	*even = OP(srai_epi16)(OP(add_epi16)(OP(add_epi16)(t, SUM(-1)), even_bias), 4);
	*odd = OP(srai_epi16)(OP(add_epi16)(OP(add_epi16)(t, SUM(1)), odd_bias), 4);
#undef SUM
}

// color makes R, G and B, less their clamp, of pixels whose chroma has lost its 128.
LOOP static inline void NAME(color)(V y, V cb, V cr, V *r, V *g, V *b) {
	const V round = OP(set1_epi32)(1 << 15);
	P l = LO(cb, cr), h = HI(cb, cr);
	// 0.28586 = 1 - 0.71414, so that it fits
	V lo = OP(srai_epi32)(MADD(round, l, -22554, 18734), 16), hi = OP(srai_epi32)(MADD(round, h, -22554, 18734), 16);
	*r = OP(add_epi16)(y, OP(add_epi16)(cr, OP(mulhrs_epi16)(cr, OP(set1_epi16)(13173))));
	*b = OP(add_epi16)(y, OP(add_epi16)(OP(add_epi16)(cb, cb), OP(mulhrs_epi16)(cb, OP(set1_epi16)(-7471))));
	*g = OP(add_epi16)(y, OP(sub_epi16)(HALVES(lo, hi), cr));
}

// row makes n pixels, and up to 16 N - 1 more. v: chroma has half the rows; h: half the columns.
LOOP static inline void NAME(row)(const uint8_t *y, const uint8_t *const c[4], int h, int v, int n, uint8_t *out,
	size_t plane) {
	const V even_bias = OP(set1_epi16)((short)((v ? 8 : 4) - 2048)),
		odd_bias = OP(set1_epi16)((short)((v ? 7 : 8) - 2048));
	const V merge = IN_LANES(merged);
	const V low = OP(set1_epi16)(255), mid = OP(set1_epi16)(128);
	for (int x = 0; x < n; x += 16 * N) {
		V u[2], w[2], r[2], g[2], b[2], luma = LOAD(y + x);
		if (h) {
			NAME(wide)(c[0] + x / 2, c[1] + x / 2, even_bias, odd_bias, &u[0], &u[1]);
			NAME(wide)(c[2] + x / 2, c[3] + x / 2, even_bias, odd_bias, &w[0], &w[1]);
		} else {
			V cb = LOAD(c[0] + x), cr = LOAD(c[2] + x);
			u[0] = OP(sub_epi16)(BOTH(cb, low), mid);
			u[1] = OP(sub_epi16)(OP(srli_epi16)(cb, 8), mid);
			w[0] = OP(sub_epi16)(BOTH(cr, low), mid);
			w[1] = OP(sub_epi16)(OP(srli_epi16)(cr, 8), mid);
		}
		NAME(color)(BOTH(luma, low), u[0], w[0], &r[0], &g[0], &b[0]);
		NAME(color)(OP(srli_epi16)(luma, 8), u[1], w[1], &r[1], &g[1], &b[1]);
		r[0] = OP(packus_epi16)(r[0], r[1]);
		g[0] = OP(packus_epi16)(g[0], g[1]);
		b[0] = OP(packus_epi16)(b[0], b[1]);
		if (plane) {
			STORE(out + x, OP(shuffle_epi8)(r[0], merge));
			STORE(out + plane + x, OP(shuffle_epi8)(g[0], merge));
			STORE(out + 2 * plane + x, OP(shuffle_epi8)(b[0], merge));
		} else {
			NAME(pixels)(r[0], g[0], b[0], out + 4 * x);
		}
	}
}

LOOP static void NAME(line)(const uint8_t *y, const uint8_t *const c[4], int h, int v, int n, uint8_t *out,
	size_t plane) {
	if (h && v) NAME(row)(y, c, 1, 1, n, out, plane);
	else if (h) NAME(row)(y, c, 1, 0, n, out, plane);
	else NAME(row)(y, c, 0, 0, n, out, plane);
}
