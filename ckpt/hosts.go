package ckpt

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	v3 "go.etcd.io/etcd/client/v3"

	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/internal/pause"
)

// etcd answers within hostsPatience, or is away. The board is looked at every hostsBeat. Hosts are slow by hostsSlow.
const hostsPatience, hostsBeat, hostsSlow = 4 * time.Second, 3 * time.Second, 30 * time.Second

// order is this host's part in the order among the hosts of a cluster: rules 8 to 12 and 14 to 17. meet is pure.
type order struct {
	q       *Queue
	root    string             // begins all keys
	id      string             // the journal's
	self    string             // this host, as this process registers it
	heard   map[string]int64   // the asks of others that q knows: the revision at which they were made
	asked   map[string]*asking // by name
	forget  string             // how a user deletes a registration, but for the ID
	wake    chan struct{}      // another look at the board is wanted
	host    host               // that is self
	stands  string             // not "": for the host that is dead, with these copies of it
	copies  *copies            // nil without
	vouched map[string]string  // the name of the copies with which an ask was vouched for
	joined  func()             // is called once, when this host is registered
	// ending: it leaves as soon as it may; left is whether it has.
	ending, left bool
}

type asking struct {
	since time.Time
	said  bool // in the log
}

// host is a registration.
type host struct {
	Host     string    `json:"host"`
	Dir      string    `json:"dir"`
	Since    time.Time `json:"since"`
	Instance string    `json:"instance"`
	Neighbour
}

// board is what etcd has of a destination, at one revision. What was not read is nil; answers are to this host, or all.
type board struct {
	rev                            int64
	self                           string // this host's registration
	asks                           map[string]post
	hosts, answers, alive, adopted map[string]post
}

// post is a value, and the revision at which its key was made.
type post struct {
	made  int64
	value string
}

func (p post) host() (h host) {
	_ = json.Unmarshal([]byte(p.value), &h)
	return h
}

// deed is a transaction. It may have no effect: the next board says what is to be done then.
type deed struct {
	when    []v3.Cmp
	then    []v3.Op
	answers string // the name of the ask that it answers
}

func newOrder(cfg Config, q *Queue, id string) *order {
	instance, sum := rand.Text(), sha256.Sum256([]byte(cfg.Dest))
	h := host{Dir: cfg.Dir, Since: time.Now().UTC(), Instance: instance}
	h.Host, _ = os.Hostname()
	q.shared = true
	o := &order{q: q, root: cfg.Cluster.Root() + "ckpt/" + fmt.Sprintf("%x/", sum[:8]), id: id, host: h,
		self: cmp.Or(cfg.stead.self, string(encode(h))), stands: cfg.stead.name, heard: map[string]int64{},
		asked: map[string]*asking{}, vouched: map[string]string{}, wake: make(chan struct{}, 1)}
	o.forget = "etcdctl --endpoints=" + strings.Join(cfg.Cluster.Endpoints(), ",") + " del " + o.root + "hosts/"
	return o
}

// name is of the ask for a last name as it is now, also in the next process: what was answered or vouched for stays so.
func (o *order) name(p string) string {
	sum := sha256.Sum256(encode(entry{Path: p, Object: &Published{Print: o.q.files[p].print}}))
	return fmt.Sprintf("%s/%x", o.id, sum[:8])
}

// stir wakes who looks at the board, if there is something to do that it does not say.
func (o *order) stir() {
	stirs := len(o.q.Answers(false)) > 0 || o.ending && !o.left && o.over()
	if o.vouches() {
		for _, name := range o.q.Answers(true) {
			stirs = stirs || o.vouched[name] != o.host.Copy
		}
	}
	for p := range o.q.Uncleared {
		stirs = stirs || o.asked[o.name(p)] == nil
	}
	if stirs {
		pause.Poke(o.wake)
	}
}

// over reports whether nothing is to be done here, nor owed to others.
func (o *order) over() bool {
	for range o.q.owed.all {
		return false
	}
	b := o.q.Behind()
	return b.Files+b.Removals+len(o.q.asks)+len(o.q.copies) == 0
}

