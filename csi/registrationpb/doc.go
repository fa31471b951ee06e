// Package registrationpb is the kubelet's protocol for plugins of a node.
package registrationpb

//go:generate go build -C ../../tools -o ../bin/ google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
//go:generate protoc --plugin=../../bin/protoc-gen-go --plugin=../../bin/protoc-gen-go-grpc --go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative registration.proto
