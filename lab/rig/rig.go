// Package rig is the test rig: what stands in for the world outside Shoal when it is tested,
// measured and shown. It is real where that matters and scripted where it must be.
//
// Only bench, demo, shoal-lab and tests import it. The server, the proxy and the daemon under test each
// belong in a process of their own: they share the cores anyway, but a figure for "the daemon"
// must not contain the rig's allocations, threads and garbage collection.
package rig
