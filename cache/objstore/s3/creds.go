package s3

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/credentials/ec2rolecreds"
	"github.com/aws/aws-sdk-go-v2/credentials/endpointcreds"
	"github.com/aws/aws-sdk-go-v2/credentials/processcreds"
	"github.com/aws/aws-sdk-go-v2/credentials/ssocreds"
	"github.com/aws/aws-sdk-go-v2/credentials/stscreds"
	"github.com/aws/aws-sdk-go-v2/feature/ec2/imds"
	"github.com/aws/aws-sdk-go-v2/service/sso"
	"github.com/aws/aws-sdk-go-v2/service/ssooidc"
	"github.com/aws/aws-sdk-go-v2/service/sts"
	"github.com/aws/smithy-go"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/shoalfs/shoal/cache/objstore"
)

// imdsTimeout bounds a request to the instance metadata service, which is one hop away or absent; outside EC2 nothing
// answers at its address.
const imdsTimeout = time.Second

// awsChain finds credentials as the AWS tools do, by the providers of AWS' SDK. The SDK's own chain reads this
// process's environment, and a daemon also opens datasets for others, with theirs. minio-go's hides why a source failed
// and goes on without credentials, which leads to a puzzling "access denied" much later.
type awsChain struct {
	getenv func(string) string
	region string
	client *http.Client
	imds   *http.Client
	// profile is the chosen one, of the shared files; nil: they are to be read, since they change.
	profile *config.SharedConfig
}

// errNoneThere means that a source has no credentials, and the next one must be asked.
var errNoneThere = errors.New("none there")

// awsCredentials returns credentials by the usual chain: environment; the profile in AWS_PROFILE (keys, roles by
// source_profile and credential_source, web identity, SSO, credential_process); web identity; the default profile;
// container or instance role. They are fetched once here, so that missing ones are reported at start. All but those
// of the environment can change while a store is in use.
func awsCredentials(ctx context.Context, cfg Config, client *http.Client) (*keyring, error) {
	denied := func(remedy string, format string, args ...any) error {
		return &objstore.Error{Op: "open", Key: "s3://" + cfg.Bucket, Kind: objstore.KindDenied,
			Err: fmt.Errorf(format, args...), Remedy: remedy}
	}
	const how = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run under an IAM role; " +
		"AWS_NO_SIGN_REQUEST=1 for a public bucket"
	getenv := cfg.Getenv
	switch {
	case cfg.Anonymous:
		return fixedKeys(aws.Credentials{}), nil
	case cfg.AccessKeyID != "" || cfg.SecretAccessKey != "":
		if cfg.AccessKeyID == "" || cfg.SecretAccessKey == "" {
			return nil, denied("give both keys", "incomplete key pair")
		}
		return fixedKeys(aws.Credentials{AccessKeyID: cfg.AccessKeyID, SecretAccessKey: cfg.SecretAccessKey,
			SessionToken: cfg.SessionToken}), nil
	}
	chain := &awsChain{getenv: getenv, region: cfg.Region, client: client, profile: cfg.profile,
		imds: &http.Client{Timeout: imdsTimeout, Transport: &http.Transport{
			// Never through a proxy: the address is link-local.
			DialContext: (&net.Dialer{Timeout: imdsTimeout}).DialContext, DisableKeepAlives: true,
		}}}
	v, err := chain.fromEnvironment()
	if err == nil {
		return fixedKeys(v), nil
	}
	if !errors.Is(err, errNoneThere) {
		return nil, denied("set both variables", "%w", err)
	}

	type candidate struct {
		name  string
		fetch keySource
	}
	sources := []candidate{{"profile " + profileName(getenv), source(chain.ofProfile)}}
	switch {
	case getenv("AWS_WEB_IDENTITY_TOKEN_FILE") != "":
		before := 0 // the default profile, but not a named one
		if getenv("AWS_PROFILE") != "" || getenv("AWS_DEFAULT_PROFILE") != "" {
			before = 1
		}
		sources = slices.Insert(sources, before, candidate{"web identity", source(chain.ofWebIdentity)})
	case chain.inContainer():
		sources = append(sources, candidate{"container role", source(chain.container)})
	case !envTrue(getenv, "AWS_EC2_METADATA_DISABLED"):
		sources = append(sources, candidate{"instance role", source(chain.instance)})
	}
	var tried []string
	for _, s := range sources {
		v, err := s.fetch(ctx)
		if cerr := ctx.Err(); cerr != nil {
			return nil, cerr
		}
		if err == nil {
			chain.profile = nil
			return newKeyring(s.name, v, s.fetch, cfg.Logger), nil
		}
		if tried = append(tried, s.name+": "+sourceError(err).Error()); !errors.Is(err, errNoneThere) {
			break // a configured source that fails is not replaced by another identity
		}
	}
	return nil, denied(how, "no credentials: the environment has none; %s", strings.Join(tried, "; "))
}

