// The parser of PTX: statement by statement, since the subset has no nesting but a function's body.

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ptx.h"

typedef struct {
	char name[128];
	int64_t value; // offset of a variable in shared memory, or of a parameter, or index of a label's instruction
} symbol;

typedef struct {
	symbol *list;
	int count;
} symbols;

typedef struct {
	char prefix[32];
	int count, base;
} bank;

typedef struct {
	const char *at;
	int line;
	char *error;
	size_t size;
	bool failed;
	symbols shared, params, labels;
	unsigned shared_bytes;
	bank banks[32];
	int nbanks;
	function *f;
	// Branches name labels that may come later.
	symbols branches;
} parser;

static void fail(parser *p, const char *format, ...) {
	if (p->failed)
		return;
	p->failed = true;
	int n = snprintf(p->error, p->size, "PTX line %d: ", p->line);
	va_list list;
	va_start(list, format);
	vsnprintf(p->error + n, p->size - (size_t)n, format, list);
	va_end(list);
}

static void remember(symbols *s, const char *name, int64_t value) {
	s->list = realloc(s->list, (size_t)(s->count + 1) * sizeof *s->list);
	snprintf(s->list[s->count].name, sizeof s->list[0].name, "%s", name);
	s->list[s->count++].value = value;
}

static const symbol *look(const symbols *s, const char *name) {
	for (int i = 0; i < s->count; i++)
		if (strcmp(s->list[i].name, name) == 0)
			return &s->list[i];
	return NULL;
}

// token reads the next word (letters, digits, _ $ % .), number or sign into t; "" at the end.
static void token(parser *p, char t[128]) {
	for (;;) {
		while (isspace((unsigned char)*p->at))
			p->line += *p->at++ == '\n';
		if (p->at[0] == '/' && p->at[1] == '/')
			while (*p->at != 0 && *p->at != '\n')
				p->at++;
		else
			break;
	}
	int n = 0;
	if (isalnum((unsigned char)*p->at) || (*p->at != 0 && strchr("_$%.", *p->at) != NULL))
		while ((isalnum((unsigned char)*p->at) || (*p->at != 0 && strchr("_$%.", *p->at) != NULL)) && n < 127)
			t[n++] = *p->at++;
	else if (*p->at == '"') {
		do
			if (n < 126)
				t[n++] = *p->at;
		while (*++p->at != 0 && *p->at != '"');
		if (*p->at != 0)
			p->at++;
	} else if (*p->at != 0)
		t[n++] = *p->at++;
	t[n] = 0;
}

static bool expect(parser *p, const char *want) {
	char t[128];
	token(p, t);
	if (strcmp(t, want) != 0)
		fail(p, "%s where %s is wanted", *t ? t : "the end", want);
	return !p->failed;
}

static bool parse_type(const char *t, type *to) {
	static const struct {
		const char *name;
		type type;
	} types[] = {{"pred", {0, false}}, {"u8", {1, false}},  {"u16", {2, false}}, {"u32", {4, false}}, {"u64", {8, false}},
	             {"s8", {1, true}},    {"s16", {2, true}},  {"s32", {4, true}},  {"s64", {8, true}},  {"b8", {1, false}},
	             {"b16", {2, false}},  {"b32", {4, false}}, {"b64", {8, false}}};
	for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
		if (strcmp(t, types[i].name) == 0) {
			*to = types[i].type;
			return true;
		}
	return false;
}

// declare reads "[.align N] .type name[bytes]" and returns the offset in a block that has *used bytes. end is what follows.
static void declare(parser *p, symbols *to, unsigned *used, char end[128]) {
	char t[128];
	unsigned align = 1, bytes;
	token(p, t);
	if (strcmp(t, ".align") == 0) {
		token(p, t);
		align = (unsigned)strtoul(t, NULL, 10);
		token(p, t);
	}
	type element;
	if (*t != '.' || !parse_type(t + 1, &element) || element.bytes == 0) {
		fail(p, "type %s is not supported", t);
		return;
	}
	char name[128];
	token(p, name);
	bytes = element.bytes;
	token(p, end);
	if (strcmp(end, "[") == 0) {
		token(p, t);
		bytes *= (unsigned)strtoul(t, NULL, 10);
		expect(p, "]");
		token(p, end);
	}
	if (align < element.bytes)
		align = element.bytes;
	*used = (*used + align - 1) / align * align;
	remember(to, name, *used);
	*used += bytes;
	if (to == &p->params) {
		if (p->f->nparams == (int)(sizeof p->f->params / sizeof p->f->params[0])) {
			fail(p, "more than %d parameters", p->f->nparams);
			return;
		}
		p->f->params[p->f->nparams].offset = *used - bytes;
		p->f->params[p->f->nparams++].bytes = bytes;
	}
}

