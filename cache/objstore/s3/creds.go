package s3

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"

	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/shoalfs/shoal/cache/objstore"
)

// awsChain finds credentials as the AWS tools do. minio-go has providers for most of the sources. Its chain is not
// used: it hides why each source failed and continues anonymously, which leads to a puzzling "access denied" much
// later. Neither are its providers of files, containers and instances: this process's environment overrides their
// parameters.
type awsChain struct {
	getenv func(string) string
	region string
	client *http.Client
	imds   *http.Client
}

// errNoneThere means that a source has no credentials, and the next one must be asked.
var errNoneThere = errors.New("none there")

// awsCredentials returns credentials by the usual chain: environment; the profile in AWS_PROFILE (keys, roles by
// source_profile and credential_source, web identity, SSO, credential_process); web identity; the default profile;
// container or instance role. They are fetched once here, so that missing ones are reported at start. All but those
// of the environment can change while a store is in use.
func awsCredentials(ctx context.Context, cfg Config, client *http.Client) (*keyring, error) {
	denied := func(remedy string, format string, args ...any) error {
		return &objstore.Error{Op: "open", Key: "s3://" + cfg.Bucket, Kind: objstore.KindDenied, Err: fmt.Errorf(format, args...), Remedy: remedy}
	}
	const how = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run under an IAM role; AWS_NO_SIGN_REQUEST=1 for a public bucket"
	getenv := cfg.Getenv
	switch {
	case cfg.Anonymous:
		return fixedKeys(credentials.Value{SignerType: credentials.SignatureAnonymous}), nil
	case cfg.AccessKeyID != "" || cfg.SecretAccessKey != "":
		if cfg.AccessKeyID == "" || cfg.SecretAccessKey == "" {
			return nil, denied("give both keys", "incomplete key pair")
		}
		return fixedKeys(keyPair(cfg.AccessKeyID, cfg.SecretAccessKey, cfg.SessionToken)), nil
	}
	chain := &awsChain{getenv: getenv, region: cfg.Region, client: client, imds: &http.Client{Timeout: imdsTimeout, Transport: &http.Transport{
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
	name := profileName(getenv)
	fromFiles := candidate{"profile " + name, func(ctx context.Context) (credentials.Value, error) { return chain.fromProfile(ctx, name, nil) }}
	named := getenv("AWS_PROFILE") != "" || getenv("AWS_DEFAULT_PROFILE") != ""
	var sources []candidate
	if named {
		sources = append(sources, fromFiles)
	}
	web := getenv("AWS_WEB_IDENTITY_TOKEN_FILE") != ""
	if web {
		sources = append(sources, candidate{"web identity", chain.fromWebIdentity})
	}
	if !named {
		sources = append(sources, fromFiles)
	}
	switch {
	case web:
	case chain.inContainer():
		sources = append(sources, candidate{"container role", chain.fromContainer})
	case !envTrue(getenv, "AWS_EC2_METADATA_DISABLED"):
		sources = append(sources, candidate{"instance role", chain.fromInstance})
	}
	var tried []string
	for _, s := range sources {
		v, err := s.fetch(ctx)
		if cerr := ctx.Err(); cerr != nil {
			return nil, cerr
		}
		if err == nil {
			return newKeyring(s.name, v, s.fetch, cfg.Logger), nil
		}
		if tried = append(tried, s.name+": "+sourceError(err).Error()); !errors.Is(err, errNoneThere) {
			break // a configured source that fails is not replaced by another identity
		}
	}
	return nil, denied(how, "no credentials: the environment has none; %s", strings.Join(tried, "; "))
}

// keyPair returns credentials that do not expire.
func keyPair(id, secret, token string) credentials.Value {
	return credentials.Value{AccessKeyID: id, SecretAccessKey: secret, SessionToken: token, SignerType: credentials.SignatureV4}
}

// sourceError is err without the source's address, which may contain a secret.
func sourceError(err error) error {
	var ue *url.Error
	var pe *fs.PathError
	switch {
	case errors.As(err, &ue):
		return ue.Err
	case errors.As(err, &pe) && errors.Is(err, fs.ErrNotExist):
		return errors.New("no such file")
	}
	return err
}

func (c *awsChain) fromEnvironment() (credentials.Value, error) {
	id := cmp.Or(c.getenv("AWS_ACCESS_KEY_ID"), c.getenv("AWS_ACCESS_KEY"))
	secret := cmp.Or(c.getenv("AWS_SECRET_ACCESS_KEY"), c.getenv("AWS_SECRET_KEY"))
	switch {
	case id != "" && secret != "":
		return keyPair(id, secret, cmp.Or(c.getenv("AWS_SESSION_TOKEN"), c.getenv("AWS_SECURITY_TOKEN"))), nil
	case id != "":
		return credentials.Value{}, errors.New("AWS_ACCESS_KEY_ID is set, AWS_SECRET_ACCESS_KEY is not")
	case secret != "":
		return credentials.Value{}, errors.New("AWS_SECRET_ACCESS_KEY is set, AWS_ACCESS_KEY_ID is not")
	}
	return credentials.Value{}, errNoneThere
}

// fromProfile resolves a profile of the shared files, which are read again each time. seen are the profiles whose
// source_profile led here.
//
// https://docs.aws.amazon.com/sdkref/latest/guide/feature-assume-role-credentials.html
func (c *awsChain) fromProfile(ctx context.Context, name string, seen []string) (v credentials.Value, err error) {
	files, err := loadProfiles(c.getenv)
	if err != nil {
		return v, err
	}
	p, ok := files.profile(name)
	if !ok {
		if len(seen) > 0 || name != "default" {
			return v, fmt.Errorf("profile %q is in neither of the shared files", name)
		}
		return v, errNoneThere
	}
	id, secret := p.get("aws_access_key_id"), p.get("aws_secret_access_key")
	role, source := p.get("role_arn"), p.get("source_profile")
	again := len(seen) > 0 && seen[len(seen)-1] == name // its own source_profile means its keys
	if !again {
		for _, s := range seen {
			if s == name {
				return v, fmt.Errorf("source_profile leads back to profile %q", name)
			}
		}
	}
	fail := func(err error) (credentials.Value, error) {
		return credentials.Value{}, fmt.Errorf("profile %q: %w", name, err)
	}
	if role != "" && !again {
		a := roleRequest{arn: role, session: p.get("role_session_name"), external: p.get("external_id"), seconds: p.get("duration_seconds")}
		switch file := p.get("web_identity_token_file"); {
		case p.get("mfa_serial") != "":
			return fail(errors.New("mfa_serial requires a code, which a daemon cannot enter; use a role without it"))
		case source != "":
			v, err = c.fromProfile(ctx, source, append(seen, name))
		case file != "":
			return c.webIdentity(ctx, files, p, file, a)
		default:
			v, err = c.credentialSource(ctx, p.get("credential_source"))
		}
		if err != nil {
			return fail(err)
		}
		if v, err = c.assumeRole(ctx, files, p, a, v); err != nil {
			return fail(fmt.Errorf("role %s: %w", role, err))
		}
		return v, nil
	}
	switch {
	case id != "" && secret != "":
		return keyPair(id, secret, p.get("aws_session_token")), nil
	case id != "" || secret != "":
		return fail(errors.New("incomplete key pair"))
	case p.get("sso_session") != "" || p.get("sso_start_url") != "":
		sso := &credentials.FileAWSCredentials{Filename: files.configPath, Profile: name}
		if v, err = sso.RetrieveWithCredContext(&credentials.CredContext{Client: c.client, Context: ctx}); err != nil {
			return fail(errors.New("SSO: " + err.Error())) // it names the file and the remedy
		}
		return v, nil
	case p.get("credential_process") != "":
		if v, err = fromProcess(ctx, p.get("credential_process")); err != nil {
			return fail(fmt.Errorf("credential_process: %w", err))
		}
		return v, nil
	}
	if len(seen) > 0 {
		return fail(errors.New("it has no credentials"))
	}
	return v, errNoneThere
}

// credentialSource returns the credentials for assuming a role.
func (c *awsChain) credentialSource(ctx context.Context, name string) (credentials.Value, error) {
	switch name {
	case "Environment":
		return c.fromEnvironment()
	case "Ec2InstanceMetadata":
		return c.fromInstance(ctx)
	case "EcsContainer":
		return c.fromContainer(ctx)
	}
	return credentials.Value{}, errors.New("role_arn needs source_profile, web_identity_token_file, or credential_source = Environment, Ec2InstanceMetadata or EcsContainer")
}
