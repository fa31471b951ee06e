package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/settings"
)

// mainEnv makes this test's own binary the program.
const mainEnv = "SHOAL_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(mainEnv) != "" {
		main()
	}
	settled = true // the settings of whoever runs the tests are not theirs
	os.Exit(m.Run())
}

// shell runs the real program, with all that it starts, in a folder of its own, which is its home.
type shell struct {
	t   *testing.T
	bin string
	dir string
	env []string
}

func newShell(t *testing.T) *shell {
	t.Helper()
	bin, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "shoal") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return &shell{t, bin, dir, nil}
}

func (s *shell) path(name string) string { return filepath.Join(s.dir, name) }

func (s *shell) write(name, text string) string {
	s.t.Helper()
	if err := os.MkdirAll(filepath.Dir(s.path(name)), 0o755); err != nil {
		s.t.Fatal(err)
	}
	if err := os.WriteFile(s.path(name), []byte(text), 0o644); err != nil {
		s.t.Fatal(err)
	}
	return s.path(name)
}

// command is a verb with variables beside the home.
func (s *shell) command(env []string, args ...string) *exec.Cmd {
	cmd := exec.Command(s.bin, args...)
	cmd.Dir = s.dir
	cmd.Env = append([]string{"HOME=" + s.dir, "PATH=" + os.Getenv("PATH"),
		"AWS_EC2_METADATA_DISABLED=true", mainEnv + "=1", "GORACE=atexit_sleep_ms=0 " + os.Getenv("GORACE")}, env...)
	return cmd
}

