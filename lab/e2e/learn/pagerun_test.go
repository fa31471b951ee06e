package learn

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/internal/machine"
)

// pageSession is the environment of a page's commands.
type pageSession struct {
	Dir     string   // the folder they begin in
	Scratch string   // TMPDIR; mounts left below it at the end are unmounted
	Env     []string // of bash
	Within  []string // a command that runs bash, with bash's command line as arguments; empty: none
}

// idVar marks every process that a page starts, so that processes it leaves behind can be found.
const idVar = "DOCTEST_ID"

// runBlocks runs the blocks. It fails at the first block that fails or whose output differs from the page, and if a
// process or a mount is left at the end; when it returns, none is left in any case. name is the page's, for errors.
func runBlocks(ctx context.Context, name string, blocks []docBlock, s pageSession) (err error) {
	id := rand.Text()
	script, err := os.CreateTemp(s.Scratch, "page-*.sh")
	if err != nil {
		return err
	}
	if _, err := script.WriteString(compose(blocks, id)); err != nil {
		return err
	}
	if err := script.Close(); err != nil {
		return err
	}
	// A file, not a pipe: daemons keep inherited descriptors, and nobody should wait for them to close a pipe.
	log, err := os.Create(script.Name() + ".log")
	if err != nil {
		return err
	}
	defer log.Close()
	words := append(slices.Clone(s.Within), "bash", "-e", "-o", "pipefail", script.Name())
	cmd := exec.CommandContext(ctx, words[0], words[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.Dir, log, log
	cmd.Env = append(slices.Clone(s.Env), idVar+"="+id, "TMPDIR="+s.Scratch)
	failure := cmd.Run()
	printed, err := os.ReadFile(log.Name())
	if err != nil {
		return err
	}
	err = judge(name, blocks, id, string(printed), failure)
	if ctx.Err() != nil {
		err = errors.Join(ctx.Err(), err)
	}
	return errors.Join(err, cleanUp(id, s.Scratch, err == nil))
}

// compose makes one script of all blocks, which prints a mark before the output of each.
func compose(blocks []docBlock, id string) string {
	var b strings.Builder
	for i, block := range blocks {
		if block.Kind == notRunBlock {
			continue
		}
		fmt.Fprintf(&b, "printf '\\n%%s\\n' '%s'\n", mark(id, i))
		if block.Kind == shellBlock {
			b.WriteString(block.Code)
			continue
		}
		end := "END-" + id
		if m := fileName.FindStringSubmatch(block.Code); m != nil {
			fmt.Fprintf(&b, "cat > '%s' <<'%s'\n%s%s\n", m[1], end, block.Code, end)
		} else {
			fmt.Fprintf(&b, "python3 - <<'%s'\n%s%s\n", end, block.Code, end)
		}
	}
	return b.String()
}

var fileName = regexp.MustCompile(`^# ([a-z_0-9]+\.py)\n`)

func mark(id string, block int) string { return id + " " + strconv.Itoa(block) }

// judge compares each block's part of the output.
func judge(name string, blocks []docBlock, id, printed string, failure error) error {
	parts := strings.Split(printed, "\n"+id+" ")
	for n, part := range parts[1:] {
		number, out, _ := strings.Cut(part, "\n")
		i, err := strconv.Atoi(number)
		if err != nil {
			return err
		}
		at := func(err error) error {
			return fmt.Errorf("%s:%d: %w", name, blocks[i].Line, err)
		}
		if failure != nil && n == len(parts)-2 {
			return at(fmt.Errorf("%w, after it printed:\n%s", failure, out))
		}
		if want := blocks[i].Output; want != nil {
			if err := matchOutput(*want, out); err != nil {
				return at(err)
			}
		}
	}
	if failure != nil {
		return fmt.Errorf("%s: %w: %s", name, failure, parts[0])
	}
	return nil
}

// pagePatience is how long processes may take to end on a busy machine.
var pagePatience = 30 * time.Second

// cleanUp ends the page's remaining processes and mounts. If complain is set, it returns them as an error.
func cleanUp(id, dir string, complain bool) error {
	if complain {
		deadline := time.Now().Add(pagePatience)
		for len(processes(id)) > 0 && time.Now().Before(deadline) {
			time.Sleep(50 * time.Millisecond)
		}
	}
	var left []string
	told := map[int]bool{}
	for range 100 {
		found := processes(id)
		if len(found) == 0 {
			break
		}
		for pid, command := range found {
			if !told[pid] { // a busy machine may take long to end it
				told[pid] = true
				left = append(left, command)
			}
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(50 * time.Millisecond)
	}
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		_ = syscall.Unmount(m, syscall.MNT_DETACH)
	}
	if complain && len(left)+len(mounts) > 0 {
		return fmt.Errorf("the page leaves behind: %q", append(left, mounts...))
	}
	return nil
}

// processes returns the processes with id in their environment, by pid.
func processes(id string) map[int]string {
	found := map[int]string{}
	entries, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, e := range entries {
		b, err := os.ReadFile(e)
		if err != nil || !strings.Contains(string(b), idVar+"="+id) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(e)))
		if err != nil {
			continue
		}
		command, _ := os.ReadFile(filepath.Join(filepath.Dir(e), "cmdline"))
		found[pid] = strings.ReplaceAll(strings.Trim(string(command), "\x00"), "\x00", " ")
	}
	return found
}

// mountsBelow returns the mount points in dir, innermost first.
func mountsBelow(dir string) ([]string, error) {
	all, err := machine.Mounts("/")
	var mounts []string
	for _, m := range slices.Backward(all) {
		if strings.HasPrefix(m.Point, strings.TrimSuffix(dir, "/")+"/") {
			mounts = append(mounts, m.Point)
		}
	}
	return mounts, err
}
