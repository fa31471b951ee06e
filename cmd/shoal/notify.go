package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	systemd "github.com/coreos/go-systemd/v22/daemon"
)

// The service manager (systemd, or any other that sets NOTIFY_SOCKET) follows this process's life through sd_notify(3),
// sent by the process that the manager started: for an attached verb that is the client.

// managerEnv are the manager's variables for its process, which children must not inherit.
var managerEnv = []string{"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}

// startExtension is the time that each sign of progress adds to the start.
const startExtension = 30 * time.Second

// manager is the state of the process that the manager started.
var manager struct {
	targets atomic.Pointer[[]string] // arguments of `shoal health`, with which the watchdog checks the daemon
	stop    sync.Once
	over    chan struct{} // closed once it is stopping
}

func init() { manager.over = make(chan struct{}) }

// serviceTargets sets the watchdog's targets. tls:// addresses are left out: they may need a client's certificate or
// another authority than the system's.
func serviceTargets(mountpoint string, listen ...string) {
	var targets []string
	if mountpoint != "" {
		targets = append(targets, mountpoint)
	}
	for _, addr := range listen {
		if !strings.HasPrefix(addr, "tls://") {
			targets = append(targets, addr)
		}
	}
	manager.targets.Store(&targets)
}

// tellManager sends lines such as READY=1. Without a manager it does nothing.
func tellManager(lines ...string) {
	if _, err := systemd.SdNotify(false, strings.Join(lines, "\n")); err != nil {
		slog.Warn("cannot notify the service manager", "message", lines[0], "cause", err)
	}
}

func usec(d time.Duration) string { return fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", d.Microseconds()) }

// serviceProgress reports that the start continues.
func serviceProgress(status string) { tellManager("STATUS="+status, usec(startExtension)) }

// serviceReady reports that the daemon serves, and begins to feed the manager's watchdog.
func serviceReady() {
	targets := manager.targets.Load()
	if targets == nil {
		return // not a daemon
	}
	tellManager("READY=1", "STATUS=serving "+strings.Join(*targets, ", "))
	interval, err := systemd.SdWatchdogEnabled(false)
	if err != nil {
		slog.Warn("the service manager's watchdog is not fed", "cause", err)
	}
	if interval > 0 {
		go feedWatchdog(interval, *targets)
	}
}

// serviceStopping reports that the end has begun, and how long it may wait for readers.
func serviceStopping() {
	manager.stop.Do(func() {
		close(manager.over)
		tellManager("STOPPING=1", "STATUS=draining", usec(drainTime()+startExtension))
	})
}

// feedWatchdog tells the manager that the daemon is alive, each time that another process has queried the daemon
// successfully: the process that serves a mount must not read it. If the daemon does not answer, nothing is sent, and the
// manager acts as configured.
func feedWatchdog(interval time.Duration, targets []string) {
	tick := time.NewTicker(interval / 3)
	defer tick.Stop()
	for {
		answered := make(chan error, 1)
		ctx, cancel := context.WithTimeout(context.Background(), interval/2)
		go func() { answered <- askHealth(ctx, targets) }()
		select {
		case err := <-answered:
			if err == nil {
				tellManager("WATCHDOG=1")
			} else {
				slog.Warn("the daemon does not answer; its watchdog is not fed", "cause", err)
			}
		case <-ctx.Done(): // a process that hangs in the mount may not even be killed
			slog.Warn("the daemon does not answer; its watchdog is not fed", "timeout", interval/2)
		case <-manager.over:
			cancel()
			return
		}
		cancel()
		select {
		case <-tick.C:
		case <-manager.over:
			return
		}
	}
}

// askHealth runs `shoal health` in a separate process.
func askHealth(ctx context.Context, targets []string) error {
	if len(targets) == 0 {
		return nil // all that can be checked is that this process runs
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, self, append([]string{"health", "--"}, targets...)...)
	cmd.Env = append(withoutManager(os.Environ()), settledEnv+"=1") // a configuration file that has become invalid must not end the daemon
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

// withoutManager returns an environment for child processes.
func withoutManager(environ []string) []string {
	return slices.DeleteFunc(slices.Clone(environ), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains(managerEnv, name)
	})
}
