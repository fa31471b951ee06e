package daemon

import (
	"cmp"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/handover"
)

// What is served by descriptors that the kernel would end with the last process that has them, such as a mount, can
// outlive the process that serves it. A keepsake is such descriptors. The supervisor has a copy of each from the moment
// in which it is kept, and gives copies to the next child, which takes what it serves. A process without a supervisor
// has its keepsakes for itself, and becomes the supervisor of its successor when it is replaced (Renew), as does one
// whose supervisor was killed: it executes its own program anew, as the same process.
//
// After a death nothing answers. So that nobody waits for ever, keepsakes that are not taken are let go after letGo, by
// the supervisor and by a child that is still starting. A child that takes all and dies does not begin that time anew:
// each second in which all is taken makes up for forgiven in which it was not. So what answers now and then goes on,
// however many deaths there are, and what dies of its first read ends.
//
// A container has no supervisor that outlives it. There a keeper, a process of another container, has the supervisor's
// part for all that can reach its socket (keeper.go).

// letGo is how long a keepsake may wait for a process that serves it. A start takes far less; if it takes longer,
// something is wrong that waiting does not mend, and who waits should hear of it. Eight starts that fail at once fit.
const letGo = 30 * time.Second

// glance is how often who counts that time looks at the clock. If it was away for twice as long, it had no processor,
// and cannot tell whether the process that it waits for had one (as in cache/peer): that time does not count.
const glance = time.Second

const forgiven = 4 // seconds of waiting, for each second of service: a fifth of the time is enough

const KeptEnv = "SHOAL_KEPT" // what a process inherits

const codeRenewed = 75 // exit code of a child that wants to be replaced (EX_TEMPFAIL)

// inheritance is the value of KeptEnv. Descriptors are numbers of the process that inherits.
type inheritance struct {
	To      int           `json:",omitempty"` // the socket by which keepsakes go to the supervisor
	Parent  int           `json:",omitempty"` // the supervisor; once it was killed another process is the parent
	Left    time.Duration `json:",omitempty"` // until they are let go
	Until   time.Time     // when that is, for programs that know no Left: meanwhile the clock may be set
	Renewed bool          `json:",omitempty"` // the predecessor wanted to be replaced
	Failed  string        `json:",omitempty"` // why this is the old program
	// what was executed first: its file may have been moved since, and this process may be of it all the same
	Program string
	Kept    []keepsake `json:",omitempty"`
}

// wait is how long keepsakes may still wait.
func (i inheritance) wait() time.Duration { return cmp.Or(i.Left, time.Until(i.Until)) }

type keepsake struct {
	ID   string
	Name string
	FDs  []int `json:",omitempty"`

	files []*os.File
	taken bool
}

func (k *keepsake) close() {
	for _, f := range k.files {
		_ = f.Close()
	}
}

// send sends a keepsake, with files in place of its own.
func (k *keepsake) send(c *net.UnixConn, files []*os.File) error {
	var fds []int
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	return handover.WriteReply(c, k, fds...)
}

// keeping is a set of keepsakes: those of this process, what it may take of its predecessor, or a supervisor's.
type keeping struct {
	sync.Mutex
	all []*keepsake
}

func (k *keeping) remove(is func(k *keepsake) bool) {
	k.Lock()
	defer k.Unlock()
	k.all = slices.DeleteFunc(k.all, func(o *keepsake) bool {
		if is(o) {
			o.close()
			return true
		}
		return false
	})
}

// put adds a keepsake, instead of one of the same name: only the last mount of a place can be found there.
func (k *keeping) put(n *keepsake) {
	k.remove(func(o *keepsake) bool { return o.Name == n.Name })
	k.Lock()
	defer k.Unlock()
	k.all = append(k.all, n)
}

// own is what this process has from its predecessor, and what it keeps itself.
var own struct {
	inheritance
	left keeper // of the predecessor, not taken yet
	kept keeping
	mu   sync.Mutex // of to
	to   *net.UnixConn
	away bool // to leads to a keeper, and not to a supervisor
}

func init() {
	own.Program = executed()
	text := os.Getenv(KeptEnv)
	_ = os.Unsetenv(KeptEnv)
	if json.Unmarshal([]byte(text), &own.inheritance) != nil {
		return
	}
	for i := range own.Kept {
		k := &own.Kept[i]
		for _, fd := range k.FDs {
			syscall.CloseOnExec(fd)
			k.files = append(k.files, os.NewFile(uintptr(fd), k.Name))
		}
		own.left.all = append(own.left.all, k)
	}
	if own.To > 0 {
		f := os.NewFile(uintptr(own.To), "keeper")
		c, _ := net.FileConn(f)
		own.to, _ = c.(*net.UnixConn)
		_ = f.Close()
		own.left.letGoIn(own.wait())
	}
}

// RenewalFailed returns why this process is not of the program that was to replace its predecessor; "" if it is, or if
// none was to.
func RenewalFailed() string { return own.Failed }

