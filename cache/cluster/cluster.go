package cluster

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/shoalfs/shoal/internal/pause"
)

// Options say which cluster to join, and as whom.
type Options struct {
	URL   string      // for Parse
	Self  Node        // without an ID one only looks on: one sees the nodes and is none
	Locks bool        // who looks on may lock, too
	TLS   *tls.Config // for etcds://; nil: the system's authorities
	Log   *slog.Logger
}

// State is how a process stands with its cluster.
type State struct {
	Phase string    `json:"phase"` // one of the constants
	Since time.Time `json:"since"`
	Rev   int64     `json:"revision"` // of the view
	Nodes int       `json:"nodes"`    // in the view
	Error string    `json:"error,omitempty"`
}

// Phases of a State.
const (
	Joining = "joining" // has not been in it yet
	Joined  = "joined"
	Away    = "away"    // etcd does not answer, or refuses: the last view stays
	Refused = "refused" // another process has this ID
)

var (
	// ErrTaken is the cause when another process has this node's ID.
	ErrTaken = errors.New("another process uses this node's ID")
	// ErrLost is the cause when a lock's context ends, and why nothing is published any more: the lease has ended.
	ErrLost = errors.New("the lease in etcd has ended")
	// ErrAway is when there is no connection to etcd.
	ErrAway = errors.New("etcd is away")
)

// Cluster is a membership. Its methods may be called concurrently.
type Cluster struct {
	at   Address
	o    Options
	log  *slog.Logger
	pace pace

	stop context.CancelFunc
	done chan struct{}
	wake chan struct{} // a beat is wanted now

	session atomic.Pointer[session] // nil: none

	mu       sync.Mutex
	self     Node
	joined   bool // this process has been in the cluster
	views    settling
	changed  chan struct{} // closed at the next change of the view
	last     string        // what was published last
	news     chan struct{} // closed when it is another
	settled  chan struct{} // closed when there is a view
	refused  chan struct{} // closed when another has this ID
	state    State
	rivalled time.Time // since when another has been seen with this ID
}

var idOf = regexp.MustCompile(`^[0-9a-f]{16}$`)

// Join returns at once: whether and when etcd answers, Quiet and State tell. Its errors are those of options.
func Join(o Options) (*Cluster, error) { return join(o, usual) }

func join(o Options, p pace) (*Cluster, error) {
	at, err := Parse(o.URL)
	if err != nil {
		return nil, err
	}
	if o.Self.ID != "" && (!idOf.MatchString(o.Self.ID) || o.Self.Weight == 0 || o.Self.Address == "") {
		return nil, fmt.Errorf("a node needs an ID of 16 hex digits, a weight and an address, not %q, %d and %q",
			o.Self.ID, o.Self.Weight, o.Self.Address)
	}
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	o.Self.Instance = rand.Text()
	c := &Cluster{at: at, o: o, log: o.Log.With("cluster", at.Name), pace: p,
		done: make(chan struct{}), wake: make(chan struct{}, 1), self: o.Self, views: settling{pace: p},
		changed: make(chan struct{}), news: make(chan struct{}), settled: make(chan struct{}),
		refused: make(chan struct{}), state: State{Phase: Joining, Since: time.Now()}}
	if o.Self.ID == "" {
		c.views.quiet, c.views.gather = 0, 0
	}
	ctx, stop := context.WithCancel(context.Background())
	c.stop = stop
	go c.run(ctx)
	return c, nil
}

// View is the last one. It has no nodes until Quiet has returned.
func (c *Cluster) View() View {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.views.view
}

// Changed is closed at the next change of the view, an address's included. Call it before View to miss none.
func (c *Cluster) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// Quiet returns when there is a view: it holds this node, and has been quiet.
// Its error says in words why there is none when ctx ends. It is ErrTaken, at once, if another process has this ID.
func (c *Cluster) Quiet(ctx context.Context) error {
	select {
	case <-c.settled:
		return nil
	case <-c.refused:
		return c.taken()
	case <-c.done:
		return errors.New("the cluster was left")
	case <-ctx.Done():
	}
	if s := c.State(); s.Error != "" {
		return fmt.Errorf("cluster %s: %s", c.at, s.Error)
	}
	return fmt.Errorf("cluster %s: %w", c.at, context.Cause(ctx))
}

func (c *Cluster) taken() error {
	return fmt.Errorf("%w, %s, in cluster %s: this cache directory is a copy of another's. Delete the file node in "+
		"it, and a new ID is made", ErrTaken, c.o.Self.ID, c.at)
}

// State says how it stands now.
func (c *Cluster) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.state
	s.Rev, s.Nodes = c.views.view.Rev, len(c.views.view.Nodes)
	return s
}

// Open says, within a beat, that this node has a dataset open.
func (c *Cluster) Open(dataset string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i, has := slices.BinarySearch(c.self.Open, dataset); !has {
		c.self.Open = slices.Insert(slices.Clone(c.self.Open), i, dataset)
		c.poke()
	}
}

// Forget says that this node does not have a dataset open any more.
func (c *Cluster) Forget(dataset string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.self.Open = slices.DeleteFunc(slices.Clone(c.self.Open), func(d string) bool { return d == dataset })
	c.poke()
}

// Close leaves: the node and its locks are gone from etcd when it returns, if etcd answers.
func (c *Cluster) Close() error {
	c.stop()
	<-c.done
	return nil
}

// run holds one session after another.
func (c *Cluster) run(ctx context.Context) {
	defer close(c.done)
	for {
		err := c.hold(ctx)
		if ctx.Err() != nil {
			return
		}
		c.failed(err)
		if !c.pause(ctx, c.pace.beat) {
			return
		}
	}
}

// poke wakes who waits in a pause.
func (c *Cluster) poke() { pause.Poke(c.wake) }

// pause waits for d or until a beat is wanted, and tells whether ctx is still there.
func (c *Cluster) pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
	case <-c.wake:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

// heard takes a list that has this process, and tells when it may become the view if nothing changes; zero: need not.
func (c *Cluster) heard(v View) (due time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first := !c.views.taken
	if c.views.list(v, time.Now()) {
		close(c.changed)
		c.changed = make(chan struct{})
		if first {
			close(c.settled)
		}
	}
	return c.views.due
}

// published wakes those who wait for it, if it is another than was published last.
func (c *Cluster) published(kv *mvccpb.KeyValue) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if last := kv.String(); last != c.last {
		c.last = last
		c.look()
	}
}

// well says that etcd answered, and has this process.
func (c *Cluster) well() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rivalled = time.Time{}
	if c.state.Phase == Joined {
		return
	}
	c.log.Info("joined the cluster", "etcd", c.at.String(), "node", c.self.ID,
		"after", time.Since(c.state.Since).Round(time.Millisecond))
	c.state, c.joined = State{Phase: Joined, Since: time.Now()}, true
}

// failed says that it did not. The first time it is logged.
func (c *Cluster) failed(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.views.lost()
	phase, words := Away, c.at.Explain(err)
	if errors.Is(err, ErrTaken) {
		if c.rivalled.IsZero() {
			c.rivalled = time.Now()
		}
		if time.Since(c.rivalled) < c.pace.lease+2*c.pace.answer {
			phase = Joining
		} else if phase, words = Refused, c.taken().Error(); c.state.Phase != Refused {
			select {
			case <-c.refused:
			default:
				close(c.refused)
			}
		}
	} else {
		c.rivalled = time.Time{}
	}
	if c.state.Phase != phase {
		c.log.Warn("not in the cluster: the last view stays", "why", words)
		c.state = State{Phase: phase, Since: time.Now()}
	}
	c.state.Error = words
}
