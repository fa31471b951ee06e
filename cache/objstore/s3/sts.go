package s3

import (
	"cmp"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

// roleRequest is a request to STS.
type roleRequest struct{ arn, session, external, seconds string }

// assumeRole exchanges credentials for those of a role.
func (c *awsChain) assumeRole(ctx context.Context, files *profiles, p profile, r roleRequest, by credentials.Value) (credentials.Value, error) {
	seconds, err := strconv.Atoi(cmp.Or(r.seconds, "3600"))
	if err != nil {
		return credentials.Value{}, errors.New("duration_seconds is not a number")
	}
	sts := &credentials.STSAssumeRole{
		Client: c.client, STSEndpoint: c.stsEndpoint(files, p),
		Options: credentials.STSAssumeRoleOptions{
			AccessKey: by.AccessKeyID, SecretKey: by.SecretAccessKey, SessionToken: by.SessionToken,
			Location: c.stsRegion(p), DurationSeconds: seconds, RoleARN: r.arn, RoleSessionName: sessionName(r.session), ExternalID: r.external,
		},
	}
	v, err := sts.RetrieveWithCredContext(&credentials.CredContext{Client: c.client, Context: ctx})
	var answer credentials.ErrorResponse
	if errors.As(err, &answer) {
		err = errors.New(clean(answer.STSError.Code + ": " + answer.STSError.Message))
	}
	return v, err
}

// sessionName names a session in the account's audit log.
func sessionName(given string) string {
	if given != "" {
		return given
	}
	return "shoal-" + strconv.FormatInt(time.Now().Unix(), 10)
}

func (c *awsChain) stsRegion(p profile) string {
	return cmp.Or(c.getenv("AWS_REGION"), c.getenv("AWS_DEFAULT_REGION"), p.get("region"), c.region, "us-east-1")
}

// stsEndpoint returns STS's URL: the configured one, or the region's.
func (c *awsChain) stsEndpoint(files *profiles, p profile) string {
	if e := configuredEndpoint(c.getenv, files, p, "sts"); e != "" {
		return e
	}
	region := c.stsRegion(p)
	endpoint := "https://sts." + region + ".amazonaws.com"
	if strings.HasPrefix(region, "cn-") {
		endpoint += ".cn"
	}
	return endpoint
}

// fromWebIdentity exchanges the token file of the environment, as Kubernetes mounts it, for credentials.
func (c *awsChain) fromWebIdentity(ctx context.Context) (credentials.Value, error) {
	files, err := loadProfiles(c.getenv)
	if err != nil {
		return credentials.Value{}, err
	}
	p, _ := files.profile(profileName(c.getenv))
	arn := c.getenv("AWS_ROLE_ARN")
	if arn == "" {
		return credentials.Value{}, errors.New("AWS_WEB_IDENTITY_TOKEN_FILE is set, AWS_ROLE_ARN is not")
	}
	return c.webIdentity(ctx, files, p, c.getenv("AWS_WEB_IDENTITY_TOKEN_FILE"), roleRequest{arn: arn, session: c.getenv("AWS_ROLE_SESSION_NAME")})
}

// webIdentity requests a role from STS with a token, whose file is read each time. minio-go's provider also sends the
// line break at the file's end, and chooses the session's name.
//
// https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRoleWithWebIdentity.html
func (c *awsChain) webIdentity(ctx context.Context, files *profiles, p profile, file string, r roleRequest) (v credentials.Value, err error) {
	token, err := os.ReadFile(file)
	if err != nil {
		return v, fmt.Errorf("token file %s: %w", file, sourceError(err))
	}
	form := url.Values{
		"Action": {"AssumeRoleWithWebIdentity"}, "Version": {credentials.STSVersion}, "RoleArn": {r.arn},
		"RoleSessionName": {sessionName(r.session)}, "WebIdentityToken": {strings.TrimSpace(string(token))},
	}
	if r.seconds != "" {
		form.Set("DurationSeconds", r.seconds)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.stsEndpoint(files, p), strings.NewReader(form.Encode()))
	if err != nil {
		return v, errors.New("the endpoint of STS is not a URL")
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	resp, err := c.client.Do(req)
	if err != nil {
		return v, fmt.Errorf("STS at %s: %w", req.URL.Host, sourceError(err))
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return v, fmt.Errorf("STS at %s: %w", req.URL.Host, err)
	}
	if resp.StatusCode != http.StatusOK {
		var answer credentials.ErrorResponse
		if xml.Unmarshal(body, &answer) != nil || answer.STSError.Code == "" {
			return v, fmt.Errorf("STS at %s: %w", req.URL.Host, statusError(resp.StatusCode))
		}
		return v, fmt.Errorf("STS at %s: %s", req.URL.Host, clean(answer.STSError.Code+": "+strings.ReplaceAll(answer.STSError.Message, form.Get("WebIdentityToken"), "…")))
	}
	var a credentials.AssumeRoleWithWebIdentityResponse
	if err := xml.Unmarshal(body, &a); err != nil {
		return v, fmt.Errorf("STS at %s: the answer is not from STS", req.URL.Host)
	}
	got := a.Result.Credentials
	if got.AccessKey == "" || got.SecretKey == "" {
		return v, fmt.Errorf("STS at %s: the answer contains no credentials", req.URL.Host)
	}
	v = keyPair(got.AccessKey, got.SecretKey, got.SessionToken)
	v.Expiration = got.Expiration
	return v, nil
}
