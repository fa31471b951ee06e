package e2e

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// make screenshots sets it.
var screenshots = flag.String("screenshots", "", "folder for screenshots of the dashboard over some minutes of work")

// hostile is the name of a client that would be markup, were it not text.
const hostile = `<img src=x onerror=alert(1)>`

// pixels is a function that reads a row of a canvas, by way of a copy: one that is read is no longer drawn by the GPU.
const pixels = `c => {
  const g = new OffscreenCanvas(c.width, c.height).getContext("2d", { willReadFrequently: true });
  g.drawImage(c, 0, 0);
  return g.getImageData(0, Math.floor(c.height / 2), c.width, 1).data;
}`

// TestDashboard looks at the dashboard of a real daemon, which serves photographs from a slow store to a mount and a
// feed, in headless Chromium.
func TestDashboard(t *testing.T) {
	long(t)
	count, bandwidth := 160, int64(3<<20)
	if *screenshots != "" {
		count, bandwidth = 4000, 40<<20
	}
	d := startWork(t, count, bandwidth)
	b := openBrowser(t)
	b.open(d.url)
	if *screenshots != "" {
		d.shoot(t, b)
		return
	}

	b.run("verdict", func(t *testing.T) {
		b.until("a verdict", `document.title.endsWith("– Shoal") && !document.title.includes("Asking")`)
		b.until("the title shows it", `document.title.includes(document.getElementById("v-title").textContent)`)
		var level string
		b.eval(`document.getElementById("verdict").dataset.level`, &level)
		if !slices.Contains([]string{"ok", "idle", "warn", "fail"}, level) {
			t.Errorf("level %q", level)
		}
	})
	b.run("everything is shown", func(t *testing.T) {
		for what, js := range map[string]string{
			"every chart has a line": `[...document.querySelectorAll("figure svg")].every(s => s.querySelector("path[d^=M]"))`,
			"samples arrive":         `/[1-9]/.test(document.querySelector("#c-delivered b").textContent)`,
			"the map has more than one hue": `new Set((` + pixels +
				`)(document.querySelector("#map canvas"))).size > 4`,
			"the reader stands somewhere": `parseFloat(document.querySelector("#map .mark").style.left) > 0`,
			"mount and feed are followed": `document.querySelectorAll("#streams tbody tr").length >= 2`,
			"the session":                 `document.querySelector("#sessions tbody")?.textContent.includes("resnet50")`,
			"slowest keys":                `document.querySelectorAll("#slowest tbody tr").length == 8`,
			"meters":                      `document.querySelectorAll("#resources [role=meter]").length == 4`,
			"the verdicts' band":          `(` + pixels + `)(document.getElementById("v-band")).some(x => x > 0)`,
		} {
			b.until(what, js)
		}
	})
	b.run("names are text", func(t *testing.T) {
		b.until("the hostile name is shown",
			`document.querySelector("#sessions tbody").textContent.includes("<img src=x onerror=alert(1)>")`)
		var images int
		b.eval(`document.querySelectorAll("img").length`, &images)
		if images != 1 {
			t.Errorf("%d images, want the mark alone", images)
		}
	})
	b.run("keyboard", func(t *testing.T) { keyboard(t, b) })
	b.run("contrast", func(t *testing.T) {
		for _, scheme := range []string{"light", "dark"} {
			b.media("prefers-color-scheme", scheme, "prefers-reduced-motion", "reduce") // so that nothing fades
			b.until("the colours hold", `matchMedia("(prefers-color-scheme: `+scheme+`)").matches`)
			if bad := b.contrast(); len(bad) > 0 {
				t.Errorf("%s: text of less contrast than WCAG AA wants:\n%s", scheme, strings.Join(bad, "\n"))
			}
		}
	})
	b.run("narrow", func(t *testing.T) {
		b.do(chromedp.EmulateViewport(360, 740))
		b.until("nothing sticks out", `document.documentElement.scrollWidth <= 360`)
		b.do(chromedp.EmulateViewport(1280, 900))
	})
	b.run("reduced motion", func(t *testing.T) {
		b.media("prefers-reduced-motion", "reduce")
		b.until("nothing moves",
			`[...document.querySelectorAll("*")].every(e => getComputedStyle(e).transitionDuration.split(",").every(d => parseFloat(d) === 0) && getComputedStyle(e).animationName === "none")`)
	})
	b.run("cost", func(t *testing.T) {
		b.open(d.url)
		b.until("painted", `performance.getEntriesByType("paint").some(p => p.name === "first-contentful-paint")`)
		b.until("loaded", `performance.getEntriesByType("resource").filter(r => /\.(js|css|svg)$/.test(r.name) && r.responseEnd > 0).length >= 9`)
		var paint float64
		var urls []string
		b.eval(`performance.getEntriesByName("first-contentful-paint")[0].startTime`, &paint)
		b.eval(`[...new Set([location.href, ...performance.getEntriesByType("resource").map(r => r.name).filter(n => /\.(js|css|svg)$/.test(n))])]`, &urls)
		size := 0
		for _, url := range urls {
			size += len(fetch(t, url))
		}
		t.Logf("first contentful paint after %.0f ms, %d bytes in %d files", paint, size, len(urls))
		if size < 20_000 || size > 200_000 {
			t.Errorf("%d bytes of %q", size, urls)
		}
	})
	if bad := b.complaints(); len(bad) > 0 {
		t.Errorf("the console says:\n%s", strings.Join(bad, "\n"))
	}
	b.run("the daemon dies", func(t *testing.T) {
		d.kill(t)
		b.until("it is told", `document.title.includes("The daemon does not answer") && document.getElementById("verdict").dataset.level === "lost"`)
		d.start(t)
		b.until("it is back", `!document.title.includes("does not answer") && document.querySelector("#link b").textContent === "live"`)
	})
}