// executed returns the path of this program: the link by which it was called, if there is one, since that leads to the
// next version.
func executed() string {
	program, _ := os.Executable()
	called, _ := exec.LookPath(os.Args[0])
	is, _ := os.Stat("/proc/self/exe")
	if by, _ := os.Stat(called); os.SameFile(is, by) {
		program, _ = filepath.Abs(called)
	}
	return program
}

// Program returns where this process's program was when it began: there the next one will be.
func Program() string { return own.Program }

// Supervised reports whether this process has a supervisor, or is one that Renew made.
func Supervised() bool { return own.To > 0 || successor() }

// successor reports whether this process was made by Renew to supervise its successor.
func successor() bool { return own.Renewed && own.To == 0 }

// Holder lets mounts outlive this process.
type Holder struct{}

// Inherited returns the second descriptor of everything that may be taken, which is not the caller's.
func (Holder) Inherited() (second []*os.File) {
	own.left.Lock()
	defer own.left.Unlock()
	for _, k := range own.left.all {
		second = append(second, k.files[1])
	}
	return second
}

// Has reports whether Held would return something.
func (Holder) Has(name string) bool {
	own.left.Lock()
	defer own.left.Unlock()
	return slices.ContainsFunc(own.left.all, func(k *keepsake) bool { return k.Name == name })
}

// Held takes what the predecessor had of that name. The caller closes it.
func (Holder) Held(name string) (files []*os.File) {
	own.left.Lock()
	defer own.left.Unlock()
	own.left.all = slices.DeleteFunc(own.left.all, func(k *keepsake) bool {
		if k.Name == name {
			files = k.files
		}
		return k.Name == name
	})
	return files
}

// Keep keeps copies of files until drop is called.
func (Holder) Keep(name string, files ...*os.File) (drop func()) {
	n := &keepsake{ID: rand.Text(), Name: name}
	for _, f := range files {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			n.close()
			return func() {}
		}
		n.files = append(n.files, os.NewFile(uintptr(fd), name))
	}
	own.kept.put(n)
	give(n, n.files)
	return func() {
		own.kept.remove(func(o *keepsake) bool { return o == n })
		give(n, nil)
	}
}

// give gives a keepsake to the supervisor, or without files takes it back.
func give(k *keepsake, files []*os.File) {
	own.mu.Lock()
	defer own.mu.Unlock()
	if own.to == nil {
		return
	}
	if err := k.send(own.to, files); err != nil {
		slog.Warn("the supervisor does not take what is served; a death of this process ends it", "what", k.Name,
			"cause", err)
	}
}

// Renewable returns why Renew would end what is kept. Ask before anything ends for it.
func Renewable() (err error) {
	if own.away && !Kept() {
		err = fmt.Errorf("no keeper has the mounts now, and they would end with this process (start one at %s=%s, "+
			"and run this again)", KeeperEnv, os.Getenv(KeeperEnv))
	}
	return err
}

// Renew replaces this process by one that runs the program that is now where its own was, with what is kept. It does
// not return, but with an error.
func Renew(again Again) error {
	if err := Renewable(); err != nil {
		return err
	}
	if own.away || own.to != nil && own.Parent == os.Getppid() {
		os.Exit(codeRenewed)
	}
	own.kept.Lock()
	defer own.kept.Unlock()
	heir := inheritance{Renewed: true, Program: own.Program}
	for _, k := range own.kept.all {
		n := keepsake{ID: k.ID, Name: k.Name}
		for _, f := range k.files {
			if _, err := unix.FcntlInt(f.Fd(), unix.F_SETFD, 0); err != nil {
				return os.NewSyscallError("fcntl", err)
			}
			n.FDs = append(n.FDs, int(f.Fd()))
		}
		heir.Kept = append(heir.Kept, n)
	}
	text, err := json.Marshal(heir)
	if err != nil {
		return err
	}
	const self = "/proc/self/exe" // the program that runs, even if there is another in its place now
	env := append(append(os.Environ(), again.Env...), KeptEnv+"="+string(text))
	err = &os.PathError{Op: "execute", Path: self, Err: syscall.Exec(self, append(os.Args[:1:1], again.Args...), env)}
	for _, n := range heir.Kept {
		for _, fd := range n.FDs {
			unix.CloseOnExec(fd)
		}
	}
	return err
}

// keeper is a supervisor's part.
type keeper struct {
	keeping
	began   bool          // a child has been ready
	renewed bool          // the child is to replace one that wanted it
	failed  string        // why it runs the old program
	program string        // to run; "": what is where this process's program was
	good    *os.File      // the program of the last child that was ready
	waiting bool          // something is not served
	since   time.Time     // when waiting last changed
	waited  time.Duration // at since: how long something was not served, less what is forgiven
	looked  time.Time     // at the clock, while waiting
	patient time.Duration // how long a keepsake may wait
	timer   *time.Timer   // of the next look
}

// newKeeper has what Renew has left.
func newKeeper() *keeper {
	k := &keeper{renewed: successor(), patient: letGo}
	if k.all, own.left.all = own.left.all, nil; k.renewed {
		k.good, _ = os.Open("/proc/self/exe")
		k.letGoIn(letGo)
	}
	return k
}

