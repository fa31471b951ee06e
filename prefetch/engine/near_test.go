package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

func TestNearEnvironment(t *testing.T) {
	origin := func(name string) string {
		return map[string]string{
			"AWS_ENDPOINT_URL": "http://origin", "AWS_ENDPOINT_URL_S3": "http://origin-s3",
			"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true", "AWS_PROFILE": "user",
			"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "token",
			"AWS_REGION": "eu-west-1", "HOME": "/home/user",
		}[name]
	}
	for _, c := range []struct {
		near NearTier
		want map[string]string
	}{
		{NearTier{URL: "s3://near"}, map[string]string{"AWS_ENDPOINT_URL_S3": "http://origin-s3", "AWS_PROFILE": "user",
			"AWS_ACCESS_KEY_ID": "key", "AWS_REGION": "eu-west-1"}},
		{NearTier{Endpoint: "http://near"}, map[string]string{"AWS_ENDPOINT_URL": "http://origin",
			"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true", "AWS_ACCESS_KEY_ID": "key"}},
		{NearTier{Profile: "near"}, map[string]string{"AWS_ENDPOINT_URL_S3": "http://origin-s3", "AWS_PROFILE": "near",
			"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SESSION_TOKEN": "", "AWS_REGION": "",
			"HOME": "/home/user"}},
	} {
		for name, want := range c.want {
			if got := c.near.getenv(origin)(name); got != want {
				t.Errorf("%+v: %s is %q, want %q", c.near, name, got, want)
			}
		}
	}
}

// A tier without an endpoint is at its profile's, or else where the source is, whatever has set that.
func TestNearEndpoint(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config")
	keys := "aws_access_key_id = id\naws_secret_access_key = key\n"
	if err := os.WriteFile(config, []byte("[profile user]\nendpoint_url = http://origin\n"+keys+"[profile near]\n"+keys+
		"[profile far]\nendpoint_url = http://far\n"+keys), 0o600); err != nil {
		t.Fatal(err)
	}
	for profile, want := range map[string]string{"": "http://origin", "near": "http://origin", "far": "http://far"} {
		n, err := NearTier{URL: "s3://near", Profile: profile}.Open(t.Context(), NearOptions{
			Source: objstore.Source{Scheme: "s3", Bucket: "photos", Endpoint: "http://origin"},
			Getenv: func(name string) string {
				return map[string]string{"AWS_CONFIG_FILE": config, "AWS_PROFILE": "user"}[name]
			}, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if at := n.Stats().Tier; at != "s3://near at "+want {
			t.Errorf("profile %q: %s", profile, at)
		}
		n.Close()
	}
}

// TestNearCredentials: a tier at another address and without a profile has the source's credentials, and asks for them
// where the source does.
func TestNearCredentials(t *testing.T) {
	sts := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">`+
			`<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>id</AccessKeyId>`+
			`<SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken><Expiration>%s</Expiration>`+
			`</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>`,
			time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
	}))
	defer sts.Close()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("token"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"AWS_ENDPOINT_URL": sts.URL, "AWS_REGION": "eu-west-1", "AWS_ROLE_ARN": "arn:role",
		"AWS_WEB_IDENTITY_TOKEN_FILE": token}
	o := NearOptions{Source: objstore.Source{Scheme: "s3", Bucket: "photos", Endpoint: sts.URL},
		Getenv: func(name string) string { return env[name] }, Log: slog.New(slog.DiscardHandler)}
	n, err := NearTier{URL: "s3://near", Endpoint: "http://127.0.0.1:1"}.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if at := n.store.Endpoint(); at != "http://127.0.0.1:1" {
		t.Errorf("the tier is at %s", at)
	}
}

// TestNearRefused: what does not go with a near tier is wrong use.
func TestNearRefused(t *testing.T) {
	key, err := objstore.ParseCustomerKey(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range []NearOptions{
		{Source: objstore.Source{Scheme: "file", Dir: "/data"}},
		{Source: objstore.Source{Scheme: "s3", Bucket: "photos"}, Store: objstore.StoreOptions{CustomerKey: key}},
	} {
		n, err := NearTier{URL: "s3://near"}.Open(t.Context(), o)
		if !errors.Is(err, ErrNear) || n != nil {
			t.Errorf("%s: %v", o.Source, err)
		}
	}
}
