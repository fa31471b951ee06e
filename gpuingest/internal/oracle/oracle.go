// Package oracle gets reference results from Debian's Pillow, torch and torchvision, which tests compare byte by byte.
// It runs one Python process for each test binary and answers one question at a time. Only tests import it.
package oracle

import (
	"bufio"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"sync"
)

// Python is the interpreter that has the libraries: Debian's, not the first in PATH.
const Python = "/usr/bin/python3"

//go:embed oracle.py
var script string

type process struct {
	mu  sync.Mutex
	in  io.WriteCloser
	out *bufio.Reader
}

// The process ends with the test binary: its standard input closes.
var start = sync.OnceValues(func() (*process, error) {
	cmd := exec.Command(Python, "-c", script)
	cmd.Stderr = os.Stderr
	cmd.Env = append(os.Environ(), "OMP_NUM_THREADS=1")
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &process{in: in, out: bufio.NewReaderSize(out, 1<<20)}, cmd.Start()
})

// Q is the named values of a question or an answer.
type Q map[string]any

// Refused is the oracle's answer if Python raised an exception.
type Refused struct{ Message string }

func (r *Refused) Error() string { return r.Message }

// Ask sends one question with a payload. The error is *Refused if the library itself raised an exception.
func Ask(op string, q Q, payload []byte) (Q, []byte, error) {
	p, err := start()
	if err != nil {
		return nil, nil, fmt.Errorf(
			"oracle: %s with Pillow and torch is needed (apt install python3-pil python3-torchvision): %w",
			Python, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	m := Q{"op": op, "n": len(payload)}
	maps.Copy(m, q)
	line, err := json.Marshal(m)
	if err != nil {
		return nil, nil, err
	}
	if _, err := p.in.Write(slices.Concat(line, []byte{'\n'}, payload)); err != nil {
		return nil, nil, err
	}
	head, err := p.out.ReadBytes('\n')
	if err != nil {
		return nil, nil, fmt.Errorf("oracle: it ended: %w", err)
	}
	var a Q
	if err := json.Unmarshal(head, &a); err != nil {
		return nil, nil, err
	}
	n, ok := a["n"].(float64)
	if !ok {
		return nil, nil, errors.New("oracle: answer without a length")
	}
	body := make([]byte, int(n))
	if _, err := io.ReadFull(p.out, body); err != nil {
		return nil, nil, err
	}
	if msg, ok := a["error"].(string); ok {
		return nil, nil, &Refused{msg}
	}
	return a, body, nil
}
