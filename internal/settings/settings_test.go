package settings

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// program returns a command line with what flags can be: shared ones, lists, a name that is verb and flag.
func program() *Schema {
	run := func(*cobra.Command, []string) {}
	root := &cobra.Command{Use: "shoal", Run: run}
	common := func(c *cobra.Command) *cobra.Command {
		c.Flags().String("cache-dir", "", "folder for the cache")
		c.Flags().Duration("timeout", 4e9, "how long")
		c.Flags().Bool("daemon", false, "go to the background")
		return c
	}
	mount := common(&cobra.Command{Use: "mount SOURCE", Short: "Mount", Run: run})
	mount.Flags().Int("epoch", -1, "epoch")
	serve := common(&cobra.Command{Use: "serve SOURCE", Short: "Serve", Run: run})
	serve.Flags().StringArray("listen", []string{"unix:///run/feed.sock"}, "addresses")
	serve.Flags().String("mount", "", "mount here too")
	warm := common(&cobra.Command{Use: "warm", Short: "Warm", Run: run})
	warm.Flags().Float64("fraction", 1, "part")
	cache := &cobra.Command{Use: "cache", Short: "Cache", Run: run}
	cache.PersistentFlags().String("dir", "", "the directory")
	ls := &cobra.Command{Use: "ls", Short: "List", Run: run}
	ls.Flags().Bool("json", false, "print JSON")
	cache.AddCommand(ls)
	hidden := &cobra.Command{Use: "rig", Hidden: true, Run: run}
	hidden.Flags().Bool("inner", false, "not a setting")
	root.PersistentFlags().String("config", "", "the file")
	CommandLineOnly(root.PersistentFlags().Lookup("config"))
	root.AddCommand(mount, serve, warm, cache, hidden)
	return &Schema{
		Root:     root,
		Reserved: func(name string) bool { return name == "SHOAL_EPOCHE" },
		Checks: map[string]func(string) error{"dir": func(text string) error {
			if !strings.HasPrefix(text, "/") {
				return errors.New("give an absolute path")
			}
			return nil
		}},
	}
}

func command(t testing.TB, s *Schema, args ...string) *cobra.Command {
	t.Helper()
	c, rest, err := s.Root.Find(args)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.ParseFlags(rest); err != nil {
		t.Fatal(err)
	}
	return c
}

const file = `# a comment
cache-dir: /top
timeout: 5s
cache:
  dir: /caches
  ls:
    json: true
serve:
  cache-dir: /serve   # of serve alone
  listen:
    - unix:///a.sock
    - tcp://127.0.0.1:7070
  mount: /mnt/train
mount:
  epoch: 7
`

// applied is a command whose flags have been set from arguments, environment and file.
func applied(t *testing.T, s *Schema, args, env []string) *cobra.Command {
	t.Helper()
	f, err := s.Parse("shoal.yaml", []byte(file))
	if err != nil {
		t.Fatal(err)
	}
	c := command(t, s, args...)
	if err := s.Apply(c, env, f); err != nil {
		t.Fatal(err)
	}
	return c
}

// Of two flags that exclude each other, what comes from lower down is left out, and a conflict of equals stays.
func TestRivals(t *testing.T) {
	for _, tc := range []struct {
		args, env       []string
		timeout, daemon string
	}{
		{[]string{"mount", "--timeout=9s"}, []string{"SHOAL_DAEMON=1"}, "9s", "false"},
		{[]string{"mount", "--daemon"}, []string{"SHOAL_TIMEOUT=9s"}, "4s", "true"},
		{[]string{"mount"}, []string{"SHOAL_DAEMON=1"}, "4s", "true"},                      // over the file's
		{[]string{"mount", "--daemon=false"}, []string{"SHOAL_TIMEOUT=9s"}, "9s", "false"}, // it excludes nothing
		{[]string{"mount"}, nil, "5s", "false"},
		{[]string{"mount", "--daemon", "--timeout=9s"}, nil, "9s", "true"},
	} {
		s := program()
		s.Rivals = [][2]string{{"timeout", "daemon"}, {"timeout", "nonesuch"}}
		c := applied(t, s, tc.args, tc.env)
		timeout, daemon := c.Flags().Lookup("timeout"), c.Flags().Lookup("daemon")
		if timeout.Value.String() != tc.timeout || daemon.Value.String() != tc.daemon ||
			timeout.Changed != (tc.timeout != "4s") || daemon.Changed != (tc.daemon == "true" || slices.Contains(tc.args, "--daemon=false")) {
			t.Errorf("%v %v: %+v %+v", tc.args, tc.env, timeout, daemon)
		}
	}
}

