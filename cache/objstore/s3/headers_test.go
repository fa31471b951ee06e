package s3_test

import (
	"bytes"
	"crypto/hmac"
	"crypto/md5"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// verifyV4 checks the signature of a request as a server does: from what came, over the headers that are
// said to be signed. S3 refuses x-amz- headers that are not.
//
// https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
func verifyV4(r *http.Request, secret string) error {
	auth, ok := strings.CutPrefix(r.Header.Get("Authorization"), "AWS4-HMAC-SHA256 ")
	if !ok {
		return fmt.Errorf("not signed: %q", r.Header.Get("Authorization"))
	}
	fields := map[string]string{}
	for _, f := range strings.Split(auth, ",") {
		k, v, _ := strings.Cut(strings.TrimSpace(f), "=")
		fields[k] = v
	}
	_, scope, _ := strings.Cut(fields["Credential"], "/")
	names := strings.Split(fields["SignedHeaders"], ";")
	for name := range r.Header {
		if n := strings.ToLower(name); strings.HasPrefix(n, "x-amz-") && !slices.Contains(names, n) {
			return fmt.Errorf("%s is not signed", name)
		}
	}
	if !slices.IsSorted(names) {
		return fmt.Errorf("not in order: %v", names)
	}
	path, query, _ := strings.Cut(r.RequestURI, "?")
	q, err := url.ParseQuery(query)
	if err != nil {
		return err
	}
	text := r.Method + "\n" + path + "\n" + strings.ReplaceAll(q.Encode(), "+", "%20") + "\n"
	for _, n := range names {
		v := r.Header.Get(n)
		switch n {
		case "host":
			v = r.Host
		case "content-length":
			v = fmt.Sprint(r.ContentLength)
		}
		text += n + ":" + strings.TrimSpace(v) + "\n"
	}
	text += "\n" + fields["SignedHeaders"] + "\n" + r.Header.Get("X-Amz-Content-Sha256")
	digest := sha256.Sum256([]byte(text))
	key := []byte("AWS4" + secret)
	for _, part := range strings.Split(scope, "/") {
		h := hmac.New(sha256.New, key)
		h.Write([]byte(part))
		key = h.Sum(nil)
	}
	h := hmac.New(sha256.New, key)
	h.Write([]byte("AWS4-HMAC-SHA256\n" + r.Header.Get("X-Amz-Date") + "\n" + scope + "\n" +
		hex.EncodeToString(digest[:])))
	if hex.EncodeToString(h.Sum(nil)) != fields["Signature"] {
		return fmt.Errorf("wrong signature over %q", text)
	}
	return nil
}

// TestHeadersOfEveryRequest: who pays stands on every request, the customer's key on those that S3 wants it
// on and no other, both are signed, and neither is in a log or an error.
func TestHeadersOfEveryRequest(t *testing.T) {
	raw := bytes.Repeat([]byte("k7"), 16)
	sum := md5.Sum(raw)
	secret := base64.StdEncoding.EncodeToString(raw)
	key, err := objstore.ParseCustomerKey(raw)
	must(t, err)
	for _, c := range []struct {
		name      string
		sse, pays bool
	}{{"key", true, false}, {"payer", false, true}, {"both", true, true}, {"neither", false, false}} {
		t.Run(c.name, func(t *testing.T) {
			seen := map[string]bool{}
			srv := &S3Server{AccessKey: "key-id"}
			srv.Intercept = func(w http.ResponseWriter, r *http.Request) bool {
				if err := verifyV4(r, "hush-secret"); err != nil {
					t.Errorf("%s %s: %v", r.Method, r.RequestURI, err)
				}
				ofObject := !strings.HasPrefix(r.RequestURI, "/bucket/?") && r.Method != http.MethodDelete
				seen[r.Method] = true
				if got := r.Header.Get("X-Amz-Request-Payer"); (got == "requester") != c.pays {
					t.Errorf("%s %s: payer %q", r.Method, r.RequestURI, got)
				}
				h := r.Header
				got := []string{h.Get("X-Amz-Server-Side-Encryption-Customer-Algorithm"),
					h.Get("X-Amz-Server-Side-Encryption-Customer-Key"),
					h.Get("X-Amz-Server-Side-Encryption-Customer-Key-MD5")}
				want := []string{"AES256", secret, base64.StdEncoding.EncodeToString(sum[:])}
				if !c.sse || !ofObject {
					want = []string{"", "", ""}
				}
				if !slices.Equal(got, want) {
					t.Errorf("%s %s: key headers %q", r.Method, r.RequestURI, got)
				}
				if strings.HasSuffix(r.URL.Path, "/wrong") {
					WriteS3Error(w, 400, "InvalidRequest",
						"The object was stored using a form of Server Side Encryption, not with "+
							h.Get("X-Amz-Server-Side-Encryption-Customer-Key"))
					return true
				}
				return false
			}
			s := newS3(t, srv, func(cfg *s3.Config) {
				if c.sse {
					cfg.Store.CustomerKey = key
				}
				cfg.Store.RequesterPays = c.pays
			})
			etag := srv.Put("a/b c", []byte("0123456789"))
			p := make([]byte, 4)
			o := objstore.Object{Key: "a/b c", Size: 10, ETag: etag}
			must(t, s.ReadAt(t.Context(), o, p, 3))
			must(t, s.ReadSpans(t.Context(), o, []objstore.Span{{Off: 1, P: p}}))
			_, err := s.Stat(t.Context(), o.Key)
			must(t, err)
			must(t, s.Check(t.Context()))
			memstore.Collect(t, s.List(t.Context(), "a/", ""))
			memstore.Collect(t, s.ListLevel(t.Context(), "a/"))
			_, err = s.PutNew(t.Context(), "new", []byte("x"))
			must(t, err)
			u, err := s.Upload(t.Context(), "up", 6<<20, 6<<20)
			must(t, err)
			must(t, u.Part(t.Context(), 0, make([]byte, 6<<20)))
			_, err = u.Complete(t.Context())
			must(t, err)
			u, err = s.Upload(t.Context(), "up2", 6<<20, 6<<20)
			must(t, err)
			must(t, u.Abort(t.Context()))
			_, err = objstore.AbortUploads(t.Context(), s, "up")
			must(t, err)
			must(t, s.Delete(t.Context(), "new", ""))
			// minio-go's own GET, where the other cannot: an ETag with a space.
			if err := s.ReadAt(t.Context(), objstore.Object{Key: o.Key, Size: 10, ETag: "odd tag"}, p,
				0); objstore.KindOf(err) != objstore.KindChanged {
				t.Errorf("through minio-go: %v", err)
			}
			for _, m := range []string{"GET", "HEAD", "PUT", "POST", "DELETE"} {
				if !seen[m] {
					t.Errorf("no %s was sent", m)
				}
			}
			err = s.ReadAt(t.Context(), objstore.Object{Key: "wrong", Size: 10, ETag: "e"}, p, 0)
			if objstore.KindOf(err) != objstore.KindInvalid || !strings.Contains(err.Error(), "SHOAL_SSE_C_KEY") ||
				strings.Contains(err.Error(), secret) {
				t.Errorf("the wrong key: %v", err)
			}
		})
	}
	opts := objstore.StoreOptions{CustomerKey: key}
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "key", key, "options", opts)
	for _, text := range []string{log.String(), fmt.Sprintf("%v %+v %#v %d %x %q", opts, opts, opts, key, key, key)} {
		if strings.Contains(text, secret) || strings.Contains(text, string(raw)) || strings.Contains(text, "107 55") ||
			strings.Contains(text, "6b37") {
			t.Errorf("the key is in %s", text)
		}
	}
}

