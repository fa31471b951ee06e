package s3server

import (
	"context"
	"crypto/md5" //nolint:gosec // S3's ETag of a plain PUT is the MD5 of the body; nothing is secured by it.
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Folder is one folder of a [Tiny] tree.
type Folder struct {
	Name  string
	Files int // called 0000000.jpg and so on
}

// Tiny is a tree of very many files of very few contents.
type Tiny struct {
	Folders []Folder
	Size    int // bytes a file
}

// Folders returns n folders of files files each, called c0000 and so on.
func Folders(n, files int) []Folder {
	f := make([]Folder, n)
	for i := range f {
		f[i] = Folder{fmt.Sprintf("c%04d", i), files}
	}
	return f
}

// linksAFile is how many names one inode is given; ext4 ends at 65,000.
const linksAFile = 60_000

// LayTiny makes the tree below dir, which it makes too. The files are hard links to one inode for each
// 60,000 of them: a link costs 2 to 4 µs and no space but its name's, where a file costs 40 µs and
// 4 KiB (ext4, one core), which is what makes a million, or ten, bearable.
func LayTiny(ctx context.Context, dir string, t Tiny) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	type source struct {
		path string
		left int
	}
	g, ctx := errgroup.WithContext(ctx)
	workers := runtime.GOMAXPROCS(0)
	next := make(chan Folder)
	for w := range workers {
		g.Go(func() error {
			var src source
			defer func() { _ = os.Remove(src.path) }()
			for made := 0; ; {
				var f Folder
				var ok bool
				select {
				case <-ctx.Done():
					return ctx.Err()
				case f, ok = <-next:
				}
				if !ok {
					return nil
				}
				folder := filepath.Join(dir, f.Name)
				if err := os.MkdirAll(folder, 0o755); err != nil {
					return err
				}
				for i := range f.Files {
					if src.left == 0 {
						_ = os.Remove(src.path)
						src = source{filepath.Join(dir, fmt.Sprintf(".source-%d-%d", w, made)), linksAFile}
						made++
						if err := writeTiny(src.path, t.Size, byte(w+made)); err != nil {
							return err
						}
					}
					src.left--
					if err := os.Link(src.path, fmt.Sprintf("%s/%07d.jpg", folder, i)); err != nil {
						return err
					}
					if i%4096 == 0 && ctx.Err() != nil {
						return ctx.Err()
					}
				}
			}
		})
	}
	g.Go(func() error {
		defer close(next)
		for _, f := range t.Folders {
			select {
			case next <- f:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	})
	return g.Wait()
}

// etagAttribute is where versitygw keeps an object's ETag.
const etagAttribute = "user.etag"

func writeTiny(path string, size int, fill byte) error {
	content := make([]byte, size)
	for i := range content {
		content[i] = fill + byte(i)
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		return err
	}
	sum := md5.Sum(content) //nolint:gosec // see the import
	err := unix.Setxattr(path, etagAttribute, []byte(hex.EncodeToString(sum[:])), 0)
	if errors.Is(err, unix.ENOTSUP) {
		return nil // nobody but the server needs it; Lay looks
	}
	return err
}

// Lay puts a tree under bucket/prefix without asking the server: 1,000,000 objects in seconds, where
// PUTs take 10 minutes. bucket is made if it is missing. The objects carry the ETags that a PUT would
// have given them.
func (s *Server) Lay(ctx context.Context, bucket, prefix string, t Tiny) error {
	fail := func(err error) error { return fmt.Errorf("lay %s/%s: %w", bucket, prefix, err) }
	if s.side {
		return fail(errors.New("the file system of the server's folder has no extended attributes; give it another folder"))
	}
	c, err := Client(s.URL, 1)
	if err != nil {
		return fail(err)
	}
	if ok, err := c.BucketExists(ctx, bucket); err != nil {
		return fail(err)
	} else if !ok {
		if err := c.MakeBucket(ctx, bucket, minio.MakeBucketOptions{Region: Region}); err != nil {
			return fail(err)
		}
	}
	if err := LayTiny(ctx, filepath.Join(s.data, bucket, filepath.FromSlash(prefix)), t); err != nil {
		return fail(err)
	}
	return nil
}