func keyboard(t *testing.T, b *browser) {
	press := func(key string) { b.do(chromedp.KeyEvent(key)) }
	b.media("prefers-color-scheme", "light")
	press("?")
	b.until("help is shown", `document.getElementById("keys").open`)
	press(kb.Escape)
	b.until("help is gone", `!document.getElementById("keys").open`)
	press("t")
	b.until("it is dark", `document.documentElement.dataset.theme === "dark" && getComputedStyle(document.body).colorScheme.includes("dark")`)
	press("t")
	b.until("it is light", `document.documentElement.dataset.theme === "light"`)
	b.do(chromedp.Evaluate(`delete document.documentElement.dataset.theme`, nil))
	for key, range_ := range map[string]string{"1": "60", "3": "900", "2": "300"} {
		press(key)
		b.until("range "+range_,
			`document.querySelector('[data-range="`+range_+`"]').getAttribute("aria-pressed") === "true"`)
	}
	press("p")
	b.until("it stands still", `document.querySelector("#link b").textContent === "paused"`)
	press("p")
	b.until("it goes on", `document.querySelector("#link b").textContent === "live"`)
	press("v")
	b.until("the verdict has the focus", `document.activeElement.id === "verdict"`)

	// All that can be used is reached by the tab key, in the order of the page, and seen to be.
	b.do(chromedp.Evaluate(`document.activeElement.blur(); scrollTo(0, 0); document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute("tabindex")`, nil))
	var want []string
	b.eval(`[...document.querySelectorAll("a[href], button, figure svg[tabindex]")].filter(e => e.checkVisibility()).map(e => e.id || e.getAttribute("aria-label") || e.textContent)`, &want)
	var got []string
	for range want {
		press(kb.Tab)
		var name string
		b.eval(`(() => { const e = document.activeElement; return (getComputedStyle(e).outlineStyle === "none" ? "unseen: " : "") + (e.id || e.getAttribute("aria-label") || e.textContent) })()`, &name)
		got = append(got, name)
	}
	if !slices.Equal(got, want) {
		t.Errorf("tab goes to %q, want %q", got, want)
	}
	b.do(chromedp.Evaluate(`document.querySelector("#c-lead svg").focus()`, nil))
	press(kb.ArrowLeft)
	b.until("the arrow moves the cursor",
		`/^\d\d:\d\d:\d\d: samples ahead /.test(document.querySelector("#c-lead svg").getAttribute("aria-valuetext"))`)
	press(kb.Escape)
	b.until("Esc leaves it", `document.querySelector("#c-lead svg").getAttribute("aria-valuetext").startsWith("now: ")`)
}

