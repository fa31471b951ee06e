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

// LayTiny makes the tree below dir, which it makes too. The files of a folder are hard links to its first one, or to one for
// each 60,000 of them: a link costs 2 to 4 µs and no space but its name's, where a file costs 40 µs and
// 4 KiB (ext4, one core), which is what makes a million, or ten, bearable.
func LayTiny(ctx context.Context, dir string, t Tiny) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for n, f := range t.Folders {
		g.Go(func() error {
			folder, first := filepath.Join(dir, f.Name), ""
			if err := os.MkdirAll(folder, 0o755); err != nil {
				return err
			}
			for i := range f.Files {
				path := fmt.Sprintf("%s/%07d.jpg", folder, i)
				if i%linksAFile == 0 {
					first = path
					if err := writeTiny(path, t.Size, byte(n+i/linksAFile)); err != nil {
						return err
					}
				} else if err := os.Link(first, path); err != nil {
					return err
				}
				if i%4096 == 0 && ctx.Err() != nil {
					return ctx.Err()
				}
			}
			return nil
		})
	}
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
	if s.side {
		return fmt.Errorf("lay %s/%s: the file system of the server's folder has no extended attributes; give it another folder", bucket, prefix)
	}
	c, err := Client(s.URL, 1)
	if err == nil {
		err = MakeBucket(ctx, c, bucket)
	}
	if err == nil {
		err = LayTiny(ctx, filepath.Join(s.data, bucket, filepath.FromSlash(prefix)), t)
	}
	if err != nil {
		return fmt.Errorf("lay %s/%s: %w", bucket, prefix, err)
	}
	return nil
}
