// PTX as text, parsed into instructions and interpreted: the subset that clang makes of gpuingest/cuda/kernel. What is
// beyond it fails when the module is loaded.
#pragma once

#include "driver.h"

typedef enum {
	I_ADD, I_AND, I_BAR, I_BFE, I_BRA, I_CVT, I_CVTA, I_DIV, I_LD, I_MAD, I_MIN, I_MOV, I_MUL, I_OR,
	I_PRMT, I_RET, I_SELP, I_SETP, I_SHL, I_SHR, I_ST, I_SUB,
} opcode;

typedef enum { C_EQ, C_NE, C_LT, C_LE, C_GT, C_GE } comparison;
typedef enum { GENERIC, PARAM, GLOBAL, SHARED } space;
typedef enum { NOTHING, REGISTER, NUMBER, SPECIAL } operand_kind;

typedef struct {
	operand_kind kind;
	int reg;      // or number of the special register
	int64_t value; // or what is added to the register of an address
} operand;

typedef struct {
	uint8_t bytes; // 0: a predicate
	bool sign;
} type;

typedef struct {
	opcode code;
	type type, from; // from: of cvt's source
	comparison compare;
	space space;
	bool wide; // of mul and mad; else the low half
	int vector;
	int guard; // register of the predicate, -1: none
	bool negated;
	operand operands[5]; // of ld and st: the address, then what is loaded or stored
	int target;          // of bra
	int line;
} instruction;

typedef struct function {
	char name[128];
	instruction *code;
	int length, registers;
	struct {
		unsigned offset, bytes;
	} params[32];
	int nparams;
	unsigned params_bytes, shared_bytes;
	struct module *module;
	struct function *next;
} function;

typedef struct module {
	function *functions;
} module;

// ptx_parse.c: NULL, with what is wrong in error
module *ptx_parse(const char *text, char *error, size_t size);
void ptx_free(module *);

// ptx_run.c
void launch(op *o);

// module.c
size_t function_params(const function *);
const char *function_name(const function *);
void function_gather(const function *, void **params, void *to);