func TestPrecedence(t *testing.T) {
	for _, tc := range []struct {
		args, env []string
		flag      string
		want      string
		from      string
	}{
		{[]string{"mount"}, nil, "daemon", "false", "default"},
		{[]string{"mount"}, nil, "cache-dir", "/top", "shoal.yaml:2"},
		{[]string{"mount"}, []string{"SHOAL_CACHE_DIR=/env"}, "cache-dir", "/env", "env SHOAL_CACHE_DIR"},
		{[]string{"mount", "--cache-dir=/flag"}, []string{"SHOAL_CACHE_DIR=/env"}, "cache-dir", "/flag", "flag"},
		{[]string{"mount", "--cache-dir="}, []string{"SHOAL_CACHE_DIR=/env"}, "cache-dir", "", "flag"},
		{[]string{"mount"}, []string{"SHOAL_CACHE_DIR="}, "cache-dir", "/top", "shoal.yaml:2"},
		{[]string{"mount"}, []string{"SHOAL_CACHE_DIR=a=b"}, "cache-dir", "a=b", "env SHOAL_CACHE_DIR"},
		{[]string{"serve"}, nil, "cache-dir", "/serve", "shoal.yaml:9"},
		{[]string{"serve"}, nil, "timeout", "5s", "shoal.yaml:3"},
		{[]string{"serve"}, nil, "listen", "[unix:///a.sock,tcp://127.0.0.1:7070]", "shoal.yaml:10"},
		{[]string{"serve"}, []string{"SHOAL_LISTEN=unix:///b,unix:///c"}, "listen", "[unix:///b,unix:///c]",
			"env SHOAL_LISTEN"},
		{[]string{"serve", "--listen=unix:///f"}, []string{"SHOAL_LISTEN=unix:///b"}, "listen", "[unix:///f]", "flag"},
		{[]string{"serve"}, nil, "mount", "/mnt/train", "shoal.yaml:13"},
		{[]string{"serve"}, []string{"SHOAL_DAEMON=true"}, "daemon", "true", "env SHOAL_DAEMON"},
		{[]string{"mount"}, nil, "epoch", "7", "shoal.yaml:15"},
		{[]string{"cache", "ls"}, nil, "dir", "/caches", "shoal.yaml:5"},
		{[]string{"cache", "ls"}, nil, "json", "true", "shoal.yaml:7"},
		{[]string{"cache", "ls", "--dir=x"}, nil, "dir", "x", "flag"},
		{[]string{"cache", "ls"}, []string{"SHOAL_JSON=0"}, "json", "false", "env SHOAL_JSON"},
	} {
		t.Run(strings.Join(append(tc.args, tc.flag), " "), func(t *testing.T) {
			s := program()
			c := applied(t, s, tc.args, tc.env)
			flag := c.Flags().Lookup(tc.flag)
			if got := flag.Value.String(); got != tc.want {
				t.Errorf("%s is %q, want %q", tc.flag, got, tc.want)
			}
			if got := OriginOf(flag).String(); got != tc.from {
				t.Errorf("%s is from %s, want %s", tc.flag, got, tc.from)
			}
			if flag.Changed != (tc.from != "default") {
				t.Errorf("Changed is %v", flag.Changed)
			}

			// The same command line with what was found passed explicitly, and nothing else to read.
			again := program()
			path, rest, err := s.Root.Find(tc.args)
			if err != nil {
				t.Fatal(err)
			}
			args, standing := Args(c)
			all := append(append(commandPath(path), args...), rest...)
			c = command(t, again, all...)
			if err := Standing(c, standing); err != nil {
				t.Fatal(err)
			}
			if got := OriginOf(c.Flags().Lookup(tc.flag)).Kind == Flag; got != (tc.from == "flag") {
				t.Errorf("%q: given is %v", all, got)
			}
			if got := c.Flags().Lookup(tc.flag).Value.String(); got != tc.want {
				t.Errorf("%q: %s is %q, want %q", all, tc.flag, got, tc.want)
			}
		})
	}
}

