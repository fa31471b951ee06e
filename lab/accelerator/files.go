package accelerator

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
)

// Files reads samples from files, as a Dataset's __getitem__ does: open, read to the end, close. A read
// of a mount whose daemon hangs cannot be ended by a context.
type Files struct {
	Dir   string
	Paths []string // below Dir, by position in the epoch's order

	buffers sync.Pool
}

// fileBuffer is what one read asks for, as Python's buffered reads of a known size do.
const fileBuffer = 1 << 20

// Read reads a file. An empty one is an error, since no sample is.
func (f *Files) Read(_ context.Context, pos int) (n int64, err error) {
	file, err := os.Open(filepath.Join(f.Dir, f.Paths[pos]))
	if err != nil {
		return 0, err
	}
	defer file.Close()
	buf, ok := f.buffers.Get().(*[]byte)
	if !ok {
		b := make([]byte, fileBuffer)
		buf = &b
	}
	defer f.buffers.Put(buf)
	for {
		m, err := file.Read(*buf)
		n += int64(m)
		switch {
		case err == io.EOF && n == 0:
			return 0, fmt.Errorf("%s is empty: no sample is", file.Name())
		case err == io.EOF:
			return n, nil
		case err != nil:
			return n, err
		}
	}
}
