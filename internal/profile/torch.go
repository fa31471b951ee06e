package profile

import (
	"fmt"

	"github.com/shoalfs/shoal/prefetch/infer"
	"github.com/shoalfs/shoal/prefetch/order"
)

// torchOrder is a shuffle of PyTorch that the opens follow.
type torchOrder struct {
	finding infer.Finding
	after   int // opens
	epochs  int // followed, including the first
}

// recognise looks for a shuffle of PyTorch behind the opens, like a mount, but only among common seeds, which takes a
// fraction of a second. It returns nil if there is none.
func (a *analysis) recognise() *torchOrder {
	if a.searched {
		return a.torch
	}
	a.searched = true
	t := a.trace
	subsets := []infer.Subset{{Len: t.Samples}}
	for _, tree := range t.Trees {
		if tree.First >= 0 && tree.Len > 0 && tree.First+tree.Len <= t.Samples {
			subsets = append(subsets, infer.Subset{Folder: tree.Folder, First: tree.First, Len: tree.Len})
		}
	}
	d := infer.NewDetector(subsets)
	searches := 0
	for i := range a.visits {
		v := &a.visits[i]
		sample := t.Files[int(v.file)].Sample
		if sample < 0 || sample >= t.Samples {
			continue
		}
		a.changed(d, d.Open(infer.Open{Process: v.process, Sample: uint32(sample)}), i+1)
		for s := d.Next(tooLong); s != nil && searches < a.options.Searches; s = d.Next(tooLong) {
			if s.Depth == infer.Usual {
				searches++
			}
			if f, ok := search(s); ok {
				a.changed(d, d.Lock(s, f), i+1)
			}
		}
	}
	return a.torch
}

// tooLong marks longer searches as already in progress, so that none is started.
func tooLong(d infer.Depth) bool { return d > infer.Usual }

// search searches common seeds.
func search(s *infer.Search) (best infer.Finding, ok bool) {
	for step := 0; step < s.Steps() && !ok; step++ {
		s.Run(step, func() bool { return ok }, func(f infer.Finding) {
			if !ok || f.Bits > best.Bits {
				best, ok = f, true
			}
		})
	}
	return best, ok
}

func (a *analysis) changed(d *infer.Detector, c infer.Change, opens int) {
	switch c {
	case infer.None, infer.Unlocked:
	case infer.Followed:
		a.torch.epochs++
	case infer.Locked, infer.Widened:
		f, _, locked := d.Finding()
		if !locked {
			return
		}
		if a.torch == nil {
			a.torch = &torchOrder{after: opens, epochs: 1}
		}
		a.torch.finding = f
	}
}

// sampler names the sampler in PyTorch that shuffles like this.
func (t *torchOrder) sampler() string {
	f := t.finding
	ranks := ""
	if f.World > 1 {
		ranks = fmt.Sprintf(", rank %s of %d", order.Ranks{First: f.First, Last: f.Last}, f.World)
	}
	switch f.Source.Kind {
	case infer.Drawn:
		return "DataLoader(shuffle=True), or one epoch of a DistributedSampler" + ranks
	case infer.Successive:
		return "DistributedSampler" + ranks
	case infer.Default:
		return "DataLoader(shuffle=True) after torch.manual_seed" + ranks
	}
	return "DataLoader(shuffle=True, generator=...)" + ranks
}