// TestCustomerKeyStaysHere: the key goes over plain HTTP to this machine only.
func TestCustomerKeyStaysHere(t *testing.T) {
	key, err := objstore.ParseCustomerKey(make([]byte, 32))
	must(t, err)
	for endpoint, ok := range map[string]bool{
		"http://127.0.0.1:9000": true, "http://localhost": true, "http://[::1]:9": true,
		"https://store.example.com": true, "": true,
		"http://store.example.com": false, "http://10.0.0.1:9000": false, "http://localhost.example.com": false,
		"http://[fe80::1]": false,
	} {
		s, err := s3.New(t.Context(),
			s3.Config{Endpoint: endpoint, Bucket: "bucket", AccessKeyID: "k", SecretAccessKey: "s",
				Getenv: func(string) string { return "" }, Store: objstore.StoreOptions{CustomerKey: key}})
		if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), "https://") {
			t.Errorf("%q: %v", endpoint, err)
		}
		if s != nil {
			s.Close()
		}
	}
	if _, err := s3.New(t.Context(), s3.Config{Bucket: "bucket", Anonymous: true, Getenv: func(string) string {
		return ""
	}, Store: objstore.StoreOptions{RequesterPays: true}}); err == nil {
		t.Error("nobody pays, and it was opened")
	}
}
