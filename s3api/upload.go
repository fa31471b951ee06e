package s3api

import (
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// upload is the body of a request. It is read as long as the client goes on sending, and until the request is answered:
// net/http's transport may go on reading after an early answer of the origin.
type upload struct {
	io.ReadCloser
	control *http.ResponseController
	asks    bool // the client sends it only when it is told to, which the first Read does

	reading sync.Mutex    // held by Read
	got     int           // of the piece that is coming
	waited  time.Duration // for the client, since it began to come: the origin takes the time that it takes
	mu      sync.Mutex
	begun   bool
	over    bool
}

var errAnswered = errors.New("the request was answered")

func (u *upload) Read(p []byte) (int, error) {
	u.reading.Lock()
	defer u.reading.Unlock()
	begun := time.Now()
	if !u.deadline(begun.Add(pieceTime - u.waited)) {
		return 0, errAnswered
	}
	n, err := u.ReadCloser.Read(p)
	u.got, u.waited = u.got+n, u.waited+time.Since(begun)
	if u.got >= piece {
		u.got, u.waited = 0, 0
	}
	if err != nil { // from here on a silent client is one that waits for the answer
		u.deadline(time.Time{})
	}
	return n, err
}

// deadline sets that of the next Read, unless there must be none.
func (u *upload) deadline(t time.Time) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.over {
		return false
	}
	u.begun = true
	_ = u.control.SetReadDeadline(t)
	return true
}

// end lets no other Read begin, and waits for a running one, which ends if the client is silent for restTime.
func (u *upload) end() {
	u.mu.Lock()
	u.over = true
	_ = u.control.SetReadDeadline(time.Now().Add(restTime))
	u.mu.Unlock()
	u.reading.Lock()
	defer u.reading.Unlock()
	_ = u.control.SetReadDeadline(time.Time{})
}

// rest reads what is left of a body that was answered early: most clients see the answer only when they have sent all,
// and otherwise a broken connection instead of it.
func (u *upload) rest() {
	_ = u.control.Flush()
	u.end()
	if u.asks && !u.begun {
		return // it is not sent
	}
	for n := int64(0); n < maxRest; n += piece {
		_ = u.control.SetReadDeadline(time.Now().Add(restTime))
		if _, err := io.CopyN(io.Discard, u.ReadCloser, piece); err != nil {
			return
		}
	}
}