// meet takes a board, and returns what to write. look looks through the folder.
func (o *order) meet(b board, look func() error) (do []deed, err error) {
	look = sync.OnceValue(look)
	for name, a := range b.asks {
		if strings.HasPrefix(name, o.id+"/") || o.heard[name] == a.made {
			continue
		} else if o.stands != "" && b.answers[name+"/"+o.id].value != o.stands {
			continue // something that had been closed before may be lost
		}
		if err := look(); err != nil {
			return nil, err
		}
		o.heard[name] = a.made
		o.q.Ask(name, a.value)
	}
	for name := range o.heard {
		if _, there := b.asks[name]; !there {
			delete(o.heard, name)
			delete(o.q.asks, name)
			delete(o.vouched, name)
		}
	}
	for _, name := range o.q.Answers(false) {
		do = append(do, deed{[]v3.Cmp{v3.Compare(v3.CreateRevision(o.root+"asks/"+name), "=", o.heard[name])},
			[]v3.Op{v3.OpPut(o.root+"answers/"+name+"/"+o.id, "")}, name})
	}
	do = append(append(do, o.vouch(b)...), o.meetOwn(b)...)
	leaves, self := o.ending && o.stands == "" && o.over(), o.root+"hosts/"+o.id
	if o.left = leaves && b.self == ""; leaves && !o.left {
		do = append(do, deed{when: []v3.Cmp{v3.Compare(v3.Value(self), "=", b.self),
			v3.Compare(v3.ModRevision(o.root+"asks/"), "<", b.rev+1).WithPrefix()}, then: []v3.Op{v3.OpDelete(self)}})
	} else if !leaves && b.self != o.self && o.stands == "" {
		d := deed{then: []v3.Op{v3.OpPut(self, o.self)}}
		if o.copies != nil {
			d.when = []v3.Cmp{isNot(o.root + "adopted/" + o.id)}
		}
		do = append(do, d)
	}
	return do, nil
}

// isNot compares for a key that is not there.
func isNot(key string) v3.Cmp { return v3.Compare(v3.CreateRevision(key), "=", 0) }

// vouches reports whether the neighbour has the copies.
func (o *order) vouches() bool { return o.copies != nil && o.copies.open && o.copies.to != "" }

// vouch answers, with the name of the copies, asks before which all is published or copied. The answer itself follows.
func (o *order) vouch(b board) (do []deed) {
	if !o.vouches() || b.self != o.self {
		return nil
	}
	for _, name := range o.q.Answers(true) {
		o.vouched[name] = o.host.Copy
		key := o.root + "answers/" + name + "/" + o.id
		was, there := b.answers[name+"/"+o.id]
		when := []v3.Cmp{v3.Compare(v3.CreateRevision(o.root+"asks/"+name), "=", o.heard[name]), isNot(key)}
		if there {
			when[1] = v3.Compare(v3.Value(key), "=", was.value)
		}
		if !there || was.value != "" && was.value != o.host.Copy {
			do = append(do, deed{when: when, then: []v3.Op{v3.OpPut(key, o.host.Copy)}})
		}
	}
	return do
}

// forgetCopies tells that the neighbour is another one, or has copies of another name, and no file yet.
func (o *order) forgetCopies() {
	for f := range o.q.copies {
		o.q.Copy(f.path, copyOf{})
	}
	o.copies.open = false
}

// choose takes the next host as the neighbour if there is none, or it is not there, or of no use. Copies that another
// one has, or that have another name, count no more once etcd has this registration.
func (o *order) choose(alive map[string]post) {
	if _, there := alive[o.host.At]; there && !o.copies.void || o.host.At == "" && len(alive) < 2 {
		return
	}
	others := slices.DeleteFunc(slices.Sorted(maps.Keys(alive)), func(id string) bool { return id == o.id })
	next, _ := slices.BinarySearch(others, cmp.Or(o.host.At, o.id)+"+")
	if o.host.Neighbour, o.copies.void = (Neighbour{}), false; len(others) > 0 {
		o.host.Neighbour = Neighbour{At: others[next%len(others)], Copy: rand.Text()}
	}
	o.self = string(encode(o.host))
}

// meetOwn does so for this host's asks.
func (o *order) meetOwn(b board) (do []deed) {
	wanted := map[string]bool{}
	for p, turn := range o.q.Uncleared {
		name, why := o.name(p), "the other hosts"
		key := o.root + "asks/" + name
		if o.asked[name] == nil {
			o.asked[name] = &asking{since: time.Now()}
		}
		if _, there := b.asks[name]; !there {
			do = append(do, deed{when: []v3.Cmp{isNot(key)}, then: []v3.Op{v3.OpPut(key, p)}})
		} else if b.hosts != nil {
			var vouched bool
			why, vouched = o.waits(b, name)
			o.q.Vouch(p, turn, vouched)
		}
		wanted[name] = why != ""
		o.q.Clear(p, turn, why)
	}
	maps.DeleteFunc(o.asked, func(name string, _ *asking) bool { return !wanted[name] })
	for name := range b.asks {
		if strings.HasPrefix(name, o.id+"/") && !wanted[name] {
			do = append(do, deed{then: []v3.Op{v3.OpDelete(o.root + "asks/" + name),
				v3.OpDelete(o.root+"answers/"+name+"/", v3.WithPrefix())}})
		}
	}
	return do
}

