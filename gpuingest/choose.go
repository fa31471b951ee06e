package gpuingest

import (
	"image"
	"slices"
	"strings"
)

// compounds are the operations that hold others. Those are single operations: compounds do not nest.
var compounds = map[string]operationKind{
	"RandomApply":  {[]param{{"transforms", ""}, {"p", "0.5"}}, buildApply},
	"RandomChoice": {choiceParams, buildChoice},
}

// operationOf finds an operation by its name. RandomChoice may be a step over the batch instead.
func operationOf(c call) (operationKind, bool) {
	if o, ok := operations[c.name]; ok {
		return o, true
	}
	o, ok := compounds[c.name]
	return o, ok && !mixes(c)
}

// applying is torchvision's RandomApply: all of its operations, one after the other, or none.
type applying struct {
	ops []compiled
	p   float64
}

func buildApply(a *args) operation { return &applying{a.transforms(), a.probability("p")} }

// The operations draw from the compound's numbers, after its own.
func (o *applying) draw(steps []step, size image.Point, r *Rand) []step {
	if r.Float64() >= o.p {
		return steps
	}
	for _, op := range o.ops {
		steps, size = op.next(steps, size, r)
	}
	return steps
}

func (o *applying) out(in image.Point) image.Point {
	out := in
	for _, op := range o.ops {
		out = op.out(out)
	}
	if out != in {
		return image.Point{} // it may differ
	}
	return in
}

// choice is torchvision's RandomChoice: one of its operations.
type choice struct {
	ops     []compiled
	weights []float64 // nil: equal
}

func buildChoice(a *args) operation {
	o := &choice{ops: a.transforms()}
	o.weights = a.weights(len(o.ops))
	return o
}

func (o *choice) draw(steps []step, size image.Point, r *Rand) []step {
	return o.ops[pick(len(o.ops), o.weights, r)].draw(steps, size, r)
}

func (o *choice) out(in image.Point) image.Point {
	out := o.ops[0].out(in)
	if slices.ContainsFunc(o.ops, func(op compiled) bool { return op.out(in) != out }) {
		return image.Point{}
	}
	return out
}

// pick chooses one of n, by weights if there are any.
func pick(n int, weights []float64, r *Rand) int {
	u := r.Float64()
	if weights == nil {
		return int(u * float64(n))
	}
	sum, at := 0.0, 0
	for _, w := range weights {
		sum += w
	}
	for u *= sum; at < n-1 && u >= weights[at]; at++ {
		u -= weights[at]
	}
	return at
}

// transforms parses the operations of a compound.
func (a *args) transforms() (ops []compiled) {
	v := a.val["transforms"]
	if v.kind != 't' || len(v.list) < 1 || len(v.list) > maxOps {
		a.bad(v, "transforms must be a list of 1 to %d operations, such as [ColorJitter(0.4), RandomGrayscale()]",
			maxOps)
		return nil
	}
	var texts []string
	for _, x := range v.list {
		o, ok := operations[x.call.name]
		if !ok {
			a.bad(x, "transforms must contain single operations with their arguments, such as RandomGrayscale(0.2)")
			break
		}
		b, err := bind(a.p, x.call, o.params)
		if err == nil {
			ops = append(ops, compiled{o.build(b), b.String()})
			texts, err = append(texts, b.String()), b.err
		}
		if a.err == nil {
			a.err = err
		}
	}
	a.val["transforms"] = value{kind: 'o', str: "[" + strings.Join(texts, ", ") + "]"}
	return ops
}

// weights parses p of RandomChoice: None, or a weight for each of n.
func (a *args) weights(n int) (list []float64) {
	v := a.val["p"]
	if v.kind == 'n' {
		return nil
	}
	if v.kind != 't' || len(v.list) != n {
		a.bad(v, "p must be None or a probability for each of transforms")
	}
	sum := 0.0
	for _, x := range v.list {
		if !x.number() || x.num < 0 || x.num > 1e6 {
			a.bad(x, "p must contain numbers of at least 0")
		}
		list = append(list, x.num)
		sum += x.num
	}
	if sum <= 0 {
		a.bad(v, "p must not be 0 for all")
	}
	a.val["p"] = tuple(float, list...)
	return list
}
