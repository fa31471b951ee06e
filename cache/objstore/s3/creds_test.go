package s3_test

import (
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore/stores"
)

// awsServices is a stand-in for STS, the instance metadata service of version 2, and the agents of ECS and
// EKS. It gives out the keys that are set, and only to who asks as the protocols have it.
type awsServices struct {
	mu    sync.Mutex
	id    string // access key id to give out; the secret is "s", the token "t"
	life  time.Duration
	calls map[string]int
	fail  string // STS's error code, if set
	forms []string
}

func (a *awsServices) set(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.id = id
}

func (a *awsServices) count(call string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.calls[call]
}

func (a *awsServices) start(t *testing.T) string {
	srv := httptest.NewServer(a)
	t.Cleanup(srv.Close)
	return srv.URL
}

func (a *awsServices) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := r.ParseForm(); err != nil {
		w.WriteHeader(400)
		return
	}
	life := a.life
	if life == 0 {
		life = time.Hour
	}
	expire := time.Now().Add(life).UTC().Format(time.RFC3339Nano)
	call := ""
	defer func() {
		if a.calls == nil {
			a.calls = map[string]int{}
		}
		a.calls[call]++
	}()
	document := func() {
		fmt.Fprintf(w, `{"Code":"Success","AccessKeyId":%q,"SecretAccessKey":"s","Token":"t","Expiration":%q}`,
			a.id, expire)
	}
	const imds = "/latest/meta-data/iam/security-credentials/"
	switch {
	case r.URL.Path == "/latest/api/token" && r.Method == http.MethodPut &&
		r.Header.Get("X-aws-ec2-metadata-token-ttl-seconds") != "":
		w.Header().Set("X-aws-ec2-metadata-token-ttl-seconds", "21600")
		fmt.Fprint(w, "hush-imds")
	case strings.HasPrefix(r.URL.Path, imds) && r.Header.Get("X-aws-ec2-metadata-token") != "hush-imds":
		w.WriteHeader(http.StatusUnauthorized)
	case r.URL.Path == imds:
		fmt.Fprint(w, "role\n")
	case r.URL.Path == imds+"role":
		call = "instance"
		document()
	case r.URL.Path == "/v1/credentials" && r.Header.Get("Authorization") == "hush-agent": // EKS Pod Identity
		call = "container"
		document()
	case r.URL.Path == "/" && r.Method == http.MethodPost && r.Form.Get("Version") == "2011-06-15":
		call = r.Form.Get("Action")
		auth := r.Header.Get("Authorization")
		a.forms = append(a.forms, r.Form.Encode())
		wrong := ""
		switch {
		case a.fail != "":
			wrong = a.fail
		case r.Form.Get("RoleArn") == "" || r.Form.Get("RoleSessionName") == "":
			wrong = "ValidationError"
		case call == "AssumeRoleWithWebIdentity" && r.Form.Get("WebIdentityToken") == "hush-web" && auth == "":
		case call == "AssumeRole" && strings.Contains(auth, "AWS4-HMAC-SHA256 Credential=") &&
			strings.Contains(auth, "/sts/aws4_request"):
			_, scope, _ := strings.Cut(auth, "Credential=")
			by, _, _ := strings.Cut(scope, "/")
			if r.Form.Get("ExternalId") != "" && r.Form.Get("ExternalId") != "ext" {
				wrong = "AccessDenied"
			}
			if by != "base" && by != "middle" {
				wrong = "InvalidClientTokenId"
			}
		default:
			wrong = "InvalidIdentityToken"
		}
		if wrong != "" {
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprintf(w, `<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error><Type>Sender</Type><Code>%s</Code><Message>said STS of %s</Message></Error><RequestId>r</RequestId></ErrorResponse>`,
				wrong, r.Form.Get("WebIdentityToken"))
			return
		}
		id := a.id
		if strings.HasSuffix(r.Form.Get("RoleArn"), "/middle") {
			id = "middle"
		}
		fmt.Fprintf(w, `<%[1]sResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><%[1]sResult><Credentials>
			<AccessKeyId>%[2]s</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken><Expiration>%[3]s</Expiration>
			</Credentials></%[1]sResult></%[1]sResponse>`, call, id, expire)
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

// TestCredentialSources: every source that the AWS tools know, as they find it.
func TestCredentialSources(t *testing.T) {
	agent := &awsServices{id: "right"}
	services := agent.start(t)
	broken := &awsServices{fail: "ExpiredTokenException"}
	brokenURL := broken.start(t)
	srv := &S3Server{Bucket: "bucket", AccessKey: "right"}
	endpoint := srv.Start(t)

	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	token := file("web", "hush-web\n")
	process := `printf '{"Version":%s,"AccessKeyId":"right","SecretAccessKey":"s","SessionToken":"t"}'`
	config := file("config", `# the AWS tools' comments
[default]
region = eu-west-3 # here
s3 =
    max_concurrent_requests = 20
[profile role]
role_arn = arn:aws:iam::1:role/x
source_profile = base
external_id = ext
role_session_name = named
duration_seconds = 900
[profile chain]
role_arn = arn:aws:iam::1:role/x
source_profile = middle
[profile middle]
role_arn = arn:aws:iam::1:role/middle
source_profile = base
[profile itself]
role_arn = arn:aws:iam::1:role/x
source_profile = itself
aws_access_key_id = base
aws_secret_access_key = s
[profile loop]
role_arn = arn:aws:iam::1:role/x
source_profile = loop2
[profile loop2]
role_arn = arn:aws:iam::1:role/x
source_profile = loop
[profile mfa]
role_arn = arn:aws:iam::1:role/x
source_profile = base
mfa_serial = arn:aws:iam::1:mfa/me
[profile nosource]
role_arn = arn:aws:iam::1:role/x
[profile external]
role_arn = arn:aws:iam::1:role/x
source_profile = base
external_id = wrong
[profile web]
role_arn = arn:aws:iam::1:role/x
web_identity_token_file = `+token+`
[profile environment]
role_arn = arn:aws:iam::1:role/x
credential_source = Environment
[profile ec2]
role_arn = arn:aws:iam::1:role/x
credential_source = Ec2InstanceMetadata
[profile process]
credential_process = `+fmt.Sprintf(process, "1")+`
[profile process2]
credential_process = `+fmt.Sprintf(process, "2")+`
[profile processtype]
credential_process = printf '{"Version":"1","AccessKeyId":"hush-id","SecretAccessKey":"hush-key"}'
[profile processquoted]
credential_process = "printf" '{"Version":1,"AccessKeyId":"right","SecretAccessKey":"s","SessionToken":"%s"}' "t"
[profile processfails]
credential_process = sh -c 'echo hush-output; exit 3'
[profile half]
aws_access_key_id = hush-half
[profile sts]
services = rig
role_arn = arn:aws:iam::1:role/x
source_profile = base
[profile both]
aws_access_key_id = wrong
aws_secret_access_key = wrong
[services rig]
s3 =
  endpoint_url = `+endpoint+`
sts =
  endpoint_url = `+services+`
`)
	shared := file("credentials",
		"[base]\naws_access_key_id = base\naws_secret_access_key = a;b#c/+=%(x)s\n[both]\naws_access_key_id = "+
			"right\naws_secret_access_key = s\n"+
			"[default]\naws_access_key_id = right\naws_secret_access_key = s\n")
	files := map[string]string{"AWS_CONFIG_FILE": config, "AWS_SHARED_CREDENTIALS_FILE": shared}
	profile := func(name string, more ...string) map[string]string {
		env := map[string]string{"AWS_PROFILE": name, "AWS_ENDPOINT_URL_STS": services,
			"AWS_EC2_METADATA_SERVICE_ENDPOINT": services}
		for k, v := range files {
			env[k] = v
		}
		for i := 0; i < len(more); i += 2 {
			env[more[i]] = more[i+1]
		}
		return env
	}
	for _, c := range []struct {
		name string
		env  map[string]string
		want string // of the error; "" for none
	}{
		{"default profile", map[string]string{"AWS_CONFIG_FILE": config, "AWS_SHARED_CREDENTIALS_FILE": shared}, ""},
		{"old name of the profile's variable",
			map[string]string{"AWS_CONFIG_FILE": config, "AWS_DEFAULT_PROFILE": "process"}, ""},
		{"credentials file over config file", profile("both"), ""},
		{"no such profile", profile("none"), `"none" is in neither`},
		{"role", profile("role"), ""},
		{"role of a role", profile("chain"), ""},
		{"its own source", profile("itself"), ""},
		{"loop", profile("loop"), `"loop", with which arn:aws:iam::1:role/x is to be assumed, leads to no`},
		{"MFA", profile("mfa"), "which a daemon cannot enter"},
		{"no source", profile("nosource"), "credential_source"},
		{"STS refuses", profile("external"), "AccessDenied: said STS"},
		{"web identity of a profile", profile("web"), ""},
		{"role by the environment", profile("environment", "AWS_EC2_METADATA_DISABLED", "1"),
			"AWS_ACCESS_KEY_ID is set"},
		{"role by the instance", profile("ec2", "AWS_EC2_METADATA_SERVICE_ENDPOINT", services), "InvalidClientTokenId"},
		{"process", profile("process"), ""},
		{"process of another version", profile("process2"), "wrong version"},
		{"process with a version that is no number", profile("processtype"), "not credentials in JSON"},
		{"process in quotes", profile("processquoted"), ""},
		{"process that fails", profile("processfails"), "exit status 3"},
		{"half a pair", profile("half"), "partial credentials"},
		{"STS of the services section", map[string]string{"AWS_PROFILE": "sts", "AWS_CONFIG_FILE": config,
			"AWS_SHARED_CREDENTIALS_FILE": shared, "AWS_REGION": "eu-west-3"}, ""},
		{"web identity before the default profile", map[string]string{
			"AWS_SHARED_CREDENTIALS_FILE": file("other",
				"[default]\naws_access_key_id = wrong\naws_secret_access_key = s\n"),
			"AWS_WEB_IDENTITY_TOKEN_FILE": token, "AWS_ROLE_ARN": "arn:aws:iam::1:role/x",
			"AWS_ROLE_SESSION_NAME": "mine", "AWS_ENDPOINT_URL_STS": services,
		}, ""},
		{"web identity without a role",
			map[string]string{"AWS_WEB_IDENTITY_TOKEN_FILE": token, "AWS_ENDPOINT_URL_STS": services},
			"AWS_ROLE_ARN is not"},
		{"web identity without a token", map[string]string{"AWS_WEB_IDENTITY_TOKEN_FILE": dir + "/none",
			"AWS_ROLE_ARN": "arn", "AWS_ENDPOINT_URL_STS": services}, "no such file: " + dir + "/none"},
		{"web identity that is refused", map[string]string{"AWS_WEB_IDENTITY_TOKEN_FILE": token, "AWS_ROLE_ARN": "arn",
			"AWS_ENDPOINT_URL_STS": brokenURL}, "ExpiredTokenException: said STS"},
		{"EKS Pod Identity", map[string]string{
			"AWS_CONTAINER_CREDENTIALS_FULL_URI":     services + "/v1/credentials",
			"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": file("eks", "hush-agent"),
		}, ""},
		{"Pod Identity's token is wrong", map[string]string{
			"AWS_CONTAINER_CREDENTIALS_FULL_URI": services + "/v1/credentials",
			"AWS_CONTAINER_AUTHORIZATION_TOKEN":  "hush-other",
		}, "HTTP 404"},
		{"instance, version 2", map[string]string{"AWS_EC2_METADATA_SERVICE_ENDPOINT": services}, ""},
		{"session token's old name", map[string]string{"AWS_ACCESS_KEY_ID": "right", "AWS_SECRET_ACCESS_KEY": "s",
			"AWS_SECURITY_TOKEN": "t"}, ""},
		{"broken file", map[string]string{"AWS_SHARED_CREDENTIALS_FILE": dir}, "AWS_SHARED_CREDENTIALS_FILE"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.env["AWS_PROFILE"] != "sts" {
				c.env["AWS_ENDPOINT_URL_S3"] = endpoint
			}
			if c.name == "role by the environment" { // a pair there would be used as it is
				c.env["AWS_ACCESS_KEY_ID"] = "half"
			}
			opens(t, c.env, c.want)
		})
	}
	all := strings.Join(agent.forms, "\n")
	for _, want := range []string{"RoleSessionName=named", "DurationSeconds=900", "ExternalId=ext",
		"RoleSessionName=mine"} {
		if !strings.Contains(all, want) {
			t.Errorf("STS was not asked with %s:\n%s", want, all)
		}
	}
}

