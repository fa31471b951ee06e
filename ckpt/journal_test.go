package ckpt

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/ckpt/folder"
)

// filled is a journal in which everything was written, some of it again, and some taken back.
func filled(t testing.TB) (file string, want known) {
	file = filepath.Join(t.TempDir(), "state", "journal")
	j, err := openJournal(file, filepath.Join(filepath.Dir(file), "id"), origin{Dest: "s3://b/p/", Dev: 1, Ino: 2})
	if err != nil {
		t.Fatal(err)
	}
	object := Published{Print: folder.Print{Ino: 3, Size: 4}, ETag: "e"}
	for _, e := range []entry{
		{Path: "a", Object: &object}, {Path: "b", Object: &object}, {Path: "a", Removed: true},
		{Path: "b.d/.metadata", Unsealed: true, Since: 7}, {Path: "b.d/x", Object: &object},
		{Path: "c", Upload: &begun{Print: object.Print, Part: 5, Others: []string{"o"}}},
		{Path: "c", Upload: &begun{Print: object.Print, Part: 5, ID: "i"}},
		{Path: "e", Upload: &begun{Part: 6}}, {Path: "e", Ended: true}, {Path: "f", Upload: &begun{Part: 7}},
		{Path: "f", Object: &object}, {Path: "f", Ended: true},
		{Path: "g/latest", Unsealed: true}, {Path: "g/latest", Object: &object},
		{Path: "a", Copy: &copyOf{Sent: &object.Print}}, {Neighbour: &Neighbour{At: "N", Copy: "C"}},
		{Path: "b", Copy: &copyOf{Sent: &object.Print}},
		{Path: "b", Copy: &copyOf{Has: &object.Print}}, {Path: "c", Copy: &copyOf{Sent: &object.Print}},
		{Path: "c", Copy: &copyOf{}},
	} {
		if err := j.write(e, true); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
	return file, known{
		Origin:    j.known.Origin,
		Objects:   map[string]Published{"b": object, "b.d/x": object, "f": object, "g/latest": object},
		Unsealed:  map[string]int64{"b.d/.metadata": 7},
		Uploads:   map[string]begun{"c": {Print: object.Print, Part: 5, ID: "i"}},
		Neighbour: Neighbour{At: "N", Copy: "C"}, Copies: map[string]copyOf{"b": {Has: &object.Print}},
	}
}

func said(journal []byte) known {
	k, _ := parse(journal)
	return k
}

func TestJournal(t *testing.T) {
	file, want := filled(t)
	if b, err := os.ReadFile(file); err != nil || !reflect.DeepEqual(said(b), want) {
		t.Errorf("read: %+v, %v", said(b), err)
	}
	for range 2 { // as it was, and written anew
		j, err := openJournal(file, filepath.Join(filepath.Dir(file), "id"), origin{Dest: "s3://b/p/", Dev: 1, Ino: 2})
		if err != nil || !reflect.DeepEqual(j.known, want) {
			t.Fatalf("opened: %+v, %v", j.known, err)
		}
		if err := j.close(); err != nil {
			t.Fatal(err)
		}
	}
	j, err := openJournal(file, filepath.Join(filepath.Dir(file), "id"), origin{Dest: "s3://b/p/", Dev: 1, Ino: 9})
	if err != nil || len(j.known.Objects)+len(j.known.Unsealed) > 0 || j.known.Origin.ID == want.Origin.ID {
		t.Errorf("of another folder: %+v, %v", j.known, err)
	}
	// What it began there is found in the file until it has ended.
	if b, err := os.ReadFile(file); err != nil || !reflect.DeepEqual(said(b).Uploads, want.Uploads) {
		t.Errorf("the uploads of another folder: %+v, %v", said(b).Uploads, err)
	}
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
	j, err = openJournal(file, filepath.Join(filepath.Dir(file), "id"), origin{Dest: "s3://b/q/", Dev: 1, Ino: 9})
	if err != nil || len(j.known.Uploads) > 0 {
		t.Errorf("of another destination: %+v, %v", j.known, err)
	}
}

// A bucket of the same name at another endpoint is another one. A journal of an older release, which does not say, goes
// on.
func TestJournalOfAnotherEndpoint(t *testing.T) {
	file, want := filled(t)
	for _, c := range []struct {
		at     string
		goesOn bool
	}{{"https://a", true}, {"https://a", true}, {"https://b", false}} {
		j, err := openJournal(file, filepath.Join(filepath.Dir(file), "id"),
			origin{Dest: "s3://b/p/", At: c.at, Dev: 1, Ino: 2})
		must(t, err)
		if k := j.known; (len(k.Objects) == len(want.Objects)) != c.goesOn || (len(k.Uploads) > 0) != c.goesOn {
			t.Errorf("%+v: %+v", c, k)
		}
		must(t, j.close())
	}
}

// A crash leaves any beginning of what was written, and perhaps blocks of zeros after it. What is read then is a
// beginning, too.
func TestJournalTorn(t *testing.T) {
	file, _ := filled(t)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for n := range len(b) {
		whole, torn := b[:bytes.LastIndexByte(b[:n], '\n')+1], b[:n]
		for _, left := range [][]byte{torn, append(bytes.Clone(torn), make([]byte, 4096)...),
			append(bytes.Clone(torn), "\x00\n"+string(b[n:])...)} {
			if k := said(left); !reflect.DeepEqual(k, said(whole)) {
				t.Fatalf("%q says %+v, not %+v", left, k, said(whole))
			}
		}
	}
}

// A full disk leaves half a line. The next lines, shorter or longer, are read all the same.
func TestJournalAfterHalfALine(t *testing.T) {
	file := filepath.Join(t.TempDir(), "journal")
	j, err := openJournal(file, file+".id", origin{Dest: "s3://b/p/"})
	if err != nil {
		t.Fatal(err)
	}
	half, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer half.Close()
	for _, next := range []string{"a", strings.Repeat("long", 100), "b"} {
		if _, err := half.WriteAt([]byte(`{"path":"`+strings.Repeat("half", 20)), j.size); err != nil {
			t.Fatal(err)
		}
		if err := j.write(entry{Path: next, Unsealed: true}, true); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(file); err != nil || !reflect.DeepEqual(said(b), j.known) {
			t.Errorf("%+v, %v; written: %+v", said(b), err, j.known)
		}
	}
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
}

func FuzzJournal(f *testing.F) {
	file, _ := filled(f)
	b, err := os.ReadFile(file)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte("{}\n{\"origin\":{}}\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		k := said(b)
		var again []byte
		for e := range k.entries {
			again = append(again, e.line()...)
		}
		if k.Objects != nil && !reflect.DeepEqual(said(again), k) {
			t.Errorf("written anew it says %+v, not %+v", said(again), k)
		}
	})
}
