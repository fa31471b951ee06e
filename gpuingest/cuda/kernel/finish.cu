// The device's part of a transform, in one pass: crop offset, flip, normalise and cast by table, layout.
//
//   dst    [n, 3, h, w] or [n, h, w, 3] of 1, 2 or 4 bytes an element; its address a multiple of 4 elements
//   src    [n, srcH, srcW, 3] uint8; its allocation may be read up to the next multiple of 4 bytes
//   rows   for each picture where its crop begins, whether it is flipped after the crop, and whether there is one:
//          without, all of it becomes zeros
//   table  [3, 256] elements: what each value of each channel becomes. Half and bfloat16 are bits that are looked
//          up, so nothing is rounded here. The 1-byte kernels copy where it is null.
//
// The host has to see to it that crops lie within their pictures. Any grid and any block are right: threads stride
// over groups of four neighbours in a row. A group takes three or four loads of 4 bytes, whatever the crop's offset,
// and leaves in stores of 4 elements where the width is a multiple of 4.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define GLOBAL extern "C" __attribute__((global)) void

struct Row {
	u16 x, y;
	u32 flags; // bit 0: flip, bit 1: there is a picture
};

template <typename T> using Vec4 = T __attribute__((ext_vector_type(4)));

// The table in shared memory, so that lookups of one warp meet in 32 banks and not in cache lines. Kernels of one
// module share it: its size is that of the widest element.
static __attribute__((shared, aligned(16))) u32 shared[3 * 256];

template <typename T, bool NCHW>
static __attribute__((device, always_inline)) void finish(T *dst, const u8 *src, const Row *rows, const T *table, u32 n, u32 h, u32 w, u32 srcH, u32 srcW) {
	T *lut = (T *)shared;
	const bool identity = sizeof(T) == 1 && table == nullptr;
	const u32 thread = __nvvm_read_ptx_sreg_tid_x(), threads = __nvvm_read_ptx_sreg_ntid_x();
	if (!identity)
		for (u32 i = thread; i < 3 * 256; i += threads)
			lut[i] = table[i];
	__syncthreads();

	const u32 across = (w + 3) / 4;
	const u64 groups = (u64)n * h * across, plane = (u64)h * w;
	const bool aligned = w % 4 == 0;
	const u64 stride = (u64)__nvvm_read_ptx_sreg_nctaid_x() * threads;
	for (u64 g = (u64)__nvvm_read_ptx_sreg_ctaid_x() * threads + thread; g < groups; g += stride) {
		const u64 line = g / across; // of all pictures' lines
		const u32 x = (u32)(g - line * across) * 4;
		const u32 picture = (u32)(line / h), y = (u32)(line - (u64)picture * h);
		const u32 count = w - x < 4 ? w - x : 4;
		const Row row = rows[picture];
		const bool flip = row.flags & 1;
		const u64 from = (u64)row.x + (flip ? w - x - count : x);
		const u8 *p = src + (((u64)picture * srcH + row.y + y) * srcW + from) * 3;

		T out[4][3] = {};
		if (row.flags & 2) {
			// Twelve bytes from wherever they begin: the words that hold at least one of them.
			const u32 shift = (u32)(u64)p & 3, bytes = shift + count * 3;
			const u32 *words = (const u32 *)(p - shift);
			u32 a = __nvvm_ldg_ui(words), b = 0, c = 0, d = 0;
			if (bytes > 4)
				b = __nvvm_ldg_ui(words + 1);
			if (bytes > 8)
				c = __nvvm_ldg_ui(words + 2);
			if (bytes > 12)
				d = __nvvm_ldg_ui(words + 3);
			const u32 select = 0x3210 + 0x1111 * shift;
			a = __nvvm_prmt(a, b, select), b = __nvvm_prmt(b, c, select), c = __nvvm_prmt(c, d, select);

			// Channels of pixels 0 to 3, in the order of the source.
			u32 v[4][3] = {
			    {a & 255, a >> 8 & 255, a >> 16 & 255},
			    {a >> 24, b & 255, b >> 8 & 255},
			    {b >> 16 & 255, b >> 24, c & 255},
			    {c >> 8 & 255, c >> 16 & 255, c >> 24},
			};
#pragma unroll
			for (int i = 0; i < 4; i++)
#pragma unroll
				for (int k = 0; k < 3; k++)
					out[i][k] = identity ? (T)v[i][k] : lut[k * 256 + v[i][k]];
		}

		if (count == 4 && flip)
#pragma unroll
			for (int k = 0; k < 3; k++) {
				T t = out[0][k];
				out[0][k] = out[3][k], out[3][k] = t;
				t = out[1][k];
				out[1][k] = out[2][k], out[2][k] = t;
			}
		if (aligned && NCHW) {
			T *to = dst + (u64)picture * 3 * plane + (u64)y * w + x;
#pragma unroll
			for (int k = 0; k < 3; k++)
				*(Vec4<T> *)(to + k * plane) = Vec4<T>{out[0][k], out[1][k], out[2][k], out[3][k]};
		} else if (aligned) {
			Vec4<T> *to = (Vec4<T> *)(dst + (line * w + x) * 3);
			to[0] = Vec4<T>{out[0][0], out[0][1], out[0][2], out[1][0]};
			to[1] = Vec4<T>{out[1][1], out[1][2], out[2][0], out[2][1]};
			to[2] = Vec4<T>{out[2][2], out[3][0], out[3][1], out[3][2]};
		} else {
			T *to = NCHW ? dst + (u64)picture * 3 * plane + (u64)y * w + x : dst + (line * w + x) * 3;
			const u64 pixel = NCHW ? 1 : 3, channel = NCHW ? plane : 1;
#pragma unroll
			for (u32 i = 0; i < 4; i++)
				if (i < count) {
					// A short group was not turned round above.
					const u32 at = flip && count < 4 ? count - 1 - i : i;
#pragma unroll
					for (u32 k = 0; k < 3; k++)
						to[at * pixel + k * channel] = out[i][k];
				}
		}
	}
}

#define KERNEL(name, T, nchw)                                                                                                                        \
	GLOBAL name(T *dst, const u8 *src, const Row *rows, const T *table, u32 n, u32 h, u32 w, u32 srcH, u32 srcW) {                              \
		finish<T, nchw>(dst, src, rows, table, n, h, w, srcH, srcW);                                                                         \
	}

KERNEL(shoal_finish_u8_nchw, u8, true)
KERNEL(shoal_finish_u8_nhwc, u8, false)
KERNEL(shoal_finish_u16_nchw, u16, true)
KERNEL(shoal_finish_u16_nhwc, u16, false)
KERNEL(shoal_finish_u32_nchw, u32, true)
KERNEL(shoal_finish_u32_nhwc, u32, false)
