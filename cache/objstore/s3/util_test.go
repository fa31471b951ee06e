package s3_test

import (
	"encoding/pem"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

func TestMain(m *testing.M) {
	s3.SetCopySizes(6<<20, 5<<20) // so that larger objects are copied in parts
	// The AWS environment of whoever runs the tests is not theirs.
	for _, kv := range os.Environ() {
		if len(kv) > 4 && kv[:4] == "AWS_" {
			for i := range kv {
				if kv[i] == '=' {
					os.Unsetenv(kv[:i])
					break
				}
			}
		}
	}
	os.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	os.Setenv("AWS_CONFIG_FILE", os.DevNull)
	os.Setenv("AWS_SHARED_CREDENTIALS_FILE", os.DevNull)
	goleak.VerifyTestMain(m)
}

// newS3 returns a client of a server of its own.
func newS3(t testing.TB, srv *S3Server, change func(*s3.Config)) *s3.Store {
	t.Helper()
	srv.Bucket = "bucket"
	cfg := s3.Config{Endpoint: srv.Start(t), Bucket: srv.Bucket, AccessKeyID: "key-id", SecretAccessKey: "hush-secret"}
	if change != nil {
		change(&cfg)
	}
	s, err := s3.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func TestMemConformance(t *testing.T) {
	conform(t, func(*testing.T) Harness { return Harness{Store: memstore.New(), HostileKeys: true} })
}

func TestDirConformance(t *testing.T) {
	conform(t, func(t *testing.T) Harness {
		d, err := objstore.NewDir(t.TempDir())
		must(t, err)
		return Harness{Store: d, RefusesHostileKeys: true}
	})
}

// TestStackConformance runs the suite on all decorators at once, over a server that refuses every eighth request the
// first time: they must not be noticed. (A refused request takes minio-go a tenth of a second.)
func TestStackConformance(t *testing.T) {
	conform(t, func(t *testing.T) Harness {
		var seen sync.Map
		var requests atomic.Int64
		srv := &S3Server{Intercept: func(w http.ResponseWriter, r *http.Request) bool {
			if _, again := seen.LoadOrStore(r.Method+r.URL.String(), true); again || requests.Add(1)%8 != 1 {
				return false
			}
			http.Error(w, "<Error><Code>SlowDown</Code></Error>", http.StatusServiceUnavailable)
			return true
		}}
		stack := objstore.Retry(objstore.Limit(objstore.NewMeter(newS3(t, srv, nil)), 4),
			objstore.RetryPolicy{Base: 1, Cap: 1})
		return Harness{Store: stack, HostileKeys: true, Resumes: true}
	})
}

func TestS3Conformance(t *testing.T) {
	conform(t, func(t *testing.T) Harness {
		srv := &S3Server{AccessKey: "key-id"}
		return Harness{Store: newS3(t, srv, nil), HostileKeys: true, Resumes: true}
	})
}

// TestS3ConformancePrefix runs the suite below a prefix, beside other keys, with small pages.
func TestS3ConformancePrefix(t *testing.T) {
	conform(t, func(t *testing.T) Harness {
		srv := &S3Server{PageSize: 3}
		srv.Put("other", []byte("beside"))
		srv.Put("shared/prefix0", []byte("beside"))
		return Harness{Store: newS3(t, srv, nil), HostileKeys: true, Resumes: true, Prefix: "shared/prefix/"}
	})
}

// TestS3ConformanceEncrypted runs the suite with a key of the customer's, under which no ETag is an MD5.
func TestS3ConformanceEncrypted(t *testing.T) {
	key, err := objstore.ParseCustomerKey(make([]byte, 32))
	must(t, err)
	conform(t, func(t *testing.T) Harness {
		s := newS3(t, &S3Server{OpaqueETags: true}, func(cfg *s3.Config) { cfg.Store.CustomerKey = key })
		return Harness{Store: s, HostileKeys: true, Resumes: true}
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func keysOf(objects []objstore.Object) []string {
	var keys []string
	for _, o := range objects {
		keys = append(keys, o.Key)
	}
	return keys
}

func writePEM(t *testing.T, path string, cert []byte) {
	t.Helper()
	data := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}
