package testbed

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// Dataset is a made-up dataset: classes of files of random bytes, which nothing can compress or store
// once. It is the same for equal fields.
type Dataset struct {
	Name    string  // of the workload
	Samples int     //
	Size    int64   // mean bytes of a sample
	Sigma   float64 // standard deviation of a sample's bytes, as a part of Size
}

// Bucket holds all datasets.
const Bucket = "bench"

// perClass is how many files a folder holds.
const perClass = 500

// smallest is the least that a sample has, as a part of Size, where sizes vary.
const smallest = 0.05

// Prefix is where the dataset lies in the bucket. It names all that the content depends on.
func (d Dataset) Prefix() string {
	p := fmt.Sprintf("%s-%dx%d", d.Name, d.Samples, d.Size)
	if d.Sigma > 0 {
		p += fmt.Sprintf("-s%g", d.Sigma)
	}
	return p
}

// Source is the dataset as a verb takes it.
func (d Dataset) Source() string { return "s3://" + Bucket + "/" + d.Prefix() }

// Path returns a sample's path below Source. Sample numbers are those of the sorted paths.
func (d Dataset) Path(sample int) string {
	return fmt.Sprintf("c%05d/%07d.bin", sample/perClass, sample)
}

// SizeOf returns a sample's bytes: normally distributed, cut off at both ends, the same way that DLIO's
// record_length_stdev is meant, so that the mean stays Size.
func (d Dataset) SizeOf(sample int) int64 {
	if d.Sigma == 0 {
		return d.Size
	}
	rng := rand.New(rand.NewPCG(uint64(sample), 0x73697a65))
	limit := (1 - smallest) / d.Sigma
	for {
		if z := rng.NormFloat64(); math.Abs(z) <= limit {
			return int64(float64(d.Size) * (1 + d.Sigma*z))
		}
	}
}

// Bytes returns the size of all samples.
func (d Dataset) Bytes() (sum int64) {
	for s := range d.Samples {
		sum += d.SizeOf(s)
	}
	return sum
}

// fill writes a sample's content.
func fill(p []byte, sample int) {
	var seed [32]byte
	seed[0], seed[1], seed[2], seed[3] = byte(sample), byte(sample>>8), byte(sample>>16), byte(sample>>24)
	_, _ = rand.NewChaCha8(seed).Read(p) // never fails
}

// putWorkers is how many PUTs are in flight; putBytes, how many bytes of them.
const (
	putWorkers = 8
	putBytes   = 512 << 20
)

// Lay puts those objects of the dataset that are missing into the store. progress is called from several
// goroutines.
func (b *Bed) Lay(ctx context.Context, d Dataset, progress func(done, total int)) error {
	objects := make([]s3server.Object, d.Samples)
	for s := range objects {
		objects[s] = s3server.Object{Key: d.Prefix() + "/" + d.Path(s),
			Content: func(now minio.ObjectInfo) ([]byte, error) {
				size := d.SizeOf(s)
				if now.Size == size {
					return nil, nil
				}
				content := make([]byte, size)
				fill(content, s)
				return content, nil
			}}
	}
	_, err := b.Server.Fill(ctx, Bucket, d.Prefix(), objects,
		int(min(putWorkers, max(1, putBytes/(2*d.Size)))), progress)
	return err
}
