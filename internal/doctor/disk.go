package doctor

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	humanize "github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"
)

func (o *Options) diskChecks() []Check {
	if o.CacheDir == "" {
		return nil
	}
	m, dir := o.machine, o.CacheDir
	return []Check{
		{Area: "disk", Name: "filesystem", Run: func(context.Context) Result { return filesystem(m, dir) }},
		{Area: "disk", Name: "space", Run: func(context.Context) Result { return space(m, dir, o.CacheSize) }},
		{Area: "disk", Name: "speed", Takes: 2 * o.window(), Run: func(ctx context.Context) Result { return diskSpeed(ctx, dir, o.window()) }},
	}
}

// Magic numbers of file systems, from statfs(2), and their meaning for a cache.
var filesystems = map[int64]struct{ name, meaning, remedy string }{
	unix.EXT4_SUPER_MAGIC:      {"ext4", "", ""},
	unix.XFS_SUPER_MAGIC:       {"xfs", "", ""},
	unix.BTRFS_SUPER_MAGIC:     {"btrfs", "", ""},
	unix.F2FS_SUPER_MAGIC:      {"f2fs", "", ""},
	0x2fc12fc1:                 {"zfs", "", ""},
	unix.TMPFS_MAGIC:           {"tmpfs", "the cache is in memory: it counts against the machine's (and the pod's) memory and is lost at the next start", "--cache-dir on a local disk"},
	unix.RAMFS_MAGIC:           {"ramfs", "the cache is in memory, without a limit", "--cache-dir on a local disk"},
	unix.OVERLAYFS_SUPER_MAGIC: {"overlayfs", "the cache is in the container's own layer: slower, counted as ephemeral storage, and lost with the container", "a volume for --cache-dir (emptyDir or hostPath; docker run -v /nvme:/cache)"},
	unix.NFS_SUPER_MAGIC:       {"NFS", "the cache is across the network, where the object store is already, and flock may not hold on it", "--cache-dir on a local disk"},
	unix.SMB_SUPER_MAGIC:       {"SMB", "the cache is across the network, where the object store is already", "--cache-dir on a local disk"},
	unix.CIFS_SUPER_MAGIC:      {"CIFS", "the cache is across the network, where the object store is already", "--cache-dir on a local disk"},
	unix.SMB2_SUPER_MAGIC:      {"SMB2", "the cache is across the network, where the object store is already", "--cache-dir on a local disk"},
	unix.CEPH_SUPER_MAGIC:      {"CephFS", "the cache is across the network, where the object store is already", "--cache-dir on a local disk"},
	0x0bd00bd0:                 {"Lustre", "the cache is across the network, where the object store is already", "--cache-dir on a local disk"},
	unix.FUSE_SUPER_MAGIC:      {"FUSE", "the cache is on another user-space file system, and each read passes through both", "--cache-dir on a local disk"},
	unix.V9FS_MAGIC:            {"9p", "the cache is on the host of this virtual machine, request by request", "--cache-dir on a disk of the virtual machine's own"},
	unix.ECRYPTFS_SUPER_MAGIC:  {"eCryptfs", "each read is decrypted by another file system", "--cache-dir outside the encrypted home"},
}

func filesystem(m *Machine, dir string) Result {
	at, err := existing(dir)
	if err != nil {
		return ok("%s: %s", dir, cause(err)).because(Fail, "there can be no cache", "give another --cache-dir")
	}
	s, err := m.Statfs(at)
	if err != nil {
		return skipped("statfs %s: %s", at, cause(err))
	}
	fs, known := filesystems[int64(uint32(s.Type))]
	source := ""
	if all, err := m.mounts(); err == nil && m.Root == "" {
		if e := on(all, at); e.Source != "" {
			source = " of " + e.Source + " on " + e.Point
		}
	}
	switch {
	case !known:
		return ok("type %#x%s", s.Type, source).because(OK, "this file system is not known to be good or bad for a cache", "")
	case fs.meaning == "":
		return ok("%s%s", fs.name, source)
	}
	return ok("%s%s", fs.name, source).because(Warn, fs.meaning, fs.remedy)
}

// minSpace is the least space that is worth a cache.
const minSpace = 256 << 20

