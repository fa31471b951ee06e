package s3

import "github.com/shoalfs/shoal/cache/objstore"

// SetCopySizes sets the size up to which objects are copied by one request, and the size of the parts of larger ones.
func SetCopySizes(most, part int64) { copyMost, copyPart = most, part }

// SetWhole has u expect that the server knows checksums of whole objects.
func SetWhole(u objstore.Upload) { u.(*upload).whole = true }

// RemedyOf is the remedy for an error without an answer.
func (s *Store) RemedyOf(err error) string {
	v, _ := s.transportError(err)
	return v.remedy
}
