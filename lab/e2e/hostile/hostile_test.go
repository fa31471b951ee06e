// Package hostile mounts stores that answer wrongly, by the built binary, each as a row of a table says: no row may
// give a wrong byte, keep one, hang the mount beyond its bound, or fail without a name.
//
// The rows marked core run always; all of them by `make hostile`, some minutes, which prints the table.
package hostile

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/synced"
)

var shoalBin string // built once

func TestMain(m *testing.M) {
	code, err := func() (int, error) {
		dir, err := os.MkdirTemp("", "shoal-hostile-")
		if err != nil {
			return 1, err
		}
		defer os.RemoveAll(dir)
		os.Setenv("SHOAL_SETTLED", "1") // the settings of whoever runs the tests are not theirs
		shoalBin = filepath.Join(dir, "shoal")
		if out, err := exec.Command("go", "build", "-o", shoalBin, "../../../cmd/shoal").CombinedOutput(); err != nil {
			return 1, fmt.Errorf("build: %w\n%s", err, out)
		}
		return m.Run(), nil
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// row is a way to answer and what is to come of it.
type row struct {
	name   string
	script Script
	// want is "bytes", "empty", or the error of reading d/x.bin: EIO, ESTALE, EACCES; or "refused", by the mount; or
	// "interrupted", where it ends when it is told to.
	want string
	text string // in the log, with the object's key, or in what the mount says
	// within bounds the read, or the mount that is refused, beside what a loaded machine adds.
	within time.Duration
	size   int                            // of d/x.bin; 0: 5,000 bytes, which are asked for without Range
	tls    *tls.Config                    // of the server
	at     func(addr string) string       // the endpoint; nil: http://ADDR
	start  func(t *testing.T) (at string) // another server
	core   bool
	group  string
	place  int // in the table
}

const (
	atOnce     = 3 * time.Second
	allTries   = 60 * time.Second  // 16 tries and their pauses, 46 s at most
	twoMinutes = 124 * time.Second // and 4 s for the bytes of an extent
	// slack is what a loaded machine adds.
	slack = 20 * time.Second
	// mostGets of one object for one reader: 16 tries, and second GETs where the first are late.
	mostGets = 18
)

const (
	small = 5000
	large = 5<<20 + 77 // two extents: asked for by ranges
)

// outcome is a row's line of the table.
type outcome struct {
	row  row
	got  string
	took time.Duration
	gets int
	bad  string
}

func TestHostile(t *testing.T) {
	all := os.Getenv("SHOAL_HOSTILE") != ""
	var mu sync.Mutex
	var outcomes []*outcome
	t.Run("rows", func(t *testing.T) {
		for i, r := range rows() {
			r.place = i
			if !all && !r.core {
				continue
			}
			t.Run(r.name, func(t *testing.T) {
				t.Parallel()
				o := &outcome{row: r, got: "-", bad: "it did not end"}
				mu.Lock()
				outcomes = append(outcomes, o)
				mu.Unlock()
				got := attempt(t, r)
				mu.Lock()
				defer mu.Unlock()
				*o = got
				if o.bad != "" {
					t.Errorf("%s, want %s within %v: %s", o.got, r.want, r.within, o.bad)
				}
			})
		}
	})
	slices.SortFunc(outcomes, func(a, b *outcome) int { return a.row.place - b.row.place })
	fmt.Printf("%-52s %-12s %-12s %9s %9s\n", "the store's answer", "expected", "got", "after", "")
	for _, o := range outcomes {
		verdict := "as expected"
		if o.bad != "" {
			verdict = "NOT AS EXPECTED: " + o.bad
		}
		fmt.Printf("%-52s %-12s %-12s %7.1f s %4d GETs  %s\n",
			o.row.name, o.row.want, o.got, o.took.Seconds(), o.gets, verdict)
	}
	fmt.Print("\n", summary(outcomes))
}

// summary is the table of docs/SEMANTICS.md.
func summary(outcomes []*outcome) string {
	var s strings.Builder
	s.WriteString("| answers | rows | as expected | results | longest |\n| --- | --- | --- | --- | --- |\n")
	for _, g := range groups {
		rows, good, longest, came := 0, 0, 0.0, map[string]int{}
		for _, o := range outcomes {
			if o.row.group != g.name {
				continue
			}
			rows++
			came[o.got]++
			longest = max(longest, o.took.Seconds())
			if o.bad == "" {
				good++
			}
		}
		var parts []string
		for _, got := range slices.Sorted(maps.Keys(came)) {
			parts = append(parts, fmt.Sprintf("%d %s", came[got], got))
		}
		fmt.Fprintf(&s, "| %s | %d | %d | %s | %.0f s |\n", g.name, rows, good, strings.Join(parts, ", "), longest)
	}
	return s.String()
}

// attempt mounts a row's store and reads from it.
func attempt(t *testing.T, r row) (o outcome) {
	o.row = r
	rng := rand.New(rand.NewPCG(1, 2))
	noise := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		return b
	}
	size := r.size
	if size == 0 {
		size = small
	}
	objects := map[string][]byte{"d/a.bin": noise(small), "d/b.bin": noise(small), "d/x.bin": noise(size)}
	var server *Server
	var endpoint string
	if r.start != nil {
		endpoint = r.start(t)
	} else {
		var err error
		if server, err = Start(objects, r.tls, r.script); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(server.Stop)
		endpoint = "http://" + server.Addr()
		if r.at != nil {
			endpoint = r.at(server.Addr())
		}
	}
	m := &mount{t: t, env: append(os.Environ(), "AWS_ENDPOINT_URL="+endpoint, "AWS_REGION=us-east-1",
		"AWS_ACCESS_KEY_ID=hostile-key-id", "AWS_SECRET_ACCESS_KEY=secret",
		"AWS_CONFIG_FILE=/dev/null", "AWS_SHARED_CREDENTIALS_FILE=/dev/null"), at: t.TempDir(), cache: cacheDir(t)}
	began := time.Now()
	if r.want == "interrupted" {
		o.got, o.bad = m.interrupt(r)
		o.took = time.Since(began)
		return o
	}
	said, err := m.up()
	o.took = time.Since(began)
	if r.want == "refused" || err != nil {
		o.got = "mounted"
		if err != nil {
			o.got = "refused"
		}
		o.bad = r.judge(&o, said, "")
		if err == nil {
			m.down()
		}
		return o
	}
	o.bad = r.read(t, m, server, objects, &o)
	m.down()
	if o.bad == "" && r.group != "listings" { // what was listed stays so
		o.bad = again(m, server, objects)
	}
	return o
}

// judge says what is wrong with an outcome; said is where the row's text must be, with the key.
func (r row) judge(o *outcome, said, key string) string {
	switch {
	case o.got != r.want:
		return fmt.Sprintf("%.600s", said)
	case strings.Contains(said, "panic") || strings.Contains(said, "fatal error"):
		return fmt.Sprintf("%.2000s", said)
	case o.took > r.within+slack:
		return "it took too long"
	case r.text == "":
		return ""
	}
	for line := range strings.Lines(said) {
		if strings.Contains(line, r.text) && strings.Contains(line, key) {
			return ""
		}
	}
	return fmt.Sprintf("%q is not told: %.1000s", r.text, said)
}

// read reads the row's object, and beside and after it sound ones.
func (r row) read(t *testing.T, m *mount, server *Server, objects map[string][]byte, o *outcome) string {
	type answer struct {
		data []byte
		err  error
	}
	read := func(name string) <-chan answer {
		c := make(chan answer, 1)
		go func() {
			data, err := os.ReadFile(filepath.Join(m.at, name))
			c <- answer{data, err}
		}()
		return c
	}
	sound := func(name string) string {
		select {
		case a := <-read(name):
			if a.err != nil || !bytes.Equal(a.data, objects["d/"+name]) {
				return fmt.Sprintf("a sound object beside it: %d bytes, %v", len(a.data), a.err)
			}
		case <-time.After(allTries + slack):
			return "a sound object beside it is not read"
		}
		return ""
	}
	began := time.Now()
	x := read("x.bin")
	if bad := sound("a.bin"); bad != "" {
		return bad
	}
	var a answer
	select {
	case a = <-x:
	case <-time.After(r.within + 2*slack):
		o.got, o.took = "hangs", time.Since(began)
		return "the read does not return"
	}
	o.took, o.gets = time.Since(began), server.Count(Get, "d/x.bin")
	o.got = nameOf(a.err)
	switch {
	case a.err == nil && len(a.data) == 0:
		o.got = "empty" // only where it was listed so
	case a.err == nil && !bytes.Equal(a.data, objects["d/x.bin"]):
		o.got = "WRONG BYTES"
		return fmt.Sprintf("%d bytes of %d", len(a.data), len(objects["d/x.bin"]))
	case o.gets > mostGets*(1+len(objects["d/x.bin"])>>22):
		return fmt.Sprintf("%d GETs for one reader", o.gets)
	}
	if bad := r.judge(o, m.log(), "x.bin"); bad != "" {
		return bad
	}
	return sound("b.bin")
}

func nameOf(err error) string {
	var errno syscall.Errno
	switch {
	case err == nil:
		return "bytes"
	case errors.As(err, &errno):
		return unix.ErrnoName(errno)
	}
	return err.Error()
}

// again mounts the cache directory once more, before a store that is sound now: nothing wrong was kept.
func again(m *mount, server *Server, objects map[string][]byte) string {
	server.Set(nil)
	if said, err := m.up(); err != nil {
		return "the second mount: " + said
	}
	defer m.down()
	for _, name := range []string{"x.bin", "a.bin", "b.bin"} {
		if data, err := os.ReadFile(filepath.Join(m.at, name)); err != nil || !bytes.Equal(data, objects["d/"+name]) {
			return fmt.Sprintf("%s after a remount, from a store that is sound: %d bytes, %v", name, len(data), err)
		}
	}
	return ""
}

// cacheDir is a folder until the end of the test. A daemon whose stats could not be read is not waited for by umount,
// and may still write to it.
func cacheDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "shoal-hostile-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
			if err := os.RemoveAll(dir); err == nil {
				return
			} else if time.Now().After(end) {
				t.Error(err)
				return
			}
		}
	})
	return dir
}

