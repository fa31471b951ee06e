package findings

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	humanize "github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/machine"
)

// Machine is what is known of a machine.
type Machine struct {
	Device     error    // what mounting lacks
	Live, Dead []string // mounts of Shoal's whose daemon answers, and does not
	Private    bool     // a container of a pod, none of whose volumes passes on what is mounted in it
	Limits     Limits
	Disk       Disk
}

// Limits are those of this process and its cgroups.
type Limits struct {
	Memory             machine.Memory
	Want               int64 // --memory
	Cores              int
	Quota, Load        float64 // 0: none
	Periods, Throttled int64
}

// Disk is the disk of the cache.
type Disk struct {
	Dir        string  // the nearest folder that exists
	Type       int64   // of the file system, from statfs(2)
	Room, Want int64   // bytes for the cache, --cache-size
	Direct     bool    // read and written without the page cache
	Write      float64 // bytes a second; so are the next two
	Random     float64 // of blocks of RandomRead, 8 at a time
}

// Site is a machine, and the source that it reads, if any.
type Site struct {
	Machine
	Store
}

// SiteRules are in the report's order.
var SiteRules = slices.Concat(machineRules, storeRules)

var machineRules = []Rule[*Site]{
	{"fuse/device", func(m *Site) Finding {
		if m.Device == nil {
			return ok("/dev/fuse can be opened for reading and writing")
		}
		what, remedy := split(m.Device.Error())
		return ok("%s", what).but(Fail, "mounts are impossible; the feed (shoal serve) works, and in Kubernetes the "+
			"sidecar of deploy/kubernetes", cmp.Or(remedy, "dmesg | tail"))
	}},
	{"fuse/mounts", func(m *Site) Finding {
		switch {
		case len(m.Dead) > 0:
			return ok("%s: no daemon answers", strings.Join(m.Dead, ", ")).
				but(Fail, "every access to the folder fails or hangs",
					"shoal umount --lazy "+human.Shell(m.Dead[0])+", or mount there again")
		case m.Private:
			return ok("no volume of this container passes on what is mounted in it").
				but(Warn, "the trainer's container would see an empty folder in place of a mount",
					"mountPropagation: Bidirectional on the volume of MOUNTPOINT here, and HostToContainer there; "+
						"--feed-only if nothing is mounted")
		case len(m.Live) > 0:
			return ok("%d of Shoal's mounts answer: %s", len(m.Live), strings.Join(m.Live, ", "))
		}
		return ok("none of Shoal's on this machine")
	}},
	{"limits/machine", func(m *Site) Finding {
		l := &m.Limits
		have, throttled, free := float64(l.Cores), 0.0, l.Memory.Available
		f := ok("%d cores, load %.1f; %s, %s available", l.Cores, l.Load, human.Bytes(l.Memory.Most()),
			human.Bytes(free))
		if l.Quota > 0 {
			have = min(l.Quota, have)
			f.Thing += fmt.Sprintf("; a cgroup allows %.2f cores", l.Quota)
		}
		if l.Throttled > 0 {
			throttled = float64(l.Throttled) / float64(l.Periods)
			f.Thing += fmt.Sprintf(", and throttled it in %.1f%% of the periods", 100*throttled)
		}
		f.Values = map[string]float64{"cores": have, "memory_room_bytes": float64(free)}
		switch {
		case free < l.Want:
			return f.but(Fail, "--memory "+human.Bytes(l.Want)+
				" is more than that: the daemon would be killed, or the trainer",
				fmt.Sprintf("shoal mount --memory %dMiB ...", free/2>>20))
		case throttled > 0.05:
			return f.but(Warn, "the kernel throttles this cgroup: reads wait for a core, not for the store",
				"raise the CPU limit (resources.limits.cpu, docker run --cpus), or remove it")
		case have < 2:
			return f.but(Warn, "one core serves about 7,000 files/s at best, and must decode as well",
				"give the daemon 2 cores or more")
		case l.Load > 2*float64(l.Cores):
			return f.but(Warn, "other processes use the cores: the rates below are lower than the machine's",
				"top -o %CPU, and run shoal doctor again when the machine is idle")
		}
		return f
	}},
	{"disk/filesystem", func(m *Site) Finding {
		d := &m.Disk
		kind := filesystems[d.Type]
		name := cmp.Or(kind.name, fmt.Sprintf("type %#x", d.Type))
		f := ok("%s at %s, with room for %s", name, d.Dir, human.Bytes(d.Room))
		f.Values = map[string]float64{"room_bytes": float64(d.Room)}
		switch {
		case d.Room < 256<<20:
			return f.but(Fail, "almost nothing can be kept: each epoch fetches everything again",
				"free space, or give another --cache-dir")
		case kind.wrong != "":
			return f.but(Warn, kind.wrong,
				"--cache-dir on a local disk (in a container a volume: emptyDir, hostPath, docker run -v /nvme:/cache)")
		case d.Room < d.Want:
			return f.but(Warn, "the disk fills up before the cache does; then Shoal goes on without it",
				fmt.Sprintf("--cache-size %dMiB", d.Room*9/10>>20))
		}
		return f
	}},
	{"disk/speed", func(m *Site) Finding {
		const slow = 100e6 // what eight accelerators of the headline's kind read
		d, another, reads := &m.Disk, "--cache-dir on a local NVMe disk", human.Rate(m.Disk.Random/RandomRead)
		f := ok("writes %s/s, reads %s/s at random (128 KiB, 8 at a time: %s/s)", rate(d.Write), rate(d.Random), reads)
		f.Values = map[string]float64{"write_bytes_per_second": d.Write, "random_read_bytes_per_second": d.Random}
		if !d.Direct {
			f.Thing += ", through the page cache (no O_DIRECT here)"
		}
		switch {
		case d.Random < slow:
			return f.but(Warn, "kept samples are read at random: at most "+reads+
				" of 128 KiB a second, however fast the store is", another)
		case d.Write < slow:
			return f.but(Warn, "a cold epoch is kept no faster than the disk writes; data beyond that is fetched again",
				another)
		}
		return f
	}},
}

