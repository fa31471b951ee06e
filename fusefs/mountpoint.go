package fusefs

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/fusefs/fuseio"
	"github.com/shoalfs/shoal/internal/machine"
)

const statPatience = 5 * time.Second // for a mount point's answer: if the daemon is stopped, none comes

// Check reports whether a dataset can be mounted at mountpoint, which must be an empty folder without a FUSE mount on
// it. The mount of a dead process counts as empty: [Mount] replaces it. The error names the thing, the cause and the
// remedy.
func Check(mountpoint string) error {
	_, _, err := check(mountpoint)
	return err
}

// check returns the kernel's path of the mount point, and whether there is a dead mount on it.
func check(mountpoint string) (path string, dead bool, err error) {
	done := make(chan func() (path string, dead bool, err error), 1)
	go func() {
		path, dead, err := checkNow(mountpoint)
		done <- func() (string, bool, error) { return path, dead, err }
	}()
	select {
	case answer := <-done:
		return answer()
	case <-time.After(statPatience):
		return "", false, fmt.Errorf(
			"mount point %s: no answer for %v (a filesystem mounted there hangs: end its daemon, or umount -l %s)",
			mountpoint, statPatience, mountpoint)
	}
}

func checkNow(mountpoint string) (path string, dead bool, err error) {
	var fi os.FileInfo
	if path, err = resolve(mountpoint); err == nil {
		// statfs always reaches the daemon. A stat of a dead mount may be answered for hours from attributes that the
		// kernel still trusts.
		if err := unix.Statfs(path, new(unix.Statfs_t)); died(err) {
			return path, true, nil
		}
		if fi, err = os.Stat(path); died(err) { // at this moment
			return path, true, nil
		}
	}
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "", false, fmt.Errorf("mount point %s does not exist (create it: mkdir -p %s)", mountpoint, path)
	case err != nil:
		return "", false, fmt.Errorf("mount point: %w", err)
	case !fi.IsDir():
		return "", false, fmt.Errorf("mount point %s is not a folder (give an empty folder)", mountpoint)
	}
	// Another filesystem may be mounted there, like volumes in a pod; two FUSE mounts on top of each other are always
	// a mistake.
	mi, err := findMount(path)
	if err != nil {
		return "", false, err
	}
	if mi != nil && strings.HasPrefix(mi.Type, "fuse") && mi.Type != "fusectl" {
		how := "fusermount3 -u"
		if mi.Type == "fuse.shoal" {
			how = "shoal umount"
		}
		return "", false, fmt.Errorf("mount point %s: %s is mounted there already, as %s (unmount it first: %s %s)",
			mountpoint, mi.Source, mi.Type, how, mountpoint)
	}
	d, err := os.Open(path)
	if err != nil {
		return "", false, fmt.Errorf("mount point: %w", err)
	}
	defer d.Close()
	if names, err := d.Readdirnames(1); err == nil {
		return "", false, fmt.Errorf("mount point %s is not empty: it holds %q (give an empty folder)",
			mountpoint, names[0])
	} else if err != io.EOF {
		return "", false, fmt.Errorf("mount point: %w", err)
	}
	return path, false, nil
}

// died reports whether an error says that a mount's process is gone. A ring outlives it by a moment, in which requests
// are accepted and then canceled.
func died(err error) bool {
	return errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.ECANCELED)
}

const maxLinks = 40 // in a chain of symbolic links, as in the kernel

// resolve makes a path absolute and free of symbolic links. It does not touch a mount at the path itself, which may
// be dead or hang.
func resolve(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	here := path
	for range maxLinks {
		parent, err := filepath.EvalSymlinks(filepath.Dir(here))
		if err != nil {
			return here, err
		}
		here = filepath.Join(parent, filepath.Base(here))
		mi, err := findMount(here)
		if err != nil {
			return "", err
		}
		if mi != nil {
			return here, nil // a mount point, so no symbolic link
		}
		target, linkErr := os.Readlink(here)
		switch {
		case linkErr != nil: // no link, or missing, which the caller finds out
			return here, nil //nolint:nilerr
		case filepath.IsAbs(target):
			here = filepath.Clean(target)
		default:
			here = filepath.Join(parent, target)
		}
	}
	return "", &os.PathError{Op: "resolve", Path: path, Err: unix.ELOOP}
}

// Mounts returns Shoal's mounts visible to this process, even dead ones, at each place the topmost.
func Mounts() (list []machine.Mount, err error) {
	all, err := machine.Mounts("/")
	for _, m := range all {
		if m.Type == "fuse.shoal" {
			list = append(slices.DeleteFunc(list, func(o machine.Mount) bool { return o.Point == m.Point }), m)
		}
	}
	return list, err
}

// At returns Shoal's mount that a path leads to or lies in, or nil. It asks no mount: one that hangs would keep the
// process.
func At(path string) (*machine.Mount, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	mounts, err := Mounts()
	if err != nil {
		return nil, err
	}
	in := func(path string) *machine.Mount {
		for _, m := range slices.Backward(mounts) {
			if path == m.Point || strings.HasPrefix(path, m.Point+"/") {
				return &m
			}
		}
		return nil
	}
	if m := in(path); m != nil {
		return m, nil
	}
	if path, err = resolve(path); err != nil {
		return nil, nil //nolint:nilerr // there is no such path
	}
	return in(path), nil
}

