package s3api

import (
	"cmp"
	"encoding/base64"
	"encoding/xml"
	"net/http"
	"net/url"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore/s3"
)

const maxKeys = 1000

// tokenPrefix begins the continuation tokens of listings from the manifest; the origin's go to the origin.
const tokenPrefix = "shoal."

// listing is a request for a page of keys.
type listing struct {
	v2                bool
	prefix, delimiter string
	after             string // keys up to this one, and prefixes up to it, were listed
	token             string // as it was given
	startAfter        string // marker, in version 1
	max               int
	encode            bool
	foreign           bool // the token is not ours
}

func parseListing(q url.Values) (l listing, err error) {
	l = listing{v2: q.Get("list-type") == "2", prefix: q.Get("prefix"), delimiter: q.Get("delimiter"), max: maxKeys}
	if text := q.Get("max-keys"); text != "" {
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil || n < 0 {
			return l, badArgument("Argument max-keys must be an integer between 0 and 2147483647")
		}
		l.max = min(int(n), maxKeys)
	}
	text := q.Get("encoding-type")
	if l.encode = text == "url"; !l.encode && text != "" {
		return l, badArgument("Invalid Encoding Method specified in Request")
	}
	if !l.v2 {
		l.startAfter = q.Get("marker")
		l.after = l.startAfter
		return l, nil
	}
	l.startAfter = q.Get("start-after")
	l.after = l.startAfter
	if l.token = q.Get("continuation-token"); l.token != "" {
		text, ours := strings.CutPrefix(l.token, tokenPrefix)
		after, err := base64.RawURLEncoding.DecodeString(text)
		if l.foreign = !ours || err != nil; !l.foreign {
			l.after = string(after)
		}
	} else if q.Has("continuation-token") {
		return l, badArgument("The continuation token provided is incorrect")
	}
	return l, nil
}

// forOrigin changes the query for the origin, to which our tokens mean nothing.
func (l *listing) forOrigin(q url.Values) {
	if l.token == "" || l.foreign {
		return
	}
	q.Del("continuation-token")
	after := l.after
	if l.delimiter != "" && strings.HasSuffix(after, l.delimiter) { // the prefix was listed
		after += "\U0010FFFF"
	}
	q.Set("start-after", after)
}

// listResult is a page of either version.
type listResult struct {
	XMLName               xml.Name `xml:"http://s3.amazonaws.com/doc/2006-03-01/ ListBucketResult"`
	Name                  string
	Prefix                string
	Marker                *string `xml:",omitempty"`
	NextMarker            string  `xml:",omitempty"`
	StartAfter            string  `xml:",omitempty"`
	ContinuationToken     string  `xml:",omitempty"`
	NextContinuationToken string  `xml:",omitempty"`
	KeyCount              *int    `xml:",omitempty"`
	MaxKeys               int
	Delimiter             string `xml:",omitempty"`
	EncodingType          string `xml:",omitempty"`
	IsTruncated           bool
	Contents              []listedKey
	CommonPrefixes        []listedPart
}

type listedKey struct {
	Key          string
	LastModified string
	ETag         string
	Size         int64
	StorageClass string
}

type listedPart struct{ Prefix string }

// tree finds a manifest's files in the order of their keys.
type tree struct {
	m    *catalog.Manifest
	sort sync.Once
	dirs []uint32 // directories, the children of each in the order of name and slash
}

// next returns the first file whose path is greater than after, or also equal if equal is set.
func (t *tree) next(after string, equal bool) (file int, ok bool) {
	t.sort.Do(func() {
		t.dirs = make([]uint32, t.m.Dirs())
		for d := range t.dirs {
			t.dirs[d] = uint32(d)
		}
		for d := range t.m.Dirs() {
			x := t.m.Dir(d)
			children := t.dirs[x.FirstDir:x.EndDir]
			sort.Slice(children, func(i, j int) bool { return t.name(children[i]) < t.name(children[j]) })
		}
	})
	return t.below(0, after, equal)
}

// name is a directory's part of its files' keys.
func (t *tree) name(dir uint32) string { return t.m.Dir(int(dir)).Name + "/" }

