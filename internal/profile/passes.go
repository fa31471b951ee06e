package profile

import (
	"math"
	"slices"
)

// pass is a run of visits in which few files repeat: an epoch, or a part of one.
type pass struct {
	visits  []int // into digest.visits
	files   int   // different ones
	repeats int
}

const (
	// A reader that begins another epoch repeats files: half of the last passWindow visits.
	passWindow = 32
)

// findPasses separates the jobs that share the mount, and cuts the visits of the largest into passes, without immediate
// repeats.
func (d *digest) findPasses() {
	jobs := d.findJobs()
	var job []int
	for _, j := range jobs {
		if len(j) > len(job) {
			job = j
		}
	}
	if len(jobs) > 1 {
		for _, j := range jobs {
			if 5*len(j) >= len(job) {
				d.jobs++
			}
		}
	}
	d.jobs = max(d.jobs, 1)

	c := cutter{d: d, seen: map[int32]bool{}}
	for _, i := range job {
		c.add(i)
		if c.begun() {
			// The new pass begins with the first repeat of the window.
			tail := max(0, len(c.repeat)-passWindow)
			cut := tail + slices.Index(c.repeat[tail:], true)
			moved := slices.Clone(c.pass.visits[cut:])
			for j := cut; j < len(c.repeat); j++ {
				c.take(j, -1)
			}
			c.pass.visits = c.pass.visits[:cut]
			c.flush()
			for _, j := range moved {
				c.add(j)
			}
		}
	}
	c.flush()
}

// cutter cuts visits into passes.
type cutter struct {
	d      *digest
	pass   pass
	seen   map[int32]bool
	repeat []bool // by visit of the pass
}

func (c *cutter) add(i int) {
	file := c.d.visits[i].file
	c.pass.visits = append(c.pass.visits, i)
	c.repeat = append(c.repeat, c.seen[file])
	c.seen[file] = true
	c.take(len(c.repeat)-1, 1)
}

func (c *cutter) take(j, sign int) {
	if c.repeat[j] {
		c.pass.repeats += sign
	} else {
		c.pass.files += sign
	}
}

// begun reports whether the latest visits are mostly repeats: all of the window after the first one.
func (c *cutter) begun() bool {
	tail := c.repeat[max(0, len(c.repeat)-passWindow):]
	n := 0
	for _, r := range tail {
		if r {
			n++
		}
	}
	first := slices.Index(tail, true)
	return n >= passWindow/2 && first >= 0 && 4*n >= 3*(len(tail)-first)
}

func (c *cutter) flush() {
	if len(c.pass.visits) > 0 {
		c.d.passes = append(c.d.passes, c.pass)
	}
	c.pass, c.repeat = pass{}, nil
	clear(c.seen)
}

const (
	// nearRepeats is the share of visits that repeat a file within a quarter of the files, from which there are
	// several readers, or one that draws with replacement: a single reader at the end of an epoch causes 3%.
	nearRepeats = 0.08
	// doubt is the logarithm of the odds against one reader with replacement, from which there are several readers.
	doubt = 11.5
)

