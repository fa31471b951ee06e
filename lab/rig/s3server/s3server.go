// Package s3server runs a real S3 server, versitygw over a folder, on loopback, as a subprocess
// that never outlives its parent.
//
// Traps:
//
//   - versitygw closes every connection after one request unless --keep-alive is given; half of
//     what one then measures is TCP handshakes.
//   - It keeps ETags in extended attributes of the files (user.*). Where the file system has none
//     (some tmpfs, some overlay file systems) its metadata goes to a side folder; [Start] finds out.
//   - Files copied straight into its folder list an empty ETag: everything must go through the API,
//     hence [Server.Upload] and [Server.Fill].
//   - Keys that are no paths (`a//b`, `a` beside `a/b`, `..`) cannot be stored: its back end is a
//     folder.
package s3server

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/port"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// Version is the versitygw release that the rig is written for and the tools module pins.
const Version = "v1.8.0"

// Credentials of the server's root user. It listens on loopback only and holds test data.
const (
	AccessKey = "shoal-test"
	SecretKey = "shoal-test-secret"
	Region    = "us-east-1"
)

// Options says how to start a server.
type Options struct {
	Dir        string // holds the objects; it is made if it is missing, and kept at Stop
	Binary     string // the path of versitygw; empty means [FindBinary]
	Versioning bool   // lets buckets be versioned; each must be told to
	Accounts   bool   // lets further accounts be made ([Server.Admin])
}

// Server is a running S3 server.
type Server struct {
	URL string // the endpoint, "http://127.0.0.1:PORT"
	*subproc.Proc
	bin string
}

// FindBinary returns the path of versitygw: $SHOAL_VERSITYGW, else the one beside the running executable, else
// bin/versitygw in the current folder or one above it (a checkout), else the one on $PATH. The error names the command
// that installs it.
func FindBinary() (string, error) {
	if p := os.Getenv("SHOAL_VERSITYGW"); p != "" {
		if _, err := exec.LookPath(p); err != nil {
			return "", fmt.Errorf(
				"versitygw not found: SHOAL_VERSITYGW=%s is not an executable file; get it with %s", p, howToGet)
		}
		return p, nil
	}
	var places []string
	if exe, err := os.Executable(); err == nil {
		places = append(places, filepath.Join(filepath.Dir(exe), "versitygw"))
	}
	if dir, err := os.Getwd(); err == nil {
		for below := ""; dir != below; dir, below = filepath.Dir(dir), dir {
			places = append(places, filepath.Join(dir, "bin", "versitygw"))
		}
	}
	for _, p := range append(places, "versitygw") {
		if path, err := exec.LookPath(p); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("versitygw not found in bin/, beside the executable or on PATH; get it with %s", howToGet)
}

const howToGet = "`go build -C tools -o ../bin/versitygw github.com/versity/versitygw/cmd/versitygw` in a checkout, or " +
	"`go install github.com/versity/versitygw/cmd/versitygw@" + Version +
	"` and its folder on PATH or its path in SHOAL_VERSITYGW"

// Start runs a server and returns when it answers. ctx bounds only the start.
func Start(ctx context.Context, o Options) (_ *Server, err error) {
	if o.Binary == "" {
		if o.Binary, err = FindBinary(); err != nil {
			return nil, err
		}
	}
	dir := func(name string) string { return filepath.Join(o.Dir, name) }
	for _, name := range []string{"data", "meta", "versions", "accounts"} {
		if err := os.MkdirAll(dir(name), 0o755); err != nil {
			return nil, fmt.Errorf("s3server: %w", err)
		}
	}
	// versitygw does not report a port that the kernel chose, so one is held for it here until it listens.
	addr, release, err := port.Hold()
	if err != nil {
		return nil, fmt.Errorf("s3server: %w", err)
	}
	defer release()
	args := []string{"--port", addr, "--region", Region, "--keep-alive", "--quiet", "--health", "/health",
		"--iam-cache-disable"}
	if o.Accounts {
		args = append(args, "--iam-dir", dir("accounts"))
	}
	// One process owns the folder: lock files between gateways are pure cost.
	args = append(args, "posix", "--disable-object-lock-file")
	if !hasXattr(dir("data")) {
		args = append(args, "--sidecar", dir("meta"))
	}
	if o.Versioning {
		args = append(args, "--versioning-dir", dir("versions"))
	}
	cmd := exec.Command(o.Binary, append(args, dir("data"))...)
	// By environment: arguments are visible to every user of the machine.
	cmd.Env = append(os.Environ(), "ROOT_ACCESS_KEY_ID="+AccessKey, "ROOT_SECRET_ACCESS_KEY="+SecretKey)
	p, err := subproc.Start("versitygw", cmd)
	if err != nil {
		return nil, fmt.Errorf("s3server: %w", err)
	}
	s := &Server{URL: "http://" + addr, Proc: p, bin: o.Binary}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := p.Healthy(ctx, s.URL+"/health"); err != nil {
		s.Stop()
		return nil, fmt.Errorf("s3server: %w", err)
	}
	return s, nil
}

// Admin runs a verb of versitygw admin, such as create-user.
func (s *Server) Admin(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, s.bin,
		append([]string{"admin", "--endpoint-url", s.URL, "--region", Region}, args...)...)
	cmd.Env = append(os.Environ(), "ADMIN_ACCESS_KEY_ID="+AccessKey, "ADMIN_SECRET_ACCESS_KEY="+SecretKey)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("s3server: %s: %w: %s", args[0], err, out)
	}
	return nil
}

// Stop ends the server. The objects stay in its folder.
func (s *Server) Stop() { s.Proc.Stop(3 * time.Second) }

// Env returns the environment that makes the AWS tools, and Shoal, talk to the S3 server at
// endpoint (this server's URL, or that of a proxy before it) as its root user.
func Env(endpoint string) []string {
	return []string{"AWS_ENDPOINT_URL=" + endpoint, "AWS_REGION=" + Region, "AWS_ACCESS_KEY_ID=" + AccessKey,
		"AWS_SECRET_ACCESS_KEY=" + SecretKey}
}

// Client returns a client for the S3 server at endpoint that can keep conns connections busy.
func Client(endpoint string, conns int) (*minio.Client, error) {
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" {
		return nil, fmt.Errorf("s3server: endpoint %q is no URL", endpoint)
	}
	return minio.New(u.Host, &minio.Options{Creds: credentials.NewStaticV4(AccessKey, SecretKey, ""),
		Secure: u.Scheme == "https", Region: Region, BucketLookup: minio.BucketLookupPath,
		Transport: &http.Transport{MaxIdleConnsPerHost: conns, IdleConnTimeout: 90 * time.Second,
			DisableCompression: true, ReadBufferSize: 64 << 10, WriteBufferSize: 64 << 10}})
}

// hasXattr reports whether files in dir can hold user.* attributes.
func hasXattr(dir string) bool {
	f, err := os.CreateTemp(dir, ".xattr-*")
	if err != nil {
		return false
	}
	err = unix.Fsetxattr(int(f.Fd()), "user.shoal-test", []byte("1"), 0)
	_ = f.Close()
	_ = os.Remove(f.Name())
	return err == nil
}
