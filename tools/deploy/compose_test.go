package deploy

import (
	"bufio"
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

func reader(b []byte) *bufio.Reader { return bufio.NewReader(bytes.NewReader(b)) }

// checkFlags asks the binary whether it knows the flags of a command line, without running it.
func checkFlags(t *testing.T, bin, where string, args []string) {
	t.Helper()
	if len(args) == 0 {
		t.Errorf("%s: no command", where)
		return
	}
	out, err := exec.Command(bin, args[0], "--help").CombinedOutput()
	if err != nil {
		t.Errorf("%s: %s --help: %v", where, args[0], err)
		return
	}
	settings, _ := exec.Command(bin, "config", args[0], "--json").Output() // those that --help leaves out, too
	for _, a := range args[1:] {
		name, _, _ := strings.Cut(a, "=")
		if strings.HasPrefix(name, "--") && !bytes.Contains(out, []byte(name+" ")) &&
			!bytes.Contains(settings, []byte(`"name": "`+name[2:]+`"`)) {
			t.Errorf("%s: shoal %s has no %s", where, args[0], name)
		}
	}
}

func compose(path string) (*types.Project, error) {
	o, err := cli.NewProjectOptions([]string{path}, cli.WithName("shoal"),
		cli.WithEnv([]string{"DATASET=s3://photos/train", "TRAINER_IMAGE=trainer"}))
	if err != nil {
		return nil, err
	}
	return o.LoadProject(context.Background())
}

func TestCompose(t *testing.T) {
	const file = "../../deploy/compose/docker-compose.yml"
	p, err := compose(file)
	if err != nil {
		t.Fatal(err)
	}
	shoal, trainer := p.Services["shoal"], p.Services["trainer"]
	if d := trainer.DependsOn["shoal"]; d.Condition != types.ServiceConditionHealthy {
		t.Errorf("the trainer does not wait until shoal is healthy: %+v", d)
	}
	if shoal.HealthCheck == nil || !slices.Contains(shoal.HealthCheck.Test, "health") {
		t.Errorf("healthcheck %+v", shoal.HealthCheck)
	}
	shared := func(s types.ServiceConfig) string {
		for _, v := range s.Volumes {
			if v.Bind != nil && v.Target == "/mnt/shoal" {
				return v.Bind.Propagation
			}
		}
		return ""
	}
	if shared(shoal) != "rshared" || shared(trainer) != "rslave" {
		t.Errorf("propagation %q and %q", shared(shoal), shared(trainer))
	}
	if bin := os.Getenv("DEPLOY_BINARY"); bin != "" {
		checkFlags(t, bin, file, shoal.Command)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	bad := filepath.Join(t.TempDir(), "docker-compose.yml")
	if err := os.WriteFile(bad, bytes.Replace(text, []byte("healthcheck:"), []byte("healthchek:"), 1),
		0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := compose(bad); err == nil || !strings.Contains(err.Error(), "healthchek") {
		t.Errorf("a field that Compose does not know was taken: %v", err)
	}
}

// systemd itself reads the units: an unknown key or section is a line in what it says.
func TestSystemd(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Fatal("systemd-analyze is not installed: run `make setup`")
	}
	bin := os.Getenv("DEPLOY_BINARY")
	if bin == "" {
		t.Fatal("DEPLOY_BINARY names no binary; `make deploy-check` sets it")
	}
	units, err := filepath.Glob("../../deploy/systemd/*.service")
	if err != nil || len(units) != 2 {
		t.Fatalf("%v, %v", units, err)
	}
	verify := func(change func(string) string) string {
		dir := t.TempDir()
		var paths []string
		for _, u := range units {
			text, err := os.ReadFile(u)
			if err != nil {
				t.Fatal(err)
			}
			name := strings.Replace(filepath.Base(u), "@.", "@photos.", 1)
			path := filepath.Join(dir, name)
			if err := os.WriteFile(path, []byte(change(strings.ReplaceAll(string(text), "/usr/bin/shoal", bin))),
				0o644); err != nil {
				t.Fatal(err)
			}
			paths = append(paths, path)
		}
		out, _ := exec.Command("systemd-analyze",
			append([]string{"verify", "--man=no", "--recursive-errors=no"}, paths...)...).CombinedOutput()
		return string(out)
	}
	if out := verify(func(s string) string { return s }); strings.TrimSpace(out) != "" {
		t.Errorf("systemd says:\n%s", out)
	}
	if out := verify(func(s string) string {
		return strings.Replace(s, "WatchdogSec=", "WatchdogSecs=", 1)
	}); !strings.Contains(out, "WatchdogSecs") {
		t.Errorf("an unknown key was taken:\n%s", out)
	}
	for _, u := range units {
		text, _ := os.ReadFile(u)
		for line := range strings.Lines(string(text)) {
			if cmd, ok := strings.CutPrefix(line, "ExecStart="); ok {
				checkFlags(t, bin, u, strings.Fields(cmd)[1:])
			}
		}
	}
}