// sourceError is err without what may be secret: the source's address, the output of a process, and all that an
// answer says beside its code and message.
func sourceError(err error) error {
	var ue *url.Error
	var pe *fs.PathError
	var answer smithy.APIError
	var syntax *json.SyntaxError
	var process *processcreds.ProviderError
	var status interface{ HTTPStatusCode() int }
	switch {
	case errors.As(err, &syntax), errors.As(err, &process) && strings.Contains(err.Error(), "process output: "):
		return errors.New("the answer is not credentials in JSON")
	case errors.As(err, &answer) && answer.ErrorCode() != "":
		return errors.New(clean(answer.ErrorCode() + ": " + answer.ErrorMessage()))
	case errors.As(err, &status):
		return fmt.Errorf("HTTP %d", status.HTTPStatusCode())
	case errors.As(err, &ue):
		return ue.Err
	case errors.As(err, &pe) && errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("no such file: %s", pe.Path)
	}
	return err
}

func (c *awsChain) fromEnvironment() (v aws.Credentials, err error) {
	id := cmp.Or(c.getenv("AWS_ACCESS_KEY_ID"), c.getenv("AWS_ACCESS_KEY"))
	secret := cmp.Or(c.getenv("AWS_SECRET_ACCESS_KEY"), c.getenv("AWS_SECRET_KEY"))
	switch {
	case id != "" && secret != "":
		return aws.Credentials{AccessKeyID: id, SecretAccessKey: secret,
			SessionToken: cmp.Or(c.getenv("AWS_SESSION_TOKEN"), c.getenv("AWS_SECURITY_TOKEN"))}, nil
	case id != "":
		return v, errors.New("AWS_ACCESS_KEY_ID is set, AWS_SECRET_ACCESS_KEY is not")
	case secret != "":
		return v, errors.New("AWS_SECRET_ACCESS_KEY is set, AWS_ACCESS_KEY_ID is not")
	}
	return v, errNoneThere
}

// source returns a source whose provider is made anew for each fetch, since the files that describe it change.
func source(provider func() (aws.CredentialsProvider, error)) keySource {
	return func(ctx context.Context) (aws.Credentials, error) {
		p, err := provider()
		if err != nil {
			return aws.Credentials{}, err
		}
		return p.Retrieve(ctx)
	}
}

func (c *awsChain) ofProfile() (aws.CredentialsProvider, error) {
	p, err := loadProfile(c.getenv, c.profile)
	if err == nil && p.Profile == "" {
		if err = errNoneThere; profileName(c.getenv) != "default" {
			err = fmt.Errorf("profile %q is in neither of the shared files", profileName(c.getenv))
		}
	}
	if err != nil {
		return nil, err
	}
	return c.provider(p, p.RoleARN != "")
}

