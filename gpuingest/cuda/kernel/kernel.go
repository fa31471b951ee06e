// Package kernel holds the fused device kernel as PTX, from which a driver makes machine code for its device.
//
// finish.cu documents it. It has six entry points, by size of an element and layout: Name.
package kernel

import (
	"fmt"

	"github.com/shoalfs/shoal/python"
)

//go:generate go run generate.go

// PTX is the module, compiled from finish.cu: for compute capability 5.0 and newer, and drivers since 384 (CUDA 9).
var PTX = python.FinishPTX

// Name returns the entry point for elements of elem bytes (1, 2 or 4) in layout nchw or nhwc.
//
// Its parameters, in order: (dst, src, rows, table uint64; n, h, w, srcH, srcW uint32). A thread computes four pixels
// of a line; any grid of one-dimensional blocks works.
func Name(elem int, layout string) string { return fmt.Sprintf("shoal_finish_u%d_%s", 8*elem, layout) }
