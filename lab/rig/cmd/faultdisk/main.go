// Command faultdisk mounts a folder as a disk that fails, fills up and hangs when it is told to.
//
//	faultdisk BACKING MOUNTPOINT
//
// It prints one line of JSON with the URL of its control server; see package lab/rig/faultdisk.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"

	"github.com/shoalfs/shoal/lab/rig/faultdisk"
)

func main() {
	if err := faultdisk.Main(os.Args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
