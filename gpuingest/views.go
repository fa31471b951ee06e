package gpuingest

import (
	"fmt"
	"image"
	"slices"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

const (
	viewsWord  = "views"
	maxViews   = 32  // of a sample: fewer than the planes that a slot's header lists
	viewPlaces = 256 // places of operations from one view's to the next one's
)

// viewGroup is Nx[operations] of a SPEC.
type viewGroup struct {
	count int
	calls []call
	text  string // canonical
	pos   int
	len   int
}

// views parses the groups behind "views(".
func (p *parser) views() (groups []viewGroup, err error) {
	for !p.accept(')') {
		g := viewGroup{count: 1}
		if c := p.peek(); c >= '0' && c <= '9' {
			word, pos := p.word()
			n, err := strconv.Atoi(strings.TrimSuffix(word, "x"))
			if err != nil || !strings.HasSuffix(word, "x") || n < 1 || n > maxViews {
				return nil, p.fail(pos, len(word), "write 2x[RandomResizedCrop(224)]",
					"%q does not say how many views, from 1x to %dx", word, maxViews)
			}
			g.count = n
		}
		if g.pos = p.i; !p.accept('[') {
			return nil, p.fail(p.i, 1, "write views(2x[RandomResizedCrop(224)], 8x[RandomResizedCrop(96)])",
				"expected the operations of a view in brackets, found %s", p.what())
		}
		if g.calls, err = p.calls(']'); err != nil {
			return nil, err
		}
		g.len = p.i - g.pos
		groups = append(groups, g)
		if !p.accept(',') && p.peek() != ')' {
			return nil, p.fail(p.i, 1, "", "expected , or ) after a view, found %s", p.what())
		}
	}
	return groups, nil
}

// viewsIngest makes several pictures of one, each by its own operations, from one decode. See the package's rules.
type viewsIngest struct {
	*Transform              // the first
	views      []*Transform // in order; each has its number
	fields     []Field
	text       string
}

func compileViews(p *parser, calls []call) (Ingest, error) {
	of, after := calls[0], calls[1:]
	if len(of.views) == 0 {
		return nil, p.fail(of.pos, len(of.name), "write views(2x[RandomResizedCrop(224)], 8x[RandomResizedCrop(96)])",
			"views needs the operations of at least one view")
	}
	for _, c := range after {
		if _, ok := operationOf(c); ok {
			return nil, p.fail(c.pos, len(c.name), "write it inside of the brackets of each view that needs it",
				"%s after views, which ends the operations", c.name)
		}
		if mixes(c) || c.name == dctWord {
			return nil, p.fail(c.pos, len(c.name), "leave it out",
				"%s is for one picture of each sample, but views makes several", c.name)
		}
	}
	v := &viewsIngest{}
	var groups []viewGroup // the canonical form's: neighbours with the same text are one
	bytes := 0
	for _, g := range of.views {
		if len(v.views)+g.count > maxViews {
			return nil, p.fail(g.pos, g.len, "", "more than %d views", maxViews)
		}
		for _, c := range g.calls {
			if _, ok := operationOf(c); !ok && c.name != viewsWord && slices.Contains(words(), c.name) {
				return nil, p.fail(c.pos, len(c.name), "write it behind views(...)",
					"%s inside of a view, which holds operations on the picture: words hold for all views", c.name)
			}
		}
		t, err := compileCalls(p, g.calls, after)
		if err != nil {
			return nil, err
		}
		for range g.count {
			one := *t
			one.view = len(v.views)
			f := one.Fields()[0]
			if one.view > 0 {
				f.Name = fmt.Sprintf("view%d", one.view)
			}
			v.views, v.fields, bytes = append(v.views, &one), append(v.fields, f), bytes+f.Bytes
		}
		g.text = t.operationsText()
		if n := len(groups) - 1; n >= 0 && groups[n].text == g.text {
			groups[n].count += g.count
		} else {
			groups = append(groups, g)
		}
	}
	for _, g := range groups {
		v.text += fmt.Sprintf(", %dx[%s]", g.count, g.text)
	}
	v.Transform, v.text = v.views[0], viewsWord+"("+v.text[2:]+")|"+v.views[0].wordsText()
	if bytes > maxOut {
		return nil, p.fail(of.pos, len(of.name), "", "the views of a sample take %d bytes: the limit is %d",
			bytes, maxOut)
	}
	if len(v.text) > maxSpec {
		return nil, p.fail(of.pos, len(of.name), "", "%d bytes long with all arguments, the limit is %d",
			len(v.text), maxSpec)
	}
	return v, nil
}

// Fields implements Ingest: the first view is data, the others are view1, view2, ...
func (v *viewsIngest) Fields() []Field { return v.fields }

func (v *viewsIngest) String() string { return v.text }

func (v *viewsIngest) Hash() string { return hashOf(v.text) }

func (v *viewsIngest) Make(src Sample, at Draw, row *Row) error {
	if err := checkDraw(at); err != nil {
		return err
	}
	p := pictures.Get().(*picture)
	defer p.close()
	return ofSample(v.make(p, src.Data, at, row))
}

func (v *viewsIngest) make(p *picture, src []byte, at Draw, row *Row) error {
	if err := p.open(src); err != nil {
		return err
	}
	row.Width, row.Height = uint32(p.size0.X), uint32(p.size0.Y)
	var ends [maxViews + 1]int // of the views' steps
	var need image.Rectangle
	p.steps = p.steps[:0]
	for i, t := range v.views {
		p.steps = t.plan(p.steps, p.size0, at, &p.rand)
		ends[i+1] = len(p.steps)
		need = need.Union(firstBox(p.steps[ends[i]:], p.size0))
	}
	origin, err := p.decodeOnce(need)
	if err != nil {
		return err
	}
	for i, t := range v.views {
		steps := p.steps[ends[i]:ends[i+1]]
		steps[0].box = steps[0].box.Sub(origin)
		if err := p.show(t, steps, at, row.Fields[i]); err != nil {
			return err
		}
	}
	return nil
}

// firstBox is the part of a picture of this size that the steps need. There is at least one: it makes the size fixed.
func firstBox(steps []step, size image.Point) image.Rectangle {
	all := image.Rectangle{Max: size}
	if steps[0].kind == stepCrop && steps[0].box.In(all) {
		return steps[0].box
	}
	return all
}

// decodeOnce decodes a part of a JPEG, which becomes the picture, and returns its origin. What takes too much memory it
// leaves for each view to decode as it needs it: slower, with the same pixels.
func (p *picture) decodeOnce(part image.Rectangle) (origin image.Point, err error) {
	n := part.Dx()*part.Dy()*3 + jpeg.PlanesSlack
	if !p.isJPEG || n > maxBetween {
		return origin, nil
	}
	p.buf = getBuffer(n)
	if err := jpeg.DecodeSized((*p.buf)[:n-jpeg.PlanesSlack], p.src, p.size0,
		&jpeg.Job{Box: part, Planar: true}); err != nil {
		return origin, err
	}
	p.src, p.isJPEG, p.planes, p.size0 = *p.buf, false, true, part.Size()
	return part.Min, nil
}

// show makes a view. The picture's pixels stay as they are.
func (p *picture) show(t *Transform, steps []step, at Draw, dst []byte) error {
	q := pictures.Get().(*picture)
	defer q.close()
	q.src, q.isJPEG, q.planes, q.size0, q.view = p.src, p.isJPEG, p.planes, p.size0, viewOf(p.size0)
	return t.take(q, steps, at, dst)
}
