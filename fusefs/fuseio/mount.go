package fuseio

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// ErrUnavailable says that this machine has no FUSE over io_uring.
var ErrUnavailable = errors.New("no FUSE over io_uring")

// Switch is the file by which an administrator turns it on, for mounts made from then on: "echo Y >" it as root.
const Switch = "/sys/module/fuse/parameters/enable_uring"

// Available reports, before anything is mounted, whether rings are possible. The error wraps ErrUnavailable and tells
// the cause.
func Available() error {
	text, err := os.ReadFile(Switch)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("%w: the kernel is older than Linux 6.14, or built without it (no %s)",
			ErrUnavailable, Switch)
	case err != nil:
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	case !strings.HasPrefix(string(text), "Y"):
		return fmt.Errorf("%w: it is switched off (as root: echo Y > %s)", ErrUnavailable, Switch)
	}
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 0, 0, 0) // no entries: EINVAL, unless it is forbidden
	switch errno {
	case 0:
		_ = unix.Close(int(fd))
	case unix.EPERM, unix.EACCES:
		return fmt.Errorf("%w: io_uring_setup: %w (allow io_uring in the container's seccomp profile, and set sysctl "+
			"kernel.io_uring_disabled=0)", ErrUnavailable, errno)
	case unix.ENOSYS:
		return fmt.Errorf(
			"%w: io_uring_setup: %w (allow io_uring in the container's seccomp profile; the kernel may lack it)",
			ErrUnavailable, errno)
	}
	return nil
}

// possibleCPUs returns for how many CPUs the kernel wants queues.
func possibleCPUs() (int, error) {
	text, err := os.ReadFile("/sys/devices/system/cpu/possible")
	if err != nil {
		return 0, err
	}
	return countCPUs(strings.TrimSpace(string(text)))
}

// countCPUs counts a list such as 0-3,8.
func countCPUs(list string) (n int, err error) {
	for part := range strings.SplitSeq(list, ",") {
		first, last, ranged := strings.Cut(part, "-")
		if !ranged {
			last = first
		}
		a, err := strconv.Atoi(first)
		b, err2 := strconv.Atoi(last)
		if err := errors.Join(err, err2); err != nil {
			return 0, err
		}
		n += b - a + 1
	}
	return n, nil
}

// maxWrite is the kernel's limit of a request.
func maxWrite() int {
	text, _ := os.ReadFile("/proc/sys/fs/fuse/max_pages_limit")
	limit, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		limit = 256 // pages, of a kernel that has no such file
	}
	return limit * os.Getpagesize()
}

// Mount mounts at dir, by mount(2) or by fusermount3, and returns /dev/fuse, which no child process gets. The kernel's
// first request waits there.
func Mount(dir string, mo *fuse.MountOptions) (fd int, err error) {
	if mo.DirectMountStrict {
		return mountDirect(dir, mo)
	}
	return fusermount(dir, mo)
}

func mountDirect(dir string, mo *fuse.MountOptions) (fd int, err error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return 0, os.NewSyscallError("stat", err)
	}
	if fd, err = unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return 0, os.NewSyscallError("open /dev/fuse", err)
	}
	data := fmt.Sprintf("fd=%d,rootmode=%o,user_id=%d,group_id=%d,max_read=%d",
		fd, st.Mode&unix.S_IFMT, os.Geteuid(), os.Getegid(), mo.MaxWrite)
	for _, option := range mo.Options {
		data += "," + escape(option)
	}
	if mo.AllowOther {
		data += ",allow_other"
	}
	if err := unix.Mount(mo.FsName, dir, "fuse."+mo.Name, unix.MS_NOSUID|unix.MS_NODEV, data); err != nil {
		_ = unix.Close(fd)
		return 0, err
	}
	return fd, nil
}

// fusermount lets the helper mount, which passes the descriptor of /dev/fuse by a socket.
func fusermount(dir string, mo *fuse.MountOptions) (fd int, err error) {
	bin, err := Fusermount()
	if err != nil {
		return 0, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, os.NewSyscallError("socketpair", err)
	}
	ours, theirs := pair[0], os.NewFile(uintptr(pair[1]), "fusermount")
	defer func() { _ = unix.Close(ours) }()
	options := append([]string(nil), mo.Options...)
	if mo.AllowOther {
		options = append(options, "allow_other")
	}
	options = append(options, "fsname="+mo.FsName, "subtype="+mo.Name, fmt.Sprintf("max_read=%d", mo.MaxWrite))
	for i := range options {
		options[i] = escape(options[i])
	}
	cmd := exec.Command(bin, "-o", strings.Join(options, ","), "--", dir)
	cmd.Env = append(os.Environ(), "_FUSE_COMMFD=3")
	cmd.ExtraFiles = []*os.File{theirs}
	said, err := cmd.CombinedOutput()
	_ = theirs.Close() // so that nothing is waited for below, if nothing was passed
	if err != nil {
		return 0, fmt.Errorf("%s: %w: %s", bin, err, bytes.TrimSpace(said))
	}
	control := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(ours, make([]byte, 4), control, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return 0, os.NewSyscallError("recvmsg", err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err == nil && len(messages) == 1 {
		var fds []int
		if fds, err = unix.ParseUnixRights(&messages[0]); err == nil && len(fds) == 1 {
			return fds[0], nil
		}
	}
	return 0, errors.Join(fmt.Errorf("%s passed no descriptor", bin), err, syscall.EPROTO)
}

// Fusermount returns the path of the helper that mounts for users without privileges.
func Fusermount() (string, error) {
	for _, name := range []string{"fusermount3", "fusermount", "/bin/fusermount3", "/bin/fusermount"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("fusermount3 is not installed, and without it only root can mount (apt-get install fuse3)")
}

// escape protects what separates mount options.
func escape(option string) string { return strings.NewReplacer(`\`, `\\`, ",", `\,`).Replace(option) }
