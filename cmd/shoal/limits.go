package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/machine"
)

const (
	// autoShare is auto's share of a limit of this process alone, and the most that a default uses of any limit:
	// besides --memory, a cgroup also counts kernel buffers and the page cache of recent reads.
	autoShare = 0.8
	// sharedShare is auto's share of a machine's memory without a cgroup limit: a trainer needs memory, too.
	sharedShare = 0.25
)

// amount is a flag value: a size, a share of the available amount (80%), or auto.
type amount struct {
	bytes int64   // 0 for a part
	part  float64 // share of the available amount
	auto  bool
	text  string // as it was given; "" is the default
}

func (a *amount) Type() string { return "size" }
func (a *amount) String() string {
	switch {
	case a.auto:
		return "auto"
	case a.part > 0:
		return strconv.FormatFloat(a.part*100, 'g', -1, 64) + "%"
	}
	return human.Bytes(a.bytes)
}

// same reports whether two values mean the same in any process.
func (a *amount) same(b amount) bool {
	return a.text != "" && a.bytes == b.bytes && a.part == b.part && a.auto == b.auto && b.text != ""
}

func (a *amount) Set(text string) error {
	if text == "auto" {
		*a = amount{auto: true, text: text}
		return nil
	}
	if percent, ok := strings.CutSuffix(text, "%"); ok {
		v, err := strconv.ParseFloat(percent, 64)
		if err != nil || !(v > 0 && v <= 100) {
			return fmt.Errorf("%q is not a percentage (write 80%%, above 0%% and up to 100%%)", text)
		}
		*a = amount{part: v / 100, text: text}
		return nil
	}
	n, err := cli.ParseSize(text, "write 512MiB, 20GiB or 1.5GB, a part such as 80%, or auto")
	if err == nil {
		*a = amount{bytes: n, text: text}
	}
	return err
}

// remark is a message to log once this process is known to be the one that the limits apply to.
type remark struct {
	level slog.Level
	text  string
	args  []any
}

// memory returns the value of --memory in bytes on a machine.
func (a *amount) memory(m machine.Memory) (n int64, remarks []remark, err error) {
	of, most, part := "the machine", m.Most(), a.part
	if m.Limit > 0 {
		of = m.From
	}
	level, text := slog.LevelInfo, "--memory "+a.String()
	switch {
	case a.auto && m.Limit > 0:
		part = autoShare
	case a.auto:
		part = sharedShare
	case part > 0:
	case a.text == "" && most > 0 && float64(a.bytes) > autoShare*float64(most):
		level, text = slog.LevelWarn, "--memory is set below its default, which exceeds the limit"
		part = autoShare
	case most > 0 && a.bytes > most:
		level = slog.LevelWarn
		text = "--memory exceeds the limit at which the kernel kills the daemon: give less, or auto"
	default:
		return a.bytes, nil, nil
	}
	switch {
	case part == 0:
		n = a.bytes
	case most <= 0:
		return 0, nil, fmt.Errorf(
			"--memory %s: the kernel reports neither a limit nor the machine's memory; give a size", a)
	case most < cachedir.LeastMemory:
		return 0, nil, fmt.Errorf("%s allows %s of memory, and Shoal needs %s (raise the container's limit)",
			of, human.Bytes(most), cachedir.RoundUp(cachedir.LeastMemory))
	default:
		n = max(int64(part*float64(most)), cachedir.LeastMemory)
	}
	args := []any{"memory", human.Bytes(n), "limit", human.Bytes(most), "of", of}
	return n, []remark{{level, text, args}}, nil
}

// disk returns the value of --cache-size in bytes for a folder. roomOf is machine.Room.
func (a *amount) disk(dir string, roomOf func(dir string) (int64, error)) (n int64, remarks []remark, err error) {
	if a.text == "" {
		return a.bytes, nil, nil
	}
	room, err := roomOf(dir)
	part := a.part
	if a.auto {
		part = autoShare
	}
	args := func() []any {
		return []any{"cache_size", human.Bytes(n), "room", human.Bytes(room), "dir", dir}
	}
	switch {
	case part == 0:
		if n = a.bytes; err == nil && n > room {
			remarks = []remark{{slog.LevelWarn, "--cache-size is more than its file system has room for", args()}}
		}
		return n, remarks, nil
	case err != nil:
		return 0, nil, fmt.Errorf("--cache-size %s: %w (give a size)", a, err)
	}
	n = int64(part * float64(room))
	return n, []remark{{slog.LevelInfo, "--cache-size " + a.String(), args()}}, nil
}

