package objstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
	"gopkg.in/ini.v1"
)

// fillFromEnv sets what cfg leaves open from the AWS environment, in the order of the AWS tools:
// specific variable, general variable, the profile's service section, the profile.
func (cfg *S3Config) fillFromEnv() error {
	profile, services, err := awsProfile()
	if err != nil {
		return err
	}
	get := func(key string) string {
		if profile == nil {
			return ""
		}
		return strings.TrimSpace(profile.Key(key).String())
	}
	if cfg.Endpoint == "" && !envTrue("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") {
		cfg.Endpoint = cmp.Or(os.Getenv("AWS_ENDPOINT_URL_S3"), os.Getenv("AWS_ENDPOINT_URL"),
			s3EndpointOf(services), get("endpoint_url"))
	}
	cfg.Region = cmp.Or(cfg.Region, os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION"), get("region"))
	cfg.CABundle = cmp.Or(cfg.CABundle, os.Getenv("AWS_CA_BUNDLE"), get("ca_bundle"))
	cfg.Anonymous = cfg.Anonymous || envTrue("AWS_NO_SIGN_REQUEST")
	return nil
}

func envTrue(name string) bool {
	switch strings.ToLower(os.Getenv(name)) {
	case "1", "true", "yes", "on":
		return true
	}
	return false
}

// awsProfile returns the section of AWS_PROFILE (or "default") in the shared config file and the
// services section that it names; nil where there is none.
func awsProfile() (profile, services *ini.Section, err error) {
	path := os.Getenv("AWS_CONFIG_FILE")
	if path == "" {
		home := os.Getenv("HOME")
		if home == "" {
			return nil, nil, nil // no home, no file: a container with a bare environment
		}
		path = filepath.Join(home, ".aws", "config")
	}
	name := cmp.Or(os.Getenv("AWS_PROFILE"), "default")
	f, err := ini.LoadSources(ini.LoadOptions{AllowNestedValues: true, Loose: true, SkipUnrecognizableLines: true}, path)
	if err != nil {
		return nil, nil, &Error{
			Op: "open", Key: path, Kind: KindInvalid, Err: err,
			Remedy: "correct the AWS config file, or point AWS_CONFIG_FILE elsewhere",
		}
	}
	for _, section := range []string{"profile " + name, name} {
		if profile == nil && f.HasSection(section) {
			profile = f.Section(section)
		}
	}
	if profile != nil {
		if s := profile.Key("services").String(); s != "" && f.HasSection("services "+s) {
			services = f.Section("services " + s)
		}
	}
	return profile, services, nil
}

// s3EndpointOf returns the endpoint_url nested under s3 in a services section:
//
//	[services rig]
//	s3 =
//	  endpoint_url = http://127.0.0.1:9000
func s3EndpointOf(services *ini.Section) string {
	if services == nil || !services.HasKey("s3") {
		return ""
	}
	for _, line := range services.Key("s3").NestedValues() {
		if k, v, ok := strings.Cut(line, "="); ok && strings.TrimSpace(k) == "endpoint_url" {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// imdsTimeout bounds a question to the instance metadata service, which is one hop away or not there
// at all; outside EC2 nothing answers at its address.
const imdsTimeout = time.Second

// awsCredentials returns credentials by the usual chain: environment, shared files (with SSO and
// credential_process), container or web identity, instance role. They are fetched once here, so that
// their lack is told at start, and renewed by themselves before they expire.
func awsCredentials(ctx context.Context, cfg S3Config, client *http.Client) (*credentials.Credentials, error) {
	denied := func(remedy string, format string, args ...any) error {
		return &Error{Op: "open", Key: "s3://" + cfg.Bucket, Kind: KindDenied, Err: fmt.Errorf(format, args...), Remedy: remedy}
	}
	const how = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run under an IAM role; AWS_NO_SIGN_REQUEST=1 for a public bucket"
	switch {
	case cfg.Anonymous:
		return credentials.NewStatic("", "", "", credentials.SignatureAnonymous), nil
	case cfg.AccessKeyID != "" || cfg.SecretAccessKey != "":
		if cfg.AccessKeyID == "" || cfg.SecretAccessKey == "" {
			return nil, denied("give both parts", "half a pair of keys")
		}
		return credentials.NewStaticV4(cfg.AccessKeyID, cfg.SecretAccessKey, cfg.SessionToken), nil
	}
	id := cmp.Or(os.Getenv("AWS_ACCESS_KEY_ID"), os.Getenv("AWS_ACCESS_KEY"))
	secret := cmp.Or(os.Getenv("AWS_SECRET_ACCESS_KEY"), os.Getenv("AWS_SECRET_KEY"))
	switch {
	case id != "" && secret != "":
		return credentials.New(&credentials.EnvAWS{}), nil
	case id != "":
		return nil, denied("set AWS_SECRET_ACCESS_KEY too", "AWS_ACCESS_KEY_ID is set, AWS_SECRET_ACCESS_KEY is not")
	case secret != "":
		return nil, denied("set AWS_ACCESS_KEY_ID too", "AWS_SECRET_ACCESS_KEY is set, AWS_ACCESS_KEY_ID is not")
	}

	// The first source that gives a pair is kept. minio-go's own chain hides why each source
	// failed and goes on anonymously, which ends in a puzzling "access denied" much later.
	type candidate struct {
		name     string
		provider credentials.Provider
		client   *http.Client
	}
	sources := []candidate{{"shared credentials and config files", &credentials.FileAWSCredentials{}, client}}
	container := os.Getenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") != "" ||
		os.Getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI") != "" || os.Getenv("AWS_WEB_IDENTITY_TOKEN_FILE") != ""
	switch {
	case container:
		sources = append(sources, candidate{"container or web identity", &credentials.IAM{Region: cfg.Region}, client})
	case !envTrue("AWS_EC2_METADATA_DISABLED"):
		imds := &http.Client{Timeout: imdsTimeout, Transport: &http.Transport{
			// Never through a proxy: the address is link-local.
			DialContext: (&net.Dialer{Timeout: imdsTimeout}).DialContext, DisableKeepAlives: true,
		}}
		sources = append(sources, candidate{"instance role", &credentials.IAM{
			Client: imds, Endpoint: os.Getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT"), Region: cfg.Region,
		}, imds})
	}
	var tried []string
	for _, s := range sources {
		c := credentials.New(s.provider)
		v, err := c.GetWithContext(&credentials.CredContext{Client: s.client, Context: ctx})
		if cerr := ctx.Err(); cerr != nil {
			return nil, cerr
		}
		if err == nil && v.AccessKeyID != "" && v.SecretAccessKey != "" {
			return c, nil
		}
		if err == nil {
			err = errors.New("none there")
		}
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err
		}
		tried = append(tried, s.name+": "+err.Error())
	}
	return nil, denied(how, "no credentials: the environment has none; %s", strings.Join(tried, "; "))
}