func space(m *Machine, dir string, want int64) Result {
	at, err := existing(dir)
	if err != nil {
		return skipped("%s", cause(err))
	}
	s, err := m.Statfs(at)
	if err != nil {
		return skipped("statfs %s: %s", at, cause(err))
	}
	free, held := int64(s.Bavail)*s.Bsize, folderSize(filepath.Join(dir, "segments"))
	r := ok("%s free, %s of --cache-size %s in use", humanize.IBytes(uint64(max(free, 0))), humanize.IBytes(uint64(held)), humanize.IBytes(uint64(want))).with("free_bytes", float64(free))
	if s.Files > 0 {
		r.Measured += fmt.Sprintf(", %s inodes free", humanize.Comma(int64(s.Ffree)))
	}
	fits := fmt.Sprintf("--cache-size %dMiB", max((free+held)*9/10>>20, 1))
	switch {
	case free+held < minSpace:
		return r.because(Fail, "almost nothing can be kept: each epoch fetches everything again", "free space, or give another --cache-dir")
	case s.Files > 0 && s.Ffree < 1000:
		return r.because(Fail, "no more files can be created", "remove files, or give another --cache-dir (df -i "+at+")")
	case free+held < want:
		return r.because(Warn, "the disk fills up before the cache does; then Shoal goes on without it", fits)
	}
	return r
}

// folderSize returns the bytes of the files below a folder, 0 if it does not exist.
func folderSize(dir string) (n int64) {
	_ = filepath.WalkDir(dir, func(_ string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if fi, err := d.Info(); err == nil {
				n += fi.Size()
			}
		}
		return nil
	})
	return n
}

const (
	diskBlock  = 1 << 20
	diskFile   = 256 << 20 // the most bytes to write
	randomRead = 128 << 10 // a typical image
	// slowDisk and slowRandom are the rates of a 10 Gbit link and of eight accelerators of the headline's
	// kind.
	slowDisk   = 400e6
	slowRandom = 100e6
	slowSync   = 50 * time.Millisecond
)

// diskSpeed writes an unnamed file and reads it. window bounds each of the two.
func diskSpeed(ctx context.Context, dir string, window time.Duration) Result {
	at, err := existing(dir)
	if err != nil {
		return skipped("%s", cause(err))
	}
	f, direct, err := scratch(at)
	if err != nil {
		return ok("cannot create a file in %s: %s", at, cause(err)).because(Fail, "there can be no cache", "chown or chmod the folder, or give another --cache-dir")
	}
	defer f.Close()
	block := aligned(diskBlock)
	for i := range block {
		block[i] = byte(rand.Uint32()) // compressible data would be written faster
	}
	began, written := time.Now(), int64(0)
	// At least one, here and in readRate: on a busy machine the window may be over before the first.
	for written == 0 || written < diskFile && time.Since(began) < window && ctx.Err() == nil {
		if _, err := f.WriteAt(block, written); err != nil {
			if written == 0 {
				return ok("writing: %s", cause(err)).because(Fail, "nothing can be kept on this disk", "dmesg | tail, df -h "+at)
			}
			break
		}
		written += diskBlock
	}
	if err := f.Sync(); err != nil {
		return ok("fsync: %s", cause(err)).because(Fail, "nothing can be kept on this disk", "dmesg | tail")
	}
	write := float64(written) / time.Since(began).Seconds()
	var syncs []time.Duration
	for began := time.Now(); len(syncs) < 10 && time.Since(began) < window/2; {
		if _, err := f.WriteAt(block[:4096], 0); err != nil {
			break
		}
		t := time.Now()
		if f.Sync() != nil {
			break
		}
		syncs = append(syncs, time.Since(t))
	}
	if !direct { // reads must not come from the page cache
		_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	}
	sequential := readRate(ctx, f, written, diskBlock, 1, window/4, false)
	random := readRate(ctx, f, written, randomRead, 8, window/2, true)
	slices.Sort(syncs)
	r := ok("writes %s/s, reads %s/s in sequence, %s/s at random (128 KiB, 8 at a time: %s/s)", rate(write), rate(sequential.bytes), rate(random.bytes), count(random.reads)).
		with("write_bytes_per_second", write).with("sequential_read_bytes_per_second", sequential.bytes).
		with("random_read_bytes_per_second", random.bytes).with("random_reads_per_second", random.reads)
	var sync time.Duration
	if len(syncs) > 0 {
		sync = syncs[len(syncs)/2]
		r.Measured += fmt.Sprintf(", fsync %s", short(sync))
		r = r.with("fsync_seconds", sync.Seconds())
	}
	if !direct {
		r.Measured += ", through the page cache (no O_DIRECT here)"
	}
	another := "--cache-dir on a local NVMe disk"
	switch {
	case random.bytes < slowRandom:
		return r.because(Warn, fmt.Sprintf("kept samples are read at random: at most %s images of 128 KiB a second, however fast the store is", count(random.reads)), another)
	case write < slowDisk/4:
		return r.because(Warn, "a cold epoch is kept no faster than the disk writes; data beyond that is fetched again", another)
	case sync > slowSync:
		return r.because(Warn, "a slow fsync delays the sealing of segments (every 256 MiB), not readers", another+", or a volume with a write cache")
	}
	return r
}

