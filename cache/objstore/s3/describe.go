package s3

import (
	"cmp"
	"regexp"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/config"
)

// Setting is a setting of the AWS tools for opening a bucket, and its origin. Its value is never a secret.
type Setting struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	From  string `json:"from"` // env NAME, profile NAME, or default
}

// Describe returns the settings that [New] would use from the environment and the shared files, and the source of
// credentials that it would ask first. It contacts nothing and runs nothing, so it cannot say whether these work. It
// fails if a shared file cannot be read.
func Describe(getenv func(string) string) ([]Setting, error) {
	cfg := Config{Getenv: getenv}
	if err := cfg.fillFromEnv(); err != nil {
		return nil, err
	}
	d, name := description{getenv: getenv, profile: cfg.profile}, profileName(getenv)
	d.add("profile", name, cmp.Or(d.variable("AWS_PROFILE", "AWS_DEFAULT_PROFILE"), "default"))

	switch {
	case envTrue(getenv, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"):
		d.add("endpoint", "Amazon S3", "env AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
	case aws.ToBool(d.profile.IgnoreConfiguredEndpoints):
		d.add("endpoint", "Amazon S3", "profile "+name)
	default:
		d.add("endpoint", cmp.Or(withoutUser(cfg.Endpoint), "Amazon S3"),
			d.origin(cfg.Endpoint, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
	}
	d.add("region", cmp.Or(cfg.Region, "as the store says"), d.origin(cfg.Region, "AWS_REGION", "AWS_DEFAULT_REGION"))
	if cfg.CABundle != "" {
		d.add("CA bundle", cfg.CABundle, d.origin(cfg.CABundle, "AWS_CA_BUNDLE"))
	}
	d.credentials(name)
	return d.list, nil
}

type description struct {
	getenv  func(string) string
	profile *config.SharedConfig
	list    []Setting
}

func (d *description) add(name, value, from string) {
	d.list = append(d.list, Setting{name, value, from})
}

// variable names the first variable that is set, as an origin.
func (d *description) variable(names ...string) string {
	for _, name := range names {
		if d.getenv(name) != "" {
			return "env " + name
		}
	}
	return ""
}

// origin names where a value comes from: the first of the variables that is set, or the profile.
func (d *description) origin(value string, names ...string) string {
	if value == "" {
		return "default"
	}
	return cmp.Or(d.variable(names...), "profile "+d.profile.Profile)
}

// credentials describes the source that [awsCredentials] would ask first.
func (d *description) credentials(name string) {
	named, profile := d.variable("AWS_PROFILE", "AWS_DEFAULT_PROFILE"), d.ofProfile()
	pair := d.variable("AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SECRET_KEY")
	chain := awsChain{getenv: d.getenv}
	switch {
	case envTrue(d.getenv, "AWS_NO_SIGN_REQUEST"):
		d.add("credentials", "none: requests are not signed", "env AWS_NO_SIGN_REQUEST")
	case pair != "":
		value := "a key pair"
		if _, err := chain.fromEnvironment(); err != nil {
			value = "incomplete key pair: " + err.Error()
		}
		d.add("credentials", value, pair)
	case named != "" && d.profile.Profile == "":
		d.add("credentials", "none: profile "+name+" is in neither of the shared files", named)
	case profile != "" && (named != "" || d.getenv("AWS_WEB_IDENTITY_TOKEN_FILE") == ""):
		d.add("credentials", profile, "profile "+name)
	case d.getenv("AWS_WEB_IDENTITY_TOKEN_FILE") != "":
		d.add("credentials", "web identity, role "+cmp.Or(d.getenv("AWS_ROLE_ARN"), "missing: AWS_ROLE_ARN is not set"),
			"env AWS_WEB_IDENTITY_TOKEN_FILE")
	case chain.inContainer():
		d.add("credentials", "role of the container",
			d.variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"))
	case envTrue(d.getenv, "AWS_EC2_METADATA_DISABLED"):
		d.add("credentials", "none", "default")
	default:
		d.add("credentials", "role of the instance, if there is one", "default")
	}
}

// ofProfile describes the credentials of the profile, in the order of the search; "" if it has none.
func (d *description) ofProfile() string {
	switch p := d.profile; {
	case p.RoleARN != "":
		return "role " + p.RoleARN
	case p.Credentials.AccessKeyID != "":
		return "a key pair"
	case p.SSOSession != nil:
		return "SSO, session " + p.SSOSession.Name
	case p.SSOStartURL != "":
		return "SSO"
	case p.CredentialProcess != "":
		return "credential_process" // its arguments may be secrets
	}
	return ""
}

// withoutUser hides user and password of a URL.
func withoutUser(endpoint string) string { return user.ReplaceAllString(endpoint, "$1***@") }

var user = regexp.MustCompile(`^(\w+://)?.*@`)
