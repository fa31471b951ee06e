// Command transport measures how ready batches come to a trainer on the same host: a reader that sums
// every byte of batches in slots, or of batches that come through gRPC over a unix socket and over
// loopback TCP, beside one that sums an equal ring of its own memory; in Go and in Python. Run it from
// the repository's root: go run ./lab/bench/transport
//
// Server and reader are processes of their own, each on one core. The arms alternate (A B C A B C …);
// medians, and ratios within a run, are reported.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/cputime"
)

// A batch of pictures as most people take them.
const (
	batchRows  = 256
	rowBytes   = 3 * 224 * 224
	batchBytes = batchRows * rowBytes
	credits    = 3
	slots      = 5
)

func main() {
	log.SetFlags(0)
	dir := flag.String("dir", ".bench", "work folder")
	shoal := flag.String("shoal", "", "shoal binary for the report's version (default: build it)")
	reps := flag.Int("reps", 5, "runs of each arm")
	batches := flag.Int("n", 100, "batches a run")
	out := flag.String("o", "lab/bench/results/transport.md", "report")
	python := flag.String("python", "/usr/bin/python3", "interpreter with numpy and grpc")
	serving := flag.Bool("serve", false, "be the server: of a unix socket in dir and of loopback TCP")
	reading := flag.String("read", "", "be the reader of an arm: ring, small (Python), or ADDR,slots or ADDR,chunks")
	write := flag.Bool("write", false, "the server writes every byte of every batch, as a transform would; otherwise a few a row")
	flag.Parse()
	var err error
	switch {
	case *serving:
		err = serve(*dir, *write)
	case *reading != "":
		err = read(*reading, *batches)
	default:
		err = run(*dir, *shoal, *python, *out, *reps, *batches)
	}
	if err != nil {
		log.Fatal("transport: ", err)
	}
}

// outcome is what a reader prints.
type outcome struct {
	Bytes   float64 `json:"bytes"`
	Seconds float64 `json:"seconds"`
	CPU     float64 `json:"cpu"`     // seconds of the reader
	InSlots bool    `json:"inSlots"` // of a feed
	Sum     uint64  `json:"sum"`     // of what was read: it was
}

// arm is one way for batches to come.
type arm struct {
	name    string
	target  string // of -read
	rate    []float64
	reader  []float64 // GB for each second of the reader's processor time
	perCore []float64 // the same of both ends' together
	ratio   []float64 // to the ring of the same run
}

func run(dir, shoal, python, out string, reps, batches int) error {
	k, err := kit.New(dir, shoal)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	k.Header("Transport of ready batches")
	k.Say("Batches of %d × 3 × 224 × 224 bytes (%.1f MB), %d credits, %d slots, %d batches a run after %d that are not timed, %d runs. Reader on core 0, server on core 1. "+
		"GB/s is what the reader sums. Beside other work on the machine, which comes out of the seconds, a CPU second tells more; summing is part of it.\n", batchRows, batchBytes/1e6, credits, slots, batches, 2*slots, reps)
	for _, write := range []bool{false, true} {
		if write {
			k.Say("\n## The server writes every byte of each batch meanwhile\n")
		} else {
			k.Say("## Ready batches: the server writes 8 bytes a row\n")
		}
		for _, language := range []string{"Go", "Python"} {
			reader := []string{self, "-n", strconv.Itoa(batches), "-read"}
			if language == "Python" {
				script, err := filepath.Abs("lab/bench/transport/reader.py")
				if err != nil {
					return err
				}
				reader = []string{python, script, strconv.Itoa(batches)}
				k.Env = append(k.Env, "PYTHONPATH="+must(filepath.Abs("python")))
			}
			if err := measure(k, language, self, reader, reps, write); err != nil {
				return err
			}
		}
	}
	return k.Save(out)
}

func must(path string, err error) string {
	if err != nil {
		log.Fatal("transport: ", err)
	}
	return path
}

