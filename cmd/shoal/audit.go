package main

import (
	"sync"
	"time"

	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
)

type auditOptions struct{ auditLog string }

func (o *auditOptions) add(f *pflag.FlagSet) {
	f.StringVar(&o.auditLog, "audit-log", "", "log mounts, sessions, plans and cache changes to this file, one JSON "+
		"object a line\n(default: no log; docs/security.md)")
}

func (o *auditOptions) auditConfig(inv *invocation) (audit.Options, error) {
	_, err := inv.absAll(&o.auditLog)
	return audit.Options{Path: o.auditLog, MaxBytes: auditSize, Keep: auditKeep}, err
}

// The audit log is rotated at auditSize, and auditKeep old files are kept: months of mounts and sessions, and never a
// full disk. Who wants more has a log collector, which may move the file away.
const auditSize, auditKeep = 100 << 20, 5

// outcome adds the result of its action to an event.
func outcome(e audit.Event, err error) audit.Event {
	if err != nil {
		e.Outcome, e.Cause = "failed", cli.OneLine(err)
	}
	return e
}

const (
	// forgetThreads is how often known threads are forgotten: another process may get a thread's number.
	forgetThreads = 10 * time.Minute
	// maxProcesses is how many processes are remembered; with more, some are recorded again.
	maxProcesses = 4096
)

// mountWitness records who opens files of a mount, once each process, and who acts in .shoal: it is fusefs.Witness.
type mountWitness struct {
	log *audit.Log

	mu        sync.Mutex
	threads   map[fusefs.Caller]bool // seen
	since     time.Time              // of threads
	processes map[processKey]bool
}

// processKey identifies a process; the name usually distinguishes two processes with one number.
type processKey struct {
	pid, uid int
	comm     string
}

// newMountWitness returns nil, which fusefs accepts as none, without a log.
func newMountWitness(log *audit.Log) fusefs.Witness {
	if log == nil {
		return nil
	}
	return &mountWitness{log: log, threads: map[fusefs.Caller]bool{}, processes: map[processKey]bool{}}
}

// Opening implements fusefs.Witness. For a known thread it costs one lookup.
func (w *mountWitness) Opening(who fusefs.Caller) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.since) > forgetThreads {
		w.since = time.Now()
		clear(w.threads)
	}
	if w.threads[who] {
		return
	}
	w.threads[who] = true
	p := audit.Process(who.Thread, who.UID, who.GID)
	k := processKey{p.PID, int(who.UID), p.Comm}
	if w.processes[k] {
		return
	}
	if len(w.processes) >= maxProcesses {
		clear(w.processes)
	}
	w.processes[k] = true
	w.log.Write(audit.Event{Event: "mount_open", Peer: p})
}

func (w *mountWitness) Did(who fusefs.Caller, file string, err error) {
	e := audit.Event{Event: "plan", Plan: file, Peer: audit.Process(who.Thread, who.UID, who.GID)}
	if file == "refresh" {
		e.Event, e.Plan = "refresh", ""
	}
	w.log.Write(outcome(e, err))
}