// scratch creates an unnamed file, so that nothing can stay behind.
func scratch(dir string) (f *os.File, direct bool, err error) {
	f, err = os.CreateTemp(dir, ".shoal-doctor-*")
	if err != nil {
		return nil, false, err
	}
	name := f.Name()
	defer func() { _ = os.Remove(name) }()
	// Set O_DIRECT on the open descriptor; tmpfs and others refuse.
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETFL, flags|unix.O_DIRECT)
	}
	return f, err == nil, nil
}

// aligned returns n bytes that are aligned for O_DIRECT.
func aligned(n int) []byte {
	const page = 4096
	b := make([]byte, n+page)
	at := int(-uintptr(unsafe.Pointer(&b[0])) & (page - 1))
	return b[at : at+n : at+n]
}

type rates struct{ bytes, reads float64 }

// readRate reads blocks of a file of n bytes with several workers, until window is over.
func readRate(ctx context.Context, f *os.File, n int64, block, workers int, window time.Duration, random bool) rates {
	blocks := n / int64(block)
	if blocks == 0 {
		return rates{}
	}
	var next, done atomic.Int64
	var wg sync.WaitGroup
	began := time.Now()
	for w := range workers {
		wg.Go(func() {
			p := aligned(block)
			rng := rand.New(rand.NewPCG(uint64(w), 1))
			for first := true; first || time.Since(began) < window && ctx.Err() == nil; first = false {
				at := next.Add(1) - 1
				if random {
					at = rng.Int64N(blocks)
				} else if at >= blocks {
					return
				}
				if _, err := f.ReadAt(p, at*int64(block)); err != nil {
					return
				}
				done.Add(1)
			}
		})
	}
	wg.Wait()
	reads := float64(done.Load()) / max(time.Since(began).Seconds(), 1e-6)
	return rates{reads * float64(block), reads}
}

func (o *Options) cacheChecks() []Check {
	if o.CacheDir == "" {
		return []Check{{Area: "cache", Name: "directory", Run: func(context.Context) Result {
			return skipped("each source has a folder of its own under the user's cache folder: give --cache-dir or a SOURCE")
		}}}
	}
	m, dir := o.machine, o.CacheDir
	return []Check{
		{Area: "cache", Name: "directory", Run: func(context.Context) Result { return cacheDirectory(m, dir) }},
		{Area: "cache", Name: "daemon", Run: func(context.Context) Result { return cacheDaemon(m, dir) }},
		{Area: "cache", Name: "contents", Takes: time.Second, Run: func(context.Context) Result { return cacheContents(dir) }},
	}
}

