// Package hostile has the parts of stores that answer wrongly which the tests of several packages share. The server
// that scripts have answer in any way is that of lab/e2e/hostile.
package hostile

import (
	"encoding/xml"
	"net"
	"strings"
	"testing"
	"time"
)

// Modified is the time of all objects.
var Modified = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// Entry is one of a page of a listing, as XML; text goes in as it is.
func Entry(key, size, etag string) string {
	return "<Contents><Key>" + key + "</Key><LastModified>" + Modified.Format("2006-01-02T15:04:05.000Z") +
		"</LastModified><ETag>" + etag + "</ETag><Size>" + size + "</Size></Contents>"
}

// Page returns a page of a listing, which is the last one if token is empty.
func Page(token string, entries ...string) string {
	more := "<IsTruncated>false</IsTruncated>"
	if token != "" {
		more = "<IsTruncated>true</IsTruncated><NextContinuationToken>" + token + "</NextContinuationToken>"
	}
	return xml.Header + "<ListBucketResult><Name>bucket</Name>" + more + strings.Join(entries, "") +
		"</ListBucketResult>"
}

// Listen serves each connection, which ends with serve, until the test ends and returns the address.
func Listen(t testing.TB, serve func(c net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			go func() {
				defer c.Close()
				serve(c)
			}()
		}
	}()
	return l.Addr().String()
}
