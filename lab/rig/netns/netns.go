// Package netns is a network of machines on one: network namespaces joined by a bridge. Each has a link whose rate is
// shaped by the kernel (tbf), and that can be taken down and up. The host is on the bridge too, so servers of
// the rig listen on [Net.Host]. Latency comes from the rig's proxy: not every kernel has netem.
//
// Traps:
//
//   - `ip netns exec` gives a command a mount namespace of its own, too: what it mounts nobody else sees.
//     [Node.Command] enters the network namespace alone.
//   - An interface that is taken down inside a namespace loses its routes, and programs see errors at once. [Node.Down]
//     takes down the bridge's end of the link: packets vanish, as if a cable were pulled.
//   - Namespaces and bridges outlive their process. Their names carry its number, and [New] removes those of processes
//     that have ended.
//   - A link is shaped in both directions, and the token bucket lets a burst of 4 ms pass at once.
package netns

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// Missing says what this machine lacks for a [Net]; empty if it lacks nothing.
func Missing() string {
	if os.Geteuid() != 0 {
		return "network namespaces take root"
	}
	for tool, pkg := range map[string]string{"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Sprintf("%s is not there: apt-get install %s", tool, pkg)
		}
	}
	// A container may be root and yet not allowed to. Others look at the same time: each has a name of its own.
	probe := fmt.Sprintf("%s%d.%d", prefix, os.Getpid(), made.Add(1)-1)
	if err := run("ip", "netns", "add", probe); err != nil {
		return "network namespaces cannot be made: " + err.Error()
	}
	_ = run("ip", "netns", "del", probe)
	return ""
}

// prefix begins the names of namespaces; short begins those of interfaces, which have 15 characters at most. Both go on
// with the process's number and a count.
const (
	prefix = "shoal-"
	short  = "sh"
)

// lockFile is held while addresses are chosen and stale networks removed.
const lockFile = "/run/shoal-netns.lock"

// namespaces is where ip keeps them.
const namespaces = "/run/netns"

// Net is a network of namespaces.
type Net struct {
	Host  string // the host's address in the network
	Nodes []*Node

	bridge string
}

// Node is a machine of the network.
type Node struct {
	IP string // its address

	name string // of the namespace
	link string // the bridge's end of its link; the other one is eth0
}

var made atomic.Int64 // networks of this process

