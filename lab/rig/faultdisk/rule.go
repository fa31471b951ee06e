package faultdisk

import (
	"errors"
	"fmt"
	"path"
	"strings"
	"syscall"
	"time"
)

// Op is a kind of operation.
type Op string

// The kinds of operations that rules tell apart.
const (
	Read  Op = "read"  // the content of a file
	Write Op = "write" // content, and what takes blocks: fallocate, copy_file_range
	Sync  Op = "sync"  // fsync and the flush of a close
	Make  Op = "make"  // names: create, mkdir, rename, unlink, truncate
	Look  Op = "look"  // lookup, stat, open, list
	Any   Op = "any"   // only in rules
)

// Rule says which operations fail or wait.
type Rule struct {
	// Op selects by kind; empty means Any.
	Op Op `json:"op,omitempty"`
	// Path selects what lies at or below this path of the mount; empty means everything.
	Path string `json:"path,omitempty"`
	// Errno is what a selected operation fails with: EIO, ENOSPC, EROFS, EDQUOT; empty: it does not fail.
	Errno string `json:"errno,omitempty"`
	// Hang makes a selected operation wait until the settings are changed. The process that waits
	// cannot be killed meanwhile, as with a disk.
	Hang bool `json:"hang,omitempty"`
	// Delay makes a selected operation take so much longer.
	Delay time.Duration `json:"delay_ns,omitempty"`
}

var errnos = map[string]syscall.Errno{"EIO": syscall.EIO, "ENOSPC": syscall.ENOSPC, "EROFS": syscall.EROFS,
	"EDQUOT": syscall.EDQUOT}

func (r Rule) validate() error {
	switch r.Op {
	case "", Any, Read, Write, Sync, Make, Look:
	default:
		return fmt.Errorf("rule: unknown operation %q", r.Op)
	}
	if _, ok := errnos[r.Errno]; !ok && r.Errno != "" {
		return fmt.Errorf("rule: unknown error %q; known: EIO, ENOSPC, EROFS, EDQUOT", r.Errno)
	}
	if r.Errno == "" && !r.Hang && r.Delay == 0 {
		return errors.New("rule: does nothing; set errno, hang or delay_ns")
	}
	if r.Delay < 0 {
		return errors.New("rule: delay_ns must not be negative")
	}
	if r.Path != "" && (path.IsAbs(r.Path) || path.Clean(r.Path) != r.Path || strings.HasPrefix(r.Path, "..")) {
		return fmt.Errorf("rule: path %q: give a clean path relative to the mount", r.Path)
	}
	return nil
}

func (r Rule) selects(op Op, name string) bool {
	if r.Op != "" && r.Op != Any && r.Op != op {
		return false
	}
	rest, ok := strings.CutPrefix(name, r.Path)
	return ok && (r.Path == "" || rest == "" || rest[0] == '/')
}

// Settings say how the disk behaves. The zero value is a healthy one.
type Settings struct {
	Rules []Rule `json:"rules,omitempty"` // in order; each that selects an operation strikes it
	// Capacity is how many bytes of blocks the folder may take before writes fail with ENOSPC; 0 is
	// no limit.
	Capacity int64 `json:"capacity,omitempty"`
}

// settings is one Settings in force.
type settings struct {
	Settings
	ended chan struct{} // closed when other settings are in force
}

func newSettings(s Settings) (*settings, error) {
	for _, r := range s.Rules {
		if err := r.validate(); err != nil {
			return nil, fmt.Errorf("faultdisk: %w", err)
		}
	}
	if s.Capacity < 0 {
		return nil, errors.New("faultdisk: capacity must not be negative")
	}
	return &settings{Settings: s, ended: make(chan struct{})}, nil
}

// Stats counts since the start.
type Stats struct {
	Operations map[Op]int64 `json:"operations"`
	Failed     int64        `json:"failed"`  // by rule or for want of space
	Hanging    int64        `json:"hanging"` // now
	Hung       int64        `json:"hung"`    // in all
	Used       int64        `json:"used"`    // bytes of blocks; counted only under a capacity
}
