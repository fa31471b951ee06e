package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

// TestListingsEnd: a listing that would go on for ever, or is not of what was asked for, is an error that says so.
func TestListingsEnd(t *testing.T) {
	defer func(n int64) { maxPage = n }(maxPage)
	maxPage = 1 << 20 // more takes long to parse
	page := func(token string, keys ...string) string {
		var b strings.Builder
		b.WriteString("<ListBucketResult>")
		for _, k := range keys {
			fmt.Fprintf(&b, "<Contents><Key>%s</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified><ETag>e</ETag><Size>1</Size></Contents>", k)
		}
		if token != "" {
			fmt.Fprintf(&b, "<IsTruncated>true</IsTruncated><NextContinuationToken>%s</NextContinuationToken>", token)
		}
		return b.String() + "</ListBucketResult>"
	}
	for _, c := range []struct {
		name string
		page func(n int) string // the answer to request n, from 0 on
		keys int
		kind objstore.Kind
		text string
	}{
		{"sound", func(n int) string { return page([]string{"t1", "t2", ""}[n], fmt.Sprint("d/", n)) }, 3, 0, ""},
		{"one token for ever", func(n int) string {
			return page("same", fmt.Sprint("d/", n))
		}, 2, objstore.KindInvalid, `continuation token "same" came twice`},
		{"two tokens in turn", func(n int) string {
			return page(fmt.Sprint("t", n%2), fmt.Sprint("d/", n))
		}, 3, objstore.KindInvalid, `continuation token "t0" came twice`},
		{"the first page for ever", func(n int) string {
			return page(fmt.Sprint("t", n), "d/a", "d/b")
		}, 2, objstore.KindInvalid, `first key of a page "d/a" came twice`},
		{"another prefix", func(int) string { return page("", "d/a", "e/b") }, 1, objstore.KindInvalid, `"e/b"`},
		{"truncated without token", func(int) string {
			return strings.Replace(page(""), "</", "<IsTruncated>true</IsTruncated></", 1)
		}, 0, objstore.KindInvalid, "continuation token"},
		{"a page without end", func(int) string {
			return "<ListBucketResult>" + strings.Repeat(" ", int(maxPage))
		}, 0, objstore.KindInvalid, "more than 16 MiB"},
		{"cut short", func(int) string {
			return strings.TrimSuffix(page("", "d/a"), "</ListBucketResult>")
		}, 0, objstore.KindTransient, "cut short"},
		{"nothing", func(int) string { return "" }, 0, objstore.KindTransient, "the answer is empty"},
		{"other XML", func(int) string { return "<?xml version=\"1.0\"?>\n<rss/>" }, 0, objstore.KindInvalid, "<rss>"},
		{"an error with status 200", func(int) string {
			return "<Error><Code>InternalError</Code></Error>"
		}, 0, objstore.KindInvalid, "<Error>"},
		{"keys that are not encoded as it says", func(int) string {
			return strings.Replace(page("", "d/50%zz"), "<Contents>", "<EncodingType>url</EncodingType><Contents>", 1)
		}, 0, objstore.KindInvalid, "%zz"},
		{"not a date", func(int) string {
			return strings.Replace(page("", "d/a"), "2026-01", "yesterday", 1)
		}, 0, objstore.KindInvalid, "yesterday"},
		{"not a size", func(int) string {
			return strings.Replace(page("", "d/a"), "<Size>1", "<Size>many", 1)
		}, 0, objstore.KindInvalid, "many"},
		{"entities in entities", func(int) string {
			return `<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]>` + page("", "d/&b;")
		}, 0, objstore.KindInvalid, "not XML"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := 0
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "application/xml")
				_, _ = io.WriteString(w, c.page(n))
				n++
			}))
			defer srv.Close()
			s, err := New(t.Context(),
				Config{Endpoint: srv.URL, Bucket: "bucket", AccessKeyID: "id", SecretAccessKey: "key"})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			keys := 0
			for _, e := range s.List(t.Context(), "d/", "") {
				if err = e; err == nil {
					keys++
				}
			}
			if keys != c.keys || objstore.KindOf(err) != c.kind ||
				c.text != "" && !strings.Contains(fmt.Sprint(err), c.text) {
				t.Errorf("%d keys, %v; want %d, kind %v with %q", keys, err, c.keys, c.kind, c.text)
			}
		})
	}
}