// work is a daemon with something to do: a reader of its mount, and a consumer of its feed.
type work struct {
	url, mnt string
	proxy    *proxy.Proxy
	env      []string
	args     []string
	cache    string
	paths    []string // in the order of reading
	pause    time.Duration
}

func startWork(t *testing.T, count int, bandwidth int64) *work {
	dir, paths := photographs(t, count)
	slices.Sort(paths)
	p, env := far(t, proxy.Options{Latency: 30 * time.Millisecond, Sigma: 0.4, Bandwidth: bandwidth})
	d := &work{proxy: p, env: env, mnt: t.TempDir(), cache: t.TempDir(), pause: 4 * time.Millisecond}
	addr := "unix://" + filepath.Join(t.TempDir(), "feed.sock")
	cacheSize, memory := "40MiB", "256MiB"
	if *screenshots != "" {
		dir, err := os.MkdirTemp("/var/cache", "shoal-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		d.cache = dir // which is in the picture
		cacheSize, memory = "96MiB", "160MiB"
	}
	d.args = []string{"serve", bucket(t, dir), "--listen", addr, "--mount", d.mnt, "--cache-dir", d.cache,
		"--cache-size", cacheSize, "--memory", memory,
		"--order", "torch:seed=7", "--connections", "64", "--kernel-cache", "off", "--daemon"}
	d.start(t)
	t.Cleanup(func() {
		if mounted(d.mnt) {
			umount(t, d.mnt)
		}
	})
	epochs, client := 1, hostile // the epoch again and again
	if *screenshots != "" {
		epochs, d.pause, client = 12, 8*time.Millisecond, "node07 (pid 4711)"
	}
	for epoch := range epochs {
		for _, i := range positions(t, fmt.Sprintf("torch:seed=7,epoch=%d", epoch), len(paths)) {
			d.paths = append(d.paths, paths[i])
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() { d.read(ctx) })
	all.Go(func() {
		for ctx.Err() == nil { // until the daemon is gone, and again
			_ = trainOn(ctx, addr, client)
			sleep(ctx, 200*time.Millisecond)
		}
	})
	t.Cleanup(func() { stop(); all.Wait() }) // before the unmount
	return d
}

func positions(t *testing.T, spec string, n int) (order []int) {
	for line := range strings.Lines(mustShoal(t, nil, "order", spec, "--n", fmt.Sprint(n))) {
		var i int
		if _, err := fmt.Sscan(line, &i); err != nil {
			t.Fatal(err)
		}
		order = append(order, i)
	}
	return order
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// trainOn plays a trainer at the feed that takes a tenth of a second for a batch.
func trainOn(ctx context.Context, addr, client string) error {
	c, err := feedclient.Dial(addr, feedclient.Security{})
	if err != nil {
		return err
	}
	defer c.Close()
	s, err := c.Open(ctx, &feedpb.Open{
		Session: "resnet50", Client: client,
		Order: "uniform", Transform: "RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw", Batch: 8, World: 1,
		Epochs: 1000,
	})
	if err != nil {
		return err
	}
	defer s.Close()
	for {
		b, err := s.Next()
		if err != nil {
			return err
		}
		b.Release()
		sleep(ctx, 100*time.Millisecond)
	}
}

// read plays a trainer with four workers on the mount, epoch after epoch.
func (d *work) read(ctx context.Context) {
	for ctx.Err() == nil {
		next := make(chan string)
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				for p := range next {
					_, _ = os.ReadFile(filepath.Join(d.mnt, p)) // which fails while the daemon is dead
				}
			})
		}
		for _, p := range d.paths {
			if ctx.Err() != nil {
				break
			}
			next <- p
			sleep(ctx, d.pause)
		}
		close(next)
		all.Wait()
	}
}

