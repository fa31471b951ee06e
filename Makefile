# Shoal. `make` alone prints this help.

GO      ?= go
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -X main.version=$(VERSION)

.DEFAULT_GOAL := help
.PHONY: help setup build demo check test lint fmt generate bench clean

help: ## print this help
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what is missing (apt), fetch Go modules, build the pinned S3 server
	@./setup.sh
	@test -x bin/versitygw || { echo "building versitygw (once, about 2 minutes)"; $(GO) build -C tools -o ../bin/versitygw github.com/versity/versitygw/cmd/versitygw; }

build: ## build bin/shoal
	@mkdir -p bin
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/shoal ./cmd/shoal

demo: setup build ## the main job on real photographs, end to end (about 4 minutes after set-up)
	bin/shoal demo --work-dir .demo

check: setup build lint test ## everything that CI runs

test: setup build ## all tests, with the race detector
	$(GO) test -race -timeout 20m ./...

lint: bin/golangci-lint ## go vet and the linters named in .golangci.yml
	$(GO) vet ./...
	bin/golangci-lint run ./...

bin/golangci-lint: tools/lint/go.mod
	@mkdir -p bin
	@echo "building golangci-lint (once, some minutes)"
	@$(GO) build -C tools/lint -o ../../bin/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint

fmt: ## gofmt everything
	gofmt -w $$(git ls-files '*.go')

generate: ## regenerate the protocol's Go code (needs protoc: apt install protobuf-compiler)
	$(GO) generate ./loader/feedpb

bench: setup build ## the benchmarks of bench/README.md, side by side in one run
	$(GO) run ./bench/path

clean: ## remove what was built and the demo's data
	rm -rf bin .demo .bench
