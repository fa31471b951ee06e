package objstore_test

import (
	"math"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/objstore"
)

func TestPrices(t *testing.T) {
	r := objstore.Requests{Get: 1_000_000, Head: 1000, List: 2000, Put: 500, Delete: 9999, Received: 10e9, Sent: 1e9}
	for text, want := range map[string]float64{
		"get=0.0004/1000,list=0.005/1000,gb=0.09,currency=USD": 0.4 + 0.0004 + 0.01 + 0.0025 + 0.9,
		"gb=0.09":                       0.9,
		" gib = 0.09 , currency = EUR ": 0.09 * 10e9 / (1 << 30),
		"get=1e-6,head=0,put=0,list=1":  1 + 2000,
		"get=0":                         0,
		"":                              0,
	} {
		p, err := objstore.ParsePrices(text)
		if err != nil || math.Abs(p.Of(r)-want) > 1e-9 || p.IsZero() != (text == "") {
			t.Errorf("%q: %+v costs %v, want %v; %v", text, p, p.Of(r), want, err)
		}
		if strings.Contains(text, "EUR") != (p.Currency == "EUR") {
			t.Errorf("%q: currency %q", text, p.Currency)
		}
	}
	for text, want := range map[string]string{
		"get": "is not a price", "fetch=1": "the keys are", "get=x": "not a number", "get=1/0": "0 or more",
		"get=-1": "0 or more", "get=NaN": "0 or more", "get=Inf": "0 or more",
		"get=1,get=2": "twice", "gb=1,gib=1": "twice", "currency=USD": "no price is given",
		"get=1,currency=": "not a currency", "get=1,currency=a b": "not a currency", ",": "is not a price",
		"get=1/x": "not a number",
	} {
		if _, err := objstore.ParsePrices(text); err == nil || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "gb=0.09") {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func FuzzParsePrices(f *testing.F) {
	for _, s := range []string{"get=0.0004/1000,list=0.005/1000,gb=0.09,currency=USD", "gib=1", "get=1/1e-300",
		"currency=€,put=0x1p-2", ",,", "get=1e309"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := objstore.ParsePrices(text)
		if err != nil {
			return
		}
		got := p.Of(objstore.Requests{Get: 1 << 40, Head: 1 << 40, List: 1 << 40, Put: 1 << 40, Received: 1 << 60})
		if math.IsNaN(got) || math.IsInf(got, 0) || got < 0 {
			t.Errorf("%q: %v", text, got)
		}
	})
}
