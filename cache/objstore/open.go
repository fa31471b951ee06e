package objstore

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/minio/minio-go/v7/pkg/s3utils"
)

// Source is where a dataset lies, as the user wrote it, parsed.
type Source struct {
	// Scheme is "s3" or "file".
	Scheme string
	// Bucket is the S3 bucket; empty for "file".
	Bucket string
	// Dir is the folder's absolute path; empty for "s3".
	Dir string
	// Prefix is what all keys of the source begin with, to be cut off to get the path in the
	// dataset. It is empty or ends in "/". Always empty for "file".
	Prefix string
	// Endpoint is the S3 endpoint's URL, which [Open] fills in; empty for "file".
	Endpoint string
}

// String returns the source as a user would write it.
func (s Source) String() string {
	if s.Scheme == "file" {
		return (&url.URL{Scheme: "file", Path: strings.TrimSuffix(s.Dir, "/") + "/"}).String()
	}
	return "s3://" + s.Bucket + "/" + s.Prefix
}

// Canonical returns one text for one place, for hashing and as a catalog's key: equal for two
// spellings of the same source, and different for the same bucket name at two endpoints.
func (s Source) Canonical() string {
	if s.Scheme == "file" {
		return s.String()
	}
	return s.String() + "?endpoint=" + url.QueryEscape(s.Endpoint)
}

// braces is a shard pattern as WebDataset writes it: shard-{000000..000127}.tar.
var braces = regexp.MustCompile(`\{\d+\.\.\d+\}`)

// ParseSource parses s3://BUCKET[/PREFIX], file:///DIR or a path. It looks at no file and asks no
// store. Everything after the bucket is the prefix as it is, without percent-decoding, as the AWS
// tools have it; a "/" is added to its end where there is none. A file URL is percent-decoded, a
// path is not.
func ParseSource(text string) (Source, error) {
	usage := func(format string, args ...any) (Source, error) {
		return Source{}, &Error{
			Op: "open", Key: fmt.Sprintf("%q", text), Kind: KindInvalid, Err: fmt.Errorf(format, args...),
			Remedy: "a source is s3://BUCKET/PREFIX, file:///DIR, or the path of a folder",
		}
	}
	if text == "" {
		return usage("empty source")
	}
	if strings.IndexByte(text, 0) >= 0 {
		return usage("a source cannot hold a zero byte")
	}
	if braces.MatchString(text) {
		return usage("patterns of tar shards are not read by this version")
	}
	scheme, rest, isURL := strings.Cut(text, "://")
	if !isURL {
		dir, err := filepath.Abs(text)
		if err != nil {
			return usage("%w", err)
		}
		return Source{Scheme: "file", Dir: dir}, nil
	}
	switch strings.ToLower(scheme) {
	case "s3":
		bucket, prefix, _ := strings.Cut(rest, "/")
		if bucket == "" {
			return usage("no bucket")
		}
		if err := s3utils.CheckValidBucketName(bucket); err != nil {
			return usage("bucket %q: %w", bucket, err)
		}
		if strings.HasSuffix(prefix, ".tar") {
			return usage("tar shards are not read by this version")
		}
		if prefix != "" && !strings.HasSuffix(prefix, "/") {
			prefix += "/"
		}
		if err := s3utils.CheckValidObjectNamePrefix(prefix); err != nil {
			return usage("prefix: %w", err)
		}
		return Source{Scheme: "s3", Bucket: bucket, Prefix: prefix}, nil
	case "file":
		host, path, ok := strings.Cut(rest, "/")
		if !ok || (host != "" && host != "localhost") {
			return usage("a file URL has three slashes and an absolute path")
		}
		path, err := url.PathUnescape("/" + path)
		if err != nil || strings.IndexByte(path, 0) >= 0 {
			return usage("wrong percent-encoding")
		}
		return Source{Scheme: "file", Dir: filepath.Clean(path)}, nil
	}
	return usage("this version does not read %s:// sources", scheme)
}

// Options are what [Open] needs beyond the source's text. The zero value takes all from the AWS
// environment.
type Options struct {
	// S3 configures an S3 source. Its Bucket is set from the source.
	S3 S3Config
}

// Open returns the bare store that text names, without decorators, and where the dataset lies in
// it. It reads credentials and configuration but does not contact the store; call Check for that.
func Open(ctx context.Context, text string, o Options) (Store, Source, error) {
	src, err := ParseSource(text)
	if err != nil {
		return nil, Source{}, err
	}
	if src.Scheme == "s3" {
		cfg := o.S3
		cfg.Bucket = src.Bucket
		s, err := NewS3(ctx, cfg)
		if err != nil {
			return nil, Source{}, err
		}
		src.Endpoint = s.Endpoint()
		return s, src, nil
	}
	fi, err := os.Stat(src.Dir)
	if err == nil && !fi.IsDir() {
		err = errors.New("it is a file")
		if fi.Mode().IsRegular() {
			err = errors.New("it is a file; list files and tar shards are not read by this version")
		}
		return nil, Source{}, &Error{Op: "open", Key: src.Dir, Kind: KindInvalid, Err: err, Remedy: "name a folder"}
	}
	if err != nil {
		e := fileError("open", src.Dir, err)
		if e.Kind == KindNotFound {
			e.Remedy = "check the path; a bucket is written s3://BUCKET/PREFIX"
		}
		return nil, Source{}, e
	}
	d, err := NewDir(src.Dir)
	return d, src, err
}
