package kit

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"time"
)

// Records are results of a long benchmark, kept in a file, a line of JSON each, so that a run that was
// interrupted goes on where it was. The last line of a name counts.
type Records[T any] struct {
	path string
	by   map[string]T
}

type record[T any] struct {
	Name  string    `json:"name"`
	Time  time.Time `json:"time"`
	Value T         `json:"value"`
}

// OpenRecords reads a file of records, or begins one; fresh forgets what it holds.
func OpenRecords[T any](path string, fresh bool) (*Records[T], error) {
	r := &Records[T]{path: path, by: map[string]T{}}
	if fresh {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for line := range bytes.Lines(text) {
		var rec record[T]
		if json.Unmarshal(line, &rec) == nil && rec.Name != "" { // else the end of a run that was killed
			r.by[rec.Name] = rec.Value
		}
	}
	return r, nil
}

// Get returns the record of that name.
func (r *Records[T]) Get(name string) (T, bool) {
	v, ok := r.by[name]
	return v, ok
}

// Add keeps a record.
func (r *Records[T]) Add(name string, v T) error {
	r.by[name] = v
	b, err := json.Marshal(record[T]{name, time.Now().UTC(), v})
	if err != nil {
		return err
	}
	f, err := os.OpenFile(r.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	// A line of its own also after one that was cut short.
	_, err = f.Write(append(append([]byte("\n"), b...), '\n'))
	return errors.Join(err, f.Close())
}
