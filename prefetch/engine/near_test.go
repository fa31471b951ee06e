package engine

import "testing"

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
		{NearTier{Endpoint: "http://near"},
			map[string]string{"AWS_ENDPOINT_URL": "http://near", "AWS_ENDPOINT_URL_S3": "http://near",
				"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "", "AWS_ACCESS_KEY_ID": "key"}},
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
