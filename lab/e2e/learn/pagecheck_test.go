package learn

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"
)

// fencesOf makes a page of blocks, with ~~~ for fences.
func fencesOf(text string) string { return strings.ReplaceAll(text, "~~~", "```") }

func runText(t *testing.T, text string) error {
	t.Helper()
	blocks, err := parsePage(fencesOf(text))
	if err != nil {
		t.Fatal(err)
	}
	return runBlocks(context.Background(), "page.md", blocks,
		pageSession{Dir: t.TempDir(), Scratch: t.TempDir(), Env: os.Environ()})
}

func TestPages(t *testing.T) {
	for name, c := range map[string]struct {
		page, err string // err: text of the error, or empty
	}{
		"one session":  {"~~~sh\nx=7\n~~~\nand\n~~~sh\necho $x\n~~~\n~~~output\n7\n~~~\n", ""},
		"both outputs": {"~~~sh\necho a; echo b >&2\n~~~\n~~~output\na\nb\n~~~\n", ""},
		"ellipsis": {
			"~~~sh\nseq 9; echo took 3.1 s, or so\n~~~\n~~~output\n1\n…\n9\ntook … s, …\n~~~\n", ""},
		"progress": {
			"~~~sh\necho 'listing s3://b: 1 object'; echo 'consuming ...'; echo 'consuming                          400ms'; echo " +
				"7\n~~~\n~~~output\n7\n~~~\n", ""},
		"another number": {"~~~sh\necho 8\n~~~\n~~~output\n7\n~~~\n",
			"page.md:2: line 1 is not what the page shows"},
		"a line too many": {"~~~sh\nseq 3\n~~~\n~~~output\n1\n2\n~~~\n", "page.md:2: the output is not"},
		"a line too few":  {"~~~sh\nseq 2\n~~~\n~~~output\n1\n2\n3\n~~~\n", "page.md:2: the output is not"},
		"fails": {"~~~sh\ntrue\n~~~\n~~~sh\necho why; false\n~~~\n~~~sh\necho no\n~~~\n",
			"page.md:5: exit status 1, after it printed:\nwhy"},
		"fails in a pipe": {"~~~sh\nfalse | cat\n~~~\n", "page.md:2"},
		"python":          {"~~~python\nprint('it''s', 6 * 7)\n~~~\n~~~output\nits 42\n~~~\n", ""},
		"python fails":    {"~~~python\nraise SystemExit(3)\n~~~\n", "page.md:2: exit status 3"},
		"saved": {
			"~~~python\n# six.py\nprint(6)\n~~~\n~~~sh\npython3 six.py\n~~~\n~~~output\n6\n~~~\n", ""},
		"not run":               {"Not run by the tests: it is wrong.\n\n~~~sh not-run\nfalse\n~~~\n", ""},
		"a picture":             {"~~~\nfalse\n~~~\n~~~yaml\nfalse\n~~~\n", ""},
		"a process that is let": {"~~~sh\nsleep 1000 &\nkill $!\n~~~\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := runText(t, c.page)
			if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
				t.Fatalf("error %v, want %q", err, c.err)
			}
		})
	}
}

// TestLeftBehind is impatient, as the pages above are not: a process that was killed may be late to end.
func TestLeftBehind(t *testing.T) {
	defer func(old time.Duration) { pagePatience = old }(pagePatience)
	pagePatience = 2 * time.Second
	if err := runText(t, "~~~sh\nsleep 1000 &\n~~~\n"); err == nil ||
		!strings.Contains(err.Error(), `the page leaves behind: ["sleep 1000"]`) {
		t.Error(err)
	}
}

func TestParseRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"no end":               "~~~sh\ntrue\n",
		"output of nothing":    "~~~output\n7\n~~~\n",
		"output twice":         "~~~sh\ntrue\n~~~\n~~~output\n7\n~~~\n~~~output\n7\n~~~\n",
		"not run, and no word": "Something.\n\n~~~sh not-run\nfalse\n~~~\n",
	} {
		if blocks, err := parsePage(fencesOf(text)); err == nil {
			t.Errorf("%s: %v", name, blocks)
		}
	}
}