func (s *shell) run(env []string, args ...string) (stdout, stderr string, code int) {
	s.t.Helper()
	cmd := s.command(env, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		s.t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// must is run for what has to succeed.
func (s *shell) must(env []string, args ...string) string {
	s.t.Helper()
	out, errs, code := s.run(env, args...)
	if code != 0 {
		s.t.Fatalf("shoal %s: exit code %d\n%s%s", strings.Join(args, " "), code, out, errs)
	}
	return out
}

// What a verb does follows flag, environment, file of --config, and default, in this order.
func TestPrecedenceInTheBinary(t *testing.T) {
	s := newShell(t)
	file := s.write("own.yaml", "n: 7\norder:\n  n: 5\n  shard-samples: 1\n")
	s.write(".config/shoal/shoal.yaml", "order: {n: 6}\n")
	verb := []string{"order", "sequential"}
	for _, tc := range []struct {
		env  []string
		args []string
		want int // lines
	}{
		{nil, nil, 6},
		{[]string{"SHOAL_CONFIG=own.yaml"}, nil, 5},
		{[]string{"SHOAL_CONFIG=own.yaml"}, []string{"--config", s.path(".config/shoal/shoal.yaml")}, 6},
		{nil, []string{"--config=" + file}, 5},
		{[]string{"SHOAL_N=4"}, nil, 4},
		{[]string{"SHOAL_N="}, nil, 6},
		{[]string{"SHOAL_N=4"}, []string{"--n", "3"}, 3},
		{[]string{"SHOAL_N=4", "SHOAL_CONFIG=own.yaml"}, []string{"--n=0"}, 0},
		{[]string{"XDG_CONFIG_HOME=" + s.path("elsewhere"), "SHOAL_N=1"}, nil, 1},
	} {
		out := s.must(tc.env, append(slices.Clone(verb), tc.args...)...)
		if got := strings.Count(out, "\n"); got != tc.want {
			t.Errorf("%v %v: %d lines, want %d", tc.env, tc.args, got, tc.want)
		}
	}
	// A daemon's recode says nothing to pack, whose own is true or false.
	s.write("recode.yaml", "recode: on\n")
	s.write("src/a/1.jpg", "no picture")
	env := []string{"SHOAL_CONFIG=recode.yaml", "XDG_CACHE_HOME=" + s.path("cache")}
	s.must(env, "pack", "file://"+s.path("src"), "file://"+s.path("packed"))
	s.must(append(env, "SHOAL_RECODE=off"), "config")
	// Nor does it switch off what pack takes in its place.
	s.write("recode.yaml", "pack:\n  decode: true\n")
	if out := s.must(append(env, "SHOAL_RECODE=auto"), "config", "pack"); !regexp.MustCompile(`decode +true`).MatchString(out) {
		t.Errorf("decode in the file, and recode of daemons in the environment: %s", out)
	}
	// The flag may stand before the verb, as other tools take it.
	if out := s.must(nil, "--config", file, "order", "sequential"); strings.Count(out, "\n") != 5 {
		t.Errorf("--config before the verb: %q", out)
	}
}

func TestWrongSettingsInTheBinary(t *testing.T) {
	s := newShell(t)
	s.write("unknown.yaml", "cache-dir: /x\nmount:\n  ordr: torch\n")
	s.write("value.yaml", "warm:\n  cache-size: much\n")
	s.write("order.yaml", "# the order\norder: torhc:seed=7\n")
	s.write("late.yaml", "near: file:///x\n")
	s.write("removed.yaml", "mount:\n  gets-per-hour: 5000\n")
	s.write("top.yaml", "memory: auto\nepoch: 3\nrefresh: true\nfeed: {epoch: 2}\n")
	s.write("all.yaml", "warm:\n  cache-size: much\n  ordr: torch\n")
	s.write("good.yaml", "cache-dir: /x\nmemory: auto\nserve: {listen: [unix:///a, unix:///b]}\n"+
		"store: get=0.0004/1000\nmount: {store: get=0.0005/1000}\n")
	for _, tc := range []struct {
		env  []string
		args []string
		want string
	}{
		{nil, []string{"mount", "--config=unknown.yaml", "s3://b/p", "m"},
			"shoal: unknown.yaml:3: ordr: no such setting; did you mean order?\n"},
		{nil, []string{"warm", "--config=unknown.yaml", "s3://b/p"},
			"shoal: unknown.yaml:3: ordr: no such setting; did you mean order?\n"},
		{nil, []string{"warm", "--config=value.yaml", "s3://b/p"},
			`shoal: value.yaml:2: cache-size: "much" is not a size (write 512MiB, 20GiB or 1.5GB, a part such as 80%, or auto)` + "\n"},
		{nil, []string{"mount", "--config=order.yaml", "s3://b/p", "m"}, "shoal: order.yaml:2: order: "},
		{nil, []string{"mount", "--config=late.yaml", "s3://bucket/p", "m"},
			"shoal: --near file:///x/: give s3://BUCKET/PREFIX (--near is from late.yaml:1)\n"},
		{[]string{"SHOAL_NEAR=file:///x"}, []string{"mount", "s3://bucket/p", "m"},
			"shoal: --near file:///x/: give s3://BUCKET/PREFIX (--near is from env SHOAL_NEAR)\n"},
		{[]string{"SHOAL_MEMORY=lots"}, []string{"mount", "s3://b/p", "m"},
			`shoal: SHOAL_MEMORY=lots: "lots" is not a size`},
		{[]string{"SHOAL_SUPERVISE=true"}, []string{"mount", "s3://b/p", "m"},
			"shoal: SHOAL_SUPERVISE was removed: give --daemon=supervised; in the foreground the service manager " +
				"restarts it\n"},
		{nil, []string{"mount", "--config=removed.yaml", "s3://b/p", "m"},
			"shoal: removed.yaml:2: gets-per-hour was removed: give --store gets-per-hour=N\n"},
		{[]string{"SHOAL_NODES=2"}, []string{"mount", "s3://b/p", "m"},
			"shoal: SHOAL_NODES was removed from shoal mount: a node begins once no more have joined for 1.5 s; " +
				"unset it here\n"},
		{[]string{"SHOAL_NODES=2"}, []string{"warm", "s3://b/p"}, "shoal: SHOAL_NODES was removed from shoal warm: "},
		{[]string{"SHOAL_WORKERS=2"}, []string{"serve", "s3://b/p"},
			"shoal: SHOAL_WORKERS was removed from shoal serve: it is one for each processor"},
		{[]string{"SHOAL_WEAK_ETAG=1"}, []string{"serve", "s3://b/p"},
			"shoal: SHOAL_WEAK_ETAG was removed: give --store weak-etag\n"},
		{nil, []string{"mount", "--config=top.yaml", "s3://b/p", "m"},
			"shoal: top.yaml:2: epoch was removed from shoal mount: write it into the order, such as --order " +
				"torch:seed=7,epoch=3; " +
				"move this line into the section of a verb that has it; top.yaml:3: refresh was removed from shoal " +
				"mount: "},
		{nil, []string{"config", "--check", "top.yaml"}, "shoal: top.yaml:2: epoch was removed from shoal mount: "},
		{nil, []string{"doctor", "--weak-etag"}, "shoal: --weak-etag was removed: give --store weak-etag\n"},
		{[]string{"SHOAL_CACHEDIR=/x"}, []string{"mount", "s3://b/p", "m"},
			"shoal: SHOAL_CACHEDIR: no such variable; did you mean SHOAL_CACHE_DIR?\n"},
		{nil, []string{"mount", "--config=none.yaml", "s3://b/p", "m"},
			"shoal: --config none.yaml: there is no such file\n"},
		{[]string{"SHOAL_CONFIG=none.yaml"}, []string{"stat", "m"},
			"shoal: SHOAL_CONFIG none.yaml: there is no such file\n"},
		{nil, []string{"config", "--check", "unknown.yaml"},
			"shoal: unknown.yaml:3: ordr: no such setting; did you mean order?\n"},
		{nil, []string{"config", "--check", "all.yaml"}, "shoal: all.yaml:3: ordr: no such setting (see: shoal " +
			"config --example); all.yaml:2: cache-size: \"much\" is not a size"},
		{nil, []string{"config", "--check", "value.yaml"}, "shoal: value.yaml:2: cache-size: "},
		{nil, []string{"config", "--check", "none.yaml"}, "shoal: --check none.yaml: there is no such file\n"},
		{nil, []string{"config", "--check", ""}, "shoal: --check : there is no such file\n"},
		{nil, []string{"config", "--check", "."}, "shoal: configuration file: read .: is a directory\n"},
		{nil, []string{"mount", "--config=.", "s3://b/p", "m"}, "shoal: configuration file: read .: is a directory\n"},
		{nil, []string{"config", "nonesuch"}, "shoal: there is no verb \"nonesuch\" (see: shoal --help)\n"},
		{nil, []string{"config", "version"}, "shoal: shoal version has no settings\n"},
		{nil, []string{"config", "mount", "--nonesuch"},
			"shoal: shoal mount has no flag --nonesuch (see: shoal mount --help)\n"},
		{[]string{"SHOAL_CACHEDIR=/x", "SHOAL_FRACTION=half"}, []string{"config"},
			"shoal: SHOAL_CACHEDIR: no such variable; did you mean SHOAL_CACHE_DIR?; SHOAL_FRACTION=half: \"half\" " +
				"is not a number (for shoal warm)\n"},
	} {
		out, errs, code := s.run(tc.env, tc.args...)
		if code != 2 || !strings.HasPrefix(errs, tc.want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%v shoal %v: exit code %d\n%s%swant %s", tc.env, tc.args, code, out, errs, tc.want)
		}
	}
	s.must(nil, "config", "--check", "good.yaml")
	// What has no settings does not mind, and what environment and file have for other verbs does no harm.
	s.must([]string{"SHOAL_CONFIG=none.yaml", "SHOAL_CACHEDIR=x"}, "version")
	s.must([]string{"SHOAL_FRACTION=half", "SHOAL_NODES=2"}, "order", "sequential", "--n=1")
	s.must([]string{"SHOAL_BATCH=64", "SHOAL_JSON=1", "SHOAL_EPOCHS=3"}, "order", "sequential", "--n=1")
	s.must([]string{"SHOAL_MOUNT=/none"}, "order", "sequential", "--n=1")
	s.must([]string{"SHOAL_CONFIG=top.yaml"}, "order", "sequential", "--n=1")
	s.must([]string{"SHOAL_WORKERS=2"}, "config", "mount") // which never had it
}

func TestConfigShows(t *testing.T) {
	s := newShell(t)
	s.write("c.yaml", "cache-dir: /nvme\nserve:\n  listen: [unix:///a, \"tcp://127.0.0.1:7070\"]\nmount: {order: "+
		"'torch:seed=7'}\n")
	env := []string{
		"SHOAL_CONFIG=c.yaml", "SHOAL_MEMORY=80%", "SHOAL_FEED_TOKEN=hush-token-of-32-characters-xxxxxx",
		"SHOAL_ENCRYPTION_KEY=hush-key",
		"AWS_ACCESS_KEY_ID=id", "AWS_SECRET_ACCESS_KEY=hush-aws", "AWS_SESSION_TOKEN=hush-session",
		"AWS_ENDPOINT_URL=http://u:hush-url@127.0.0.1:1",
	}
	var r configReport
	text := s.must(env, "config", "serve", "--json", "--zone=3", "s3://bucket/prefix")
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Fatal(err)
	}
	if r.Version != 1 || r.File != "c.yaml" || r.Verb != "serve" {
		t.Errorf("%+v", r)
	}
	got := map[string]settings.Setting{}
	for _, row := range r.Settings {
		got[row.Name] = row
	}
	for name, want := range map[string]settings.Setting{
		"cache-dir": {Name: "cache-dir", Env: "SHOAL_CACHE_DIR", Value: "/nvme", From: "file", Where: "c.yaml:1"},
		"listen": {Name: "listen", Env: "SHOAL_LISTEN", Value: "unix:///a,tcp://127.0.0.1:7070", List: []string{
			"unix:///a", "tcp://127.0.0.1:7070"}, From: "file", Where: "c.yaml:3"},
		"memory":     {Name: "memory", Env: "SHOAL_MEMORY", Value: "80%", From: "env", Where: "SHOAL_MEMORY"},
		"zone":       {Name: "zone", Env: "SHOAL_ZONE", Value: "3", From: "flag"},
		"cache-size": {Name: "cache-size", Env: "SHOAL_CACHE_SIZE", Value: "20 GiB", From: "default"},
		"order":      {Name: "order", Env: "SHOAL_ORDER", Value: "auto", From: "default"},
	} {
		if fmt.Sprintf("%+v", got[name]) != fmt.Sprintf("%+v", want) {
			t.Errorf("%+v, want %+v", got[name], want)
		}
	}
	for _, args := range [][]string{{"config"}, {"config", "--json"}, {"config", "mount"}, {"config", "serve"}} {
		if out := s.must(env, args...); strings.Contains(out, "hush") {
			t.Errorf("shoal %v shows a secret:\n%s", args, out)
		}
	}
	if out := s.must(env, "config"); !regexp.MustCompile(`(?m)^cache-dir +/nvme +c\.yaml:1 +.*, ckpt, .*mount.*warm`).MatchString(
		out) || !strings.Contains(out, "SHOAL_FEED_TOKEN") {
		t.Errorf("shoal config shows\n%s", out)
	}
}

// A daemon, the process that supervises it, and the daemon that another verb attaches to see what the first
// process read, whatever has become of the file.
func TestSettingsArePassedOn(t *testing.T) {
	s := newShell(t)
	for i := range 12 {
		s.write(fmt.Sprintf("src/class/%02d.jpg", i), strings.Repeat("x", 1000+i))
		s.write(fmt.Sprintf("src2/class/%02d.jpg", i), "y")
	}
	first := "cache-dir: " + s.path("cache") + "\nmemory: 234MiB\nserve:\n  listen: [unix://" + s.path("a.sock") +
		"]\n  daemon: supervised\n"
	file := s.write("c.yaml", first)
	type stats struct {
		PID    int    `json:"pid"`
		Source string `json:"source"`
		Memory struct {
			Limit int64 `json:"ledger_limit"`
		} `json:"memory"`
	}
	stat := func(sock string) (st stats, err error) {
		out, errs, code := s.run(nil, "stat", "unix://"+s.path(sock), "--json")
		if code != 0 {
			return st, errors.New(errs)
		}
		return st, json.Unmarshal([]byte(out), &st)
	}
	s.must(nil, "serve", "--config", "c.yaml", "file://"+s.path("src"))
	before, err := stat("a.sock")
	if err != nil {
		t.Fatal(err)
	}
	if shown, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", before.PID)); err != nil ||
		!bytes.HasSuffix(shown, []byte("\x00serve\x00--config\x00c.yaml\x00file://"+s.path("src")+"\x00")) {
		t.Errorf("other users see %q, %v", shown, err) // and not what environment and file hold
	}
	t.Cleanup(func() {
		if st, err := stat("a.sock"); err == nil {
			_ = syscall.Kill(st.PID, syscall.SIGTERM)
			for deadline := time.Now().Add(time.Minute); syscall.Kill(st.PID, 0) == nil &&
				time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
			}
		}
	})
	s.write("c.yaml", "this: [is no configuration")
	if err := syscall.Kill(before.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	var after stats
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if after, err = stat("a.sock"); err == nil && after.PID != before.PID {
			break
		}
		if time.Now().After(deadline) {
			log, _ := os.ReadFile(s.path("cache/shoal.log"))
			t.Fatalf("the daemon is not back: %v\n%s", err, log)
		}
	}
	// An eighth is the pictures' C code's, and the manifest is in it, too.
	if want := int64(234-64) << 20 * 3 / 4 * 7 / 8; after.Memory.Limit > want || after.Memory.Limit < want-1<<20 {
		t.Errorf("the ledger is %d, and --memory of the file leaves %d", after.Memory.Limit, want)
	}
	if after.Memory.Limit != before.Memory.Limit || after.Source != before.Source {
		t.Errorf("the daemon is back with %+v, and was %+v", after, before)
	}

	// Another verb attaches, with the settings of its own environment and file.
	s.write("c.yaml", first)
	s.must([]string{"SHOAL_CONFIG=" + file, "SHOAL_LISTEN=unix://" + s.path("b.sock"), "SHOAL_S3_KEYS=none"},
		"serve", "file://"+s.path("src2"))
	second, err := stat("b.sock")
	if err != nil {
		t.Fatal(err)
	}
	if second.PID != after.PID || !strings.HasSuffix(second.Source, "src2/") {
		t.Errorf("the second feed is %+v, of daemon %+v", second, after)
	}
	// A standing setting is no contradiction of a flag, in the daemon neither; an argument goes over it.
	s.write("list", "class/03.jpg\n")
	if out := s.must([]string{"SHOAL_FRACTION=0.5", "SHOAL_CACHE_DIR=" + s.path("cache")}, "warm",
		"file://"+s.path("src"), "--list", "list"); !strings.Contains(out, " extents of ") {
		t.Errorf("warm says %q", out)
	}
	s.must([]string{"SHOAL_LIST=none", "SHOAL_CACHE_DIR=" + s.path("cache")}, "warm", "file://"+s.path("src"),
		"--fraction=1")
	for _, args := range [][]string{{"cache", "ls", s.path("cache")}, {"cache", "ls"}} {
		out := s.must([]string{"SHOAL_CACHE_DIR=" + s.path("cache"), "SHOAL_JSON=true"}, args...)
		var list []cacheEntry
		if err := json.Unmarshal([]byte(out), &list); err != nil || len(list) != 2 {
			t.Errorf("shoal %v: %v\n%s", args, err, out)
		}
	}
	// A relative source is in the user's folder, whichever is the daemon's; the digits of an id are one, too.
	pin := s.command(nil, "cache", "pin", s.path("cache"), ".")
	pin.Dir = s.path("src2")
	if out, err := pin.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	var list []cacheEntry
	if err := json.Unmarshal([]byte(s.must(nil, "cache", "ls", s.path("cache"), "--json")), &list); err != nil {
		t.Error(err)
	}
	for _, e := range list {
		if e.Pinned != strings.HasSuffix(e.Source, "/src2/") {
			t.Errorf("%+v", e)
		}
		s.must(nil, "cache", "unpin", s.path("cache"), e.ID[:8])
	}
	// What is wrong in the daemon is told with the place that it comes from.
	_, errs, code := s.run([]string{"SHOAL_CONFIG=" + file, "SHOAL_NEAR=file:///x",
		"SHOAL_LISTEN=unix://" + s.path("c.sock")}, "serve", "file://"+s.path("src2"))
	if code != 2 || !strings.Contains(errs, "(--near is from env SHOAL_NEAR)") {
		t.Errorf("exit code %d: %s", code, errs)
	}
}

