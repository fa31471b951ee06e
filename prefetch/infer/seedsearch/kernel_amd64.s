#include "textflag.h"

// The kernels of kernel.go for AVX2 and AVX-512: 8 or 16 seeds a register, and eight registers stepped
// in turn, since a step takes longer (shift, xor, multiply, add: 6 to 13 cycles) than its four
// instructions take to issue. All loads and stores may be unaligned.

// STEP takes one register of words from s[i-1] to s[i]; tmp is scratch. MUL and I are constants of the
// kernel that uses it: the multiplier, and i, in all lanes.
#define STEP(w, tmp) \
	VPSRLD  $30, w, tmp \
	VPXOR   tmp, w, w   \
	VPMULLD MUL, w, w   \
	VPADDD  I, w, w

#define MUL Y15
#define I Y14
#define ONE Y13

// func advanceAVX2(s *block, from, to uint32)
TEXT ·advanceAVX2(SB), NOSPLIT, $0-16
	MOVQ s+0(FP), DI
	MOVL from+8(FP), SI
	MOVL to+12(FP), DX
	SUBL SI, DX               // steps
	JEQ  done
	MOVL $1812433253, AX
	VMOVD AX, X15
	VPBROADCASTD X15, MUL
	MOVL $1, AX
	VMOVD AX, X13
	VPBROADCASTD X13, ONE
	MOVQ $2, BX               // halves of the block, 64 seeds each

half:
	VMOVD SI, X14
	VPBROADCASTD X14, I
	MOVL DX, CX
	VMOVDQU 0(DI), Y0
	VMOVDQU 32(DI), Y1
	VMOVDQU 64(DI), Y2
	VMOVDQU 96(DI), Y3
	VMOVDQU 128(DI), Y4
	VMOVDQU 160(DI), Y5
	VMOVDQU 192(DI), Y6
	VMOVDQU 224(DI), Y7

step:
	VPADDD ONE, I, I
	STEP(Y0, Y8)
	STEP(Y1, Y9)
	STEP(Y2, Y10)
	STEP(Y3, Y11)
	STEP(Y4, Y8)
	STEP(Y5, Y9)
	STEP(Y6, Y10)
	STEP(Y7, Y11)
	DECL CX
	JNE  step

	VMOVDQU Y0, 0(DI)
	VMOVDQU Y1, 32(DI)
	VMOVDQU Y2, 64(DI)
	VMOVDQU Y3, 96(DI)
	VMOVDQU Y4, 128(DI)
	VMOVDQU Y5, 160(DI)
	VMOVDQU Y6, 192(DI)
	VMOVDQU Y7, 224(DI)
	ADDQ $256, DI
	DECQ BX
	JNE  half
	VZEROUPPER

done:
	RET

#undef MUL
#undef I
#undef ONE
#define MUL Z31
#define I Z30
#define ONE Z29

// VPXOR has no 512-bit form: VPXORD is its name there.
#define STEP512(w, tmp) \
	VPSRLD  $30, w, tmp \
	VPXORD  tmp, w, w   \
	VPMULLD MUL, w, w   \
	VPADDD  I, w, w

// func advanceAVX512(s *block, from, to uint32)
TEXT ·advanceAVX512(SB), NOSPLIT, $0-16
	MOVQ s+0(FP), DI
	MOVL from+8(FP), SI
	MOVL to+12(FP), CX
	SUBL SI, CX               // steps
	JEQ  done
	MOVL $1812433253, AX
	VPBROADCASTD AX, MUL
	MOVL $1, AX
	VPBROADCASTD AX, ONE
	VPBROADCASTD SI, I
	VMOVDQU32 0(DI), Z0
	VMOVDQU32 64(DI), Z1
	VMOVDQU32 128(DI), Z2
	VMOVDQU32 192(DI), Z3
	VMOVDQU32 256(DI), Z4
	VMOVDQU32 320(DI), Z5
	VMOVDQU32 384(DI), Z6
	VMOVDQU32 448(DI), Z7

step:
	VPADDD ONE, I, I
	STEP512(Z0, Z16)
	STEP512(Z1, Z17)
	STEP512(Z2, Z18)
	STEP512(Z3, Z19)
	STEP512(Z4, Z20)
	STEP512(Z5, Z21)
	STEP512(Z6, Z22)
	STEP512(Z7, Z23)
	DECL CX
	JNE  step

	VMOVDQU32 Z0, 0(DI)
	VMOVDQU32 Z1, 64(DI)
	VMOVDQU32 Z2, 128(DI)
	VMOVDQU32 Z3, 192(DI)
	VMOVDQU32 Z4, 256(DI)
	VMOVDQU32 Z5, 320(DI)
	VMOVDQU32 Z6, 384(DI)
	VMOVDQU32 Z7, 448(DI)
	VZEROUPPER

done:
	RET

#define CONST(value, x, y) \
	MOVL $value, AX \
	VMOVD AX, x     \
	VPBROADCASTD x, y

// func numberAVX2(s, next, far, out *block)
TEXT ·numberAVX2(SB), NOSPLIT, $0-32
	MOVQ s+0(FP), SI
	MOVQ next+8(FP), DX
	MOVQ far+16(FP), BX
	MOVQ out+24(FP), DI
	CONST(0x80000000, X15, Y15)
	CONST(0x9908b0df, X14, Y14)
	CONST(0x9d2c5680, X13, Y13)
	CONST(0xefc60000, X12, Y12)
	XORQ CX, CX

eight:
	VMOVDQU (DX)(CX*1), Y1
	VPAND   (SI)(CX*1), Y15, Y0
	VPANDN  Y1, Y15, Y2
	VPOR    Y2, Y0, Y0         // the top bit of s, the others of next
	VPSRLD  $1, Y0, Y0
	VPXOR   (BX)(CX*1), Y0, Y0
	VPSLLD  $31, Y1, Y1        // the matrix, if next is odd
	VPSRAD  $31, Y1, Y1
	VPAND   Y14, Y1, Y1
	VPXOR   Y1, Y0, Y0
	VPSRLD  $11, Y0, Y1        // tempering
	VPXOR   Y1, Y0, Y0
	VPSLLD  $7, Y0, Y1
	VPAND   Y13, Y1, Y1
	VPXOR   Y1, Y0, Y0
	VPSLLD  $15, Y0, Y1
	VPAND   Y12, Y1, Y1
	VPXOR   Y1, Y0, Y0
	VPSRLD  $18, Y0, Y1
	VPXOR   Y1, Y0, Y0
	VMOVDQU Y0, (DI)(CX*1)
	ADDQ    $32, CX
	CMPQ    CX, $512
	JNE     eight
	VZEROUPPER
	RET
