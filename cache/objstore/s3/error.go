package s3

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/cache/objstore"
)

// verdict is the meaning of an S3 error.
type verdict struct {
	kind   objstore.Kind
	remedy string // %s, if there, is the endpoint
}

const (
	remedyKeys   = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and that they belong to the store at %s"
	remedyToken  = "get new temporary credentials, and set AWS_SESSION_TOKEN with them"
	remedyBucket = "check the bucket's name, and AWS_ENDPOINT_URL (now %s)"
	remedyRights = "the credentials need s3:GetObject on the objects and s3:ListBucket on the bucket; where " +
		"requesters pay, --store requester-pays"
	remedyWrite = "the credentials need s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload, " +
		"s3:ListMultipartUploadParts and s3:ListBucketMultipartUploads"
	remedyClock   = "set this machine's clock (NTP): the store refuses signatures that are off by more than 15 minutes"
	remedyRegion  = "set AWS_REGION to the bucket's region"
	remedyReach   = "check AWS_ENDPOINT_URL (now %s) and that the store is up"
	remedyNotS3   = "the server that answers is not an S3 API; check AWS_ENDPOINT_URL (now %s)"
	remedyHeader  = "it has a control character: upload the object again if it is its ETag, or check the credentials"
	remedyListing = "the listing is wrong: the store is faulty, or a proxy in front of it drops parts of requests; " +
		"check AWS_ENDPOINT_URL (now %s)"
	remedyLacks = "the store at %s, or a proxy in front of it, lacks this part of the S3 API; docs/s3.md lists what " +
		"is needed"
	remedySSE = "the objects are encrypted with another key than the one given, or not at all: check SHOAL_SSE_C_KEY"
	remedyCA  = "set AWS_CA_BUNDLE to the certificate authority of %s"
)

// s3Codes is the one place that says what an error code means.
// https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
var s3Codes = verdicts(map[verdict]string{
	{objstore.KindNotFound, remedyBucket}: "NoSuchBucket",
	{objstore.KindNotFound, ""}:           "NoSuchKey NotFound NoSuchVersion NoSuchUpload",
	{objstore.KindChanged, ""}:            "PreconditionFailed InvalidRange", // the range is inside the listed object
	{objstore.KindDenied, remedyRights}:   "AccessDenied AllAccessDisabled",
	// The last is versitygw's for an unknown access key.
	{objstore.KindDenied, remedyKeys}: "InvalidAccessKeyId " +
		"SignatureDoesNotMatch XAdminUserNotFound",
	{objstore.KindDenied, remedyToken}: "ExpiredToken ExpiredTokenException " +
		"InvalidToken TokenRefreshRequired",
	{objstore.KindDenied, "restore the object from its archive class first"}: "InvalidObjectState",
	{objstore.KindDenied, ""}:                      "AccountProblem",
	{objstore.KindInvalid, remedyClock}:            "RequestTimeTooSkewed RequestExpired",
	{objstore.KindInvalid, remedyRegion}:           "AuthorizationHeaderMalformed PermanentRedirect InvalidRegion",
	{objstore.KindInvalid, remedyBucket}:           "InvalidBucketName",
	{objstore.KindInvalid, remedyLacks}:            "NotImplemented MethodNotAllowed",
	{objstore.KindInvalid, "choose larger parts"}:  "EntityTooSmall",
	{objstore.KindInvalid, "choose smaller parts"}: "EntityTooLarge",
	{objstore.KindInvalid, ""}:                     "InvalidPart InvalidPartOrder",
	{objstore.KindTransient, ""}: "TemporaryRedirect SlowDown SlowDownRead Throttling ThrottlingException " +
		"RequestLimitExceeded RequestThrottled RequestTimeout InternalError ServiceUnavailable OperationAborted " +
		"IncompleteBody BadDigest",
})

func verdicts(codes map[verdict]string) map[string]verdict {
	m := map[string]verdict{}
	for v, list := range codes {
		for code := range strings.FieldsSeq(list) {
			m[code] = v
		}
	}
	return m
}

// statusVerdict is for answers with a code that is not in the table.
func statusVerdict(status int, code string) verdict {
	switch {
	case status == http.StatusNotFound:
		return verdict{objstore.KindNotFound, ""}
	case status == http.StatusPreconditionFailed, status == http.StatusRequestedRangeNotSatisfiable:
		return verdict{objstore.KindChanged, ""}
	case status == http.StatusUnauthorized, status == http.StatusForbidden:
		return verdict{objstore.KindDenied, remedyRights}
	case status == http.StatusProxyAuthRequired:
		return verdict{objstore.KindDenied, "the proxy requires credentials; check HTTPS_PROXY and NO_PROXY"}
	case status == http.StatusNotImplemented:
		return verdict{objstore.KindInvalid, remedyLacks}
	case status == http.StatusHTTPVersionNotSupported:
		return verdict{objstore.KindInvalid, remedyNotS3}
	case status == http.StatusRequestTimeout, status == http.StatusTooManyRequests, status == 499, status >= 500:
		return verdict{objstore.KindTransient, ""}
	case status >= 300 && (code == "" || strings.Contains(code, " ") || code == http.StatusText(status)): // not S3's
		return verdict{objstore.KindInvalid, remedyNotS3}
	case status >= 300 && status < 400:
		return verdict{objstore.KindInvalid, remedyRegion}
	case status >= 400:
		return verdict{objstore.KindInvalid, ""}
	}
	return verdict{objstore.KindOther, ""}
}