func TestWrongFiles(t *testing.T) {
	for _, tc := range []struct{ name, text, want string }{
		{"unknown", "cache-dri: /x", "f:1: cache-dri: no such setting; did you mean cache-dir?"},
		{"second line", "timeout: 3s\ncachedir: /x", "f:2: cachedir: no such setting; did you mean cache-dir?"},
		{"underscores", "cache_dir: /x", "f:1: cache_dir: no such setting; write cache-dir"},
		{"as a variable", "SHOAL_CACHE_DIR: /x", "f:1: SHOAL_CACHE_DIR: no such setting; write cache-dir"},
		{"as a flag", "--cache-dir: /x", "f:1: --cache-dir: no such setting; write cache-dir"},
		{"far from all", "zzzzzzzz: 1", "f:1: zzzzzzzz: no such setting (see: shoal config --example)"},
		{"a verb", "muont: {epoch: 1}", "f:1: muont: no such setting; did you mean mount?"},
		{"in a section", "mount:\n  epohc: 1", ""},
		{"of another verb", "mount:\n  fraction: 1",
			"f:2: fraction: shoal mount has no such setting, but other verbs have it: write it in the section of " +
				"one, or at the top for all"},
		{"of no setting", "config: /x", "f:1: config: no such setting (see: shoal config --example)"},
		{"of a hidden verb", "inner: true", "f:1: inner: no such setting (see: shoal config --example)"},
		{"twice", "timeout: 1s\ndaemon: true\ntimeout: 2s", "f:3: timeout: it is already set in line 1"},
		{"no value", "timeout:", `f:1: timeout: no value; leave the line out for the default, or write "" for none`},
		{"tilde", "timeout: ~", `f:1: timeout: no value; leave the line out for the default, or write "" for none`},
		{"a mapping", "timeout: {a: 1}", "f:1: timeout: one value is wanted here: a text, a number, true or false"},
		{"a list", "timeout: [1s, 2s]", "f:1: timeout: a list where one value is expected"},
		{"a list of lists", "serve: {listen: [[a]]}",
			"f:1: listen: one value is wanted here: a text, a number, true or false"},
		{"a verb with a value", "warm: true",
			"f:1: warm: the settings of a verb are a mapping: indented lines such as cache-dir: /nvme/shoal"},
		{"no mapping", "- a\n- b", "f:1: a configuration file is a mapping: lines such as cache-dir: /nvme/shoal"},
		{"a text", "cache-dir", "f:1: a configuration file is a mapping: lines such as cache-dir: /nvme/shoal"},
		{"no YAML", "a: b: c", "f:1: mapping values are not allowed in this context"},
		{"two documents", "timeout: 1s\n---\ntimeout: 2s", "f:2: a second document; a configuration file has only one"},
		{"a tag", "timeout: !!binary aGk=", "f:1: timeout: the tag !!binary is not known here"},
		{"a key that is none", "[a, b]: c", "f:1: a key is the name of a setting or of a verb"},
		{"a merge", "<<: {timeout: 1s}", "f:1: <<: no such setting (see: shoal config --example)"},
		{"all that is wrong", "a: 1\nb: 2",
			"f:1: a: no such setting (see: shoal config --example)\nf:2: b: no such setting (see: shoal config " +
				"--example)"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := program().Parse("f", []byte(tc.text))
			if !errors.Is(err, ErrWrong) {
				t.Fatalf("error %v, want ErrWrong", err)
			}
			if tc.want != "" && err.Error() != tc.want {
				t.Errorf("error\n%v\nwant\n%s", err, tc.want)
			}
		})
	}
}

func TestWrongValues(t *testing.T) {
	for _, tc := range []struct{ name, file, env, want string }{
		{"duration", "timeout: soon", "", `f:1: timeout: "soon" is not a duration (write 90s, 15m or 4h)`},
		{"bool", "daemon: yes", "", `f:1: daemon: "yes" is neither true nor false`},
		{"number", "mount:\n  epoch: many", "", `f:2: epoch: "many" is not a number`},
		{"range", "mount:\n  epoch: 99999999999999999999", "", `f:2: epoch: 99999999999999999999 is out of range`},
		{"variable", "", "SHOAL_EPOCH=many", `SHOAL_EPOCH=many: "many" is not a number`},
		{"name of a variable", "", "SHOAL_CACHEDIR=/x",
			`SHOAL_CACHEDIR: no such variable; did you mean SHOAL_CACHE_DIR?`},
		{"small letters", "", "SHOAL_cache_dir=/x", `SHOAL_cache_dir: no such variable; did you mean SHOAL_CACHE_DIR?`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := program()
			f, err := s.Parse("f", []byte(tc.file))
			if err != nil {
				t.Fatal(err)
			}
			err = s.Apply(command(t, s, "mount"), []string{tc.env}, f)
			if !errors.Is(err, ErrWrong) || err.Error() != tc.want {
				t.Errorf("error %v, want %s", err, tc.want)
			}
		})
	}
}

func TestForeignVariables(t *testing.T) {
	s := program()
	c := command(t, s, "mount")
	if err := s.Apply(c, []string{
		"SHOAL_SERVICE_HOST=10.0.0.1", "SHOAL_SERVICE_PORT=80", "SHOAL_PORT=tcp://10.0.0.1:80",
		"SHOAL_PORT_80_TCP_ADDR=10.0.0.1",
		"SHOAL_CACHE_DIR_SERVICE_PORT_HTTP=1", // services of Kubernetes
		"SHOAL_EPOCHE=x",                      // reserved
		"SHOAL_TRAINER_HOME=/x",               // somebody's own
		"SHOAL_FRACTION=much",                 // of another verb
		"XSHOAL_EPOCH=1", "SHOAL", "",
	}, nil); err != nil {
		t.Error(err)
	}
	if args, _ := Args(c); len(args) != 0 {
		t.Errorf("%s were set", args)
	}
}