static int find_register(parser *p, const char *name) {
	size_t n = strlen(name), digits = n;
	while (digits > 0 && isdigit((unsigned char)name[digits - 1]))
		digits--;
	for (int i = 0; i < p->nbanks; i++) {
		const bank *b = &p->banks[i];
		if (b->count == 0 && strcmp(b->prefix, name) == 0)
			return b->base;
		if (b->count > 0 && digits < n && strlen(b->prefix) == digits && strncmp(b->prefix, name, digits) == 0 &&
		    atoi(name + digits) < b->count)
			return b->base + atoi(name + digits);
	}
	return -1;
}

static const char *const specials[] = {"%tid.x",    "%tid.y",    "%tid.z",    "%ntid.x",   "%ntid.y",   "%ntid.z",
                                       "%ctaid.x",  "%ctaid.y",  "%ctaid.z",  "%nctaid.x", "%nctaid.y", "%nctaid.z"};

static operand parse_operand(parser *p, const char *t) {
	operand o = {NOTHING, 0, 0};
	if (*t == '%') {
		for (size_t i = 0; i < sizeof specials / sizeof specials[0]; i++)
			if (strcmp(t, specials[i]) == 0)
				return (operand){SPECIAL, (int)i, 0};
		o.kind = REGISTER, o.reg = find_register(p, t);
		if (o.reg < 0)
			fail(p, "register %s is not supported", t);
	} else if (*t == '-') {
		char digits[128];
		token(p, digits);
		o.kind = NUMBER, o.value = -(int64_t)strtoull(digits, NULL, 0);
	} else if (isdigit((unsigned char)*t)) {
		char *end;
		o.kind = NUMBER, o.value = (int64_t)strtoull(t, &end, 0);
		if (*end != 0 && strcmp(end, "U") != 0)
			fail(p, "number %s is not supported", t);
	} else {
		const symbol *s = look(&p->shared, t);
		if (s == NULL)
			s = look(&p->params, t);
		if (s == NULL)
			fail(p, "%s is not known", *t ? t : "the end");
		else
			o.kind = NUMBER, o.value = s->value;
	}
	return o;
}

static operand parse_address(parser *p) {
	char t[128];
	token(p, t);
	operand o = parse_operand(p, t);
	token(p, t);
	if (strcmp(t, "+") == 0) {
		token(p, t);
		int sign = strcmp(t, "-") == 0 ? -1 : 1;
		if (sign < 0)
			token(p, t);
		o.value += sign * (int64_t)strtoull(t, NULL, 0);
		token(p, t);
	}
	if (strcmp(t, "]") != 0)
		fail(p, "address: %s where ] is wanted", t);
	return o;
}

static const struct {
	const char *name;
	opcode code;
	int operands;
	const char *modifiers; // besides the type, each in spaces
} table[] = {
    {"add", I_ADD, 3, ""}, {"and", I_AND, 3, ""}, {"bar", I_BAR, 1, " sync "}, {"bfe", I_BFE, 4, ""},
    {"bra", I_BRA, 1, " uni "}, {"cvt", I_CVT, 2, ""}, {"cvta", I_CVTA, 2, " to global "},
    {"div", I_DIV, 3, ""}, {"ld", I_LD, 2, " param global shared nc v2 v4 "}, {"mad", I_MAD, 4, " lo wide "},
    {"min", I_MIN, 3, ""}, {"mov", I_MOV, 2, ""}, {"mul", I_MUL, 3, " lo wide "}, {"or", I_OR, 3, ""},
    {"prmt", I_PRMT, 4, ""}, {"ret", I_RET, 0, " uni "}, {"selp", I_SELP, 4, ""},
    {"setp", I_SETP, 3, " eq ne lt le gt ge "}, {"shl", I_SHL, 3, ""}, {"shr", I_SHR, 3, ""},
    {"st", I_ST, 2, " global shared v2 v4 "}, {"sub", I_SUB, 3, ""},
};

