// Package killpoint names the moments at which a crash is most likely to show a fault: between the
// steps of every commit. A build with the tag killpoints kills itself at the one that the environment
// names; in every other build a point costs nothing.
//
//	SHOAL_KILLPOINT=segment.append.payload:3   kill -9 at the third passing of that point
//	SHOAL_KILLPOINTS_LOG=FILE                  append the name of every point passed
//
// A name is the package, the operation, and what has just been done, such as
// segment.append.payload: the payload was written, the header was not yet.
package killpoint
