//go:build killpoints

package killpoint

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

const Enabled = true // whether this build dies at points

var state struct {
	sync.Mutex
	name   string
	left   int
	log    *os.File
	parsed bool
}

// Pass marks the point name. At the requested one, the process is killed with SIGKILL.
func Pass(name string) {
	state.Lock()
	defer state.Unlock()
	if !state.parsed {
		state.parsed = true
		point, count, _ := strings.Cut(os.Getenv("SHOAL_KILLPOINT"), ":")
		state.name, state.left = point, 1
		if n, err := strconv.Atoi(count); err == nil {
			state.left = n
		}
		if path := os.Getenv("SHOAL_KILLPOINTS_LOG"); path != "" {
			// Without the log the test that requested it fails.
			state.log, _ = os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		}
	}
	if state.log != nil {
		_, _ = state.log.WriteString(name + "\n")
	}
	if name != state.name {
		return
	}
	if state.left--; state.left == 0 {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // the signal takes a moment
	}
}
