// Command s3proxy puts latency, a bandwidth limit and scripted faults before an S3 server.
//
//	s3proxy --upstream http://127.0.0.1:9000 --latency 30ms --sigma 0.3 --fault 503:after=100,count=20
//
// It prints one line of JSON with its own URL and that of its control server; see package
// lab/rig/proxy.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

func main() {
	if err := proxy.Main(os.Args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
