package objstore

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Requests counts requests to a store and bytes received from it, as they are charged.
type Requests struct {
	Get      int64 `json:"get"`            // of objects, whole or in part
	Head     int64 `json:"head"`           // and all other questions
	List     int64 `json:"list"`           // pages of listings, of objects, versions or uploads
	Put      int64 `json:"put"`            // PUT and POST: objects, parts, the beginning and the end of uploads
	Delete   int64 `json:"delete"`         // and ended uploads
	Received int64 `json:"received_bytes"` // of objects, even if the read failed in the end
	Sent     int64 `json:"sent_bytes"`     // of objects
}

// Plus returns the sum.
func (r Requests) Plus(o Requests) Requests {
	return Requests{r.Get + o.Get, r.Head + o.Head, r.List + o.List, r.Put + o.Put, r.Delete + o.Delete,
		r.Received + o.Received, r.Sent + o.Sent}
}

// Minus returns the difference.
func (r Requests) Minus(o Requests) Requests {
	return Requests{r.Get - o.Get, r.Head - o.Head, r.List - o.List, r.Put - o.Put, r.Delete - o.Delete,
		r.Received - o.Received, r.Sent - o.Sent}
}

// RequestsOf returns the requests to a store; zeros for a store without charges, such as a folder.
func RequestsOf(r Reader) Requests {
	if c, ok := r.(charged); ok {
		return c.Requests()
	}
	return Requests{}
}

// charged is implemented by stores that charge for requests.
type charged interface{ Requests() Requests }

// Prices are the charges of a store. The zero value means none.
type Prices struct {
	Get, Head, List, Put float64 // a request
	Byte                 float64 // received
	Currency             string  // empty: no prices
}

// IsZero reports whether there are none.
func (p Prices) IsZero() bool { return p.Currency == "" }

// Of returns the cost of requests.
func (p Prices) Of(r Requests) float64 {
	return p.Get*float64(r.Get) + p.Head*float64(r.Head) + p.List*float64(r.List) + p.Put*float64(r.Put) +
		p.Byte*float64(r.Received)
}

// ParsePrices reads prices such as get=0.0004/1000,list=0.005/1000,gb=0.09,currency=USD. The keys are get, head
// (default: as get), list, put (default: as list), each per request, or with /N per N requests; gb (10^9 bytes
// received) or gib (2^30); and currency (default USD). Empty text means no prices.
func ParsePrices(text string) (Prices, error) {
	if strings.TrimSpace(text) == "" {
		return Prices{}, nil
	}
	fail := func(format string, args ...any) (Prices, error) {
		return Prices{}, fmt.Errorf("%w (write get=0.0004/1000,list=0.005/1000,gb=0.09,currency=USD)",
			fmt.Errorf(format, args...))
	}
	p := Prices{Currency: "USD"}
	fields := map[string]*float64{"get": &p.Get, "head": &p.Head, "list": &p.List, "put": &p.Put, "gb": &p.Byte,
		"gib": &p.Byte}
	given := map[string]bool{}
	for _, part := range strings.Split(text, ",") {
		name, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		field := fields[name]
		switch {
		case !ok || field == nil && name != "currency":
			return fail("%.40q is not a price: the keys are get, head, list, put, gb, gib and currency", part)
		case given[name] || name == "gb" && given["gib"] || name == "gib" && given["gb"]:
			return fail("%s is given twice", name)
		}
		given[name] = true
		if name == "currency" {
			if !currency(value) {
				return fail("%.20q is not a currency", value)
			}
			p.Currency = value
			continue
		}
		v, err := parsePrice(value)
		if err != nil {
			return fail("%s=%.40s: %w", name, value, err)
		}
		switch name {
		case "gb":
			v /= 1e9
		case "gib":
			v /= 1 << 30
		}
		*field = v
	}
	if len(given) == 0 || len(given) == 1 && given["currency"] {
		return fail("no price is given")
	}
	if !given["head"] {
		p.Head = p.Get
	}
	if !given["put"] {
		p.Put = p.List
	}
	return p, nil
}

// parsePrice reads PRICE or PRICE/N.
func parsePrice(text string) (float64, error) {
	price, per, divided := strings.Cut(text, "/")
	v, err := strconv.ParseFloat(price, 64)
	n := 1.0
	if divided && err == nil {
		n, err = strconv.ParseFloat(per, 64)
	}
	switch v /= n; {
	case err != nil:
		return 0, errors.New("it is not a number")
	case math.IsNaN(v) || math.IsInf(v, 0) || v < 0 || n <= 0 || v > 1e9:
		return 0, errors.New("a price is 0 or more")
	}
	return v, nil
}

// currency reports whether s is a word of a few letters, or a sign.
func currency(s string) bool {
	return s != "" && len(s) <= 8 && !strings.ContainsFunc(s, func(r rune) bool {
		return r <= ' ' || r == '%' || r == '=' || r == 0x7f || r == 0xfffd
	})
}