// fail turns an error of minio-go into ctx's own error or an *Error, and leaves an *Error as it is.
func (s *Store) fail(ctx context.Context, generation uint64, op, key string, err error) error {
	if cerr := ctx.Err(); cerr != nil || is[*objstore.Error](err) {
		return cmp.Or(cerr, err)
	}
	var v verdict
	var cause error
	slow, again := false, false
	if resp := minio.ToErrorResponse(err); resp.Code != "" || resp.StatusCode != 0 {
		v, cause = s.answer(resp)
		if again = s.renewed(ctx, generation, resp); ctx.Err() != nil {
			return ctx.Err()
		}
		if again || refusal(resp.Code) && s.keys.fetch != nil && s.keys.accepted.Load() {
			v.kind = objstore.KindTransient
		}
		if resp.Code == "RequestTimeTooSkewed" && time.Since(time.Unix(0, s.time.set.Load())) < time.Minute {
			v.kind, again = objstore.KindTransient, true // its body could not be sent again
		}
		slow = v.kind == objstore.KindTransient && (resp.StatusCode == http.StatusServiceUnavailable ||
			resp.StatusCode == http.StatusTooManyRequests)
	} else {
		v, cause = s.transportError(err)
	}
	e := &objstore.Error{Op: op, Key: key, Kind: v.kind, Remedy: s.remedy(v.remedy), Err: cause, SlowDown: slow,
		AtOnce: again}
	switch {
	case v.kind == objstore.KindChanged:
		e.Remedy = objstore.RemedyChanged
	case v.remedy == remedyRights && (op == "put" || op == "delete"):
		e.Remedy = remedyWrite
	}
	return e
}

// remedy names the endpoint, and what sets it.
func (s *Store) remedy(text string) string {
	return strings.NewReplacer("AWS_ENDPOINT_URL", s.setting, "%s", s.endpoint).Replace(text)
}

// renewed reports whether there are other credentials by now than those of the generation, with which a request got an
// answer.
func (s *Store) renewed(ctx context.Context, generation uint64, r minio.ErrorResponse) bool {
	why := reasonDenied
	if refusal(r.Code) {
		why = reasonRefused
	}
	return doubtful(r) && s.keys.refused(ctx, generation, why)
}

// refusal reports whether by that code a store refuses unknown or expired credentials. If these worked before and can
// change, it is a temporary failure: a rotation may be about to happen.
func refusal(code string) bool {
	r := s3Codes[code].remedy
	return r == remedyKeys || r == remedyToken
}

// doubtful reports whether other credentials might get another answer. Answers to HEAD have no code.
func doubtful(r minio.ErrorResponse) bool {
	switch _, known := s3Codes[r.Code]; r.StatusCode {
	case http.StatusUnauthorized, http.StatusForbidden:
		return !known || s3Codes[r.Code].kind == objstore.KindDenied
	case http.StatusBadRequest:
		return !known || refusal(r.Code)
	}
	return refusal(r.Code)
}

func (s *Store) answer(r minio.ErrorResponse) (verdict, error) {
	v, known := s3Codes[r.Code]
	if !known {
		v = statusVerdict(r.StatusCode, r.Code)
	}
	if r.Region != "" && (v.remedy == remedyRegion || v.kind == objstore.KindInvalid && r.StatusCode/100 == 3) {
		v.remedy = "set AWS_REGION=" + clean(r.Region)
	}
	if r.StatusCode == http.StatusBadRequest && strings.Contains(strings.ToLower(r.Message), "encrypt") {
		v = verdict{objstore.KindInvalid, remedySSE}
	}
	text := clean(s.redact(r.Message))
	if code := clean(s.redact(r.Code)); code != "" && !strings.HasPrefix(text, code) {
		text = strings.TrimSuffix(code+": "+text, ": ")
	}
	if r.StatusCode != 0 && !strings.Contains(text, fmt.Sprint(r.StatusCode)) {
		text = fmt.Sprintf("%s (HTTP %d)", text, r.StatusCode)
	}
	return v, errors.New(text)
}

