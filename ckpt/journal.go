package ckpt

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/internal/durable"
	"github.com/shoalfs/shoal/internal/killpoint"
)

// journal is what must survive a crash, as lines of JSON. Torn ones are cut off. Several goroutines may use it.
type journal struct {
	path string
	id   string // a file with the journal's ID in the folder that is carried, and that goes with it

	mu    sync.Mutex
	f     *os.File
	size  int64
	room  int64 // size and what is reserved behind it: a full disk must not stop what frees it
	lines int
	known known
}

type known struct {
	Origin   origin
	Objects  map[string]Published
	Unsealed map[string]int64 // as of a Queue
	Uploads  map[string]begun // by path, one for each; not only Run's goroutine changes these, and Copies
	Neighbour
	Copies map[string]copyOf // at the neighbour
}

// Neighbour is another host that keeps copies, by its journal's ID, and the name of the copies, a random one.
type Neighbour struct {
	At   string `json:"at,omitempty"`
	Copy string `json:"copy,omitempty"`
}

// origin is what a journal is about. What it says of another folder or destination is not true of this one.
type origin struct {
	ID   string `json:"id"` // random, of this journal
	Dest string `json:"dest"`
	At   string `json:"at,omitempty"` // the endpoint
	Dev  uint64 `json:"dev"`          // of the folder
	Ino  uint64 `json:"ino"`
}

type begun struct {
	Print folder.Print `json:"print"`
	Part  int64        `json:"part"` // bytes
	ID    string       `json:"id,omitempty"`
	// Others are the uploads under the key that were there before this one, whose ID is not known yet.
	Others []string `json:"others,omitempty"`
}

// entry is a line: but for Since, exactly one of its fields after Path is set.
type entry struct {
	Path     string     `json:"path,omitempty"`
	Origin   *origin    `json:"origin,omitempty"`
	Object   *Published `json:"object,omitempty"`
	Removed  bool       `json:"removed,omitempty"`
	Unsealed bool       `json:"unsealed,omitempty"`
	Since    int64      `json:"since,omitempty"` // of Unsealed
	Upload   *begun     `json:"upload,omitempty"`
	Ended    bool       `json:"ended,omitempty"` // the upload is complete or aborted
	Copy     *copyOf    `json:"copy,omitempty"`
	// Neighbour is another one, or has lost what it had.
	Neighbour *Neighbour `json:"neighbour,omitempty"`
}

func (k *known) apply(e entry) {
	switch {
	case e.Origin != nil:
		*k = known{Origin: *e.Origin, Objects: map[string]Published{}, Unsealed: map[string]int64{},
			Uploads: map[string]begun{}, Copies: map[string]copyOf{}}
	case e.Object != nil:
		if k.Objects[e.Path] = *e.Object; e.Object.Print != (folder.Print{}) {
			delete(k.Unsealed, e.Path)
		}
	case e.Removed:
		delete(k.Objects, e.Path)
	case e.Unsealed:
		k.Unsealed[e.Path] = e.Since
	case e.Upload != nil:
		k.Uploads[e.Path] = *e.Upload
	case e.Ended:
		delete(k.Uploads, e.Path)
	case e.Neighbour != nil:
		k.Neighbour, k.Copies = *e.Neighbour, map[string]copyOf{}
	case e.Copy != nil:
		if k.Copies[e.Path] = *e.Copy; *e.Copy == (copyOf{}) {
			delete(k.Copies, e.Path)
		}
	}
}

// entries yields the lines that say what k says.
func (k *known) entries(yield func(entry) bool) {
	more := yield(entry{Origin: &k.Origin})
	for p, o := range k.Objects {
		more = more && yield(entry{Path: p, Object: &o})
	}
	for p, since := range k.Unsealed {
		more = more && yield(entry{Path: p, Unsealed: true, Since: since})
	}
	for p, u := range k.Uploads {
		more = more && yield(entry{Path: p, Upload: &u})
	}
	more = more && yield(entry{Neighbour: &k.Neighbour})
	for p, c := range k.Copies {
		more = more && yield(entry{Path: p, Copy: &c})
	}
}

// parse returns what a journal says up to the first line that is not an entry, and the bytes until there.
func parse(journal []byte) (k known, n int64) {
	for line := range bytes.Lines(journal) {
		var e entry
		if !bytes.HasSuffix(line, []byte("\n")) || json.Unmarshal(line, &e) != nil ||
			k.Objects == nil && e.Origin == nil {
			break
		}
		k.apply(e)
		n += int64(len(line))
	}
	return k, n
}

