package gpuingest

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

// TestCanonical pins canonical forms and hashes: sessions and resumes carry them.
func TestCanonical(t *testing.T) {
	const (
		rrc = "RandomResizedCrop(size=(224, 224), scale=(0.08, 1.0), ratio=(0.75, 1.3333333333333333), " +
			"interpolation='bilinear', antialias=True)"
		rs = "Resize(size=256, interpolation='bilinear', max_size=None, antialias=True)"
	)
	for spec, want := range map[string]string{
		"RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nhwc":                                                    rrc + "|RandomHorizontalFlip(p=0.5)|uint8|nhwc|pillow(9.4)",
		"RandomResizedCrop(224)":                                                                                      rrc + "|uint8|nchw|pillow(9.4)",
		" RandomResizedCrop( size = [ 224 , ] , antialias = None ) | nchw | uint8 | pillow(9.4) ":                     rrc + "|uint8|nchw|pillow(9.4)",
		"RandomResizedCrop((224,224),(0.08,1),(.75,1.3333333333333333),interpolation=InterpolationMode.BILINEAR,)":    rrc + "|uint8|nchw|pillow(9.4)",
		"Resize(256)|CenterCrop(224)|fp32|nchw|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))":                    rs + "|CenterCrop(size=(224, 224))|fp32|nchw|Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))|pillow(9.4)",
		"Resize(256)|CenterCrop(224)|Normalize(std=(0.229,0.224,0.225),mean=(485e-3,0.456,0.406), inplace=True)|fp32": rs + "|CenterCrop(size=(224, 224))|fp32|nchw|Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))|pillow(9.4)",
		"Resize((10, 20), 'bilinear')|bf16":                                                                           "Resize(size=(10, 20), interpolation='bilinear', max_size=None, antialias=True)|bf16|nchw|pillow(9.4)",
		"CenterCrop(3)|v2|Normalize((1,),(2,),dtype='bf16')|fp32": "CenterCrop(size=(3, 3))|fp32|nchw|" +
			"Normalize(mean=(1.0, 1.0, 1.0), std=(2.0, 2.0, 2.0), dtype='bf16')|v2|pillow(9.4)",
		"Resize(10, max_size=12)|CenterCrop([8,9])|RandomHorizontalFlip(1)|fp16|Normalize([-0.0],(2,))": "Resize(size=10, interpolation='bilinear', max_size=12, antialias=True)|CenterCrop(size=(8, 9))|RandomHorizontalFlip(p=1.0)|fp16|nchw|Normalize(mean=(0.0, 0.0, 0.0), std=(2.0, 2.0, 2.0))|pillow(9.4)",
		"raw": "raw",
		"RandomResizedCrop(9, interpolation='bicubic')|pillow(13)|dct": "RandomResizedCrop(size=(9, 9), " +
			"scale=(0.08, 1.0), ratio=(0.75, 1.3333333333333333), interpolation='bicubic', " +
			"antialias=True)|uint8|nchw|dct|pillow(13)",
		"Resize((9, 8), InterpolationMode.NEAREST)|pillow(13.0)": "Resize(size=(9, 8), " +
			"interpolation='nearest', max_size=None, antialias=True)|uint8|nchw|pillow(13)",
		"RandomCrop(32, 4)|RandomVerticalFlip()": "RandomCrop(size=(32, 32), " +
			"padding=(4, 4, 4, 4), pad_if_needed=False, fill=(0, 0, 0), " +
			"padding_mode='constant')|RandomVerticalFlip(p=0.5)|uint8|nchw|pillow(9.4)",
		"Pad((1,2), 7.9, 'edge')|CenterCrop(3)": "Pad(padding=(1, 2, 1, 2), fill=(7, " +
			"7, 7), padding_mode='edge')|CenterCrop(size=(3, 3))|uint8|nchw|pillow(9.4)",
		"RandomRotation(15, expand=True, center=(3, 4.5))|CenterCrop(3)": "RandomRotation(degrees=(-15.0, " +
			"15.0), interpolation='nearest', expand=True, center=(3.0, 4.5), fill=(0, 0, 0))|CenterCrop(size=(3, " +
			"3))|uint8|nchw|pillow(9.4)",
		"CenterCrop(3)|ColorJitter(0.4, 0.4, (0, 2), 0.1)|RandomGrayscale()": "CenterCrop(size=(3, " +
			"3))|ColorJitter(brightness=(0.6, 1.4), contrast=(0.6, 1.4), saturation=(0.0, 2.0), hue=(-0.1, " +
			"0.1))|RandomGrayscale(p=0.1)|uint8|nchw|pillow(9.4)",
		"CenterCrop(3)|Grayscale(3)|GaussianBlur(23)|GaussianBlur((3, 5), 2)": "CenterCrop(size=(3, " +
			"3))|Grayscale(num_output_channels=3)|GaussianBlur(kernel_size=(23, 23), sigma=(0.1, " +
			"2.0))|GaussianBlur(kernel_size=(3, 5), sigma=(2.0, 2.0))|uint8|nchw|pillow(9.4)",
		"CenterCrop(3)|RandAugment(fill=[1,2,3])|TrivialAugmentWide(interpolation='bilinear')|AutoAugment()": "CenterCrop(size=(3, 3))|RandAugment(num_ops=2, magnitude=9, num_magnitude_bins=31, interpolation='nearest', fill=(1, 2, 3))|" +
			"TrivialAugmentWide(num_magnitude_bins=31, interpolation='bilinear', fill=(0, 0, " +
			"0))|AutoAugment(policy='imagenet', interpolation='nearest', fill=(0, 0, 0))|uint8|nchw|pillow(9.4)",
		"CenterCrop(3)|AutoAugment(AutoAugmentPolicy.SVHN)": "CenterCrop(size=(3, 3))|AutoAugment(policy='svhn', " +
			"interpolation='nearest', fill=(0, 0, 0))|uint8|nchw|pillow(9.4)",
		"CenterCrop(3)|RandomInvert()|RandomAutocontrast()|RandomEqualize(1)|RandomPosterize(2)|RandomSolarize(192)|RandomAdjustSharpness(2)": "CenterCrop(size=(3, 3))|RandomInvert(p=0.5)|RandomAutocontrast(p=0.5)|RandomEqualize(p=1.0)|RandomPosterize(bits=2, p=0.5)|" +
			"RandomSolarize(threshold=192.0, p=0.5)|RandomAdjustSharpness(sharpness_factor=2.0, " +
			"p=0.5)|uint8|nchw|pillow(9.4)",
		"CenterCrop(3)|RandomApply([GaussianBlur(3), RandomGrayscale()], 0.8)|RandomChoice([RandomSolarize(128), " +
			"RandomInvert(1)], [1, 2])|RandomChoice([RandomEqualize()])": "CenterCrop(size=(3, 3))|" +
			"RandomApply(transforms=[GaussianBlur(kernel_size=(3, 3), sigma=(0.1, 2.0)), RandomGrayscale(p=0.1)], " +
			"p=0.8)|" +
			"RandomChoice(transforms=[RandomSolarize(threshold=128.0, p=0.5), RandomInvert(p=1.0)], p=(1.0, " +
			"2.0))|RandomChoice(transforms=[RandomEqualize(p=0.5)], p=None)|uint8|nchw|pillow(9.4)",
		"CenterCrop(3)|RandomErasing()|fp32|MixUp(0.2)": "CenterCrop(size=(3, 3))|fp32|nchw|RandomErasing(p=0.5, " +
			"scale=(0.02, 0.33), ratio=(0.3, 3.3), value=(0.0, 0.0, 0.0))|MixUp(alpha=0.2, " +
			"num_classes=None)|pillow(9.4)",
		"CenterCrop(3)|RandomChoice([MixUp(alpha=0.2, num_classes=10), CutMix(num_classes=10)], p=[1, 0.5])": "CenterCrop(size=(3, 3))|uint8|nchw|" +
			"RandomChoice(transforms=[MixUp(alpha=0.2, num_classes=10), CutMix(alpha=1.0, num_classes=10)], p=(1.0, " +
			"0.5,))|pillow(9.4)",
	} {
		tr := compile(t, spec)
		if got := tr.String(); got != want {
			t.Errorf("%s\n got %s\nwant %s", spec, got, want)
		}
		if again := compile(t, want); again.String() != want || again.Hash() != tr.Hash() {
			t.Errorf("the canonical form of %s does not compile to itself", spec)
		}
	}
	const hash = "51981aac660df1d78731c8a0fc2d45f4295a723490c1472f0c32b5d4f064ea17"
	if got := compile(t, "RandomResizedCrop(224)|RandomHorizontalFlip()").Hash(); got != hash {
		t.Errorf("hash %s, was %s: this breaks every resume", got, hash)
	}
}