// TestSSO: without a login, or with an old one, the error says what to do.
func TestSSO(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	sum := sha1.Sum([]byte("corp"))
	cache := filepath.Join(home, ".aws", "sso", "cache")
	must(t, os.MkdirAll(cache, 0o700))
	must(t, os.WriteFile(filepath.Join(home, ".aws", "config"), []byte(`[profile dev]
sso_session = corp
sso_account_id = 1
sso_role_name = reader
[sso-session corp]
sso_region = eu-west-3
sso_start_url = https://corp.awsapps.com/start
`), 0o600))
	env := map[string]string{"HOME": home, "AWS_PROFILE": "dev", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
	open := func() error {
		_, _, err := stores.Open(t.Context(), "s3://bucket/x", stores.Options{Getenv: func(name string) string {
			return env[name]
		}})
		return err
	}
	if err := open(); err == nil || !strings.Contains(err.Error(), "aws sso login") {
		t.Errorf("without a login: %v", err)
	}
	must(t, os.WriteFile(filepath.Join(cache, hex.EncodeToString(sum[:])+".json"),
		[]byte(`{"accessToken":"hush-sso","expiresAt":"2001-01-01T00:00:00Z"}`), 0o600))
	if err := open(); err == nil || !strings.Contains(err.Error(), "aws sso login") ||
		strings.Contains(err.Error(), "hush") {
		t.Errorf("with an old login: %v", err)
	}
}
