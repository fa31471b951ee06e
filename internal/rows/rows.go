// Package rows is what a feed and its transforms say to each other of one row of a batch: where it goes, which arrays
// it has, and the random numbers that it is made with. loader and gpuingest, which do not know each other, have these
// types under their own names.
package rows

// Field is one array of a batch beside label, id and valid: its row i is computed from sample i.
type Field struct {
	Name  string // lower case; the first field of a transform is "data"
	DType string // uint8, int32, int64, float32, ... as numpy names them; fp16, bf16 and fp32 are understood too
	Shape []int  // of a row, without the batch's dimension
	Bytes int    // of a row
}

// Sample is what a row is made from: a sample's bytes, and the files that belong to it.
type Sample struct {
	Data []byte
	// Part returns the file that belongs to the sample and has this extension, such as "json" or "cls": same folder,
	// same stem. It is nil without error if there is none. The data is valid until the row is made, and read-only. Its
	// errors do not make the sample bad. Part itself may be nil.
	Part func(ext string) ([]byte, error)
}

// Row is the destination of a sample.
type Row struct {
	Fields [][]byte // one for each field, of its Bytes; they hold garbage before
	Label  int64    // the dataset's label of the sample, -1 if it has none; may be changed

	Width, Height uint32 // of a picture as it is stored; a transform of pictures sets them
}