func TestSpecErrors(t *testing.T) {
	for _, c := range []struct {
		spec string
		pos  int
		says string
	}{
		{"", 0, "expected an operation, found the end"},
		{"|", 0, "expected an operation, found '|'"},
		{"RandomResizedCrop(224)|", 23, "expected an operation"},
		{"RandomResizeCrop(224)", 0, "did you mean RandomResizedCrop?"},
		{"resize(224)|CenterCrop(3)", 0, "did you mean Resize?"},
		{"Resize(256)|CentreCrop(224)", 12, "did you mean CenterCrop?"},
		{"Blur(3)", 0, "known: "},
		{"CenterCrop(3)|ToTensor()", 14, "write fp32"},
		{"CenterCrop(3)|float32", 14, "write fp32"},
		{"CenterCrop(3)|fp33", 14, "did you mean fp32?"},
		{"Resize(256),CenterCrop(224)", 11, "separated by |"},
		{"Resize(256", 10, "expected , or )"},
		{"Resize(256 4)", 11, "expected , or )"},
		{"Resize(256|", 10, "expected , or )"},
		{"Resize((256,4)", 14, "expected , or )"},
		{"Resize((256", 11, "expected , or )"},
		{"Resize()", 0, "needs size: write Resize(224)"},
		{"CenterCrop|fp32", 0, "needs size"},
		{"Resize(sise=3)", 7, "did you mean size?"},
		{"Resize(3, size=4)", 10, "given twice"},
		{"Resize(size=4, 3)", 15, "positional argument after a keyword"},
		{"CenterCrop(3, 4)", 14, "at most 1"},
		{"CenterCrop((3, 4, 5))", 11, "(height, width)"},
		{"CenterCrop(3.5)", 11, "number of pixels"},
		{"CenterCrop(0)", 11, "number of pixels"},
		{"CenterCrop(-3)", 11, "number of pixels"},
		{"CenterCrop(99999999999999999999)", 11, "not a number in range"},
		{"CenterCrop(0x10)", 11, "not a decimal number"},
		{"CenterCrop(1_000)", 11, "not a decimal number"},
		{"CenterCrop('a)", 11, "unterminated string"},
		{"CenterCrop(None)", 11, "not None"},
		{"CenterCrop(?)", 11, "found '?'"},
		{"Resize((3,4), max_size=9)", 23, "requires a size that is one number"},
		{"Resize(3, max_size=3)|CenterCrop(3)", 19, "must exceed size"},
		{"Resize(3, interpolation='lanczos')", 24, "interpolation must be 'bilinear'"},
		{"Resize(3, antialias=False)", 20, "antialias=True"},
		{"RandomResizedCrop(3, scale=(0.5, 0.2))", 27, "0 < min <= max <= 1"},
		{"RandomResizedCrop(3, scale=(0.5, 1.5))", 27, "not (0.5, 1.5)"},
		{"RandomResizedCrop(3, scale=(0.0, 1))", 27, "0 < min"},
		{"RandomResizedCrop(3, ratio=1)", 27, "(min, max)"},
		{"RandomResizedCrop(3, ratio=(1, 'x'))", 27, "(min, max)"},
		{"CenterCrop(3)|RandomHorizontalFlip(1.5)", 35, "probability"},
		{"Resize(256)", 0, "could not form a batch: add CenterCrop(224)"},
		{"RandomHorizontalFlip()|fp32", 23, "could not form a batch"},
		{"uint8", 0, "could not form a batch"},
		{"CenterCrop(3)|fp32|fp16", 19, "one type is enough"},
		{"CenterCrop(3)|nchw|nhwc", 19, "one layout is enough"},
		{"CenterCrop(3)|fp32|Resize((2,2))", 19, "operations come before"},
		{"CenterCrop(3)|fp32()", 14, "takes no arguments"},
		{"CenterCrop(3)|Normalize((1,1,1),(1,1,1))", 14, "add fp32"},
		{"CenterCrop(3)|fp32|Normalize((1,1),(1,1,1))", 29, "tuple of 3"},
		{"CenterCrop(3)|fp32|Normalize((1,1,1),(1,0,1))", 40, "std no 0"},
		{"CenterCrop(3)|fp32|Normalize((1,1,1),(1,1e-50,1))", 40, "std no 0"},
		{"CenterCrop(3)|fp32|Normalize((1,1e39,1),(1,1,1))", 32, "finite"},
		{"CenterCrop(3)|fp32|Normalize((1,1,1))", 19, "needs std"},
		{"CenterCrop(3)|fp32|Normalize((1,1,1),(1,1e-9,1),dtype='fp16')", 40, "std no 0"},
		{"CenterCrop(3)|fp32|Normalize((7e4,),(1,),dtype='fp16')", 30, "finite numbers of fp16"},
		{"CenterCrop(3)|fp32|Normalize((1,),(1,),dtype='int8')", 45, "'fp32', 'fp16', 'bf16'"},
		{"CenterCrop(3)|v2(1)", 14, "takes no arguments"},
		{"CenterCrop(3)|pillow(12)", 21, "Pillow 9.4 and 13"},
		{"CenterCrop(3)|pillow('13')", 21, "Pillow 9.4 and 13"},
		{"CenterCrop(3)|dct(1)", 14, "takes no arguments"},
		{"CenterCrop(3)|dct|dct", 18, "one way to decode is enough"},
		{"RandomRotation(15, expand=True)", 0, "could not form a batch"},
		{"RandomRotation(-3)|CenterCrop(3)", 15, "degrees must be a number"},
		{"RandomRotation(3, center=3)|CenterCrop(3)", 25, "center must be None or (x, y)"},
		{"RandomRotation(3, expand=1)|CenterCrop(3)", 25, "expand must be True or False"},
		{"Pad(-1)|CenterCrop(3)", 4, "padding must be in pixels"},
		{"Pad((1,2,3))|CenterCrop(3)", 4, "padding must be one number"},
		{"Pad(1, fill=256)|CenterCrop(3)", 12, "from 0 to 255"},
		{"Pad(1, fill=(1,2))|CenterCrop(3)", 12, "fill must be None"},
		{"Pad(1, padding_mode='wrap')|CenterCrop(3)", 20, "'reflect' or 'symmetric'"},
		{"Pad()|CenterCrop(3)", 0, "write Pad(4)"},
		{"CenterCrop(3)|ColorJitter(-1)", 26, "brightness must be a number"},
		{"CenterCrop(3)|ColorJitter(hue=0.6)", 30, "hue must be one number from 0 to 0.5"},
		{"CenterCrop(3)|ColorJitter(hue=(-0.6, 0))", 30, "-0.5 <= min"},
		{"CenterCrop(3)|ColorJitter(contrast=(2, 1))", 35, "0 <= min <= max"},
		{"CenterCrop(3)|Grayscale()", 14, "write Grayscale(3)"},
		{"CenterCrop(3)|GaussianBlur(4)", 27, "odd number"},
		{"CenterCrop(3)|GaussianBlur(3, 0)", 30, "sigma must be (min, max)"},
		{"CenterCrop(3)|GaussianBlur(3)|Grayscale(3)|RandomAdjustSharpness(2)", 43, "put it before GaussianBlur"},
		{"CenterCrop(3)|RandAugment(magnitude=31)", 36, "from 0 to 30"},
		{"CenterCrop(3)|RandAugment(17)", 26, "from 0 to 16"},
		{"CenterCrop(3)|RandAugment(interpolation='box')", 40, "interpolation must be"},
		{"CenterCrop(3)|TrivialAugmentWide(1)", 33, "from 2 to 1024"},
		{"CenterCrop(3)|AutoAugment('coco')", 26, "'svhn'"},
		{"CenterCrop(3)|RandomPosterize(9)", 30, "from 0 to 8"},
		{"CenterCrop(3)|RandomPosterize(1.5)", 30, "from 0 to 8"},
		{"CenterCrop(3)|RandomSolarize()", 14, "needs threshold"},
		{"CenterCrop(3)|RandomErasing(value='random')", 34, "value must be one number"},
		{"CenterCrop(3)|RandomErasing(value=-1)", 34, "0 to 255 for uint8"},
		{"CenterCrop(3)|RandomErasing(scale=(0.5, 2))", 34, "scale must be (min, max)"},
		{"CenterCrop(3)|RandomErasing()|CenterCrop(2)", 30, "operations come before"},
		{"CenterCrop(3)|MixUp(alpha=0)", 26, "alpha must be a number"},
		{"CenterCrop(3)|MixUp()|CutMix()", 22, "one mixing is enough"},
		{"CenterCrop(3)|RandomChoice([])", 27, "transforms must be a list"},
		{"CenterCrop(3)|RandomChoice([MixUp(), CenterCrop(2)])", 37, "between MixUp(...) and CutMix(...)"},
		{"CenterCrop(3)|RandomChoice([RandomGrayscale()], p=[0])", 50, "p must not be 0 for all"},
		{"CenterCrop(3)|RandomChoice([RandomGrayscale()], p=[1, 2])", 50, "a probability for each"},
		{"CenterCrop(3)|RandomChoice([CenterCrop(2), CenterCrop(4)])", 14, "could not form a batch"},
		{"CenterCrop(3)|RandomApply([CenterCrop(2)])", 14, "could not form a batch"},
		{"CenterCrop(3)|RandomApply()", 14, "needs transforms: write RandomApply([RandomGrayscale(0.2), ...])"},
		{"CenterCrop(3)|RandomApply([])", 26, "a list of 1 to 32 operations"},
		{"CenterCrop(3)|RandomApply(RandomGrayscale())", 26, "a list of 1 to 32 operations"},
		{"CenterCrop(3)|RandomApply([RandomGrayscale])", 27, "single operations with their arguments"},
		{"CenterCrop(3)|RandomApply([RandomApply([RandomGrayscale()])])", 27, "single operations with their arguments"},
		{"CenterCrop(3)|RandomApply([MixUp()])", 27, "single operations with their arguments"},
		{"CenterCrop(3)|RandomApply([GaussianBlur(2)])", 40, "odd number"},
		{"CenterCrop(3)|RandomApply([RandomGrayscale(q=1)])", 43, "has no argument q"},
		{"CenterCrop(3)|RandomApply([RandomGrayscale()], p=2)", 49, "probability"},
		{"CenterCrop(3)|GaussianBlur(3, p=0.5)", 30, "write RandomApply([GaussianBlur(...)], p=...)"},
		{"CenterCrop(3)|RandomApply([GaussianBlur(3)])|RandomApply([RandomAdjustSharpness(2)])", 45,
			"put it before GaussianBlur"},
		{"Detection()|views([CenterCrop(3)])", 0, "it comes first"},
		{"CenterCrop(4)|views([CenterCrop(3)])", 14, "in place of the operations"},
		{"CenterCrop(3)|RandomChoice([MixUp(), CutMix(num_classes=3)])", 37, "num_classes must be the same"},
		{"CenterCrop(3)|RandomChoice([MixUp(), CutMix()], p=[1])", 50, "a probability for each"},
		{"CenterCrop(3)|RandomChoice([MixUp(beta=2)])", 34, "MixUp has no argument beta"},
		{"CenterCrop(3)|RandomChoice([MixUp(alpha=2)", 42, "expected , or ]"},
		{"CenterCrop(3)|MixUp(alpha=f(f(f(f(f(1))))))", 35, "expected , or )"},
		{"CenterCrop(3)|raw", 14, "stands alone"},
		{"raw|CenterCrop(3)", 4, "stands alone"},
		{"raw()", 0, "no arguments"},
		{"CenterCrop(16384)|fp32", 0, "limits"},
		{strings.Repeat("CenterCrop(3)|", 33) + "fp32", 32 * 14, "more than 32"},
		{strings.Repeat(" ", 5000), 4096, "the limit is 4096"},
		{"CenterCrop(((((((3)))))))", 15, "expected a number"},
	} {
		_, err := Compile(c.spec)
		var se *SpecError
		if !errors.As(err, &se) {
			t.Errorf("%q: %v is no SpecError", c.spec, err)
			continue
		}
		if !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q: %q does not say %q", c.spec, err, c.says)
		}
		if se.Pos != c.pos {
			t.Errorf("%q: position %d, want %d (%v)", c.spec, se.Pos, c.pos, err)
		}
	}
}

