package ckpt

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

// stuck is a bucket that a host cannot reach with what begins so.
type stuck struct {
	objstore.Layer
	begins string
	opens  chan struct{}
}

func (s stuck) Upload(ctx context.Context, key string, size, part int64) (objstore.Upload, error) {
	if len(key) >= len(s.begins) && key[:len(s.begins)] == s.begins {
		select {
		case <-s.opens:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.Layer.Upload(ctx, key, size, part)
}

// waitFor asks whether what is at a path is safe.
func waitFor(t *testing.T, m *member, path string, copies int) Wait {
	t.Helper()
	client, _, err := Find(m.dir)
	if err != nil {
		t.Fatal(err)
	}
	w, err := client.Wait(t.Context(), path, copies, true)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// A host alone says why there is no second copy. What is closed goes to a neighbour, and if that leaves, or loses it,
// to another; what the bucket has is kept by none.
func TestCopies(t *testing.T) {
	tm := newTeam(t)
	tm.copies = 2
	var others [2]*member
	a := &member{dir: t.TempDir()}
	free := tm.store
	opens := make(chan struct{})
	tm.store = stuck{free, tm.src.Prefix + "s/", opens}
	tm.start(t, a, time.Minute)
	save(t, filepath.Join(a.dir, "s/a"), 100)
	if w := waitFor(t, a, "s", 2); w.Whole || !strings.Contains(w.Why, "no other host") {
		t.Fatal(w)
	}
	tm.store = free
	for i := range others {
		others[i] = &member{dir: t.TempDir()}
		tm.start(t, others[i], time.Second)
	}
	copied := func() bool { return waitFor(t, a, "s", 2).Whole }
	kept := func(m *member) int {
		found, err := filepath.Glob(m.dir + "/.shoal/copies/*/*/s/*")
		if err != nil {
			t.Fatal(err)
		}
		return len(found)
	}
	until(t, "there is a copy", copied)
	has := 0
	if kept(others[1]) > 0 {
		has = 1
	}
	save(t, filepath.Join(a.dir, "s/b"), 5<<20)
	save(t, filepath.Join(a.dir, "s/a"), 200) // the older copy is replaced
	until(t, "so there is of all", copied)
	if err := others[has].end(); err != nil {
		t.Error(err)
	}
	until(t, "another one has them", func() bool { return kept(others[1-has]) == 2 && copied() })
	if err := os.RemoveAll(others[1-has].dir + "/.shoal/copies"); err != nil {
		t.Fatal(err)
	}
	close(opens)
	until(t, "the bucket has all, and nobody else", func() bool {
		return waitFor(t, a, "s", 1).Whole && kept(others[1-has]) == 0
	})
	for _, m := range []*member{a, others[1-has]} {
		if err := m.end(); err != nil {
			t.Error(err)
		}
	}
	for _, key := range tm.keys(t) {
		if !strings.Contains(key, "/alive/") {
			t.Errorf("left in etcd: %s", key)
		}
	}
}

// That the neighbour is full is in the log, and uploads go on.
func TestCopiesFull(t *testing.T) {
	was := spare
	spare = 101
	defer func() { spare = was }()
	tm := newTeam(t)
	tm.copies = 2
	a, b := &member{dir: t.TempDir()}, &member{dir: t.TempDir()}
	free := tm.store
	opens := make(chan struct{})
	tm.store = stuck{free, tm.src.Prefix + "s/", opens}
	tm.start(t, a, time.Minute)
	tm.store = free
	tm.start(t, b, time.Minute)
	save(t, filepath.Join(a.dir, "s/a"), 100)
	until(t, "it is full", func() bool {
		return strings.Contains(waitFor(t, a, "s", 2).Why, "less than a tenth of its disk is free")
	})
	close(opens)
	until(t, "the bucket has it", func() bool { return waitFor(t, a, "s", 1).Whole })
	for _, m := range []*member{a, b} {
		if err := m.end(); err != nil {
			t.Error(err)
		}
	}
}

// A host whose lease has ended, and that goes on, and its neighbour never undo what the other did.
func TestCopiesSlow(t *testing.T) {
	tm := newTeam(t)
	tm.copies = 2
	a, b := &member{dir: t.TempDir()}, &member{dir: t.TempDir()}
	tm.start(t, a, time.Minute)
	tm.start(t, b, time.Minute)
	key := a.c.hosts.root + "alive/" + a.c.hosts.id
	for n := range 5 {
		want := strings.Repeat("x", 100+n)
		if err := os.WriteFile(filepath.Join(a.dir, "a"), []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		until(t, "it is safe", func() bool { return waitFor(t, a, "a", 2).Whole })
		if _, err := tm.client.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
		save(t, filepath.Join(a.dir, "a"), 1000+n)
		until(t, "it is there", func() bool { return waitFor(t, a, "a", 1).Whole })
		if o, err := tm.store.Stat(t.Context(), tm.src.Prefix+"a"); err != nil || o.Size != int64(1000+n) {
			t.Fatalf("%+v, %v", o, err)
		}
	}
	for _, m := range []*member{a, b} {
		if err := m.end(); err != nil {
			t.Error(err)
		}
	}
}

// What a host asked its neighbour for, and gave up, has no effect when it comes after all.
func TestLateCopy(t *testing.T) {
	id, name := strings.Repeat("A", 26), strings.Repeat("B", 26)
	c := &Carrier{Config: Config{State: t.TempDir(), Log: slog.New(slog.DiscardHandler)}, hosts: &order{id: "here"}}
	s := newShelf(c)
	server := httptest.NewServer(s)
	defer server.Close()
	ask := func(method, path, query string, body io.Reader) int {
		r, err := http.NewRequestWithContext(t.Context(), method, server.URL+"/copies/here/"+id+"/"+name+"/"+path+"?"+
			query, body)
		if err != nil {
			t.Error(err)
			return 0
		}
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Error(err)
			return 0
		}
		answer.Body.Close()
		return answer.StatusCode
	}
	if got := ask(http.MethodPost, "", "after=1&new=1", nil); got != http.StatusOK {
		t.Fatal(got)
	}
	late, rest := io.Pipe()
	ended := make(chan int)
	go func() { ended <- ask(http.MethodPut, "a", "after=1&size=3", late) }()
	if _, err := rest.Write([]byte("ol")); err != nil {
		t.Fatal(err)
	}
	if got := ask(http.MethodPost, "", "after=2", nil); got != http.StatusOK {
		t.Fatal(got)
	}
	if got := ask(http.MethodPut, "a", "after=2&size=3", strings.NewReader("new")); got != http.StatusOK {
		t.Fatal(got)
	}
	if _, err := rest.Write([]byte("d")); err != nil {
		t.Fatal(err)
	}
	rest.Close()
	if got := <-ended; got != http.StatusInternalServerError {
		t.Error(got)
	}
	if b, err := os.ReadFile(filepath.Join(s.dir, id, name, "a")); err != nil || string(b) != "new" {
		t.Errorf("%q, %v", b, err)
	}
}