// What is wrong with a file system.
const (
	afar   = "the cache is across the network, where the object store is already"
	theirs = "each read passes through another file system as well"
	layer  = "the cache is in the container's own layer: slower, and lost with it"
	memory = "the cache counts against the memory of machine and pod, and is lost at the next start"
)

// filesystems are the names of file systems, by their number from statfs(2), and what is wrong with them.
var filesystems = map[int64]struct{ name, wrong string }{
	unix.EXT4_SUPER_MAGIC: {"ext4", ""}, unix.XFS_SUPER_MAGIC: {"xfs", ""}, unix.BTRFS_SUPER_MAGIC: {"btrfs", ""},
	unix.F2FS_SUPER_MAGIC: {"f2fs", ""}, 0x2fc12fc1: {"zfs", ""},
	unix.TMPFS_MAGIC: {"tmpfs", memory}, unix.OVERLAYFS_SUPER_MAGIC: {"overlayfs", layer},
	unix.NFS_SUPER_MAGIC: {"NFS", afar}, unix.SMB_SUPER_MAGIC: {"SMB", afar}, unix.SMB2_SUPER_MAGIC: {"SMB2", afar},
	unix.CIFS_SUPER_MAGIC: {"CIFS", afar}, unix.CEPH_SUPER_MAGIC: {"CephFS", afar}, 0x0bd00bd0: {"Lustre", afar},
	unix.FUSE_SUPER_MAGIC: {"FUSE", theirs}, unix.V9FS_MAGIC: {"9p", theirs},
	unix.ECRYPTFS_SUPER_MAGIC: {"eCryptfs", theirs},
}

const RandomRead = 128 << 10 // bytes of the random reads that are measured: a typical image

func rate(bytes float64) string { return humanize.Bytes(uint64(max(bytes, 0))) }
