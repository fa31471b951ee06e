package engine

import (
	"fmt"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Cost is the requests to the object store since the dataset was opened, their cost at the given prices, and the
// budget. All is zero for a folder.
type Cost struct {
	objstore.Requests
	Priced   bool                  `json:"priced"` // whether there are prices
	Amount   float64               `json:"amount"` // in Currency
	Currency string                `json:"currency,omitempty"`
	Budget   *objstore.BudgetStats `json:"budget,omitempty"` // nil without one
}

// Cost returns the counts.
func (e *Engine) Cost() Cost {
	var r objstore.Requests
	for _, of := range e.remotes() {
		r = r.Plus(objstore.RequestsOf(of.base))
	}
	if published := e.published.Load(); published != nil {
		r = r.Plus(objstore.RequestsOf(*published))
	}
	c := CostOf(r, e.cfg.Store.Prices)
	c.Budget = e.budget.Stats()
	return c
}

// CostOf returns the cost of requests at prices.
func CostOf(r objstore.Requests, p objstore.Prices) Cost {
	return Cost{Requests: r, Priced: !p.IsZero(), Amount: p.Of(r), Currency: p.Currency}
}

// Since returns the cost of the requests since before.
func (c Cost) Since(before Cost) Cost {
	c.Requests = c.Minus(before.Requests)
	c.Amount -= before.Amount
	return c
}

// String formats the requests, and their cost if there are prices.
func (c Cost) String() string {
	text := fmt.Sprintf("%s GETs, %s HEADs, %s LISTs, %s received",
		humanize.Comma(c.Get), humanize.Comma(c.Head), humanize.Comma(c.List),
		humanize.IBytes(uint64(max(0, c.Received))))
	if c.Put+c.Delete > 0 {
		text += fmt.Sprintf(", %s PUTs, %s DELETEs, %s sent",
			humanize.Comma(c.Put), humanize.Comma(c.Delete), humanize.IBytes(uint64(max(0, c.Sent))))
	}
	if c.Priced {
		text += ": " + humanize.FtoaWithDigits(c.Amount, costDigits) + " " + c.Currency
	}
	return text
}

// costDigits show a hundred GETs at S3's prices.
const costDigits = 5
