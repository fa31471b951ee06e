package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/prefetch/engine"
)

// fakeDaemon listens as the daemon of a cache directory, and does with each question what answer does.
func fakeDaemon(t *testing.T, answer func(req attachRequest, conn net.Conn)) (cacheDir string) {
	t.Helper()
	cacheDir = t.TempDir()
	l, err := listenUnix(filepath.Join(cacheDir, socketName))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				var req attachRequest
				line, err := bufio.NewReader(conn).ReadBytes('\n')
				if err == nil && json.Unmarshal(line, &req) == nil {
					answer(req, conn)
				}
			}()
		}
	}()
	return cacheDir
}

// A daemon that takes the question and says nothing: who it is, and what helps.
func TestSilence(t *testing.T) {
	t.Parallel()
	held := make(chan struct{})
	t.Cleanup(func() { close(held) })
	dir := fakeDaemon(t, func(attachRequest, net.Conn) { <-held })
	err := attach(t.Context(), dir, []string{"cache", "ls"}, io.Discard)
	if !errors.As(err, new(silence)) || !strings.Contains(err.Error(), fmt.Sprintf("(pid %d) of %s does not answer since", os.Getpid(), dir)) {
		t.Errorf("%v", err)
	}
}

// Each answer names its question. What names none is of an older version, and what names another one is for somebody else.
func TestAnswersNameTheirQuestion(t *testing.T) {
	t.Parallel()
	for _, line := range []string{`{"out":"x"}`, `{"id":"another","out":"x"}`} {
		dir := fakeDaemon(t, func(_ attachRequest, conn net.Conn) { fmt.Fprintln(conn, line) })
		var out strings.Builder
		err := attach(t.Context(), dir, []string{"cache", "ls"}, &out)
		if err == nil || !strings.Contains(err.Error(), "is of another version") || out.Len() > 0 {
			t.Errorf("%s: %v, %q", line, err, out.String())
		}
	}
	dir := fakeDaemon(t, func(req attachRequest, conn net.Conn) {
		r := &replies{w: conn.(*net.UnixConn), id: req.ID}
		r.send(attachReply{})
		r.send(attachReply{Out: "x"})
		r.send(attachReply{Ended: &endedWith{}})
	})
	var out strings.Builder
	if err := attach(t.Context(), dir, []string{"cache", "ls"}, &out); err != nil || out.String() != "x" {
		t.Errorf("%v, %q", err, out.String())
	}
}

// A flag of a verb that attaches is of the whole process, and compared with what is in force; or of the dataset, and compared by
// engine.join or applied; or the verb's own. One that is none of these would be ignored in silence.
func TestEveryFlagIsHeeded(t *testing.T) {
	heeded := map[string]bool{}
	var tagged func(c reflect.Type)
	tagged = func(c reflect.Type) {
		for i := range c.NumField() {
			if flag := c.Field(i).Tag.Get("flag"); flag != "" {
				heeded[flag] = true
			} else if c.Field(i).Type.Kind() == reflect.Struct {
				tagged(c.Field(i).Type)
			}
		}
	}
	tagged(reflect.TypeFor[engine.HostConfig]())
	for _, flag := range strings.Fields(`
		encryption-key-file reset-old-cache cache-dir config standing help
		samples shards bad-shards recode near near-endpoint near-profile store connections publish order refresh
		admin daemon allow-other kernel-cache fuse-transport s3 s3-keys s3-anonymous s3-read-only tls-cert tls-key
		listen mount socket-group tls-client-ca token-file fraction list`) {
		heeded[flag] = true
	}
	r := root()
	for _, verb := range []string{"mount", "serve", "s3", "warm"} {
		c, _, err := r.Find([]string{verb})
		if err != nil {
			t.Fatal(err)
		}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if !heeded[f.Name] {
				t.Errorf("%s --%s: attaching ignores it", verb, f.Name)
			}
		})
	}
}
