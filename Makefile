# Shoal. `make` alone prints this help.

GO      ?= go
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
# One file that runs on any Linux: libjpeg and libc are linked in, names are looked up by Go itself.
BUILD   := -trimpath -tags netgo,osusergo -ldflags '-X main.version=$(VERSION) -linkmode=external -extldflags=-static'

# Go stamps the commit into what it builds, and fails where git does not answer (a checkout that
# belongs to another user, as in a container).
ifeq ($(shell git rev-parse HEAD 2>/dev/null),)
export GOFLAGS := $(shell $(GO) env GOFLAGS) -buildvcs=false
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup packages build demo check test lint fmt generate bench clean

help: ## print this help
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: packages bin/versitygw ## install what is missing (apt), fetch Go modules, build the pinned S3 server

packages:
	@GO='$(GO)' ./setup.sh

bin/versitygw: tools/go.mod | packages
	@mkdir -p bin
	@tools/tick "building versitygw (once, about 2 minutes)" $(GO) build -C tools -o ../bin/versitygw github.com/versity/versitygw/cmd/versitygw
	@touch $@

build: ## build bin/shoal
	@GO='$(GO)' ./setup.sh build
	@mkdir -p bin
	@tools/tick "building bin/shoal" $(GO) build $(BUILD) -o bin/shoal ./cmd/shoal

demo: setup build ## the main job on real photographs, end to end (about 2 minutes after set-up)
	bin/shoal demo --work-dir .demo

check: setup build lint test ## everything that CI runs

test: setup build ## all tests, with the race detector
	@tools/tick "testing, with the race detector" $(GO) test -race -timeout 20m ./...

lint: bin/golangci-lint ## go vet and the linters named in .golangci.yml
	@tools/tick "go vet" $(GO) vet ./...
	@tools/tick "golangci-lint" bin/golangci-lint run ./...

bin/golangci-lint: tools/lint/go.mod
	@mkdir -p bin
	@tools/tick "building golangci-lint (once, about 2 minutes)" $(GO) build -C tools/lint -o ../../bin/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	@touch $@

fmt: ## gofmt everything
	gofmt -w $$(git ls-files '*.go')

generate: ## regenerate the protocol's Go code (needs protoc: apt install protobuf-compiler)
	$(GO) generate ./loader/feedpb

bench: setup build ## the benchmarks of bench/README.md, side by side in one run
	$(GO) run ./bench/path

clean: ## remove what was built and the demo's data
	rm -rf bin .demo .bench
