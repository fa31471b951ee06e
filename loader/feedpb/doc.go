// Package feedpb is the generated protocol of the batch feed, shoal.feed.v1, which feed.proto documents.
//
// Regenerate with protoc 3.21 (Debian 12's protobuf-compiler) and the plugins pinned in the tools
// module; the commands are below.
package feedpb

//go:generate go build -C ../../tools -o ../bin/ google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
//go:generate protoc --plugin=../../bin/protoc-gen-go --plugin=../../bin/protoc-gen-go-grpc --go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative feed.proto
