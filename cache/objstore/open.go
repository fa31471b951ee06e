package objstore

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"

	"github.com/minio/minio-go/v7/pkg/s3utils"
)

// Source is the place of a dataset, parsed from the user's text.
type Source struct {
	// Scheme is "s3" or "file".
	Scheme string
	// Bucket is the S3 bucket; empty for "file".
	Bucket string
	// Dir is the folder's absolute path; empty for "s3".
	Dir string
	// Prefix begins all keys of the source; the rest is the path in the dataset. It is empty or ends in "/". Always
	// empty for "file".
	Prefix string
	// Shards is the pattern of the base names of tar shards, such as shard-{000000..000127}.tar or x.tar; Prefix or
	// Dir is then their folder. Empty: a tree of files.
	Shards string
	// Endpoint is the S3 endpoint's URL, which stores.Open fills in; empty for "file".
	Endpoint string
}

// String returns the source as a user would write it.
func (s Source) String() string {
	if s.Scheme == "file" {
		text := (&url.URL{Scheme: "file", Path: strings.TrimSuffix(s.Dir, "/") + "/"}).String()
		return text + plainBraces.Replace(url.PathEscape(s.Shards))
	}
	return "s3://" + s.Bucket + "/" + s.Prefix + s.Shards
}

// plainBraces undoes escapes in a pattern that users do not write.
var plainBraces = strings.NewReplacer("%7B", "{", "%7D", "}", "%2C", ",")

// Canonical returns a unique text for a place, for hashing and as a catalog's key: equal for two spellings of the
// same source, and different for the same bucket name at two endpoints. Two patterns for the same shards are two
// sources.
func (s Source) Canonical() string {
	if s.Scheme == "file" {
		return s.String()
	}
	return s.String() + "?endpoint=" + url.QueryEscape(s.Endpoint)
}

// Overlaps reports whether one place contains the other, so that writing to one changes the other.
func (s Source) Overlaps(o Source) bool {
	if s.Scheme != o.Scheme || s.Bucket != o.Bucket || s.Endpoint != o.Endpoint {
		return false // without a look at folders, which may be in a mount that hangs
	}
	of := func(s Source) string { return strings.TrimSuffix(RealPath(s.Dir), "/") + "/" + s.Prefix }
	a, b := of(s), of(o)
	return strings.HasPrefix(a, b) || strings.HasPrefix(b, a)
}

// RealPath returns a path without symbolic links, as far as it exists.
func RealPath(path string) string {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	if parent := filepath.Dir(path); parent != path {
		return filepath.Join(RealPath(parent), filepath.Base(path))
	}
	return path
}

// ShardKeys returns the full keys of the shards in the pattern's order; nil for a tree of files.
func (s Source) ShardKeys() []string {
	if s.Shards == "" {
		return nil
	}
	names, _ := ExpandBraces(s.Shards) // ParseSource has checked it
	for i := range names {
		names[i] = s.Prefix + names[i]
	}
	return names
}

const shardSuffix = ".tar"

