// Package job is what the trainers of the tests of exactly-once are told, and what they commit.
package job

import "github.com/shoalfs/shoal/loader/feedclient"

// Exit codes.
const (
	Broken = 3
	Fenced = 4
)

// Job is what a trainer has to do.
type Job struct {
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

// Row is one sample that was delivered.
type Row struct {
	ID  int64  `json:"id"`
	Len int    `json:"len"`
	SHA string `json:"sha"` // SHA-256 of its bytes
}

// Step is what the ranks of this host got of one global batch.
type Step struct {
	Epoch int           `json:"epoch"`
	Index int           `json:"index"`
	Ranks map[int][]Row `json:"ranks"`
	State string        `json:"state"` // after it
}

// Commit is the content of the commit file.
type Commit struct {
	Steps []Step `json:"steps"`
	State string `json:"state"`
	Done  bool   `json:"done"`
}
