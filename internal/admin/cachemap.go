package admin

import (
	"encoding/json"
	"net/http"
	"strconv"

	"github.com/shoalfs/shoal/prefetch/engine"
)

// cacheMap answers GET /api/cachemap?cells=N: engine.CacheMap as JSON.
func (s *Server) cacheMap(w http.ResponseWriter, r *http.Request) {
	cells := engine.MaxMapCells
	if text := r.URL.Query().Get("cells"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > engine.MaxMapCells {
			http.Error(w, "cells="+strconv.Quote(text)+": give a number from 1 to "+strconv.Itoa(engine.MaxMapCells), http.StatusBadRequest)
			return
		}
		cells = n
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.o.CacheMap(cells)) // the client may be gone
}