// mount is a mount point and its daemon.
type mount struct {
	t         *testing.T
	env       []string
	at, cache string
}

func (m *mount) args(flags ...string) []string {
	return append([]string{"mount", "s3://bucket/d", m.at, "--cache-dir", m.cache, "--cache-size", "256MiB", "--order",
		"none"}, flags...)
}

// up mounts, and returns what was said.
func (m *mount) up() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, shoalBin, m.args("--daemon")...)
	cmd.Env = m.env
	said, err := cmd.CombinedOutput()
	return string(said) + m.log(), err
}

func (m *mount) log() string {
	b, _ := os.ReadFile(filepath.Join(m.cache, "shoal.log"))
	return string(b)
}

// down unmounts, and fails the test where that hangs.
func (m *mount) down() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second+slack)
	defer cancel()
	if out, err := exec.CommandContext(ctx, shoalBin, "umount", m.at).CombinedOutput(); err != nil {
		m.t.Errorf("umount: %v: %s", err, out)
		_ = unix.Unmount(m.at, unix.MNT_DETACH)
	}
}

// interrupt mounts until progress is told, and then wants an end.
func (m *mount) interrupt(r row) (got, bad string) {
	cmd := exec.Command(shoalBin, m.args()...)
	cmd.Env = m.env
	var said synced.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill() }()
	for deadline := time.Now().Add(r.within + slack); !strings.Contains(said.String(), r.text); time.Sleep(
		20 * time.Millisecond) {
		if time.Now().After(deadline) {
			return "silent", said.String()
		}
	}
	_ = cmd.Process.Signal(syscall.SIGINT)
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case <-ended:
		return "interrupted", ""
	case <-time.After(slack):
		return "goes on", said.String()
	}
}

// certificate returns the configuration of a server with a certificate that nobody has signed.
func certificate() *tls.Config {
	s := httptest.NewUnstartedServer(http.NotFoundHandler())
	s.StartTLS()
	defer s.Close()
	return &tls.Config{Certificates: s.TLS.Certificates, MinVersion: tls.VersionTLS12}
}
