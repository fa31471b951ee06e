package subproc

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// readyPatience is how long a child may take until it says that it is ready.
const readyPatience = time.Minute

// StartReady is Start of a child that prints one line of JSON once it is ready: it is decoded into
// ready. What the child prints after it is thrown away.
func StartReady(ctx context.Context, name string, cmd *exec.Cmd, ready any) (*Proc, error) {
	pr, pw := io.Pipe()
	cmd.Stdout = pw
	proc, err := Start(name, cmd)
	if err != nil {
		return nil, err
	}
	line := make(chan string, 1)
	go func() {
		r := bufio.NewReader(pr)
		s, _ := r.ReadString('\n')
		line <- s
		_, _ = io.Copy(io.Discard, r)
	}()
	go func() {
		<-proc.Done()
		_ = pw.Close()
	}()
	ctx, cancel := context.WithTimeout(ctx, readyPatience)
	defer cancel()
	select {
	case s := <-line:
		if err := json.Unmarshal([]byte(s), ready); err != nil {
			proc.Stop(time.Second)
			return nil, proc.Failed()
		}
		return proc, nil
	case <-ctx.Done():
		proc.Stop(time.Second)
		return nil, fmt.Errorf("does not start: %w", context.Cause(ctx))
	}
}

// Healthy waits, as [Proc.Until] does, until a GET of url is answered by 200.
func (p *Proc) Healthy(ctx context.Context, url string) error {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 2 * time.Second}
	return p.Until(ctx, func(context.Context) error {
		resp, err := client.Get(url)
		if err != nil {
			return err
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("GET %s: %s", url, resp.Status)
		}
		return nil
	})
}

// Controlled is a child whose control server answers with an S and takes an O; see [Serve].
type Controlled[S, O any] struct {
	*Proc
	control string // URL
}

// SpawnControlled starts command (a program and its first arguments) with further ones, and returns when it has told
// its URLs as a line of JSON. It dies with this process.
func SpawnControlled[S, O any](ctx context.Context, name string, command []string, args ...string) (
	url string, c Controlled[S, O], err error) {
	var r serving
	proc, err := StartReady(ctx, name, exec.Command(command[0], slices.Concat(command[1:], args)...), &r)
	return r.URL, Controlled[S, O]{proc, r.Control}, err
}

// serving is the line that a child prints when it is ready.
type serving struct{ URL, Control string }

// Stats asks the child for its counters.
func (c Controlled[S, O]) Stats(ctx context.Context) (s S, err error) {
	err = control(ctx, http.MethodGet, c.control+"/stats", nil, &s)
	return s, err
}

// Set has the child take o from now on.
func (c Controlled[S, O]) Set(ctx context.Context, o O) error {
	return control(ctx, http.MethodPut, c.control+"/options", o, nil)
}

// control sends a request to a child's control server: in as JSON, and the answer, unless out is nil, from
// JSON into out.
func control(ctx context.Context, method, url string, in, out any) error {
	b, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(b))
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		msg, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return fmt.Errorf("%s %s: %s: %s", method, req.URL.Path, resp.Status, strings.TrimSpace(string(msg)))
	}
	if out == nil {
		return nil
	}
	return json.NewDecoder(resp.Body).Decode(out)
}

// Serve is the child's side of [Controlled]: it prints that it is ready at url, which may be empty, and until ctx ends
// it answers GET /stats by stats, and PUT /options by set.
func Serve[S, O any](ctx context.Context, url string, stats func() S, set func(O) error) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /stats", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(stats())
	})
	mux.HandleFunc("PUT /options", func(w http.ResponseWriter, r *http.Request) {
		var o O
		err := json.NewDecoder(r.Body).Decode(&o)
		if err == nil {
			err = set(o)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
		}
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
	if err := json.NewEncoder(os.Stdout).Encode(serving{url, "http://" + l.Addr().String()}); err != nil {
		return errors.Join(err, l.Close())
	}
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
