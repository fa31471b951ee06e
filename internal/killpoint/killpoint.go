// Package killpoint names the points at which a crash is most likely to expose a fault: between the steps of every
// commit. A build with the tag killpoints kills itself at the point that the environment names; in every other build
// a point costs nothing.
//
//	SHOAL_KILLPOINT=segment.append.payload:3   kill -9 at the third passing of that point
//	SHOAL_KILLPOINTS_LOG=FILE                  append the name of every point passed
//
// A name is the package, the operation, and the last completed step, such as segment.append.payload: the payload is
// written, the header is not.
package killpoint
