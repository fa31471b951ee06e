package s3server

import (
	"bytes"
	"context"
	"crypto/md5" //nolint:gosec // S3's ETag of a plain PUT is the MD5 of the body; nothing is secured by it.
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"
)

// uploadWorkers is how many PUTs are in flight. The server and the client share the cores, so more
// only queue.
const uploadWorkers = 16

// PutOptions returns options for one plain PUT. Without DisableContentSha256 minio-go sends the body
// as signed chunks: versitygw then stores "aws-chunked" as the object's Content-Encoding, and the
// final chunk of an empty object, sent beside Content-Length: 0, puts the connection out of step.
func PutOptions() minio.PutObjectOptions {
	return minio.PutObjectOptions{DisableMultipart: true, DisableContentSha256: true}
}

// MakeBucket makes a bucket if it is missing.
func MakeBucket(ctx context.Context, c *minio.Client, bucket string) error {
	if ok, err := c.BucketExists(ctx, bucket); ok || err != nil {
		return err
	}
	return c.MakeBucket(ctx, bucket, minio.MakeBucketOptions{Region: Region})
}

// Uploaded says what [Server.Upload] did.
type Uploaded struct {
	Files   int   // files in the folder
	Sent    int   // of these, how many were sent because the server lacked them
	Bytes   int64 // size of all files
	Deleted int   // objects under the prefix that had no file and were removed
}

// Upload makes bucket/prefix on the server equal to the regular files under dir: it sends, in
// parallel, each file that is missing there or has another content (the ETag of a plain PUT is its
// MD5), and removes what has no file. bucket is made if it is missing. progress, if not nil, is
// called from several goroutines after each file.
func (s *Server) Upload(ctx context.Context, dir, bucket, prefix string, progress func(done, total int)) (Uploaded, error) {
	fail := func(err error) (Uploaded, error) {
		return Uploaded{}, fmt.Errorf("upload %s to %s/%s: %w", dir, bucket, prefix, err)
	}
	c, err := Client(s.URL, uploadWorkers)
	if err != nil {
		return fail(err)
	}
	if err := MakeBucket(ctx, c, bucket); err != nil {
		return fail(err)
	}

	files, err := filesBelow(dir, prefix)
	if err != nil {
		return fail(err)
	}
	have, err := Objects(ctx, c, bucket, prefix)
	if err != nil {
		return fail(err)
	}
	up := Uploaded{Files: len(files)}
	var sent, done, total atomic.Int64
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(uploadWorkers)
	for _, f := range files {
		old := strings.Trim(have[f.key].ETag, `"`)
		delete(have, f.key)
		g.Go(func() error {
			if err := gctx.Err(); err != nil {
				return err
			}
			b, err := os.ReadFile(f.path)
			if err != nil {
				return err
			}
			total.Add(int64(len(b)))
			sum := md5.Sum(b) //nolint:gosec // see the import
			if old != hex.EncodeToString(sum[:]) {
				if _, err := c.PutObject(gctx, bucket, f.key, bytes.NewReader(b), int64(len(b)), PutOptions()); err != nil {
					return fmt.Errorf("put %s: %w", f.key, err)
				}
				sent.Add(1)
			}
			if n := done.Add(1); progress != nil {
				progress(int(n), len(files))
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return fail(err)
	}
	for key := range have {
		if err := c.RemoveObject(ctx, bucket, key, minio.RemoveObjectOptions{}); err != nil {
			return fail(err)
		}
		up.Deleted++
	}
	up.Sent, up.Bytes = int(sent.Load()), total.Load()
	return up, nil
}

type file struct{ path, key string }

// filesBelow lists the regular files below dir, but those whose names begin with a dot, with their keys.
func filesBelow(dir, prefix string) (files []file, err error) {
	err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || d.Name()[0] == '.' {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		files = append(files, file{p, path.Join(prefix, filepath.ToSlash(rel))})
		return err
	})
	return files, err
}

// Objects lists those under prefix/, by key.
func Objects(ctx context.Context, c *minio.Client, bucket, prefix string) (map[string]minio.ObjectInfo, error) {
	have := map[string]minio.ObjectInfo{}
	if prefix != "" {
		prefix += "/"
	}
	for o := range c.ListObjects(ctx, bucket, minio.ListObjectsOptions{Prefix: prefix, Recursive: true}) {
		if o.Err != nil {
			return nil, o.Err
		}
		have[o.Key] = o
	}
	return have, nil
}
