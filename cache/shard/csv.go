package shard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Each row of an object is a file inside the object, as a member is in a tar: OBJECT/000000000000.row and so on,
// without its line end. The first row names the columns and is OBJECT/columns.
const (
	// ColumnsName is the file that holds an object's first row.
	ColumnsName = "columns"
	RowSuffix   = ".row" // of the files of rows

	maxRow = 16 << 20
)

// rows finds the rows of a table. They are as in RFC 4180: a quoted field may contain line ends, and quotes written
// twice; a quote within an unquoted field is a character. Empty lines are skipped. It fails if a quote is not closed.
func (s *Rows) rows(ctx context.Context, o objstore.Object, emit func(Member) bool) (columns string, err error) {
	base := strings.TrimPrefix(o.Key, s.prefix)
	p := rowScanner{comma: ','}
	if strings.EqualFold(path.Ext(o.Key), ".tsv") {
		p.comma = '\t'
	}
	n := 0
	p.row = func(from, to int64, text []byte) bool {
		name := ColumnsName
		if columns != "" {
			name = fmt.Sprintf("%012d%s", n, RowSuffix)
			n++
		} else {
			columns = fmt.Sprintf("the columns %q", text)
		}
		return emit(Member{Path: base + "/" + name, Size: to - from, Off: from})
	}
	a := newAhead(ctx, s.r, o)
	a.through = rowsThrough
	defer a.close()
	for a.pos < o.Size {
		chunk, err := a.next()
		if err == nil && a.pos == 0 {
			err = isText(chunk)
		}
		if err == nil {
			err = p.feed(chunk)
		}
		if err != nil {
			return "", err
		}
		a.pos += int64(len(chunk))
	}
	if err := p.end(); err != nil {
		return "", err
	}
	if columns == "" {
		return "", fmt.Errorf("it is empty, but its first row must name the columns")
	}
	return columns, nil
}

// isText refuses what is called .csv and has no rows of text, by its first line: its bytes would be taken for columns.
func isText(begin []byte) error {
	line, _, _ := bytes.Cut(begin, []byte("\n"))
	switch err := isCompressed(begin); {
	case err != nil:
		return err
	case bytes.IndexByte(line, 0) >= 0:
		return errors.New("its first row has zero bytes: it is not text, or UTF-16 (store it as UTF-8)")
	case bytes.IndexByte(bytes.TrimRight(line, "\r"), '\r') >= 0 && bytes.IndexByte(line, '"') < 0:
		return errors.New("its lines end with CR alone (end them with LF)")
	}
	return nil
}

// rowScanner splits a text into rows, chunk by chunk.
type rowScanner struct {
	comma byte
	row   func(from, to int64, text []byte) bool // text is valid until it returns; false: no more

	at      int64  // of the next byte in the object
	begin   int64  // of the row
	text    []byte // of the row, from chunks before
	quoted  bool   // within quotes
	closed  bool   // the last byte was a quote that ended them, or the first of two
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
		c, closed := b[i], p.closed
		p.closed = p.quoted && c == '"'
		switch {
		case p.quoted:
			p.quoted = !p.closed
		case c == '"':
			p.quoted = closed || !p.within
			p.within = true
		case c == '\n':
			p.text = append(p.text, b[start:i]...)
			p.cut(p.at + int64(i))
			start = i + 1
			p.begin = p.at + int64(start)
		default:
			p.within = c != p.comma
		}
	}
	p.text = append(p.text, b[start:]...)
	p.at += int64(len(b))
	if len(p.text) > maxRow+rowsThrough {
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
	if p.quoted {
		return fmt.Errorf("the row at byte %d has no closing quote", p.begin)
	}
	if len(p.text) > 0 {
		p.cut(p.at)
	}
	return nil
}
