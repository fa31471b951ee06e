package engine

import "github.com/shoalfs/shoal/internal/audit"

// Audit returns the log of who opened what; nil, which takes events, too, if there is none.
func (h *Host) Audit() *audit.Log { return h.audit }

// openAudit opens the log. refused is why the host cannot be opened, if it cannot: that is written down.
func (h *Host) openAudit(refused error) error {
	if h.cfg.Audit.Path == "" {
		return nil
	}
	o := h.cfg.Audit
	o.Logger = h.log
	log, err := audit.Open(o)
	if err != nil {
		return err
	}
	h.audit = log.With(audit.Event{CacheDir: h.cfg.CacheDir})
	e := audit.Event{Event: "cache_open", Peer: audit.Self()}
	if h.key != nil {
		e.KeyID = h.key.SecretID()
	}
	if refused != nil {
		e.Outcome, e.Cause = "refused", refused.Error()
	}
	h.audit.Write(e)
	return nil
}