var dashboardURL = regexp.MustCompile(`msg=dashboard url=(\S+)`)

// start starts the daemon, always at the same address.
func (d *work) start(t *testing.T) {
	t.Helper()
	at := ownAddress() + ":7071" // nobody else takes it while the daemon is dead
	mustShoal(t, d.env, append(d.args, "--admin", at)...)
	log, err := os.ReadFile(filepath.Join(d.cache, "shoal.log"))
	if err != nil {
		t.Fatal(err)
	}
	m := dashboardURL.FindAllSubmatch(log, -1)
	if len(m) == 0 {
		t.Fatalf("the log names no dashboard:\n%s", log)
	}
	d.url = string(m[len(m)-1][1])
}

func (d *work) kill(t *testing.T) {
	t.Helper()
	var s stats
	body := fetch(t, d.url+"/stats")
	if err := json.Unmarshal(body, &s); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(s.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

func fetch(t *testing.T, url string) []byte {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s, %v", url, resp.Status, err)
	}
	return body
}

// shoot takes the screenshots of docs/dashboard.md, of a daemon whose store is fast for a while and then is not.
func (d *work) shoot(t *testing.T, b *browser) {
	t.Helper()
	for _, phase := range []struct {
		bandwidth int64
		seconds   time.Duration
		shots     []shot
	}{
		{40 << 20, 150, []shot{{"dashboard-dark", 1280, "dark"}}},
		{3 << 20, 60, []shot{{"dashboard-light", 1280, "light"}, {"dashboard-narrow", 360, "light"}}},
	} {
		if err := d.proxy.Set(proxy.Options{Latency: 30 * time.Millisecond, Sigma: 0.4,
			Bandwidth: phase.bandwidth}); err != nil {
			t.Fatal(err)
		}
		b.do(chromedp.Sleep(phase.seconds * time.Second))
		for _, s := range phase.shots {
			write(t, filepath.Join(*screenshots, s.name+".png"), b.shoot(s))
		}
	}
}

type shot struct {
	name   string
	width  int64
	scheme string
}

// shoot returns a picture of the page, as PNG.
func (b *browser) shoot(s shot) (png []byte) {
	b.t.Helper()
	b.media("prefers-color-scheme", s.scheme)
	b.do(chromedp.EmulateViewport(s.width, 800), chromedp.Sleep(2*time.Second),
		chromedp.ActionFunc(func(ctx context.Context) (err error) {
			var height float64
			if err := chromedp.Evaluate(`document.documentElement.scrollHeight`, &height).Do(ctx); err != nil {
				return err
			}
			if s.width < 400 {
				height = min(height, 1600)
			}
			png, err = page.CaptureScreenshot().WithCaptureBeyondViewport(true).WithClip(
				&page.Viewport{Width: float64(s.width), Height: height, Scale: 1}).Do(ctx)
			return err
		}))
	return png
}

// browser is a page in headless Chromium.
type browser struct {
	t   *testing.T
	ctx context.Context

	mu   sync.Mutex
	said []string
}

func openBrowser(t *testing.T) *browser {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatal("chromium is missing: ./setup.sh installs it")
	}
	o := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path),
		chromedp.WSURLReadTimeout(2*time.Minute), chromedp.Flag("disable-dev-shm-usage", true))
	if os.Getuid() == 0 {
		o = append(o, chromedp.NoSandbox) // which root cannot have
	}
	ctx, stop := context.WithTimeout(context.Background(), 15*time.Minute)
	t.Cleanup(stop)
	ctx, stop = chromedp.NewExecAllocator(ctx, o...)
	t.Cleanup(stop)
	b := &browser{t: t}
	say := func(format string, args ...any) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.said = append(b.said, fmt.Sprintf(format, args...))
	}
	ctx, stop = chromedp.NewContext(ctx, chromedp.WithErrorf(func(format string, args ...any) {
		if !strings.HasPrefix(format, "unhandled") { // events that are newer than the library
			say(format, args...)
		}
	}))
	t.Cleanup(stop)
	b.ctx = ctx
	chromedp.ListenTarget(ctx, func(event any) {
		switch e := event.(type) {
		case *cdplog.EventEntryAdded:
			if e.Entry.Source == cdplog.SourceRendering && e.Entry.Level == cdplog.LevelWarning {
				return // advice on speed, which depends on the machine
			}
			say("%s, %s: %s %s", e.Entry.Source, e.Entry.Level, e.Entry.Text, e.Entry.URL)
		case *runtime.EventExceptionThrown:
			say("exception: %s", e.ExceptionDetails.Error())
		case *runtime.EventConsoleAPICalled:
			say("console.%s: %v", e.Type, e.Args)
		}
	})
	b.do(cdplog.Enable(), chromedp.EmulateViewport(1280, 900))
	return b
}