// ParseSource parses s3://BUCKET[/PREFIX], file:///DIR or a path. It accesses no file and no store. Everything after
// the bucket is the prefix, without percent-decoding, as in the AWS tools; a missing "/" at its end is added. A file
// URL is percent-decoded, a path is not.
//
// If its last part ends in .tar, the source is tar shards: that part is the pattern of their names, as for
// [ExpandBraces]. To name a folder like that, end it with a "/".
func ParseSource(text string) (Source, error) {
	usage := func(format string, args ...any) (Source, error) {
		shown := withoutSecrets(text)
		if len(shown) > 200 {
			shown = strings.ToValidUTF8(shown[:200], "") + "…"
		}
		return Source{}, &Error{
			Op: "open", Key: fmt.Sprintf("%q", shown), Kind: KindInvalid, Err: fmt.Errorf(format, args...),
			Remedy: "a source is s3://BUCKET/PREFIX, file:///DIR, the path of a folder, or tar shards there, " +
				"shard-{000000..000127}.tar",
		}
	}
	if text == "" {
		return usage("empty source")
	}
	if strings.IndexByte(text, 0) >= 0 {
		return usage("a source cannot contain a zero byte")
	}
	scheme, rest, isURL := strings.Cut(text, "://")
	src, path := Source{Scheme: strings.ToLower(scheme)}, text
	switch {
	case !isURL:
		src.Scheme = "file"
	case src.Scheme == "s3":
		if src.Bucket, path, _ = strings.Cut(rest, "/"); src.Bucket == "" {
			return usage("no bucket")
		}
		if err := s3utils.CheckValidBucketName(src.Bucket); err != nil {
			return usage("bucket %q: %w", withoutSecrets(src.Bucket), err)
		}
	case src.Scheme == "file":
		host, below, ok := strings.Cut(rest, "/")
		if !ok || (host != "" && host != "localhost") {
			return usage("a file URL has three slashes and an absolute path")
		}
		var err error
		if path, err = url.PathUnescape("/" + below); err != nil || strings.IndexByte(path, 0) >= 0 {
			return usage("wrong percent-encoding")
		}
	default:
		return usage("this version does not read %s:// sources", scheme)
	}
	folder, shards, err := splitShards(path)
	if err != nil {
		return usage("%w", err)
	}
	src.Shards = shards
	if src.Scheme == "file" {
		if src.Dir, err = filepath.Abs(folder); err != nil { // "" is the current folder
			return usage("%w", err)
		}
		return src, nil
	}
	if src.Prefix = folder; folder != "" && !strings.HasSuffix(folder, "/") {
		src.Prefix += "/"
	}
	// A pattern is at least as long as its names.
	if err := s3utils.CheckValidObjectNamePrefix(src.Prefix + shards); err != nil {
		return usage("prefix: %w", err)
	}
	return src, nil
}

func splitShards(path string) (folder, shards string, err error) {
	folder = path
	if i := strings.LastIndexByte(path, '/') + 1; strings.HasSuffix(path, shardSuffix) {
		folder, shards = path[:i], path[i:]
		if _, _, err := parseBraces(shards); err != nil {
			return "", "", err
		}
	}
	if looksLikeRange.MatchString(folder) {
		return "", "", errors.New("a pattern of tar shards ends in .tar, and its braces stand after the last /")
	}
	return folder, shards, nil
}

// secretParts do not belong in a source, and its errors would repeat them: a user with a password, and the query of a
// presigned URL.
var secretParts = regexp.MustCompile(`^((?:[^:/@]*://)?)[^/@]*@`)

// withoutSecrets is a source's text for a message.
func withoutSecrets(text string) string {
	if before, _, found := strings.Cut(text, "?"); found && strings.Contains(before, "://") {
		text = before + "?…"
	}
	return secretParts.ReplaceAllString(text, "$1…@")
}

// OpenDir returns the store of a source's folder, and the source: a folder named like a shard is a tree.
func OpenDir(src Source, o StoreOptions) (*Dir, Source, error) {
	if src.Shards != "" && checkFolder(filepath.Join(src.Dir, src.Shards)) == nil {
		src = Source{Scheme: "file", Dir: filepath.Join(src.Dir, src.Shards)} // a folder named x.tar
	}
	if err := checkFolder(src.Dir); err != nil {
		return nil, Source{}, err
	}
	d, err := NewDir(src.Dir)
	if err != nil {
		return nil, Source{}, err
	}
	d.linksOutside = o.LinksOutside
	return d, src, nil
}

// CreateDir makes a source's folder.
func CreateDir(dst Source) error {
	err := os.MkdirAll(dst.Dir, 0o777)
	if err == nil {
		return nil
	}
	e := fileError("open", dst.Dir, err)
	switch {
	case errors.Is(err, syscall.ENOTDIR):
		e.Kind, e.Remedy = KindInvalid, "name a folder"
	case e.Kind == KindDenied:
		e.Remedy = "give this user permission to make the folder"
	}
	return e
}

func checkFolder(path string) error {
	fi, err := os.Stat(path)
	if err == nil && !fi.IsDir() {
		err = errors.New("it is a file")
		if fi.Mode().IsRegular() {
			err = errors.New("it is a file; the only files that can be a source are tar shards, named *.tar")
		}
		return &Error{Op: "open", Key: path, Kind: KindInvalid, Err: err, Remedy: "name a folder"}
	}
	if err != nil {
		e := fileError("open", path, err)
		if e.Kind == KindNotFound {
			e.Remedy = "check the path; a bucket is written s3://BUCKET/PREFIX"
		}
		return e
	}
	return nil
}