// New makes a network of n nodes whose links carry rate bits a second each way; 0 does not shape them. Close removes
// it.
func New(n int, rate int64) (_ *Net, err error) {
	unlock, err := lock()
	if err != nil {
		return nil, fmt.Errorf("netns: %w", err)
	}
	defer unlock()
	if err := sweep(); err != nil {
		return nil, fmt.Errorf("netns: %w", err)
	}
	subnet, err := freeSubnet()
	if err != nil {
		return nil, fmt.Errorf("netns: %w", err)
	}
	id := fmt.Sprintf("%d.%d", os.Getpid(), made.Add(1)-1)
	t := &Net{Host: subnet + ".1", bridge: short + id}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("netns: %w", err), t.Close())
		}
	}()
	script := []string{
		"link add " + t.bridge + " type bridge stp_state 0 forward_delay 0",
		"link set " + t.bridge + " up",
		"addr add " + t.Host + "/24 dev " + t.bridge,
	}
	for i := range n {
		node := &Node{IP: fmt.Sprintf("%s.%d", subnet, 10+i), name: fmt.Sprintf("%s%s.%d", prefix, id, i),
			link: fmt.Sprintf("%s.%d", short+id, i)}
		t.Nodes = append(t.Nodes, node)
		script = append(script, "netns add "+node.name,
			"link add "+node.link+" type veth peer name eth0 netns "+node.name,
			"link set "+node.link+" master "+t.bridge+" up")
	}
	if err := batch(nil, script); err != nil {
		return nil, err
	}
	for _, node := range t.Nodes {
		if err := batch([]string{"-n", node.name},
			[]string{"link set lo up", "link set eth0 up", "addr add " + node.IP + "/24 dev eth0"}); err != nil {
			return nil, err
		}
		if err := node.Rate(rate); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// Close kills what still runs in the namespaces, and removes them.
func (t *Net) Close() error {
	var all error
	for _, n := range t.Nodes {
		all = errors.Join(all, remove(n.name))
	}
	return errors.Join(all, removeLink(t.bridge))
}

// Command is a command that runs in the node. subproc.Start runs it as any other.
func (n *Node) Command(program string, args ...string) *exec.Cmd {
	return exec.Command("nsenter",
		append([]string{"--net=" + filepath.Join(namespaces, n.name), "--", program}, args...)...)
}

// Down pulls the node's cable: what is sent to it or by it vanishes.
func (n *Node) Down() error { return run("ip", "link", "set", n.link, "down") }

// Up plugs it in again.
func (n *Node) Up() error { return run("ip", "link", "set", n.link, "up") }

// Apart cuts the node off from all nodes that are apart, too. The host and other nodes still reach it.
func (n *Node) Apart(apart bool) error {
	word := "off"
	if apart {
		word = "on"
	}
	return run("bridge", "link", "set", "dev", n.link, "isolated", word)
}

// Rate shapes the node's link to so many bits a second each way; 0 lifts the limit.
func (n *Node) Rate(bits int64) error {
	here, there := []string{"qdisc"}, []string{"-n", n.name, "qdisc"}
	if bits == 0 {
		// There may be none.
		_ = run("tc", append(here, "del", "dev", n.link, "root")...)
		_ = run("tc", append(there, "del", "dev", "eth0", "root")...)
		return nil
	}
	shape := []string{"root", "tbf", "rate", strconv.FormatInt(bits, 10) + "bit",
		"burst", strconv.FormatInt(max(bits/8/250, 64<<10), 10), "latency", "50ms"}
	return errors.Join(
		run("tc", append(append(here, "replace", "dev", n.link), shape...)...),
		run("tc", append(append(there, "replace", "dev", "eth0"), shape...)...))
}

// freeSubnet returns the first three numbers of a network of the range for benchmarks (RFC 2544) that this machine does
// not use.
func freeSubnet() (string, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return "", err
	}
	for i := range 512 {
		subnet := fmt.Sprintf("198.%d.%d", 18+i/256, i%256)
		if !slices.ContainsFunc(addrs, func(a net.Addr) bool { return strings.HasPrefix(a.String(), subnet+".") }) {
			return subnet, nil
		}
	}
	return "", errors.New("all of 198.18.0.0/15 is in use")
}

// sweep removes the networks of processes that have ended.
func sweep() error {
	var all error
	names, err := os.ReadDir(namespaces)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, n := range names {
		if stale(n.Name(), prefix) {
			all = errors.Join(all, remove(n.Name()))
		}
	}
	links, err := net.Interfaces()
	for _, l := range links {
		if stale(l.Name, short) {
			all = errors.Join(all, removeLink(l.Name))
		}
	}
	return errors.Join(all, err)
}

// stale reports whether a name is ours, and its process has ended.
func stale(name, prefix string) bool {
	rest, ok := strings.CutPrefix(name, prefix)
	number, _, dotted := strings.Cut(rest, ".")
	pid, err := strconv.Atoi(number)
	return ok && dotted && err == nil && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
}

// remove removes a namespace, with its link and what runs in it. One that is gone is no error.
func remove(name string) error {
	if _, err := os.Stat(filepath.Join(namespaces, name)); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		out, err := exec.Command("ip", "netns", "pids", name).Output()
		pids := strings.Fields(string(out))
		if err != nil || len(pids) == 0 || time.Now().After(deadline) {
			break
		}
		for _, p := range pids {
			if pid, err := strconv.Atoi(p); err == nil {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	}
	// At once, and not when the kernel gets to the namespace: the name of the link is needed again.
	link := removeLink(short + strings.TrimPrefix(name, prefix))
	return errors.Join(link, run("ip", "netns", "del", name))
}

func removeLink(name string) error {
	// It may have gone with its namespace.
	if err := run("ip", "link", "del", name); err != nil && !strings.Contains(err.Error(), "Cannot find device") {
		return err
	}
	return nil
}

func lock() (unlock func(), err error) {
	f, err := os.OpenFile(lockFile, os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		_ = f.Close()
		return nil, err
	}
	return func() { _ = f.Close() }, nil
}

func run(program string, args ...string) error { return finish(exec.Command(program, args...)) }

// batch runs many commands of ip in one process.
func batch(flags, lines []string) error {
	cmd := exec.Command("ip", append(flags, "-batch", "-")...)
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	return finish(cmd)
}

func finish(cmd *exec.Cmd) error {
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", cmd, err, strings.TrimSpace(string(out)))
	}
	return nil
}