// parse_mnemonic splits, for instance, ld.global.nc.v2.u16. It returns the number of operands.
static int parse_mnemonic(parser *p, const char *word, instruction *i) {
	char copy[128], *rest;
	snprintf(copy, sizeof copy, "%s", word);
	const char *part = strtok_r(copy, ".", &rest);
	size_t row = 0;
	while (row < sizeof table / sizeof table[0] && (part == NULL || strcmp(part, table[row].name) != 0))
		row++;
	if (row == sizeof table / sizeof table[0]) {
		fail(p, "instruction %s is not supported", word);
		return 0;
	}
	i->code = table[row].code, i->vector = 1;
	int types = 0;
	while ((part = strtok_r(NULL, ".", &rest)) != NULL) {
		type t;
		char spaced[140];
		snprintf(spaced, sizeof spaced, " %s ", part);
		if (parse_type(part, &t)) {
			if (types++ == 0)
				i->type = t;
			i->from = t;
		} else if (strstr(table[row].modifiers, spaced) == NULL) {
			fail(p, "instruction %s is not supported: .%s", word, part);
			return 0;
		}
		static const char *const comparisons[] = {"eq", "ne", "lt", "le", "gt", "ge"};
		for (int c = 0; c < 6; c++)
			if (strcmp(part, comparisons[c]) == 0)
				i->compare = (comparison)c;
		if (strcmp(part, "param") == 0)
			i->space = PARAM;
		else if (strcmp(part, "global") == 0)
			i->space = GLOBAL;
		else if (strcmp(part, "shared") == 0)
			i->space = SHARED;
		else if (strcmp(part, "wide") == 0)
			i->wide = true;
		else if (strcmp(part, "v2") == 0)
			i->vector = 2;
		else if (strcmp(part, "v4") == 0)
			i->vector = 4;
	}
	return table[row].operands;
}

static void parse_instruction(parser *p, char *word) {
	function *f = p->f;
	instruction i = {.guard = -1, .target = -1, .line = p->line};
	char t[128];
	if (*word == '@') {
		token(p, t);
		if (strcmp(t, "!") == 0) {
			i.negated = true;
			token(p, t);
		}
		i.guard = find_register(p, t);
		if (i.guard < 0)
			fail(p, "predicate %s is not supported", t);
		token(p, word);
	}
	int operands = parse_mnemonic(p, word, &i);
	if (i.code == I_BRA) {
		token(p, t);
		remember(&p->branches, t, f->length);
		operands = 0;
	}
	int n = 0;
	for (int k = 0; k < operands && !p->failed; k++) {
		if (k > 0)
			expect(p, ",");
		token(p, t);
		bool memory = i.code == I_LD || i.code == I_ST;
		if (memory && strcmp(t, "[") == 0) {
			i.operands[0] = parse_address(p);
		} else if (memory && strcmp(t, "{") == 0) {
			for (int v = 0; v < i.vector && !p->failed; v++) {
				token(p, t);
				i.operands[1 + v] = parse_operand(p, t);
				expect(p, v + 1 < i.vector ? "," : "}");
			}
		} else if (memory)
			i.operands[1] = parse_operand(p, t);
		else
			i.operands[n++] = parse_operand(p, t);
	}
	expect(p, ";");
	f->code = realloc(f->code, (size_t)(f->length + 1) * sizeof *f->code);
	f->code[f->length++] = i;
}

static void parse_registers(parser *p) {
	char t[128];
	token(p, t); // the type: all are 64 bits wide here
	type ignored;
	if (*t != '.' || !parse_type(t + 1, &ignored)) {
		fail(p, "registers of type %s are not supported", t);
		return;
	}
	do {
		bank *b = &p->banks[p->nbanks];
		token(p, t);
		if (p->nbanks + 1 == (int)(sizeof p->banks / sizeof p->banks[0]) || strlen(t) >= sizeof b->prefix) {
			fail(p, "too many or too long register names at %s", t);
			return;
		}
		p->nbanks++;
		snprintf(b->prefix, sizeof b->prefix, "%s", t);
		b->count = 0, b->base = p->f->registers;
		token(p, t);
		if (strcmp(t, "<") == 0) {
			token(p, t);
			b->count = atoi(t);
			expect(p, ">");
			token(p, t);
		}
		p->f->registers += b->count > 0 ? b->count : 1;
	} while (strcmp(t, ",") == 0 && !p->failed);
	if (strcmp(t, ";") != 0)
		fail(p, "%s where ; is wanted", t);
}