// findJobs sorts the visits by job. Processes that read the same files at about the same time belong to different jobs,
// unless the repeats are one job's own, which then come from any of its processes.
func (d *digest) findJobs() [][]int {
	type pair struct{ p, q uint32 }
	var all []int
	last := map[int32]int{} // position in all of the latest visit
	near := map[pair]int{}
	nearby, total, same := 0, 0, 0
	of := map[uint32]*process{}
	for _, p := range d.processes {
		of[p.id] = p
	}
	quarter := len(d.files) / 4
	for i := range d.visits {
		v := &d.visits[i]
		if v.again {
			continue
		}
		if at, ok := last[v.file]; ok {
			p, q := of[v.process], of[d.visits[all[at]].process]
			switch {
			case p == q:
				same++
				total++
			case beside(p, q):
				total++
			}
			if len(all)-at <= quarter {
				nearby++
				near[pair{min(p.id, q.id), max(p.id, q.id)}]++
			}
		}
		last[v.file] = len(all)
		all = append(all, i)
	}
	whole := [][]int{all}
	if float64(nearby) < nearRepeats*float64(len(all)) || unlike(same, total, 1/max(d.atOnce(), 1)) < doubt {
		return whole
	}
	jobOf := map[uint32]int{}
	var jobs [][]int
	for _, p := range d.processes {
		j := 0
		for slices.ContainsFunc(d.processes, func(q *process) bool {
			other, placed := jobOf[q.id]
			n := near[pair{min(p.id, q.id), max(p.id, q.id)}]
			return placed && other == j && n >= max(3, min(len(p.visits), len(q.visits))/100)
		}) {
			j++
		}
		jobOf[p.id] = j
		for len(jobs) <= j {
			jobs = append(jobs, nil)
		}
	}
	for _, i := range all {
		j := jobOf[d.visits[i].process]
		jobs[j] = append(jobs[j], i)
	}
	d.shared = share(float64(nearby), float64(len(all)))
	return jobs
}

// beside reports whether two processes ran at the same time for most of the shorter one's life.
func beside(p, q *process) bool {
	overlap := min(p.to, q.to) - max(p.from, q.from)
	return p != q && overlap > 0 && 2*overlap > min(p.span(), q.span())
}

// unlike returns how improbable it is that at most s of n events occur, each with probability p: the negative
// logarithm of Chernoff's bound.
func unlike(s, n int, p float64) float64 {
	f := share(float64(s), float64(n))
	if n == 0 || f >= p {
		return 0
	}
	if p >= 1 {
		return math.Inf(1)
	}
	d := (1 - f) * math.Log((1-f)/(1-p))
	if f > 0 {
		d += f * math.Log(f/p)
	}
	return float64(n) * d
}

// repeatShare returns the share of visits that repeat a file within a pass.
func (d *digest) repeatShare() float64 {
	n, repeats := 0, 0
	for _, p := range d.passes {
		n += len(p.visits)
		repeats += p.repeats
	}
	return share(float64(repeats), float64(n))
}

// sameOrder measures the similarity of the orders of two passes: 1 for equal, about 0 for unrelated ones. It is the rank
// correlation (Spearman's) of the files in both, if there are enough.
func (d *digest) sameOrder(a, b pass) float64 {
	place := map[int32]int{}
	for i, v := range a.visits {
		if _, ok := place[d.visits[v].file]; !ok {
			place[d.visits[v].file] = i
		}
	}
	var xs []int
	for _, v := range b.visits {
		if i, ok := place[d.visits[v].file]; ok {
			xs = append(xs, i)
			delete(place, d.visits[v].file)
		}
	}
	n := len(xs)
	if n < fewest {
		return 0
	}
	sorted := slices.Clone(xs)
	slices.Sort(sorted)
	sum := 0.0
	for i, x := range xs {
		r, _ := slices.BinarySearch(sorted, x)
		sum += math.Pow(float64(r-i), 2)
	}
	return 1 - 6*sum/(float64(n)*(float64(n)*float64(n)-1))
}

// step is the usual distance, in the listing's order, between consecutive files of a process.
type step struct {
	distance int     // the most common distance
	share    float64 // share of the steps with this distance
	forward  float64 // share of the steps that go forward by 1 to 16
	n        int
}

func (d *digest) steps() (s step) {
	number := d.numbers()
	count := map[int]int{}
	forward := 0
	for _, p := range d.processes {
		last := math.MinInt
		for _, i := range p.visits {
			if d.visits[i].again {
				continue
			}
			at := number(d.visits[i].file)
			if last != math.MinInt {
				count[at-last]++
				s.n++
				if at > last && at-last <= 16 {
					forward++
				}
			}
			last = at
		}
	}
	for distance, n := range count {
		if n > count[s.distance] || n == count[s.distance] && distance < s.distance {
			s.distance = distance
		}
	}
	s.share = share(float64(count[s.distance]), float64(s.n))
	s.forward = share(float64(forward), float64(s.n))
	return s
}
