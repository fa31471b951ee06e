package cluster

import (
	"bytes"
	"cmp"
	"compress/flate"
	"encoding/json"
	"fmt"
	"slices"

	"go.etcd.io/etcd/api/v3/mvccpb"
)

// roll is the list of nodes as one process has it: rules 2, 3 and 5. It has no clock, no lock and no connection.
type roll struct {
	me    string // the lease of this node; "": it is none
	rev   int64  // etcd's, when the list was read or an event came
	nodes []Node // by ID; never changed, since views hold it
	seen  int64  // the highest that etcd has said
	last  string // names the last batch: up to which revision it tells what was written, and a token
	ahead bool   // the list is a later one than the last batch tells, and may hold or lack what no batch will tell
	lead  string // the lease of the node that makes the batches; "": of none

	asked int64 // etcd's revision when it last said what it has; 0: something has been written since,
	doubt bool  // which was another batch or lead,
	heard bool  // and whether an event has come since
	torn  bool  // it has to be read anew

	news map[string]Node // of the lead: what is in no batch yet, by ID
	told int64           // up to which revision
}

// batch is what was written after the batch before it. A node without a weight is gone. One without an address is the
// process that all know, and only what may change follows.
type batch struct {
	After string `json:"after"`
	Last  string `json:"last"`
	Nodes []Node `json:"nodes"`
}

// pack compresses: nodes have much in common.
func (b batch) pack() string {
	var out bytes.Buffer
	w, _ := flate.NewWriter(&out, flate.BestCompression) // which is a level that it knows
	_ = json.NewEncoder(w).Encode(b)
	_ = w.Close()
	return out.String()
}

// toldBy is up to which revision a batch of that name tells what was written.
func toldBy(last string) (rev int64) {
	_, _ = fmt.Sscan(last, &rev)
	return rev
}

func find(nodes []Node, id string) (i int, found bool) {
	return slices.BinarySearchFunc(nodes, id, func(n Node, id string) int { return cmp.Compare(n.ID, id) })
}

// nodeOf is the node that a key holds. What is no node has no weight, and is left out by all alike.
func nodeOf(kv *mvccpb.KeyValue) (n Node) {
	id := string(kv.Key[bytes.LastIndexByte(kv.Key, '/')+1:])
	if err := json.Unmarshal(kv.Value, &n); err != nil || n.ID != id || !idOf.MatchString(id) || n.Address == "" {
		n = Node{ID: id}
	}
	return n
}

// read takes the whole list, and what etcd had at rev.
func (r *roll) read(kvs []*mvccpb.KeyValue, ahead bool, rev int64, last, lead string) {
	*r = roll{me: r.me, rev: rev, seen: rev, asked: rev, ahead: ahead, last: last, lead: lead}
	for _, kv := range kvs { // by key
		if n := nodeOf(kv); n.Weight > 0 {
			r.nodes = append(r.nodes, n)
		}
	}
}

// take takes a batch.
func (r *roll) take(packed []byte, rev int64) {
	if rev <= r.rev { // the lead has made it
		return
	}
	var b batch
	err := json.NewDecoder(flate.NewReader(bytes.NewReader(packed))).Decode(&b)
	if r.torn = r.torn || err != nil || b.After != r.last || r.ahead; r.torn {
		return
	}
	nodes := slices.Clone(r.nodes)
	for _, n := range b.Nodes {
		switch i, found := find(r.nodes, n.ID); {
		case !found:
			nodes = append(nodes, n)
		case n.Weight > 0 && n.Address == "":
			nodes[i].Open, nodes[i].Draining = n.Open, n.Draining
		default:
			nodes[i] = n
		}
	}
	nodes = slices.DeleteFunc(nodes, func(n Node) bool { return n.Weight == 0 })
	slices.SortFunc(nodes, func(a, b Node) int { return cmp.Compare(a.ID, b.ID) })
	r.last, r.rev, r.nodes, r.heard = b.Last, rev, nodes, true
}

// begin takes nodes/ as the lead has read it at rev: what differs from the list is news.
func (r *roll) begin(rev int64, kvs []*mvccpb.KeyValue) {
	r.lead, r.told, r.news = r.me, rev, map[string]Node{}
	for _, n := range r.nodes {
		r.news[n.ID] = Node{ID: n.ID}
	}
	for _, kv := range kvs {
		n := nodeOf(kv)
		i, found := find(r.nodes, n.ID)
		if r.news[n.ID] = n; found && n.equal(r.nodes[i]) && kv.ModRevision <= toldBy(r.last) {
			delete(r.news, n.ID)
		}
	}
}

// hear takes what was written of a node. Without a value it is gone.
func (r *roll) hear(kv *mvccpb.KeyValue) {
	if n := nodeOf(kv); r.news != nil && kv.ModRevision >= r.told {
		r.news[n.ID], r.told = n, kv.ModRevision
	}
}

// busy tells whether there is a batch to make, or one node to be found that makes them.
func (r *roll) busy() bool {
	return r.me != "" && !r.torn && (r.lead == "" || r.lead == r.me && (r.news == nil || r.ahead || len(r.news) > 0))
}

// batch makes one of the news. One after none has all read anew.
func (r *roll) batch(token string) batch {
	b := batch{After: r.last, Last: fmt.Sprint(r.told, " ", token)}
	if r.ahead {
		b.After = "none"
	}
	for _, n := range r.news {
		if i, found := find(r.nodes, n.ID); found && n.Weight > 0 && n.Instance == r.nodes[i].Instance {
			n = Node{ID: n.ID, Weight: n.Weight, Open: n.Open, Draining: n.Draining}
		}
		b.Nodes = append(b.Nodes, n)
	}
	return b
}

// answer takes what etcd has at rev, which was asked when the list was as of another. What differs may be on its way.
// The lead begins again, since what its watch does not say nobody hears.
func (r *roll) answer(before, rev int64, last, lead string) {
	doubt := last != r.last || lead != r.lead
	r.torn = r.torn || rev < before || doubt && r.doubt && !r.heard
	r.asked, r.doubt, r.heard, r.news = rev, doubt, false, nil
}

// stands tells whether the list was found to be etcd's when it was last asked, and nothing was written until rev.
func (r *roll) stands(rev int64) bool { return rev == r.asked && !r.torn && !r.doubt }

// view is the list, once this process is in it: rule 7.
func (r *roll) view(self Node) (v View, ok bool) {
	i, found := find(r.nodes, self.ID)
	return View{Rev: r.rev, Nodes: r.nodes}, self.ID == "" || found && r.nodes[i].Instance == self.Instance
}
