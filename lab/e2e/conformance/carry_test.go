package conformance

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// checkCarry carries a folder by shoal ckpt: files of several parts and of odd names, changed, renamed and removed; a
// daemon that is killed amid an upload; another host.
func checkCarry(b *bed) (note string, err error) {
	c := &carried{bed: b, at: filepath.Join(b.dir, "carried"), dest: "s3://" + b.bucket + "/run"}
	if err := c.save("step-1", 18<<20); err != nil {
		return "", err
	}
	d, err := c.carry(c.at)
	if err != nil {
		return "", err
	}
	defer func() { d.Stop(time.Minute) }()
	if err := c.same(); err != nil {
		return "", fmt.Errorf("at first: %w", err)
	}
	other := filepath.Join(b.dir, "other")
	if err := os.Mkdir(other, 0o755); err != nil {
		return "", err
	}
	if d, err := c.carry(other); err == nil {
		d.Stop(time.Minute)
		return "", errors.New("another daemon may carry to the same prefix")
	} else if !strings.Contains(err.Error(), "is in use by host") {
		return "", err
	}
	err = errors.Join(
		os.WriteFile(filepath.Join(c.at, "step-1/0.bin"), []byte("changed"), 0o644),
		os.Rename(filepath.Join(c.at, "step-1/large.bin"), filepath.Join(c.at, "step-1/larger.bin")),
		os.Remove(filepath.Join(c.at, "step-1/1.bin")),
	)
	if err == nil {
		err = c.same()
	}
	if err != nil {
		return "", fmt.Errorf("after changes: %w", err)
	}
	// Killed when the first part of a large file may be there, or not yet.
	for i := range 3 {
		if err := c.save(fmt.Sprintf("step-%d", i+2), 40<<20); err != nil {
			return "", err
		}
		time.Sleep(time.Duration(i) * 150 * time.Millisecond)
		if err := d.Signal(syscall.SIGKILL); err != nil {
			return "", err
		}
		<-d.Done()
		again, err := c.carry(c.at)
		// s3proxy before a folder
		if _, broken := s3server.Objects(b.Context(), b.client, b.bucket, ""); err != nil && broken != nil {
			return fmt.Sprintf("the store cannot be listed any more after %d clients died: %v", i+1, broken), nil
		} else if err != nil {
			return "", fmt.Errorf("started after a kill: %w", err)
		}
		d = again
		if err := c.same(); err != nil {
			return "", fmt.Errorf("after a kill: %w", err)
		}
	}
	latest, err := b.verb("ckpt", "latest", c.dest)
	if err == nil && latest != c.dest+"/step-4\n" {
		err = fmt.Errorf("the latest is %q", latest)
	}
	if err != nil {
		return "", err
	}
	uploads, err := (minio.Core{Client: b.client}).ListMultipartUploads(b.Context(), b.bucket, "run/", "", "", "", 1000)
	if err != nil {
		note = fmt.Sprintf("unfinished uploads cannot be listed: %v", err)
	} else if len(uploads.Uploads) > 0 {
		return note, fmt.Errorf("uploads are left: %+v", uploads.Uploads)
	}
	return note, nil
}

type carried struct {
	*bed
	at, dest string
	seed     byte
}

// save saves a checkpoint with a large file of that size.
func (c *carried) save(step string, size int) error {
	c.seed++
	dir := filepath.Join(c.at, step)
	// the last one is a last name
	for i, name := range append(slices.Clone(names), "0.bin", "1.bin", "large.bin", ".metadata") {
		if slices.Contains(c.lost, name) {
			continue
		}
		data := bytes.Repeat([]byte{c.seed, byte(i)}, 500+i)
		if name == "large.bin" {
			data = bytes.Repeat(data[:8], size/8)
		}
		file := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, data, 0o644)); err != nil {
			return err
		}
	}
	return nil
}

// carry starts a daemon, and returns when it knows what is in the folder.
func (c *carried) carry(dir string) (*subproc.Proc, error) {
	cmd := exec.Command(c.shoal, "ckpt", dir, c.dest, "--delete")
	cmd.Env = c.env
	d, err := subproc.Start("shoal ckpt", cmd)
	if err != nil {
		return nil, err
	}
	for {
		select {
		case <-d.Done():
			return nil, d.Failed()
		case <-time.After(20 * time.Millisecond):
		}
		if strings.Contains(d.Tail(), "carrying "+dir) {
			return d, nil
		}
	}
}

// same waits until the bucket is as the folder.
func (c *carried) same() error {
	if _, err := c.verb("ckpt", "wait", c.at, "--timeout", "2m"); err != nil {
		return err
	}
	here := map[string]string{}
	err := filepath.WalkDir(c.at, func(p string, e fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(c.at, p) // of a path below
		if rel == ".shoal" {
			return filepath.SkipDir
		} else if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(p)
		here[rel] = fmt.Sprintf("%x of %d", sha256.Sum256(b), len(b))
		return err
	})
	if err != nil {
		return err
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) { // removals are not waited for
		there, err := c.there()
		if err != nil || maps.Equal(there, here) {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("the bucket has %v, and the folder %v", there, here)
		}
	}
}

// there is what the bucket has.
func (c *carried) there() (map[string]string, error) {
	objects, err := s3server.Objects(c.Context(), c.client, c.bucket, "run")
	if err != nil {
		return nil, err
	}
	there := map[string]string{}
	for key := range objects {
		rel := strings.TrimPrefix(key, "run/")
		if strings.HasPrefix(rel, ".shoal/") {
			continue
		}
		o, err := c.client.GetObject(c.Context(), c.bucket, key, minio.GetObjectOptions{})
		if err != nil {
			return nil, err
		}
		b, err := io.ReadAll(o)
		if minio.ToErrorResponse(err).Code == minio.NoSuchKey {
			continue // removed just now
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		there[rel] = fmt.Sprintf("%x of %d", sha256.Sum256(b), len(b))
	}
	return there, nil
}