// ownLimits are the values of --cache-size and --memory that this process was started with.
var ownLimits struct{ disk, memory amount }

// limits returns the values of the flags in bytes here. In a daemon that already runs, what it was started with means
// what is in force: 80% of the free space would be less by now.
func (o *engineOptions) limits(inv *invocation) (disk, memory int64, err error) {
	if inv.attached() {
		if disk, memory = inv.host.Limits(); !o.cacheSize.same(ownLimits.disk) {
			if disk, _, err = o.cacheSize.disk(o.cacheDir, machine.Room); err != nil {
				return 0, 0, err
			}
		}
		if !o.memory.same(ownLimits.memory) {
			memory, _, err = o.memory.memory(machine.ReadMemory())
		}
		return disk, memory, err
	}
	ownLimits.disk, ownLimits.memory = o.cacheSize, o.memory
	disk, remarks, err := o.cacheSize.disk(o.cacheDir, machine.Room)
	memory, more, failed := o.memory.memory(machine.ReadMemory())
	if err = cmp.Or(err, failed); err != nil {
		return 0, 0, err
	}
	inv.remarks = append(remarks, more...)
	if os.Getenv("GOMEMLIMIT") != "" {
		inv.remarks = append(inv.remarks,
			remark{slog.LevelInfo, "GOMEMLIMIT has no effect: --memory sets the memory limit of the Go runtime", nil})
	}
	return disk, memory, nil
}

// logLimits logs the values of limits, in the process that they apply to.
func (inv *invocation) logLimits(log *slog.Logger) {
	for _, r := range inv.remarks {
		log.Log(context.Background(), r.level, r.text, r.args...)
	}
	inv.remarks = nil
}

// bandwidth is a flag value in bytes per second, written 10Gbit, 1GiB/s, 500MB/s or unlimited, which is 0.
type bandwidth float64

func (b *bandwidth) Type() string { return "rate" }

// String returns bits, the usual unit of links: 10Gbit. The result parses to the same bandwidth, to three digits.
func (b *bandwidth) String() string {
	if *b == 0 {
		return "unlimited"
	}
	bits, i := float64(*b)*8, 0
	for ; i < len(prefixes)-1 && bits >= 999.5; i++ {
		bits /= 1000
	}
	return fmt.Sprintf("%.3g%s", bits, strings.TrimSpace(prefixes[i:i+1]+"bit"))
}

// words is String for sentences: 10 Gbit/s.
func (b *bandwidth) words() string { return inBits.ReplaceAllString(b.String(), "$1 ${2}bit/s") }

// prefixes are those of bits, each a thousand times the one before.
const prefixes = " kMGT"

// inBits is a number, and a letter of prefixes or none.
var inBits = regexp.MustCompile(`(?i)^(.*?)\s*([tgmk]?)(?:bit|bits?/s|bps)$`)

// maxBandwidth is above any real link.
const maxBandwidth = 1 << 60

func (b *bandwidth) Set(text string) error {
	word := strings.ToLower(strings.TrimSpace(text))
	if word == "unlimited" {
		*b = 0
		return nil
	}
	var bytes float64
	var err error
	if bits := inBits.FindStringSubmatch(word); bits != nil {
		bytes, err = strconv.ParseFloat(bits[1], 64)
		bytes *= math.Pow(1000, float64(strings.Index(strings.ToLower(prefixes), bits[2]))) / 8
	} else if number, ok := strings.CutSuffix(word, "/s"); ok && strings.HasSuffix(number, "b") {
		var n int64
		n, err = cli.ParseSize(number, "")
		bytes = float64(n)
	} else {
		err = strconv.ErrSyntax
	}
	if err != nil {
		return fmt.Errorf("%q is not a bandwidth (write 10Gbit, 1GiB/s, 500MB/s or unlimited)", text)
	}
	if math.IsNaN(bytes) || bytes < 1 || bytes > maxBandwidth {
		return fmt.Errorf("bandwidth %q: give at least 1B/s, or unlimited", text)
	}
	*b = bandwidth(bytes)
	return nil
}
