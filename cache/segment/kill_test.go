//go:build killpoints

package segment

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/shoalfs/shoal/cache/crypt"
)

// fileIndex is an Index in a file.
type fileIndex struct {
	mapIndex
	path string
}

type jsonCover struct {
	Size   int64
	Sealed bool
	Table  []byte
}

func openFileIndex(path string) *fileIndex {
	x := &fileIndex{path: path}
	x.segs = make(map[uint32]cover)
	var kept map[uint32]jsonCover
	if b, err := os.ReadFile(path); err == nil && json.Unmarshal(b, &kept) == nil {
		for id, c := range kept {
			x.segs[id] = cover{c.Size, c.Sealed, c.Table}
		}
	}
	return x
}

func (x *fileIndex) save() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	kept := make(map[uint32]jsonCover)
	for id, c := range x.segs {
		kept[id] = jsonCover{c.size, c.sealed, c.table}
	}
	b, err := json.Marshal(kept)
	if err != nil {
		return err
	}
	if err := os.WriteFile(x.path+".new", b, 0o644); err != nil {
		return err
	}
	return os.Rename(x.path+".new", x.path)
}

func (x *fileIndex) CommitSegment(id uint32, size int64, sealed bool, table []byte) error {
	return errors.Join(x.mapIndex.CommitSegment(id, size, sealed, table), x.save())
}

func (x *fileIndex) DropSegment(id uint32) error {
	return errors.Join(x.mapIndex.DropSegment(id), x.save())
}

// failingFS fails each header of a record that the test asks for.
type failingFS struct {
	osFS
	fail *bool
}

func (f failingFS) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	file, err := f.osFS.OpenFile(name, flag, perm)
	return failingFile{file, f.fail}, err
}

type failingFile struct {
	File
	fail *bool
}

func (f failingFile) WriteAt(p []byte, off int64) (int, error) {
	if *f.fail && len(p) > 4 && string(p[:4]) == recordMagic {
		n, _ := f.File.WriteAt(p[:50], off)
		return n, syscall.ENOSPC
	}
	return f.File.WriteAt(p, off)
}

