#!/bin/sh
# Checks that the device code of every CUDA file compiles and assembles for an architecture,
# with warnings as errors. The output is thrown away. Optimisation is low, so the large files
# take a tenth of the time. Host code is the same for every architecture: the build compiles
# it.
# Usage: check_cuda.sh NUMBER, such as 80
set -eu
cd "$(dirname "$0")/.."
nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
[ -x "$nvcc" ] || nvcc=nvcc
find kernels/cuda -name '*.cu' -print0 | xargs -0 -n 1 -P "$(nproc)" "$nvcc" -std=c++17 \
  -Iruntime -Ikernels -Werror all-warnings -Xcicc -O1 -Xptxas -O0 \
  -gencode "arch=compute_$1,code=sm_$1" -o /dev/null -cubin
