package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// fuseChecks check the requirements of a mount.
func (o *Options) fuseChecks() []Check {
	m := o.machine
	return []Check{
		{Area: "fuse", Name: "device", Run: func(context.Context) Result { return fuseDevice(m) }},
		{Area: "fuse", Name: "fusermount", Run: func(context.Context) Result { return fusermount(m) }},
		{Area: "fuse", Name: "kernel", Run: func(context.Context) Result { return fuseKernel(m) }},
		{Area: "fuse", Name: "io_uring", Run: func(context.Context) Result { return fuseRings(m) }},
		{Area: "fuse", Name: "allow-other", Run: func(context.Context) Result { return allowOther(m) }},
		{Area: "fuse", Name: "background", Run: func(context.Context) Result { return background(m) }},
		{Area: "fuse", Name: "container", Run: func(context.Context) Result { return fuseContainer(m, o.Mountpoint) }},
		{Area: "fuse", Name: "mounts", Run: func(ctx context.Context) Result { return liveMounts(ctx, m) }},
	}
}

func fuseDevice(m *Machine) Result {
	err := m.OpenRW(m.path("/dev/fuse"))
	without := "mounts are impossible; the feed (shoal serve) works"
	switch {
	case err == nil:
		return ok("/dev/fuse can be opened for reading and writing")
	case errors.Is(err, unix.ENOENT) && m.container() != "":
		return ok("/dev/fuse does not exist").because(Fail, without, "docker run --device /dev/fuse --cap-add SYS_ADMIN ..., or the sidecar's manifests in deploy/kubernetes")
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return ok("/dev/fuse: %s", cause(err)).because(Fail, without, "sudo modprobe fuse")
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		if m.container() != "" {
			return ok("/dev/fuse: %s", cause(err)).because(Fail, without+"; the container's device rules forbid it", "docker run --device /dev/fuse --cap-add SYS_ADMIN ...")
		}
		return ok("/dev/fuse: %s", cause(err)).because(Fail, without, "sudo chmod 666 /dev/fuse")
	}
	return ok("/dev/fuse: %s", cause(err)).because(Fail, without, "dmesg | tail")
}