func cacheDirectory(m *Machine, dir string) Result {
	fi, err := os.Stat(dir)
	if errors.Is(err, os.ErrNotExist) {
		parent, err := existing(dir)
		if err == nil {
			err = unix.Access(parent, unix.W_OK)
		}
		if err != nil {
			return ok("%s does not exist, and cannot be created: %s", dir, cause(err)).because(Fail, "there can be no cache", "sudo install -d -o $(id -un) "+dir)
		}
		return ok("%s does not exist yet; it will be created", dir)
	}
	if err != nil {
		return ok("%s: %s", dir, cause(err)).because(Fail, "there can be no cache", "give another --cache-dir")
	}
	if !fi.IsDir() {
		return ok("%s is a file", dir).because(Fail, "there can be no cache", "give another --cache-dir")
	}
	st := new(unix.Stat_t)
	if err := unix.Stat(dir, st); err != nil {
		return skipped("%s", cause(err))
	}
	r := ok("%s, owner %d, mode %#o", dir, st.Uid, fi.Mode().Perm())
	switch {
	case unix.Access(dir, unix.W_OK|unix.X_OK) != nil:
		return r.because(Fail, "this user cannot write to it", fmt.Sprintf("sudo chown -R %d %s, or give another --cache-dir", m.UID(), dir))
	case fi.Mode().Perm()&0o022 != 0:
		return r.because(Warn, "other users can change the data that a trainer reads", "chmod 700 "+dir)
	case int(st.Uid) != m.UID():
		return r.because(Warn, fmt.Sprintf("it belongs to another user (%d), who may not be able to remove files that are created now", m.UID()), fmt.Sprintf("chown -R %d %s", st.Uid, dir))
	}
	return r
}

// cacheDaemon looks for the owner's lock without taking it, which could stop a daemon from starting.
func cacheDaemon(m *Machine, dir string) Result {
	st := new(unix.Stat_t)
	if err := unix.Stat(filepath.Join(dir, "lock"), st); err != nil {
		return ok("no daemon has ever owned it")
	}
	text, err := m.read("/proc/locks")
	if err != nil {
		return skipped("/proc/locks cannot be read: %s", cause(err))
	}
	// 1: FLOCK  ADVISORY  WRITE 15716 fe:00:10462412 0 EOF (proc(5)); devices of some file systems are not stat's.
	pid := ""
	inode := fmt.Sprintf(":%d", st.Ino)
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) >= 6 && f[1] == "FLOCK" && strings.HasSuffix(f[5], inode) {
			pid = f[4]
		}
	}
	if pid == "" {
		return ok("no daemon owns it now")
	}
	sock := filepath.Join(dir, "shoal.sock")
	if err := m.Dial(sock); err != nil {
		return ok("pid %s owns it, but does not listen on %s: %s", pid, sock, cause(err)).because(Warn, "another mount or feed cannot share it; it may be starting, ending, or hung", "look at "+filepath.Join(dir, "shoal.log")+", or give another --cache-dir")
	}
	return ok("a daemon (pid %s) owns it, and others can attach to it", pid)
}

// cacheContents counts the files of a cache, and looks for unexpected ones. It reads no content: shoal fsck does.
func cacheContents(dir string) Result {
	var segments, foreign int
	var bytes int64
	err := filepath.WalkDir(filepath.Join(dir, "segments"), func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			return nil
		}
		fi, err := d.Info()
		if err != nil {
			return nil //nolint:nilerr // it was removed in the meantime
		}
		segments++
		bytes += fi.Size()
		if !fi.Mode().IsRegular() || unix.Access(path, unix.R_OK|unix.W_OK) != nil {
			foreign++
		}
		return nil
	})
	switch {
	case errors.Is(err, os.ErrNotExist):
		return ok("nothing is kept yet")
	case err != nil:
		return ok("%s", cause(err)).because(Fail, "the kept data cannot be read", "chown or chmod the folder")
	}
	r := ok("%s in %d segments", humanize.IBytes(uint64(bytes)), segments).with("kept_bytes", float64(bytes))
	if foreign > 0 {
		return r.because(Fail, fmt.Sprintf("this user cannot read and write %d of them", foreign), "chown -R $(id -un) "+dir)
	}
	return r.because(OK, "checksums are checked by each read, and by: shoal fsck "+dir, "")
}

func rate(bytes float64) string { return humanize.Bytes(uint64(max(bytes, 0))) }

func count(n float64) string { return humanize.Comma(int64(n + 0.5)) }

// short prints a duration with two or three digits.
func short(d time.Duration) string {
	switch {
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.2f ms", d.Seconds()*1e3)
	case d < 10*time.Second:
		return fmt.Sprintf("%.0f ms", d.Seconds()*1e3)
	}
	return d.Round(time.Second).String()
}
