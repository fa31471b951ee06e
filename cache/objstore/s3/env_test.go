package s3_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/cache/objstore/stores"
)

// TestGetenv: with Getenv set, nothing of this process's own AWS environment is used, by any link of
// the credentials' chain.
func TestGetenv(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	theirs := &S3Server{Bucket: "bucket", AccessKey: "theirs"}
	endpoint := theirs.Start(t)

	keys := fmt.Sprintf(`"AccessKeyId":"theirs","SecretAccessKey":"s","Token":"t","Expiration":%q`,
		time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		must(t, r.ParseForm())
		switch {
		case r.URL.Path == "/container" && r.Header.Get("Authorization") == "hush-agent":
			fmt.Fprintf(w, "{%s}", keys)
		case r.URL.Path == "/latest/api/token" && r.Method == http.MethodPut:
			w.Header().Set("X-aws-ec2-metadata-token-ttl-seconds", "21600")
			fmt.Fprint(w, "imds-token")
		case strings.HasSuffix(r.URL.Path, "/security-credentials/") && r.Header.Get("X-aws-ec2-metadata-token") ==
			"imds-token":
			fmt.Fprint(w, "role\n")
		case strings.HasSuffix(r.URL.Path, "/security-credentials/role") && r.Header.Get("X-aws-ec2-metadata-token") ==
			"imds-token":
			fmt.Fprintf(w, `{"Code":"Success",%s}`, keys)
		case r.URL.Path == "/" && r.Form.Get("WebIdentityToken") == "hush-web" && r.Form.Get("RoleArn") == "arn:theirs":
			fmt.Fprintf(w, `<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult><Credentials>
				<AccessKeyId>theirs</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken><Expiration>%s</Expiration>
				</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>`, time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(agent.Close)
	tokenless := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/latest/meta-data/iam/security-credentials/":
			fmt.Fprint(w, "role")
		case "/latest/meta-data/iam/security-credentials/role":
			fmt.Fprintf(w, `{"Code":"Success",%s}`, keys)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(tokenless.Close)

	// Ours: all of it wrong for them.
	write("ours/.aws/credentials",
		"[default]\naws_access_key_id = ours\naws_secret_access_key = s\n[theirs]\naws_access_key_id = "+
			"ours\naws_secret_access_key = s\n")
	token := write("ours/token", "ours")
	for k, v := range map[string]string{
		"HOME": filepath.Join(dir, "ours"), "AWS_PROFILE": "ours",
		"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_REGION": "mars-1", "AWS_CA_BUNDLE": "/none.pem",
		"AWS_ACCESS_KEY_ID": "ours", "AWS_SECRET_ACCESS_KEY": "ours", "AWS_SESSION_TOKEN": "ours",
		"AWS_WEB_IDENTITY_TOKEN_FILE": token, "AWS_ROLE_ARN": "arn:ours", "AWS_ENDPOINT_URL_STS": "http://127.0.0.1:1",
		"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1/", "AWS_CONTAINER_AUTHORIZATION_TOKEN": "ours",
		"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1", "AWS_NO_SIGN_REQUEST": "true",
	} {
		t.Setenv(k, v)
	}
	os.Unsetenv("AWS_CONFIG_FILE")
	os.Unsetenv("AWS_SHARED_CREDENTIALS_FILE")

	write("theirs/.aws/config",
		"[profile theirs]\nregion = eu-west-3\nendpoint_url = "+endpoint+
			"\n[profile inconfig]\naws_access_key_id = theirs\naws_secret_access_key = s\n")
	write("theirs/.aws/credentials", "[theirs]\naws_access_key_id = theirs\naws_secret_access_key = s\n")
	home := filepath.Join(dir, "theirs")
	for _, c := range []struct {
		name string
		env  map[string]string
		want string // the error's text; "" for none
	}{
		{"keys", map[string]string{"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "theirs",
			"AWS_SECRET_ACCESS_KEY": "s"}, ""},
		{"profile", map[string]string{"HOME": home, "AWS_PROFILE": "theirs"}, ""},
		{"profile in the config file",
			map[string]string{"HOME": home, "AWS_PROFILE": "inconfig", "AWS_ENDPOINT_URL": endpoint}, ""},
		{"named file", map[string]string{"AWS_SHARED_CREDENTIALS_FILE": home + "/.aws/credentials",
			"AWS_PROFILE": "theirs", "AWS_ENDPOINT_URL": endpoint}, ""},
		{"web identity", map[string]string{
			"AWS_ENDPOINT_URL": endpoint, "AWS_ENDPOINT_URL_STS": agent.URL, "AWS_ROLE_ARN": "arn:theirs",
			"AWS_WEB_IDENTITY_TOKEN_FILE": write("theirs/web", "hush-web"),
		}, ""},
		{"container", map[string]string{
			"AWS_ENDPOINT_URL": endpoint, "AWS_CONTAINER_CREDENTIALS_FULL_URI": agent.URL + "/container",
			"AWS_CONTAINER_AUTHORIZATION_TOKEN": "hush-agent",
		}, ""},
		{"container, token in a file", map[string]string{
			"AWS_ENDPOINT_URL": endpoint, "AWS_CONTAINER_CREDENTIALS_FULL_URI": agent.URL + "/container",
			"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": write("theirs/agent", "hush-agent\n"),
		}, ""},
		{"container elsewhere", map[string]string{"AWS_ENDPOINT_URL": endpoint,
			"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://192.0.2.1/"}, "neither https"},
		{"instance", map[string]string{"AWS_ENDPOINT_URL": endpoint,
			"AWS_EC2_METADATA_SERVICE_ENDPOINT": agent.URL}, ""},
		{"instance without tokens",
			map[string]string{"AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_SERVICE_ENDPOINT": tokenless.URL}, ""},
		{"none", map[string]string{"AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"},
			"no credentials"},
		{"none, with a home", map[string]string{"HOME": home, "AWS_ENDPOINT_URL": endpoint,
			"AWS_EC2_METADATA_DISABLED": "true"}, "no credentials"},
		{"their mistake", map[string]string{"AWS_ENDPOINT_URL": "ftp://x", "AWS_ACCESS_KEY_ID": "theirs",
			"AWS_SECRET_ACCESS_KEY": "s"}, "neither http nor https"},
		{"unsigned", map[string]string{"AWS_ENDPOINT_URL": endpoint, "AWS_NO_SIGN_REQUEST": "true"}, "AccessDenied"},
	} {
		t.Run(c.name, func(t *testing.T) {
			opens(t, c.env, c.want)
		})
	}
}

// opens opens a bucket in an environment, and asks for it. It fails with a text that holds want, or, if that is empty,
// not at all; what it says holds no secret ("hush").
func opens(t *testing.T, env map[string]string, want string) {
	t.Helper()
	reads := 0
	store, _, err := stores.Open(t.Context(), "s3://bucket/x", stores.Options{Getenv: func(name string) string {
		if name == "AWS_CONFIG_FILE" {
			reads++
		}
		return env[name]
	}})
	if reads != 1 {
		t.Errorf("the shared files were read %d times", reads)
	}
	if err == nil {
		defer store.(*s3.Store).Close()
		err = store.Check(t.Context())
	}
	if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("error %v, want %q", err, want)
	}
	if err != nil && strings.Contains(err.Error(), "hush") {
		t.Errorf("the text holds a secret: %v", err)
	}
}