static void parse_body(parser *p) {
	char t[128];
	for (;;) {
		token(p, t);
		if (p->failed || strcmp(t, "}") == 0)
			break;
		if (*t == 0)
			fail(p, "a function without end");
		else if (strcmp(t, ".reg") == 0)
			parse_registers(p);
		else if (strcmp(t, ".shared") == 0) {
			declare(p, &p->shared, &p->shared_bytes, t);
			if (strcmp(t, ";") != 0)
				fail(p, "%s where ; is wanted", t);
		} else if (strcmp(t, ".pragma") == 0) {
			token(p, t);
			expect(p, ";");
		} else if (*t == '.')
			fail(p, "directive %s is not supported", t);
		else if (*t != '@' && *p->at == ':') {
			p->at++;
			remember(&p->labels, t, p->f->length);
		} else
			parse_instruction(p, t);
	}
	for (int i = 0; i < p->branches.count && !p->failed; i++) {
		const symbol *label = look(&p->labels, p->branches.list[i].name);
		if (label == NULL)
			fail(p, "label %s is missing", p->branches.list[i].name);
		else
			p->f->code[p->branches.list[i].value].target = (int)label->value;
	}
}

static void parse_function(parser *p, module *m) {
	char t[128];
	p->f = calloc(1, sizeof *p->f);
	p->f->module = m, p->f->next = m->functions;
	m->functions = p->f;
	p->params.count = p->labels.count = p->branches.count = p->nbanks = 0;
	token(p, p->f->name);
	token(p, t);
	if (strcmp(t, "(") == 0) {
		token(p, t);
		while (strcmp(t, ".param") == 0 && !p->failed) {
			declare(p, &p->params, &p->f->params_bytes, t);
			if (strcmp(t, ",") == 0)
				token(p, t);
		}
		if (strcmp(t, ")") != 0)
			fail(p, "parameters: %s is not supported", t);
		token(p, t);
	}
	while (!p->failed && (strcmp(t, ".maxntid") == 0 || strcmp(t, ".minnctapersm") == 0 || strcmp(t, ".maxnreg") == 0)) {
		do
			token(p, t);
		while (isdigit((unsigned char)*t) || *t == ',');
	}
	if (strcmp(t, "{") != 0)
		fail(p, "function %s: %s where { is wanted", p->f->name, t);
	if (!p->failed)
		parse_body(p);
}

module *ptx_parse(const char *text, char *error, size_t size) {
	parser p = {.at = text, .line = 1, .error = error, .size = size};
	module *m = calloc(1, sizeof *m);
	char t[128];
	for (;;) {
		token(&p, t);
		if (p.failed || *t == 0)
			break;
		if (strcmp(t, ".version") == 0 || strcmp(t, ".target") == 0 || strcmp(t, ".address_size") == 0)
			token(&p, t);
		else if (strcmp(t, ".visible") == 0)
			continue;
		else if (strcmp(t, ".shared") == 0) {
			declare(&p, &p.shared, &p.shared_bytes, t);
			if (strcmp(t, ";") != 0)
				fail(&p, "%s where ; is wanted", t);
		} else if (strcmp(t, ".entry") == 0)
			parse_function(&p, m);
		else
			fail(&p, "%s is not supported", t);
	}
	for (function *f = m->functions; f != NULL; f = f->next)
		f->shared_bytes = p.shared_bytes;
	free(p.shared.list);
	free(p.params.list);
	free(p.labels.list);
	free(p.branches.list);
	if (!p.failed && m->functions == NULL)
		fail(&p, "no kernel in it");
	if (p.failed) {
		ptx_free(m);
		return NULL;
	}
	return m;
}

void ptx_free(module *m) {
	for (function *f = m->functions; f != NULL;) {
		function *next = f->next;
		free(f->code);
		free(f);
		f = next;
	}
	free(m);
}
