package s3

// SetCopySizes sets the size up to which objects are copied by one request, and the size of the parts of larger ones.
func SetCopySizes(most, part int64) { copyMost, copyPart = most, part }