// below is next within a directory, with paths from there.
func (t *tree) below(dir int, after string, equal bool) (file int, ok bool) {
	// All keys of the folder that after begins with come before those of its siblings that are greater than after.
	if head, rest, deeper := strings.Cut(after, "/"); deeper {
		if node, found := t.m.Lookup(dir, head); found && node.IsDir {
			if file, ok = t.below(node.Index, rest, equal); ok {
				return file, true
			}
		}
	}
	d := t.m.Dir(dir)
	file = d.FirstFile + sort.Search(d.EndFile-d.FirstFile, func(i int) bool {
		name := t.m.Name(d.FirstFile + i)
		return name > after || equal && name == after
	})
	children := t.dirs[d.FirstDir:d.EndDir]
	children = children[sort.Search(len(children), func(i int) bool { return t.name(children[i]) > after }):]
	for _, child := range children {
		if file < d.EndFile && t.m.Name(file) < t.name(child) {
			break
		}
		if first, ok := t.below(int(child), "", false); ok { // a folder may be empty
			return first, true
		}
	}
	return file, file < d.EndFile
}

// page lists from the tree. root begins all its keys, and the listing's prefix begins with it.
func (t *tree) page(l *listing, bucket, root string, unknown time.Time) listResult {
	encode := func(s string) string { return s }
	r := listResult{Name: bucket, MaxKeys: l.max}
	if l.encode {
		encode, r.EncodingType = func(s string) string { return string(s3.AppendPath(nil, s)) }, "url"
	}
	r.Prefix, r.Delimiter = encode(l.prefix), encode(l.delimiter)
	at, equal := l.after, false
	if at < l.prefix {
		at, equal = l.prefix, true
	}
	last, n := "", 0
	for ; ; n++ {
		path, below := strings.CutPrefix(at, root)
		if !below { // it is greater than all keys there
			break
		}
		file, ok := t.next(path, equal)
		if !ok {
			break
		}
		key := root + t.m.Path(file)
		if !strings.HasPrefix(key, l.prefix) {
			break
		}
		at, equal = key, false
		part := ""
		if l.delimiter != "" {
			if i := strings.Index(key[len(l.prefix):], l.delimiter); i >= 0 {
				part = key[:len(l.prefix)+i+len(l.delimiter)]
				at = part + "\xff" // no key has this byte
			}
		}
		if part != "" && part <= l.after {
			n--
			continue
		}
		if n >= l.max {
			r.IsTruncated = l.max > 0
			break
		}
		if last = key; part != "" {
			last = part
			r.CommonPrefixes = append(r.CommonPrefixes, listedPart{encode(part)})
			continue
		}
		r.Contents = append(r.Contents,
			listedKey{encode(key), modified(t.m.ModTime(file), unknown).Format("2006-01-02T15:04:05.000Z"),
				`"` + t.m.ETag(file) + `"`, t.m.Size(file), "STANDARD"})
	}
	switch {
	case l.v2:
		r.KeyCount, r.StartAfter, r.ContinuationToken = &n, encode(l.startAfter), l.token
		if r.IsTruncated {
			r.NextContinuationToken = tokenPrefix + base64.RawURLEncoding.EncodeToString([]byte(last))
		}
	default:
		marker := encode(l.startAfter)
		if r.Marker = &marker; r.IsTruncated && l.delimiter != "" {
			r.NextMarker = encode(last)
		}
	}
	return r
}

// modified is a file's time, or the one for files without.
func modified(t, unknown time.Time) time.Time { return cmp.Or(t, unknown).UTC() }

// list answers a listing from the manifest, if that shows all that the origin has there.
func (d *dataset) list(w http.ResponseWriter, r *http.Request, q url.Values) error {
	l, err := parseListing(q)
	if err != nil {
		return err
	}
	d.catchUp()
	complete := !d.written.below(l.prefix)
	m := d.Manifest()
	skipped := m.Skipped()
	complete = complete && !d.Members() && skipped.Total()+skipped.Markers == 0
	if d.Origin != nil && (!complete || l.foreign || !strings.HasPrefix(l.prefix, m.Prefix()) ||
		q.Get("fetch-owner") == "true" || asksOwner(r)) {
		l.forOrigin(q)
		return d.forward(w, r, "", q)
	}
	if l.foreign {
		return badArgument("The continuation token provided is incorrect")
	}
	writeXML(w, http.StatusOK, d.treeOf(m).page(&l, d.Bucket, m.Prefix(), d.server.began))
	return nil
}
