// The interpreter: block after block, the threads of a block one after the other from barrier to barrier. Each access to
// memory is checked: it has to lie in one live allocation, at a multiple of its size.

#include <stdlib.h>
#include <string.h>

#include "ptx.h"

// A window is the memory that was reached last: neighbours lie in it, and the tables need not be searched.
typedef struct {
	uint64_t base, size;
	char *bytes;
	int access;
} window;

typedef struct {
	const op *op;
	const function *f;
	unsigned block[3];
	char *shared;
	uint64_t shared_bytes;
	window windows[4];
	int newest;
	bool failed;
} grid;

typedef struct {
	unsigned id[3];
	int pc;
	bool over;
	uint64_t *registers;
} thread;

static uint64_t fit(uint64_t v, unsigned bytes) { return bytes >= 8 ? v : bytes == 0 ? v & 1 : v & ((1ull << (8 * bytes)) - 1); }

static int64_t extend(uint64_t v, unsigned bytes) {
	unsigned shift = bytes == 0 ? 63 : 64 - 8 * bytes;
	return (int64_t)(v << shift) >> shift;
}

static void complain(grid *g, const instruction *i, CUresult result, const char *what) {
	g->failed = true;
	fatal(result, "kernel %s, PTX line %d: %s", g->f->name, i->line, what);
}

static char *global(grid *g, uint64_t address, unsigned bytes, int access) {
	for (int k = 0; k < 4; k++) {
		const window *w = &g->windows[k];
		if (w->bytes != NULL && (w->access & access) == access && address - w->base < w->size && bytes <= w->size - (address - w->base))
			return w->bytes + (address - w->base);
	}
	char *p = reach(address, bytes, access, g->f->name);
	if (p == NULL) {
		g->failed = true;
		return NULL;
	}
	pthread_mutex_lock(&lock);
	range *r = range_at(address);
	if (r != NULL)
		g->windows[g->newest++ % 4] = (window){r->base, r->size, r->alias, r->access};
	pthread_mutex_unlock(&lock);
	return p;
}

static uint64_t special(const grid *g, const thread *t, int which) {
	switch (which / 3) {
	case 0:
		return t->id[which % 3];
	case 1:
		return g->op->block[which % 3];
	case 2:
		return g->block[which % 3];
	}
	return g->op->grid[which % 3];
}

static uint64_t value(const grid *g, const thread *t, const operand *o) {
	switch (o->kind) {
	case REGISTER:
		return t->registers[o->reg];
	case NUMBER:
		return (uint64_t)o->value;
	case SPECIAL:
		return special(g, t, o->reg);
	case NOTHING:
		break;
	}
	return 0;
}