// measure runs all arms of a language beside one server.
func measure(k *kit.Kit, language, self string, reader []string, reps int, write bool) error {
	server, addrs, err := startServer(k, self, write)
	if err != nil {
		return err
	}
	defer server.stop()
	arms := []*arm{
		{name: "own ring", target: "ring"},
		{name: "slots", target: addrs[0] + ",slots"},
		{name: "gRPC, unix socket", target: addrs[0] + ",chunks"},
		{name: "gRPC, loopback TCP", target: addrs[1] + ",chunks"},
	}
	if language == "Python" { // numpy asks for pages of 2 MiB, which most kernels give to no shared memory
		arms = append(arms, &arm{name: "own ring, pages of 4 KiB", target: "small"})
	}
	for rep := range reps {
		for _, a := range arms {
			before, err := server.cpu()
			if err != nil {
				return err
			}
			var o outcome
			args := append(append([]string{"-c", "0"}, reader...), a.target)
			if err := k.Run(&o, "taskset", args...); err != nil {
				return err
			}
			after, err := server.cpu()
			if err != nil {
				return err
			}
			if a.name == "slots" != o.InSlots {
				return fmt.Errorf("%s, %s: batches in slots: %v", language, a.name, o.InSlots)
			}
			a.rate = append(a.rate, o.Bytes/o.Seconds/1e9)
			a.reader = append(a.reader, o.Bytes/o.CPU/1e9)
			a.perCore = append(a.perCore, o.Bytes/(o.CPU+after-before)/1e9)
			a.ratio = append(a.ratio, a.rate[rep]/arms[0].rate[rep])
			fmt.Fprintf(os.Stderr, "%s, run %d of %d, %s: %.2f GB/s\n", language, rep+1, reps, a.name, a.rate[rep])
		}
	}
	k.Say("| %s | GB/s, median | runs | of own ring, median | GB a CPU second of the reader | of own ring | GB a CPU second of both ends |", language)
	k.Say("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
	for _, a := range arms {
		k.Say("| %s | %.2f | %s | %.0f%% | %.2f | %.0f%% | %.2f |", a.name, kit.Median(a.rate), kit.Numbers(a.rate, 2), 100*kit.Median(a.ratio),
			kit.Median(a.reader), 100*kit.Median(a.reader)/kit.Median(arms[0].reader), kit.Median(a.perCore))
	}
	if !write {
		slotted, busy := kit.Median(arms[1].ratio), kit.Median(arms[1].reader)/kit.Median(arms[0].reader)
		tcp, both := kit.Median(arms[3].reader), kit.Median(arms[3].perCore)
		k.Say("\n%s: slots at %.0f%% of the own ring's rate (at least 90%%: %s), at %.0f%% by the reader's processor time; gRPC over loopback TCP %.2f GB a second of the reader's core (at least 1: %s), %.2f of both ends' (%s).\n", language,
			100*slotted, kit.Verdict(slotted >= 0.9), 100*busy, tcp, kit.Verdict(tcp >= 1), both, kit.Verdict(both >= 1))
		if small := arms[len(arms)-1]; small.target == "small" {
			k.Say("numpy's ring lies in pages of 2 MiB: of one in pages of 4 KiB, as slots have where shmem_enabled is not advise (here %s), slots are %.0f%%.\n",
				shmemPages(), 100*slotted/kit.Median(small.ratio))
		}
	} else {
		k.Say("")
	}
	return nil
}

// shmemPages returns the kernel's setting of huge pages for shared memory.
func shmemPages() string {
	text, _ := os.ReadFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
	_, at, _ := strings.Cut(string(text), "[")
	at, _, _ = strings.Cut(at, "]")
	return at
}

// process is the server's.
type process struct {
	cmd   *exec.Cmd
	input *os.File
}

func startServer(k *kit.Kit, self string, write bool) (*process, []string, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	c := k.Command("taskset", "-c", "1", self, "-serve", "-dir", k.Dir, "-write="+strconv.FormatBool(write))
	c.Stdin, c.Stderr = r, os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := c.Start(); err != nil {
		return nil, nil, err
	}
	p := &process{cmd: c, input: w}
	var addrs []string
	if err := json.NewDecoder(out).Decode(&addrs); err != nil {
		p.stop()
		return nil, nil, fmt.Errorf("the server said nothing: %w", err)
	}
	return p, addrs, nil
}

// stop ends the server, which ends with its standard input.
func (p *process) stop() {
	_ = p.input.Close()
	_ = p.cmd.Wait()
}

// cpu returns the seconds of processor time that the server has had.
func (p *process) cpu() (float64, error) { return cputime.Process(p.cmd.Process.Pid) }
