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

// Uploaded says what [Server.Upload] or [Server.Fill] did.
type Uploaded struct {
	Files   int // objects that there are to be
	Sent    int // of these, how many were sent because the server lacked them
	Deleted int // objects under the prefix that are not to be there, and were removed
}

// Object is what [Server.Fill] makes of one key.
type Object struct {
	Key string
	// Content returns what it is to hold: nil if that is what it holds already.
	Content func(now minio.ObjectInfo) ([]byte, error)
}

// Upload makes bucket/prefix on the server equal to the regular files under dir, but those whose names begin with a
// dot. It sends each file that is missing there or has another content: the ETag of a plain PUT is its MD5.
func (s *Server) Upload(ctx context.Context, dir, bucket, prefix string, progress func(done, total int)) (
	Uploaded, error) {
	var files []Object
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || d.Name()[0] == '.' {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		files = append(files, Object{path.Join(prefix, filepath.ToSlash(rel)),
			func(now minio.ObjectInfo) ([]byte, error) {
				b, err := os.ReadFile(p)
				sum := md5.Sum(b) //nolint:gosec // see the import
				if err != nil || strings.Trim(now.ETag, `"`) == hex.EncodeToString(sum[:]) {
					return nil, err
				}
				return b, nil
			}})
		return err
	})
	if err != nil {
		return Uploaded{}, fmt.Errorf("upload %s: %w", dir, err)
	}
	return s.Fill(ctx, bucket, prefix, files, uploadWorkers, progress)
}

// Fill makes bucket/prefix on the server hold these objects and no others, with so many PUTs at a time. bucket is made
// if it is missing. progress, if not nil, is called from several goroutines after each object.
func (s *Server) Fill(ctx context.Context, bucket, prefix string, objects []Object, workers int,
	progress func(done, total int)) (_ Uploaded, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("upload to %s/%s: %w", bucket, prefix, err)
		}
	}()
	c, err := Client(s.URL, workers)
	if err == nil {
		err = MakeBucket(ctx, c, bucket)
	}
	if err != nil {
		return Uploaded{}, err
	}
	have, err := Objects(ctx, c, bucket, prefix)
	if err != nil {
		return Uploaded{}, err
	}
	var sent, done atomic.Int64
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(workers)
	for _, o := range objects {
		now := have[o.Key]
		delete(have, o.Key)
		g.Go(func() error {
			if err := gctx.Err(); err != nil {
				return err
			}
			b, err := o.Content(now)
			if err != nil {
				return err
			}
			if b != nil {
				if _, err := c.PutObject(gctx, bucket, o.Key, bytes.NewReader(b), int64(len(b)),
					PutOptions()); err != nil {
					return fmt.Errorf("put %s: %w", o.Key, err)
				}
				sent.Add(1)
			}
			if n := done.Add(1); progress != nil {
				progress(int(n), len(objects))
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return Uploaded{}, err
	}
	for key := range have {
		if err := c.RemoveObject(ctx, bucket, key, minio.RemoveObjectOptions{}); err != nil {
			return Uploaded{}, err
		}
	}
	return Uploaded{Files: len(objects), Sent: int(sent.Load()), Deleted: len(have)}, nil
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
