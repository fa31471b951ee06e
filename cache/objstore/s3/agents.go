package s3

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

// imdsTimeout bounds a request to the instance metadata service, which is one hop away or absent; outside EC2 nothing
// answers at its address.
const imdsTimeout = time.Second

// fromProcess runs a credential_process, in the shell as the AWS tools do. minio-go's provider splits the command at
// its spaces, and treats credentials without an expiry time as expired.
//
// https://docs.aws.amazon.com/sdkref/latest/guide/feature-process-credentials.html
func fromProcess(ctx context.Context, command string) (v credentials.Value, err error) {
	cmd := exec.CommandContext(ctx, "sh", "-c", command)
	cmd.WaitDelay = time.Second // for processes that it left running
	out, err := cmd.Output()
	if err != nil {
		if cerr := ctx.Err(); cerr != nil {
			err = cerr
		}
		return v, err // the exit status; its output may be secret
	}
	var answer struct {
		Version int
		keyDocument
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		return v, errors.New("its output is not credentials in JSON")
	}
	if answer.Version != 1 {
		return v, fmt.Errorf("its output has version %d, not 1", answer.Version)
	}
	return answer.value()
}

// keyDocument is the JSON of credentials from processes, containers and instances.
type keyDocument struct {
	AccessKeyID     string `json:"AccessKeyId"`
	SecretAccessKey string
	Token           string
	SessionToken    string // a process's word for it
	Expiration      time.Time
	Code, Message   string
}

func (d keyDocument) value() (v credentials.Value, err error) {
	if d.Code != "" && d.Code != "Success" {
		return v, errors.New(clean(d.Code + ": " + d.Message))
	}
	if d.AccessKeyID == "" || d.SecretAccessKey == "" {
		return v, errors.New("the answer contains no credentials")
	}
	v = keyPair(d.AccessKeyID, d.SecretAccessKey, cmp.Or(d.Token, d.SessionToken))
	v.Expiration = d.Expiration
	return v, nil
}

// parseKeys reads the answer of a container's or instance's agent.
func parseKeys(text []byte, err error) (credentials.Value, error) {
	if err != nil {
		return credentials.Value{}, err
	}
	var d keyDocument
	if err := json.Unmarshal(text, &d); err != nil {
		return credentials.Value{}, errors.New("the answer is not credentials in JSON")
	}
	if d.Expiration.IsZero() {
		d.Expiration = time.Now().Add(15 * time.Minute) // no expiry time; ask again now and then
	}
	return d.value()
}

func (c *awsChain) inContainer() bool {
	return c.getenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") != "" || c.getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI") != ""
}

// fromContainer asks the agent of ECS, or of EKS Pod Identity, whose token file is read each time.
func (c *awsChain) fromContainer(ctx context.Context) (credentials.Value, error) {
	return parseKeys(c.askContainer(ctx))
}

func (c *awsChain) askContainer(ctx context.Context) ([]byte, error) {
	endpoint := c.getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI")
	if relative := c.getenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"); relative != "" {
		endpoint = credentials.DefaultECSRoleEndpoint + relative
	} else if err := trustedHost(endpoint); err != nil {
		return nil, err
	}
	token := c.getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN")
	if path := c.getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"); path != "" {
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		token = strings.TrimSpace(string(b))
	}
	return ask(ctx, c.client, http.MethodGet, endpoint, "Authorization", token)
}

// trustedHost refuses to send an unencrypted token to any address but this machine's and those of ECS and EKS agents,
// like the AWS tools.
func trustedHost(endpoint string) error {
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" {
		return errors.New("AWS_CONTAINER_CREDENTIALS_FULL_URI is not a URL")
	}
	if u.Scheme == "https" || u.Hostname() == "localhost" {
		return nil
	}
	switch addr, err := netip.ParseAddr(u.Hostname()); {
	case err != nil:
	case addr.IsLoopback(), addr == netip.MustParseAddr("169.254.170.2"), addr == netip.MustParseAddr("169.254.170.23"),
		addr == netip.MustParseAddr("fd00:ec2::23"):
		return nil
	}
	return errors.New("AWS_CONTAINER_CREDENTIALS_FULL_URI is neither https nor an address of this machine")
}

// fromInstance asks the instance metadata service, version 2, or version 1 if it has no tokens.
func (c *awsChain) fromInstance(ctx context.Context) (credentials.Value, error) {
	return parseKeys(c.askInstance(ctx))
}

func (c *awsChain) askInstance(ctx context.Context) ([]byte, error) {
	endpoint := credentials.DefaultIAMRoleEndpoint
	if strings.EqualFold(c.getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE"), "IPv6") {
		endpoint = "http://[fd00:ec2::254]"
	}
	endpoint = strings.TrimSuffix(cmp.Or(c.getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT"), endpoint), "/")
	token, err := ask(ctx, c.imds, http.MethodPut, endpoint+credentials.TokenPath, credentials.TokenRequestTTLHeader, credentials.TokenTTL)
	var status statusError
	if err != nil && (!errors.As(err, &status) || status >= 500 || envTrue(c.getenv, "AWS_EC2_METADATA_V1_DISABLED")) { // otherwise it is version 1, without tokens
		return nil, err
	}
	get := func(path string) ([]byte, error) {
		return ask(ctx, c.imds, http.MethodGet, endpoint+path, credentials.TokenRequestHeader, string(token))
	}
	roles, err := get(credentials.DefaultIAMSecurityCredsPath)
	if err != nil {
		return nil, err
	}
	name, _, _ := strings.Cut(strings.TrimSpace(string(roles)), "\n")
	if name == "" {
		return nil, errors.New("the instance has no role")
	}
	return get(credentials.DefaultIAMSecurityCredsPath + url.PathEscape(strings.TrimSpace(name)))
}

type statusError int

func (e statusError) Error() string { return fmt.Sprintf("HTTP %d", int(e)) }

// ask sends one small request with one header, if not empty.
func ask(ctx context.Context, client *http.Client, method, endpoint, header, value string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, endpoint, nil)
	if err != nil {
		return nil, errors.New("the endpoint is not a URL") // it may hold a secret
	}
	if value != "" {
		req.Header.Set(header, value)
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, statusError(resp.StatusCode)
	}
	return io.ReadAll(io.LimitReader(resp.Body, 64<<10))
}
