package order

// Torch returns what torch.utils.data.DistributedSampler(shuffle=True, seed=seed, num_replicas=world,
// drop_last=dropLast) gives the ranks first..last (inclusive) of an n-sample dataset after set_epoch(epoch), in the
// order of time: step by step, and within a step by rank. A single process is world 1, rank 0.
//
// Without dropLast the permutation is padded to a multiple of world from its own beginning,
// repeatedly if it is shorter than the padding, so samples may occur twice or more. With it, the
// tail beyond the last multiple of world is left out.
//
// It takes 4n bytes. It panics on n outside 0..2^32-1-world and on ranks outside the world;
// Spec.Order returns errors instead.
func Torch(n int, seed uint64, epoch, world, first, last int, dropLast bool) Order {
	// Python adds without overflow and torch takes the seed modulo 2^64, of which MT19937 uses the
	// low 32 bits: the sum may wrap here.
	perm := NewGenerator(seed + uint64(epoch)).RandPerm(n)
	total := n / world * world
	if !dropLast && total < n {
		total += world
	}
	return Stripe(wrapped{perm, total}, world, first, last)
}

// wrapped cuts or cyclically repeats a permutation to n positions.
type wrapped struct {
	perm []uint32
	n    int
}

func (w wrapped) Len() int { return w.n }

func (w wrapped) At(pos int) int {
	check(pos, w.n)
	return int(w.perm[pos%len(w.perm)])
}
