package e2e

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// Exit codes of a trainer.
const (
	exitBroken = 3 // the feed broke off
	exitFenced = 4 // a newer opening has ended its streams
)

// trainerJob is what a trainer has to do.
type trainerJob struct {
	Addr      string               `json:"addr"`
	Security  feedclient.Security  `json:"security"`
	Transport feedclient.Transport `json:"transport"`
	Session   string               `json:"session"`
	Order     string               `json:"order"`
	Transform string               `json:"transform"`
	Tail      string               `json:"tail"`
	Bad       string               `json:"bad"`
	Seed      uint64               `json:"seed"`
	Batch     int                  `json:"batch"` // of a rank
	World     int                  `json:"world"`
	Ranks     []int                `json:"ranks"`  // of this host
	Epochs    int                  `json:"epochs"` // the first that is not trained any more
	Credits   int                  `json:"credits"`
	State     string               `json:"state"`  // to go on from
	Commit    string               `json:"commit"` // file
	Every     int                  `json:"every"`  // steps between commits
	Reconnect bool                 `json:"reconnect"`

	// At the Nth passing of Point the trainer writes a line and waits for one.
	Point string `json:"point"`
	Nth   int    `json:"nth"`
}

// trainedRow is one sample that was delivered.
type trainedRow struct {
	ID  int64  `json:"id"`
	Len int    `json:"len"`
	SHA string `json:"sha"` // SHA-256 of its bytes
}

// trainedStep is what the ranks of this host got of one global batch.
type trainedStep struct {
	Epoch int                  `json:"epoch"`
	Index int                  `json:"index"`
	Ranks map[int][]trainedRow `json:"ranks"`
	State string               `json:"state"` // after it
}

// trainedCommit is the content of the commit file.
type trainedCommit struct {
	Steps []trainedStep `json:"steps"`
	State string        `json:"state"`
	Done  bool          `json:"done"`
}

// trainAs is what the tests of exactly-once kill: it consumes the ranks of one host as a training loop would, and
// commits what it was given together with the state, atomically, by write, fsync and rename. It is run by this program
// as a process of its own, and returns its exit code.
func trainAs(job string) int {
	t := &goTrainer{stdin: bufio.NewReader(os.Stdin), passed: map[string]int{}}
	err := json.Unmarshal([]byte(job), &t.trainerJob)
	if err == nil {
		err = t.run()
	}
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, err)
	switch codeOf(err) {
	case codes.Unavailable:
		return exitBroken
	case codes.Aborted:
		return exitFenced
	}
	return 1
}

func codeOf(err error) codes.Code {
	var e *feedclient.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return codes.Unknown
}

type goTrainer struct {
	trainerJob
	stdin  *bufio.Reader
	passed map[string]int
	done   trainedCommit
	ranks  []*trainerRank
}

// trainerRank is one rank's stream and the batch that it stands at.
type trainerRank struct {
	number int
	stream *feedclient.Stream
	batch  *feedclient.Batch // nil: none yet
	over   bool
}

// at marks a moment at which this process, the server or the connection may be made to end.
func (t *goTrainer) at(point string) {
	t.passed[point]++
	if point != t.Point || t.passed[point] != t.Nth {
		return
	}
	fmt.Println("at", point)
	if _, err := t.stdin.ReadString('\n'); err != nil {
		os.Exit(1) // whoever started this is gone
	}
}

func (t *goTrainer) run() error {
	state := t.State
	for {
		err := t.train(state)
		if err == nil || !t.Reconnect || codeOf(err) != codes.Unavailable {
			return err
		}
		// As a trainer does that keeps running: it goes on from what it has consumed, committed or not.
		if t.done.State != "" {
			state = t.done.State
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// train goes on from a state to the end.
func (t *goTrainer) train(state string) error {
	first := 0
	if state != "" {
		s, err := loader.ParseState(state)
		if err != nil {
			return err
		}
		first = s.Epoch
	}
	if first < t.Epochs {
		client, err := feedclient.Dial(t.Addr, t.Security)
		if err != nil {
			return err
		}
		defer client.Close()
		client.Transport = t.Transport
		t.at("open")
		t.ranks = nil
		for _, number := range t.Ranks {
			stream, err := client.Open(context.Background(), &feedpb.Open{
				Session: t.Session, Client: "e2e trainer", Order: t.Order, Transform: t.Transform, Tail: t.Tail,
				Bad: t.Bad, Seed: t.Seed,
				Batch: uint32(t.Batch), World: uint32(t.World), Rank: uint32(number), Epochs: uint32(t.Epochs - first),
				State: state, Credits: uint32(t.Credits),
			})
			if err != nil {
				return err
			}
			t.ranks = append(t.ranks, &trainerRank{number: number, stream: stream})
			t.at("opened")
		}
		for {
			more, err := t.step()
			if err != nil {
				return err
			}
			if !more {
				break
			}
			if len(t.done.Steps)%t.Every == 0 {
				if err := t.commit(); err != nil {
					return err
				}
			}
		}
		t.done.State = t.ranks[0].stream.State() // the epoch's end
	}
	t.done.Done = true
	return t.commit()
}

// step takes one global batch. With uneven tails a rank may have none of it.
func (t *goTrainer) step() (more bool, err error) {
	var least *feedpb.BatchHeader
	for _, r := range t.ranks {
		if r.batch == nil && !r.over {
			t.at("next")
			r.batch, err = r.stream.Next()
			if errors.Is(err, io.EOF) {
				r.over = true
				continue
			}
			if err != nil {
				return false, err
			}
			t.at("batch")
		}
		if r.over {
			continue
		}
		if h := r.batch.Header; least == nil || h.GetEpoch() < least.GetEpoch() ||
			h.GetEpoch() == least.GetEpoch() && h.GetIndex() < least.GetIndex() {
			least = h
		}
	}
	if least == nil {
		return false, nil
	}
	s := trainedStep{Epoch: int(least.GetEpoch()), Index: int(least.GetIndex()), State: least.GetState(),
		Ranks: map[int][]trainedRow{}}
	if len(t.done.Steps) > 0 && t.done.Steps[len(t.done.Steps)-1].Epoch != s.Epoch {
		t.at("epoch")
	}
	for _, r := range t.ranks {
		if r.over || r.batch.Header.GetEpoch() != least.GetEpoch() || r.batch.Header.GetIndex() != least.GetIndex() {
			continue
		}
		rows := []trainedRow{}
		for i := range r.batch.Rows() {
			if r.batch.Valid(i) {
				data := r.batch.Row(i)
				sum := sha256.Sum256(data)
				rows = append(rows, trainedRow{ID: r.batch.ID(i), Len: len(data), SHA: hex.EncodeToString(sum[:])})
			}
		}
		s.Ranks[r.number] = rows
		r.batch.Release()
		r.batch = nil
	}
	t.done.Steps, t.done.State = append(t.done.Steps, s), s.State
	t.at("step")
	return true, nil
}

// commit replaces the commit file.
func (t *goTrainer) commit() (err error) {
	b, err := json.Marshal(t.done)
	if err != nil {
		return err
	}
	f, err := os.Create(t.Commit + ".new")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.Write(b[:len(b)/2]); err != nil {
		return err
	}
	t.at("written half")
	if _, err := f.Write(b[len(b)/2:]); err != nil {
		return err
	}
	t.at("written")
	if err := f.Sync(); err != nil {
		return err
	}
	t.at("synced")
	if err := os.Rename(t.Commit+".new", t.Commit); err != nil {
		return err
	}
	t.at("committed")
	dir, err := os.Open(filepath.Dir(t.Commit))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
