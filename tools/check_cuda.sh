#!/bin/sh
# Checks that the device code of CUDA files compiles and assembles for an architecture, with
# warnings as errors. The output is thrown away. Optimisation is low, so the large files take
# a tenth of the time. Host code is the same for every architecture: the build compiles it.
#
# Only files that are written for some architectures in one of their own headers are
# compiled, and one file for the headers that all have in common. --full: every file.
# Usage: check_cuda.sh NUMBER [--full], such as 80
set -eu
cd "$(dirname "$0")/.."
nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
[ -x "$nvcc" ] || nvcc=nvcc
plain=kernels/cuda/elementwise/cast.cu

# Whether a file, or a header of its own, names an architecture or an instruction.
differs() {
  read_by=$("${CXX:-g++}" -MM -MG -x c++ -Iruntime -Ikernels "$1") || return 0
  printf '%s\n' "$read_by" | tr -s ' \\\n' '\n' | grep '^kernels/' |
    grep -vE '/(common|programmatic)\.cuh$' |
    xargs grep -qE 'KVL_SM90\(|\<asm\>|__CUDA_ARCH__|cluster'
}

find kernels/cuda -name '*.cu' | LC_ALL=C sort | while read -r file; do
  if [ "${2-}" = --full ] || [ "$file" = "$plain" ] || differs "$file"; then
    echo "$file"
  fi
done | xargs -n 1 -P "$(nproc)" "$nvcc" -std=c++17 \
  -Iruntime -Ikernels -Werror all-warnings -Xcicc -O1 -Xptxas -O0 \
  -gencode "arch=compute_$1,code=sm_$1" -o /dev/null -cubin