func TestSpecErrorText(t *testing.T) {
	_, err := Compile("Resize(256)|CentreCrop(224)")
	var se *SpecError
	if !errors.As(err, &se) || se.Pos != 12 || se.Len != 10 {
		t.Fatalf("%#v", err)
	}
	if got, want := err.Error(),
		"transform, column 13: unknown operation CentreCrop: did you mean CenterCrop?"; got != want {
		t.Errorf("%s", got)
	}
}

// FuzzCompile checks that the parser never panics, that errors point into the text, and that what compiles has a
// canonical form that compiles to itself.
func FuzzCompile(f *testing.F) {
	for _, s := range []string{
		"RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nhwc",
		"Resize(256, max_size=300)|CenterCrop(224)|fp32|nchw|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))",
		"RandomResizedCrop(size=[3,4],scale=(1e-2,.5),ratio=(0.1,3),interpolation='bilinear')|bf16|pillow(9.4)",
		"RandomCrop(32, 4, True, (1, 2, 3), 'reflect')|ColorJitter(0.4, hue=(-.1, " +
			"0.2))|RandAugment()|RandomErasing(value=(1,2,3))|RandomChoice([MixUp(alpha=.2), CutMix()], p=[1, " +
			"2])|dct|pillow(13)",
		"Pad(3)|RandomRotation((-3, 4), 'bicubic', True, (1, " +
			"2))|GaussianBlur(3)|CenterCrop(9)|TrivialAugmentWide()|AutoAugment('svhn')",
		"CenterCrop(3)|RandomApply([GaussianBlur((3, 5)), Pad((1, 2), 3)], p=.8)|RandomChoice([RandomSolarize(128), " +
			"CenterCrop(3)], [1, 2])|CenterCrop(3)",
		"views(2x[RandomResizedCrop(9)|RandomHorizontalFlip()], [CenterCrop(3)|RandomApply([RandomGrayscale()])], " +
			"32x[Resize((3, 4))])|bf16|RandomErasing()|v2",
		"raw", "Resize((1,),antialias=None)|CenterCrop((2))", "Resize(3.|'", "CenterCrop(1e5", "é(",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		tr, err := New(s)
		if err != nil {
			var se *SpecError
			if !errors.As(err, &se) || se.Pos < 0 || se.Pos > len(s) || se.Len < 1 {
				t.Errorf("%q: %#v", s, err)
			}
			return
		}
		again, err := New(tr.String())
		if err != nil || again.String() != tr.String() || !reflect.DeepEqual(again.Fields(), tr.Fields()) {
			t.Errorf("%q becomes %q, which gives %v", s, tr, err)
		}
	})
}