// TestKillChild is the program that is killed. It tells by a file what it may be held to.
func TestKillChild(t *testing.T) {
	root := os.Getenv("SEGMENT_KILL_ROOT")
	if root == "" {
		return // it is run by TestKillEverywhere
	}
	log, err := os.OpenFile(filepath.Join(root, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	say := func(format string, args ...any) { fmt.Fprintf(log, format+"\n", args...) }

	if _, err := Check(filepath.Join(root, "damaged"),
		CheckOptions{Key: killKey(), Repair: true,
			Index: openFileIndex(filepath.Join(root, "damaged.idx"))}); err != nil {
		t.Fatal(err)
	}
	fail := false
	o := Options{Key: killKey(), FS: failingFS{fail: &fail}, Index: openFileIndex(filepath.Join(root, "idx")),
		SegmentSize: 10_000, Logger: quiet()}
	dir := filepath.Join(root, "store")
	s := mustOpen(t, dir, o, nil)
	for i := range 40 {
		r, p := small(i, 500+100*i)
		if fail = i%7 == 3; fail {
			_, _ = s.Append(r, p)
			continue
		}
		loc, err := s.Append(r, p)
		if err != nil {
			t.Fatal(err)
		}
		say("append %d", i)
		if i%10 == 9 {
			if err := s.Sync(); err != nil {
				t.Fatal(err)
			}
			segs := s.Segments()
			id := segs[0].ID
			if id == loc.Segment() {
				continue
			}
			// All of the next one stays, but in another place.
			if _, err := s.Condense(segs[1].ID, 1<<20, func(Record, Loc) bool {
				return true
			}, func(Loc, Loc) {}); err != nil {
				t.Fatal(err)
			}
			s.visitLive(s.segment(id), func(r Record, _ Loc) {
				say("drop %d", binary.LittleEndian.Uint32(r.KeyHash[:]))
			})
			if _, err := s.DropSegment(id); err != nil {
				t.Fatal(err)
			}
		}
	}
	fail = false
	infos := s.Segments()
	mustClose(t, s)
	// A tail for Open to cut, and a header to mend.
	last := filepath.Join(dir, fmt.Sprintf("%08d.seg", infos[len(infos)-1].ID))
	f, err := os.OpenFile(last, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	info, _ := f.Stat()
	if _, err := f.WriteAt(randomBytes(999), alignUp(info.Size(), unit)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("x"), 30); err != nil {
		t.Fatal(err)
	}
	mustClose(t, mustOpen(t, dir, o, nil))
}

// killKey is the child's key: every third run has one.
func killKey() *crypt.Key {
	if os.Getenv("SEGMENT_KILL_ENCRYPTED") == "" {
		return nil
	}
	return testKey
}

// killWorld prepares what the child works on.
func killWorld(t *testing.T, root string, key *crypt.Key) {
	idx := openFileIndex(filepath.Join(root, "damaged.idx"))
	s := mustOpen(t, filepath.Join(root, "damaged"), Options{Key: key, Index: idx, SegmentSize: 5000}, nil)
	var locs []Loc
	for i := range 12 {
		loc, _ := mustAppend(t, s, i, 1000)
		locs = append(locs, loc)
	}
	mustClose(t, s)
	break1 := func(id uint32, at int64) {
		f, err := os.OpenFile(filepath.Join(root, "damaged", fmt.Sprintf("%08d.seg", id)), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteAt([]byte("\xff\xfe"), at); err != nil {
			t.Fatal(err)
		}
	}
	break1(1, locs[1].off()+int64(locs[1].gap())+9) // void
	break1(1, 9000)                                 // cut
	break1(2, 20)                                   // removed
	for _, loc := range locs {                      // the table names them, and any would tell the salt
		if loc.Segment() == 2 {
			break1(2, loc.off())
		}
	}
	break1(3, 20) // mended
}

// TestKillEverywhere kills the child at each point that the package comment lists: at its first, second and
// fifth passing. Whatever was acknowledged must be there then.
func TestKillEverywhere(t *testing.T) {
	run := func(root, point, log string, key *crypt.Key) error {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKillChild$")
		cmd.Env = append(os.Environ(), "SEGMENT_KILL_ROOT="+root, "SHOAL_KILLPOINT="+point, "SHOAL_KILLPOINTS_LOG="+log)
		if key != nil {
			cmd.Env = append(cmd.Env, "SEGMENT_KILL_ENCRYPTED=1")
		}
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL {
			return err
		}
		if err != nil {
			t.Fatalf("%s: %v\n%s", point, err, out)
		}
		return nil
	}
	root := t.TempDir()
	killWorld(t, root, nil)
	if err := run(root, "", filepath.Join(root, "points"), nil); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(root, "points"))
	if err != nil {
		t.Fatal(err)
	}
	passed := strings.Split(strings.TrimSpace(string(b)), "\n")
	kills := 0
	for _, name := range killpoints(t) {
		if !slices.Contains(passed, name) {
			t.Errorf("%s was not passed", name)
		}
		for _, n := range []int{1, 2, 5} {
			point := fmt.Sprintf("%s:%d", name, n)
			root := t.TempDir()
			var key *crypt.Key
			if n == 2 {
				key = testKey
			}
			killWorld(t, root, key)
			if run(root, point, "", key) != nil {
				kills++
			} else if n == 1 {
				t.Errorf("%s did not kill", name)
			}
			t.Run(point, func(t *testing.T) { afterKill(t, root, key) })
		}
	}
	t.Logf("%d kills", kills)
}

// afterKill looks at what a killed child left.
func afterKill(t *testing.T, root string, key *crypt.Key) {
	// The repair: run again, it is clean, and the good records are there.
	idx := openFileIndex(filepath.Join(root, "damaged.idx"))
	damaged := filepath.Join(root, "damaged")
	if r, err := Check(damaged, CheckOptions{Key: key, Repair: true, Index: idx}); err != nil {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := Check(damaged, CheckOptions{Key: key, Index: idx}); err != nil || len(r.Findings) > 0 ||
		r.Records != 7 {
		t.Errorf("repaired: %+v, %v", r, err)
	}
	seen := 0
	mustClose(t, mustOpen(t, damaged, Options{Key: key, Index: idx}, func(Extent, Loc) { seen++ }))
	if seen != 7 {
		t.Errorf("%d records after the repair", seen)
	}
	// The store.
	b, err := os.ReadFile(filepath.Join(root, "log"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	acked := make(map[int]bool)
	for line := range strings.Lines(string(b)) {
		var i int
		if _, err := fmt.Sscanf(line, "append %d", &i); err == nil {
			acked[i] = true
		} else if _, err := fmt.Sscanf(line, "drop %d", &i); err == nil {
			delete(acked, i)
		}
	}
	idx = openFileIndex(filepath.Join(root, "idx"))
	dir := filepath.Join(root, "store")
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return // it did not come so far
	}
	recs := make(map[Loc]Extent)
	s := mustOpen(t, dir, Options{Key: key, Index: idx}, func(x Extent, loc Loc) { recs[loc] = x })
	for loc, r := range recs {
		i := numberOf(t, r)
		_, want := small(i, 500+100*i)
		p := make([]byte, r.Length)
		if err := s.ReadAt(loc, r.Length, p, 0); err != nil || !bytes.Equal(p, want) {
			t.Errorf("%v: %v", loc, err)
		}
		delete(acked, i)
	}
	if len(acked) > 0 {
		t.Errorf("acknowledged, and not there: %v", acked)
	}
	var files int64
	names, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, name := range names {
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		files += alignUp(info.Size(), unit)
	}
	if files != s.Used() {
		t.Errorf("%d bytes on the disk, %d used", files, s.Used())
	}
	mustClose(t, s)
	if r, err := Check(dir, CheckOptions{Key: key, Index: idx}); err != nil || len(r.Findings) > 0 {
		t.Errorf("fsck: %+v, %v", r, err)
	}
}
