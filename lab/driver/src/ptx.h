// What ptx.sed makes of PTX is C for this header: each instruction is a macro, whose first argument is its type.
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef struct {
	struct {
		unsigned x, y, z;
	} tid, ntid, ctaid, nctaid;
	// at returns the bytes at an address, of which access (1: read, 2: write) has to be allowed there, or it does not
	// return.
	char *(*at)(bool shared, uint64_t address, unsigned bytes, int access, int line);
	void (*barrier)(void); // returns when all threads of the block have come here, or have ended
} ptx_thread;

#ifdef PTX
typedef bool pred;
typedef uint8_t u8, b8;
typedef uint16_t u16, b16;
typedef uint32_t u32, b32;
typedef uint64_t u64, b64;
typedef int32_t s32;
typedef int64_t s64;

#define SHARED(type, name, n)                                                                                          \
	static const u64 name = 0; /* so there can be one */                                                               \
	const unsigned ptx_shared = sizeof(type) * n;
#define KERNEL(name, fields, gather)                                                                                   \
	struct name##_in {                                                                                                 \
		fields                                                                                                         \
	};                                                                                                                 \
	const unsigned name##_bytes = sizeof(struct name##_in);                                                            \
	void name##_gather(void **from, struct name##_in *to) { gather }                                                   \
	void name(const ptx_thread *here, const struct name##_in *in)
#define GATHER(field) memcpy(&to->field, *from++, sizeof to->field);

#define ptx_add(t, d, a, b) d = (t)(a) + (t)(b)
#define ptx_sub(t, d, a, b) d = (t)(a) - (t)(b)
#define ptx_and(t, d, a, b) d = (t)(a) & (t)(b)
#define ptx_or(t, d, a, b) d = (t)(a) | (t)(b)
#define ptx_mul_lo(t, d, a, b) d = (t)(a) * (t)(b)
#define ptx_mul_wide(t, d, a, b) d = (s64)(t)(a) * (s64)(t)(b)
#define ptx_mad_lo(t, d, a, b, c) d = (t)(a) * (t)(b) + (t)(c)
#define ptx_div(t, d, a, b) d = (t)(b) == 0 ? (t)-1 : (t)(a) / (t)(b) // as hardware leaves it
#define ptx_min(t, d, a, b) d = (t)(a) < (t)(b) ? a : b
#define ptx_shl(t, d, a, b) d = (b) >= 8 * sizeof(t) ? 0 : (t)(a) << (b)
#define ptx_shr(t, d, a, b) d = (b) < 8 * sizeof(t) ? (t)(a) >> (b) : (t)(a) < 0 ? -1 : 0
#define ptx_bfe(t, d, a, from, n) d = extract_##t(a, from, n)
#define ptx_prmt(t, d, a, b, selector) d = permute((u64)(u32)(a) | (u64)(u32)(b) << 32, selector)
#define ptx_selp(t, d, a, b, p) d = (p) ? (t)(a) : (t)(b)
#define ptx_setp_eq(t, d, a, b) d = (t)(a) == (t)(b)
#define ptx_setp_ne(t, d, a, b) d = (t)(a) != (t)(b)
#define ptx_setp_lt(t, d, a, b) d = (t)(a) < (t)(b)
#define ptx_setp_gt(t, d, a, b) d = (t)(a) > (t)(b)
#define ptx_setp_ge(t, d, a, b) d = (t)(a) >= (t)(b)
#define ptx_mov(t, d, a) d = a
#define ptx_cvt_u16(from, d, a) d = (u16)(from)(a)
#define ptx_cvt_u32(from, d, a) d = (u32)(from)(a)
#define ptx_cvt_u64(from, d, a) d = (u64)(from)(a)
#define ptx_cvt_s64(from, d, a) d = (s64)(from)(a)
#define ptx_cvta_global(t, d, a) d = a
#define ptx_cvta_to_global(t, d, a) d = a
#define ptx_bar(sync, all) here->barrier()

#define MEMORY(t, n, shared, address, access) (t *)here->at(shared, address, n * sizeof(t), access, __LINE__)
#define ptx_ld_param(t, d, field) d = in->field
#define ptx_ld_shared(t, d, address) d = *MEMORY(t, 1, true, address, 1)
#define ptx_ld_global(t, d, address) d = *MEMORY(t, 1, false, address, 1)
#define ptx_ld_global_nc(t, d, address) ptx_ld_global(t, d, address)
#define ptx_ld_global_v2(t, d, e, address)                                                                                 \
	do {                                                                                                               \
		t *from = MEMORY(t, 2, false, address, 1);                                                                     \
		d = from[0], e = from[1];                                                                                      \
	} while (0)
#define ptx_st_shared(t, address, a) *MEMORY(t, 1, true, address, 2) = a
#define ptx_st_global(t, address, a) *MEMORY(t, 1, false, address, 2) = a
#define ptx_st_global_v4(t, address, a, b, c, d)                                                                           \
	do {                                                                                                               \
		t *to = MEMORY(t, 4, false, address, 2);                                                                       \
		to[0] = a, to[1] = b, to[2] = c, to[3] = d;                                                                    \
	} while (0)

static inline u32 extract_u32(u32 a, unsigned from, unsigned n) {
	return (from & 255) > 31 ? 0 : a >> (from & 255) & ((n & 255) > 31 ? ~0u : (1u << (n & 255)) - 1);
}

static inline u32 permute(u64 bytes, u32 selector) {
	u32 result = 0;
	for (int k = 0; k < 4; k++, selector >>= 4) {
		u32 v = bytes >> 8 * (selector & 7) & 255;
		result |= (selector & 8 ? v / 128 * 255 : v) << 8 * k;
	}
	return result;
}
#endif
