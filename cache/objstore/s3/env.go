package s3

import (
	"cmp"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/config"
)

// fillFromEnv sets empty fields of cfg from the AWS environment, with the precedence of the AWS tools: specific
// variable, general variable, the profile's service section, the profile.
func (cfg *Config) fillFromEnv() error {
	p, err := loadProfile(cfg.Getenv, nil)
	if err != nil {
		return err
	}
	cfg.profile = p
	cfg.Endpoint = cmp.Or(cfg.Endpoint, configuredEndpoint(cfg.Getenv, p, "s3"), cfg.Fallback)
	cfg.Region = cmp.Or(cfg.Region, cfg.Getenv("AWS_REGION"), cfg.Getenv("AWS_DEFAULT_REGION"), p.Region)
	cfg.CABundle = cmp.Or(cfg.CABundle, cfg.Getenv("AWS_CA_BUNDLE"), p.CustomCABundle)
	cfg.Anonymous = cfg.Anonymous || envTrue(cfg.Getenv, "AWS_NO_SIGN_REQUEST")
	return nil
}

// configuredEndpoint returns the endpoint of a service, "s3" or "sts"; "" for Amazon's.
func configuredEndpoint(getenv func(string) string, p *config.SharedConfig, service string) string {
	if envTrue(getenv, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") || aws.ToBool(p.IgnoreConfiguredEndpoints) {
		return ""
	}
	return cmp.Or(getenv("AWS_ENDPOINT_URL_"+strings.ToUpper(service)), getenv("AWS_ENDPOINT_URL"),
		p.Services.ServiceValues[service]["endpoint_url"], p.BaseEndpoint)
}

// endpointVariable returns the variable that sets the endpoint of S3, or would set it.
func endpointVariable(getenv func(string) string) string {
	if getenv("AWS_ENDPOINT_URL_S3") != "" {
		return "AWS_ENDPOINT_URL_S3"
	}
	return "AWS_ENDPOINT_URL"
}

func envTrue(getenv func(string) string, name string) bool {
	return slices.Contains([]string{"1", "true", "yes", "on"}, strings.ToLower(getenv(name)))
}

func profileName(getenv func(string) string) string {
	return cmp.Or(getenv("AWS_PROFILE"), getenv("AWS_DEFAULT_PROFILE"), "default")
}
