package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/port"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// store is an S3 server as its makers ship it.
type store struct {
	name, version string
	start         func(ctx context.Context, dir string) (*running, error)
}

// running is a store that answers.
type running struct {
	url    string
	stop   func()
	client *minio.Client
}

// stores are those that are run against; tools is the folder that make conformance fills.
func stores(tools string) []store {
	venv := filepath.Join(tools, "venv", "bin")
	weed := filepath.Join(venv, "weed")
	return []store{
		{"versitygw", s3server.Version, versitygw},
		{"SeaweedFS", versionOf(weed, "version"), command(func(dir string, port func() string) ([]string, error) {
			return seaweed(weed, dir, port)
		})},
		{"moto", versionOf(filepath.Join(venv, "python"), "-c",
			"import importlib.metadata as m; print(m.version('moto'))"),
			command(func(_ string, port func() string) ([]string, error) {
				return []string{filepath.Join(venv, "moto_server"), "-H", "127.0.0.1", "-p", port()}, nil
			})},
		{"s3proxy", jarVersion(tools, "s3proxy"), command(func(dir string, port func() string) ([]string, error) {
			return s3proxy(filepath.Join(tools, "s3proxy"), dir, port)
		})},
		{"S3Mock", jarVersion(tools, "s3mock"), command(func(dir string, port func() string) ([]string, error) {
			return []string{
				"java", "-cp", filepath.Join(tools, "s3mock", "*"), "com.adobe.testing.s3mock.S3MockApplication",
				"--com.adobe.testing.s3mock.http-port=" + port(), "--server.port=0",
				"--com.adobe.testing.s3mock.store.root=" + filepath.Join(dir, "data"),
			}, nil
		})},
	}
}

// versionOf returns the word of a program's output that looks like a version.
func versionOf(program string, args ...string) string {
	out, _ := exec.Command(program, args...).Output() // one that is not there fails when it is started
	for _, word := range strings.Fields(string(out)) {
		if word[0] >= '0' && word[0] <= '9' && strings.Contains(word, ".") {
			return word
		}
	}
	return "?"
}

// jarVersion returns the version in the name of a jar.
func jarVersion(tools, name string) string {
	found, _ := filepath.Glob(filepath.Join(tools, name, name+"-[0-9]*.jar")) // the pattern is right
	if len(found) != 1 {
		return "?"
	}
	return strings.TrimSuffix(strings.TrimPrefix(filepath.Base(found[0]), name+"-"), ".jar")
}

func versitygw(ctx context.Context, dir string) (*running, error) {
	s, err := s3server.Start(ctx, s3server.Options{Dir: filepath.Join(dir, "store"), Versioning: true})
	if err != nil {
		return nil, err
	}
	return ready(ctx, s.URL, s.Stop, s.Done())
}

func seaweed(weed, dir string, port func() string) ([]string, error) {
	type credential map[string]string
	keys, err := json.Marshal(map[string]any{"identities": []any{map[string]any{
		"name": "test", "actions": []string{"Admin", "Read", "Write", "List", "Tagging"},
		"credentials": []credential{{"accessKey": s3server.AccessKey, "secretKey": s3server.SecretKey}},
	}}})
	if err != nil {
		return nil, err
	}
	config := filepath.Join(dir, "s3.json")
	if err := os.WriteFile(config, keys, 0o600); err != nil {
		return nil, err
	}
	args := []string{
		weed, "server", "-dir=" + dir, "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.port=" + port(),
		"-s3.config=" + config,
		"-volume.max=0", "-master.volumeSizeLimitMB=64",
	}
	for _, name := range []string{"master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
		"filer.port.grpc", "s3.port.grpc"} {
		args = append(args, "-"+name+"="+port())
	}
	return args, nil
}

func s3proxy(jars, dir string, port func() string) ([]string, error) {
	data, config := filepath.Join(dir, "data"), filepath.Join(dir, "s3proxy.conf")
	if err := os.MkdirAll(data, 0o755); err != nil {
		return nil, err
	}
	text := fmt.Sprintf(`s3proxy.endpoint=http://127.0.0.1:%s
s3proxy.authorization=aws-v2-or-v4
s3proxy.identity=%s
s3proxy.credential=%s
jclouds.provider=filesystem-nio2
jclouds.filesystem.basedir=%s
`, port(), s3server.AccessKey, s3server.SecretKey, data)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	return []string{"java", "-cp", filepath.Join(jars, "*"), "org.gaul.s3proxy.Main", "--properties", config}, nil
}

// command starts a server by its command line, whose first port is that of S3.
func command(line func(dir string, port func() string) ([]string, error)) func(ctx context.Context, dir string) (
	*running, error) {
	return func(ctx context.Context, dir string) (*running, error) {
		ctx, cancel := context.WithCancel(ctx) // the ports are held until the server answers
		defer cancel()
		var url string
		var failed error
		args, err := line(dir, func() string {
			addr, release, err := port.Hold()
			if err != nil {
				failed = err
				return "0"
			}
			context.AfterFunc(ctx, release)
			if url == "" {
				url = "http://" + addr
			}
			_, number, _ := net.SplitHostPort(addr) // of a right address
			return number
		})
		if err == nil {
			err = failed
		}
		if err != nil {
			return nil, err
		}
		out, err := os.Create(filepath.Join(dir, "server.log"))
		if err != nil {
			return nil, err
		}
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir, cmd.Stdout, cmd.Stderr = dir, out, out
		p, err := subproc.Start(filepath.Base(args[0]), cmd)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("%w (make conformance fetches it)", err), out.Close())
		}
		return ready(ctx, url, func() { p.Stop(10 * time.Second); _ = out.Close() }, p.Done())
	}
}

// startTime is how long a server may take to answer. A JVM needs ten seconds on a busy machine.
const startTime = 2 * time.Minute

// ready waits for a bucket that can be made and written to.
func ready(ctx context.Context, url string, stop func(), ended <-chan struct{}) (*running, error) {
	client, err := s3server.Client(url, 8)
	if err != nil {
		stop()
		return nil, err
	}
	r := &running{url: url, stop: stop, client: client}
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for {
		err := s3server.MakeBucket(ctx, client, "ready")
		if err == nil {
			_, err = client.PutObject(ctx, "ready", "ready", strings.NewReader("ready"), 5, s3server.PutOptions())
		}
		if err == nil {
			return r, nil
		}
		select {
		case <-ended:
			stop()
			return nil, fmt.Errorf("the server has ended: %w", err)
		case <-ctx.Done():
			stop()
			return nil, fmt.Errorf("the server does not answer: %w", err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}