// gift adds what the next child inherits to its command. The caller closes theirs once it has started, and serves ours.
// k is locked until then.
func (k *keeper) gift(cmd *exec.Cmd) (ours *net.UnixConn, theirs *os.File, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	theirs = os.NewFile(uintptr(pair[1]), "keeper")
	f := os.NewFile(uintptr(pair[0]), "kept")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, nil, err
	}
	const first = 4 // descriptor, after the pipe of ReadyEnv
	heir := inheritance{To: first, Left: k.left(), Until: time.Now().Add(k.left()), Renewed: k.renewed,
		Failed: k.failed, Program: own.Program, Parent: os.Getpid()}
	cmd.ExtraFiles = []*os.File{theirs}
	for _, o := range k.all {
		n := keepsake{ID: o.ID, Name: o.Name}
		for _, f := range o.files {
			n.FDs = append(n.FDs, first+len(cmd.ExtraFiles))
			cmd.ExtraFiles = append(cmd.ExtraFiles, f)
		}
		heir.Kept = append(heir.Kept, n)
	}
	text, err := json.Marshal(heir)
	cmd.Env = append(cmd.Env, KeptEnv+"="+string(text))
	return c.(*net.UnixConn), theirs, err
}

// begin begins the time in which keepsakes must be taken, or goes on with it. k is locked.
func (k *keeper) begin() {
	for _, o := range k.all {
		o.taken = false
	}
	if !k.waiting && len(k.all) > 0 { // or nothing waits
		k.waited = max(k.waited-forgiven*min(time.Since(k.since), k.patient), 0)
		k.waiting, k.since, k.looked = true, time.Now(), time.Now()
	}
	k.rest()
}

// letGoIn begins that time for what a predecessor has left.
func (k *keeper) letGoIn(d time.Duration) {
	k.Lock()
	defer k.Unlock()
	k.patient = d
	k.begin()
}

// left is how long what is not taken may still wait. k is locked.
func (k *keeper) left() time.Duration {
	if !k.waiting {
		return k.patient
	}
	if gone := time.Since(k.looked); gone >= 2*glance {
		k.since = k.since.Add(gone)
	}
	k.looked = time.Now()
	return k.patient - k.waited - time.Since(k.since)
}

// rest waits for the next look. k is locked.
func (k *keeper) rest() {
	if k.timer != nil {
		k.timer.Stop()
	}
	k.timer = time.AfterFunc(min(k.left(), glance), k.look)
}

// look lets go what was not taken in time.
func (k *keeper) look() {
	k.Lock()
	over := k.left() <= 0
	if k.waiting && !over {
		k.rest()
	}
	k.Unlock()
	if over {
		k.drop(func(o *keepsake) bool {
			if !o.taken {
				slog.Error("nothing has served it for too long, so it ends", "what", o.Name, "waited", k.patient)
			}
			return !o.taken
		})
	}
}

// serve takes what a child keeps, until it ends.
func (k *keeper) serve(c *net.UnixConn) {
	defer func() { _ = c.Close() }()
	for {
		n := &keepsake{taken: true}
		var err error
		n.files, err = handover.Receive(c, n)
		switch {
		case err != nil:
			n.close()
			return
		case len(n.files) == 0:
			k.drop(func(o *keepsake) bool { return o.ID == n.ID })
		default:
			k.take(n)
		}
	}
}

func (k *keeper) take(n *keepsake) {
	k.put(n)
	k.settle()
}

// drop removes what is. What is left may be all taken.
func (k *keeper) drop(is func(o *keepsake) bool) {
	k.remove(is)
	k.settle()
}

// settle ends the waiting if all is taken.
func (k *keeper) settle() {
	k.Lock()
	defer k.Unlock()
	if k.waiting && !slices.ContainsFunc(k.all, func(o *keepsake) bool { return !o.taken }) {
		k.waited = k.patient - k.left()
		k.waiting, k.since = false, time.Now()
	}
}

func (k *keeper) ready(pid int) {
	if program, err := os.Open("/proc/" + strconv.Itoa(pid) + "/exe"); err == nil {
		_ = k.good.Close() // there may be none
		k.good = program
	}
}

// died says what to do after a child's death: start another at once, or as after any death.
func (k *keeper) died(wasReady bool, exit *exec.ExitError, cause string) (atOnce bool) {
	k.Lock()
	defer k.Unlock()
	renew := wasReady && exit != nil && exit.ExitCode() == codeRenewed
	if renew {
		k.waiting, k.waited = false, 0
	}
	k.begin()
	switch {
	case renew:
		k.renewed, k.failed, k.program = true, "", ""
	case k.renewed && !wasReady && k.failed == "" && k.good != nil:
		k.failed, k.program = cause, fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), k.good.Fd())
		slog.Error("the program that was to replace the daemon did not serve; the old one goes on", "cause", cause)
	default:
		return false
	}
	return true
}