// cause returns an error without its leading path.
func cause(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

func fusermount(m *Machine) Result {
	if m.UID() == 0 {
		return skipped("root needs no helper to mount")
	}
	for _, name := range []string{"fusermount3", "fusermount"} {
		path, err := m.LookPath(name)
		if err != nil {
			continue
		}
		fi, err := os.Stat(path)
		if err != nil {
			continue
		}
		if fi.Mode()&os.ModeSetuid == 0 {
			return ok("%s is not set-user-ID root", path).because(Fail, "users other than root cannot mount", "sudo chmod u+s "+path)
		}
		return ok("%s, set-user-ID root", path)
	}
	return ok("neither fusermount3 nor fusermount is in PATH").because(Fail, "users other than root cannot mount", "sudo apt-get install fuse3")
}

// fuseKernel checks the kernel for the features that the mount uses.
func fuseKernel(m *Machine) Result {
	text, err := m.read("/proc/sys/kernel/osrelease")
	if err != nil {
		return skipped("the kernel's version cannot be read: %s", cause(err))
	}
	r := ok("Linux %s", text)
	var major, minor int
	if _, err := fmt.Sscanf(text, "%d.%d", &major, &minor); err != nil {
		return r.because(Skipped, "the version is unknown", "")
	}
	version := major*1000 + minor
	switch {
	case version < 4020:
		return r.because(Warn, "FUSE reads are split into 128 KiB before Linux 4.20", "use a newer kernel")
	case version < 5016:
		return r.because(Warn, "each close(2) costs a request before Linux 5.16", "use a newer kernel")
	}
	return r
}

// fuseRings tells whether new mounts can use io_uring.
func fuseRings(m *Machine) Result {
	const enable, disabled = "/sys/module/fuse/parameters/enable_uring", "/proc/sys/kernel/io_uring_disabled"
	on, err := m.read(enable)
	if err != nil {
		return skipped("the kernel has no FUSE over io_uring (Linux 6.14)")
	}
	slower := "mounts use /dev/fuse, which costs more per small file"
	if strings.TrimSpace(on) != "Y" {
		return ok("FUSE over io_uring is switched off").because(OK, slower, "echo Y | sudo tee "+enable)
	}
	if n, known := m.number(disabled); known && (n == 2 || n == 1 && m.UID() != 0) {
		return ok("FUSE over io_uring is switched on, but kernel.io_uring_disabled is %d", n).because(Warn, slower, "sudo sysctl kernel.io_uring_disabled=0")
	}
	return ok("FUSE over io_uring is switched on")
}

func allowOther(m *Machine) Result {
	if m.UID() == 0 {
		return skipped("root needs no permission for --allow-other")
	}
	text, err := m.read("/etc/fuse.conf")
	for line := range strings.Lines(text) {
		if strings.TrimSpace(line) == "user_allow_other" {
			return ok("/etc/fuse.conf has user_allow_other")
		}
	}
	what := "/etc/fuse.conf lacks user_allow_other"
	if err != nil {
		what = "/etc/fuse.conf cannot be read"
	}
	return ok("%s", what).because(Warn, "a trainer of another user (also root) cannot read what you mount", "echo user_allow_other | sudo tee -a /etc/fuse.conf, then shoal mount --allow-other")
}

// wantBackground is fusefs.DefaultMaxBackground: the kernel limits it for users other than root.
const wantBackground = 256

func background(m *Machine) Result {
	const path = "/sys/module/fuse/parameters/max_user_bgreq"
	n, known := m.number(path)
	if !known {
		return skipped("%s cannot be read (the module is not loaded yet?)", path)
	}
	r := ok("max_user_bgreq %d", n)
	if m.UID() != 0 && n < wantBackground {
		return r.because(Warn, fmt.Sprintf("at most %d reads wait for the store at a time; Shoal requests %d", n, wantBackground), fmt.Sprintf("echo %d | sudo tee %s", 1024, path))
	}
	return r
}

func fuseContainer(m *Machine, mountpoint string) Result {
	in := m.container()
	if in == "" {
		return skipped("not in a container")
	}
	r := ok("%s", in)
	has, known := m.capability(capSysAdmin)
	if m.UID() == 0 && known && !has {
		return ok("%s, root without CAP_SYS_ADMIN", in).because(Fail, "mount(2) is refused; the feed works", "docker run --cap-add SYS_ADMIN --device /dev/fuse ..., in Kubernetes securityContext.privileged: true")
	}
	if profile, err := m.read("/proc/self/attr/current"); err == nil && strings.Contains(profile, "(enforce)") {
		return ok("%s, AppArmor profile %s", in, strings.Trim(profile, "\x00")).because(Warn, "the usual profiles refuse mount(2)", "docker run --security-opt apparmor=unconfined ...")
	}
	if mountpoint == "" {
		return r.because(OK, "whether other containers will see a mount depends on its folder: give --mountpoint", "")
	}
	all, err := m.mounts()
	if err != nil {
		return skipped("mountinfo cannot be read: %s", cause(err))
	}
	e := on(all, mountpoint)
	if !e.Shared {
		return ok("%s, %s is on %s, which is not shared", in, mountpoint, e.Point).because(Warn, "a mount there is visible only in this container: a trainer in another one sees an empty folder",
			"mountPropagation: Bidirectional on the volume here and HostToContainer in the trainer's (docker: -v DIR:DIR:rshared)")
	}
	return ok("%s, %s is on %s, which is shared", in, mountpoint, e.Point)
}

// liveMounts looks for mounts of Shoal whose daemon is gone.
func liveMounts(ctx context.Context, m *Machine) Result {
	all, err := m.mounts()
	if err != nil {
		return skipped("mountinfo cannot be read: %s", cause(err))
	}
	var live, dead []string
	for _, e := range all {
		if e.Type != "fuse.shoal" {
			continue
		}
		found := make(chan error, 1)
		go func() { found <- unix.Stat(m.path(e.Point), new(unix.Stat_t)) }()
		select {
		case err = <-found:
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			dead = append(dead, e.Point)
		} else {
			live = append(live, e.Point)
		}
	}
	switch {
	case len(dead) > 0:
		return ok("%s: no daemon answers", strings.Join(dead, ", ")).because(Fail, "every access to the folder fails or hangs", "fusermount3 -uz "+dead[0]+", or mount there again")
	case len(live) > 0:
		return ok("%d of Shoal's mounts answer: %s", len(live), strings.Join(live, ", "))
	}
	return ok("none of Shoal's on this machine")
}
