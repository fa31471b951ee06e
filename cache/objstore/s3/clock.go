package s3

import (
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
)

// clock is the time in signatures: this machine's, set right by the store's if that refuses requests whose time is off,
// as the AWS SDKs do. Stores accept 15 minutes.
//
// https://docs.aws.amazon.com/sdkref/latest/guide/feature-gen-config.html (corrects clock skew)
type clock struct {
	base   func() time.Time
	ahead  atomic.Int64 // of base, nanoseconds
	set    atomic.Int64 // when that was learnt last
	warned atomic.Bool
	log    *slog.Logger
}

// skewed is the difference from which on an answer of 400 or 403 is put down to the clock. A HEAD's answer has no text
// that would say so.
const skewed = 5 * time.Minute

func (c *clock) now() time.Time { return c.base().Add(time.Duration(c.ahead.Load())) }

// off reports whether this process's time, which minio-go signs with, is not the one to sign with.
func (c *clock) off() bool { return time.Until(c.now()).Abs() > time.Second }

// refused learns from an answer that refuses a request that was signed at that time. It reports whether the time was
// off; then the request is worth another try.
func (c *clock) refused(status int, date string, signed time.Time) bool {
	if status != http.StatusForbidden && status != http.StatusBadRequest {
		return false
	}
	theirs, err := http.ParseTime(date)
	if err != nil || theirs.Sub(signed).Abs() < skewed {
		return false
	}
	if theirs.Sub(c.now()).Abs() < skewed { // another request has set the clock meanwhile
		return true
	}
	ahead := theirs.Sub(c.base())
	c.ahead.Store(int64(ahead))
	c.set.Store(time.Now().UnixNano())
	if !c.warned.Swap(true) {
		c.log.Warn("this machine's clock is off; requests are signed with the store's time", "store_is_ahead_by",
			ahead.Round(time.Second),
			"remedy", "set this machine's clock (NTP)")
	}
	return true
}

var anew = v4.NewSigner(func(o *v4.SignerOptions) { o.DisableURIPathEscaping = true })

// sign signs a request of minio-go anew: at another time, or with more headers.
func sign(r *http.Request, keys aws.Credentials, region string, now time.Time) error {
	if encodings, ok := r.Header["Accept-Encoding"]; ok { // proxies change it, so minio-go leaves it out, too
		delete(r.Header, "Accept-Encoding")
		defer func() { r.Header["Accept-Encoding"] = encodings }()
	}
	return anew.SignHTTP(r.Context(), keys, r, r.Header.Get("X-Amz-Content-Sha256"), "s3", region, now)
}