// openJournal opens a journal for of. A new one begins, with a new ID unless of has one, also if the folder was made
// anew with the inode of the last one. It knows the last one's uploads to the same destination: they end, or go on.
func openJournal(file, id string, of origin) (j *journal, err error) {
	b, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	k, n := parse(b)
	own, _ := os.ReadFile(id)
	want := of.ID
	k.Origin.At = cmp.Or(k.Origin.At, of.At) // an older release did not say
	if of.ID = string(own); k.Origin != of || of.ID == "" || want != "" && want != of.ID {
		stale := k
		of.ID = cmp.Or(want, rand.Text())
		if k.apply(entry{Origin: &of}); stale.Origin.Dest == of.Dest && stale.Origin.At == of.At {
			maps.Copy(k.Uploads, stale.Uploads)
		}
	}
	// What rule 5 has removed is not remembered longer.
	there := map[string]bool{}
	for p := range k.Objects {
		addFolders(there, p)
	}
	maps.DeleteFunc(k.Unsealed, func(last string, _ int64) bool { return !there[path.Dir(last)] })
	j = &journal{path: file, id: id, known: k}
	if err = j.compact(); err != nil && k.Origin.ID == string(own) { // no space: there is room in the one that is there
		j.size, j.lines = n, bytes.Count(b, []byte("\n"))
		if j.f, err = os.OpenFile(file, os.O_WRONLY, 0); err == nil && n < int64(len(b)) {
			err = j.f.Truncate(n)
		}
	}
	return j, err
}

func (j *journal) uploads() map[string]begun {
	j.mu.Lock()
	defer j.mu.Unlock()
	return maps.Clone(j.known.Uploads)
}

func (j *journal) compact() error {
	var size int64
	lines := 0
	folder.MakeHome(filepath.Dir(j.id))
	err := errors.Join(os.MkdirAll(filepath.Dir(j.path), 0o700),
		durable.Write(j.id, "ckpt.journal.id", 0o600, slices.Values([][]byte{[]byte(j.known.Origin.ID)})))
	if err != nil {
		return err
	}
	err = durable.Write(j.path, "ckpt.journal", 0o600, iter.Seq[[]byte](func(yield func([]byte) bool) {
		for e := range j.known.entries {
			b := e.line()
			lines++
			size += int64(len(b))
			if !yield(b) {
				return
			}
		}
	}))
	if err != nil {
		return err
	}
	f, err := os.OpenFile(j.path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	if j.f != nil {
		_ = j.f.Close()
	}
	j.f, j.lines, j.size, j.room = f, lines, size, 0
	j.reserve()
	return nil
}

// reserve sees to it that a MiB of the next lines has its place on the disk, if the file system can.
func (j *journal) reserve() {
	if j.room < j.size+1<<19 && unix.Fallocate(int(j.f.Fd()), unix.FALLOC_FL_KEEP_SIZE, j.size, 1<<20) == nil {
		j.room = j.size + 1<<20
	}
}

func (e entry) line() []byte { return append(encode(e), '\n') }

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil { // no type of this package can fail
		panic(err)
	}
	return b
}

// write adds a line. If sync is set, it is durable on return, and so are all before it.
func (j *journal) write(e entry, sync bool) (err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	defer func() {
		if err != nil {
			err = fmt.Errorf("write %s: %w (free some space; the folder's files are safe)",
				objstore.RealPath(j.path), err)
		}
	}()
	j.known.apply(e)
	if live := 2 + len(j.known.Objects) + len(j.known.Unsealed) + len(j.known.Uploads) +
		len(j.known.Copies); (j.lines > 1000+4*live || !there(j.id) || !there(j.path)) && j.compact() == nil {
		return nil
	}
	b := e.line()
	if _, err := j.f.WriteAt(b, j.size); err != nil {
		return err // the next line takes the place of what is there of this one
	}
	j.size += int64(len(b))
	j.lines++
	j.reserve()
	killpoint.Pass("ckpt.journal.line")
	if sync {
		return j.f.Sync()
	}
	return nil
}

// there reports whether nobody has removed a file.
func there(file string) bool { _, err := os.Lstat(file); return err == nil }

func (j *journal) close() error { return errors.Join(j.f.Sync(), j.f.Close()) }

// StateName names a folder for the journal of dir and dest among those of others.
func StateName(dir, dest string) string {
	sum := sha256.Sum256([]byte(dir + "\x00" + dest))
	return fmt.Sprintf("%x", sum[:8])
}