// Place returns where Shoal's mount of a device is to be seen, as where it was bound to; "" if nowhere.
func Place(device string) string {
	mounts, _ := Mounts()
	if i := slices.IndexFunc(mounts, func(m machine.Mount) bool { return m.Device == device }); i >= 0 {
		return mounts[i].Point
	}
	return ""
}

// findMount returns the topmost mount at path, or nil.
func findMount(path string) (*machine.Mount, error) {
	all, err := machine.Mounts("/")
	return machine.Top(all, path), err
}

// ErrNotMounted is wrapped by Unmount's error if there is no mount.
var ErrNotMounted = errors.New("nothing is mounted")

// Unmount removes a mount of Shoal, of any process, dead or alive. If it is in use, the error names the users; lazy
// detaches it at once, and it ends with its last user.
func Unmount(mountpoint string, lazy bool) error {
	path, err := resolve(mountpoint)
	if err != nil {
		return fmt.Errorf("unmount: %w", err)
	}
	mi, err := findMount(path)
	if err != nil {
		return fmt.Errorf("unmount: %w", err)
	}
	if mi == nil {
		return fmt.Errorf("unmount %s: %w there (`findmnt -t fuse.shoal` lists the mounts)", mountpoint, ErrNotMounted)
	}
	if !strings.HasPrefix(mi.Type, "fuse.shoal") {
		return fmt.Errorf("unmount %s: it is a mount of %s, type %s, not of shoal (use umount)",
			mountpoint, mi.Source, mi.Type)
	}
	return unmountOrTell(path, lazy, time.Second)
}

// unmountOrTell unmounts, or names the users once patience has passed: the kernel lets go of a file a moment after its
// last reader has ended, and who looks through all mounts uses each for a moment.
func unmountOrTell(path string, lazy bool, patience time.Duration) error {
	for start := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		late := time.Since(start) >= patience // before the attempt: with any patience there are two
		err := unmount(path, lazy)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EBUSY):
			return fmt.Errorf("unmount %s: %w", path, err)
		case late:
			return fmt.Errorf("unmount %s: in use by %s (end that first, or detach it with --lazy)",
				path, cmp.Or(users(path), "another process, or a mount below it"))
		}
	}
}

// unmount is umount(2), or fusermount3 without the privilege for that.
func unmount(path string, lazy bool) error {
	flags := unix.UMOUNT_NOFOLLOW
	if lazy {
		flags |= unix.MNT_DETACH
	}
	err := unix.Unmount(path, flags)
	if !errors.Is(err, unix.EPERM) || os.Geteuid() == 0 {
		return err
	}
	bin, err := fuseio.Fusermount()
	if err != nil {
		return err
	}
	args := []string{"-u"}
	if lazy {
		args = append(args, "-z")
	}
	out, err := exec.Command(bin, append(args, "--", path)...).CombinedOutput()
	if err != nil {
		if bytes.Contains(out, []byte("busy")) {
			return unix.EBUSY
		}
		return fmt.Errorf("%s: %w (run this as the mount's owner, or as root)", strings.TrimSpace(string(out)), err)
	}
	return nil
}

// HasRing reports whether a process has an io_uring. Requests end there only in its threads. While those are stopped or
// hang, who detaches its mount waits for it, cannot be killed, and holds up each sync(2) of the machine.
func HasRing(pid int) bool { return uses(fmt.Sprintf("/proc/%d", pid), "anon_inode:[io_uring]") }

const maxUsers = 5 // that an error names

// users names processes with open files or working directories in the mount. It reads only links of /proc, never the
// mount. Only root sees other users' processes.
func users(path string) string { return processes(func(proc string) bool { return uses(proc, path) }) }

// Copies names processes of other mount namespaces that have the mount of a device: a new namespace begins with copies
// of all mounts.
func Copies(device string) string {
	return processes(func(proc string) bool {
		mounts, _ := os.ReadFile(proc + "/mountinfo")
		return bytes.Contains(mounts, []byte(" "+device+" "))
	})
}

func processes(are func(proc string) bool) string {
	procs, _ := filepath.Glob("/proc/[0-9]*")
	var found []string
	for _, proc := range procs {
		if are(proc) {
			comm, _ := os.ReadFile(proc + "/comm")
			found = append(found, fmt.Sprintf("%s (pid %s)", strings.TrimSpace(string(comm)), filepath.Base(proc)))
		}
	}
	if len(found) > maxUsers {
		found = append(found[:maxUsers], "others")
	}
	return strings.Join(found, ", ")
}

func uses(proc, path string) bool {
	links, _ := filepath.Glob(proc + "/fd/*")
	for _, link := range append(links, proc+"/cwd", proc+"/root", proc+"/exe") {
		if target, err := os.Readlink(link); err == nil && (target == path || strings.HasPrefix(target, path+"/")) {
			return true
		}
	}
	maps, _ := os.ReadFile(proc + "/maps")
	return bytes.Contains(maps, []byte(" "+path+"/"))
}