// provider returns what a profile names. role: to name something is its duty, since a role is assumed with it.
//
// https://docs.aws.amazon.com/sdkref/latest/guide/feature-assume-role-credentials.html
func (c *awsChain) provider(p *config.SharedConfig, role bool) (by aws.CredentialsProvider, err error) {
	switch {
	case p.RoleARN != "" && p.MFASerial != "":
		return nil, fmt.Errorf(
			"profile %q: mfa_serial requires a code, which a daemon cannot enter; use a role without it", p.Profile)
	case p.Source != nil:
		by, err = c.provider(p.Source, true)
	case p.Credentials.HasKeys():
		by = aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) { return p.Credentials, nil })
	case p.CredentialSource == "Environment":
		by = aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) { return c.fromEnvironment() })
	case p.CredentialSource == "Ec2InstanceMetadata":
		by, err = c.instance()
	case p.CredentialSource == "EcsContainer":
		by, err = c.container()
	case p.WebIdentityTokenFile != "":
		return c.webIdentity(p, p.WebIdentityTokenFile, p.RoleARN, p.RoleSessionName), nil
	case p.SSOSession != nil:
		o := ssocreds.Options{StartURL: p.SSOSession.SSOStartURL}
		if o.CachedTokenFilepath, err = ssocreds.StandardCachedTokenFilepath(p.SSOSession.Name); err == nil {
			o.SSOTokenProvider = ssocreds.NewSSOTokenProvider(
				ssooidc.New(ssooidc.Options{Region: p.SSOSession.SSORegion, HTTPClient: c.client}),
				o.CachedTokenFilepath)
			by = c.sso(p, p.SSOSession.SSORegion, o)
		}
	case p.SSOStartURL != "":
		by = c.sso(p, p.SSORegion, ssocreds.Options{StartURL: p.SSOStartURL})
	case p.CredentialProcess != "":
		by = processcreds.NewProvider(command(p.CredentialProcess),
			func(o *processcreds.Options) { o.Timeout = fetchTimeout })
	case role:
		err = errors.New("role_arn needs source_profile, web_identity_token_file, or credential_source = " +
			"Environment, Ec2InstanceMetadata or EcsContainer")
	default:
		err = errNoneThere
	}
	if err != nil || p.RoleARN == "" {
		return by, err
	}
	return stscreds.NewAssumeRoleProvider(c.sts(p, by), p.RoleARN, func(o *stscreds.AssumeRoleOptions) {
		o.RoleSessionName = sessionName(p.RoleSessionName)
		o.Duration = cmp.Or(aws.ToDuration(p.RoleDurationSeconds), time.Hour)
		if p.ExternalID != "" {
			o.ExternalID = &p.ExternalID
		}
	}), nil
}

// halved matches a command whose first and last quotes the SDK has taken for those around all of it, as in AWS' example
// "/path with spaces" a "b c": the first quote that is left closes what it does not open.
var halved = regexp.MustCompile(`^[^"']*[^\s="'](["'])\s`)

// command returns a credential_process as it is in the file.
func command(text string) string {
	if q := halved.FindStringSubmatch(text); q != nil {
		return q[1] + text + q[1]
	}
	return text
}

// sso uses the login of `aws sso login`, and renews it where the profile has an sso_session.
func (c *awsChain) sso(p *config.SharedConfig, region string, o ssocreds.Options) aws.CredentialsProvider {
	client := sso.New(sso.Options{Region: region, HTTPClient: c.client, Retryer: aws.NopRetryer{}})
	provider := ssocreds.New(client, p.SSOAccountID, p.SSORoleName, o.StartURL, func(to *ssocreds.Options) {
		to.SSOTokenProvider, to.CachedTokenFilepath = o.SSOTokenProvider, o.CachedTokenFilepath
	})
	return aws.CredentialsProviderFunc(func(ctx context.Context) (aws.Credentials, error) {
		v, err := provider.Retrieve(ctx)
		if err != nil {
			err = fmt.Errorf("profile %q: SSO: %w (AWS_PROFILE=%s aws sso login)",
				p.Profile, sourceError(err), p.Profile)
		}
		return v, err
	})
}

// sts returns a client of STS: at the configured endpoint, or the region's. Who uses it tries again.
func (c *awsChain) sts(p *config.SharedConfig, by aws.CredentialsProvider) *sts.Client {
	o := sts.Options{HTTPClient: c.client, Credentials: by, Retryer: aws.NopRetryer{}}
	o.Region = cmp.Or(c.getenv("AWS_REGION"), c.getenv("AWS_DEFAULT_REGION"), p.Region, c.region, "us-east-1")
	if e := configuredEndpoint(c.getenv, p, "sts"); e != "" {
		o.BaseEndpoint = &e
	}
	return sts.New(o)
}

// sessionName names a session in the account's audit log.
func sessionName(given string) string {
	return cmp.Or(given, "shoal-"+strconv.FormatInt(time.Now().Unix(), 10))
}