// run runs a part of the test, which the browser then speaks for.
func (b *browser) run(name string, f func(t *testing.T)) {
	all := b.t
	defer func() { b.t = all }()
	all.Run(name, func(t *testing.T) { b.t = t; f(t) })
}

// complaints returns what the console showed so far: errors, warnings, violations of the policy.
func (b *browser) complaints() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.said)
}

func (b *browser) do(actions ...chromedp.Action) {
	b.t.Helper()
	if err := chromedp.Run(b.ctx, actions...); err != nil {
		b.t.Fatal(err)
	}
}

func (b *browser) open(url string) { b.t.Helper(); b.do(chromedp.Navigate(url)) }

func (b *browser) eval(js string, to any) { b.t.Helper(); b.do(chromedp.Evaluate(js, to)) }

// until waits until the expression is true.
func (b *browser) until(what, js string) {
	b.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		ok := false
		b.eval("(() => { try { return Boolean("+js+"); } catch { return false; } })()", &ok)
		if ok {
			return
		}
		if time.Now().After(deadline) {
			var title, detail string
			b.eval("document.title", &title)
			b.eval(`document.getElementById("v-detail").textContent`, &detail)
			b.t.Fatalf("not within two minutes: %s (%s: %s)\n%s",
				what, title, detail, strings.Join(b.complaints(), "\n"))
		}
	}
}

// media sets features of the medium, pairs of name and value, and none else.
func (b *browser) media(features ...string) {
	b.t.Helper()
	var list []*emulation.MediaFeature
	for i := 0; i < len(features); i += 2 {
		list = append(list, &emulation.MediaFeature{Name: features[i], Value: features[i+1]})
	}
	b.do(emulation.SetEmulatedMedia().WithFeatures(list))
}

// contrast returns the texts whose contrast with what is behind them is below WCAG 2.1's level AA: 4.5, or 3 where they
// are large.
func (b *browser) contrast() (bad []string) {
	b.t.Helper()
	b.eval(`(() => {
  const g = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const rgba = css => { g.clearRect(0, 0, 1, 1); g.fillStyle = css; g.fillRect(0, 0, 1, 1); return [...g.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce((a, v, i) => a + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] === 255) return c; } return [255, 255, 255, 255]; };
  const bad = [];
  for (const e of document.querySelectorAll("body *")) {
    if (!e.checkVisibility() || e.closest(".sr, .skip, symbol") || ![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(e), svg = e instanceof SVGElement;
    const ink = light(rgba(svg ? style.fill : style.color)), ground = light(behind(e));
    const ratio = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    const size = parseFloat(style.fontSize), large = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
    if (ratio < (large ? 3 : 4.5)) bad.push(ratio.toFixed(2) + " " + e.tagName + "." + e.className + ": " + e.textContent.slice(0, 40));
  }
  return bad;
})()`, &bad)
	return bad
}
