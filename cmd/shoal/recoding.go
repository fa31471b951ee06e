package main

import (
	"errors"
	"slices"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// jpegCoder is the codec of the cache: it is engine.Coder.
type jpegCoder struct{}

func (jpegCoder) Train(files [][]byte) ([]byte, error) {
	t, err := jpeg.TrainTables(slices.Values(files))
	if err != nil {
		return nil, err
	}
	return t.Bytes(), nil
}

func (jpegCoder) Learn(tables []byte) (func(dst, file []byte) ([]byte, bool), error) {
	usesNative()
	t, err := jpeg.ParseTables(tables)
	if err == nil {
		err = jpeg.Register(t)
	}
	if err != nil {
		return nil, err
	}
	return func(dst, file []byte) ([]byte, bool) {
		coded, err := t.Recode(dst, file)
		return coded, err == nil
	}, nil
}

func (jpegCoder) Decode(dst, coded []byte) ([]byte, error) {
	file, err := jpeg.Restore(dst, coded)
	if errors.Is(err, jpeg.ErrTooLarge) {
		err = &objstore.Error{Op: "restore", Kind: objstore.KindInvalid, Err: err, Remedy: "raise --memory"}
	}
	return file, err
}

func (jpegCoder) Form(coded []byte) [8]byte { return jpeg.RecodedTables(coded) }

func (jpegCoder) Name(tables []byte) [8]byte {
	t, err := jpeg.ParseTables(tables)
	if err != nil {
		return [8]byte{}
	}
	return t.ID()
}