// ofWebIdentity is the web identity of the environment, as Kubernetes mounts it.
func (c *awsChain) ofWebIdentity() (aws.CredentialsProvider, error) {
	p, err := loadProfile(c.getenv, c.profile)
	if err == nil && c.getenv("AWS_ROLE_ARN") == "" {
		err = errors.New("AWS_WEB_IDENTITY_TOKEN_FILE is set, AWS_ROLE_ARN is not")
	}
	return c.webIdentity(p, c.getenv("AWS_WEB_IDENTITY_TOKEN_FILE"), c.getenv("AWS_ROLE_ARN"),
		c.getenv("AWS_ROLE_SESSION_NAME")), err
}

// tokenFile is a token, without the line break at its file's end.
type tokenFile string

func (f tokenFile) GetIdentityToken() ([]byte, error) {
	b, err := os.ReadFile(string(f))
	return bytes.TrimSpace(b), err
}

func (f tokenFile) GetToken() (string, error) {
	b, err := f.GetIdentityToken()
	return string(b), err
}

// webIdentity assumes a role with a token, whose file is read each time.
func (c *awsChain) webIdentity(p *config.SharedConfig, file, role, session string) aws.CredentialsProvider {
	provider := stscreds.NewWebIdentityRoleProvider(c.sts(p, nil), role, tokenFile(file),
		func(o *stscreds.WebIdentityRoleOptions) {
			o.RoleSessionName, o.Duration = sessionName(session), aws.ToDuration(p.RoleDurationSeconds)
		})
	return aws.CredentialsProviderFunc(func(ctx context.Context) (aws.Credentials, error) {
		v, err := provider.Retrieve(ctx)
		if err != nil { // STS quotes what it refuses
			token, _ := tokenFile(file).GetToken()
			err = errors.New(strings.ReplaceAll(sourceError(err).Error(), cmp.Or(token, "\n"), "…"))
		}
		return v, err
	})
}

func (c *awsChain) inContainer() bool {
	return c.getenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") != "" ||
		c.getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI") != ""
}

// container is the agent of ECS, or of EKS Pod Identity, whose token file is read each time.
func (c *awsChain) container() (aws.CredentialsProvider, error) {
	endpoint := c.getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI")
	if relative := c.getenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"); relative != "" {
		endpoint = credentials.DefaultECSRoleEndpoint + relative
	} else if err := trustedHost(endpoint); err != nil {
		return nil, err
	}
	client := c.client
	if strings.HasPrefix(endpoint, "http://") { // of this machine, or its agent's: as that of imds
		client = &http.Client{Timeout: client.Timeout, Transport: c.imds.Transport}
	}
	return endpointcreds.New(endpoint, func(o *endpointcreds.Options) {
		o.HTTPClient, o.Retryer = client, aws.NopRetryer{}
		o.AuthorizationToken = c.getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN")
		if file := c.getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"); file != "" {
			o.AuthorizationTokenProvider = tokenFile(file)
		}
	}), nil
}

// trustedHost refuses to send an unencrypted token to any address but this machine's and those of ECS and EKS agents,
// like the AWS tools: the SDK's own check is not exported.
func trustedHost(endpoint string) error {
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" {
		return errors.New("AWS_CONTAINER_CREDENTIALS_FULL_URI is not a URL")
	}
	addr, _ := netip.ParseAddr(u.Hostname())
	switch addr.String() {
	case "169.254.170.2", "169.254.170.23", "fd00:ec2::23":
		return nil
	}
	if u.Scheme == "https" || u.Hostname() == "localhost" || addr.IsLoopback() {
		return nil
	}
	return errors.New("AWS_CONTAINER_CREDENTIALS_FULL_URI is neither https nor an address of this machine")
}

// instance is the instance metadata service, version 2, or version 1 if it has no tokens.
func (c *awsChain) instance() (aws.CredentialsProvider, error) {
	o := imds.Options{HTTPClient: c.imds, Retryer: aws.NopRetryer{}, ClientEnableState: imds.ClientEnabled,
		Endpoint: c.getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT")}
	if strings.EqualFold(c.getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE"), "IPv6") {
		o.EndpointMode = imds.EndpointModeStateIPv6
	}
	if envTrue(c.getenv, "AWS_EC2_METADATA_V1_DISABLED") {
		o.EnableFallback = aws.FalseTernary
	}
	return ec2rolecreds.New(func(to *ec2rolecreds.Options) { to.Client = imds.New(o) }), nil
}
