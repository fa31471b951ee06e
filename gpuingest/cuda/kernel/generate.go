//go:build ignore

// Generates finish.ptx, which is part of the Python package, from finish.cu with clang 14 (Debian: apt install clang).
package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"log"
	"os"
	"os/exec"
)

func main() {
	log.SetFlags(0)
	source, err := os.ReadFile("finish.cu")
	if err != nil {
		log.Fatal(err)
	}
	cmd := exec.Command("clang-14", "-x", "cuda", "--cuda-device-only", "--cuda-gpu-arch=sm_50", "-nocudainc",
		"-nocudalib",
		"-Xclang", "-target-feature", "-Xclang", "+ptx60", "-std=c++17", "-O2", "-Wall", "-Werror",
		"-Wno-unknown-cuda-version",
		"-S", "finish.cu", "-o", "-")
	cmd.Stderr = os.Stderr
	ptx, err := cmd.Output()
	if err != nil {
		log.Fatalf("%v: %v", cmd, err)
	}
	head := fmt.Sprintf("// Made by `go generate ./gpuingest/cuda/kernel` of finish.cu, SHA-256 %x.\n",
		sha256.Sum256(source))
	ptx = append([]byte(head), bytes.TrimSpace(ptx)...)
	ptx = append(ptx, '\n')
	if err := os.WriteFile("../../../python/shoal/finish.ptx", ptx, 0o644); err != nil {
		log.Fatal(err)
	}
}