// waits says for which hosts an ask waits; "": none. Those that have not answered may have vouched.
func (o *order) waits(b board, name string) (why string, vouched bool) {
	var waits []string
	vouched = true
	for id, reg := range b.hosts {
		if answer, answered := b.answers[name+"/"+id]; id != o.id && (!answered || answer.value != "") {
			waits = append(waits, id)
			vouched = vouched && answered && reg.host().Copy == answer.value
		}
	}
	if len(waits) == 0 {
		return "", true
	}
	slices.Sort(waits)
	h := b.hosts[waits[0]].host()
	more := ""
	if n := len(waits) - 1; n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf(
		"host %s (folder %s)%s, asked at %s; see that shoal ckpt runs there, or if what it has is lost: %s",
		h.Host, h.Dir, more, o.asked[name].since.Format(time.DateTime), o.forget+waits[0]), vouched
}

// meetHosts meets the other hosts until ctx ends.
func (c *Carrier) meetHosts(ctx context.Context) {
	said := ""
	for ctx.Err() == nil {
		why := c.Cluster.Explain(c.connect(ctx))
		if o := c.hosts.copies; o != nil {
			o.shelf.stop() // the lease may have ended
		}
		c.in(ctx, func() {
			for p, turn := range c.q.Uncleared {
				c.q.Clear(p, turn, why)
			}
			if why != said {
				c.Log.Warn("the other hosts do not answer: last names are withheld", "cause", why)
			}
			said = why
		})
		_ = pause.For(ctx, time.Second)
	}
}

// connect does so over one connection, until an error.
func (c *Carrier) connect(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	client, said, err := c.Cluster.Dial(ctx, c.TLS)
	if err != nil {
		return said(err)
	}
	defer func() { _ = client.Close() }()
	lease := v3.NoLease
	if c.hosts.copies != nil {
		if lease, err = c.live(ctx, client, end); err != nil {
			return said(err)
		}
	}
	for _, at := range []string{"asks/", "answers/" + c.hosts.id + "/"} {
		c.running.Go(func() {
			err := cluster.ErrAway
			for seen := range client.Watch(v3.WithRequireLeader(ctx), c.hosts.root+at, v3.WithPrefix(),
				v3.WithCreatedNotify()) {
				err = cmp.Or(seen.Err(), err)
				pause.Poke(c.hosts.wake)
			}
			end(err)
		})
	}
	for {
		if err := c.turn(ctx, client, lease); err != nil {
			return said(cmp.Or(context.Cause(ctx), err))
		}
		select {
		case <-c.hosts.wake:
		case <-time.After(hostsBeat):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// turn looks at the board once, and does what there is to do.
func (c *Carrier) turn(ctx context.Context, client *v3.Client, lease v3.LeaseID) error {
	o := c.hosts
	read := []v3.Op{v3.OpGet(o.root + "hosts/" + o.id), v3.OpGet(o.root+"asks/", v3.WithPrefix())}
	var kept []*shelved
	c.in(ctx, func() {
		if o.copies != nil || o.stands != "" {
			for _, at := range []string{"hosts/", "answers/", "alive/", "adopted/"} {
				read = append(read, v3.OpGet(o.root+at, v3.WithPrefix()))
			}
			kept = o.copies.kept()
		} else if len(o.asked) > 0 {
			read = append(read, v3.OpGet(o.root+"hosts/", v3.WithPrefix()),
				v3.OpGet(o.root+"answers/"+o.id+"/", v3.WithPrefix()))
		}
	})
	got, err := transact(ctx, client, deed{then: read})
	if err != nil {
		return err
	}
	var tables [6]map[string]post
	for i, r := range got.Responses {
		tables[i] = map[string]post{}
		for _, kv := range r.GetResponseRange().Kvs {
			_, name, _ := strings.Cut(strings.TrimPrefix(string(kv.Key), o.root), "/")
			tables[i][name] = post{kv.CreateRevision, string(kv.Value)}
		}
	}
	b := board{got.Header.Revision, tables[0][o.id].value, tables[1], tables[2], tables[3], tables[4], tables[5]}
	if _, lives := b.alive[o.id]; o.copies != nil && !lives {
		return cluster.ErrLost
	}
	var do []deed
	c.in(ctx, func() {
		c.meetNeighbour(b)
		do, err = o.meet(b, c.hearAll)
		if b.self == o.self && o.joined != nil {
			o.joined()
			o.joined = nil
		}
		for p := range c.q.Uncleared {
			if a := o.asked[o.name(p)]; a != nil && !a.said && time.Since(a.since) > hostsSlow {
				a.said = true
				c.Log.Warn("a last name is withheld", "file", p, "waits for", c.q.files[p].held)
			}
		}
	})
	for _, d := range do {
		if _, err := transact(ctx, client, d); err != nil {
			return err
		}
		c.in(ctx, func() { delete(o.q.asks, d.answers) })
		pause.Poke(o.wake)
	}
	for _, k := range kept {
		if failed := c.tend(ctx, client, lease, b, k); failed != nil {
			return cmp.Or(err, failed)
		}
	}
	return err
}

func transact(ctx context.Context, client *v3.Client, d deed) (*v3.TxnResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, hostsPatience)
	defer cancel()
	return client.Txn(ctx).If(d.when...).Then(d.then...).Commit()
}
