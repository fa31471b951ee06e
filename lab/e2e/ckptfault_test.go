package e2e

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/cputime"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// While the upload of a file's last generation cannot be aborted, the next one waits, and not in a loop.
func TestCkptAbortFails(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	p, env := far(t, proxy.Options{
		Faults: []proxy.Fault{{Kind: proxy.Slow, Op: proxy.OpPut, Key: "a.bin", For: time.Second}}})
	d := carry(t, env, dir, "s3://"+name+"/run")
	at := filepath.Join(dir, "a.bin")
	write(t, at, make([]byte, 9<<20))
	within(t, patience, "its parts are sent", func() bool { return p.Stats().Faults["slow"] == 2 })
	if err := p.Set(proxy.Options{
		Faults: []proxy.Fault{{Kind: proxy.Unavailable, Op: proxy.OpOther, Key: "a.bin"}}}); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(at, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	within(t, patience, "an abort fails", func() bool { return p.Stats().Faults["503"] > 0 })
	before, err := cputime.Process(d.cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write([]byte("a")); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	within(t, patience, "the abort has given up", func() bool {
		return strings.Contains(d.log(), "cannot abort an upload")
	})
	if after, err := cputime.Process(d.cmd.Process.Pid); err != nil || after-before > 1 {
		t.Errorf("it took %.1f s of CPU to wait, %v", after-before, err)
	}
	if err := p.Set(proxy.Options{}); err != nil {
		t.Fatal(err)
	}
	mustShoal(t, env, "ckpt", "wait", at, "--timeout", "90s")
	sameFiles(t, published(t, name, "run"), local(t, dir))
}

// Somebody removes the daemon's folder: it comes back, and so does the journal with the next file.
func TestCkptHomeRemoved(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	p, env := far(t, proxy.Options{})
	d := carry(t, env, dir, "s3://"+name+"/run")
	write(t, filepath.Join(dir, "a"), []byte("a"))
	mustShoal(t, env, "ckpt", "wait", dir, "--timeout", "60s")
	if err := os.RemoveAll(filepath.Join(dir, ".shoal")); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "b"), []byte("b"))
	within(t, patience, "the daemon answers again", func() bool {
		_, _, code := shoal(t, env, "ckpt", "ls", dir)
		return code == 0
	})
	mustShoal(t, env, "ckpt", "wait", dir, "--timeout", "60s")
	d.signal(t, syscall.SIGKILL)
	<-d.exited
	before := p.Stats()
	carry(t, env, dir, "s3://"+name+"/run")
	mustShoal(t, env, "ckpt", "wait", dir, "--timeout", "60s")
	if puts := p.Stats().Sub(before).Puts; puts > 2 { // the lock's
		t.Errorf("%d PUTs: the journal is lost", puts)
	}
	sameFiles(t, published(t, name, "run"), map[string]string{"a": "a", "b": "b"})
}

// A trainer of another user than the daemon's asks it, also where an older release made the daemon's folder. Others get
// an error that says so.
func TestCkptOtherUser(t *testing.T) {
	dir := t.TempDir()
	home := filepath.Join(dir, ".shoal")
	if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o711), os.Mkdir(home, 0o700)); err != nil {
		t.Fatal(err)
	}
	name := newBucket(t, "")
	_, env := far(t, proxy.Options{})
	carry(t, env, dir, "s3://"+name+"/run")
	write(t, filepath.Join(dir, "a"), []byte("a"))
	if out, err := asNobody(t, "ckpt", "wait", dir, "--timeout", "60s"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if fi, err := os.Stat(filepath.Join(home, "journal")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the journal: %v, %v", fi.Mode(), err)
	}
	for at, mode := range map[string]os.FileMode{home: 0o700, filepath.Join(home, "ckpt.sock"): 0o600} {
		before, err := os.Stat(at)
		if err == nil {
			err = os.Chmod(at, mode)
		}
		if out, code := asNobody(t, "ckpt", "wait", dir); err != nil || code == nil ||
			!strings.Contains(out, "permission denied") || strings.Contains(out, "no shoal ckpt") {
			t.Errorf("%v, %v: %s", err, code, out)
		}
		if err := os.Chmod(at, before.Mode()); err != nil {
			t.Fatal(err)
		}
	}
}