// TestUploadsEnd: two pages in turn are not listed for ever.
func TestUploadsEnd(t *testing.T) {
	n := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if n++; n > 10 {
			http.Error(w, "too many", http.StatusNotFound)
			return
		}
		_, _ = fmt.Fprintf(w, `<ListMultipartUploadsResult><IsTruncated>true</IsTruncated><NextKeyMarker>k%d</NextKeyMarker><NextUploadIdMarker>i</NextUploadIdMarker>`+
			`<Upload><Key>k%d</Key><UploadId>i</UploadId><Initiated>2026-01-02T03:04:05.000Z</Initiated></Upload></ListMultipartUploadsResult>`, n%2, n%2)
	}))
	defer srv.Close()
	s, err := New(t.Context(), Config{Endpoint: srv.URL, Bucket: "bucket", AccessKeyID: "id", SecretAccessKey: "key"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if list, err := s.Uploads(t.Context(), ""); err != nil || n != 3 {
		t.Errorf("%d pages, %v, %v", n, list, err)
	}
	n = 0
	// This store does not heed the prefix: others' uploads, which a pack would abort, are left out.
	if list, err := s.Uploads(t.Context(), "k1"); err != nil || len(list) != 2 || list[0].Key != "k1" {
		t.Errorf("of k1: %v, %v", list, err)
	}
}

// TestAnswersToUploadsEnd: what a store says about an upload or a copy is not kept in memory without a bound.
func TestAnswersToUploadsEnd(t *testing.T) {
	defer func(n int64) { maxPage = n }(maxPage)
	maxPage = 1 << 20
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		what := map[string]string{http.MethodGet: "ListPartsResult", http.MethodPut: "CopyObjectResult",
			http.MethodPost: "InitiateMultipartUploadResult"}[r.Method]
		_, _ = io.WriteString(w, "<"+what+"><UploadId>")
		for more := []byte(strings.Repeat("x", 1<<20)); r.Context().Err() == nil; {
			_, _ = w.Write(more)
		}
	}))
	defer srv.Close()
	s, err := New(t.Context(), Config{Endpoint: srv.URL, Bucket: "bucket", AccessKeyID: "id", SecretAccessKey: "key"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for name, ask := range map[string]func() error{
		"a new one": func() error { _, err := s.Upload(ctx, "k", 10<<20, 5<<20); return err },
		"its parts": func() error { _, _, err := s.Resume(ctx, "k", "id", 10<<20, 5<<20); return err },
		"a copy":    func() error { _, err := s.Copy(ctx, objstore.Object{Key: "a", ETag: "e"}, "k"); return err },
	} {
		if err := ask(); !strings.Contains(fmt.Sprint(err), errLongPage.Error()) {
			t.Errorf("%s: %.300v", name, err)
		}
	}
}

// drip is a body of a byte a second.
type drip struct{ ctx context.Context }

func (d drip) Read(p []byte) (int, error) {
	select {
	case <-d.ctx.Done():
		return 0, d.ctx.Err()
	case <-time.After(time.Second):
	}
	p[0] = ' '
	return 1, nil
}
func (drip) Close() error { return nil }

// TestPageHasItsTime: a page that drips, or the bucket's region, ends after its time, one whose caller leaves with the
// caller's error.
func TestPageHasItsTime(t *testing.T) {
	for _, query := range []string{"delimiter=&list-type=2", "location="} {
		for _, patience := range []time.Duration{time.Hour, 10 * time.Second} {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				seen := &pages{}
				r, err := http.NewRequestWithContext(context.WithValue(ctx, pagesKey{}, seen), http.MethodGet,
					"http://h/bucket/?"+query, http.NoBody)
				if err != nil {
					t.Fatal(err)
				}
				start := time.Now()
				resp, err := answerGuard{RoundTripper: dripping{}}.RoundTrip(r)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				_, err = io.Copy(io.Discard, resp.Body)
				if took, want := time.Since(start), min(patience, pageTimeout); took != want ||
					errors.Is(err, errSlowPage) != (want == pageTimeout) {
					t.Errorf("%s: %v after %v, want the end after %v", query, err, took, want)
				}
				if seen.next != (query != "location=") { // which is no page of the listing that asks for it
					t.Errorf("%s: a page: %t", query, seen.next)
				}
			})
		}
	}
}

// dripping is a transport that answers with a drip.
type dripping struct{}

func (dripping) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: drip{r.Context()}}, nil
}