// commands calls do for every command that a user sees.
func commands(c *cobra.Command, do func(*cobra.Command)) {
	if c.Hidden {
		return
	}
	do(c)
	for _, sub := range c.Commands() {
		commands(sub, do)
	}
}

// Every verb and every flag is explained.
func TestHelp(t *testing.T) {
	commands(root(), func(c *cobra.Command) {
		if c.Short == "" || c.Long == "" && c.Example == "" && len(c.Commands()) == 0 {
			t.Errorf("%s: Short, and Long or Example, are wanted", c.CommandPath())
		}
		if strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: Short is no sentence", c.CommandPath())
		}
		if c.PersistentPreRun != nil || c.PersistentPreRunE != nil && c.HasParent() {
			t.Errorf("%s: its PersistentPreRun would keep the settings from being applied", c.CommandPath())
		}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Hidden {
				return
			}
			if f.Usage == "" || strings.HasSuffix(f.Usage, ".") {
				t.Errorf("%s --%s: the usage is %q", c.CommandPath(), f.Name, f.Usage)
			}
			if f.Name != strings.ToLower(f.Name) || strings.Contains(f.Name, "_") {
				t.Errorf("%s --%s: names of flags are lower case with hyphens, for their variables",
					c.CommandPath(), f.Name)
			}
			if strings.Contains(f.Name, "secret") || strings.Contains(f.Name, "password") ||
				strings.HasSuffix(f.Name, "token") {
				t.Errorf("%s --%s: secrets are given by file or by variable", c.CommandPath(), f.Name)
			}
		})
	})
}