static void memory(grid *g, thread *t, const instruction *i) {
	unsigned bytes = i->type.bytes, all = bytes * (unsigned)i->vector;
	const operand *a = &i->operands[0];
	uint64_t address = a->kind == REGISTER ? t->registers[a->reg] + (uint64_t)a->value : (uint64_t)a->value;
	char *p = NULL;
	if (address % all != 0) {
		complain(g, i, CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address");
		return;
	}
	if (i->space == PARAM) {
		if (address + all <= g->f->params_bytes)
			p = (char *)g->op->params + address;
	} else if (i->space == SHARED) {
		if (address <= g->shared_bytes && all <= g->shared_bytes - address)
			p = g->shared + address;
	} else
		p = global(g, address, all, i->code == I_LD ? 1 : 2);
	if (p == NULL) {
		if (!g->failed)
			complain(g, i, CUDA_ERROR_ILLEGAL_ADDRESS, "beyond shared memory or parameters");
		return;
	}
	for (int k = 0; k < i->vector; k++, p += bytes) {
		const operand *o = &i->operands[1 + k];
		if (i->code == I_LD) {
			uint64_t v = 0;
			memcpy(&v, p, bytes);
			t->registers[o->reg] = i->type.sign ? (uint64_t)extend(v, bytes) : v;
		} else {
			uint64_t v = value(g, t, o);
			memcpy(p, &v, bytes);
		}
	}
}

static bool compare(const instruction *i, uint64_t a, uint64_t b) {
	unsigned n = i->type.bytes;
	int64_t x = extend(a, n), y = extend(b, n);
	a = fit(a, n), b = fit(b, n);
	bool less = i->type.sign ? x < y : a < b;
	switch (i->compare) {
	case C_EQ:
		return a == b;
	case C_NE:
		return a != b;
	case C_LT:
		return less;
	case C_LE:
		return less || a == b;
	case C_GT:
		return !less && a != b;
	case C_GE:
		return !less;
	}
	return false;
}

static uint64_t permute(uint64_t a, uint64_t b, uint64_t selector) {
	uint64_t bytes = fit(a, 4) | b << 32, result = 0;
	for (int k = 0; k < 4; k++) {
		unsigned s = selector >> (4 * k) & 15;
		uint64_t v = bytes >> (8 * (s & 7)) & 255;
		if (s & 8)
			v = v & 128 ? 255 : 0;
		result |= v << (8 * k);
	}
	return result;
}

// divide is defined as hardware leaves it: by zero all bits are set.
static uint64_t divide(const instruction *i, uint64_t a, uint64_t b) {
	unsigned n = i->type.bytes;
	if (fit(b, n) == 0)
		return ~0ull;
	if (!i->type.sign)
		return fit(a, n) / fit(b, n);
	int64_t x = extend(a, n), y = extend(b, n);
	return y == -1 ? (uint64_t)0 - (uint64_t)x : (uint64_t)(x / y);
}

static uint64_t multiply(const instruction *i, uint64_t a, uint64_t b) {
	unsigned n = i->type.bytes;
	return i->type.sign ? (uint64_t)(extend(a, n)) * (uint64_t)extend(b, n) : fit(a, n) * fit(b, n);
}

static uint64_t compute(const grid *g, const thread *t, const instruction *i) {
	unsigned n = i->type.bytes;
	uint64_t a = value(g, t, &i->operands[1]), b = value(g, t, &i->operands[2]), c = value(g, t, &i->operands[3]);
	bool sign = i->type.sign;
	switch (i->code) {
	case I_ADD:
		return a + b;
	case I_SUB:
		return a - b;
	case I_AND:
		return a & b;
	case I_OR:
		return a | b;
	case I_MUL:
		return multiply(i, a, b);
	case I_MAD:
		return multiply(i, a, b) + c;
	case I_DIV:
		return divide(i, a, b);
	case I_MIN:
		return (sign ? extend(a, n) < extend(b, n) : fit(a, n) < fit(b, n)) ? a : b;
	case I_SHL:
		b = fit(b, 4); // the count is 32 bits wide
		return b >= 8 * n ? 0 : a << b;
	case I_SHR:
		b = fit(b, 4);
		if (sign)
			return (uint64_t)(extend(a, n) >> (b > 63 ? 63 : b));
		return b >= 8 * n ? 0 : fit(a, n) >> b;
	case I_BFE: {
		unsigned from = b & 255, length = c & 255;
		uint64_t v = from >= 8 * n ? 0 : fit(a, n) >> from;
		v = length >= 64 ? v : v & ((1ull << length) - 1);
		if (sign && length > 0 && length < 64 && v >> (length - 1) & 1)
			v |= ~0ull << length;
		return v;
	}
	case I_PRMT:
		return permute(a, b, c);
	case I_SELP:
		return c & 1 ? a : b;
	case I_SETP:
		return compare(i, a, b);
	case I_CVT: // from the source's width and sign
		return i->from.sign ? (uint64_t)extend(a, i->from.bytes) : fit(a, i->from.bytes);
	default: // mov, cvta
		return a;
	}
}

// advance runs a thread to a barrier or to its end.
static void advance(grid *g, thread *t) {
	while (!g->failed && t->pc < g->f->length) {
		const instruction *i = &g->f->code[t->pc++];
		if (i->guard >= 0 && (t->registers[i->guard] & 1) == i->negated)
			continue;
		switch (i->code) {
		case I_BAR:
			return;
		case I_RET:
			t->over = true;
			return;
		case I_BRA:
			t->pc = i->target;
			break;
		case I_LD:
		case I_ST:
			memory(g, t, i);
			break;
		default: {
			unsigned bytes = i->code == I_SETP ? 0 : i->type.bytes;
			if (i->wide)
				bytes *= 2;
			t->registers[i->operands[0].reg] = fit(compute(g, t, i), bytes);
		}
		}
	}
	t->over = true;
}

static void run_block(grid *g, thread *threads, unsigned count) {
	memset(g->shared, 0xa5, g->shared_bytes);
	for (unsigned k = 0; k < count; k++) {
		unsigned x = g->op->block[0], y = g->op->block[1];
		threads[k].id[0] = k % x, threads[k].id[1] = k / x % y, threads[k].id[2] = k / x / y;
		threads[k].pc = 0, threads[k].over = false;
	}
	for (bool more = true; more && !g->failed;) {
		more = false;
		for (unsigned k = 0; k < count && !g->failed; k++)
			if (!threads[k].over) {
				advance(g, &threads[k]);
				more = more || !threads[k].over;
			}
	}
}

void launch(op *o) {
	const function *f = o->function;
	unsigned count = o->block[0] * o->block[1] * o->block[2];
	grid g = {.op = o, .f = f, .shared_bytes = f->shared_bytes + o->shared};
	g.shared = malloc(g.shared_bytes + 1);
	thread *threads = calloc(count, sizeof *threads);
	uint64_t *registers = calloc((size_t)count * (size_t)(f->registers + 1), sizeof *registers);
	for (unsigned k = 0; k < count; k++)
		threads[k].registers = registers + (size_t)k * (size_t)(f->registers + 1);
	for (g.block[2] = 0; g.block[2] < o->grid[2]; g.block[2]++)
		for (g.block[1] = 0; g.block[1] < o->grid[1]; g.block[1]++)
			for (g.block[0] = 0; g.block[0] < o->grid[0] && !g.failed; g.block[0]++)
				run_block(&g, threads, count);
	free(registers);
	free(threads);
	free(g.shared);
}
