package shard

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"path"
	"strings"
	"sync"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Each row of an object is a file inside the object, as a member is in a tar: OBJECT/000000000000.row and so on,
// without its line end. The first row names the columns and is OBJECT/columns.
const (
	// ColumnsName is the file that holds an object's first row.
	ColumnsName = "columns"
	rowSuffix   = ".row"

	csvChunk   = 4 << 20 // bytes of a GET
	csvObjects = 4       // objects that are read at once
	maxRow     = 16 << 20
	csvBuffer  = 4096 // members that wait for their turn, for an object
)

// Rows finds the rows of the .csv and .tsv objects (commas, tabs) under a prefix.
type Rows struct {
	// Objects are in the order of their keys.
	Objects []objstore.Object
	r       objstore.Reader
	prefix  string
}

// OpenRows lists the objects. It ignores others beside them.
func OpenRows(ctx context.Context, r objstore.Reader, src objstore.Source) (*Rows, error) {
	s := &Rows{r: r, prefix: src.Prefix}
	for o, err := range r.List(ctx, src.Prefix) {
		if err != nil {
			return nil, err
		}
		if ext := strings.ToLower(path.Ext(o.Key)); ext == ".csv" || ext == ".tsv" {
			s.Objects = append(s.Objects, o)
		}
	}
	if len(s.Objects) == 0 {
		return nil, fmt.Errorf("%s contains no .csv and no .tsv file (give --samples as for files to read it file by file)", src)
	}
	return s, nil
}

// Members yields the rows of all objects, in order. It reads each object once, in parallel ranges. Rows are as in RFC
// 4180: a quoted field may contain line ends, and quotes written twice; a quote within an unquoted field is a
// character. Empty lines are skipped. It fails if objects have different columns, or a quote is not closed.
func (s *Rows) Members(ctx context.Context) iter.Seq2[Member, error] {
	type found struct {
		m   Member
		err error
	}
	return func(yield func(Member, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		queues := make([]chan found, len(s.Objects))
		headers := make([][]byte, len(s.Objects))
		begin := func(i int) {
			queues[i] = make(chan found, csvBuffer)
			wg.Go(func() {
				defer close(queues[i])
				put := func(f found) bool {
					select {
					case queues[i] <- f:
						return true
					case <-ctx.Done():
						return false
					}
				}
				header, err := s.scan(ctx, i, func(m Member) bool { return put(found{m: m}) })
				if headers[i] = header; err != nil {
					put(found{err: fmt.Errorf("%s: %w", s.Objects[i].Key, err)})
				}
			})
		}
		for i := range min(csvObjects, len(s.Objects)) {
			begin(i)
		}
		for i := range s.Objects {
			for f := range queues[i] {
				if !yield(f.m, f.err) || f.err != nil {
					return
				}
			}
			if ctx.Err() != nil {
				yield(Member{}, context.Cause(ctx))
				return
			}
			if !bytes.Equal(headers[i], headers[0]) {
				yield(Member{}, fmt.Errorf("%s has the columns %.200q, %s has %.200q: all objects of a dataset must have the same columns in the same order",
					s.Objects[i].Key, headers[i], s.Objects[0].Key, headers[0]))
				return
			}
			if i+csvObjects < len(s.Objects) {
				begin(i + csvObjects)
			}
		}
	}
}

// scan finds the rows of object i, and returns the first one.
func (s *Rows) scan(ctx context.Context, i int, emit func(Member) bool) (header []byte, err error) {
	o := s.Objects[i]
	base := strings.TrimPrefix(o.Key, s.prefix)
	p := rowScanner{comma: ','}
	if strings.EqualFold(path.Ext(o.Key), ".tsv") {
		p.comma = '\t'
	}
	n := 0
	p.row = func(from, to int64, text []byte) bool {
		name := ColumnsName
		if header != nil {
			name = fmt.Sprintf("%012d%s", n, rowSuffix)
			n++
		} else {
			header = bytes.Clone(text)
		}
		return emit(Member{Path: base + "/" + name, ETag: fmt.Sprintf("%s+%d", o.ETag, from), Size: to - from, ModTime: o.ModTime, Shard: i, Off: from})
	}
	a := newAhead(ctx, s.r, o)
	a.through = csvChunk
	defer a.close()
	for a.pos < o.Size {
		chunk, err := a.next()
		if err != nil {
			return nil, err
		}
		if err := p.feed(chunk); err != nil {
			return nil, err
		}
		a.pos += int64(len(chunk))
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	if err := p.end(); err != nil {
		return nil, err
	}
	if header == nil {
		return nil, fmt.Errorf("it is empty, but its first row must name the columns")
	}
	return header, nil
}

// rowScanner splits a text into rows, chunk by chunk.
type rowScanner struct {
	comma byte
	row   func(from, to int64, text []byte) bool // text is valid until it returns; false: no more

	at      int64  // of the next byte in the object
	begin   int64  // of the row
	text    []byte // of the row, from chunks before
	quoted  bool   // within quotes
	quote   bool   // after a quote within quotes: the field's end, or the first of two
	within  bool   // within a field: a quote is a character
	stopped bool
}

func (p *rowScanner) feed(b []byte) error {
	if p.at == 0 { // a byte order mark is no part of the first name
		if t, ok := bytes.CutPrefix(b, []byte("\xef\xbb\xbf")); ok {
			b, p.at, p.begin = t, 3, 3
		}
	}
	start := 0 // of the row's text in b
	for i := 0; i < len(b) && !p.stopped; i++ {
		c := b[i]
		if p.quoted {
			switch {
			case p.quote && c == '"':
				p.quote = false
				continue
			case p.quote:
				p.quoted, p.quote, p.within = false, false, true
			case c == '"':
				p.quote = true
				continue
			default:
				continue
			}
		}
		switch c {
		case '\n':
			p.text = append(p.text, b[start:i]...)
			p.cut(p.at + int64(i))
			start = i + 1
			p.begin = p.at + int64(start)
		case p.comma:
			p.within = false
		case '"':
			p.quoted = !p.within
			p.within = true
		default:
			p.within = true
		}
	}
	p.text = append(p.text, b[start:]...)
	p.at += int64(len(b))
	if len(p.text) > maxRow+csvChunk {
		return fmt.Errorf("the row at byte %d has more than %d bytes: is a closing quote missing?", p.begin, maxRow)
	}
	return nil
}

// cut emits the row that ends before at.
func (p *rowScanner) cut(at int64) {
	text := bytes.TrimSuffix(p.text, []byte("\r"))
	at -= int64(len(p.text) - len(text))
	if len(text) > 0 && !p.row(p.begin, at, text) {
		p.stopped = true
	}
	p.text, p.within = p.text[:0], false
}

func (p *rowScanner) end() error {
	if p.quoted && !p.quote {
		return fmt.Errorf("the row at byte %d has no closing quote", p.begin)
	}
	if len(p.text) > 0 {
		p.cut(p.at)
	}
	return nil
}
