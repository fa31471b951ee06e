package s3

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDescribeAWS(t *testing.T) {
	home := t.TempDir()
	if err := os.Mkdir(filepath.Join(home, ".aws"), 0o700); err != nil {
		t.Fatal(err)
	}
	config, creds := filepath.Join(home, ".aws", "config"), filepath.Join(home, ".aws", "credentials")
	for path, text := range map[string]string{
		config: `[default]
region = eu-west-1
[profile train]
region = eu-central-1
services = rig
role_arn = arn:aws:iam::1:role/reader
source_profile = keys
ca_bundle = /etc/ca.pem
[profile sso]
sso_session = corp
[sso-session corp]
sso_region = eu-west-3
sso_start_url = https://corp.awsapps.com/start
[profile own]
credential_process = /usr/bin/vault hush-argument
[services rig]
s3 =
  endpoint_url = http://127.0.0.1:9000
`,
		creds: "[keys]\naws_access_key_id = id-of-keys\naws_secret_access_key = hush-of-keys\n",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name string
		env  map[string]string
		want []string
	}{
		{"nothing", nil, []string{
			"profile: default (default)", "endpoint: Amazon S3 (default)", "region: as the store says (default)",
			"credentials: role of the instance, if there is one (default)",
		}},
		{"the default profile", map[string]string{"HOME": home, "AWS_EC2_METADATA_DISABLED": "true"}, []string{
			"profile: default (default)", "endpoint: Amazon S3 (default)", "region: eu-west-1 (profile default)",
			"credentials: none (default)",
		}},
		{"environment", map[string]string{
			"AWS_ENDPOINT_URL": "http://user:hush-in-url@host:9000", "AWS_REGION": "us-east-1",
			"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "hush",
			"AWS_SESSION_TOKEN": "hush-token", "AWS_CA_BUNDLE": "/ca.pem",
		}, []string{
			"profile: default (default)", "endpoint: http://***@host:9000 (env AWS_ENDPOINT_URL)",
			"region: us-east-1 (env AWS_REGION)",
			"CA bundle: /ca.pem (env AWS_CA_BUNDLE)", "credentials: a key pair (env AWS_ACCESS_KEY_ID)",
		}},
		{"half a pair", map[string]string{"AWS_SECRET_ACCESS_KEY": "hush"}, []string{
			"profile: default (default)", "endpoint: Amazon S3 (default)", "region: as the store says (default)",
			"credentials: incomplete key pair: AWS_SECRET_ACCESS_KEY is set, AWS_ACCESS_KEY_ID is not (env " +
				"AWS_SECRET_ACCESS_KEY)",
		}},
		{"a role, a service's endpoint", map[string]string{"HOME": home, "AWS_PROFILE": "train"}, []string{
			"profile: train (env AWS_PROFILE)", "endpoint: http://127.0.0.1:9000 (profile train)",
			"region: eu-central-1 (profile train)", "CA bundle: /etc/ca.pem (profile train)",
			"credentials: role arn:aws:iam::1:role/reader (profile train)",
		}},
		{"keys of a file", map[string]string{"HOME": home, "AWS_PROFILE": "keys",
			"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, []string{
			"profile: keys (env AWS_PROFILE)", "endpoint: Amazon S3 (env AWS_IGNORE_CONFIGURED_ENDPOINT_URLS)",
			"region: as the store says (default)",
			"credentials: a key pair (profile keys)",
		}},
		{"SSO", map[string]string{"HOME": home, "AWS_PROFILE": "sso"}, []string{
			"profile: sso (env AWS_PROFILE)", "endpoint: Amazon S3 (default)", "region: as the store says (default)",
			"credentials: SSO, session corp (profile sso)",
		}},
		{"a process", map[string]string{"HOME": home, "AWS_PROFILE": "own"}, []string{
			"profile: own (env AWS_PROFILE)", "endpoint: Amazon S3 (default)", "region: as the store says (default)",
			"credentials: credential_process (profile own)",
		}},
		{"a profile that is not there", map[string]string{"HOME": home, "AWS_PROFILE": "nope"}, []string{
			"profile: nope (env AWS_PROFILE)", "endpoint: Amazon S3 (default)", "region: as the store says (default)",
			"credentials: none: profile nope is in neither of the shared files (env AWS_PROFILE)",
		}},
		{"web identity", map[string]string{"AWS_WEB_IDENTITY_TOKEN_FILE": "/token", "AWS_ROLE_ARN": "arn:x"}, []string{
			"profile: default (default)", "endpoint: Amazon S3 (default)", "region: as the store says (default)",
			"credentials: web identity, role arn:x (env AWS_WEB_IDENTITY_TOKEN_FILE)",
		}},
		{"container", map[string]string{"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://169.254.170.23/v1",
			"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}, []string{
			"profile: default (default)", "endpoint: http://127.0.0.1:1 (env AWS_ENDPOINT_URL_S3)",
			"region: as the store says (default)",
			"credentials: role of the container (env AWS_CONTAINER_CREDENTIALS_FULL_URI)",
		}},
		{"anonymous", map[string]string{"AWS_NO_SIGN_REQUEST": "1", "AWS_ACCESS_KEY_ID": "id"}, []string{
			"profile: default (default)", "endpoint: Amazon S3 (default)", "region: as the store says (default)",
			"credentials: none: requests are not signed (env AWS_NO_SIGN_REQUEST)",
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			list, err := Describe(func(name string) string { return tc.env[name] })
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, s := range list {
				got = append(got, fmt.Sprintf("%s: %s (%s)", s.Name, s.Value, s.From))
			}
			if strings.Join(got, "\n") != strings.Join(tc.want, "\n") {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tc.want, "\n"))
			}
			// It says of a store what the store is opened with.
			cfg := Config{Getenv: func(name string) string { return tc.env[name] }}
			if err := cfg.fillFromEnv(); err != nil {
				t.Fatal(err)
			}
			used := map[string]string{"endpoint": cmp.Or(withoutUser(cfg.Endpoint), "Amazon S3"),
				"region": cmp.Or(cfg.Region, "as the store says"), "CA bundle": cfg.CABundle}
			for _, s := range list {
				if want, ok := used[s.Name]; ok && s.Value != want {
					t.Errorf("%s is described as %s, and used as %s", s.Name, s.Value, want)
				}
			}
			if strings.Contains(strings.Join(got, "\n"), "hush") {
				t.Error("it holds a secret")
			}
		})
	}
}
