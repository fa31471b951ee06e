package netns

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// TestMain lets this test binary play a server in a node, and the process that dies in TestStaleNetworksGo.
func TestMain(m *testing.M) {
	switch os.Getenv("NETNS_TEST") {
	case "dies":
		n, err := New(1, 0)
		if err != nil {
			panic(err)
		}
		// In a session of its own, as a daemon.
		cmd := n.Nodes[0].Command("sleep", "600")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			panic(err)
		}
		os.Stdout.WriteString(n.Nodes[0].name + " " + strconv.Itoa(cmd.Process.Pid) + "\n")
		select {}
	case "sends":
		l, err := net.Listen("tcp", os.Getenv("NETNS_AT"))
		if err != nil {
			panic(err)
		}
		os.Stdout.WriteString("{}\n")
		for {
			c, err := l.Accept()
			if err != nil {
				panic(err)
			}
			go func() {
				_, _ = io.Copy(c, io.LimitReader(zero{}, size))
				_ = c.Close()
			}()
		}
	}
	os.Exit(m.Run())
}

type zero struct{}

func (zero) Read(p []byte) (int, error) { clear(p); return len(p), nil }

const size = 4 << 20

func network(t *testing.T, n int, rate int64) *Net {
	t.Helper()
	if m := Missing(); m != "" {
		t.Skip(m)
	}
	w, err := New(n, rate)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

func send(t *testing.T, n *Node) {
	t.Helper()
	cmd := n.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "NETNS_TEST=sends", "NETNS_AT="+n.IP+":7000")
	p, err := subproc.StartReady(t.Context(), "the server", cmd, &struct{}{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Stop(time.Second) })
}

// Seconds to wait for what must come, and for what must not.
const must, mustNot = "60", "2"

// fetch reads what the server in n sends, from another node or the host.
func fetch(ctx context.Context, from, n *Node, patience string) (int, error) {
	const script = `import socket,sys; s=socket.create_connection((sys.argv[1],7000),float(sys.argv[2])); n=0
while b := s.recv(1<<20): n+=len(b)
print(n)`
	cmd := exec.Command("/usr/bin/python3", "-c", script, n.IP, patience)
	if from != nil {
		cmd = from.Command("/usr/bin/python3", "-c", script, n.IP, patience)
	}
	var out bytes.Buffer
	cmd.Stdout = &out
	p, err := subproc.Start("fetch", cmd)
	if err != nil {
		return 0, err
	}
	if err := p.Wait(ctx); err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(out.String()))
}

func TestLinks(t *testing.T) {
	w := network(t, 3, 80e6) // 10 MB/s
	send(t, w.Nodes[0])
	start := time.Now()
	if n, err := fetch(t.Context(), w.Nodes[1], w.Nodes[0], must); n != size || err != nil {
		t.Fatal(n, err)
	}
	if took := time.Since(start); took < 300*time.Millisecond {
		t.Errorf("4 MiB at 10 MB/s took %v", took)
	}
	if n, err := fetch(t.Context(), nil, w.Nodes[0], must); n != size || err != nil {
		t.Errorf("the host: %d, %v", n, err)
	}
	for _, n := range w.Nodes[:2] {
		if err := n.Apart(true); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := fetch(t.Context(), w.Nodes[1], w.Nodes[0], mustNot); err == nil {
		t.Errorf("%d bytes between nodes that are apart", n)
	}
	for _, from := range []*Node{nil, w.Nodes[2]} {
		if n, err := fetch(t.Context(), from, w.Nodes[0], must); n != size || err != nil {
			t.Errorf("%d bytes from a node that is apart from another, %v", n, err)
		}
	}
	if err := w.Nodes[0].Apart(false); err != nil {
		t.Fatal(err)
	}
	if n, err := fetch(t.Context(), w.Nodes[1], w.Nodes[0], must); n != size || err != nil {
		t.Errorf("%d bytes after that, %v", n, err)
	}
	if err := w.Nodes[0].Rate(0); err != nil {
		t.Fatal(err)
	}
	if err := w.Nodes[0].Down(); err != nil {
		t.Fatal(err)
	}
	if n, err := fetch(t.Context(), w.Nodes[1], w.Nodes[0], mustNot); err == nil {
		t.Errorf("%d bytes from a node whose link is down", n)
	}
	if err := w.Nodes[0].Up(); err != nil {
		t.Fatal(err)
	}
	if n, err := fetch(t.Context(), w.Nodes[2], w.Nodes[0], must); n != size || err != nil {
		t.Error("after Up:", n, err)
	}
}

// Two networks of one process are apart, and what a killed process has left is removed by the next.
func TestStaleNetworksGo(t *testing.T) {
	if m := Missing(); m != "" {
		t.Skip(m)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "NETNS_TEST=dies")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	name, pid, _ := strings.Cut(strings.TrimSpace(line), " ")
	number, err := strconv.Atoi(pid)
	if err != nil {
		t.Fatal(err)
	}
	sleeper, err := unix.PidfdOpen(number, 0) // the number may be another process's soon after its end
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(sleeper)
	one := network(t, 1, 0)
	if _, err := os.Stat(filepath.Join(namespaces, name)); err != nil {
		t.Fatalf("the network of a process that runs: %v", err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	two := network(t, 1, 0)
	if one.Host == two.Host || one.bridge == two.bridge {
		t.Errorf("two networks at %s and %s", one.Host, two.Host)
	}
	if _, err := os.Stat(filepath.Join(namespaces, name)); err == nil {
		t.Errorf("%s is still there", name)
	}
	ended := []unix.PollFd{{Fd: int32(sleeper), Events: unix.POLLIN}}
	if n, err := unix.Poll(ended, 60_000); n != 1 || err != nil {
		t.Fatalf("process %d still runs: %v", number, err)
	}
}