func TestAnchors(t *testing.T) {
	s := program()
	f, err := s.Parse("f", []byte(`
mount: &m
  cache-dir: &d /nvme
  timeout: 1s
serve: *m
warm:
  cache-dir: *d
`))
	if err != nil {
		t.Fatal(err)
	}
	for verb, want := range map[string]string{"mount": "/nvme 1s", "serve": "/nvme 1s", "warm": "/nvme 4s"} {
		c := command(t, s, verb)
		if err := s.Apply(c, nil, f); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%s %s", c.Flags().Lookup("cache-dir").Value,
			c.Flags().Lookup("timeout").Value); got != want {
			t.Errorf("%s has %s, want %s", verb, got, want)
		}
	}
}

func TestCheck(t *testing.T) {
	for text, want := range map[string]string{
		file:          "",
		"":            "",
		"# nothing\n": "",
		"mount:\n":    "",
		"timeout: soon\ndaemon: maybe": "f:1: timeout: \"soon\" is not a duration (write 90s, 15m or 4h) (for shoal " +
			"mount)\nf:2: daemon: \"maybe\" is neither true nor false (for shoal mount)",
		"warm: {fraction: x}": "f:1: fraction: \"x\" is not a number (for shoal warm)",
		"dir: here":           "f:1: dir: give an absolute path (for shoal cache)",
	} {
		s := program()
		f, err := s.Parse("f", []byte(text))
		if err == nil {
			err = s.Check(f)
		}
		got := ""
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%q: error %v, want %s", text, err, want)
		}
	}
}

// The example without its marks is a file, and one that changes nothing.
func TestExample(t *testing.T) {
	var b bytes.Buffer
	if err := program().WriteExample(&b); err != nil {
		t.Fatal(err)
	}
	text := uncomment(b.String())
	s := program()
	f, err := s.Parse("f", []byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	for _, verb := range [][]string{{"mount"}, {"serve"}, {"warm"}, {"cache", "ls"}} {
		s := program()
		c := command(t, s, verb...)
		before := map[string]string{}
		for _, f := range Flags(c) {
			before[f.Name] = f.Value.String()
		}
		if err := s.Apply(c, nil, f); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		for _, flag := range Flags(c) {
			if got := flag.Value.String(); got != before[flag.Name] || OriginOf(flag).Kind != InFile {
				t.Errorf("%s %s is %q, want %q", verb, flag.Name, got, before[flag.Name])
			}
		}
	}
	if strings.Contains(text, "inner") || strings.Count(text, "\ncache-dir:") != 1 ||
		strings.Contains(text, "  cache-dir") {
		t.Errorf("the example is\n%s", text)
	}
}

func uncomment(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString(strings.Replace(line, "#", "", 1))
	}
	return b.String()
}

func TestRedact(t *testing.T) {
	for text, want := range map[string]string{
		"http://user:hush@host:9000/x": "http://***@host:9000/x",
		"http://hush@host":             "http://***@host",
		"http://us er:hush@host":       "http://***@host",
		"etcd://u:hu@sh@h:1,g:2/n":     "etcd://***@h:1,g:2/n",
		"etcd://u:12/hush@h/n":         "etcd://***@h/n",
		"etcds://u:1#hush@h/n":         "etcds://***@h/n",
		"s3://bucket/a@b":              "s3://bucket/a@b",
		"/a@b":                         "/a@b",
		"//user:hush@h/x?u=a://y@z":    "//***@h/x?u=a://y@z",
		"//user@host/x?u=a://y/@z":     "//***@host/x?u=a://y/@z",
		"":                             "",
	} {
		if got := Redact(text); got != want {
			t.Errorf("%s is shown as %s, want %s", text, got, want)
		}
	}
}

func TestMentioned(t *testing.T) {
	s := program()
	c := command(t, s, "mount")
	if err := s.Apply(c, []string{"SHOAL_EPOCH=3", "SHOAL_CACHE_DIR=/x"}, nil); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{"--epoch: no": "[epoch]", "--epochs 3": "[]",
		"--epochs and --epoch": "[epoch]", "give --cache-dir, --timeout": "[cache-dir]"} {
		got := []string{}
		for _, f := range Mentioned(c, text) {
			got = append(got, f.Name)
		}
		if fmt.Sprint(got) != want {
			t.Errorf("%q names %v, want %s", text, got, want)
		}
	}
}
