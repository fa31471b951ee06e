package s3api

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/shoalfs/shoal/cache/objstore"
)

type apiError struct {
	status  int
	code    string
	message string
}

func (e *apiError) Error() string { return e.code + ": " + e.message }

// The errors with one text.
var (
	errNoSuchBucket = &apiError{http.StatusNotFound, "NoSuchBucket", "The specified bucket does not exist"}
	errBucketOwned  = &apiError{http.StatusConflict, "BucketAlreadyOwnedByYou",
		"Your previous request to create the named bucket succeeded and you already own it."}
	errNoSuchKey    = &apiError{http.StatusNotFound, "NoSuchKey", "The specified key does not exist."}
	errInvalidRange = &apiError{http.StatusRequestedRangeNotSatisfiable, "InvalidRange",
		"The requested range is not satisfiable"}
	errPrecondition = &apiError{http.StatusPreconditionFailed, "PreconditionFailed",
		"At least one of the pre-conditions you specified did not hold"}
	errNotModified = &apiError{http.StatusNotModified, "NotModified", "Not Modified"}
	errMethod      = &apiError{http.StatusMethodNotAllowed, "MethodNotAllowed",
		"The specified method is not allowed against this resource."}
	errURI              = bad("InvalidURI", "Couldn't parse the specified URI.")
	errAnonymousHeaders = bad("InvalidRequest",
		"Request specific response headers cannot be used for anonymous GET requests.")
	errUnsigned  = denied("The request is not signed")
	errSignature = &apiError{http.StatusForbidden, "SignatureDoesNotMatch",
		"The request signature we calculated does not match the signature you provided. Check your key and signing " +
			"method."}
	errAccessKey = &apiError{http.StatusForbidden, "InvalidAccessKeyId",
		"The access key is not in the endpoint's key file."}
	errSkewed = &apiError{http.StatusForbidden, "RequestTimeTooSkewed",
		"The difference between the request time and the endpoint's time is too large."}
	errExpired        = denied("Request has expired")
	errNotYet         = denied("Request is not valid yet")
	errUnsignedHeader = denied("There were headers present in the request which were not signed")
)

func bad(code, text string) *apiError { return &apiError{http.StatusBadRequest, code, text} }

func badAuth(text string) *apiError {
	return bad("AuthorizationHeaderMalformed", "The authorization is malformed; "+text)
}

func badArgument(text string) *apiError { return bad("InvalidArgument", text) }

func denied(format string, args ...any) *apiError {
	return &apiError{http.StatusForbidden, "AccessDenied", fmt.Sprintf(format, args...)}
}

// errorOf maps the error of a read, or of a request to the origin.
func errorOf(err error) *apiError {
	var e *apiError
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, context.Canceled):
		return &apiError{http.StatusServiceUnavailable, "ServiceUnavailable", "The endpoint is shutting down"}
	}
	switch objstore.KindOf(err) {
	case objstore.KindChanged, objstore.KindNotFound:
		return &apiError{http.StatusPreconditionFailed, "PreconditionFailed", err.Error()}
	case objstore.KindDenied:
		return denied("The origin denies access: %v", err)
	case objstore.KindTransient:
		return &apiError{http.StatusServiceUnavailable, "ServiceUnavailable", err.Error()}
	}
	return &apiError{http.StatusInternalServerError, "InternalError", err.Error()}
}

type errorBody struct {
	XMLName   xml.Name `xml:"Error"`
	Code      string
	Message   string
	Resource  string
	RequestID string `xml:"RequestId"`
	// of a wrong range: clients on AWS's C library learn from it that an object is empty
	Size string `xml:"ActualObjectSize,omitempty"`
}

func fail(w http.ResponseWriter, r *http.Request, err error) {
	e := errorOf(err)
	if r.Method == http.MethodHead || e.status == http.StatusNotModified {
		w.WriteHeader(e.status)
		return
	}
	// The rest of an upload is not read.
	if r.ContentLength != 0 {
		w.Header().Set("Connection", "close")
	}
	body := errorBody{Code: e.code, Message: e.message, Resource: r.URL.Path,
		RequestID: w.Header().Get(requestIDHeader)}
	if e == errInvalidRange {
		body.Size = strings.TrimPrefix(w.Header().Get("Content-Range"), "bytes */")
	}
	writeXML(w, e.status, body)
}

func writeXML(w http.ResponseWriter, status int, v any) {
	text, err := xml.Marshal(v)
	if err != nil { // the types are ours
		panic(err)
	}
	w.Header().Set("Content-Type", "application/xml")
	w.Header().Set("Content-Length", fmt.Sprint(len(xml.Header)+len(text)))
	w.WriteHeader(status)
	_, _ = w.Write(append([]byte(xml.Header), text...))
}