// An object whose answer a crash has cut off is not forgotten: it goes if its file went before the next start. What
// somebody else has stored there meanwhile stays.
func TestCkptAnswerLost(t *testing.T) {
	for _, c := range []struct {
		name    string
		size    int
		fault   proxy.Fault
		flags   []string
		another bool
	}{
		{"small", 10, proxy.Fault{Op: proxy.OpPut}, []string{"--delete"}, false},
		// the first begins the upload
		{"large", 9 << 20, proxy.Fault{Op: proxy.OpOther, After: 1}, []string{"--delete"}, false},
		{"withdrawn", 10, proxy.Fault{Op: proxy.OpPut}, nil, false},
		{"another", 10, proxy.Fault{Op: proxy.OpPut}, []string{"--delete"}, true},
		{"another-withdrawn", 10, proxy.Fault{Op: proxy.OpPut}, nil, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			name := newBucket(t, "")
			c.fault.Kind, c.fault.Key, c.fault.For = proxy.Slow, "a.bin", 5*time.Minute
			p, env := far(t, proxy.Options{Faults: []proxy.Fault{c.fault}})
			d := carry(t, env, dir, "s3://"+name+"/run", c.flags...)
			write(t, filepath.Join(dir, "step/a.bin"), make([]byte, c.size))
			write(t, filepath.Join(dir, "step/.metadata"), []byte("m"))
			within(t, patience, "it is visible", func() bool { return len(published(t, name, "run")) == 1 })
			d.signal(t, syscall.SIGKILL)
			<-d.exited
			if err := errors.Join(p.Set(proxy.Options{}), os.RemoveAll(filepath.Join(dir, "step"))); err != nil {
				t.Fatal(err)
			}
			if c.another {
				if _, err := store(t).PutObject(t.Context(), name, "run/step/a.bin", strings.NewReader("theirs"), 6,
					minio.PutObjectOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			d = carry(t, env, dir, "s3://"+name+"/run", c.flags...)
			if c.another {
				within(t, patience, "it is said", func() bool { return strings.Contains(d.log(), "it stays") })
				sameFiles(t, published(t, name, "run"), map[string]string{"step/a.bin": "theirs"})
				return
			}
			within(t, patience, "it has gone", func() bool { return len(published(t, name, "run")) == 0 })
			if left := unfinished(t, name); len(left) > 0 {
				t.Errorf("uploads are left: %v", left)
			}
		})
	}
}

// An upload that the store begins only after the daemon that asked for it was killed, and another one started, is found
// and aborted.
func TestCkptLateUpload(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	p, env := far(t, proxy.Options{
		Faults: []proxy.Fault{{Kind: proxy.Slow, Op: proxy.OpOther, Key: "a.bin", For: 5 * time.Minute}}})
	d := carry(t, env, dir, "s3://"+name+"/run")
	write(t, filepath.Join(dir, "a.bin"), make([]byte, 9<<20))
	within(t, patience, "an upload has begun", func() bool { return len(unfinished(t, name)) == 1 })
	d.signal(t, syscall.SIGKILL)
	<-d.exited
	core := minio.Core{Client: store(t)}
	uploads, err := core.ListMultipartUploads(t.Context(), name, "", "", "", "", 10)
	if err == nil {
		err = core.AbortMultipartUpload(t.Context(), name, "run/a.bin", uploads.Uploads[0].UploadID)
	}
	if err = errors.Join(err, p.Set(proxy.Options{})); err != nil {
		t.Fatal(err)
	}
	carry(t, env, dir, "s3://"+name+"/run")
	if _, err := core.NewMultipartUpload(t.Context(), name, "run/a.bin", minio.PutObjectOptions{}); err != nil {
		t.Fatal(err)
	}
	mustShoal(t, env, "ckpt", "wait", dir, "--timeout", "60s")
	within(t, patience, "no upload is left", func() bool { return len(unfinished(t, name)) == 0 })
	sameFiles(t, published(t, name, "run"), local(t, dir))
}

// A file that goes while the store still owes the answer to its publication goes in the bucket, too, before the end.
func TestCkptGoneAtTheEnd(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	p, env := far(t, proxy.Options{
		Faults: []proxy.Fault{{Kind: proxy.Slow, Op: proxy.OpPut, Key: "a.bin", For: 3 * time.Second}}})
	d := carry(t, env, dir, "s3://"+name+"/run", "--delete")
	write(t, filepath.Join(dir, "a.bin"), []byte("a"))
	within(t, patience, "it is visible", func() bool { return len(published(t, name, "run")) == 1 })
	if err := errors.Join(os.Remove(filepath.Join(dir, "a.bin")), p.Set(proxy.Options{})); err != nil {
		t.Fatal(err)
	}
	within(t, patience, "the daemon knows", func() bool {
		return strings.Contains(mustShoal(t, env, "ckpt", "ls", dir), "nothing is behind")
	})
	d.signal(t, syscall.SIGTERM)
	<-d.exited
	sameFiles(t, published(t, name, "run"), nil)
}

// The second signal ends the daemon at once, also while the store answers nothing, and what was not published is named.
func TestCkptSecondSignal(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	p, env := far(t, proxy.Options{
		Faults: []proxy.Fault{{Kind: proxy.Slow, Op: proxy.OpPut, Key: "a.bin", For: 5 * time.Minute}}})
	d := carry(t, env, dir, "s3://"+name+"/run")
	write(t, filepath.Join(dir, "a.bin"), []byte("a"))
	write(t, filepath.Join(dir, "latest"), []byte("a"))
	within(t, patience, "it is under way", func() bool { return p.Stats().Faults["slow"] == 1 })
	d.signal(t, syscall.SIGTERM)
	d.says(t, "ending: publishing what was closed")
	signalled, late := time.Now(), lag()
	d.signal(t, syscall.SIGTERM)
	<-d.exited
	// At once, and before the ten seconds after which it ends in any case; later on a machine that wakes it late.
	if took := time.Since(signalled); took > 8*time.Second+6*late() ||
		!strings.Contains(d.log(), "2 files and 0 removals did not reach") ||
		!strings.Contains(d.log(), "(a.bin, latest)") {
		t.Errorf("it ended after %v", took)
	}
}

// Whoever asks a daemon that is stopped hears so in time, as of any other.
func TestCkptStopped(t *testing.T) {
	dir := t.TempDir()
	_, env := far(t, proxy.Options{})
	d := carry(t, env, dir, "s3://"+newBucket(t, "")+"/run")
	d.signal(t, syscall.SIGSTOP)
	defer d.signal(t, syscall.SIGCONT)
	for _, args := range [][]string{{"ckpt", "ls", dir}, {"ckpt", "wait", dir, "--timeout", "1s"}} {
		if _, errs, code := shoal(t, env, args...); code != 1 || !strings.Contains(errs, "has been silent") {
			t.Errorf("%v: exit %d, %s", args, code, errs)
		}
	}
}