func is[T error](err error) bool {
	_, ok := errors.AsType[T](err)
	return ok
}

// transportError classifies an error without an answer.
func (s *Store) transportError(err error) (verdict, error) {
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err // its URL repeats endpoint and key
	}
	at := func(err error) error { return fmt.Errorf("%s: %w", s.endpoint, err) }

	var badCert x509.CertificateInvalidError
	var dial *net.OpError
	var xmlSyntax *xml.SyntaxError
	switch {
	case is[x509.UnknownAuthorityError](err):
		return verdict{objstore.KindInvalid, remedyCA}, at(err)
	case errors.As(err, &badCert) && badCert.Reason == x509.Expired:
		return verdict{objstore.KindInvalid, "the certificate or this machine's clock is out of date"}, at(err)
	case is[x509.HostnameError](err), errors.As(err, &badCert), is[*tls.CertificateVerificationError](err):
		return verdict{objstore.KindInvalid,
			"use the host name of the store's certificate in AWS_ENDPOINT_URL"}, at(err)
	case is[tls.RecordHeaderError](err), strings.Contains(err.Error(), "HTTP response to HTTPS client"):
		return verdict{objstore.KindInvalid, s.remedyScheme()}, at(s.errScheme())
	case errors.Is(err, errNotXML), errors.Is(err, errOtherXML), errors.Is(err, errLongPage):
		return verdict{objstore.KindInvalid, remedyNotS3}, at(err)
	case errors.As(err, &dial) && dial.Op == "proxyconnect":
		return verdict{objstore.KindTransient, "check HTTP_PROXY, HTTPS_PROXY and NO_PROXY, and that the proxy is up"},
			at(err)
	case errors.Is(err, errSlowPage), is[*net.DNSError](err), errors.Is(err, syscall.ECONNREFUSED),
		errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return verdict{objstore.KindTransient, remedyReach}, at(err)
	case errors.Is(err, errCircle), errors.Is(err, errOtherPrefix):
		return verdict{objstore.KindInvalid, remedyListing}, at(err)
	case is[*time.ParseError](err), is[*strconv.NumError](err), is[url.EscapeError](err):
		return verdict{objstore.KindInvalid, remedyNotS3}, at(fmt.Errorf("the answer is not S3's XML: %w", err))
	case is[xml.UnmarshalError](err):
		return verdict{objstore.KindInvalid, remedyNotS3}, at(errors.New("the answer is not S3's XML"))
	case errors.As(err, &xmlSyntax):
		if strings.Contains(xmlSyntax.Msg, "EOF") {
			return verdict{objstore.KindTransient, ""}, at(errors.New("the answer is cut short"))
		}
		return verdict{objstore.KindInvalid, remedyNotS3}, at(errors.New("the answer is not XML"))
	case strings.Contains(err.Error(), "net/http: invalid header field value"): // and so nothing was sent
		return verdict{objstore.KindInvalid, remedyHeader}, at(err)
	case errors.Is(err, io.EOF):
		return verdict{objstore.KindTransient, ""}, at(errors.New("the answer is empty"))
	case strings.HasPrefix(err.Error(), "Connection closed by foreign host"): // minio-go hides an EOF
		return verdict{objstore.KindTransient, ""}, at(io.ErrUnexpectedEOF)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		// Not the caller's: a timeout of the dialer or of a credential's source. The text is kept, but not the
		// identity, so that it is not taken for the caller's.
		return verdict{objstore.KindTransient, remedyReach}, at(errors.New(err.Error()))
	}
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
		return verdict{objstore.KindTransient, remedyReach}, at(err)
	}
	return verdict{objstore.KindTransient, ""}, at(err)
}

var signature = regexp.MustCompile(`(?i)(signature|credential|token|authorization)\s*[=:]\s*[^\s,&;<]+`)

// redact removes credentials from a server's text: some servers and proxies echo the request.
func (s *Store) redact(text string) string {
	text = signature.ReplaceAllString(text, "$1=…")
	for _, e := range s.sse {
		if e.name == headerKey {
			text = strings.ReplaceAll(text, e.value, "…")
		}
	}
	h := s.keys.cur.Load()
	for _, v := range []aws.Credentials{h.value, h.before} {
		for _, secret := range []string{v.SecretAccessKey, v.SessionToken, v.AccessKeyID} {
			if len(secret) > 5 { // a shorter one is no secret, and is part of words
				text = strings.ReplaceAll(text, secret, "…")
			}
		}
	}
	return text
}

// clean makes a server's text safe for one line of a log or a terminal.
func clean(text string) string {
	const most = 200
	text = strings.Join(strings.FieldsFunc(text, func(r rune) bool {
		return unicode.IsSpace(r) || !unicode.IsPrint(r)
	}), " ")
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}