// The example holds every setting, and each at a value that its flag takes.
func TestExampleIsAFile(t *testing.T) {
	var b, file bytes.Buffer
	if err := schemaOf(root()).WriteExample(&b); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(b.String()) {
		file.WriteString(strings.Replace(line, "#", "", 1))
	}
	schema := schemaOf(root())
	parsed, err := schema.Parse("example", file.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if err := schema.Check(parsed); err != nil {
		t.Error(err)
	}
	settings.Walk(schema.Root, func(c *cobra.Command) {
		fresh := schemaOf(root())
		same, _, err := fresh.Root.Find(strings.Fields(c.CommandPath())[1:])
		if err != nil {
			t.Fatal(err)
		}
		if err := fresh.Apply(same, nil, parsed); err != nil {
			t.Error(err)
		}
		for _, f := range settings.Flags(same) {
			if settings.OriginOf(f).Kind != settings.InFile {
				t.Errorf("%s --%s is not in the example", c.CommandPath(), f.Name)
			}
		}
	})
}

// The file that docs/configuration.md shows is one.
func TestDocumentedFile(t *testing.T) {
	text, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllSubmatch(text, -1)
	for _, block := range blocks {
		schema := schemaOf(root())
		file, err := schema.Parse("configuration.md", block[1])
		if err == nil {
			err = schema.Check(file)
		}
		if err != nil {
			t.Error(err)
		}
	}
	if len(blocks) == 0 {
		t.Error("there is none")
	}
	for _, name := range append(slices.Clone(secretEnv), configEnv, s3ConnectionsEnv, daemon.DrainEnv, pprofEnv,
		"SHOAL_DEBUG") {
		if !bytes.Contains(text, []byte("`"+name+"`")) {
			t.Errorf("it does not name %s", name)
		}
	}
}

// Every SHOAL_ variable that the project reads is a setting or is known to be none; a new one must not look
// like a misspelt setting.
func TestVariablesAreKnown(t *testing.T) {
	schema := schemaOf(root())
	word := regexp.MustCompile(`\bSHOAL_[A-Z0-9_]*[A-Z0-9]\b`)
	reads := regexp.MustCompile(
		`(Getenv|LookupEnv|[eE]nviron|getenv|environ\.get)[(\[]"SHOAL_[A-Z0-9_]+"|Env += "SHOAL_[A-Z0-9_]+"|^\s+SHOAL_[A-Z_]+=`)
	seen := map[string]string{} // to where
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() && (name == "bin" || name == "testdata" || strings.HasPrefix(name, ".") && name != "..") {
			return filepath.SkipDir
		}
		if ext := filepath.Ext(name); d.IsDir() || ext != ".go" && ext != ".py" && name != "Makefile" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, "SHOAL_") && reads.MatchString(line) {
				for _, v := range word.FindAllString(line, -1) {
					seen[v] = path
				}
			}
		}
		return nil
	})
	if err != nil || len(seen) < 10 {
		t.Errorf("%d variables were seen: %v", len(seen), err)
	}
	for v, path := range seen {
		if err := schema.Apply(schema.Root, []string{v + "=1"}, nil); err != nil {
			t.Errorf("%s: %v: name it in reservedEnv", path, err)
		}
	}
}
